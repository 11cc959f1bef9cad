"""Random access to the records of one file: text, JSON lines, Parquet."""

import collections
import functools
import json
import mmap
import threading
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int


class BadRecord(ValueError):
    """A record that is no UTF-8 text, or not what its format asks for; the message names file and place."""


@runtime_checkable
class Records(Protocol):
    """The documents of one file, by number. Reading opens the file anew: thousands of files cost no descriptors."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> str:
        """Raises BadRecord; OSError where the file is gone."""
        ...


_BOM = b"\xef\xbb\xbf"
_LINE_SEARCH_BYTES = 4096
"""How far behind a cut a line end is looked for."""


class TextFile:
    """A whole file as one document; a file above `piece_bytes` as several, each about that long.

    Pieces end behind a line, or between two characters where no line ends within 4 KiB. Without them a book in one file
    could be neither shuffled nor held out in part, and would lie in memory as a whole.
    """

    def __init__(self, path: Path, *, piece_bytes: int) -> None:
        self._path = path
        self._size_bytes = path.stat().st_size
        self._piece_bytes = piece_bytes

    def __len__(self) -> int:
        return -(-self._size_bytes // self._piece_bytes)

    def __getitem__(self, index: int) -> str:
        with self._path.open("rb") as file:
            start = self._cut(file, index)
            end = self._cut(file, index + 1)
            file.seek(start)
            content = file.read(end - start)
        if start == 0:
            content = content.removeprefix(_BOM)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadRecord(
                f"{self._path}: not UTF-8 at byte {end - len(content) + error.start} ({error.reason}). Convert the "
                "file to UTF-8, leave it out of data.path, or set data.on_bad_record='skip'."
            ) from error

    def _cut(self, file: Any, index: int) -> int:
        """Byte where piece `index` starts: the same from both sides, and read from the file around it only."""
        nominal = index * self._piece_bytes
        if index == 0 or nominal >= self._size_bytes:
            return min(nominal, self._size_bytes)
        file.seek(nominal)
        ahead = file.read(min(_LINE_SEARCH_BYTES, self._piece_bytes))
        line_end = ahead.find(b"\n") + 1
        if line_end:
            return nominal + line_end
        # Behind the character that the cut falls into: at most 3 bytes on, and that may be the end of the file.
        inside = ahead[:4]
        return nominal + next((i for i, byte in enumerate(inside) if byte & 0xC0 != 0x80), len(inside) % 4)


class JsonLines:
    """One JSON object per line, its text in `field`. Blank lines hold no record.

    Opening finds the line starts, about 1 GB/s, and parses nothing; the index takes 8 bytes per record.
    """

    def __init__(self, path: Path, *, field: str) -> None:
        self._path = path
        self._field = field
        self._start_byte = _line_starts(path)

    def __len__(self) -> int:
        return len(self._start_byte) - 1

    def __getitem__(self, index: int) -> str:
        start, end = self._start_byte[index : index + 2].tolist()
        with self._path.open("rb") as file:
            file.seek(start)
            line = file.read(end - start)
        try:
            record = json.loads(line.removeprefix(_BOM).decode("utf-8"))
        except UnicodeDecodeError as error:
            raise self._bad(start, f"not UTF-8 at byte {start + error.start} of the file ({error.reason})") from error
        except (json.JSONDecodeError, RecursionError) as error:
            raise self._bad(start, f"no JSON: {error}") from error
        if not isinstance(record, dict):
            raise self._bad(start, f"a JSON {type(record).__name__}, not an object with a field {self._field!r}")
        if not isinstance(text := record.get(self._field), str):
            if self._field in record:
                raise self._bad(start, f"field {self._field!r} is {type(text).__name__}, not text")
            fields = ", ".join(map(repr, record)) or "none"
            raise self._bad(start, f"no field {self._field!r}; its fields: {fields}. Set data.text_field")
        if b"\\ud" in line.lower():  # an escape may spell half a character, which no encoder takes
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise self._bad(start, f"field {self._field!r} holds half a surrogate pair ({error.reason})") from error
        return text

    def _bad(self, start: int, what: str) -> BadRecord:
        line = 1
        with self._path.open("rb") as file:
            while (left := start - file.tell()) > 0:
                line += file.read(min(left, 1 << 24)).count(b"\n")
        return BadRecord(f"{self._path}, line {line}: {what}. Mend the line, or set data.on_bad_record='skip'.")


def _line_starts(path: Path) -> Int[np.ndarray, " lines"]:
    """Byte where each non-blank line starts, and the size of the file at the end."""
    size = path.stat().st_size
    if size == 0:
        return np.zeros(1, np.int64)
    block = 1 << 26
    ends: list[np.ndarray] = []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        content = np.frombuffer(view, np.uint8)
        for start in range(0, size, block):
            ends.append(np.flatnonzero(content[start : start + block] == ord("\n")) + start)
        starts = np.concatenate([np.zeros(1, np.int64), *(e + 1 for e in ends)])
        starts = starts[starts < size]
        first = content[starts]
        blank = first == ord("\n")
        carriage = np.flatnonzero(first == ord("\r"))
        carriage = carriage[starts[carriage] + 1 < size]
        blank[carriage] = content[starts[carriage] + 1] == ord("\n")
        del content, first  # the map cannot close while numpy looks into it
    return np.append(starts[~blank], size)


class RowGroupCache:
    """Decoded Parquet row groups, the least recently used dropped first; safe to share between threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._groups: collections.OrderedDict[tuple[Path, int], Any] = collections.OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[Path, int], read: Any) -> Any:
        with self._lock:
            if key in self._groups:
                self._groups.move_to_end(key)
                return self._groups[key]
            column = read()
            self._groups[key] = column
            self._bytes += column.nbytes
            while self._bytes > self._max_bytes and len(self._groups) > 1:
                self._bytes -= self._groups.popitem(last=False)[1].nbytes
            return column


class ParquetFile:
    """One document per row, its text in column `field`. A row group is decoded as a whole and kept in `cache`.

    Raises:
      ValueError: no Parquet file, or no text column of that name.
    """

    def __init__(self, path: Path, *, field: str, cache: RowGroupCache) -> None:
        import pyarrow as pa  # lazy: 0.1 s that other formats need not pay
        import pyarrow.parquet as pq

        self._path = path
        self._field = field
        self._cache = cache
        try:
            with pq.ParquetFile(path) as file:
                schema = file.schema_arrow
                metadata = file.metadata
        except pa.ArrowInvalid as error:
            raise ValueError(f"{path}: no readable Parquet file ({error}). Leave it out of data.path.") from error
        if field not in schema.names:
            raise ValueError(
                f"{path}: no column {field!r}; its columns: {', '.join(schema.names)}. Set data.text_field to one."
            )
        kind = schema.field(field).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise ValueError(f"{path}: column {field!r} is {kind}, not text. Set data.text_field to a text column.")
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        column = next(i for i in range(metadata.num_columns) if metadata.schema.column(i).path == field)
        self.group_starts = np.cumsum([0, *(group.num_rows for group in groups)], dtype=np.int64)
        """First row of each row group, and the number of rows at the end."""
        self.group_bytes = np.asarray([g.column(column).total_uncompressed_size for g in groups], np.int64)
        """Size of each row group's text, decoded; less than it takes in memory where words repeat (dictionaries)."""

    def __len__(self) -> int:
        return int(self.group_starts[-1])

    def __getitem__(self, index: int) -> str:
        group = int(np.searchsorted(self.group_starts, index, side="right")) - 1
        column = self._cache.get((self._path, group), functools.partial(self._read_group, group))
        row = index - int(self.group_starts[group])
        try:
            text = column[row].as_py()
        except UnicodeDecodeError as error:
            raise self._bad(index, f"not UTF-8 at byte {error.start} of its text ({error.reason})") from error
        if text is None:
            raise self._bad(index, f"column {self._field!r} is null")
        return text

    def _read_group(self, group: int) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        with pq.ParquetFile(self._path) as file:
            try:
                return file.read_row_group(group, columns=[self._field]).column(0).combine_chunks()
            except (pa.ArrowException, OSError) as error:
                raise OSError(f"{self._path}: row group {group} cannot be read ({error}). Replace the file.") from error

    def _bad(self, index: int, what: str) -> BadRecord:
        return BadRecord(f"{self._path}, row {index}: {what}. Mend the row, or set data.on_bad_record='skip'.")
