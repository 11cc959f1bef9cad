"""Parquet files: row groups are decoded as a whole and cached."""

from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Int

from jtrain.data.sources.formats.arrow_columns import (
    DAMAGE,
    check_columns,
    column_at,
    grouped_sizes,
    read_grouped,
)
from jtrain.data.sources.formats.masked_text import TextFields
from jtrain.data.sources.formats.record import BadRecord, Records
from jtrain.data.sources.formats.row_group_cache import DecodedColumns, RowGroupCache
from jtrain.data.sources.storage import StoredFile
from jtrain.errors import FileError, UserError

_MOST_ROWS = (1 << 31) - 1
"""Rows of a row group that Arrow can number."""


# Arrow's offsets of text columns are int32.
MOST_DECODED_BYTES = 1 << 31
_ROWS_AT_ONCE = 512
"""Rows decoded at a time: no slower than all at once."""


class ParquetFile(Records):
    """Parquet file with one document per row, its text in a column; `groups` caches decoded row groups.

    `fields.text` may name a field of a struct column: `meta.text`.

    Between reads it keeps only two numbers per row group; an open file with its schema would take 34 KB or
    more.

    Raises:
      UserError: the file is not a Parquet file, or has no text column of that name.
    """

    __slots__ = ("_fields", "_file", "_group_bytes", "_group_starts", "_groups")
    checks_columns = True

    def __init__(self, file: StoredFile, fields: TextFields, *, groups: RowGroupCache) -> None:
        import pyarrow.parquet as pq  # lazy: Arrow files need none of it

        self._file = file
        self._fields = fields
        self._groups = groups
        with _arrow_file(file) as handle:
            try:
                with pq.ParquetFile(handle) as parquet:
                    metadata = parquet.metadata
                    check_columns(parquet.schema_arrow, fields, label=file.label)
                    row_groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
                    paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
            except DAMAGE as error:
                if isinstance(error, UserError) or file.label in str(error):
                    raise  # of the columns, or an error of the store, already translated
                raise UserError(
                    f"{file.label}: not a readable Parquet file ({error}): cut short, or of another format. "
                    f"Replace it, or leave it out of {fields.config_path}.path."
                ) from error
        # Several if both a column `meta.text` and a field of a struct column `meta` exist: Arrow then decodes
        # both.
        names = fields.read
        # The column of spans or messages is a list, whose leaves are named `NAME.list.element...`.
        lists = [f"{name}.list." for name in names]
        columns = [i for i, path in enumerate(paths) if path in names or path.startswith(tuple(lists))]
        rows = [group.num_rows for group in row_groups]
        # A damaged footer may claim any number of rows, and readers allocate arrays of that size.
        if rows and not 0 <= min(rows) <= max(rows) <= _MOST_ROWS:
            raise UserError(
                f"{file.label}: a row group of {max(rows, key=abs):,} rows, and row groups have 0 to "
                f"{_MOST_ROWS:,}: damaged. Replace it, or leave it out of {fields.config_path}.path."
            )
        self._group_starts = np.cumsum([0, *rows], dtype=np.int64)
        sizes = [sum(group.column(i).total_uncompressed_size for i in columns) for group in row_groups]
        self._group_bytes = np.asarray(sizes, np.int64)

    @property
    def group_starts(self) -> Int[np.ndarray, " groups_and_end"]:
        return self._group_starts

    @property
    def group_bytes(self) -> Int[np.ndarray, " groups"]:
        """Decoded size of each row group's text by the file's metadata; text in a dictionary takes more."""
        return self._group_bytes

    def __len__(self) -> int:
        return int(self._group_starts[-1])

    def read(self, records: list[int]) -> list[str | BadRecord]:
        return read_grouped(records, self._group_starts, self._column, self._fields, label=self._file.label)

    def sizes(self, first: int, end: int) -> Int[np.ndarray, " n"]:
        """Returns the size of each text; decodes the row groups, which the texts are then read from."""
        return grouped_sizes(first, end, self._group_starts, self._column, self._fields)

    def close(self) -> None:
        self._groups.drop(self._file.key)

    def hold(self, record: int) -> object:
        return self._groups.hold(
            self._decode(int(np.searchsorted(self._group_starts, record, side="right")) - 1)
        )

    def _column(self, group: int, name: str) -> Any:
        return self._decode(group)[name]

    def _decode(self, group: int) -> DecodedColumns:
        key = (self._file.key, self._fields, group)
        return self._groups.get(key, lambda: self.read_group(group))

    def read_group(self, group: int) -> DecodedColumns:
        import pyarrow.parquet as pq

        names = self._fields.read
        with _arrow_file(self._file) as opened:
            try:
                with pq.ParquetFile(opened) as parquet:
                    table = decode_group(parquet, group, names, label=self._file.label)
                columns = {name: column_at(table, name) for name in names}
                # One array per column: `_values` needs `view`, which chunked arrays lack.
                contiguous = {
                    n: c.chunk(0) if c.num_chunks == 1 else c.combine_chunks() for n, c in columns.items()
                }
            except DAMAGE as error:
                if self._file.label in str(error):
                    raise  # an error of the store, already translated
                description = " ".join(str(error).split())
                raise FileError(
                    f"{self._file.label}: row group {group} cannot be read ({description}). Replace the file."
                ) from error
        return DecodedColumns(contiguous)


def decode_group(parquet: Any, group: int, names: list[str], *, label: str) -> Any:
    """Returns columns of a row group as a table.

    Decodes piece by piece, because a few bytes of a hostile file can stand for any number of rows.

    Raises:
      FileError: the row group decodes to 2 GiB or more, or has not as many rows as the file says.
    """
    batches, size_bytes = [], 0
    for batch in parquet.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=names, use_threads=False):
        batches.append(batch)
        size_bytes += batch.nbytes
        # Before Arrow joins the batches, which fails with an error of its own from 2 GiB on.
        if size_bytes >= MOST_DECODED_BYTES:
            raise FileError(
                f"{label}: row group {group} decodes to {MOST_DECODED_BYTES >> 30} GiB or more, which "
                "Arrow's text columns cannot hold. Write the file again with smaller row groups."
            )
    # A row group without rows has no batch, but its table needs the columns.
    if not batches:
        batches = parquet.read_row_group(group, columns=names, use_threads=False).to_batches()
    rows = sum(batch.num_rows for batch in batches)
    if rows != (expected_rows := parquet.metadata.row_group(group).num_rows):
        raise FileError(
            f"{label}: row group {group} has {rows:,} rows, and the file says {expected_rows:,}. Replace it."
        )
    return pa.Table.from_batches(batches, batches[0].schema if batches else parquet.schema_arrow)


def _arrow_file(file: StoredFile) -> Any:
    """Opens a file for Arrow, whose own threads read it.

    A local file is Arrow's own: over a Python file such a thread needs the interpreter, and aborts the
    process if it asks while the interpreter ends (apache/arrow issue 34314). A remote file is read by Python,
    and has that risk.
    """
    opened = file.open()
    if file.is_remote:
        return opened
    opened.close()
    return pa.OSFile(file.location)
