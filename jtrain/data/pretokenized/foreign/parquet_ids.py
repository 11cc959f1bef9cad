"""Parquet files with a column of token ids. Their pages are compressed, so the ids are copied."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jtrain.data.pretokenized.foreign.foreign_file import LABELS, ForeignFile, PartContent, ignored_runs
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
        id_columns = [name for name in schema.names if _is_ids(schema.field(name).type)]
        if self._column not in schema.names:
            raise UserError(
                f"{self.path}: no column {self._column!r}. Set --column to one of {names_of(id_columns)}."
            )
        kind = schema.field(self._column).type
        if self._column not in id_columns:
            raise UserError(
                f"{self.path}: column {self._column!r} is {kind}, and ids are lists of integers. Set "
                f"--column to one of {names_of(id_columns)}."
            )
        # Labels of another type are of classes.
        self.has_labels = LABELS in id_columns

    def num_parts(self) -> int:
        return self._groups

    def scan(self, part: int) -> PartContent:
        names = [self._column, *([LABELS] if self.has_labels else [])]
        try:
            with pq.ParquetFile(str(self.path)) as parquet:
                table = decode_group(parquet, part, names, label=str(self.path))
            content = self._lists(part, table.column(self._column).combine_chunks())
            if not self.has_labels:
                return content
            labels = self._lists(part, table.column(LABELS).combine_chunks())
        except DAMAGE as error:
            if isinstance(error, UserError):
                raise
            raise FileError(
                f"{self.path}: row group {part} cannot be read ({error}). Copy it again."
            ) from error
        ignored = ignored_runs(content, labels.ids.view(np.int64), labels.ends, self.path)
        return dataclasses.replace(content, ignored=ignored)

    def _lists(self, part: int, lists: Any) -> PartContent:
        # A missing list has no length; it counts as an empty document.
        lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        values: Any = lists.flatten()  # skips values of missing lists
        if values.null_count:
            raise UserError(
                f"{self.path}: row group {part} has lists with missing ids. Write it without them."
            )
        # Any integer type goes through int64, so that a negative id shows as one beyond any vocabulary.
        ids = values.to_numpy(zero_copy_only=False).astype(np.int64).view(np.uint64)
        return PartContent(ids, np.cumsum(lengths, dtype=np.int64))


def _is_ids(kind: Any) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return is_list and pa.types.is_integer(kind.value_type)
