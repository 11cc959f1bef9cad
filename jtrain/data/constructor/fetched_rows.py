"""Data Constructor that learns the lengths of all documents, and fetches the ids of only those in its
rows.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from jtrain.data.constructor.collate import each, views_of
from jtrain.data.constructor.constructor import Constructor, ConstructorSetup, DataState
from jtrain.data.loaders.messages import ChunkRun
from jtrain.data.loaders.pool import Pool
from jtrain.data.loss_mask import NO_RUNS, runs_within
from jtrain.data.planner.pieces import Pieces


@dataclasses.dataclass(eq=False)
class FetchedIds:
    """Payload of a run: the ids of its documents that were fetched, by place in the run.

    asked: places whose ids were asked for.
    ignored: runs of ids that are not learned, of documents that have such.
    """

    ids: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    asked: set[int] = dataclasses.field(default_factory=set)
    ignored: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)

    def put(
        self,
        places: Sequence[int],
        lengths: Int[np.ndarray, " n"],
        ids: np.ndarray,
        ignored: Int[np.ndarray, "runs 2"],
    ) -> None:
        """Stores the ids of the documents at `places` of the run, and the runs of them that are not
        learned.
        """
        ends = np.cumsum(lengths)
        for at, start, end in zip(places, (ends - lengths).tolist(), ends.tolist(), strict=True):
            self.ids[at] = ids[start:end]
            if len(ignored) and len(runs := runs_within(ignored, start, end)):
                self.ignored[at] = runs


def to_fetch(documents: list[tuple[ChunkRun, int]]) -> dict[ChunkRun, list[int]]:
    """Returns run -> places of those documents whose ids were not asked for so far, and notes that they are
    now.
    """
    wanted: dict[ChunkRun, list[int]] = {}
    for run, at in documents:
        if at not in run.payload.asked:
            run.payload.asked.add(at)
            wanted.setdefault(run, []).append(at)
    return wanted


@runtime_checkable
class FetchPool(Pool, Protocol):
    """Pool whose runs have a `FetchedIds` as their place. Runs of prepared sources arrive with their ids."""

    def fetch(self, documents: list[tuple[ChunkRun, int]]) -> None:
        """Requests the ids of document `run.numbers[at]` for each (run, at), unless that was done before."""
        ...


class FetchedRows(Constructor):
    """Constructor that plans its rows first, then fetches the ids of only the documents in them."""

    def __init__(self, setup: ConstructorSetup, pool: FetchPool, state: DataState | None) -> None:
        super().__init__(setup, pool, state)
        self._fetcher = pool
        self._looked_at = -1
        self._unasked: list[
            list[tuple[int, int]]
        ] = []  # by step, so that no step waits for the ids of a later one

    def advance(self) -> None:
        super().advance()
        for planned in self._plans:
            if planned.plan.step > self._looked_at:
                self._looked_at = planned.plan.step
                keys = zip(planned.pieces.source.tolist(), planned.pieces.document.tolist(), strict=True)
                self._unasked.append([key for key in dict.fromkeys(keys) if key[0] not in self._prepared])
        later = []
        for keys in self._unasked:
            here = {key: found for key in keys if (found := self._buffer.find(*key)) is not None}
            self._fetcher.fetch(list(here.values()))
            if left := [
                key for key in keys if key not in here
            ]:  # being read again after a restart, not here yet
                later.append(left)
        self._unasked = later

    def _has_payload(self, pieces: Pieces) -> bool:
        keys = zip(pieces.source.tolist(), pieces.document.tolist(), strict=True)
        found = (self._buffer.find(*key) for key in dict.fromkeys(keys))
        return all(at is not None and at[1] in at[0].payload.ids for at in found)

    def _views(self, pieces: Pieces) -> list[np.ndarray]:
        return views_of(self._ids)(pieces)

    def _ignored(self, pieces: Pieces) -> list[Int[np.ndarray, "_ 2"]]:
        found = []
        for source, document, start, end in each(pieces):
            at = self._buffer.find(source, document)
            assert at is not None
            found.append(runs_within(at[0].payload.ignored.get(at[1], NO_RUNS), start, end))
        return found

    def _ids(self, source: int, document: int) -> np.ndarray:
        found = self._buffer.find(source, document)
        assert found is not None
        return found[0].payload.ids[found[1]]
