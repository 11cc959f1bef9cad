"""Buffer of tokenised documents waiting to be packed, indexed by (source, document number).

It is made of arrays, because documents are looked up and dropped hundreds at a time: dicts of dicts took
three times as long, most of it waiting for memory (bench/NOTES.md).
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Int, Int64

from jtrain.data.constructor.collate import Spans, memory_of, shrunk_error
from jtrain.data.loaders.messages import ChunkRun
from jtrain.data.loss_mask import runs_within
from jtrain.data.native.library import address, core
from jtrain.data.planner.pieces import Pieces

NUMBER, RUN, FIRST, STOP = range(4)
"""Columns of the table of documents."""

_SMALLEST = 64
_NOTHING = -1
_NO_IDS = np.empty(0, np.int32)
_NUMBER_BITS = 40
_ABOVE = 1 << _NUMBER_BITS
"""Upper bound of document numbers, so that source * _ABOVE + number is a unique key."""


def keys_of(source: Int64[np.ndarray, " n"], number: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
    """Returns one key per document, from its source and number."""
    return source * _ABOVE + number


def split_keys(keys: Int64[np.ndarray, " n"]) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
    """Returns the source and the number of each key."""
    return keys >> _NUMBER_BITS, keys & (_ABOVE - 1)


class ChunkBuffer:
    """Ring buffer per source that maps a document number to the run and the token range of its ids.

    Document n is at position n modulo the size of the ring. A document before the cursor of its source that
    is still needed is kept outside the ring (`_open`), so a ring is only as long as its source is read ahead.

    Example: source 0 has cursor 100 and a ring of 64. Documents 100 to 163 fit: 100 is in row 100 % 64 = 36,
    163 in row 35. When the cursor moves to 130 and document 120 is only half placed, `drop` moves 120 to
    `_open`, and row 120 % 64 = 56 is free for document 184.

    Args:
      cursors: first document of each source that is still to be drawn.
      release: called with a run when none of its documents is needed any more.
    """

    def __init__(self, cursors: Int64[np.ndarray, " sources"], release: Callable[[ChunkRun], None]) -> None:
        num_sources = len(cursors)
        self._release = release
        self._size = np.full(num_sources, _SMALLEST, np.int64)
        self._base = np.arange(num_sources) * _SMALLEST
        self._table_end = num_sources * _SMALLEST
        self._table = np.full((self._table_end, 4), _NOTHING, np.int64)
        """Number, run, first token and end of each document: a look-up reads one row, one cache line."""
        self._open: dict[int, tuple[int, int, int]] = {}
        self._runs: list[ChunkRun | None] = []
        self._ids: list[np.ndarray] = []
        self._memory = np.zeros((0, 2), np.int64)
        """Where the ids of each run lie, see `memory_of`."""
        self._unused: list[int] = []
        self._with_skipped: set[int] = set()
        """Runs that have skipped documents."""
        self._live = np.zeros(0, np.int64)
        self._cursors = cursors

    def put(self, run: ChunkRun) -> None:
        """Adds a run, whose document numbers ascend."""
        # Indexes of released runs are used again, so these lists are as long as the most runs held at once.
        run_index = self._unused.pop() if self._unused else len(self._runs)
        if run_index == len(self._runs):
            self._runs.append(None)
            self._ids.append(run.ids)
            if run_index >= len(self._live):
                # Doubling: appending to an array one by one would copy it each time.
                num_more = max(64, run_index)
                self._live = np.concatenate([self._live, np.zeros(num_more, np.int64)])
                self._memory = np.concatenate([self._memory, np.zeros((num_more, 2), np.int64)])
        self._runs[run_index], self._ids[run_index], self._live[run_index] = run, run.ids, len(run.numbers)
        self._memory[run_index] = memory_of(run.ids)
        if run.skipped:
            self._with_skipped.add(run_index)
        source, numbers = run.source, run.numbers
        starts, ends = run.bounds
        oldest = int(self._cursors[source])
        # Documents that were open in the state that the run resumed from lie before the cursor.
        if int(numbers[0]) < oldest:
            num_reread = int(np.searchsorted(numbers, oldest))
            for i, number in enumerate(numbers[:num_reread].tolist()):
                self._open[source * _ABOVE + number] = run_index, int(starts[i]), int(ends[i])
            numbers, starts, ends = numbers[num_reread:], starts[num_reread:], ends[num_reread:]
            if not len(numbers):
                return
        if int(numbers[-1]) - oldest >= self._size[source]:
            self._grow(source, int(numbers[-1]) - oldest + 1)
        rows = np.empty((len(numbers), 4), np.int64)
        rows[:, NUMBER], rows[:, RUN], rows[:, FIRST], rows[:, STOP] = numbers, run_index, starts, ends
        # Sizes are powers of two: `& (size - 1)` is the modulus.
        self._table[self._base[source] + (numbers & (self._size[source] - 1))] = rows

    def expect(self, source: int, numbers: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " new"]:
        """Marks documents as asked for; returns the new ones among them, ascending. `numbers` has no
        duplicates.
        """
        if not len(numbers):
            return numbers
        oldest = int(self._cursors[source])
        ahead_numbers = numbers[numbers >= oldest]
        if len(ahead_numbers) and int(ahead_numbers.max()) - oldest >= self._size[source]:
            self._grow(source, int(ahead_numbers.max()) - oldest + 1)
        # Rows of the ring: `_base` is where the source's ring begins, sizes are powers of two.
        table_rows = self._base[source] + (ahead_numbers & (self._size[source] - 1))
        new_numbers = ahead_numbers[self._table[table_rows, NUMBER] != ahead_numbers]
        table_rows = self._base[source] + (new_numbers & (self._size[source] - 1))
        # A number without a run: expected, and not arrived.
        self._table[table_rows, NUMBER], self._table[table_rows, RUN] = new_numbers, _NOTHING
        # Documents before the cursor were open in the saved state, and are read again after a resume.
        new_reread = [n for n in numbers[numbers < oldest].tolist() if source * _ABOVE + n not in self._open]
        self._open.update((source * _ABOVE + n, (_NOTHING, 0, 0)) for n in new_reread)
        return np.concatenate([np.asarray(new_reread, np.int64), new_numbers])

    def holds(self, pieces: Pieces) -> bool:
        """True if all documents of `pieces` have arrived."""
        return bool((self._find(pieces.source, pieces.document)[0] >= 0).all())

    def find(self, source: int, number: int) -> tuple[ChunkRun, int] | None:
        """Returns the run of a document and its index in the run; None if it has not arrived."""
        run_index = int(self._find(*(np.asarray([value], np.int64) for value in (source, number)))[0][0])
        if run_index < 0:
            return None
        run = self._runs[run_index]
        assert run is not None
        return run, int(np.searchsorted(run.numbers, number))

    def spans(self, pieces: Pieces) -> Spans:
        """Returns where the ids of each piece lie; all must have arrived. Raises UserError like
        `collate.SpansOf`.
        """
        run, first, stop = self._find(pieces.source, pieces.document)
        # `first` is the document's first token in the ids of its run; pieces count from the document's start.
        end = first + pieces.end
        # A piece planned with a length from an index may end beyond what the loader has read now.
        if (end > stop).any():
            piece = int(np.argmax(end > stop))
            length = int(stop[piece] - first[piece])
            raise shrunk_error(
                int(pieces.source[piece]), int(pieces.document[piece]), int(pieces.end[piece]), length
            )
        return Spans(self._ids, self._memory, run, first + pieces.start)

    def ignored(self, pieces: Pieces) -> list[Int[np.ndarray, "_ 3"]]:
        """Returns the runs of each piece that are not learned, counted from its first token; all must have
        arrived.
        """
        run_indexes, first, _ = self._find(pieces.source, pieces.document)
        token_spans = zip(
            run_indexes.tolist(), (first + pieces.start).tolist(), (first + pieces.end).tolist(), strict=True
        )
        ignored_runs = []
        for run_index, start, end in token_spans:
            run = self._runs[run_index]
            assert run is not None
            ignored_runs.append(runs_within(run.ignored, start, end) if len(run.ignored) else run.ignored)
        return ignored_runs

    def drop(
        self,
        passed_keys: Int64[np.ndarray, " n"],
        open_keys: Int64[np.ndarray, " open"],
        cursors: Int64[np.ndarray, " sources"],
    ) -> list[tuple[ChunkRun, int]]:
        """Drops the documents of `passed_keys` and releases the runs that are no longer needed.

        Args:
          passed_keys: keys of documents to drop.
          open_keys: keys of documents before `cursors` that are still needed; none is in `passed_keys`.
          cursors: first document of each source that is still to be drawn.

        Returns:
          (run, number) of each dropped document that its run lists as skipped.
        """
        source, number = split_keys(passed_keys)
        open_source, open_number = split_keys(open_keys)
        open_rows = self._table_rows(open_source, open_number)
        # Before the cursors move: open documents leave the ring, whose rows the next documents will take.
        on_ring = self._table[open_rows, NUMBER] == open_number
        for key, (_, run_index, first, stop) in zip(
            open_keys[on_ring].tolist(), self._table[open_rows[on_ring]].tolist(), strict=True
        ):
            self._open.setdefault(key, (run_index, first, stop))
        run = self._remove(source, number)
        if self._open and len(passed_keys):
            # A document that was open may be on the ring as well.
            for index in np.flatnonzero(run < 0).tolist():
                run[index] = self._open.get(int(passed_keys[index]), (_NOTHING, 0, 0))[0]
            ascending = np.sort(passed_keys)
            ring_less = np.fromiter(self._open, np.int64, len(self._open))
            # np.isin would do, but it imports numpy.ma: 3 MB in each process.
            index = np.minimum(np.searchsorted(ascending, ring_less), len(passed_keys) - 1)
            for key in ring_less[ascending[index] == ring_less].tolist():
                del self._open[key]
        self._cursors = cursors
        # One count per run instead of one decrement per document.
        num_dropped = np.bincount(run[run >= 0], minlength=len(self._live))
        self._live -= num_dropped
        skipped: list[tuple[ChunkRun, int]] = []
        # Most runs have no skipped documents, and a step takes documents of hundreds of runs.
        for run_index in sorted(self._with_skipped.intersection(run.tolist())) if self._with_skipped else ():
            touched_run = self._runs[run_index]
            assert touched_run is not None
            skipped += [
                (touched_run, n) for n in number[run == run_index].tolist() if n in touched_run.skipped
            ]
        for run_index in np.flatnonzero((num_dropped > 0) & (self._live == 0)).tolist():
            finished_run = self._runs[run_index]
            assert finished_run is not None
            self._runs[run_index], self._ids[run_index] = None, _NO_IDS
            self._with_skipped.discard(run_index)
            # Its ids are let go (`_ids` above) first: the pool uses their memory again.
            self._unused.append(run_index)
            self._release(finished_run)
        return skipped

    def _remove(
        self, source: Int64[np.ndarray, " n"], number: Int64[np.ndarray, " n"]
    ) -> Int64[np.ndarray, " n"]:
        """Takes documents out of their rings; returns the run of each, -1 if it is not there or has not
        arrived.
        """
        if (library := core()) is not None:
            run = np.empty(len(number), np.int64)
            columns = (source, number, self._base, self._size, self._table, run)
            library.drop_documents(len(number), *(address(column, np.int64) for column in columns))
            return run
        table_rows = self._table_rows(source, number)
        # A row may belong to a newer document by now: only rows that still have this number are cleared.
        on_ring = self._table[table_rows, NUMBER] == number
        run = np.where(on_ring, self._table[table_rows, RUN], _NOTHING)
        self._table[table_rows[on_ring], NUMBER] = _NOTHING
        return run

    def _table_rows(
        self, source: Int64[np.ndarray, " n"], number: Int64[np.ndarray, " n"]
    ) -> Int64[np.ndarray, " n"]:
        return self._base[source] + (number & (self._size[source] - 1))

    def _find(
        self, source: Int64[np.ndarray, " n"], number: Int64[np.ndarray, " n"]
    ) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """Returns the run of each document, -1 if it has not arrived, and the document's start and end in the
        run.
        """
        if (library := core()) is not None:
            run, first, stop = np.empty((3, len(number)), np.int64)
            # Columns of a plan are contiguous, those of a carry are not.
            source, number = np.ascontiguousarray(source), np.ascontiguousarray(number)
            columns = (source, number, self._base, self._size, self._table, run, first, stop)
            library.find_documents(len(number), *(address(column, np.int64) for column in columns))
        else:
            # A copy, as the index is an array: the writes below do not change the table.
            rows = self._table[self._table_rows(source, number)]
            run = np.where(rows[:, NUMBER] == number, rows[:, RUN], _NOTHING)
            first, stop = rows[:, FIRST], rows[:, STOP]
        if self._open:
            not_in_ring = np.flatnonzero(run < 0)
            for index, key in zip(
                not_in_ring.tolist(), keys_of(source, number)[not_in_ring].tolist(), strict=True
            ):
                run[index], first[index], stop[index] = self._open.get(key, (_NOTHING, 0, 0))
        return run, first, stop

    def _grow(self, source: int, span: int) -> None:
        """Moves a source to a ring for `span` documents at the table's end; its old rows stay empty."""
        old_ring = self._table[self._base[source] : self._base[source] + self._size[source]]
        # A copy, as the index is a mask: the next line clears the old rows only.
        used_rows = old_ring[old_ring[:, NUMBER] != _NOTHING]
        old_ring[:, NUMBER] = _NOTHING
        # Next power of two, so that old rings take at most as many rows as the rings in use.
        size = 1 << (span - 1).bit_length()
        # At least twice the room, so that the table is not copied for each source that grows.
        if self._table_end + size > len(self._table):
            more_rows = np.full((self._table_end + size, 4), _NOTHING, np.int64)
            self._table = np.concatenate([self._table[: self._table_end], more_rows])
        self._base[source], self._size[source] = self._table_end, size
        self._table_end += size
        self._table[self._base[source] + (used_rows[:, NUMBER] & (size - 1))] = used_rows
