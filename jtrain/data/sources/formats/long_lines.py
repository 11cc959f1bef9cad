"""Marks within long JSON lines, so that a part of a text is read without the rest of its line.

The chunks of a long document are read at different times, in the order of a shuffle. Without marks each of
them parses the line that holds the whole document: a line of 64 KiB eight times for chunks of 8 KiB. A line
is scanned once instead, in blocks, and never held in memory: first for its long strings, which are left out
of the JSON that is parsed, then the string that is the text, for marks: at some places of the text, the byte
of the line that stands for it.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int64, UInt8

LONG_LINE_BYTES = 1 << 14
"""Shortest line that is marked."""

MARK_BYTES = 1 << 11
"""Bytes of text between two marks, which take 16 bytes."""

BLOCK_BYTES = 1 << 22
"""Bytes of a line that are scanned at a time; each takes about 10 bytes of memory."""

LONG_STRING_BYTES = 1 << 10
"""Shortest string that is left out of the JSON that is parsed."""

_MOST_SKELETON_BYTES = 1 << 26
"""Most bytes of a line without its long strings; a line with more is read as a whole."""

_STANDS_FOR = "\x01long string "
"""Begin of the strings that stand for the long ones."""

_ESCAPE_BYTES = 12
"""Bytes of the longest escape, a surrogate pair."""

_QUOTE, _BACKSLASH, _SPACE, _U = b'"\\ u'
_HEX = np.full(256, -1, np.int32)
_HEX[list(b"0123456789abcdefABCDEF")] = [*range(16), *range(10, 16)]

ReadBytes = Callable[[int, int], bytes]
"""read(start, end) returns these bytes of a file."""


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
        # Methods: `np.searchsorted` takes three times as long for one number.
        low = int(self.text.searchsorted(start, side="right")) - 1
        high = min(int(self.text.searchsorted(stop)), len(self.text) - 1)
        return int(self.text[low]), int(self.line[low]), int(self.line[max(high, low)])

    @property
    def total(self) -> int:
        """Bytes of the text."""
        return int(self.text[-1])

    @property
    def size_bytes(self) -> int:
        """Bytes of the marks."""
        return self.text.nbytes + self.line.nbytes


NO_MARKS = Marks(np.zeros(0, np.int64), np.zeros(0, np.int64))
"""Stands for the marks of a line that has none, so that it is not scanned again."""


def marks_of(read: ReadBytes, start: int, end: int, text_of: Callable[[dict[str, Any]], Any]) -> Marks | None:
    """Returns the marks of a JSON line, from its byte `start` to `end` of a file; None if its text is not one
    long string, or the line is no JSON: reading it as a whole then says why.

    Args:
      text_of: returns the text of the object in the line; may raise KeyError.
    """
    quotes = [np.zeros(0, np.int64)]
    for first, block, escapes in _blocks(read, start, end):
        # One more, so that the byte after every escape has an index.
        is_quote = np.append(block == _QUOTE, False)
        is_quote[escapes + 1] = False
        quotes.append(np.flatnonzero(is_quote) + first)
        # Each takes 8 bytes: a line of nothing but short strings has no text to be marked.
        if sum(map(len, quotes)) > _MOST_SKELETON_BYTES // 8:
            return None
    borders = np.concatenate(quotes)
    # A string that does not end.
    if len(borders) % 2:
        return None
    # From behind the opening quote to the closing one.
    strings = borders.reshape(-1, 2) + np.asarray([1, 0])
    strings = strings[strings[:, 1] - strings[:, 0] >= LONG_STRING_BYTES]
    # What lies before, between and behind the long strings, their quotes included.
    gaps = np.concatenate([[start], strings.reshape(-1), [end]]).reshape(-1, 2)
    if not len(strings) or np.diff(gaps).sum() > _MOST_SKELETON_BYTES:
        return None
    texts = [read(first, last) for first, last in gaps.tolist()]
    # Without quotes, which the gaps have.
    names = [json.dumps(f"{_STANDS_FOR}{number}")[1:-1].encode() for number in range(len(strings))]
    try:
        record = json.loads(
            b"".join(itertools.chain(*zip(texts, [*names, b""], strict=True))).decode("utf-8")
        )
        text = text_of(record)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None
    # A short string may spell the same: then it is not known which one the text is.
    if not (isinstance(text, str) and text.startswith(_STANDS_FOR)) or any(b"u0001long" in t for t in texts):
        return None
    return _marks_of_string(read, *strings[int(text.removeprefix(_STANDS_FOR))].tolist())


def _blocks(
    read: ReadBytes, start: int, end: int
) -> Iterator[tuple[int, UInt8[np.ndarray, " bytes"], Int64[np.ndarray, " escapes"]]]:
    """Yields the first byte of each block, its bytes, and where escapes begin in it.

    No block ends within a character, an escape or a surrogate pair; the last one ends where the line does.
    """
    while start < end:
        block = np.frombuffer(read(start, min(start + BLOCK_BYTES, end)), np.uint8)
        if not len(block):
            return  # the file was cut short
        # No block begins within an escape.
        escapes = escape_begins(np.flatnonzero(block == _BACKSLASH))
        cut = len(block)
        if start + len(block) < end:
            cut -= _ESCAPE_BYTES
            # An escape at or before the cut that may reach behind it, and the one before it, if that is the
            # first half of a pair with it.
            index = int(np.searchsorted(escapes, cut, side="right")) - 1
            if index >= 0 and escapes[index] + _ESCAPE_BYTES > cut:
                cut = int(escapes[index])
                if index and _is_half(block, escapes[index - 1 : index])[0] and escapes[index - 1] == cut - 6:
                    cut -= 6
            while cut and block[cut] & 0xC0 == 0x80:
                cut -= 1
            if not cut:
                return
        yield start, block[:cut], escapes[: np.searchsorted(escapes, cut)]
        start += cut


def _marks_of_string(read: ReadBytes, begin: int, end: int) -> Marks | None:
    """Returns the marks of the JSON string from byte `begin` to `end`; None if it is not valid."""
    texts, lines, text_bytes = [], [], 0
    for first, block, escapes in _blocks(read, begin, end):
        saved = _saved_bytes(block, escapes)
        try:
            block.tobytes().decode("utf-8")
        except UnicodeDecodeError:
            return None
        if saved is None or (block < _SPACE).any():
            return None
        mark_bytes = np.arange(0, len(block), MARK_BYTES)
        # Back to the begin of an escape, of a pair, or of a character, which has at most 4 bytes.
        if len(escapes):
            index = np.searchsorted(escapes, mark_bytes, side="right") - 1
            size = np.where(block[escapes + 1] == _U, 6, 2)
            in_pair = saved == 6
            index -= (index > 0) & in_pair[index]
            is_within = (index >= 0) & (
                mark_bytes < escapes[index] + size[index] + 6 * np.append(in_pair[1:], False)[index]
            )
            mark_bytes = np.where(is_within, escapes[index], mark_bytes)
        for _ in range(3):
            mark_bytes -= (block[mark_bytes] & 0xC0) == 0x80
        saved_before = np.append(0, np.cumsum(saved))
        lines.append(mark_bytes + first)
        texts.append(mark_bytes - saved_before[np.searchsorted(escapes, mark_bytes)] + text_bytes)
        text_bytes += len(block) - int(saved_before[-1])
    # The end is a mark too, so that `around` has one behind every span.
    return Marks(np.concatenate([*texts, [text_bytes]]), np.concatenate([*lines, [end]]))


def _saved_bytes(
    block: UInt8[np.ndarray, " bytes"], escapes: Int[np.ndarray, " n"]
) -> Int64[np.ndarray, " n"] | None:
    r"""Returns the bytes by which the text of each escape is shorter than the escape; None if one is invalid.

    Of a pair, `\ud83d\ude00`, the first half stands for all 4 bytes of the text, and the second for none.
    """
    if not len(escapes):
        return np.zeros(0, np.int64)
    if escapes[-1] + 1 >= len(block):
        return None
    codes = block[escapes + 1]
    if not np.isin(codes, list(b'"\\/bfnrtu')).all():
        return None
    saved = np.ones(len(escapes), np.int64)
    unicode = np.flatnonzero(codes == _U)
    if not len(unicode):
        return saved
    if escapes[unicode[-1]] + 6 > len(block):
        return None
    digits = _HEX[block[escapes[unicode][:, None] + np.arange(2, 6)]]
    if (digits < 0).any():
        return None
    values: Int[np.ndarray, " u"] = digits @ np.asarray([4096, 256, 16, 1])
    # Of the six bytes of an escape, less those of its character in UTF-8.
    saved[unicode] = 6 - np.where(values < 0x80, 1, np.where(values < 0x800, 2, 3))
    # 0xD800 and 0xDC00, the begins of both halves, shifted alike.
    is_high, is_low = values >> 10 == 0x36, values >> 10 == 0x37
    # Each half must have its other one right behind or before it.
    begin = escapes[unicode]
    has_low = np.append((begin[1:] == begin[:-1] + 6) & is_low[1:], False)
    if not np.array_equal(is_high & has_low, is_high) or not np.array_equal(
        np.append(False, is_high[:-1]), is_low
    ):
        return None
    saved[unicode[is_high]], saved[unicode[is_low]] = 2, 6
    return saved


def _is_half(block: UInt8[np.ndarray, " bytes"], escapes: Int[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
    """True for escapes of the first half of a surrogate pair."""
    begin = escapes[:, None] + np.arange(1, 4)
    codes = block[np.minimum(begin, len(block) - 1)]
    # From D8 to DB: the second digit is 8 to 11.
    return (codes[:, 0] == _U) & (_HEX[codes[:, 1]] == 0xD) & (_HEX[codes[:, 2]] // 4 == 2)


def escape_begins(backslashes: Int[np.ndarray, " b"]) -> Int64[np.ndarray, " escapes"]:
    """Returns the backslashes that begin an escape: every second one of a run."""
    index = np.arange(len(backslashes))
    # Index of the first backslash of each run, carried along it; -2 so that one at byte 0 begins a run.
    first_of_run = np.maximum.accumulate(np.where(np.diff(backslashes, prepend=-2) != 1, index, 0))
    return backslashes[(index - first_of_run) % 2 == 0]


def text_of_part(part: bytes) -> bytes:
    """Returns the text of a part of a JSON string, as UTF-8; raises ValueError if it is no such part."""
    if b"\\" not in part:
        part.decode("utf-8")
        return part
    return json.loads(b'"' + part + b'"').encode("utf-8")
