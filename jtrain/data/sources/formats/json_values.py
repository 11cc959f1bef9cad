"""JSON files: one object, an array of objects, or JSON lines, as the first bytes say."""

import array
import itertools
import json
import mmap
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int

from jtrain.data.sources.cache import NumberTable
from jtrain.data.sources.formats.long_lines import escape_begins
from jtrain.data.sources.formats.masked_text import TextFields
from jtrain.data.sources.formats.record import BadRecord, Records, text_of_json
from jtrain.data.sources.formats.text import BOM, JsonLines
from jtrain.data.sources.storage import StoredFile
from jtrain.errors import UserError

_FIRST_LINE_BYTES = 1 << 26
"""Longest first line that is parsed to see if the file is JSON lines."""

BLOCK_BYTES = 1 << 24
"""Bytes searched for brackets at a time; each takes about 3 bytes of memory."""

_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_IS_STRUCTURE = np.isin(np.arange(256), list(b'"\\{}[]'))

_NOT_SPACE = re.compile(rb"\S")
_SCALAR = re.compile(rb'"(?:[^"\\]|\\.)*+"|[^\s,]+', re.DOTALL)
"""Value beside the objects of an array: a string, a number, null. It is a record, and a bad one."""


def open_json(file: StoredFile, fields: TextFields, *, cache_dir: Path) -> Records:
    """Opens a .json file: JSON lines if its first line is a whole object and is not the last, otherwise
    `JsonValues`.

    Raises:
      UserError: the file is JSON of no such form, or is cut short.
    """
    # By content: files named .json are often JSON lines.
    kind = JsonLines if _is_json_lines(file) else JsonValues
    return kind(file, fields, cache_dir=cache_dir)


def _is_json_lines(file: StoredFile) -> bool:
    with file.open() as handle:
        line = handle.readline(_FIRST_LINE_BYTES).removeprefix(BOM)
        while line and not line.strip():
            line = handle.readline(_FIRST_LINE_BYTES)
        # A file of one line is read as one value, which also shows if it was cut short.
        if not line.startswith(b"{") or not handle.read(1):
            return False
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


class JsonValues(Records):
    """JSON file of one object, or an array of objects: one document per object, its text in a field.

    Opening finds the ends of the objects at about 0.1 GB/s and parses nothing. For files above 1 MiB that
    index, 16 bytes per record, is kept in the cache folder.

    Raises:
      UserError: the file does not begin with an object or array, or is cut short.
    """

    __slots__ = ("_fields", "_file", "_values")

    def __init__(self, file: StoredFile, fields: TextFields, *, cache_dir: Path) -> None:
        self._file = file
        self._fields = fields
        self._values = NumberTable(file, "values", self._index, cache_dir)

    def __len__(self) -> int:
        return len(self._values)

    sizes_need_reading = False

    def sizes(self, first: int, end: int) -> Int[np.ndarray, " n"]:
        """Returns the bytes of each object, in which the text takes at least as many as by itself."""
        return self._values.sizes(first, end)

    def read(self, records: list[int]) -> list[str | BadRecord]:
        texts: list[str | BadRecord] = []
        with self._file.open() as file:
            for record, (start, end) in zip(records, self._values.rows(records), strict=True):
                file.seek(start)
                label = f"{self._file.label}, record {record} (at byte {start:,})"
                wording = {"way_out": "Mend the record", "position_suffix": " of the record"}
                texts.append(text_of_json(file.read(end - start), self._fields, label=label, **wording))
        return texts

    def _index(self) -> Int[np.ndarray, "records 2"]:
        """Returns the first byte of each value and the byte after its last."""
        if not self._file.size_bytes:
            return np.zeros((0, 2), np.int64)
        with self._file.open() as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as view:
            begin = len(BOM) if view[: len(BOM)] == BOM else 0
            if (first := _NOT_SPACE.search(view, begin)) is None:
                return np.zeros((0, 2), np.int64)
            if first.group() not in (b"{", b"["):
                raise self._refuse(
                    f"begins with {bytes(view[first.start() : first.start() + 40])!r}, not with an object or "
                    "an array of objects"
                )
            in_array = first.group() == b"["
            # In an array the values lie one bracket deep.
            spans, top_end = self._spans(view, base=1 if in_array else 0)
            begin, end = first.start(), len(view)
            if in_array:
                if stray := _NOT_SPACE.search(view, top_end):
                    raise self._refuse(f"goes on after the end of its array, at byte {stray.start():,}")
                begin, end = begin + 1, top_end - 1
            # In begin, start, end, start, end ... end, every second pair is a gap beside objects.
            gaps = itertools.pairwise(itertools.chain([begin], map(int, spans.flat), [end]))
            # 16 bytes per scalar: a list of tuples would take 60 times the bytes of `1,1,1`.
            scalars = array.array("q")
            # Whatever stands in a gap beside commas is a scalar: a bad record, and not left out silently.
            for gap in itertools.islice(gaps, 0, None, 2):
                for match in _SCALAR.finditer(view, *gap):
                    scalars.extend(match.span())
        if scalars:
            spans = np.concatenate([spans, np.frombuffer(scalars, np.int64).reshape(-1, 2)])
            # Back into the order of the file, which numbers the records.
            spans = spans[np.argsort(spans[:, 0])]
        return spans

    def _spans(self, view: mmap.mmap, *, base: int) -> tuple[Int[np.ndarray, "values 2"], int]:
        """Returns start and end of each value that lies in `base` brackets, and the end of the first
        outermost one.
        """
        starts, ends = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        depth, top_end = 0, len(view)
        for position, step in _brackets(view):
            # Depth behind each bracket: a value begins at a rise to base + 1 and ends at a fall to base.
            depths = depth + np.cumsum(step)
            if (unopened := np.flatnonzero(depths < 0)).size:
                raise self._refuse(f"closes a bracket at byte {position[unopened[0]]:,} that it did not open")
            if len(position):
                depth = int(depths[-1])
            starts.append(position[(step > 0) & (depths == base + 1)])
            ends.append(position[(step < 0) & (depths == base)] + 1)
            # Only the first return to depth 0: what follows it is refused by the caller.
            if top_end == len(view) and (outermost := np.flatnonzero(depths == 0)).size:
                top_end = int(position[outermost[0]]) + 1
        if depth:
            raise self._refuse("ends inside of a value: cut short, or a quote is missing")
        return np.stack([np.concatenate(starts), np.concatenate(ends)], axis=1), top_end

    def _refuse(self, defect: str) -> UserError:
        return UserError(
            f"{self._file.label}: not a whole JSON file: it {defect}. A .json file is one object, an array "
            f"of objects, or JSON lines. Replace it, or leave it out of {self._fields.config_path}.path."
        )


def _brackets(view: mmap.mmap) -> Iterator[tuple[Int[np.ndarray, " brackets"], Int[np.ndarray, " brackets"]]]:
    """Yields, block by block, the positions of brackets outside of strings, and +1 (opening) or -1 (closing)
    for each.

    Bytes suffice: no byte of a character beyond ASCII equals a bracket, a quote or a backslash.
    """
    start, in_string = 0, 0
    while start < len(view):
        end = min(start + BLOCK_BYTES, len(view))
        while end < len(view) and view[end - 1] == _BACKSLASH:
            end += 1  # the escaped character belongs to the same block
        block = np.frombuffer(view[start:end], np.uint8)
        position = np.flatnonzero(_IS_STRUCTURE[block])
        character = block[position]
        quotes, backslashes = position[character == _QUOTE], position[character == _BACKSLASH]
        quotes = quotes[~np.isin(quotes, escape_begins(backslashes) + 1)]
        brackets = position[(character != _QUOTE) & (character != _BACKSLASH)]
        # A bracket behind an odd number of quotes lies within a string.
        brackets = brackets[(in_string + np.searchsorted(quotes, brackets)) % 2 == 0]
        in_string = (in_string + len(quotes)) % 2
        # Bit 1 of the characters' codes tells opening brackets (0x5B, 0x7B) from closing ones (0x5D, 0x7D).
        yield brackets + start, np.where(block[brackets] & 2, 1, -1)
        start = end
