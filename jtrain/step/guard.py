"""Guard of the train step: an update from bad numbers is not applied, decided on the device without the host.

Numbers are bad if the loss or the gradient norm is not finite, or is far above its values of the last steps:

    bound = median + sigmas * max(1.4826 * MAD, floor * max(median, LEAST_MEDIAN))

MAD is the median absolute deviation from the median; 1.4826 MAD estimates the standard deviation of a normal
distribution, and a few outliers do not move either. Only values above the bound are bad: a loss that falls is
not. The history takes in every finite value, bad ones too, so that a lasting change of level becomes normal.

Source: the rolling window and the 6 sigma are those of OLMo-core's SkipStepOptimizer, which uses mean and
  deviation.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jtrain.errors import UserError

NAMES = ("loss_nats", "grad_norm")
"""Metrics that are compared with a bound."""

WINDOW = 128
"""Number of recent steps whose losses and gradient norms are the history."""

MIN_HISTORY = 64
"""Values that the history needs before its bounds hold."""

FLOORS = (0.02, 1.5)
"""Smallest spread, as a share of the median, of the loss and of the gradient norm. A smooth loss has a very
small MAD, and its ordinary noise would exceed any multiple. Gradient norms are skewed far upwards: median
and MAD alone flag 6 of 852 steps of a healthy run of `tiny`, up to 4.3 medians above the median, 28
deviations (bench/NOTES.md). Clipping handles those; 10 times the median is bad."""

LEAST_MEDIAN = (1.0, 0.0)
"""Medians below which the floors of loss, in nats, and gradient norm do not fall. Losses of memorised text
lie near 0.002, and an ordinary batch of it at 0.047: shares of such a median flag good updates. Gradients
scale with the loss there, so the spread of the norm is at least the same share of its median as that of the
loss."""

LEFT_OUT = 32
"""Steps whose batch can be left out ahead of time."""


@dataclasses.dataclass(frozen=True)
class GuardSpec:
    """Handling of bad numbers: a loss or gradient norm that is not finite or far above the recent ones.

    A bad update is never applied, and the run does not stop for it on the device. What follows is decided
    here.

    on_bad: `skip` goes on with the next batch, and goes back only if bad steps repeat; `rollback` goes back
      to the last checkpoint at once, to see whether the same numbers come again; `stop` ends the run.
    sigmas: a value is bad above the median of the last 128 plus this many deviations. None: only if not
      finite.
    max_skips: bad steps among the last 128 at which `skip` goes back to the last checkpoint too.
    max_rollbacks: times that a run goes back with fewer than 128 steps between, before it stops.
    """

    on_bad: Literal["skip", "rollback", "stop"] = "skip"
    sigmas: float | None = 6.0
    max_skips: int = 8
    max_rollbacks: int = 3

    def __post_init__(self) -> None:
        if self.on_bad not in ("skip", "rollback", "stop"):
            raise UserError(f"guard.on_bad={self.on_bad!r} must be skip, rollback or stop.")
        if self.sigmas is not None and not 0 < self.sigmas < float("inf"):
            raise UserError(
                f"guard.sigmas={self.sigmas} must be above 0 and finite, or None to check only for NaN and "
                "infinity."
            )
        for field, maximum in (("max_skips", WINDOW), ("max_rollbacks", LEFT_OUT)):
            value = getattr(self, field)
            if not 1 <= value <= maximum:
                raise UserError(f"guard.{field}={value} must be from 1 to {maximum}.")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GuardState:
    """Part of the train state that the guard reads and writes; the same in every layout.

    history: [2, WINDOW] f32, losses and gradient norms; step k is in column (k - 1) % WINDOW. NaN where there
      is none.
    skipped: updates that were not applied so far, int32.
    left_out: [LEFT_OUT] int32, steps whose update is not applied, whatever their numbers; 0 for no step.
    since: int32; the bounds of later steps use only values after this step.
    """

    history: Any
    skipped: Any
    left_out: Any
    since: Any


def first_guard() -> GuardState:
    """Returns the guard's state before the first step."""
    zero = jnp.zeros((), jnp.int32)
    return GuardState(jnp.full((2, WINDOW), jnp.nan, jnp.float32), zero, jnp.zeros(LEFT_OUT, jnp.int32), zero)


def judge_update(
    guard: GuardState,
    step: Int[Array, ""],
    loss: Float[Array, ""],
    norm: Float[Array, ""],
    *,
    sigmas: float | None,
    jumps: tuple[int, ...] = (),
) -> tuple[GuardState, dict[str, Array]]:
    """Judges the numbers of a step.

    Args:
      step: updates completed before this one, int32.
      sigmas: `GuardSpec.sigmas`.
      jumps: steps (as `step`) at which the mixture of the data changes all at once: bounds begin anew.

    Returns:
      The next state, and metrics: `applied`, True if the update is to be applied; `bounds`, of loss and
      gradient norm, infinite where there is none; `skipped_updates`, updates that were not applied so far.
    """
    # A step is named by the updates completed after it: `left_out` and `since` hold such numbers.
    number = step + 1
    value_2 = jnp.stack([loss, norm]).astype(jnp.float32)
    # Not finite is always bad: infinite bounds leave `isfinite` as the only test.
    bound_2 = jnp.full(2, jnp.inf, jnp.float32) if sigmas is None else _bounds(guard, number, sigmas, jumps)
    is_normal = jnp.all(jnp.isfinite(value_2) & (value_2 <= bound_2))
    applied = is_normal & ~jnp.any(guard.left_out == number)
    # NaN marks a column without a value: what is not finite is left out of the medians.
    recorded_21 = jnp.where(jnp.isfinite(value_2), value_2, jnp.nan)[:, None]
    # Bad but finite values are recorded too, or a lasting change of level would be bad for ever.
    history = jax.lax.dynamic_update_slice(guard.history, recorded_21, (0, step % WINDOW))
    skipped = guard.skipped + (~applied).astype(jnp.int32)
    new = dataclasses.replace(guard, history=history, skipped=skipped)
    return new, {"applied": applied, "bounds": bound_2, "skipped_updates": skipped}


def _bounds(
    guard: GuardState, number: Int[Array, ""], sigmas: float, jumps: tuple[int, ...]
) -> Float[Array, "2"]:
    """Bounds of step `number` from the values of earlier steps; infinite while there are too few.

    Example: losses around 2.50 with median 2.50 and MAD 0.01 have a spread of max(1.4826 * 0.01, 0.02 * 2.50)
    = 0.05; with sigmas=6 a loss above 2.80 is bad.
    """
    column = jnp.arange(WINDOW)
    # Step k is in column (k - 1) % WINDOW: the latest step before `number` that wrote each column.
    recorded = number - 1 - (number - 2 - column) % WINDOW
    # The second term: steps up to `since` that a rollback repeats still use the whole history.
    is_recent = (recorded > guard.since) | (number <= guard.since)
    if jumps:
        # Batch k feeds update k + 1, so of a jump at k the first number is k + 1.
        jump = jnp.asarray(jumps, jnp.int32)
        is_recent &= recorded > jnp.max(jnp.where(jump < number, jump, 0))
    value_2W = jnp.where(is_recent[None], guard.history, jnp.nan)
    middle = _median(value_2W)
    spread = 1.4826 * _median(jnp.abs(value_2W - middle[:, None]))
    floors, least_medians = (jnp.asarray(pair, jnp.float32) for pair in (FLOORS, LEAST_MEDIAN))
    spread = jnp.maximum(spread, floors * jnp.maximum(middle, least_medians))
    # A loss near 0 that is ten times as large has a gradient about ten times as large.
    loss_share = spread[0] / jnp.maximum(middle[0], jnp.finfo(jnp.float32).tiny ** 0.5)
    spread = spread.at[1].max(loss_share * middle[1])
    bound = middle + sigmas * spread
    return jnp.where(jnp.sum(jnp.isfinite(value_2W), axis=1) >= MIN_HISTORY, bound, jnp.inf)


def _median(value: Float[Array, "2 W"]) -> Float[Array, "2"]:
    """Median of the values of each row that are not NaN."""
    ordered = jnp.sort(value, axis=1)  # NaN comes last
    count = jnp.sum(~jnp.isnan(value), axis=1, keepdims=True)
    # The two middle values, equal for an odd count; clipped so that an empty row indexes NaN.
    middle = jnp.concatenate(
        [jnp.maximum(count - 1, 0) // 2, jnp.minimum(count // 2, value.shape[1] - 1)], axis=1
    )
    return jnp.mean(jnp.take_along_axis(ordered, middle, axis=1), axis=1)


def not_finite(tree: Any) -> Int[Array, ""]:
    """Counts the elements of floating-point arrays that are NaN or infinite."""
    counts = [
        jnp.sum(~jnp.isfinite(x), dtype=jnp.int32)
        for x in jax.tree.leaves(tree)
        if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    return sum(counts, jnp.zeros((), jnp.int32))


def not_finite_on_cpu(tree: Any) -> Int[Array, ""]:
    """Returns the same count as `not_finite`, far faster on CPUs where it is 0.

    XLA:CPU counts one by one, but adds floating-point numbers as vectors. A sum with a NaN or infinite
    element is not finite, so the elements are counted only if a sum is not.
    """
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    # A sum of finite values may overflow to infinity: then they are counted, for nothing.
    suspicious = not_finite([jnp.sum(x, dtype=jnp.float32) for x in floats]) > 0
    return jax.lax.cond(suspicious, not_finite, lambda _: jnp.zeros((), jnp.int32), floats)


@dataclasses.dataclass(frozen=True)
class StepNumbers:
    """Numbers of one step, as the devices computed them.

    values: loss and gradient norm.
    bounds: the largest good values of both; infinite where there is no bound.
    applied: True if the update was applied.
    by_device: [devices, 2], as in `make_train_step`.
    """

    step: int
    values: np.ndarray
    bounds: np.ndarray
    applied: bool
    by_device: np.ndarray
    batch_hash: str

    @classmethod
    def of(cls, step: int, metrics: Mapping[str, Any], batch_hash: str) -> "StepNumbers":
        values = np.asarray([metrics[name] for name in NAMES], np.float32)
        bounds, by_device = (np.asarray(metrics[name]) for name in ("bounds", "by_device"))
        return cls(step, values, bounds, bool(metrics["applied"]), by_device, batch_hash)

    @property
    def bad(self) -> tuple[str, ...]:
        """Names of the bad numbers; `state` if the new state is not finite."""
        names = [
            name
            for name, value, bound in zip(NAMES, self.values, self.bounds, strict=True)
            # Not `value > bound`: NaN compares as false with everything, and counts as bad this way.
            if not value <= bound
        ]
        names += [name for name, value in zip(NAMES, self.values, strict=True) if math.isinf(value)]
        # Names once each, in a fixed order, so that all processes write the same line.
        return tuple(dict.fromkeys(names + ["state"] * bool(self.by_device[:, 1].any())))

    @property
    def strange_devices(self) -> list[int]:
        """Devices, in the order of the mesh, whose share of the loss or new state is not finite."""
        # Either is enough: a device may hold a bad weight while its share of the loss is still finite.
        return np.flatnonzero(~np.isfinite(self.by_device[:, 0]) | (self.by_device[:, 1] > 0)).tolist()

    @property
    def shown(self) -> str:
        parts = [
            f"{name}={value:.6g}" + (f" (bound {bound:.6g})" if math.isfinite(bound) else "")
            for name, value, bound in zip(NAMES, self.values.tolist(), self.bounds.tolist(), strict=True)
        ]
        if "state" in self.bad:
            parts.append(f"{int(self.by_device[:, 1].sum())} elements of the new state not finite")
        return ", ".join(parts)

    def same_bits(self, other: "StepNumbers") -> bool:
        """True if two passes over a step computed the same."""
        pairs = ((self.values, other.values), (self.by_device, other.by_device))
        # As bytes: NaN is not equal to itself, and 0.0 equals -0.0.
        return all(a.tobytes() == b.tobytes() for a, b in pairs) and self.applied == other.applied
