"""Filled batches: their statistics, and the state of the data from which the next batch follows."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64, Int

from jtrain.data.loaders.messages import LoaderState
from jtrain.data.planner import balance
from jtrain.data.planner.planner import LoadingPlan, PlannerState
from jtrain.data.stream.growing_order import WindowAnchor


@dataclasses.dataclass(frozen=True)
class DataState:
    """Position in the stream: the planner's state, the number of documents skipped so far by source, and the
    anchors.

    anchors: by source, where a window at or before the oldest chunk that is still needed begins; see
      `GrowingChunks`.
    """

    planner: PlannerState
    skipped: Int[np.ndarray, " sources"]
    anchors: tuple[WindowAnchor | None, ...]


@dataclasses.dataclass(frozen=True)
class BatchStats:
    """Statistics of one batch, for logs.

    drift: largest difference, over the sources, between the share of all tokens so far and the scheduled
      share.
    wait_s: seconds that the constructor waited for documents of this batch.
    retries: reads that the loaders of this host repeated since they began.
    """

    step: int
    tokens_by_source: Int[np.ndarray, " sources"]
    fill: float
    drift: float
    row_cost: Float64[np.ndarray, " rows"]
    wait_s: float
    skipped: int
    retries: int
    loaders: tuple[LoaderState, ...]

    def spread(self, ranks: int) -> float:
        """Returns the largest over the mean cost of `ranks` data ranks."""
        return balance.spread(self.row_cost, ranks)

    def tokens(self, names: Sequence[str]) -> dict[str, int]:
        """Returns the number of tokens by source name; sources without tokens are left out."""
        counts = zip(names, self.tokens_by_source.tolist(), strict=True)
        return {name: count for name, count in counts if count}


@dataclasses.dataclass(frozen=True)
class Built:
    """Filled batch, and the state from which the next one follows."""

    state: DataState
    stats: BatchStats
    plan: LoadingPlan
