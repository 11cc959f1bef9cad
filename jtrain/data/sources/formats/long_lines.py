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
    """Marks of one line: bytes of text before each mark, ascending, and the byte of the line where that text
    begins.

    The first mark is the begin of the text, the last one its end.
    """

    text: Int64[np.ndarray, " marks"]
    line: Int64[np.ndarray, " marks"]

    def around(self, start: int, stop: int) -> tuple[int, int, int]:
        """Returns the bytes of text before the last mark at or before `start`, and its byte and the end in
        the line.
        """
        low = int(np.searchsorted(self.text, start, side="right")) - 1
        high = min(int(np.searchsorted(self.text, stop)), len(self.text) - 1)
        return int(self.text[low]), int(self.line[low]), int(self.line[max(high, low)])

    @property
    def total(self) -> int:
        """Bytes of the text."""
        return int(self.text[-1])


class MarkCache:
    """Marks of the lines read last, over all files of a process. A line is known by its file's key and its
    number.
    """

    def __init__(self, most_marks: int = _MOST_MARKS) -> None:
        self._marks: collections.OrderedDict[tuple[object, int], Marks] = collections.OrderedDict()
        self._most = most_marks
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
        while self._count > self._most and len(self._marks) > 1:
            _, gone = self._marks.popitem(last=False)
            self._count -= len(gone.text)


def marks_of(line: bytes, text: str, text_field: str) -> Marks | None:
    """Returns the marks of a JSON line whose `text_field` holds `text`; None if the text is not found in the
    line.
    """
    content = text.encode("utf-8")
    key = json.dumps(text_field.rpartition(".")[2], ensure_ascii=False).encode()
    for number, found in enumerate(re.finditer(re.escape(key) + rb'\s*:\s*"', line)):
        if number == _MOST_CANDIDATES:
            break
        if (marks := _marks_from(line, found.end(), content)) is not None:
            return marks
    return None


def _marks_from(line: bytes, begin: int, content: bytes) -> Marks | None:
    """Returns the marks if the string that begins at byte `begin` of the line spells `content`."""
    places = np.arange(0, len(content), _MARK_BYTES)
    letters = np.frombuffer(content + b"\0", np.uint8)
    for _ in range(3):  # no mark inside of a character, which has at most 4 bytes
        inside = np.flatnonzero((letters[places] & 0xC0) == 0x80)
        places[inside] += 1
    text_at, before = _escapes(line, begin, len(content))
    end = begin + len(content) + int(before[-1])
    if not _spells(line[begin - 1 : end + 1], content):
        return None
    places = np.append(places, len(content))
    return Marks(places, places + begin + before[np.searchsorted(text_at, places)])


def _escapes(
    line: bytes, begin: int, size: int
) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n_and_1"]]:
    """Returns the bytes of text before each escape, and by how many bytes the line is longer before each, and
    in all.

    Args:
      begin: byte of the line at which the string begins.
      size: bytes of its text.
    """
    if (
        line.find(b"\\u", begin) < 0 and line.find(b"\\\\", begin) < 0
    ):  # each backslash stands before one letter
        at = np.flatnonzero(np.frombuffer(line, np.uint8)[begin:] == ord("\\"))
        at -= np.arange(len(at))
        at = at[: np.searchsorted(at, size)]
        return at, np.arange(len(at) + 1)
    text_at, before, extra = [], [0], 0
    for escape in _ESCAPE.finditer(line, begin):
        at = escape.start() - begin - extra
        if at >= size:
            break
        code = escape.group()
        if code[1:2] != b"u":
            takes = 1
        elif len(code) == 12:
            takes = 4
        else:
            value = int(code[2:], 16)
            takes = 1 if value < 0x80 else 2 if value < 0x800 else 3
        extra += len(code) - takes
        text_at.append(at)
        before.append(extra)
    return np.asarray(text_at, np.int64), np.asarray(before, np.int64)


def _spells(quoted: bytes, content: bytes) -> bool:
    try:
        return text_of_part(quoted[1:-1]) == content and quoted.endswith(b'"')
    except ValueError:
        return False


def text_of_part(part: bytes) -> bytes:
    """Returns the text of a part of a JSON string between two marks, as UTF-8; raises ValueError if it is
    none.
    """
    if b"\\" not in part:
        part.decode("utf-8")
        return part
    return json.loads(b'"' + part + b'"').encode("utf-8")
