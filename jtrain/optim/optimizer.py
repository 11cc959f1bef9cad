"""Optimizer of a run: updates all parameters, one parameter, or one layer of a parameter."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jtrain.errors import UserError
from jtrain.layout.dims import ParamInfo
from jtrain.layout.layout import FIELDS, Layout, LayoutSpec
from jtrain.optim.decay_schedules import whole_steps
from jtrain.optim.expert_load import step_against_load
from jtrain.optim.newton_schulz import matrix_dims, orthogonal_step
from jtrain.optim.rounding import Noise, round_alone, to_bfloat16
from jtrain.optim.spec import AdamW, Muon
from jtrain.optim.state import (
    NAMES,
    Moments,
    ParamState,
    ParamTree,
    arrays,
    blocks,
    flatten_by_path,
    load_moment,
    nest,
    select_params,
    store_moment,
    uses_muon,
)
from jtrain.optim.update import Update


def mark_nonfinite(param: Array, leaf: ParamState) -> Array:
    """Returns `param`, NaN where its state is not finite: a count of its NaN then covers the moments too."""
    same_shape = [
        x for x in leaf.values() if x.shape == param.shape and jnp.issubdtype(x.dtype, jnp.floating)
    ]
    finite = functools.reduce(jnp.logical_and, map(jnp.isfinite, same_shape), jnp.asarray(True))
    nan = param * jnp.nan  # a constant would not be in host memory where the rest is
    return jnp.where(finite, param, nan)


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Spec bound to the length of the run and to its parameters; made by `build`. All methods are pure.

    params: tree of the `ParamInfo`s of all parameters.
    warmup: length of the warm-up, in steps.
    """

    spec: AdamW | Muon
    num_steps: int
    warmup: int
    params: ParamTree

    def learning_rate(self, step: int | Int[Array, ""]) -> Float[Array, ""]:
        """Learning rate of update `step` (0-based), f32; above 0 from the first update on."""
        step = jnp.asarray(step, jnp.int32)
        # Update 0 has rate peak / warmup, not 0: every update moves the parameters.
        rise = jnp.where(step + 1 < self.warmup, (step + 1) / max(self.warmup, 1), 1.0)
        decay = self.spec.schedule.decay(step, warmup=self.warmup, num_steps=self.num_steps)
        return (self.spec.peak_lr * rise * decay).astype(jnp.float32)

    def placed(self, layout: Layout) -> "Optimizer":
        """Returns the optimizer of the parameters in a layout's order, with a pipeline's padding."""
        if layout.pipeline is None:
            return self
        return dataclasses.replace(
            self, params=nest(self.params, {p.info.path: p.info for p in layout.trained})
        )

    @property
    def infos(self) -> dict[str, ParamInfo]:
        """All parameters by path."""
        return flatten_by_path(self.params, self.params)

    def state_map(self, fn: Callable[[ParamInfo, str], Any]) -> Moments:
        """State tree with `fn(info, name)` in place of every array; `name` is a field of `Moments`."""
        return self.state(
            {path: {n: fn(i, n) for n in arrays(self.spec, i)} for path, i in self.infos.items()}
        )

    def leaves(self, state: Moments) -> dict[str, dict[str, Any]]:
        """State of each parameter by path, as `update_param` takes it."""
        leaves_by_path: dict[str, dict[str, Any]] = {path: {} for path in self.infos}
        for name in NAMES:
            for path, value in flatten_by_path(self._with(name), getattr(state, name)).items():
                leaves_by_path[path][name] = value
        return leaves_by_path

    def state(self, leaves: dict[str, dict[str, Any]]) -> Moments:
        """Inverse of `leaves`."""
        fields = {
            name: nest(self._with(name), {path: leaf[name] for path, leaf in leaves.items() if name in leaf})
            for name in NAMES
        }
        return Moments(**fields)

    def init(self, params: ParamTree) -> Moments:
        """Initial state: zero moments, and master weights equal to `params`.

        With master weights, pass f32 `params` and round them afterwards. Under `jax.jit` with `out_shardings`
        nothing else is allocated.
        """
        values = flatten_by_path(self.params, params)

        def first_value(info: ParamInfo, name: str) -> Array:
            shape = arrays(self.spec, info)[name]
            return (
                values[info.path].astype(shape.dtype)
                if name == "master"
                else jnp.zeros(shape.shape, shape.dtype)
            )

        return self.state_map(first_value)

    def begin(
        self, grads: ParamTree, step: int | Int[Array, ""], *, norm: Float[Array, ""] | None = None
    ) -> Update:
        """Computes the scalars of update `step` that need all gradients, before any `update_param`.

        Args:
          norm: global norm of the gradients, if they cannot be read all at once because some are in host
            memory.
        """
        step = jnp.asarray(step, jnp.int32)
        if norm is None:
            by_path = flatten_by_path(self.params, grads).items()
            # The "gradient" of correction biases is a count of tokens: it must not clip the others.
            norm = optax.tree.norm(
                {k: _f32(grad) for k, grad in by_path if self.infos[k].update == "gradient"}
            )
        clip = self.spec.clip_norm
        # A NaN norm makes a NaN scale: the guard sees the norm and does not apply the update.
        scale = jnp.float32(1.0) if clip is None else jnp.minimum(1.0, clip / norm)
        # With b1=0.9 the first update scales its moment by 1 / (1 - 0.9^1) = 10.
        mu_scale, nu_scale = (1.0 / (1.0 - b ** (step + 1)) for b in (self.spec.b1, self.spec.b2))
        return Update(step, self.learning_rate(step), norm, scale, mu_scale, nu_scale, jnp.asarray(True))

    def update_param(
        self,
        update: Update,
        info: ParamInfo,
        grad: Array,
        param: Array,
        leaf: ParamState,
        *,
        layer: int | Array | None = None,
        start: tuple[int | Array, ...] | None = None,
    ) -> tuple[Array, ParamState]:
        """Updates one parameter, whole or in part, with bitwise the same result.

        Muon needs a layer's whole matrix; every other update also takes any slice (whole blocks with int8).

        Args:
          leaf: state of the parameter, from `leaves`.
          layer: place of the one layer of a stacked parameter that the arrays hold, without the leading
            dimension Y.
          start: inside a `shard_map`, the global index of the arrays' first element, one per dimension. Omit
            it at jit level, where arrays are global.

        Returns:
          New parameter and state, in the dtypes of the old ones. The parameter is NaN where a new array of
          its shape (a moment, a master weight) is NaN or infinite.
        """
        # An elementwise update of a stack is one fusion. Other updates loop over layers and overwrite one at
        # a time: vmap and map hold one or several f32 copies of the stack, 7 GiB for the gates of an 8B
        # model.
        by_layer = uses_muon(self.spec, info) or blocks(self.spec, info) is not None
        if layer is not None or not by_layer or not info.dims.startswith("Y"):
            return self._update_arrays(
                update, info, grad, param, leaf, Noise(info, update.step, layer, start)
            )
        # The stack's own start along Y is the number of its first layer in the whole parameter.
        first, *inner = start or (0,) * grad.ndim

        def update_layer(y: Int[Array, ""], carry: tuple[Array, ParamState]) -> tuple[Array, ParamState]:
            layer_arrays = jax.tree.map(
                lambda x: jax.lax.dynamic_index_in_dim(x, y, keepdims=False), (grad, *carry)
            )
            # Reads come before writes: otherwise XLA copies the whole stack once per layer (seen on the CPU).
            layer_grad, layer_param, layer_state = jax.lax.optimization_barrier(layer_arrays)
            new = self._update_arrays(
                update,
                info,
                layer_grad,
                layer_param,
                layer_state,
                Noise(info, update.step, first + y, tuple(inner)),
            )
            return jax.tree.map(lambda x, n: jax.lax.dynamic_update_index_in_dim(x, n, y, 0), carry, new)

        return jax.lax.fori_loop(0, grad.shape[0], update_layer, (param, leaf))

    def update(
        self, grads: ParamTree, state: Moments, params: ParamTree, step: int | Int[Array, ""]
    ) -> tuple[ParamTree, Moments, dict[str, Float[Array, ""]]]:
        """Updates all parameters.

        Runs at jit level on global arrays. Except for the norm and Muon's matrix products the result is
        bitwise independent of the layout: operations are elementwise and each is rounded by itself
        (`jtrain.optim.rounding.round_alone`).

        With params and state donated the update runs in place, if they are passed in the order in which they
        are returned: JAX pairs buffers of one shape by order, and another order costs a copy of each. Check
        `grad_norm` for non-finite gradients: the new parameters may be finite and still wrong.

        Args:
          grads: f32 or bf16, already averaged over the global batch.
          state: from `init` or the last update.
          params: f32 or bf16; computed in f32 and rounded once. In bf16 with nearest rounding and no master
            weights, a change below 2^-9 of the weight is lost.
          step: updates completed so far.

        Returns:
          New parameters and state in the dtypes of the old ones, and f32 metrics: `grad_norm`, the global
          norm before clipping, and `learning_rate`.
        """
        update = self.begin(grads, step)
        grad, param = (flatten_by_path(self.params, tree) for tree in (grads, params))
        leaves = self.leaves(state)
        for path, info in self.infos.items():
            param[path], leaves[path] = self.update_param(update, info, grad[path], param[path], leaves[path])
        return nest(self.params, param), self.state(leaves), update.metrics

    def _update_arrays(
        self, update: Update, info: ParamInfo, grad: Array, param: Array, leaf: ParamState, noise: Noise
    ) -> tuple[Array, ParamState]:
        """Updates a parameter, one layer of it or a slice, as `update_param` passes them.

        Computes in f32; `noise` knows the place of the arrays in the parameter. Every product that is added
        to something goes through `round_alone`: a compiler may otherwise fuse the two into one rounding,
        depending on the rest of the program, and the last bit would depend on the layout.
        """
        spec = self.spec
        if info.update == "expert_load":
            moved = step_against_load(grad, param, rate=info.load_step)
            return jnp.where(update.applied, moved, param), leaf
        mu = load_moment(spec, info, leaf, "mu")
        clipped = _f32(grad) * update.grad_scale
        if uses_muon(spec, info):
            assert isinstance(spec, Muon)
            direction, new_mu = orthogonal_step(spec, info, clipped, mu, update.step)
            moments = {"mu": new_mu}
        else:
            old = {"mu": mu}
            if "nu" in spec.moments:
                old["nu"] = load_moment(spec, info, leaf, "nu")
            # Moments average the gradient after clipping.
            direction, moments = spec.direction(clipped, old, update)
        new: ParamState = {}
        # Rounded only for storage: the direction above used the unrounded moments.
        for name, value in moments.items():
            new |= store_moment(spec, info, name, value, noise)
        # Master weights accumulate what bfloat16 would lose; the parameter is their rounded copy.
        p = _f32(leaf.get("master", param))
        # Norm scales are vectors and never decay.
        decay = spec.weight_decay if info.is_matrix else 0.0
        # Decoupled decay, as in AdamW: p - lr (direction + decay p), beside the moments.
        p = p - round_alone(update.learning_rate * (direction + round_alone(decay * p)))
        if "master" in leaf:
            new["master"] = p
        if spec.param_rounding == "stochastic":
            new_param = to_bfloat16(p, noise.bits("param", p.shape))
        else:
            new_param = p.astype(param.dtype)
        # A select in the same fusion as the update: no second copy of the state exists at any time.
        new_param, new = jax.tree.map(
            lambda n, o: jnp.where(update.applied, n, o), (new_param, new), (param, leaf)
        )
        # NaN in the parameter stands for any number of its state that is not finite, and is counted later.
        # After the select, so that the count sees the arrays that the state will hold.
        return mark_nonfinite(new_param, new), new

    def _with(self, name: str) -> ParamTree:
        """Parameters whose state has the array `name`."""
        return select_params(self.params, lambda info: name in arrays(self.spec, info))


def check_layout(spec: AdamW | Muon, layout: Layout) -> None:
    """Refuses a layout that does not fit the optimizer's state.

    Raises:
      UserError: an option of the optimizer has no effect for the dtype of the parameters, or shards of the
        mesh would cut int8 blocks.
    """
    spec.check_param_dtype(layout.precision.param_dtype)
    for p in layout.trained:
        precision = layout.precision
        is_float32 = (precision.param_dtype, precision.grad_accum_dtype) == ("float32", "float32")
        if p.info.update == "expert_load" and not is_float32:
            raise UserError(
                f"model.moe.bias_update_rate={p.info.load_step} with precision.param_dtype={precision.param_dtype}, "
                f"precision.grad_accum_dtype={precision.grad_accum_dtype}: a step of a bias, and a count of "
                "tokens, need float32. Set both to float32, or bias_update_rate=0."
            )
        blocking = blocks(spec, p.info)
        # Blocks lie along H or F: only F can be split, and by `tensor` alone.
        axis = None if blocking is None else p.optimizer_partition[len(p.info.shape) + blocking.dim]
        if blocking is None or axis is None:
            continue
        length, shards = p.info.shape[blocking.dim], layout.mesh.shape[axis]
        if length // shards % blocking.length:
            raise UserError(
                f"optimizer.moment_dtype=int8 keeps {p.info.path} in blocks of {blocking.length} along "
                f"{FIELDS[blocking.letter]}={length}, and mesh.{axis}={shards} would cut them: a shard has "
                f"{length // shards}. Set mesh.{axis} to a divisor of {length // blocking.length}, or "
                "optimizer.moment_dtype=bfloat16_sr."
            )


def build(spec: AdamW | Muon, *, num_steps: int, params: ParamTree) -> Optimizer:
    """Builds the optimizer of a run of exactly `num_steps` updates of `params`, a tree of `ParamInfo`, of
    which it leaves out the frozen ones.

    Raises:
      UserError: warm-up and decay together are longer than the run, or Muon cannot tell a matrix's inputs
        from its outputs.
    """
    if num_steps < 1:
        raise UserError(f"num_steps={num_steps} must be at least 1.")
    warmup = whole_steps(spec.warmup_steps, num_steps)
    decay = whole_steps(getattr(spec.schedule, "decay_steps", 0), num_steps)
    if warmup + decay > num_steps:
        with_decay = f" and optimizer.schedule.decay_steps={decay}" if decay else ""
        raise UserError(
            f"optimizer.warmup_steps={warmup}{with_decay} do not fit in num_steps={num_steps}. Set num_steps "
            f"to at least {warmup + decay}, or give them as fractions of the run: "
            "optimizer.warmup_steps=0.01."
        )
    trained = select_params(params, lambda info: not info.frozen)
    # Refused here, before anything is compiled.
    for info in jax.tree.leaves(trained):
        if uses_muon(spec, info):
            matrix_dims(info)
    return Optimizer(spec, num_steps, warmup, trained)


def _f32(x: Array) -> Array:
    return x.astype(jnp.float32)


def check_offload(spec: LayoutSpec, optimizer: AdamW | Muon) -> None:
    """Refuses to offload state that cannot be streamed.

    Raises:
      UserError: offloaded state of Muon, or stochastic rounding on the host's cores.
    """
    rounds_stochastically = (
        optimizer.moment_dtype in ("int8", "bfloat16_sr") or optimizer.param_rounding == "stochastic"
    )
    if spec.offload.update == "host" and rounds_stochastically:
        raise UserError(
            f"layout.offload.update=host with optimizer.moment_dtype={optimizer.moment_dtype} and "
            f"optimizer.param_rounding={optimizer.param_rounding}: stochastic rounding does not run on the "
            "host's cores. Set layout.offload.update=device, or optimizer.moment_dtype=float32 and "
            "param_rounding=nearest."
        )
    for field in ("optimizer", "gradients"):
        if isinstance(optimizer, Muon) and (share := getattr(spec.offload, field)) not in ("none", 0):
            raise UserError(
                f"layout.offload.{field}={share} with Muon: its update takes whole matrices, so no part of "
                f"its state or gradients can stream. Set layout.offload.{field}=none, or use AdamW."
            )
