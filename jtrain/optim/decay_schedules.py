"""Decay of the learning rate after its warm-up, as a fraction of the peak.

`Optimizer.learning_rate` has the warm-up and the peak.
"""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain.optim.validators import check_choice, check_number, check_steps

type StepsOrFraction = int | float
"""An int is a number of steps, 0 or more. A float is a fraction of the run, at least 0.0 and below 1.0,
rounded down to whole steps. The type alone decides, so 1.0 and 2000.0 are refused as ambiguous."""


def whole_steps(value: StepsOrFraction, num_steps: int) -> int:
    """`value` in whole steps, for a run of `num_steps`."""
    # 1e-6: 0.29 of 100 steps is 28.999999999999996 in floating point.
    return value if isinstance(value, int) else math.floor(value * num_steps + 1e-6)


@dataclasses.dataclass(frozen=True)
class Cosine:
    """Half a cosine after warm-up, from the peak to `final_fraction` of it at update `num_steps`.

    Update `num_steps` is the first one after the run: with `final_fraction=0.0` the last update has a rate
    above 0.

    final_fraction: rate at the end over the peak.

    Source: arXiv:1608.03983, without restarts.
    """

    final_fraction: float = 0.1

    def __post_init__(self) -> None:
        check_number("schedule.final_fraction", self.final_fraction, "from 0 to 1", lambda x: 0 <= x <= 1)

    def decay(self, step: Int[Array, ""], *, warmup: int, num_steps: int) -> Float[Array, ""]:
        """Fraction of the peak at `step`, without warm-up; all arguments in steps."""
        # max(.., 1): a run that is all warm-up has no step to divide by.
        progress = jnp.clip((step - warmup) / max(num_steps - warmup, 1), 0.0, 1.0)
        return self.final_fraction + (1.0 - self.final_fraction) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))


@dataclasses.dataclass(frozen=True)
class WarmupStableDecay:
    """Constant peak, then decay over `decay_steps` to `final_fraction` of the peak at `num_steps`.

    A run can be lengthened from any checkpoint of the plateau, since nothing before the decay depends on
    `num_steps` (if `warmup_steps` is an int).

    decay_steps: length of the decay, in steps (int) or as a fraction of the run (float).
    final_fraction: rate at the end over the peak.
    shape: `linear`, or `sqrt`: 1 - sqrt(fraction of the decay done), which arXiv:2405.18392 found better.

    Source: arXiv:2404.06395, arXiv:2405.18392.
    """

    decay_steps: StepsOrFraction = 0.2
    final_fraction: float = 0.0
    shape: Literal["linear", "sqrt"] = "linear"

    def __post_init__(self) -> None:
        check_steps("schedule.decay_steps", self.decay_steps)
        check_number("schedule.final_fraction", self.final_fraction, "from 0 to 1", lambda x: 0 <= x <= 1)
        check_choice("schedule.shape", self.shape, ("linear", "sqrt"))

    def decay(self, step: Int[Array, ""], *, warmup: int, num_steps: int) -> Float[Array, ""]:
        """Fraction of the peak at `step`, without warm-up; all arguments in steps."""
        del warmup
        steps = whole_steps(self.decay_steps, num_steps)
        # Negative before the decay starts; the clip makes that the plateau.
        progress = jnp.clip((step - (num_steps - steps)) / max(steps, 1), 0.0, 1.0)
        decayed = progress if self.shape == "linear" else jnp.sqrt(progress)
        return 1.0 - (1.0 - self.final_fraction) * decayed
