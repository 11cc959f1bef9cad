"""Bounds of what a layout may change, and the comparison of a run with its references.

In float32 a layout changes the order of sums, so gradients differ by rounding: at most `GRADIENT_TOLERANCE` of the
largest element of an array. Adam divides by the root of the second moment, so an element's update may differ
by that error over its own root, and by up to 2 where the gradient itself is of the size of the error (eps is
1e-8). What the next gradients make of this is measured: the float64 reference runs again with such an error
in every gradient.

In fewer bits the error against float64 may be `FACTOR` times that of one device in the same precision, plus
what the format adds where one device does not round: sums over devices, scales of each microbatch.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jtrain.bench.layout_trials import float64
from jtrain.bench.layout_trials.settings import (
    REJECTED,
    Setting,
    descent_of,
    is_exact,
    is_float32,
    min_key_heads,
    model_of,
)
from jtrain.step_comparison.comparable_run import GRADIENT_TOLERANCE, LOSS_TOLERANCE, RunResults

NATS = 2e-5
"""Largest difference of a token's cross entropy in float32, in nats."""
MEASURED = 10.0
"""Times by which differences may exceed those of the float64 reference with errors of `NOISE`."""
NOISE = 2e-6
"""Error of a gradient in the float64 reference that measures what Adam and Muon make of it."""
ZERO = 1e-2
"""Size of the terms of a gradient that is zero, as a share of all gradients' norm."""
FACTOR = 3.0
"""Times by which an error in fewer bits may exceed that of one device."""


@dataclasses.dataclass
class References:
    """Runs with which one is compared.

    exact: one device in float32.
    one_device: one device in the precision of the run.
    truth: float64, from the first weights of `one_device`.
    disturbed: the same with errors in its gradients.
    moved: runs of one device, in the precision of the run, whose embeddings are an ulp or a few larger or
      smaller; they take compilations, and are asked for only where a difference needs them.
    """

    exact: RunResults
    one_device: RunResults
    truth: float64.ReferenceResults
    disturbed: Sequence[float64.ReferenceResults]
    moved: Callable[[], Sequence[RunResults]]


@dataclasses.dataclass
class Comparison:
    """Differences of a run: each as a share of its bound, and a line for each that is over."""

    shares: dict[str, float] = dataclasses.field(default_factory=dict)
    unequal: list[str] = dataclasses.field(default_factory=list)

    def equal(self, label: str, got: Any, want: Any) -> None:
        """Requires equality."""
        if got != want:
            self.unequal.append(f"{label}: {got}, not {want}")

    def within(self, kind: str, label: str, difference: Any, bound: Any) -> None:
        """Requires that no difference exceeds its bound; NaN does."""
        difference, bound = np.asarray(difference, np.float64), np.asarray(bound, np.float64)
        # A bound of 0 allows no difference at all; 0 of 0 is no difference.
        share = np.divide(difference, bound, out=np.where(difference == 0, 0.0, np.inf), where=bound > 0)
        # NaN and infinity are always over the bound.
        worst = float(np.max(share, initial=0.0)) if np.isfinite(difference).all() else np.inf
        self.shares[kind] = max(self.shares.get(kind, 0.0), worst)
        # `not <=`, so that NaN fails too.
        if not worst <= 1:
            self.unequal.append(
                f"{kind}, {label}: {np.max(difference):.3g} apart, {worst:.3g} times the bound"
            )


def compare(setting: Setting, run: RunResults, to: References) -> Comparison:
    """Compares a run with all its references."""
    comparison = Comparison()
    # A second trace would mean that shapes or placements changed between steps.
    comparison.equal("times that the step was traced", run.num_traces, 1)
    comparison.equal("a rejected step changed nothing", run.unchanged, True)
    # Metrics without rounding must be the same bits in every layout.
    for step, (got, want) in enumerate(zip(run.exact, to.one_device.exact, strict=True)):
        comparison.equal(f"step {step + 1}: hash, targets, applied, rate, not finite", got, want)
    # First weights are drawn by position in the whole array, so no layout may change them.
    for path, value in to.one_device.first.items():
        is_equal = np.array_equal(run.first[path], value) and run.first[path].dtype == value.dtype
        comparison.equal(f"first weights of {path} are those of one device", is_equal, True)
    if is_float32(setting):
        _first_step(comparison, run, to)
    else:
        _first_step_in_fewer_bits(setting, comparison, run, to)
    if is_exact(setting):
        _later_steps(setting, comparison, run, to)
    else:
        _later_steps_in_fewer_bits(setting, comparison, run, to)
    return comparison


def _first_step(comparison: Comparison, run: RunResults, to: References) -> None:
    """Loss, gradient and evaluation of the first step, in float32."""
    for name, loss, norm in (
        ("one device", to.exact.losses[0], to.exact.norms[0]),
        ("float64", to.truth.losses[0], to.truth.norms[0]),
    ):
        comparison.within("first loss", name, abs(run.losses[0] - loss), LOSS_TOLERANCE * loss)
        comparison.within("first gradient norm", name, abs(run.norms[0] - norm), 2 * LOSS_TOLERANCE * norm)
    if run.nats_BL is not None:
        comparison.within("evaluation", "float64", np.abs(run.nats_BL - to.truth.nats_BL), NATS)
    for moment, truth in (("mu", to.truth.mu), ("nu", to.truth.nu)):
        # nu squares the gradient, which doubles its relative error.
        bound = GRADIENT_TOLERANCE if moment == "mu" else 2 * GRADIENT_TOLERANCE
        for path, want in truth.items():
            array = run.moments.get(f"{moment} {path}")
            # Rounded moments are compared below, by their codes.
            if array is None or array.dtype != np.float32:
                continue
            on_one_device = to.exact.moments[f"{moment} {path}"]
            apart = {"float64": np.abs(array - want), "one device": np.abs(array - on_one_device)}
            allowed = bound * np.abs(want).max()
            if any(difference.max() > allowed for difference in apart.values()):
                # A sum that almost cancels is smaller than what its terms round.
                moved = (run.moments[f"{moment} {path}"] for run in to.moved())
                allowed = max(allowed, 2 * max(np.abs(m - on_one_device).max() for m in moved))
            for reference, difference in apart.items():
                comparison.within(f"gradient ({moment})", f"{path}, {reference}", difference, allowed)
    for name, array in run.moments.items():
        # Only moments of 8 bits have scales; parameters of a model are named `..._scale` too.
        if array.dtype not in (np.int8, np.uint8):
            continue
        # The same noise rounds the same values: only a value at the edge of two codes may get the other.
        comparison.within(
            "8-bit codes that differ", name, np.mean(array != to.one_device.moments[name]), 0.02
        )
        moment, path = name.split(" ")
        scale, want = (arrays[f"{moment}_scale {path}"] for arrays in (run.moments, to.one_device.moments))
        # Blocks without a gradient have scales of 0 on both: a bound of 0 allows no other number.
        comparison.within("8-bit scales", f"{moment} {path}", np.abs(scale - want), 1e-3 * want)


def _later_steps(setting: Setting, comparison: Comparison, run: RunResults, to: References) -> None:
    """Losses and parameters of all steps, in float32."""
    for step, (loss, norm) in enumerate(zip(to.truth.losses, to.truth.norms, strict=True)):
        # The spread that errors of NOISE make in the reference: what amplification is natural here.
        spread = max(abs(with_errors.losses[step] - loss) for with_errors in to.disturbed)
        comparison.within(
            "later losses",
            f"{step + 1}, float64",
            abs(run.losses[step] - loss),
            LOSS_TOLERANCE * loss + MEASURED * spread,
        )
        spread = max(abs(with_errors.norms[step] - norm) for with_errors in to.disturbed)
        comparison.within(
            "later norms",
            f"{step + 1}, float64",
            abs(run.norms[step] - norm),
            4 * LOSS_TOLERANCE * norm + MEASURED * spread,
        )
    for path, want in to.truth.last.items():
        bound = parameter_bound(setting, to, path)
        comparison.within("parameters", f"{path}, float64", np.abs(run.last[path] - want), bound)
        # Two runs in float32 may each be off by the bound, in opposite directions.
        comparison.within(
            "parameters", f"{path}, one device", np.abs(run.last[path] - to.exact.last[path]), 2 * bound
        )


def parameter_bound(setting: Setting, to: References, path: str) -> np.ndarray:
    """Largest difference of each element of a parameter after the steps: Adam's amplification and what
    follows.
    """
    descent, want = descent_of(setting), to.truth.last[path]
    # 4e-7: a few roundings of float32, relative to the weight or to 1.
    bound = 4e-7 * (1 + np.abs(want))
    bound += MEASURED * max(np.abs(with_errors.last[path] - want).max() for with_errors in to.disturbed)
    for step, gradient in enumerate(to.truth.gradients):
        slope = to.truth.slopes[step][path]
        # A rejected step adds nothing, nor does an array without slope: Muon's, or one without gradient.
        if (setting["step.rejects"] and step + 1 == REJECTED) or not slope.any():
            continue
        # Clipping scales the gradient's error with the gradient.
        clip = min(1.0, (descent.clip_norm or np.inf) / to.truth.norms[step])
        error = GRADIENT_TOLERANCE * clip * np.abs(gradient[path]).max()
        # Adam's update is at most about 1 per step; an error in the sign makes that 2, or 2.5 with a margin.
        bound += descent.rate(step) * np.minimum(2.5, 2 * error / (slope + descent.eps))
    return bound


def largest_of(gradients: float64.Flat, path: str) -> float:
    """Largest element of a gradient; a share of all gradients' norm for one that is zero by identity."""
    if not is_zero(gradients, path):
        return float(np.abs(gradients[path]).max())
    return ZERO * _norm(gradients)


def is_zero(gradients: float64.Flat, path: str) -> bool:
    """True for the gradient of what changes nothing, such as a key's bias without rotary positions.

    It is a sum that cancels: float32 keeps rounding of its terms. Exact zeros are no such sum.
    """
    largest = float(np.abs(gradients[path]).max())
    return 0 < largest <= 1e-9 * _norm(gradients)


def _norm(gradients: float64.Flat) -> float:
    return math.sqrt(sum(float((value**2).sum()) for value in gradients.values()))


def floor_of(setting: Setting) -> float:
    """Relative error of a gradient that a layout may add where one device in the same precision has none."""
    # Float32 sums in another order; then what each reduced precision adds.
    floor = 1e-4
    if setting["precision.compute_dtype"] == "bfloat16":
        floor += 0.01
    if setting["precision.reduce_dtype"] == "bfloat16" or setting["precision.grad_accum_dtype"] == "bfloat16":
        floor += 0.03
    if setting["precision.matmul_dtype"] != "compute":
        floor += 0.1
    return floor


def _relative(error: np.ndarray | np.floating[Any], reference: np.ndarray | np.floating[Any]) -> float:
    """Root of the mean square of an error, relative to that of `reference`; of one number, where a parameter
    is one.
    """
    size = float(np.sqrt(np.mean(np.square(reference, dtype=np.float64))))
    return (
        # All zeros: any error is too much.
        float(np.sqrt(np.mean(np.square(error, dtype=np.float64)))) / size if size else float(np.any(error))
    )


def _first_step_in_fewer_bits(
    setting: Setting, comparison: Comparison, run: RunResults, to: References
) -> None:
    floor = floor_of(setting)
    for kind, field in (("first loss", "losses"), ("first gradient norm", "norms")):
        got, on_one_device, want = (getattr(x, field)[0] for x in (run, to.one_device, to.truth))
        # Half of the floor: losses average over all tokens.
        bound = FACTOR * abs(on_one_device - want) + 0.5 * floor * want
        comparison.within(f"{kind}, fewer bits", "float64", abs(got - want), bound)
    if run.nats_BL is not None and to.one_device.nats_BL is not None:
        error, of_one = (x.nats_BL - to.truth.nats_BL for x in (run, to.one_device))
        bound = FACTOR * _relative(of_one, to.truth.nats_BL) + 0.5 * floor
        comparison.within("evaluation, fewer bits", "float64", _relative(error, to.truth.nats_BL), bound)
    for path, want in to.truth.mu.items():
        array = run.moments[f"mu {path}"].astype(np.float32)
        # Codes of 8 bits have no meaning without their scales.
        if run.moments[f"mu {path}"].dtype == np.int8 or is_zero(to.truth.mu, path):
            continue
        of_one = _relative(to.one_device.moments[f"mu {path}"].astype(np.float32) - want, want)
        bound = FACTOR * of_one + floor
        comparison.within(
            "gradient (mu), fewer bits", f"{path}, float64", _relative(array - want, want), bound
        )
    # A rejected step adds nothing to the histories.
    num_steps = len(run.losses) - setting["step.rejects"]
    for path, history in run.scaling.items():
        on_one_device = to.one_device.scaling[path]
        bound = history_bound(setting, num_steps) * np.abs(on_one_device[:, :, :num_steps]) + 1e-30
        # The newest entry is the first; behind those of the steps are those from before.
        is_equal = np.array_equal(history[:, :, num_steps:], on_one_device[:, :, num_steps:])
        comparison.equal(f"the history of {path} before the first step is as it was", is_equal, True)
        difference = np.abs(history - on_one_device)[:, :, :num_steps]
        if not (difference <= bound).all():
            # What an ulp in the embeddings does to this on one device; asked for only here, as it compiles.
            moved = (run.scaling[path] for run in to.moved())
            spread = np.max([np.abs(m - on_one_device)[:, :, :num_steps] for m in moved], axis=0)
            bound = np.maximum(bound, 2 * spread)
        comparison.within("histories of 8-bit matmuls", path, difference, bound)


def history_bound(setting: Setting, num_steps: int) -> np.ndarray:
    """Largest relative difference of the largest input, weight and gradient of a matmul, newest step first,
    [1, 3, H].

    In float32 the first step has scales of 1 everywhere, and its largest values are those of one device,
    unless an element lies at the edge of two 8-bit numbers: then what embeddings of another ulp do on one
    device (`References.moved`) bounds it. What rounds to 8 bits differs by an ulp, and from the next step on
    by a quarter (2 bits of mantissa) of single elements, of which the largest gradient is one: up to 44 %
    were seen in the third step of a layout whose first was equal to 3e-7, and 127 % in that of a mixture.
    Rounding to bfloat16 does the same to the first step: with experts, whose tokens then go elsewhere, 56 %.
    Weights move by less than a percent in these steps.

    Where devices share a key head, each rounds its own part of that head's gradient to 8 bits, and the parts
    are added after the product: the largest part is not the largest sum (43 % were seen), and the gradients
    of the layers below round differently.

    Args:
      num_steps: steps that were applied.
    """
    # A token of a mixture that goes to another expert has another gradient altogether.
    gradient = 1.0 if model_of(setting).router is None else 3.0
    bound = np.repeat(np.array([0.25, 0.02, gradient])[None, :, None], num_steps, axis=2)
    # The oldest applied step has scales of 1 on every layout.
    if setting["precision.compute_dtype"] == "float32":
        bound[:, :, -1] = GRADIENT_TOLERANCE
        if setting["mesh.tensor"] > min_key_heads(setting):
            bound[:, 2, -1] = 1.0
    return bound


def _later_steps_in_fewer_bits(
    setting: Setting, comparison: Comparison, run: RunResults, to: References
) -> None:
    floor = floor_of(setting)
    for step, want in enumerate(to.truth.losses):
        bound = FACTOR * abs(to.one_device.losses[step] - want) + (floor + 0.002) * want
        comparison.within(
            "later losses, fewer bits", f"{step + 1}, float64", abs(run.losses[step] - want), bound
        )
    for path, want in to.truth.last.items():
        if is_zero(to.truth.mu, path):
            continue
        # Relative to the update, since the weights themselves hardly move in three steps.
        update = want - to.one_device.first[path].astype(np.float64)
        error, of_one = (x.last[path].astype(np.float64) - want for x in (run, to.one_device))
        bound = FACTOR * _relative(of_one, update) + 3 * floor
        comparison.within("parameters, fewer bits", f"{path}, float64", _relative(error, update), bound)
