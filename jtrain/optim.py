"""Optimizer and learning-rate schedule from their specs: optax's arithmetic, moments as the only state.

Update k (0-based, `step` = completed updates) uses `learning_rate(k)`; the bias corrections count from the same
`step`. Nothing in the optimizer's state counts, so no second counter can drift after a restore.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jaxtyping import Array, Float, Int

from jtrain.dims import ParamInfo

type ParamTree = dict[str, Any]
"""One value per parameter (array, `ParamInfo`, sharding, ...), nested like the parameters."""

type StepsOrFraction = int | float
"""An int is a number of steps, 0 or more. A float is a fraction of the run, at least 0.0 and below 1.0, rounded
down to whole steps. The type alone decides, so 1.0 and 2000.0 are refused: they could mean either."""

_ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8}
"""Relative change below which a stored moment may round back to what it was, per dtype name."""

_MAX_STALL = 0.1
"""How far off, relative, a moment may come to rest because its updates round away."""


def _whole_steps(value: StepsOrFraction, num_steps: int) -> int:
    # 1e-6: 0.29 of 100 steps is 28.999999999999996 in floating point.
    return value if isinstance(value, int) else math.floor(value * num_steps + 1e-6)


def _check_decay_rate(field: str, rate: float, moment_dtype: str) -> None:
    """Refuses a moment that its dtype cannot follow: an update of (1 - rate) of the way must not round to nothing."""
    _check_number(field, rate, "of at least 0 and below 1", lambda x: 0 <= x < 1)
    stall = _ROUNDING[moment_dtype] / (1.0 - rate)
    if stall > _MAX_STALL:
        raise ValueError(
            f"optimizer.{field}={rate} with optimizer.moment_dtype={moment_dtype}: small updates round to nothing, and "
            f"the moment comes to rest up to {stall:.0%} off (at most {_MAX_STALL:.0%} is allowed). "
            f"Set optimizer.moment_dtype=float32, or optimizer.{field} to 0.96 at most."
        )


def _check_number(field: str, value: object, wanted: str, good: Callable[[float], bool]) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or not good(value):
        raise ValueError(f"optimizer.{field}={value!r} must be a number {wanted}.")


def _check_steps(field: str, value: object) -> None:
    steps = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    fraction = isinstance(value, float) and 0.0 <= value < 1.0
    if not (steps or fraction):
        raise ValueError(
            f"optimizer.{field}={value!r} must be an int of at least 0, in steps, or a float of at least 0.0 and below "
            f"1.0, a fraction of num_steps. Write 2000 for steps, 0.01 for one percent of the run."
        )


def _check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"optimizer.{field}={value!r} must be one of {', '.join(choices)}.")


@dataclasses.dataclass(frozen=True)
class Cosine:
    """Half a cosine from the peak, right after warm-up, to `final_fraction` of it at update `num_steps`.

    That update is the first that no longer runs: with `final_fraction=0.0` the last one still has a rate above 0.

    Source: arXiv:1608.03983, without restarts.
    """

    final_fraction: float = 0.1

    def __post_init__(self) -> None:
        _check_number("schedule.final_fraction", self.final_fraction, "from 0 to 1", lambda x: 0 <= x <= 1)

    def decay(self, step: Int[Array, ""], *, warmup: int, num_steps: int) -> Float[Array, ""]:
        """Share of the peak at `step`, without warm-up; all three in steps."""
        done = jnp.clip((step - warmup) / max(num_steps - warmup, 1), 0.0, 1.0)
        return self.final_fraction + (1.0 - self.final_fraction) * 0.5 * (1.0 + jnp.cos(jnp.pi * done))


@dataclasses.dataclass(frozen=True)
class WarmupStableDecay:
    """The peak until `decay_steps` before the end, then down to `final_fraction` of it at update `num_steps`.

    A run can be lengthened from any checkpoint of the plateau, since nothing before the decay depends on `num_steps`
    (give `warmup_steps` as an int then).

    shape: `linear`, or `sqrt`: 1 - sqrt(share of the decay done), which arXiv:2405.18392 found better.

    Source: arXiv:2404.06395, arXiv:2405.18392.
    """

    decay_steps: StepsOrFraction = 0.2
    final_fraction: float = 0.0
    shape: Literal["linear", "sqrt"] = "linear"

    def __post_init__(self) -> None:
        _check_steps("schedule.decay_steps", self.decay_steps)
        _check_number("schedule.final_fraction", self.final_fraction, "from 0 to 1", lambda x: 0 <= x <= 1)
        _check_choice("schedule.shape", self.shape, ("linear", "sqrt"))

    def decay(self, step: Int[Array, ""], *, warmup: int, num_steps: int) -> Float[Array, ""]:
        """Share of the peak at `step`, without warm-up; all three in steps."""
        del warmup
        steps = _whole_steps(self.decay_steps, num_steps)
        done = jnp.clip((step - (num_steps - steps)) / max(steps, 1), 0.0, 1.0)
        gone = done if self.shape == "linear" else jnp.sqrt(done)
        return 1.0 - (1.0 - self.final_fraction) * gone


@dataclasses.dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay, after clipping the gradients by their global norm.

        m = b1 m + (1 - b1) g,   v = b2 v + (1 - b2) g^2,   both divided by 1 - b^(k + 1)
        p = p - lr(k) (m / (sqrt(v) + eps) + weight_decay p)

    Moments take 8 bytes per parameter, 4 with `moment_dtype="bfloat16"`; arithmetic is f32 in both.

    peak_lr: the highest learning rate; `schedule` says what follows the warm-up.
    warmup_steps: update k < warmup_steps uses peak_lr * (k + 1) / warmup_steps. An int is steps, a float below 1.0 a
      fraction of the run (`StepsOrFraction`).
    weight_decay: multiplied by the learning rate, as in PyTorch. For matrices only (`ParamInfo.is_matrix`): norm
      scales never decay; embedding and unembedding do, as in Megatron-LM and nanoGPT (not in OLMo 2).
    clip_norm: largest global norm of the gradients; None does not clip.
    moment_dtype: how both moments are stored. bfloat16 keeps 8 bits, rounded to nearest, so a moment stops short of
      where it should go by up to 2^-8 / (1 - b): 8 % at b = 0.95, and at b = 0.999 it never falls again. Refused
      where that is above 10 %: set b2 to 0.96 at most, or keep float32.

    Raises:
      ValueError: a value out of range; names the field and what would do.

    Source: arXiv:1711.05101.
    """

    peak_lr: float
    schedule: Cosine | WarmupStableDecay = Cosine()
    warmup_steps: StepsOrFraction = 0.01
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    moment_dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        _check_number("peak_lr", self.peak_lr, "above 0", lambda x: x > 0)
        if not isinstance(self.schedule, Cosine | WarmupStableDecay):
            raise ValueError(f"optimizer.schedule={self.schedule!r} must be Cosine or WarmupStableDecay.")
        _check_steps("warmup_steps", self.warmup_steps)
        _check_number("eps", self.eps, "above 0", lambda x: x > 0)
        _check_number("weight_decay", self.weight_decay, "of at least 0", lambda x: x >= 0)
        if self.clip_norm is not None:
            _check_number("clip_norm", self.clip_norm, "above 0, or None, which does not clip", lambda x: x > 0)
        _check_choice("moment_dtype", self.moment_dtype, tuple(_ROUNDING))
        _check_decay_rate("b1", self.b1, self.moment_dtype)
        _check_decay_rate("b2", self.b2, self.moment_dtype)


@dataclasses.dataclass(frozen=True)
class Muon(AdamW):
    """Muon for the layers' matrices; `AdamW` for embedding, unembedding and norm scales: its fields and three more.

        m = momentum m + (1 - momentum) g,   o = orthogonalize(Nesterov(m, g))
        p = p - lr(k) (update_rms sqrt(max(fan_in, fan_out)) o + weight_decay p)

    `orthogonalize` is `newton_schulz_steps` steps towards U V^T of each layer's matrix (inputs, outputs): q is D x NH,
    o is NH x D. Five cost 20 m^2 n + 10 m^3 FLOPs for m x n, m <= n, and hold one layer's temporaries at a time. The
    factor gives every matrix an update of root mean square `update_rms`, near AdamW's own: one learning rate and one
    weight decay serve both halves.

    Moments take 4 bytes per parameter of a layer's matrix, 8 for the others; half with `moment_dtype="bfloat16"`.

    Source: kellerjordan.github.io/posts/muon; arXiv:2502.16982 for `update_rms` and the weight decay.
    """

    momentum: float = 0.95
    update_rms: float = 0.2
    newton_schulz_steps: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_decay_rate("momentum", self.momentum, self.moment_dtype)
        _check_number("update_rms", self.update_rms, "above 0", lambda x: x > 0)
        whole = isinstance(self.newton_schulz_steps, int)
        _check_number("newton_schulz_steps", self.newton_schulz_steps, "(int) above 0", lambda x: whole and x > 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Moments:
    """The optimizer's whole state: running means of the gradient and of its square, in `moment_dtype`.

    mu: nested like the parameters.
    nu: the same, without the branches that Muon updates.
    """

    mu: Any  # a ParamTree; Any because as a pytree it also holds whatever stands for arrays
    nu: Any


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """A spec bound to the run's length and its parameters; made by `build`. Every method is pure.

    params, adam_params: `ParamInfo`s of all parameters, and of those with a second moment.
    warmup: length of the warm-up, in steps.
    """

    spec: AdamW | Muon
    num_steps: int
    warmup: int
    params: ParamTree
    adam_params: ParamTree

    def learning_rate(self, step: int | Int[Array, ""]) -> Float[Array, ""]:
        """Learning rate of update `step` (0-based), f32; above 0 from the first update on."""
        step = jnp.asarray(step, jnp.int32)
        rise = jnp.where(step + 1 < self.warmup, (step + 1) / max(self.warmup, 1), 1.0)
        decay = self.spec.schedule.decay(step, warmup=self.warmup, num_steps=self.num_steps)
        return (self.spec.peak_lr * rise * decay).astype(jnp.float32)

    def state_like(self, values: ParamTree) -> Moments:
        """One value per parameter (shardings, say), arranged like the state: the parameter's value for each moment."""
        by_path = _by_path(self.params, values)
        return Moments(mu=_nested(self.params, by_path), nu=_nested(self.adam_params, by_path))

    def init(self, params: ParamTree) -> Moments:
        """Zeros; under `jax.jit` with `out_shardings` nothing else is ever allocated."""
        shapes = self.state_like(jax.tree.map(lambda p: p.shape, params))
        return jax.tree.map(
            lambda shape: jnp.zeros(shape, self.spec.moment_dtype), shapes, is_leaf=lambda x: isinstance(x, tuple)
        )

    def update(
        self, grads: ParamTree, state: Moments, params: ParamTree, step: int | Int[Array, ""]
    ) -> tuple[ParamTree, Moments, dict[str, Float[Array, ""]]]:
        """One update of all parameters.

        Runs at jit level on global arrays. But for the norm and Muon's matrix products it is elementwise, and bitwise
        independent of the layout where parameters are split as the state is. Replicated parameters under a split
        state may differ in the last bit: XLA:CPU contracts other multiply-adds once it fuses their slices.

        With params and state donated it runs in place, if they come in the order in which they are returned: JAX pairs
        buffers of one shape by their order, and another order costs a copy of each. Non-finite gradients give
        non-finite parameters: look at `grad_norm`.

        Args:
          grads: f32 or bf16, already averaged over the global batch.
          state: from `init` or the last update.
          params: f32 or bf16. Computed in f32 and rounded once; in bf16 a change below 2^-9 of the weight is lost.
          step: updates completed so far.

        Returns:
          New parameters and state in their old dtypes, and f32 scalars: `grad_norm`, the global norm before clipping,
          and `learning_rate`, the one used.
        """
        spec = self.spec
        step = jnp.asarray(step, jnp.int32)
        lr = self.learning_rate(step)
        grad, param, mu = (_by_path(self.params, tree) for tree in (grads, params, state.mu))
        nu = _by_path(self.adam_params, state.nu)

        norm = optax.tree.norm({path: _f32(g) for path, g in grad.items()})
        scale = jnp.float32(1.0) if spec.clip_norm is None else jnp.minimum(1.0, spec.clip_norm / norm)

        adam = optax.scale_by_adam(spec.b1, spec.b2, spec.eps)
        f32_moments = ({path: _f32(moment[path]) for path in nu} for moment in (mu, nu))
        result: Any = adam.update(
            {path: _f32(grad[path]) * scale for path in nu}, optax.ScaleByAdamState(step, *f32_moments)
        )
        direction, (_, new_mu, new_nu) = result
        for path, info in _by_path(self.params, self.params).items():
            if path in nu:
                decay = spec.weight_decay if info.is_matrix else 0.0
                param[path], mu[path], nu[path] = (
                    _moved(param[path], direction[path], lr, decay),
                    new_mu[path].astype(mu[path].dtype),
                    new_nu[path].astype(nu[path].dtype),
                )
            else:
                assert isinstance(spec, Muon)
                param[path], mu[path] = _muon(spec, info, grad[path], param[path], mu[path], step, scale=scale, lr=lr)

        new_state = Moments(mu=_nested(self.params, mu), nu=_nested(self.adam_params, nu))
        return _nested(self.params, param), new_state, {"grad_norm": norm, "learning_rate": lr}


def build(spec: AdamW | Muon, *, num_steps: int, params: ParamTree) -> Optimizer:
    """The optimizer of a run of exactly `num_steps` updates of `params`, a tree of `ParamInfo`.

    Raises:
      ValueError: warm-up, or warm-up and decay, longer than the run; Muon cannot tell a matrix's inputs.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps={num_steps} must be at least 1.")
    warmup = _whole_steps(spec.warmup_steps, num_steps)
    decay = _whole_steps(getattr(spec.schedule, "decay_steps", 0), num_steps)
    if warmup + decay > num_steps:
        after = f" and optimizer.schedule.decay_steps={decay}" if decay else ""
        raise ValueError(
            f"optimizer.warmup_steps={warmup}{after} do not fit in num_steps={num_steps}. Set num_steps to at least "
            f"{warmup + decay}, or give them as fractions of the run: optimizer.warmup_steps=0.01."
        )
    if isinstance(spec, Muon):
        for info in jax.tree.leaves(params):
            if _by_muon(spec, info):
                _matrix_dims(info)
    return Optimizer(spec, num_steps, warmup, params, _without_muon(spec, params))


def moment_bytes(spec: AdamW | Muon, info: ParamInfo) -> int:
    """Bytes of optimizer state per element of one parameter: AdamW 8, Muon's matrices 4; half of it in bfloat16."""
    return jnp.dtype(spec.moment_dtype).itemsize * (1 if _by_muon(spec, info) else 2)


def _by_muon(spec: AdamW | Muon, info: ParamInfo) -> bool:
    """Only the layers' matrices are stacked (Y); embedding and unembedding are not."""
    return isinstance(spec, Muon) and info.is_matrix and info.dims.startswith("Y")


def _without_muon(spec: AdamW | Muon, infos: ParamTree) -> ParamTree:
    """`infos` without what Muon updates, and without the branches that this leaves empty."""
    kept = {}
    for key, value in infos.items():
        if isinstance(value, Mapping):
            if branch := _without_muon(spec, dict(value)):
                kept[key] = branch
        elif not _by_muon(spec, value):
            kept[key] = value
    return kept


def _matrix_dims(info: ParamInfo) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which dimensions of one layer's array are the matrix's inputs and outputs; experts (X, in front) are a batch.

    Raises:
      ValueError: the model's width D is at neither end, so `dims` does not say.
    """
    dims = info.dims.removeprefix("Y")
    matrix = tuple(range(1 if dims[0] == "X" else 0, len(dims)))
    if len(matrix) < 2 or "D" not in (dims[matrix[0]], dims[-1]):
        raise ValueError(
            f"Muon cannot tell inputs from outputs of {info.path} with dimensions {info.dims}: the model's width D "
            "must come first (inputs) or last (outputs). Use optimizer=AdamW."
        )
    return (matrix[:1], matrix[1:]) if dims[matrix[0]] == "D" else (matrix[:-1], matrix[-1:])


def _muon(
    spec: Muon,
    info: ParamInfo,
    grads: Array,
    params: Array,
    mus: Array,
    step: Int[Array, ""],
    *,
    scale: Float[Array, ""],
    lr: Float[Array, ""],
) -> tuple[Array, Array]:
    """New parameter and momentum of all layers, shapes as `info`; `scale` clips the gradients."""
    inputs, outputs = _matrix_dims(info)
    fan_in, fan_out = (math.prod(info.shape[1:][i] for i in axes) for axes in (inputs, outputs))
    rms_scale = spec.update_rms * math.sqrt(max(fan_in, fan_out))
    muon = optax.contrib.scale_by_muon(
        ns_steps=spec.newton_schulz_steps,
        beta=spec.momentum,
        weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(inputs, outputs),
    )
    initial: Any = muon.init(jnp.zeros(()))  # for its coefficients

    def layer(y: Int[Array, ""], carry: tuple[Array, Array]) -> tuple[Array, Array]:
        slices = [jax.lax.dynamic_index_in_dim(x, y, keepdims=False) for x in (grads, *carry)]
        # Read before anything is written: read later, the whole stack is copied, once per layer (seen on the CPU).
        grad, param, mu = jax.lax.optimization_barrier(slices)
        result: Any = muon.update(_f32(grad) * scale, initial._replace(count=step, mu=_f32(mu)))
        direction, state = result
        new = _moved(param, rms_scale * direction, lr, spec.weight_decay), state.mu.astype(mu.dtype)
        params, mus = (jax.lax.dynamic_update_index_in_dim(x, one, y, 0) for x, one in zip(carry, new, strict=True))
        return params, mus

    # A loop that overwrites one layer at a time, not a vmap or a map: those hold several f32 copies of the stack, or
    # one of each stack, 7 GiB for the gates of an 8B model.
    return jax.lax.fori_loop(0, info.shape[0], layer, (params, mus))


def _by_path(infos: ParamTree, values: ParamTree) -> dict[str, Any]:
    """`values`, nested like `infos`, by path."""
    leaves, structure = jax.tree.flatten(infos)
    return {info.path: value for info, value in zip(leaves, structure.flatten_up_to(values), strict=True)}


def _nested(infos: ParamTree, by_path: Mapping[str, Any]) -> ParamTree:
    """The values of `infos`' parameters, nested like `infos`."""
    return jax.tree.map(lambda info: by_path[info.path], infos)


def _f32(x: Array) -> Array:
    return x.astype(jnp.float32)


def _moved(param: Array, direction: Array, lr: Float[Array, ""], decay: float) -> Array:
    """`param` after a step against `direction`, computed in f32 and rounded once."""
    p = _f32(param)
    return (p - lr * (direction + decay * p)).astype(param.dtype)
