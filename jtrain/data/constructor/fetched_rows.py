"""Data Constructor that learns all documents' lengths, and fetches the ids of those in its rows alone."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from jtrain.data.constructor.batch_state import DataState
from jtrain.data.constructor.collate import Spans, iterate_pieces, spans_of
from jtrain.data.constructor.constructor import Constructor, ConstructorSetup
from jtrain.data.loaders.messages import ChunkRun
from jtrain.data.loaders.pool import Pool
from jtrain.data.loss_mask import NO_RUNS, runs_within
from jtrain.data.planner.pieces import Pieces


@dataclasses.dataclass(eq=False)
class FetchedIds:
    """Payload of a run: the ids of its documents that were fetched, by index in the run.

    requested: indexes whose ids were requested.
    ignored: runs of ids that are not learned, of documents that have such.
    """

    ids: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    requested: set[int] = dataclasses.field(default_factory=set)
    ignored: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)

    def put(
        self,
        indexes: Sequence[int],
        lengths: Int[np.ndarray, " n"],
        ids: np.ndarray,
        ignored: Int[np.ndarray, "runs 2"],
    ) -> None:
        """Stores the ids of the documents at `indexes` of the run, and their runs that are not learned."""
        ends = np.cumsum(lengths)
        for index, start, end in zip(indexes, (ends - lengths).tolist(), ends.tolist(), strict=True):
            self.ids[index] = ids[start:end]
            if len(ignored) and len(runs := runs_within(ignored, start, end)):
                # Most documents have no ignored runs: nothing is stored for them.
                self.ignored[index] = runs


def claim_unrequested(documents: list[tuple[ChunkRun, int]]) -> dict[ChunkRun, list[int]]:
    """Returns run -> indexes of the documents whose ids nobody has requested, and marks them as requested."""
    indexes_by_run: dict[ChunkRun, list[int]] = {}
    for run, index in documents:
        if index not in run.payload.requested:
            run.payload.requested.add(index)
            indexes_by_run.setdefault(run, []).append(index)
    return indexes_by_run


@runtime_checkable
class FetchPool(Pool, Protocol):
    """Pool whose runs have a `FetchedIds` as payload. Runs of prepared sources arrive with their ids."""

    def fetch(self, documents: list[tuple[ChunkRun, int]]) -> None:
        """Requests the ids of document `run.numbers[index]` for each (run, index), unless done before."""
        ...


class FetchedRows(Constructor):
    """Constructor that plans its rows first, then fetches the ids of only the documents in them."""

    def __init__(self, setup: ConstructorSetup, pool: FetchPool, state: DataState | None) -> None:
        super().__init__(setup, pool, state)
        self._fetcher = pool
        self._last_claimed_step = -1
        # One list per step, so that no step waits for the ids of a later one.
        self._unfetched: list[list[tuple[int, int]]] = []

    def advance(self) -> None:
        super().advance()
        for planned_step in self._plans:
            # `_plans` keeps steps until they are filled: each is looked at once.
            if planned_step.plan.step > self._last_claimed_step:
                self._last_claimed_step = planned_step.plan.step
                keys = zip(
                    planned_step.pieces.source.tolist(), planned_step.pieces.document.tolist(), strict=True
                )
                # Prepared sources arrive with their ids; several pieces may be of one document.
                self._unfetched.append([key for key in dict.fromkeys(keys) if key[0] not in self._prepared])
        still_unfetched = []
        for keys in self._unfetched:
            arrived = {
                key: run_and_index for key in keys if (run_and_index := self._buffer.find(*key)) is not None
            }
            self._fetcher.fetch(list(arrived.values()))
            # After a restart, open documents are planned before the runs that hold them have arrived.
            if missing_keys := [key for key in keys if key not in arrived]:
                still_unfetched.append(missing_keys)
        self._unfetched = still_unfetched

    def _has_payload(self, pieces: Pieces) -> bool:
        keys = zip(pieces.source.tolist(), pieces.document.tolist(), strict=True)
        arrivals = (self._buffer.find(*key) for key in dict.fromkeys(keys))
        return all(arrival is not None and arrival[1] in arrival[0].payload.ids for arrival in arrivals)

    def _spans(self, pieces: Pieces) -> Spans:
        return spans_of(self._ids)(pieces)

    def _ignored(self, pieces: Pieces) -> list[Int[np.ndarray, "_ 2"]]:
        ignored_runs = []
        for source, document, start, end in iterate_pieces(pieces):
            arrival = self._buffer.find(source, document)
            assert arrival is not None
            ignored_runs.append(runs_within(arrival[0].payload.ignored.get(arrival[1], NO_RUNS), start, end))
        return ignored_runs

    def _ids(self, source: int, document: int) -> np.ndarray:
        arrival = self._buffer.find(source, document)
        assert arrival is not None
        return arrival[0].payload.ids[arrival[1]]
