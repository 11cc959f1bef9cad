"""Samples of a line that a chart draws, so few that a browser is quick, and so that no spike is lost."""

import numpy as np
from jaxtyping import Float, Int


def thin(
    x: Float[np.ndarray, " samples"], y: Float[np.ndarray, " samples"], *, buckets: int
) -> Int[np.ndarray, " drawn"]:
    """Indices of the samples to draw: all, or the first, lowest, highest and last of each bucket.

    Args:
      x: ascending.
      y: NaN where unknown.
      buckets: equal parts of the range of x, as a rule one for each pixel or two.
    """
    # Four points per bucket are drawn anyway, so fewer samples need no thinning.
    if len(x) <= 4 * buckets:
        return np.arange(len(x))
    starts = np.unique(np.searchsorted(x, np.linspace(x[0], x[-1], buckets, endpoint=False)))
    lengths = np.diff(starts, append=len(x))
    bucket_of_sample = np.repeat(np.arange(len(starts)), lengths)
    drawn = [starts, starts + lengths - 1]
    for extreme, unknown in ((np.minimum, np.inf), (np.maximum, -np.inf)):
        filled = np.where(np.isnan(y), unknown, y)
        # A bucket without a known sample has its first sample here, which is a gap.
        hits = np.flatnonzero(filled == np.repeat(extreme.reduceat(filled, starts), lengths))
        drawn.append(hits[np.unique(bucket_of_sample[hits], return_index=True)[1]])
    return np.unique(np.concatenate(drawn))
