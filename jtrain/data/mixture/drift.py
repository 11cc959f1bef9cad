"""Drift of a mixture: how far the shares of the sources are from the scheduled ones."""

from typing import Literal

import numpy as np


def mixture_drift(
    *,
    unit: Literal["tokens", "samples", "rows"],
    units: int,
    deficit: np.ndarray,
    tokens: np.ndarray,
    waiting: np.ndarray,
) -> float:
    """Returns the largest difference between a source's share of the placed units and its scheduled share, 0 to 1.

    Args:
      unit: what the schedule counts.
      units: units placed so far, over all sources.
      deficit: units that each source is owed by the schedule; negative where it is ahead.
      tokens: tokens placed so far, per source.
      waiting: tokens of drawn documents that are not placed yet, per source.
    """
    if unit != "tokens":
        return float(np.abs(deficit).max() / max(1, units))
    due = tokens + waiting + deficit
    return float(np.abs(tokens / tokens.sum() - due / due.sum()).max())
