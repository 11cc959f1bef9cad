"""Text files, cut into pieces, and JSON lines."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Int64

from jtrain.data.sources.cache import NumberTable
from jtrain.data.sources.formats.long_lines import (
    LONG_LINE_BYTES,
    NO_MARKS,
    Marks,
    TextPart,
    marks_of,
    text_of_part,
)
from jtrain.data.sources.formats.masked_text import TextFields
from jtrain.data.sources.formats.record import (
    SKIP,
    BadRecord,
    Records,
    field_at,
    plain_text_of_json,
    text_of_json,
)
from jtrain.data.sources.latest_values import LatestValues
from jtrain.data.sources.storage import StoredFile

BOM = b"\xef\xbb\xbf"
_LINE_SEARCH_BYTES = 4096
"""Bytes after a cut that are searched for the end of a line."""

_MOST_READ_IN_VAIN = 8
"""Bytes read per byte of the lines wanted where all lines are read at once: a read of its own takes 1 us."""

BLOCK_BYTES = 1 << 24
"""Bytes that are searched for line ends at a time."""

_SHORT_LINES = 4096
"""Lines of one or two bytes that are read at a time, to tell blank ones."""

_ROWS_AT_ONCE = 1 << 20
"""Rows of an index that are looked through at a time."""

_LINES_COUNTED_BYTES = 1 << 24
"""Largest offset at which a bad line is named by its number: counting takes 5 ms, and there may be
thousands."""


class TextFile(Records):
    """Text file: one document, or several of about `piece_bytes` each if it is longer.

    Pieces end after a line, or between two characters if no line ends within 4 KiB. Without pieces, a book in
    one file could be neither shuffled nor partly held out, and would be held in memory as a whole.
    """

    __slots__ = ("_file", "_first", "_piece_bytes")

    def __init__(self, file: StoredFile, *, piece_bytes: int) -> None:
        self._file = file
        self._piece_bytes = piece_bytes
        # Piece of the file at which a stripe begins: a multiple of the size of a piece.
        self._first = file.span[0] // piece_bytes if file.span else 0

    def __len__(self) -> int:
        # By size alone, so that opening a folder of text files reads none of them.
        begin, end = self._file.span or (0, self._file.size_bytes)
        return -(-(end - begin) // self._piece_bytes)

    def count_before(self, offsets: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        # Pieces that begin before an offset, by their nominal starts.
        return -(-offsets // self._piece_bytes)

    sizes_need_reading = False

    def sizes(self, first: int, end: int) -> Int[np.ndarray, " n"]:
        """Returns the most bytes that each piece can have: it ends within 4 KiB after its nominal end."""
        nominal = np.arange(self._first + first, self._first + end + 1, dtype=np.int64) * self._piece_bytes
        stop = np.minimum(nominal[1:] + min(_LINE_SEARCH_BYTES, self._piece_bytes), self._file.size_bytes)
        return stop - nominal[:-1]

    def read(self, records: list[int]) -> list[str | BadRecord]:
        with self._file.open() as file:
            return [self._piece(file, self._first + record) for record in records]

    def _piece(self, file: Any, index: int) -> str | BadRecord:
        # A piece ends where the next one starts, so both ends follow from the same rule and none overlaps.
        start = self._cut(file, index)
        end = self._cut(file, index + 1)
        file.seek(start)
        content = file.read(end - start)
        if start == 0:
            content = content.removeprefix(BOM)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            return BadRecord(
                f"{self._file.label}: not UTF-8 at byte {end - len(content) + error.start} "
                f"({error.reason}). Convert the file to UTF-8, leave it out, {SKIP}"
            )

    def _cut(self, file: Any, index: int) -> int:
        """Returns the byte at which piece `index` starts, reading only the bytes after its nominal start."""
        nominal = index * self._piece_bytes
        if index == 0 or nominal >= self._file.size_bytes:
            return min(nominal, self._file.size_bytes)
        file.seek(nominal)
        search_bytes = file.read(min(_LINE_SEARCH_BYTES, self._piece_bytes))
        # 0 where no line ends.
        line_end = search_bytes.find(b"\n") + 1
        if line_end:
            return nominal + line_end
        # After the character that the cut falls into: at most 3 bytes further, which may be the end of the
        # file.
        cut_character = search_bytes[:4]
        return nominal + next(
            (i for i, byte in enumerate(cut_character) if byte & 0xC0 != 0x80), len(cut_character) % 4
        )


_KEPT_MARKS = LatestValues[Marks](1 << 24)
"""Marks of the lines of this process, by file and number: of 2 GiB of text."""


class Lines(NamedTuple):
    """JSON lines, unparsed: bytes that hold them, and where each begins and ends there."""

    content: bytes
    start: Int64[np.ndarray, " lines"]
    end: Int64[np.ndarray, " lines"]

    @classmethod
    def none(cls, num: int) -> "Lines":
        """Returns so many empty lines, which stand for those that are read otherwise."""
        return cls(b"", np.zeros(num, np.int64), np.zeros(num, np.int64))


class JsonLines(Records):
    """JSON lines file: one object per line, its text in a field; blank lines are not records.

    Opening finds the line starts at about 1 GB/s and parses nothing. For files above 1 MiB that index, 16
    bytes per record, is kept in the cache folder; for a part of a file, which has the lines that start in it,
    in memory.
    """

    __slots__ = ("_fields", "_file", "_key", "_lines", "_longest_bytes")

    def __init__(
        self,
        file: StoredFile,
        fields: TextFields,
        *,
        cache_dir: Path,
        report_bytes: Callable[[int], None] = lambda size_bytes: None,
    ) -> None:
        self._file = file
        self._fields = fields
        self._longest_bytes: int | None = None
        # Of the marks: the same for each time that this content is opened.
        self._key = file.location, file.size_bytes, file.version, file.span, fields.text
        # Parts are opened and forgotten as a run goes on, so their indexes stay in memory.
        self._lines = NumberTable(
            file, "lines", lambda: _lines(file, report_bytes), cache_dir, in_memory=file.span is not None
        )

    def __len__(self) -> int:
        return len(self._lines)

    def count_before(self, offsets: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        # Bisects all offsets together: the table may lie in a file of millions of rows, and none is kept.
        low, high = np.zeros_like(offsets), np.full_like(offsets, len(self._lines))
        while (open_offsets := np.flatnonzero(low < high)).size:
            middle = (low + high)[open_offsets] // 2
            starts = np.asarray(self._lines.rows(middle.tolist()), np.int64)[:, 0]
            is_before = starts < offsets[open_offsets]
            low[open_offsets[is_before]] = middle[is_before] + 1
            high[open_offsets[~is_before]] = middle[~is_before]
        return low

    sizes_need_reading = False

    def sizes(self, first: int, end: int) -> Int[np.ndarray, " n"]:
        """Returns the bytes of each line, in which the text takes at least as many as by itself."""
        return self._lines.sizes(first, end)

    def read(self, records: list[int]) -> list[str | BadRecord]:
        texts: list[str | BadRecord] = []
        with self._file.open() as file:
            rows = self._lines.rows(records)
            for (start, _), line in zip(rows, _contents(file.fileno(), rows), strict=True):
                if (
                    self._fields.mask is None
                    and (plain := plain_text_of_json(line, self._fields.text)) is not None
                ):
                    texts.append(plain)
                    continue
                content, label = line.removeprefix(BOM), self._file.label
                text = text_of_json(
                    content,
                    self._fields,
                    label=label,
                    way_out="Mend the line",
                    position_suffix=" of the line",
                )
                if isinstance(text, BadRecord):  # to find the number of a line takes long
                    text = BadRecord(str(text).replace(label, self._describe_line(start), 1))
                texts.append(text)
        return texts

    def lines(self, records: Int[np.ndarray, " n"], *, below_bytes: int) -> Lines:
        """Returns the bytes of these lines, unparsed; nothing of those of `below_bytes` or more, or with a
        mask.
        """
        pairs = self._lines.pairs(records).astype(np.int64, copy=False)
        start, size = pairs[:, 0], pairs[:, 1] - pairs[:, 0]
        is_short = size < below_bytes
        if self._fields.mask is not None or not is_short.any():
            return Lines.none(len(records))
        # An empty span in the place of each longer line, so that all lines have one.
        size = np.where(is_short, size, 0)
        first, last = int(start[is_short].min()), int((start + size)[is_short].max())
        with self._file.open() as file:
            if _lie_close(first, last, int(size.sum())):
                # All of them in one read, with what lies between.
                content, start = read_span(file.fileno(), first, last), np.where(is_short, start - first, 0)
            else:
                spans = zip(start.tolist(), (start + size).tolist(), strict=True)
                content = b"".join(read_span(file.fileno(), *span) for span in spans)
                start = np.cumsum(size) - size
        if len(content) < (start + size).max():  # cut short: reading the lines one by one says so
            return Lines.none(len(records))
        return Lines(content, start, start + size)

    def parts(
        self, records: list[int], spans: list[tuple[int, int]], *, min_bytes: int = 0
    ) -> list[TextPart | None]:
        """Returns the bytes of a span of each text, or more around them; None for lines below `min_bytes`,
        with a mask, or whose text is no long string. The first time, a line is scanned for its marks.
        """
        parts: list[TextPart | None] = [None] * len(records)
        min_bytes = max(min_bytes, LONG_LINE_BYTES)
        if self._fields.mask is not None or self._longest() < min_bytes:
            return parts
        rows = self._lines.rows(records)
        with self._file.open() as file:
            for i, (start, end) in enumerate(rows):
                if (
                    end - start < min_bytes
                    or (marks := self._marks(file.fileno(), records[i], start, end)) is None
                ):
                    continue
                first, low, high = marks.around(*spans[i])
                try:
                    content = text_of_part(read_span(file.fileno(), low, high))
                except ValueError:
                    continue  # the file has changed: reading the text as a whole says what is wrong
                parts[i] = TextPart(content, first, marks.total)
        return parts

    def _longest(self) -> int:
        """Returns the bytes of the longest line; looked up once."""
        if self._longest_bytes is None:
            blocks = range(0, len(self), _ROWS_AT_ONCE)
            sizes = (
                self._lines.sizes(first, min(first + _ROWS_AT_ONCE, len(self))).max() for first in blocks
            )
            self._longest_bytes = max(map(int, sizes), default=0)
        return self._longest_bytes

    def _marks(self, file: int, record: int, start: int, end: int) -> Marks | None:
        if (marks := _KEPT_MARKS.get((self._key, record))) is None:
            start += len(BOM) if read_span(file, start, start + len(BOM)) == BOM else 0
            marks = marks_of(lambda first, last: read_span(file, first, last), start, end, self.text_of)
            # Kept too, so that a line without marks is scanned once.
            marks = NO_MARKS if marks is None else marks
            _KEPT_MARKS.add((self._key, record), marks, marks.size_bytes)
        return None if marks is NO_MARKS else marks

    def text_of(self, record: dict[str, Any]) -> Any:
        # With labels it may be refused.
        return None if "labels" in record else field_at(record, self._fields.text)

    def _describe_line(self, start: int) -> str:
        if start > _LINES_COUNTED_BYTES:
            return f"{self._file.label}, the line at byte {start:,}"
        with self._file.open() as file:
            return f"{self._file.label}, line {file.read(start).count(b'\n') + 1}"


def _lie_close(first: int, last: int, wanted_bytes: int) -> bool:
    """True if all from byte `first` to `last` should be read at once, of which `wanted_bytes` are wanted."""
    return last - first <= _MOST_READ_IN_VAIN * wanted_bytes


def _contents(file: int, rows: list[list[int]]) -> Iterator[bytes]:
    """Yields the bytes from start to end of each row; reads rows that lie close together at once."""
    if not rows:
        return
    first, last = min(start for start, _ in rows), max(end for _, end in rows)
    if not _lie_close(first, last, sum(end - start for start, end in rows)):
        for start, end in rows:
            yield read_span(file, start, end)
        return
    content = read_span(file, first, last)
    for start, end in rows:
        yield content[start - first : end - first]


def read_span(file: int, start: int, end: int) -> bytes:
    """Returns bytes `start` to `end` of an open file; fewer if it ends before."""
    # `pread` may return fewer bytes than asked for, and at most 2 GiB at a time.
    content = os.pread(file, end - start, start)
    while start + len(content) < end and (
        block := os.pread(file, end - start - len(content), start + len(content))
    ):
        content += block
    return content


def _lines(file: StoredFile, report_bytes: Callable[[int], None]) -> Int[np.ndarray, "records 2"]:
    """Returns the start of each non-blank line that begins in the file or stripe, and that of the next
    line.
    """
    size = file.size_bytes
    begin, stop = file.span or (0, size)
    # Line starts are line ends plus 1; the -1 stands for the end before the first line.
    line_ends: list[np.ndarray] = [np.full(1, -1, np.int64)] if begin == 0 else []
    with file.open() as handle:
        descriptor = handle.fileno()
        # From the byte before the stripe: if it ends a line, a line of the stripe starts at `begin`.
        for start in range(max(begin - 1, 0), stop, BLOCK_BYTES):
            content = np.frombuffer(read_span(descriptor, start, min(start + BLOCK_BYTES, stop)), np.uint8)
            line_ends.append(np.flatnonzero(content == ord("\n")) + start)
            report_bytes(min(start + BLOCK_BYTES, stop) - begin)
        starts = np.concatenate(line_ends) + 1 if line_ends else np.empty(0, np.int64)
        # A line that ends with the stripe's last byte is followed by one that begins in the next stripe.
        # Where no line begins, as within a long one, there is none whose end is wanted.
        ends_here = not len(starts) or starts[-1] == stop
        last_end = stop if ends_here else _line_end(descriptor, stop, size)
    starts = starts[starts < stop]
    rows = np.stack([starts, np.append(starts[1:], last_end)[: len(starts)]], axis=1)
    # Most blank lines are told by their size; the others, "\r\n", by their first byte.
    lengths = rows[:, 1] - rows[:, 0]
    is_blank = lengths == 1
    is_blank[-1:] &= rows[-1:, 1] < size  # the last byte of a file may be anything
    short = np.flatnonzero((lengths <= 2) & ~is_blank)
    with file.open() as handle:
        for start in range(0, len(short), _SHORT_LINES):
            batch = short[start : start + _SHORT_LINES]
            lines = _contents(handle.fileno(), rows[batch].tolist())
            is_blank[batch] = [line in (b"\n", b"\r\n") for line in lines]
    return rows[~is_blank]


def _line_end(file: int, start: int, size: int) -> int:
    """Returns the byte behind the line that byte `start` of an open file belongs to."""
    step = _LINE_SEARCH_BYTES
    while start < size:
        content = read_span(file, start, min(start + step, size))
        if end := content.find(b"\n") + 1:
            return start + end
        if not content:
            break
        start += len(content)
        step = min(2 * step, BLOCK_BYTES)
    return size
