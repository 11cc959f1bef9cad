"""The optimizer of a run: one update of all parameters, or of one parameter, or of one layer of it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jtrain.dims import ParamInfo
from jtrain.layout import FIELDS, Layout
from jtrain.optim.newton_schulz import matrix_dims, orthogonal_step
from jtrain.optim.rounding import Noise, apart, to_bfloat16
from jtrain.optim.schedule import whole_steps
from jtrain.optim.spec import AdamW, Muon
from jtrain.optim.state import (
    NAMES,
    Leaf,
    Moments,
    ParamTree,
    arrays,
    blocks,
    by_muon,
    by_path,
    kept,
    load,
    nested,
    stored,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Update:
    """What the update of one parameter must know of all gradients and of the step; f32 scalars, but for `step`.

    step: updates completed before this one, int32.
    grad_norm: of all gradients, before clipping.
    grad_scale: what clips them.
    mu_scale, nu_scale: 1 / (1 - b^(step + 1)), what corrects the moments for having begun at 0. Factors, not divisors:
      XLA may divide by a broadcast scalar or multiply by its inverse, as the rest of the program suggests, and then
      the last bit would depend on how parameters are handed in.
    """

    step: Any
    learning_rate: Any
    grad_norm: Any
    grad_scale: Any
    mu_scale: Any
    nu_scale: Any

    @property
    def metrics(self) -> dict[str, Array]:
        """Those of the step that come from here."""
        return {"grad_norm": self.grad_norm, "learning_rate": self.learning_rate}


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """A spec bound to the run's length and its parameters; made by `build`. Every method is pure.

    params: `ParamInfo`s of all parameters.
    warmup: length of the warm-up, in steps.
    """

    spec: AdamW | Muon
    num_steps: int
    warmup: int
    params: ParamTree

    def learning_rate(self, step: int | Int[Array, ""]) -> Float[Array, ""]:
        """Learning rate of update `step` (0-based), f32; above 0 from the first update on."""
        step = jnp.asarray(step, jnp.int32)
        rise = jnp.where(step + 1 < self.warmup, (step + 1) / max(self.warmup, 1), 1.0)
        decay = self.spec.schedule.decay(step, warmup=self.warmup, num_steps=self.num_steps)
        return (self.spec.peak_lr * rise * decay).astype(jnp.float32)

    @property
    def infos(self) -> dict[str, ParamInfo]:
        """Every parameter by its path."""
        return by_path(self.params, self.params)

    def state_map(self, fn: Callable[[ParamInfo, str], Any]) -> Moments:
        """`fn(info, name)` in the place of every array of the state; `name` is its field of `Moments`."""
        return self.state({path: {n: fn(i, n) for n in arrays(self.spec, i)} for path, i in self.infos.items()})

    def state_like(self, values: ParamTree) -> Moments:
        """One value per parameter (shardings, say), arranged like the state: the parameter's value for each array.

        A sharding that fits the parameter fits all of them, also the scales: they have its dimensions, one divided by
        the length of a block.
        """
        of = by_path(self.params, values)
        return self.state_map(lambda info, _: of[info.path])

    def leaves(self, state: Moments) -> dict[str, dict[str, Any]]:
        """The state of each parameter, by path: what `update_param` takes."""
        found: dict[str, dict[str, Any]] = {path: {} for path in self.infos}
        for name in NAMES:
            for path, value in by_path(self._with(name), getattr(state, name)).items():
                found[path][name] = value
        return found

    def state(self, leaves: dict[str, dict[str, Any]]) -> Moments:
        """The inverse of `leaves`."""
        fields = {
            name: nested(self._with(name), {path: leaf[name] for path, leaf in leaves.items() if name in leaf})
            for name in NAMES
        }
        return Moments(**fields)

    def init(self, params: ParamTree) -> Moments:
        """Zeros, and masters as `params`, which are unrounded then: draw them in f32, and round them afterwards.

        Under `jax.jit` with `out_shardings` nothing else is ever allocated.
        """
        values = by_path(self.params, params)

        def first(info: ParamInfo, name: str) -> Array:
            like = arrays(self.spec, info)[name]
            return values[info.path].astype(like.dtype) if name == "master" else jnp.zeros(like.shape, like.dtype)

        return self.state_map(first)

    def begin(self, grads: ParamTree, step: int | Int[Array, ""]) -> Update:
        """Everything of update `step` that takes all gradients; the parameters may come one by one after it."""
        step = jnp.asarray(step, jnp.int32)
        norm = optax.tree.norm({path: _f32(g) for path, g in by_path(self.params, grads).items()})
        clip = self.spec.clip_norm
        scale = jnp.float32(1.0) if clip is None else jnp.minimum(1.0, clip / norm)
        mu_scale, nu_scale = (1.0 / (1.0 - b ** (step + 1)) for b in (self.spec.b1, self.spec.b2))
        return Update(step, self.learning_rate(step), norm, scale, mu_scale, nu_scale)

    def update_param(
        self,
        update: Update,
        info: ParamInfo,
        grad: Array,
        param: Array,
        leaf: Leaf,
        *,
        layer: int | Array | None = None,
        start: tuple[int | Array, ...] | None = None,
    ) -> tuple[Array, Leaf]:
        """One update of one parameter, whole or in part; the same bits come out either way.

        Muon needs a layer's whole matrix; everything else also takes any slice (whole blocks, of int8).

        Args:
          leaf: of `leaves`.
          layer: the arrays are this one layer of a stacked parameter, without its leading dimension Y.
          start: inside a `shard_map`, the global index of the arrays' first element, one per dimension of theirs. At
            jit level arrays are global: leave it out.

        Returns:
          New parameter and state in their old dtypes.
        """
        # A stack is one fusion where everything is elementwise. Otherwise a loop that overwrites one layer at a time,
        # not a vmap or a map: those hold several f32 copies of the stack, or one of each, 7 GiB for the gates of an 8B.
        by_layer = by_muon(self.spec, info) or blocks(self.spec, info) is not None
        if layer is not None or not by_layer or not info.dims.startswith("Y"):
            return self._updated(update, info, grad, param, leaf, Noise(info, update.step, layer, start))
        first, *inner = start or (0,) * grad.ndim

        def one(y: Int[Array, ""], carry: tuple[Array, Leaf]) -> tuple[Array, Leaf]:
            of_layer = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, y, keepdims=False), (grad, *carry))
            # Read before anything is written: read later, the whole stack is copied, once per layer (seen on the CPU).
            g, p, kept_of_it = jax.lax.optimization_barrier(of_layer)
            new = self._updated(update, info, g, p, kept_of_it, Noise(info, update.step, first + y, tuple(inner)))
            return jax.tree.map(lambda x, n: jax.lax.dynamic_update_index_in_dim(x, n, y, 0), carry, new)

        return jax.lax.fori_loop(0, grad.shape[0], one, (param, leaf))

    def update(
        self, grads: ParamTree, state: Moments, params: ParamTree, step: int | Int[Array, ""]
    ) -> tuple[ParamTree, Moments, dict[str, Float[Array, ""]]]:
        """One update of all parameters.

        Runs at jit level on global arrays. But for the norm and Muon's matrix products it is bitwise independent of
        the layout: elementwise, every operation rounded for itself (`jtrain.optim.rounding.apart`).

        With params and state donated it runs in place, if they come in the order in which they are returned: JAX pairs
        buffers of one shape by their order, and another order costs a copy of each. Whether gradients were finite is
        for `grad_norm` to say: parameters may come out finite, and wrong, where they were not.

        Args:
          grads: f32 or bf16, already averaged over the global batch.
          state: from `init` or the last update.
          params: f32 or bf16. Computed in f32 and rounded once; in bf16, to nearest and without masters, a change
            below 2^-9 of the weight is lost.
          step: updates completed so far.

        Returns:
          New parameters and state in their old dtypes, and f32 scalars: `grad_norm`, the global norm before clipping,
          and `learning_rate`, the one used.
        """
        update = self.begin(grads, step)
        grad, param = (by_path(self.params, tree) for tree in (grads, params))
        leaves = self.leaves(state)
        for path, info in self.infos.items():
            param[path], leaves[path] = self.update_param(update, info, grad[path], param[path], leaves[path])
        return nested(self.params, param), self.state(leaves), update.metrics

    def _updated(
        self, update: Update, info: ParamInfo, grad: Array, param: Array, leaf: Leaf, noise: Noise
    ) -> tuple[Array, Leaf]:
        spec = self.spec
        mu = load(spec, info, leaf, "mu")
        clipped = _f32(grad) * update.grad_scale
        if by_muon(spec, info):
            assert isinstance(spec, Muon)
            direction, new_mu = orthogonal_step(spec, info, clipped, mu, update.step)
            moments = {"mu": new_mu}
        else:
            new_mu = _mean(clipped, mu, spec.b1)
            new_nu = _mean(clipped**2, load(spec, info, leaf, "nu"), spec.b2)
            direction = new_mu * update.mu_scale / (jnp.sqrt(new_nu * update.nu_scale) + spec.eps)
            moments = {"mu": new_mu, "nu": new_nu}
        new: Leaf = {}
        for name, value in moments.items():
            new |= stored(spec, info, name, value, noise)
        p = _f32(leaf.get("master", param))
        decay = spec.weight_decay if info.is_matrix else 0.0
        p = p - apart(update.learning_rate * (direction + apart(decay * p)))
        if "master" in leaf:
            new["master"] = p
        if spec.param_rounding == "stochastic":
            return to_bfloat16(p, noise.bits("param", p.shape)), new
        return p.astype(param.dtype), new

    def _with(self, name: str) -> ParamTree:
        """The parameters of which the state has this array."""
        return kept(self.params, lambda info: name in arrays(self.spec, info))


def check_layout(spec: AdamW | Muon, layout: Layout) -> None:
    """Refuses a layout that the state cannot have.

    Raises:
      ValueError: a dtype of parameters for which an option of the optimizer would do nothing; a mesh whose shards
        cut blocks of int8.
    """
    spec.check_param_dtype(layout.spec.param_dtype)
    for p in layout.params:
        split = blocks(spec, p.info)
        axis = None if split is None else p.optimizer[len(p.info.shape) + split.dim]
        if split is None or axis is None:
            continue
        length, shards = p.info.shape[split.dim], layout.mesh.shape[axis]
        if length // shards % split.length:
            raise ValueError(
                f"optimizer.moment_dtype=int8 keeps {p.info.path} in blocks of {split.length} along "
                f"{FIELDS[split.letter]}={length}, and mesh.{axis}={shards} would cut them: a shard has "
                f"{length // shards}. Set mesh.{axis} to a divisor of {length // split.length}, or "
                "optimizer.moment_dtype=bfloat16_sr."
            )


def build(spec: AdamW | Muon, *, num_steps: int, params: ParamTree) -> Optimizer:
    """The optimizer of a run of exactly `num_steps` updates of `params`, a tree of `ParamInfo`.

    Raises:
      ValueError: warm-up, or warm-up and decay, longer than the run; Muon cannot tell a matrix's inputs.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps={num_steps} must be at least 1.")
    warmup = whole_steps(spec.warmup_steps, num_steps)
    decay = whole_steps(getattr(spec.schedule, "decay_steps", 0), num_steps)
    if warmup + decay > num_steps:
        after = f" and optimizer.schedule.decay_steps={decay}" if decay else ""
        raise ValueError(
            f"optimizer.warmup_steps={warmup}{after} do not fit in num_steps={num_steps}. Set num_steps to at least "
            f"{warmup + decay}, or give them as fractions of the run: optimizer.warmup_steps=0.01."
        )
    for info in jax.tree.leaves(params):
        if by_muon(spec, info):
            matrix_dims(info)
    return Optimizer(spec, num_steps, warmup, params)


def _f32(x: Array) -> Array:
    return x.astype(jnp.float32)


def _mean(new: Array, old: Array, b: float) -> Array:
    return apart((1.0 - b) * new) + apart(b * old)
