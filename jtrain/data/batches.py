"""Batches as the trainer takes them, each with the state that leads to the next one."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Int

from jtrain.data.constructor import BatchStats, DataState
from jtrain.data.plane import Delivered, Plane
from jtrain.data.planner import LoadingPlan
from jtrain.dims import Batch


class BatchIterator:
    """Global batches, or this host's rows of them: numpy int32 of shape [rows, seq_len]. Close it.

    Attributes:
      stats: of the batch last taken.
      plan: of the batch last taken, where everything runs in this process.
    """

    def __init__(
        self, plane: Plane, state: DataState, identity: dict[str, Any], names: tuple[str, ...], changes: list[str]
    ) -> None:
        self._plane = plane
        self._identity = identity
        self._names = names
        self._said = changes
        self._state = state
        self.stats: BatchStats | None = None
        self.plan: LoadingPlan | None = None

    def __iter__(self) -> "BatchIterator":
        return self

    def __next__(self) -> Batch:
        delivered: Delivered = self._plane.take()
        self._state, self.stats, self.plan = delivered.state, delivered.stats, delivered.plan
        return Batch(**delivered.arrays)

    @property
    def cursors(self) -> Int[np.ndarray, " sources"]:
        """The first document of each source that no batch so far has drawn."""
        return self._state.planner.cursors

    def state(self) -> dict[str, Any]:
        """What leads to the next batch, the one not yet returned; kilobytes of JSON. `train_batches` takes it."""
        return self.snapshot()()

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """The state as it is now, turned into JSON when called: only a step that is saved pays for that."""
        return functools.partial(to_json, self._state, self._identity, self._names)

    def said(self) -> list[str]:
        """What happened since the last call that a person should know."""
        said, self._said = self._said, []
        return said + self._plane.said()

    def close(self) -> None:
        """Ends every process and thread behind it. May be called twice."""
        self._plane.close()

    def __enter__(self) -> "BatchIterator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def to_json(state: DataState, identity: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """A state as it is saved: what it is a stream of, and where that goes on."""
    skipped = {name: count for name, count in zip(names, state.skipped.tolist(), strict=True) if count}
    return {**identity, "skipped": skipped, "planner": state.planner.to_json(names)}
