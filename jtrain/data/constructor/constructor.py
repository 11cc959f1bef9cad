"""Data Constructor: plans each step, asks loaders for its documents, and fills the host's rows.

Each host has one. Its planner is a pure function, so the constructors of all hosts make the same plan without
communication.
"""

import bisect
import collections
import dataclasses
import itertools
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int, Int64

from jtrain.data.constructor.chunk_buffer import ChunkBuffer, keys_of
from jtrain.data.constructor.collate import Rows, fill_rows
from jtrain.data.constructor.known_lengths import LENGTHS_AT_A_TIME, KnownLengths
from jtrain.data.loaders.messages import ChunkRun, LoaderState, RequestPart
from jtrain.data.loaders.pool import Pool
from jtrain.data.loss_mask import ignore_targets
from jtrain.data.planner import balance
from jtrain.data.planner.pieces import Pieces
from jtrain.data.planner.planner import EndOfData, LoadingPlan, NotYet, Planner, PlannerSpec, PlannerState
from jtrain.data.sources.source import field_of
from jtrain.data.stream.chunk_stream import ChunkStream
from jtrain.data.stream.growing_order import WindowAnchor
from jtrain.data.stream.source_setup import SourceSetup

RUN_BYTES, ALL_RUNS_BYTES = 1 << 16, 6 << 20
MOST_RUN_CHUNKS = 64
"""Size of a run: about RUN_BYTES of text, at most MOST_RUN_CHUNKS documents: few messages, little read in
vain.

At least one run of each source is in memory, so with hundreds of sources runs are shorter: ALL_RUNS_BYTES in
total.
"""

INLINE_RUNS_BYTES = 32 << 20
"""ALL_RUNS_BYTES where one process does everything, so that none of it is there once more for each loader."""

MAPPED_RUN_CHUNKS = 512
"""Size of a run of a source whose ids are mapped: it holds 28 bytes per chunk."""

RUNS_AT_A_TIME = 8
"""Runs of different sources that one message asks for, at most."""

NAMED_SKIPPED = 10
"""Bad documents of a source that are reported one by one; later ones are only counted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstructorSetup:
    """Settings of a constructor, as plain values, so that they can be sent to a process.

    rows: rows of the global batch that this host's devices need, ascending.
    column_order: for each position of a row, the position to take its token from; None keeps the order.
    chunk_bytes: mean size of a document by source; it decides how many documents make a run.
    lookahead_steps: how many steps ahead of the step being filled documents are asked for.
    """

    sources: tuple[SourceSetup, ...]
    planner: PlannerSpec
    rows: Int[np.ndarray, " rows"]
    column_order: Int[np.ndarray, " L"] | None
    chunk_bytes: tuple[int, ...]
    lookahead_steps: int
    all_runs_bytes: int = ALL_RUNS_BYTES


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


class _Planned(NamedTuple):
    """Step that is planned ahead; `pieces` are the pieces in this host's rows."""

    plan: LoadingPlan
    after: PlannerState
    pieces: Pieces


class Constructor:
    """Fills batches from the documents that a pool of loaders reads. Starts no process and knows no
    transport.
    """

    def __init__(self, setup: ConstructorSetup, pool: Pool, state: DataState | None) -> None:
        self._setup = setup
        self._pool = pool
        self._planner = Planner(setup.planner, self._lengths)
        num_sources = len(setup.sources)
        self._masked = any(source.source.mask is not None for source in setup.sources)
        self._state = state or DataState(
            self._planner.start(), np.zeros(num_sources, np.int64), (None,) * num_sources
        )
        self._anchors = [[] if anchor is None else [anchor] for anchor in self._state.anchors]
        self._plans: collections.deque[_Planned] = collections.deque()
        # A host that needs all rows reads prepared sources in runs, like other sources. A host that needs
        # some rows plans with the lengths of the index first, and then asks only for the documents in its
        # rows.
        some_rows = len(setup.rows) < setup.planner.global_batch
        prepared = {i: s for i, s in enumerate(setup.sources) if s.prepared is not None and some_rows}
        self._prepared = {i: ChunkStream(s) for i, s in prepared.items()}
        run_bytes = min(RUN_BYTES, setup.all_runs_bytes // num_sources)
        self._run_documents = [
            MAPPED_RUN_CHUNKS if source.map_ids else max(1, min(MOST_RUN_CHUNKS, run_bytes // max(b, 1)))
            for source, b in zip(setup.sources, setup.chunk_bytes, strict=True)
        ]
        self._buffer = ChunkBuffer(self._state.planner.cursors, pool.release)
        self.said: list[str] = []
        """Lines for the log that nobody has taken yet."""
        self._named = [0] * num_sources
        self._planned_all = False
        self._missing: list[tuple[int, int, int]] = []
        self._waiting_since_s: float | None = None
        self._wait_s = 0.0
        cursors = self._state.planner.cursors.tolist()
        self._known = [KnownLengths.nothing(cursor) for cursor in cursors]
        self._asked = self._state.planner.cursors.copy()
        """First document of each source that has not been asked for."""
        # Documents that were open or postponed when the state was saved are read again.
        self._carried = _carried(self._state.planner)
        open_documents = map(tuple, self._state.planner.carry[:, :2].tolist())
        self._awaited = {
            (source, number) for source, number in open_documents if source not in self._prepared
        }
        again: dict[int, list[int]] = collections.defaultdict(list)
        for source, number in sorted(self._awaited):
            again[source].append(number)
        for source, numbers in again.items():
            pool.request([self._part(source, np.asarray(numbers, np.int64))], first=True)

    @property
    def ended(self) -> bool:
        """True if no batch is left to fill."""
        return self._planned_all and not self._plans

    def advance(self) -> None:
        """Takes the runs that have arrived, plans ahead as far as their lengths allow, and asks for more.
        Never waits.

        Raises:
          DataError: the stream cannot continue.
        """
        for run in self._pool.collect():
            self._keep(run)
        if any(self._known[source].end <= first for source, first, _ in self._missing):
            return  # planning would stop at the same document again
        self._missing = []
        new: list[_Planned] = []
        try:
            while len(self._plans) < self._setup.lookahead_steps and not self._planned_all:
                plan, after = self._planner.plan(
                    self._plans[-1].after if self._plans else self._state.planner
                )
                pieces = plan.pieces.of_rows(self._setup.rows)
                new.append(_Planned(plan, after, pieces))
                self._plans.append(new[-1])
                self._planned_all = plan.last
        except EndOfData:
            self._planned_all = True
        except (
            ValueError
        ):  # no further step can be planned, but the run may end with the steps planned so far
            if not self._plans:
                raise
        except NotYet as not_yet:
            self._missing = not_yet.missing
            self._ask([[source, first + count] for source, first, count in self._missing], first=True)
        if self._prepared:
            self._ask_for_payload(new)
        if new or self._missing:
            planned = self._plans[-1].after if self._plans else self._state.planner
            ahead = self._planner.lookahead(planned, self._setup.lookahead_steps)
            self._ask(ahead[ahead[:, 1] > self._asked[ahead[:, 0]]].tolist())

    def fill(self, out: dict[str, Int[np.ndarray, "rows L"]]) -> Built | None:
        """Fills the next batch into `out`; returns None while documents of it are missing."""
        if self.ended:
            return None
        if not self._plans or not self._has_payload(self._plans[0].pieces):
            self._waiting_since_s = self._waiting_since_s or time.perf_counter()
            return None
        planned = self._plans.popleft()
        plan, after = planned.plan, planned.after
        if self._waiting_since_s is not None:
            self._wait_s = time.perf_counter() - self._waiting_since_s
            self._waiting_since_s = None
        rows = Rows(**out)
        fill_rows(rows, planned.pieces, self._views)
        if self._masked:
            ignore_targets(rows.target_BL, planned.pieces, self._ignored(planned.pieces))
        if (order := self._setup.column_order) is not None:
            for array in out.values():
                array[:] = array[:, order]
        skipped = self._state.skipped + self._forget(self._state.planner, after)
        self._state = DataState(after, skipped, self._drop_anchors(after))
        stats = BatchStats(
            step=plan.step,
            tokens_by_source=plan.tokens_by_source,
            fill=plan.fill,
            drift=plan.drift,
            row_cost=plan.row_cost,
            wait_s=self._wait_s,
            skipped=int(self._state.skipped.sum()),
            retries=self._pool.retries,
            loaders=tuple(self._pool.states()),
        )
        self._wait_s = 0.0
        return Built(self._state, stats, plan)

    def _lengths(self, source: int, first: int, count: int) -> Int[np.ndarray, " known"]:
        """Returns the known lengths of documents first, first + 1, ...; raises NotYet if the first is not
        known.
        """
        known = self._known[source]
        if source in self._prepared and first + count > known.end:
            known.drop_before(int(self._state.planner.cursors[source]))
            numbers = np.arange(known.end, max(first + count, known.end + LENGTHS_AT_A_TIME), dtype=np.int64)
            known.add(numbers, self._prepared[source].lengths(numbers))
        if first >= known.end:
            raise NotYet
        return known.at(first, count)

    def _ask(self, ends: list[list[int]], *, first: bool = False) -> None:
        """Asks for the whole runs up to document `end` of each source that have not been asked for.

        Prepared sources are left out: their documents are asked for after planning (`_ask_for_payload`).
        """
        parts = []
        for source, end in ends:
            asked, size = int(self._asked[source]), self._run_documents[source]
            while source not in self._prepared and asked < end:
                stop = (asked // size + 1) * size
                parts.append(self._part(source, np.arange(asked, stop, dtype=np.int64)))
                asked = stop
            self._asked[source] = asked
        for at in range(0, len(parts), RUNS_AT_A_TIME):
            self._pool.request(parts[at : at + RUNS_AT_A_TIME], first=first)

    def _part(self, source: int, numbers: Int[np.ndarray, " n"]) -> RequestPart:
        return RequestPart(source, numbers, _latest(self._anchors[source], int(numbers[0])))

    def _ask_for_payload(self, planned: list[_Planned]) -> None:
        """Asks for the documents of prepared sources that are in this host's rows, and for no others."""
        wanted: dict[int, set[int]] = collections.defaultdict(set)
        for step in planned:
            for source, document in zip(
                step.pieces.source.tolist(), step.pieces.document.tolist(), strict=True
            ):
                if source in self._prepared:
                    wanted[source].add(document)
        parts = []
        for source, documents in wanted.items():
            numbers = self._buffer.expect(source, np.asarray(sorted(documents), np.int64))
            if len(numbers):
                parts.append(RequestPart(source, numbers))
        if parts:
            self._pool.request(parts)

    def _has_payload(self, pieces: Pieces) -> bool:
        """True if all documents have arrived; documents of sources that are not prepared arrive with their
        lengths.
        """
        return (not self._prepared and not self._awaited) or self._buffer.holds(pieces)

    def _views(self, pieces: Pieces) -> list[np.ndarray]:
        return self._buffer.views(pieces)

    def _ignored(self, pieces: Pieces) -> list[Int[np.ndarray, "_ 2"]]:
        return self._buffer.ignored(pieces)

    def _keep(self, run: ChunkRun) -> None:
        if self._awaited:  # only after a resume
            self._awaited.difference_update(zip(itertools.repeat(run.source), run.numbers.tolist()))
        self._buffer.put(run)
        anchors = self._anchors[run.source]
        if run.anchor is not None and run.anchor not in anchors:
            bisect.insort(anchors, run.anchor, key=lambda anchor: anchor.first)
        known = self._known[run.source]
        known.drop_before(
            int(self._state.planner.cursors[run.source])
        )  # here, since each step would take too long
        if run.source not in self._prepared and int(run.numbers[0]) >= known.end:
            starts, ends = run.bounds
            known.add(run.numbers, (ends - starts).astype(np.int32))

    def _forget(self, before: PlannerState, after: PlannerState) -> Int[np.ndarray, " sources"]:
        """Drops the documents that no later step needs; returns the number of bad ones among them, by
        source.
        """
        skipped = np.zeros_like(self._state.skipped)
        moved = np.flatnonzero(after.cursors != before.cursors)
        count = (after.cursors - before.cursors)[moved]
        passed = np.arange(int(count.sum())) + np.repeat(
            before.cursors[moved] - np.cumsum(count) + count, count
        )
        drawn = np.concatenate([self._carried, keys_of(np.repeat(moved, count), passed)])
        self._carried = _carried(after)
        bad = self._buffer.drop(drawn[~_among(drawn, self._carried)], self._carried, after.cursors)
        for run, number in bad:
            skipped[run.source] += 1
            self._name_skipped(run.source, run.skipped[number])
        return skipped

    def _drop_anchors(self, state: PlannerState) -> tuple[WindowAnchor | None, ...]:
        """Returns the anchors from which a run can go on after `state`, and drops those before them."""
        if not any(self._anchors):  # most sources never have one, and this runs at every step
            return self._state.anchors
        found = []
        for anchors, oldest in zip(self._anchors, state.oldest().tolist(), strict=True):
            found.append(_latest(anchors, oldest))
            while anchors and anchors[0] != found[-1]:
                anchors.pop(0)
        return tuple(found)

    def _name_skipped(self, source: int, why: str) -> None:
        self._named[source] += 1
        name = self._setup.sources[source].name
        if self._named[source] <= NAMED_SKIPPED:
            self.said.append(f"data: {field_of(name)}: left out: {why}")
        elif self._named[source] == NAMED_SKIPPED + 1:
            self.said.append(f"data: {field_of(name)}: more documents are left out; data_skipped counts them")


def _latest(anchors: list[WindowAnchor], number: int) -> WindowAnchor | None:
    """Returns the last anchor at or before a chunk; None if there is none."""
    at = bisect.bisect_right(anchors, number, key=lambda anchor: anchor.first)
    return anchors[at - 1] if at else None


def _carried(state: PlannerState) -> Int64[np.ndarray, " open"]:
    """Returns the keys of the documents that are drawn but not yet completely placed, ascending."""
    return np.sort(keys_of(state.carry[:, 0], state.carry[:, 1]))


def _among(keys: Int64[np.ndarray, " n"], ascending: Int64[np.ndarray, " m"]) -> Bool[np.ndarray, " n"]:
    """Returns True for each of `keys` that is in `ascending`. Avoids np.isin, which would import numpy.ma."""
    if not len(ascending):
        return np.zeros(len(keys), np.bool_)
    return ascending[np.minimum(np.searchsorted(ascending, keys), len(ascending) - 1)] == keys
