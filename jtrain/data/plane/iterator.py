"""Iterator of batches for the trainer, with the data state from which the next batch follows."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Int

from jtrain.data.constructor.batch_state import BatchStats, DataState
from jtrain.data.plane.data_plane import Delivered, Plane
from jtrain.data.planner.planner import LoadingPlan
from jtrain.layout.dims import Batch


class BatchIterator:
    """Iterator of global batches, or of this host's rows: numpy int32 of shape [rows, seq_len]. Must be
    closed.

    Attributes:
      stats: statistics of the last batch.
      plan: plan of the last batch; None unless everything runs in this process.
    """

    def __init__(
        self,
        plane: Plane,
        state: DataState,
        identity: dict[str, Any],
        names: tuple[str, ...],
        changes: list[str],
    ) -> None:
        self.plane = plane
        self._identity = identity
        self._names = names
        self._messages = changes
        self._state = state
        self.stats: BatchStats | None = None
        self.plan: LoadingPlan | None = None

    def __iter__(self) -> "BatchIterator":
        return self

    def __next__(self) -> Batch:
        delivered: Delivered = self.plane.take()
        # The state moves with the batch: saving it now means this batch counts as used.
        self._state, self.stats, self.plan = delivered.state, delivered.stats, delivered.plan
        return Batch(**delivered.arrays)

    @property
    def cursors(self) -> Int[np.ndarray, " sources"]:
        """First document of each source that no batch has drawn so far."""
        return self._state.planner.cursors

    def state(self) -> dict[str, Any]:
        """Returns the state from which the next batch follows, for `train_batches`: kilobytes of JSON."""
        return self.snapshot()()

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Returns a function that converts the present state to JSON, so that only saved steps pay for it."""
        # The state is bound now: batches that are drawn meanwhile replace it and do not change it.
        return functools.partial(to_json, self._state, self._identity, self._names)

    def take_messages(self) -> list[str]:
        """Returns the log lines since the last call."""
        messages, self._messages = self._messages, []
        return messages + self.plane.take_messages()

    def close(self) -> None:
        """Ends every process and thread of the data plane. May be called twice."""
        self.plane.close()

    def __enter__(self) -> "BatchIterator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def to_json(state: DataState, identity: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Returns a state in its saved form: the identity of the stream, and the position in it."""
    # Zeros and absent anchors are left out: with hundreds of sources most are.
    skipped = {name: count for name, count in zip(names, state.skipped.tolist(), strict=True) if count}
    anchors = {name: list(anchor) for name, anchor in zip(names, state.anchors, strict=True) if anchor}
    return {**identity, "skipped": skipped, "anchors": anchors, "planner": state.planner.to_json(names)}
