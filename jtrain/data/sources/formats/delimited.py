"""CSV and TSV files: a header, then one document per row; quoted fields may hold line ends."""

import array
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from jtrain.data.sources.cache import NumberTable
from jtrain.data.sources.formats.masked_text import TextFields, without_input
from jtrain.data.sources.formats.record import SKIP, BadRecord, Records, names_of
from jtrain.data.sources.formats.text import BOM
from jtrain.data.sources.storage import StoredFile
from jtrain.errors import UserError

SEPARATORS = {"csv": ",", "tsv": "\t"}

FIELD_BYTES = 1 << 26
"""Longest field. A quote that is never closed makes one bad record of this size, and the rest of the file is
read."""


class DelimitedFile(Records):
    """CSV (RFC 4180) or TSV file: one document per row, its text in a column that the header names.

    Python's csv module cuts the rows when the file is opened, at about 0.1 GB/s, and parses them when they
    are read. For files above 1 MiB that index, 16 bytes per record, is kept in the cache folder. Blank lines
    are not records.

    Raises:
      UserError: the header does not name that column, or names it twice.
    """

    __slots__ = ("_column", "_columns", "_fields", "_file", "_rows", "_separator")

    def __init__(self, file: StoredFile, fields: TextFields, *, kind: str, cache_dir: Path) -> None:
        self._file = file
        self._fields = fields
        self._separator = SEPARATORS[kind]
        self._columns = self._header()
        self._column = self._columns.index(fields.text) if self._columns else 0
        # After the header: a file whose header is wrong is refused before it is indexed.
        self._rows = NumberTable(file, f"{kind}-rows", self._index, cache_dir)

    def __len__(self) -> int:
        return len(self._rows)

    sizes_need_reading = False

    def sizes(self, first: int, end: int) -> Int[np.ndarray, " n"]:
        """Returns the bytes of each row, in which the text takes at least as many as by itself."""
        return self._rows.sizes(first, end)

    def read(self, records: list[int]) -> list[str | BadRecord]:
        with self._file.open() as file:
            return [self._text(file, *span) for span in zip(records, self._rows.rows(records), strict=True)]

    def _text(self, file: Any, record: int, span: list[int]) -> str | BadRecord:
        start, end = span
        file.seek(start)
        try:
            # One string with all its lines: `csv.reader` takes a quoted line end as part of the field.
            [row] = self._reader(iter([file.read(end - start).decode("utf-8")]))
        except UnicodeDecodeError as error:
            reason = f"not UTF-8 at byte {error.start} of the record ({error.reason})"
        except csv.Error as error:
            sign = {",": "commas", "\t": "tabs"}[self._separator]
            reason = (
                f"{error} (a field with {sign}, quotes or line ends must be quoted, and the quotes in it "
                "doubled)"
            )
        else:
            reason = f"{len(row)} fields, but the header names {len(self._columns)}"
            if len(row) == len(self._columns):
                text, mask = row[self._column], self._fields.mask
                if mask is None:
                    return text
                try:
                    return mask.join(text, mask.value_of(lambda name: row[self._columns.index(name)]))
                except ValueError as error:
                    reason = f"field {mask.field!r} {error}"
        label = f"{self._file.label}, record {record} (at byte {start:,})"
        return BadRecord(f"{label}: {reason}. Mend the record, {SKIP}")

    def _header(self) -> tuple[str, ...]:
        """Returns the names of the columns; empty for an empty file."""
        with self._file.open() as file:
            try:
                lines = (line.decode("utf-8") for line in self._lines(file))
                columns = next((row for row in self._reader(lines) if row), [])
            except (UnicodeDecodeError, csv.Error) as error:
                raise UserError(
                    f"{self._file.label}: its header cannot be read ({error}). Mend it, or leave the file "
                    f"out of {self._fields.config_path}.path."
                ) from error
        mask = self._fields.mask
        names: list[tuple[str, str]] = [("text_field", self._fields.text)]
        names += [(mask.setting, name) for name in mask.names] if mask else []
        if columns and (reason := without_input(mask, columns)):
            raise UserError(f"{self._file.label}: {reason}.")
        for setting, name in names if columns else ():
            if (count := columns.count(name)) == 1:
                continue
            column_names = names_of(columns)
            if count:
                raise UserError(
                    f"{self._file.label}: {count} columns {name!r}: {column_names}. Rename all of them but "
                    "one."
                )
            raise UserError(
                f"{self._file.label}: no column {name!r}; its header: {column_names}. Set "
                f"{self._fields.config_path}.{setting} to one of them. Columns are separated by "
                f"{self._separator!r}, and the first row is the header."
            )
        return tuple(columns)

    def _index(self) -> Int[np.ndarray, "records 2"]:
        """Returns the first byte of each row and the byte after its last."""
        spans = array.array("q")
        with self._file.open() as file:
            # `position` is where the current row began, `end` where the reader has read to.
            position = end = len(BOM) if file.read(len(BOM)) == BOM else 0

            def lines() -> Iterator[str]:
                nonlocal end
                for line in self._lines(file):
                    end += len(line)
                    # One character per byte: rows are cut at bytes, whether or not they are UTF-8.
                    yield line.decode("latin-1")

            # The reader takes lines one at a time, so after each row `end` is the byte after it.
            rows = self._reader(lines())
            header_seen = False
            while True:
                try:
                    row = next(rows)
                except StopIteration:
                    break
                except csv.Error:
                    row = [""]  # a bad record: reading it gives the same error
                if row and header_seen:
                    spans.extend((position, end))
                header_seen = header_seen or bool(row)
                position = end
        return np.frombuffer(spans, np.int64).reshape(-1, 2)

    def _reader(self, lines: Iterator[str]) -> Any:
        # The limit is the module's own; its default, 128 KiB, is shorter than many documents.
        csv.field_size_limit(max(csv.field_size_limit(), FIELD_BYTES))
        return csv.reader(lines, delimiter=self._separator, strict=True)

    def _lines(self, file: Any) -> Iterator[bytes]:
        """Yields the lines of a file from its start, without its byte order mark."""
        file.seek(0)
        file.seek(len(BOM) if file.read(len(BOM)) == BOM else 0)
        # Bounded: a file without line ends would otherwise be read into memory as a whole.
        while line := file.readline(2 * FIELD_BYTES):
            if len(line) == 2 * FIELD_BYTES:
                raise UserError(
                    f"{self._file.label}: a line of more than {len(line):,} bytes. Split it, or leave the "
                    f"file out of {self._fields.config_path}.path."
                )
            yield line
