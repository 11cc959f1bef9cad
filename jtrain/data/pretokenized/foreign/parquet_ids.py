"""Parquet files with a column of token ids. Their pages are compressed, so the ids are copied."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jtrain.data.pretokenized.foreign.foreign_file import ForeignFile, PartContent
from jtrain.data.sources.formats.arrow_columns import DAMAGE
from jtrain.data.sources.formats.parquet import decode_group
from jtrain.data.sources.formats.record import names_of
from jtrain.errors import FileError, UserError

COLUMN = "input_ids"


class ParquetIds(ForeignFile):
    """Parquet file; each row is a document, a list of ids. A row without a list is an empty document."""

    dtype = np.dtype("<u8")

    def __init__(self, path: Path, column: str) -> None:
        self.path = path
        self._column = column
        try:
            schema = pq.read_schema(str(path))
            # One part per row group, the smallest unit that `decode_group` reads.
            self._groups = pq.read_metadata(str(path)).num_row_groups
            self._check(schema)
        except DAMAGE as error:
            if isinstance(error, UserError):
                raise
            raise FileError(f"{path}: not a whole Parquet file ({error}). Copy it again.") from error

    def _check(self, schema: Any) -> None:
        """Raises UserError unless the column holds lists of integers."""
        if self._column not in schema.names:
            raise UserError(
                f"{self.path}: no column {self._column!r}. Set --column to one of {names_of(schema.names)}."
            )
        kind = schema.field(self._column).type
        lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        if not (lists and pa.types.is_integer(kind.value_type)):
            raise UserError(
                f"{self.path}: column {self._column!r} is {kind}, and ids are lists of integers. Set "
                "--column to such a column."
            )

    def num_parts(self) -> int:
        return self._groups

    def scan(self, part: int) -> PartContent:
        try:
            with pq.ParquetFile(str(self.path)) as parquet:
                table = decode_group(parquet, part, [self._column], label=str(self.path))
            lists: Any = table.column(0).combine_chunks()
            # A missing list has no length; it counts as an empty document.
            lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
            values: Any = lists.flatten()  # skips values of missing lists
            if values.null_count:
                raise UserError(
                    f"{self.path}: row group {part} has lists with missing ids. Write it without them."
                )
            # Any integer type goes through int64, so that a negative id shows as one beyond any vocabulary.
            ids = values.to_numpy(zero_copy_only=False).astype(np.int64).view(np.uint64)
        except DAMAGE as error:
            if isinstance(error, UserError):
                raise
            raise FileError(
                f"{self.path}: row group {part} cannot be read ({error}). Copy it again."
            ) from error
        return PartContent(ids, np.cumsum(lengths, dtype=np.int64))
