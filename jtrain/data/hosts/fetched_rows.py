"""Data Constructor that learns all documents' lengths, and fetches the ids of those in its rows alone."""

import numpy as np
from jaxtyping import Int

from jtrain.data.constructor.batch_state import DataState
from jtrain.data.constructor.collate import Spans, iterate_pieces, spans_of
from jtrain.data.constructor.constructor import Constructor, ConstructorSetup
from jtrain.data.hosts.shared_pool import SharedPool
from jtrain.data.loss_mask import NO_RUNS, runs_within
from jtrain.data.planner.pieces import Pieces


class FetchedRows(Constructor):
    """Constructor that plans its rows first, then fetches the ids of only the documents in them."""

    def __init__(self, setup: ConstructorSetup, pool: SharedPool, state: DataState | None) -> None:
        super().__init__(setup, pool, state)
        self._shared_pool = pool
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
                # Several pieces may be of one document.
                self._unfetched.append(list(dict.fromkeys(keys)))
        still_unfetched = []
        for keys in self._unfetched:
            arrived = {
                key: run_and_index for key in keys if (run_and_index := self._buffer.find(*key)) is not None
            }
            self._shared_pool.fetch(list(arrived.values()))
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

    def _ignored(self, pieces: Pieces) -> list[Int[np.ndarray, "_ 3"]]:
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
