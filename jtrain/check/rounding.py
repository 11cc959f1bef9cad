"""Bounds from measured rounding: one device runs again with weights that are an ulp or two larger or smaller.

What such a run changes is what another order of sums may change. A difference of 10 times as much, and above
the bounds that every layout keeps to in float32 (`jtrain.step_comparison.comparable_run`), is no rounding.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jtrain.check.lines import Differs
from jtrain.check.records import Piece

ULP = 2.0**-23
MARGIN = 10.0
"""Times by which a difference may exceed the largest that was measured."""
RUNS = 3
"""Runs that measure."""


def moved(params: Any, seed: int) -> Any:
    """Parameters of which each element is up to two ulps larger or smaller."""
    rng = np.random.default_rng(seed)

    def move(array: Any) -> np.ndarray:
        array = np.asarray(array)
        # Codes of blocks stay: of a block its scale is moved.
        if not np.issubdtype(array.dtype, np.floating):
            return array
        return (array * (1 + ULP * rng.integers(-2, 3, array.shape))).astype(array.dtype)

    return jax.tree.map(move, params)


@dataclasses.dataclass
class Worst:
    """Largest difference of several, as a share of its bound.

    label: quantity that differs most; where a tensor is over its bound, the first one.
    over: quantities that are over their bound.
    """

    share: float = 0.0
    label: str = "nothing"
    difference: float = 0.0
    bound: float = 0.0
    over: int = 0
    has_tensor: bool = False

    def add(self, label: str, difference: float, bound: float, *, is_tensor: bool = True) -> None:
        """Takes another difference; one that is no number is over every bound."""
        share = difference / bound if bound else (np.inf if difference else 0.0)
        share = share if np.isfinite(difference) else np.inf
        # Not `share > 1`, which no nan is.
        is_over = not share <= 1
        self.over += is_over
        if self.has_tensor:
            return
        self.has_tensor = is_over and is_tensor
        if share >= self.share or self.has_tensor:
            self.share, self.label, self.difference, self.bound = share, label, difference, bound

    @property
    def text(self) -> str:
        """The difference that is nearest to its bound."""
        return f"{self.label} {self.difference:.2g} apart, bound {self.bound:.2g}"

    def refuse(self) -> None:
        """Raises Differs if a difference is over its bound."""
        if self.over:
            raise Differs(f"{self.text}" + (f" and {self.over - 1} others" if self.over > 1 else ""))


def largest(arrays: Sequence[Mapping[str, np.ndarray]], base: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Largest distance of each array from `base`."""
    return {
        path: max(float(np.abs(run[path] - value).max(initial=0.0)) for run in arrays)
        for path, value in base.items()
    }


def bisect(units: Sequence[Sequence[Piece]], differs: Any) -> str:
    """Name of a unit that differs when it alone has targets; of all, if only they do together.

    Args:
      differs: function of units, True if the two sides differ where these alone have targets.
    """
    candidates = list(units)
    if not candidates or not differs(candidates):
        return "none by itself"
    while len(candidates) > 1:
        half = len(candidates) // 2
        first, second = candidates[:half], candidates[half:]
        if differs(first):
            candidates = first
        elif differs(second):
            candidates = second
        else:
            # Neither half differs by itself.
            return f"{candidates[0][0].name} to {candidates[-1][0].name} together"
    return candidates[0][0].place
