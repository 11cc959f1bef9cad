"""Noise floor of the train step: how far two passes over one step from one state lie apart.

XLA's GPU scatters add in the order in which their threads come, so a step may give other bits each time on
healthy hardware. What a replay may conclude from other bits therefore follows from a measurement: the first
step of an attempt runs twice. The first pass is told to leave the update out, as a batch that broke the state
is (`guard.GuardState.left_out`): it is the same compiled program, it returns the state that it was given, and
no second state needs room. Loss, gradient norm and the sums of the gradients' bits are those of a step that
is applied.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jtrain.layout.dims import Batch
from jtrain.step.checksums import GRADIENT_BITS
from jtrain.step.guard import LEFT_OUT, NAMES, GuardState, StepNumbers
from jtrain.step.state import TrainState
from jtrain.train.restart_point import replicate

_LEAST, _MOST = (0.02, 0.5), (0.1, 0.9)
"""Smallest and largest bound of what two passes over many steps may differ by, as shares of loss and gradient
norm. Training amplifies noise: 1e-7 of every gradient of a small model became 1e-4 of the loss and 4e-3 of
the norm within 120 steps, 1e-5 became 3e-4 and 3e-3. The largest bounds lie below the guard's: a loss is bad
from 12 % above the median, a norm from ten times, so a bad number that does not come again is never noise."""

_AMPLIFIED = 100.0


@dataclasses.dataclass(frozen=True)
class NoiseFloor:
    """Difference of two passes over the first step of an attempt.

    repeats: True if all compared numbers had the same bits.
    compares_gradients: True if the bits of the gradients were among them.
    loss_nats, grad_norm: differences, as shares of the larger value.
    """

    repeats: bool = True
    compares_gradients: bool = False
    loss_nats: float = 0.0
    grad_norm: float = 0.0

    @property
    def bounds(self) -> tuple[float, float]:
        """Largest differences of loss and gradient norm in a replay that are noise."""
        floors = (self.loss_nats, self.grad_norm)
        loss, norm = (
            min(max(lower, _AMPLIFIED * floor), upper)
            for floor, lower, upper in zip(floors, _LEAST, _MOST, strict=True)
        )
        return loss, norm

    def agree(self, first: StepNumbers, second: StepNumbers) -> bool:
        """True if two passes over a step gave the same: bits where bits repeat, else all but noise."""
        if self.repeats:
            return second.same_bits(first)
        return finite_alike(first, second) and bool(
            (_differences(first.values, second.values) <= self.bounds).all()
        )

    @property
    def same_text(self) -> str:
        """Words for what two passes that agree have in common."""
        loss, norm = self.bounds
        bound_text = f"numbers within this program's noise ({loss:.0%} of the loss, {norm:.0%} of the norm)"
        return "bits" if self.repeats else bound_text

    @property
    def beyond_text(self) -> str:
        """Why two passes that disagree accuse hardware, in words."""
        if self.repeats:
            return "Data and arithmetic repeat bit for bit"
        return (
            f"The first step, run twice, moved the loss by {self.loss_nats:.1e} of itself and the gradient "
            f"norm by {self.grad_norm:.1e}; this is far beyond such noise"
        )

    def line(self, step: int, *, platform: str) -> str:
        """Returns the line that says what was measured at `step`."""
        subject = f"step {step} ran twice from one state, the first time without its update: "
        if self.repeats:
            gradients = "loss, gradient norm and gradients" if self.compares_gradients else _FEWER
            return f"{subject}{gradients} had the same bits"
        loss, norm = self.bounds
        return (
            f"{subject}bits do not repeat: the loss moved by {self.loss_nats:.1e} of itself, the gradient "
            f"norm by {self.grad_norm:.1e}. Replays of bad steps allow {loss:.0%} of the loss and {norm:.0%} "
            "of the norm before they accuse hardware"
            + (". `--set deterministic=on` gives sums on GPUs one order" if platform == "gpu" else "")
        )


_FEWER = "loss and gradient norm (integrity.checksums=True compares the gradients too)"


def run_without_update(
    train_step: Any, state: TrainState, batch: Batch, mesh: Mesh
) -> tuple[TrainState, Mapping[str, jax.Array]]:
    """Runs a step whose update is left out; returns the state as it was given, and the step's metrics.

    The state is donated, and comes back in the memory that it had.
    """
    guard, completed = jax.device_get((state.guard, state.step))
    assert isinstance(state.guard, GuardState)
    left_out = replicate(mesh, np.full(LEFT_OUT, completed + 1, np.int32))
    flagged = dataclasses.replace(state, guard=dataclasses.replace(state.guard, left_out=left_out))
    returned, metrics = train_step(flagged, batch)
    # The step has counted itself and noted its numbers: the second pass begins where this one did.
    restored_guard = jax.tree.map(lambda value: replicate(mesh, np.asarray(value)), guard)
    restored_step = replicate(mesh, np.asarray(completed))
    return dataclasses.replace(returned, step=restored_step, guard=restored_guard), metrics


def measure(first: Mapping[str, Any], second: Mapping[str, Any]) -> NoiseFloor:
    """Compares the metrics of two passes, on the host."""
    first_values, second_values = (
        np.asarray([values[name] for name in NAMES], np.float32) for values in (first, second)
    )
    pairs = [
        (first_values, second_values),
        # Each device's share of the loss; the other column is of the new state, which only one pass made.
        (np.asarray(first["by_device"])[:, 0], np.asarray(second["by_device"])[:, 0]),
    ]
    if compares_gradients := GRADIENT_BITS in second:
        pairs.append((np.asarray(first[GRADIENT_BITS]), np.asarray(second[GRADIENT_BITS])))
    loss, norm = _differences(first_values, second_values).tolist()
    return NoiseFloor(
        # As bytes: NaN is not equal to itself.
        repeats=all(a.tobytes() == b.tobytes() for a, b in pairs),
        compares_gradients=compares_gradients,
        loss_nats=loss,
        grad_norm=norm,
    )


def finite_alike(first: StepNumbers, second: StepNumbers) -> bool:
    """True if the same numbers are finite in both passes, and new states are finite on the same devices."""
    pairs = (
        (np.isfinite(first.values), np.isfinite(second.values)),
        (np.isfinite(first.by_device[:, 0]), np.isfinite(second.by_device[:, 0])),
        (first.by_device[:, 1] > 0, second.by_device[:, 1] > 0),
    )
    return all(bool((a == b).all()) for a, b in pairs)


def _differences(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Differences as shares of the larger value; 0 where neither is finite."""
    both_finite = np.isfinite(first) & np.isfinite(second)
    a, b = np.where(both_finite, first, 0.0).astype(float), np.where(both_finite, second, 0.0).astype(float)
    return np.abs(a - b) / np.maximum(np.maximum(np.abs(a), np.abs(b)), np.finfo(np.float32).tiny)
