"""Data Constructor: plans each step, asks loaders for its documents, and fills the host's rows.

Each host has one. Its planner is a pure function, so the constructors of all hosts make the same plan without
communication.
"""

import bisect
import collections
import dataclasses
import itertools
import time
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int64

from jtrain.data.constructor.batch_state import BatchStats, Built, DataState
from jtrain.data.constructor.chunk_buffer import ChunkBuffer, keys_of
from jtrain.data.constructor.collate import ARRAYS, WEIGHTS, RowArrays, Rows, Spans, fill_rows
from jtrain.data.constructor.known_lengths import LENGTHS_AT_A_TIME, KnownLengths
from jtrain.data.loaders.messages import ChunkRun, RequestPart
from jtrain.data.loaders.pool import Pool
from jtrain.data.loss_mask import number_pairs, weigh_targets
from jtrain.data.planner.pieces import Pieces
from jtrain.data.planner.planner import EndOfData, LoadingPlan, NotYet, Planner, PlannerSpec, PlannerState
from jtrain.data.sources.source import field_of
from jtrain.data.stream.chunk_stream import ChunkStream
from jtrain.data.stream.growing_order import WindowAnchor
from jtrain.data.stream.source_setup import SourceSetup

RUN_BYTES, ALL_RUNS_BYTES = 1 << 16, 6 << 20
MOST_RUN_CHUNKS = 64
"""Size of a run: about RUN_BYTES of text, at most MOST_RUN_CHUNKS documents.

Large enough that messages are few, small enough that little is read in vain.

At least one run of each source is in memory, so with hundreds of sources runs are shorter: ALL_RUNS_BYTES in
total.
"""

INLINE_RUNS_BYTES = 32 << 20
"""ALL_RUNS_BYTES where one process does everything: no loader holds a second copy."""

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

    @property
    def shape(self) -> tuple[int, int, int]:
        """Arrays of a batch, one more where the messages of a source have weights; its rows and columns."""
        has_weights = any(setup.source.message_weights for setup in self.sources)
        return len(ARRAYS) + has_weights, len(self.rows), self.planner.seq_len


class _PlannedStep(NamedTuple):
    """Step that is planned ahead; `pieces` are the pieces in this host's rows."""

    plan: LoadingPlan
    state_after: PlannerState
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
        # All or none: `PackedText` refuses a mixture of pairs and other samples.
        self._is_paired = any(source.source.rejected_field is not None for source in setup.sources)
        self._state = state or DataState(
            self._planner.start(), np.zeros(num_sources, np.int64), (None,) * num_sources
        )
        self._anchors = [[] if anchor is None else [anchor] for anchor in self._state.anchors]
        self._plans: collections.deque[_PlannedStep] = collections.deque()
        # A host that needs all rows reads prepared sources in runs, like other sources. One that needs some
        # rows plans with the lengths of the index first, then asks only for the documents in its rows.
        needs_some_rows = len(setup.rows) < setup.planner.global_batch
        prepared = {
            source: setup_of_source
            for source, setup_of_source in enumerate(setup.sources)
            if setup_of_source.prepared is not None and needs_some_rows
        }
        self._prepared = {
            source: ChunkStream(setup_of_source) for source, setup_of_source in prepared.items()
        }
        # With hundreds of sources, one run of each must still fit into all_runs_bytes.
        run_bytes = min(RUN_BYTES, setup.all_runs_bytes // num_sources)
        self._run_documents = [
            MAPPED_RUN_CHUNKS
            if source.map_ids
            else max(1, min(MOST_RUN_CHUNKS, run_bytes // max(mean_bytes, 1)))
            for source, mean_bytes in zip(setup.sources, setup.chunk_bytes, strict=True)
        ]
        self._buffer = ChunkBuffer(self._state.planner.cursors, pool.release)
        self.messages: list[str] = []
        """Lines for the log that nobody has taken yet."""
        self._num_reported = [0] * num_sources
        self._planned_all = False
        self._missing: list[tuple[int, int, int]] = []
        self._waiting_since_s: float | None = None
        self._wait_s = 0.0
        cursors = self._state.planner.cursors.tolist()
        self._known_lengths = [KnownLengths.nothing(cursor) for cursor in cursors]
        self._first_unrequested = self._state.planner.cursors.copy()
        """First document of each source that has not been asked for."""
        # Documents that were drawn and not placed when the state was saved are read again: it holds no ids.
        self._carried = _carried_keys(self._state.planner)
        open_documents = map(tuple, self._state.planner.carry[:, :2].tolist())
        self._awaited = {
            (source, number) for source, number in open_documents if source not in self._prepared
        }
        numbers_to_reread: dict[int, list[int]] = collections.defaultdict(list)
        for source, number in sorted(self._awaited):
            numbers_to_reread[source].append(number)
        # first=True: the first step cannot be filled without them.
        for source, numbers in numbers_to_reread.items():
            pool.request([self._part(source, np.asarray(numbers, np.int64))], first=True)

    @property
    def has_ended(self) -> bool:
        """True if no batch is left to fill."""
        return self._planned_all and not self._plans

    def advance(self) -> None:
        """Takes the runs that have arrived, plans ahead as far as their lengths allow, and asks for more.
        Never waits.

        Raises:
          DataError: the stream cannot continue.
        """
        # Collect before planning: each run brings lengths that the planner needs.
        for run in self._pool.collect():
            self._add_run(run)
        if any(self._known_lengths[source].end <= first for source, first, _ in self._missing):
            # Planning would stop at the same document again.
            return
        self._missing = []
        new_plans: list[_PlannedStep] = []
        try:
            while len(self._plans) < self._setup.lookahead_steps and not self._planned_all:
                plan, state_after = self._planner.plan(
                    self._plans[-1].state_after if self._plans else self._state.planner
                )
                pieces = plan.pieces.of_rows(self._setup.rows)
                new_plans.append(_PlannedStep(plan, state_after, pieces))
                self._plans.append(new_plans[-1])
                self._planned_all = plan.last
        except EndOfData:
            self._planned_all = True
        except ValueError:
            # No further step can be planned, but the run may end with the steps planned so far.
            if not self._plans:
                raise
        except NotYet as not_yet:
            # Only lengths are missing, but whole runs are requested, as documents are read in runs.
            self._missing = not_yet.missing
            self._request_until(
                [[source, first + count] for source, first, count in self._missing], first=True
            )
        if self._prepared:
            self._request_documents(new_plans)
        if new_plans or self._missing:
            last_state = self._plans[-1].state_after if self._plans else self._state.planner
            # Counted from the last planned step, so loaders stay lookahead_steps ahead of planning too.
            request_ends = self._planner.lookahead(last_state, self._setup.lookahead_steps)
            self._request_until(
                request_ends[request_ends[:, 1] > self._first_unrequested[request_ends[:, 0]]].tolist()
            )

    def fill(self, out: RowArrays) -> Built | None:
        """Fills the next batch into `out`; returns None while documents of it are missing."""
        if self.has_ended:
            return None
        # The wait counts from the first vain call, and ends with the batch.
        if not self._plans or not self._has_payload(self._plans[0].pieces):
            self._waiting_since_s = self._waiting_since_s or time.perf_counter()
            return None
        planned_step = self._plans.popleft()
        plan, state_after = planned_step.plan, planned_step.state_after
        if self._waiting_since_s is not None:
            self._wait_s = time.perf_counter() - self._waiting_since_s
            self._waiting_since_s = None
        weight_BL = out.get(WEIGHTS)
        rows = Rows(**{name: out[name] for name in ARRAYS})
        fill_rows(rows, planned_step.pieces, self._spans)
        if self._masked or weight_BL is not None:
            runs = self._ignored(planned_step.pieces)
            weigh_targets(rows.target_BL, planned_step.pieces, runs, weight_BL)
            if self._is_paired:
                number_pairs(rows.position_BL, rows.segment_BL, planned_step.pieces, runs)
        # Last: targets and ignored runs are computed on neighbouring tokens of the unpermuted row.
        if (order := self._setup.column_order) is not None:
            for array in out.values():
                array[:] = array[:, order]
        # Only after fill_rows: this frees the ids that the rows were copied from.
        skipped = self._state.skipped + self._drop_passed(self._state.planner, state_after)
        self._state = DataState(state_after, skipped, self._drop_anchors(state_after))
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
        known_lengths = self._known_lengths[source]
        # The index knows all lengths: look up a block of them, ahead of the planner.
        if source in self._prepared and first + count > known_lengths.end:
            known_lengths.drop_before(int(self._state.planner.cursors[source]))
            numbers = np.arange(
                known_lengths.end, max(first + count, known_lengths.end + LENGTHS_AT_A_TIME), dtype=np.int64
            )
            known_lengths.add(numbers, self._prepared[source].lengths(numbers))
        if first >= known_lengths.end:
            raise NotYet
        return known_lengths.at(first, count)

    def _request_until(self, ends: list[list[int]], *, first: bool = False) -> None:
        """Asks for the whole runs up to document `end` of each source that have not been asked for.

        Prepared sources are left out: their documents are asked for after planning (`_request_documents`).
        """
        parts = []
        for source, end in ends:
            unrequested, size = int(self._first_unrequested[source]), self._run_documents[source]
            while source not in self._prepared and unrequested < end:
                # Runs end at multiples of their size, so that all hosts and restarts request the same runs.
                stop = (unrequested // size + 1) * size
                parts.append(self._part(source, np.arange(unrequested, stop, dtype=np.int64)))
                unrequested = stop
            self._first_unrequested[source] = unrequested
        # Several runs per message, but not all: one loader must not get the work of the others.
        for part in range(0, len(parts), RUNS_AT_A_TIME):
            self._pool.request(parts[part : part + RUNS_AT_A_TIME], first=first)

    def _part(self, source: int, numbers: Int[np.ndarray, " n"]) -> RequestPart:
        return RequestPart(source, numbers, _latest(self._anchors[source], int(numbers[0])))

    def _request_documents(self, planned_steps: list[_PlannedStep]) -> None:
        """Asks for the documents of prepared sources that are in this host's rows, and for no others."""
        documents_of: dict[int, set[int]] = collections.defaultdict(set)
        for step in planned_steps:
            for source, document in zip(
                step.pieces.source.tolist(), step.pieces.document.tolist(), strict=True
            ):
                if source in self._prepared:
                    documents_of[source].add(document)
        parts = []
        for source, documents in documents_of.items():
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

    def _spans(self, pieces: Pieces) -> Spans:
        return self._buffer.spans(pieces)

    def _ignored(self, pieces: Pieces) -> list[Int[np.ndarray, "_ 3"]]:
        return self._buffer.ignored(pieces)

    def _add_run(self, run: ChunkRun) -> None:
        # Empty but for the first steps after a resume.
        if self._awaited:
            self._awaited.difference_update(zip(itertools.repeat(run.source), run.numbers.tolist()))
        # Labels that were adopted are known by their runs alone: no setting of the source names them.
        self._masked = self._masked or bool(len(run.ignored))
        self._buffer.put(run)
        anchors = self._anchors[run.source]
        if run.anchor is not None and run.anchor not in anchors:
            bisect.insort(anchors, run.anchor, key=lambda anchor: anchor.first)
        known_lengths = self._known_lengths[run.source]
        # Dropped per run: over all sources at each step it would take too long.
        known_lengths.drop_before(int(self._state.planner.cursors[run.source]))
        # Runs read again after a resume lie before the cursor: their lengths are in the state.
        if run.source not in self._prepared and int(run.numbers[0]) >= known_lengths.end:
            starts, ends = run.bounds
            known_lengths.add(run.numbers, (ends - starts).astype(np.int32))

    def _drop_passed(
        self, state_before: PlannerState, state_after: PlannerState
    ) -> Int[np.ndarray, " sources"]:
        """Drops the documents that no later step needs; returns the number of bad ones among them, by
        source.
        """
        skipped = np.zeros_like(self._state.skipped)
        moved_sources = np.flatnonzero(state_after.cursors != state_before.cursors)
        count = (state_after.cursors - state_before.cursors)[moved_sources]
        # Numbers before[s], ..., after[s] - 1 of each source, all sources in one array.
        passed_numbers = np.arange(int(count.sum())) + np.repeat(
            state_before.cursors[moved_sources] - np.cumsum(count) + count, count
        )
        # Dropped now: what was open before or drawn in this step, and is not open after it.
        drawn_keys = np.concatenate([self._carried, keys_of(np.repeat(moved_sources, count), passed_numbers)])
        self._carried = _carried_keys(state_after)
        skipped_documents = self._buffer.drop(
            drawn_keys[~_is_in(drawn_keys, self._carried)], self._carried, state_after.cursors
        )
        for run, number in skipped_documents:
            skipped[run.source] += 1
            self._report_skipped(run.source, run.skipped[number])
        return skipped

    def _drop_anchors(self, state: PlannerState) -> tuple[WindowAnchor | None, ...]:
        """Returns the anchors from which a run can go on after `state`, and drops those before them."""
        if not any(self._anchors):  # most sources never have one, and this runs at every step
            return self._state.anchors
        latest_anchors = []
        for anchors, oldest in zip(self._anchors, state.oldest().tolist(), strict=True):
            latest_anchors.append(_latest(anchors, oldest))
            # Anchors ascend; those before the latest usable one serve no later step.
            while anchors and anchors[0] != latest_anchors[-1]:
                anchors.pop(0)
        return tuple(latest_anchors)

    def _report_skipped(self, source: int, reason: str) -> None:
        self._num_reported[source] += 1
        name = self._setup.sources[source].name
        if self._num_reported[source] <= NAMED_SKIPPED:
            self.messages.append(f"data: {field_of(name)}: left out: {reason}")
        elif self._num_reported[source] == NAMED_SKIPPED + 1:
            self.messages.append(
                f"data: {field_of(name)}: more documents are left out; data_skipped counts them"
            )


def _latest(anchors: list[WindowAnchor], number: int) -> WindowAnchor | None:
    """Returns the last anchor at or before a chunk; None if there is none."""
    num_before = bisect.bisect_right(anchors, number, key=lambda anchor: anchor.first)
    return anchors[num_before - 1] if num_before else None


def _carried_keys(state: PlannerState) -> Int64[np.ndarray, " open"]:
    """Returns the keys of the documents that are drawn but not yet completely placed, ascending."""
    return np.sort(keys_of(state.carry[:, 0], state.carry[:, 1]))


def _is_in(keys: Int64[np.ndarray, " n"], ascending: Int64[np.ndarray, " m"]) -> Bool[np.ndarray, " n"]:
    """Returns True for each of `keys` that is in `ascending`. Avoids np.isin, which would import numpy.ma."""
    if not len(ascending):
        return np.zeros(len(keys), np.bool_)
    return ascending[np.minimum(np.searchsorted(ascending, keys), len(ascending) - 1)] == keys
