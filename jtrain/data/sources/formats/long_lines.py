"""Marks within long JSON lines, so that a part of a text is read without parsing the whole line again.

The chunks of a long document are read at different times, in the order of a shuffle. Without marks each of
them parses the line that holds the whole document: a line of 64 KiB eight times for chunks of 8 KiB. The
first time, the line is parsed as a whole, and marks are kept: at some places of the text, the byte of the
line that stands for it.
"""

import collections
import json
import re
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

LONG_LINE_BYTES = 1 << 14
"""Shortest line that is marked."""

_MARK_BYTES = 1 << 11
"""Bytes of text between two marks, which take 16 bytes."""

_MOST_MARKS = 1 << 20
"""Marks that a process keeps: of 2 GiB of text, in 16 MiB. The lines that were marked or read the longest ago
go."""

_MOST_CANDIDATES = 4
"""Places of a line that are looked at for its text, since other strings may hold the same words."""

_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)", re.DOTALL
)


class TextPart(NamedTuple):
    """Part of a text: its UTF-8 bytes, the number of bytes before it, and the bytes of the whole text."""

    content: bytes
    first: int
    total: int


class Marks(NamedTuple):
    """Marks of one line: bytes of text before each mark, ascending, and the matching byte of the line.

    The first mark is the begin of the text, the last one its end.
    """

    text: Int64[np.ndarray, " marks"]
    line: Int64[np.ndarray, " marks"]

    def around(self, start: int, stop: int) -> tuple[int, int, int]:
        """Returns, for a span of the text, the text's bytes before the mark at or before `start`, that mark's
        byte in the line, and the line's byte of the first mark at or behind `stop`.
        """
        low = int(np.searchsorted(self.text, start, side="right")) - 1
        high = min(int(np.searchsorted(self.text, stop)), len(self.text) - 1)
        return int(self.text[low]), int(self.line[low]), int(self.line[max(high, low)])

    @property
    def total(self) -> int:
        """Bytes of the text."""
        return int(self.text[-1])


class MarkCache:
    """Marks of the lines read last, over all files of a process; a line's key is its file and number."""

    def __init__(self, most_marks: int = _MOST_MARKS) -> None:
        self._marks: collections.OrderedDict[tuple[object, int], Marks] = collections.OrderedDict()
        self._max_marks = most_marks
        self._count = 0

    def __len__(self) -> int:
        return len(self._marks)

    def get(self, file: object, record: int) -> Marks | None:
        """Returns the marks of a line, which are then the last to go."""
        if (marks := self._marks.get((file, record))) is not None:
            self._marks.move_to_end((file, record))
        return marks

    def add(self, file: object, record: int, marks: Marks) -> None:
        """Keeps the marks of a line, and drops others if they are too many."""
        if (file, record) in self._marks:
            return
        self._marks[file, record] = marks
        self._count += len(marks.text)
        # The newest marks stay whatever their number, or a very long line would be marked at each read.
        while self._count > self._max_marks and len(self._marks) > 1:
            _, oldest = self._marks.popitem(last=False)
            self._count -= len(oldest.text)


def marks_of(line: bytes, text: str, text_field: str) -> Marks | None:
    """Returns the marks of a JSON line whose `text_field` holds `text`; None if it does not."""
    content = text.encode("utf-8")
    # For `meta.text` the key `text`, which other objects of the line may have too.
    key = json.dumps(text_field.rpartition(".")[2], ensure_ascii=False).encode()
    for number, match in enumerate(re.finditer(re.escape(key) + rb'\s*:\s*"', line)):
        if number == _MOST_CANDIDATES:
            break
        if (marks := _marks_from(line, match.end(), content)) is not None:
            return marks
    return None


def _marks_from(line: bytes, begin: int, content: bytes) -> Marks | None:
    """Returns the marks if the string that begins at byte `begin` of the line spells `content`."""
    mark_at = np.arange(0, len(content), _MARK_BYTES)
    letters = np.frombuffer(content + b"\0", np.uint8)
    for _ in range(3):  # no mark inside of a character, which has at most 4 bytes
        split_marks = np.flatnonzero((letters[mark_at] & 0xC0) == 0x80)
        mark_at[split_marks] += 1
    escape_at, longer_by = _escapes(line, begin, len(content))
    end = begin + len(content) + int(longer_by[-1])
    # Decodes once what the marks will be used for: a wrong guess of the string would give wrong text.
    if not _spells(line[begin - 1 : end + 1], content):
        return None
    # The end is a mark too, so that `around` has one behind every span.
    mark_at = np.append(mark_at, len(content))
    return Marks(mark_at, mark_at + begin + longer_by[np.searchsorted(escape_at, mark_at)])


def _escapes(
    line: bytes, begin: int, size: int
) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n_and_1"]]:
    r"""Returns the bytes of text before each escape, and how much longer the line is before each, and in all.

    In `a\nb` the escape stands behind 1 byte of text, and from there on the line is 1 byte longer.

    Args:
      begin: byte of the line at which the string begins.
      size: bytes of its text.
    """
    if line.find(b"\\u", begin) < 0 and line.find(b"\\\\", begin) < 0:
        # The frequent case, in numpy: each backslash stands before one letter, and both spell one byte.
        offset = np.flatnonzero(np.frombuffer(line, np.uint8)[begin:] == ord("\\"))
        offset -= np.arange(len(offset))
        offset = offset[: np.searchsorted(offset, size)]
        return offset, np.arange(len(offset) + 1)
    escape_at, longer_by, extra = [], [0], 0
    for escape in _ESCAPE.finditer(line, begin):
        offset = escape.start() - begin - extra
        if offset >= size:
            break
        code = escape.group()
        if code[1:2] != b"u":
            num_bytes = 1
        # A surrogate pair, `\ud83d\ude00`: one character of 4 bytes in UTF-8.
        elif len(code) == 12:
            num_bytes = 4
        else:
            value = int(code[2:], 16)
            # Bytes of the character in UTF-8.
            num_bytes = 1 if value < 0x80 else 2 if value < 0x800 else 3
        extra += len(code) - num_bytes
        escape_at.append(offset)
        longer_by.append(extra)
    return np.asarray(escape_at, np.int64), np.asarray(longer_by, np.int64)


def _spells(quoted: bytes, content: bytes) -> bool:
    try:
        return text_of_part(quoted[1:-1]) == content and quoted.endswith(b'"')
    except ValueError:
        return False


def text_of_part(part: bytes) -> bytes:
    """Returns the text of a part of a JSON string, as UTF-8; raises ValueError if it is no such part."""
    if b"\\" not in part:
        part.decode("utf-8")
        return part
    return json.loads(b'"' + part + b'"').encode("utf-8")
