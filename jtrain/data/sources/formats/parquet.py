"""Parquet files: row groups are decoded as a whole and cached."""

import collections
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from jtrain.data.sources.formats.record import SKIP, BadRecord, Records
from jtrain.data.sources.storage import StoredFile
from jtrain.errors import FileError, UserError


class RowGroupCache:
    """Least-recently-used cache of decoded columns, safe to share between threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._groups: collections.OrderedDict[tuple[Any, ...], Any] = collections.OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[Any, ...], read: Callable[[], Any]) -> Any:
        """Returns the column under `key`, calling `read` if it is not cached; the latest is kept whatever its size."""
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

    def drop(self, first: Any) -> None:
        """Drops all columns whose key starts with `first`."""
        with self._lock:
            for key in [key for key in self._groups if key[0] == first]:
                self._bytes -= self._groups.pop(key).nbytes


class ParquetFile(Records):
    """Parquet file with one document per row, its text in column `text_field`; `groups` caches decoded row groups.

    `text_field` may name a field of a struct column: `meta.text`.

    Between reads it keeps only two numbers per row group; an open file with its schema would take 34 KB or more.

    Raises:
      UserError: the file is not a Parquet file, or has no text column of that name.
    """

    __slots__ = ("_field", "_file", "_group_bytes", "_group_starts", "_groups", "_text_field")

    def __init__(self, file: StoredFile, *, text_field: str, field: str, groups: RowGroupCache) -> None:
        import pyarrow as pa  # lazy: takes 0.1 s, which other formats need not pay
        import pyarrow.parquet as pq

        self._file = file
        self._text_field = text_field
        self._field = field
        self._groups = groups
        with _arrow_file(file) as opened:
            try:
                with pq.ParquetFile(opened) as parquet:
                    schema = parquet.schema_arrow
                    metadata = parquet.metadata
            except (pa.ArrowException, OSError) as error:
                if file.called in str(error):
                    raise  # an error of the store, already translated
                raise UserError(
                    f"{file.called}: not a readable Parquet file ({error}): cut short, or of another format. Replace "
                    f"it, or leave it out of {field}.path."
                ) from error
        check_column(schema, text_field, called=file.called, field=field)
        row_groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        # Several if both a column `meta.text` and a field of a struct column `meta` exist: Arrow then decodes both.
        columns = [i for i in range(metadata.num_columns) if metadata.schema.column(i).path == text_field]
        self._group_starts = np.cumsum([0, *(group.num_rows for group in row_groups)], dtype=np.int64)
        sizes = [sum(group.column(i).total_uncompressed_size for i in columns) for group in row_groups]
        self._group_bytes = np.asarray(sizes, np.int64)

    @property
    def group_starts(self) -> Int[np.ndarray, " groups_and_end"]:
        return self._group_starts

    @property
    def group_bytes(self) -> Int[np.ndarray, " groups"]:
        """Decoded size of each row group's text by the file's metadata; with dictionaries it takes more memory."""
        return self._group_bytes

    def __len__(self) -> int:
        return int(self._group_starts[-1])

    def read(self, records: list[int]) -> list[str | BadRecord]:
        return read_grouped(records, self._group_starts, self._column, self._text_field, self._file.called)

    def sizes(self, first: int, end: int) -> Int[np.ndarray, " n"]:
        """Returns the size of each text; decodes the row groups, which the texts are then read from."""
        return grouped_sizes(first, end, self._group_starts, self._column)

    def close(self) -> None:
        self._groups.drop(self._file.key)

    def _column(self, group: int) -> Any:
        return self._groups.get((self._file.key, self._text_field, group), lambda: self._read_group(group))

    def _read_group(self, group: int) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        with _arrow_file(self._file) as opened:
            try:
                with pq.ParquetFile(opened) as parquet:
                    table = parquet.read_row_group(group, columns=[self._text_field], use_threads=False)
            except (pa.ArrowException, OSError) as error:
                if self._file.called in str(error):
                    raise  # an error of the store, already translated
                said = " ".join(str(error).split())
                raise FileError(
                    f"{self._file.called}: row group {group} cannot be read ({said}). Replace the file."
                ) from error
        column = column_at(table, self._text_field)
        return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _arrow_file(file: StoredFile) -> Any:
    """Opens a file for Arrow, whose own threads read it.

    A local file is Arrow's own: over a Python file such a thread needs the interpreter, and aborts the process if it
    asks while the interpreter ends (apache/arrow issue 34314). A remote file is read by Python, and has that risk.
    """
    import pyarrow as pa

    opened = file.open()
    if file.is_remote:
        return opened
    opened.close()
    return pa.OSFile(file.location)


def check_column(schema: Any, text_field: str, *, called: str, field: str) -> None:
    """Raises UserError unless the Arrow schema has a text column `text_field`, or a struct column with such a field."""
    import pyarrow as pa

    fields = {name: schema.field(name).type for name in schema.names}
    path, kind = "", None
    for key in _keys(schema.names, text_field):
        if key not in fields:
            there = ", ".join(path + name for name in fields)
            said = f"its columns: {there}" if fields else f"column {path[:-1]!r} is {kind} and has no fields"
            raise UserError(f"{called}: no column {text_field!r}; {said}. Set {field}.text_field to one of them.")
        kind = fields[key]
        path += f"{key}."
        fields = {f.name: f.type for f in kind.fields} if pa.types.is_struct(kind) else {}
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise UserError(
            f"{called}: column {text_field!r} is {kind}, not text. Set {field}.text_field to a text column; in a "
            "struct, as 'column.field'."
        )


def grouped_sizes(
    first: int, end: int, group_starts: Int[np.ndarray, " groups_and_end"], column_of: Callable[[int], Any]
) -> Int[np.ndarray, " n"]:
    """Returns the bytes of the texts of rows `first` to `end` - 1; 0 where there is none."""
    import pyarrow.compute as pc

    low, high = np.searchsorted(group_starts, (first, end - 1), side="right") - 1
    found = []
    for group in range(int(low), int(high) + 1):
        start, stop = int(group_starts[group]), int(group_starts[group + 1])
        texts = column_of(group).slice(max(first - start, 0), min(end, stop) - max(first, start))
        sizes = pc.fill_null(pc.call_function("binary_length", [texts]), 0)
        found.append(sizes.to_numpy(zero_copy_only=False).astype(np.int64))
    return np.concatenate([np.empty(0, np.int64), *found])


def column_at(table: Any, text_field: str) -> Any:
    """Returns the column of a table or record batch; a text in a struct that is null is null itself."""
    first, *others = _keys(table.schema.names, text_field)
    column = table.column(first)
    for key in others:
        kind = column.type
        column = column.flatten()[kind.get_field_index(key)]
    return column


def _keys(columns: Sequence[str], text_field: str) -> list[str]:
    """Returns the names that lead to the text: a column of that name wins over a field of a struct column."""
    return [text_field] if text_field in columns else text_field.split(".")


def read_grouped(
    records: list[int],
    group_starts: Int[np.ndarray, " groups_and_end"],
    column_of: Callable[[int], Any],
    text_field: str,
    called: str,
) -> list[str | BadRecord]:
    """Returns the texts of rows in the given order, fetching the column of each group once."""
    places_of: dict[int, list[int]] = {}
    for place, group in enumerate((np.searchsorted(group_starts, records, side="right") - 1).tolist()):
        places_of.setdefault(group, []).append(place)
    texts: list[str | BadRecord] = [""] * len(records)
    for group, places in places_of.items():
        column, start = column_of(group), int(group_starts[group])
        rows = [records[place] - start for place in places]
        # Not `take`: its first call imports pyarrow.compute, 80 ms in each loader, and it is no faster for few rows.
        found = [_text_or_why(column, row) for row in rows]
        for place, text in zip(places, found, strict=True):
            if text is None:
                text = ValueError(f"column {text_field!r} is null")
            if isinstance(text, ValueError):
                text = BadRecord(f"{called}, row {records[place]}: {text}. Mend the row, {SKIP}")
            texts[place] = text
    return texts


def _text_or_why(column: Any, row: int) -> str | ValueError | None:
    try:
        return column[row].as_py()
    except UnicodeDecodeError as error:
        return ValueError(f"not UTF-8 at byte {error.start} of its text ({error.reason})")


@functools.cache
def shared_cache(max_bytes: int) -> RowGroupCache:
    """Returns this process's cache of that size, shared by its sources so that one limit bounds their memory."""
    return RowGroupCache(max_bytes)
