"""Buffer of tokenised documents waiting to be packed, indexed by (source, document number).

It is made of arrays, because documents are looked up and dropped hundreds at a time: dicts of dicts took
three times as long, most of it waiting for memory (bench/NOTES.md).
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Int, Int64

from jtrain.data.constructor.collate import shrunk
from jtrain.data.loaders.messages import ChunkRun
from jtrain.data.loss_mask import runs_within
from jtrain.data.planner.pieces import Pieces

NUMBER, RUN, FIRST, STOP = range(4)
"""Columns of the table of documents."""

_SMALLEST = 64
_NOTHING = -1
_NO_IDS = np.empty(0, np.int32)
_ABOVE = 1 << 40
"""Upper bound of document numbers, so that source * _ABOVE + number is a unique key."""


def keys_of(source: Int64[np.ndarray, " n"], number: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
    """Returns one key per document, from its source and number."""
    return source * _ABOVE + number


def places_of(keys: Int64[np.ndarray, " n"]) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
    """Returns the source and the number of each key."""
    return keys // _ABOVE, keys % _ABOVE


class ChunkBuffer:
    """Ring buffer per source that maps a document number to the run and the token range of its ids.

    Document n is at position n modulo the size of the ring. A document before the cursor of its source that
    is still needed is kept outside the ring (`_open`), so a ring is only as long as its source is read ahead.

    Args:
      cursors: first document of each source that is still to be drawn.
      release: called with a run when none of its documents is needed any more.
    """

    def __init__(self, cursors: Int64[np.ndarray, " sources"], release: Callable[[ChunkRun], None]) -> None:
        num_sources = len(cursors)
        self._release = release
        self._size = np.full(num_sources, _SMALLEST, np.int64)
        self._base = np.arange(num_sources) * _SMALLEST
        self._used = num_sources * _SMALLEST
        self._table = np.full((self._used, 4), _NOTHING, np.int64)
        """Number, run, first token and end of each document: a look-up reads one row, and so one cache
        line."""
        self._open: dict[int, tuple[int, int, int]] = {}
        self._runs: list[ChunkRun | None] = []
        self._ids: list[np.ndarray] = []
        self._unused: list[int] = []
        self._live = np.zeros(0, np.int64)
        self._cursors = cursors

    def put(self, run: ChunkRun) -> None:
        """Adds a run, whose document numbers ascend."""
        at = self._unused.pop() if self._unused else len(self._runs)
        if at == len(self._runs):
            self._runs.append(None)
            self._ids.append(run.ids)
            if at >= len(self._live):
                self._live = np.concatenate([self._live, np.zeros(max(64, at), np.int64)])
        self._runs[at], self._ids[at], self._live[at] = run, run.ids, len(run.numbers)
        source, numbers = run.source, run.numbers
        starts, ends = run.bounds
        oldest = int(self._cursors[source])
        if int(numbers[0]) < oldest:  # documents that were open in the state that the run resumed from
            behind = int(np.searchsorted(numbers, oldest))
            for i, number in enumerate(numbers[:behind].tolist()):
                self._open[source * _ABOVE + number] = at, int(starts[i]), int(ends[i])
            numbers, starts, ends = numbers[behind:], starts[behind:], ends[behind:]
            if not len(numbers):
                return
        if int(numbers[-1]) - oldest >= self._size[source]:
            self._grow(source, int(numbers[-1]) - oldest + 1)
        rows = np.empty((len(numbers), 4), np.int64)
        rows[:, NUMBER], rows[:, RUN], rows[:, FIRST], rows[:, STOP] = numbers, at, starts, ends
        self._table[self._base[source] + (numbers & (self._size[source] - 1))] = rows

    def expect(self, source: int, numbers: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " new"]:
        """Marks documents as asked for; returns the new ones among them, ascending. `numbers` has no
        duplicates.
        """
        if not len(numbers):
            return numbers
        oldest = int(self._cursors[source])
        ahead = numbers[numbers >= oldest]
        if len(ahead) and int(ahead.max()) - oldest >= self._size[source]:
            self._grow(source, int(ahead.max()) - oldest + 1)
        place = self._base[source] + (ahead & (self._size[source] - 1))
        new = ahead[self._table[place, NUMBER] != ahead]
        place = self._base[source] + (new & (self._size[source] - 1))
        self._table[place, NUMBER], self._table[place, RUN] = new, _NOTHING
        behind = [n for n in numbers[numbers < oldest].tolist() if source * _ABOVE + n not in self._open]
        self._open.update((source * _ABOVE + n, (_NOTHING, 0, 0)) for n in behind)
        return np.concatenate([np.asarray(behind, np.int64), new])

    def holds(self, pieces: Pieces) -> bool:
        """True if all documents of `pieces` have arrived."""
        return bool((self._find(pieces.source, pieces.document)[0] >= 0).all())

    def find(self, source: int, number: int) -> tuple[ChunkRun, int] | None:
        """Returns the run of a document and its index in the run; None if it has not arrived."""
        at = int(self._find(*(np.asarray([x], np.int64) for x in (source, number)))[0][0])
        if at < 0:
            return None
        run = self._runs[at]
        assert run is not None
        return run, int(np.searchsorted(run.numbers, number))

    def views(self, pieces: Pieces) -> list[np.ndarray]:
        """Returns the ids of each piece; all must have arrived. Raises UserError like `collate.Views`."""
        run, first, stop = self._find(pieces.source, pieces.document)
        end = first + pieces.end
        if (end > stop).any():
            at = int(np.argmax(end > stop))
            length = int(stop[at] - first[at])
            raise shrunk(int(pieces.source[at]), int(pieces.document[at]), int(pieces.end[at]), length)
        ids = self._ids
        where = zip(run.tolist(), (first + pieces.start).tolist(), end.tolist(), strict=True)
        return [ids[r][a:b] for r, a, b in where]

    def ignored(self, pieces: Pieces) -> list[Int[np.ndarray, "_ 2"]]:
        """Returns the runs of each piece that are not learned, counted from its first token; all must have
        arrived.
        """
        at, first, _ = self._find(pieces.source, pieces.document)
        where = zip(at.tolist(), (first + pieces.start).tolist(), (first + pieces.end).tolist(), strict=True)
        found = []
        for i, start, end in where:
            run = self._runs[i]
            assert run is not None
            found.append(runs_within(run.ignored, start, end) if len(run.ignored) else run.ignored)
        return found

    def drop(
        self,
        done: Int64[np.ndarray, " n"],
        kept: Int64[np.ndarray, " open"],
        cursors: Int64[np.ndarray, " sources"],
    ) -> list[tuple[ChunkRun, int]]:
        """Drops the documents `done` and releases the runs that are no longer needed.

        Args:
          done: keys of documents to drop.
          kept: keys of documents before `cursors` that are still needed; none of them is in `done`.
          cursors: first document of each source that is still to be drawn.

        Returns:
          (run, number) of each dropped document that its run lists as skipped.
        """
        source, number = places_of(done)
        run, _, _ = self._find(source, number)
        kept_source, kept_number = places_of(kept)
        kept_place = self._place(kept_source, kept_number)
        on_ring = self._table[kept_place, NUMBER] == kept_number
        for key, (_, at, first, stop) in zip(
            kept[on_ring].tolist(), self._table[kept_place[on_ring]].tolist(), strict=True
        ):
            self._open.setdefault(key, (at, first, stop))
        if self._open:
            ascending = np.sort(done)
            opened = np.fromiter(self._open, np.int64, len(self._open))
            at = np.minimum(np.searchsorted(ascending, opened), len(done) - 1)
            for key in opened[ascending[at] == opened].tolist() if len(done) else ():
                del self._open[key]
        place = self._place(source, number)
        self._table[place[self._table[place, NUMBER] == number], NUMBER] = _NOTHING
        self._cursors = cursors
        here = run >= 0
        gone = np.bincount(run[here], minlength=len(self._live))
        self._live -= gone
        skipped: list[tuple[ChunkRun, int]] = []
        touched = np.flatnonzero(gone).tolist()
        for at in touched:
            if (found := self._runs[at]) is not None and found.skipped:
                skipped += [(found, n) for n in number[run == at].tolist() if n in found.skipped]
        for at in touched:
            if not self._live[at]:
                finished = self._runs[at]
                assert finished is not None
                self._runs[at], self._ids[at] = None, _NO_IDS
                self._unused.append(at)
                self._release(finished)
        return skipped

    def _place(
        self, source: Int64[np.ndarray, " n"], number: Int64[np.ndarray, " n"]
    ) -> Int64[np.ndarray, " n"]:
        return self._base[source] + (number & (self._size[source] - 1))

    def _find(
        self, source: Int64[np.ndarray, " n"], number: Int64[np.ndarray, " n"]
    ) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """Returns the run of each document, -1 if it has not arrived, and the document's start and end in the
        run.
        """
        rows = self._table[self._place(source, number)]
        run = np.where(rows[:, NUMBER] == number, rows[:, RUN], _NOTHING)
        first, stop = rows[:, FIRST], rows[:, STOP]
        if self._open:
            elsewhere = np.flatnonzero(run < 0)
            for at, key in zip(elsewhere.tolist(), keys_of(source, number)[elsewhere].tolist(), strict=True):
                run[at], first[at], stop[at] = self._open.get(key, (_NOTHING, 0, 0))
        return run, first, stop

    def _grow(self, source: int, span: int) -> None:
        """Moves a source to a ring for `span` documents at the end of the table; its old places stay
        empty.
        """
        old = self._table[self._base[source] : self._base[source] + self._size[source]]
        kept = old[old[:, NUMBER] != _NOTHING]
        old[:, NUMBER] = _NOTHING
        size = 1 << (span - 1).bit_length()
        if self._used + size > len(
            self._table
        ):  # twice the room: copying it for each source would take seconds
            more = np.full((self._used + size, 4), _NOTHING, np.int64)
            self._table = np.concatenate([self._table[: self._used], more])
        self._base[source], self._size[source] = self._used, size
        self._used += size
        self._table[self._base[source] + (kept[:, NUMBER] & (size - 1))] = kept
