"""Arrow streams as written by `save_to_disk` of Hugging Face datasets: record batches, memory-mapped."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from jaxtyping import Int

from jtrain.data.sources.cache import write_once
from jtrain.data.sources.formats.arrow_columns import (
    DAMAGE,
    check_columns,
    column_at,
    grouped_sizes,
    read_grouped,
)
from jtrain.data.sources.formats.masked_text import TextFields
from jtrain.data.sources.formats.record import BadRecord, Records
from jtrain.data.sources.storage import StoredFile
from jtrain.errors import FileError, UserError

_FILE_MAGIC = b"ARROW1\0\0"
"""First 8 bytes of Arrow's file format: a stream follows, then an index that is not needed here."""

_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


class _NotMappable(UserError):
    """Arrow file whose rows cannot be read where they lie."""


def open_arrow(file: StoredFile, fields: TextFields, *, cache_dir: Path) -> "ArrowFile":
    """Opens an Arrow file: where it lies, or a copy of its columns without compression and dictionaries."""
    try:
        return ArrowFile(file, fields)
    except _NotMappable:
        pass
    # Sorted, as the copy is named by them: the same columns in another order need no other copy.
    names = sorted({_column_name(file, name) for name in fields.read})
    digest = hashlib.blake2b("\0".join(names).encode(), digest_size=6).hexdigest()
    path = cache_dir / "files" / f"{file.key}-{digest}.arrow"
    write_once(path, lambda out: _write_plain(file, names, out), label=file.label)
    status = path.stat()
    copy = StoredFile(str(path), file.name, status.st_size, str(status.st_mtime_ns), file.label)
    return ArrowFile(copy, fields)


def _column_name(file: StoredFile, field: str) -> str:
    with pa.memory_map(file.location) as mapped:
        return field if field in _schema(mapped).names else field.partition(".")[0]


def _write_plain(file: StoredFile, names: list[str], out: BinaryIO) -> None:
    """Writes these columns of an Arrow file as a stream of plain batches."""
    try:
        with pa.memory_map(file.location) as mapped:
            is_file = mapped.read_at(len(_FILE_MAGIC), 0) == _FILE_MAGIC
            opened = pa.ipc.open_file(mapped) if is_file else pa.ipc.open_stream(mapped)
            schema = pa.schema([(name, _plain(opened.schema.field(name).type)) for name in names])
            batches = map(opened.get_batch, range(opened.num_record_batches)) if is_file else opened
            with pa.ipc.new_stream(out, schema) as writer:
                for batch in batches:
                    # All offsets: a damaged one would end the process.
                    batch.validate(full=True)
                    columns = [batch.column(name).cast(schema.field(name).type) for name in names]
                    writer.write_batch(pa.record_batch(columns, schema=schema))
    except DAMAGE as error:
        raise FileError(
            f"{file.label}: not a whole Arrow file ({error}): cut short or damaged. Save it again."
        ) from error


def _plain(kind: Any) -> Any:
    """Returns the type of a column without dictionaries and views."""
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_list(kind):
        return pa.list_(_plain(kind.value_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(_plain(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _plain(field.type)) for field in kind.fields])
    return kind


class ArrowFile(Records):
    """Arrow file with one document per row of the text column. Reading a row of the map touches no other row.

    `fields.text` may name a field of a struct column: `meta.text`.

    Raises:
      UserError: the file is not an Arrow file, is cut short, or has no text column of that name. A
        `_NotMappable` if it is compressed or has dictionaries.
    """

    __slots__ = (
        "_batch_start",
        "_fields",
        "_file",
        "_first_row",
        "_is_checked",
    )

    def __init__(self, file: StoredFile, fields: TextFields) -> None:
        self._file = file
        self._fields = fields
        first_row, batch_start = [0], []
        with self._map() as mapped:
            try:
                schema = _schema(mapped)
                check_columns(schema, fields, label=file.label)
                # One pass over the headers of all messages: each is mapped and none of its text is read.
                while mapped.read_at(8, position := mapped.tell()) != _END_OF_STREAM:
                    message = pa.ipc.read_message(mapped)
                    if message.type != "record batch":
                        raise _NotMappable(f"{file.label}: holds a {message.type}")
                    batch = pa.ipc.read_record_batch(message, schema)
                    # Sizes of the buffers only: offsets within them are checked when rows are read.
                    batch.validate()
                    # A compressed batch would be decompressed again for each read of its rows.
                    if batch.num_rows and not _lies_in(column_at(batch, fields.read[0]), message.body):
                        raise _NotMappable(f"{file.label}: its batches are compressed")
                    batch_start.append(position)
                    first_row.append(first_row[-1] + batch.num_rows)
            except DAMAGE as error:
                if isinstance(error, UserError):
                    raise
                raise UserError(
                    f"{file.label}: not a whole Arrow stream ({error or 'it ends early'}): cut short, or of "
                    f"another format. Save it again, or leave it out of {fields.config_path}.path."
                ) from error
        self._first_row = np.asarray(first_row, np.int64)
        self._batch_start = np.asarray(batch_start, np.int64)
        # Nested columns are validated as a whole, once per batch: their offsets lie at several levels.
        self._is_checked = np.zeros(len(batch_start), np.bool_)

    def __len__(self) -> int:
        return int(self._first_row[-1])

    sizes_need_reading = False
    checks_columns = True

    def sizes(self, first: int, end: int) -> Int[np.ndarray, " n"]:
        """Returns the size of each text, from the batches' offsets."""
        with self._columns() as column_of:
            sizes = grouped_sizes(first, end, self._first_row, column_of, self._fields)
        return np.clip(sizes, 0, self._file.size_bytes)  # the offsets of a damaged file may say anything

    def read(self, records: list[int]) -> list[str | BadRecord]:
        with self._columns() as column_of:
            return read_grouped(records, self._first_row, column_of, self._fields, label=self._file.label)

    @contextlib.contextmanager
    def _columns(self) -> Iterator[Callable[[int, str], Any]]:
        """Gives a function that returns a column of a batch by its name, a view of the mapped file."""
        with self._map() as mapped:
            try:
                schema = _schema(mapped)

                def column_of(batch: int, name: str) -> Any:
                    mapped.seek(int(self._batch_start[batch]))
                    record_batch = pa.ipc.read_record_batch(pa.ipc.read_message(mapped), schema)
                    # Reading text by a damaged offset would end the process. This checks the sizes of the
                    # buffers, in microseconds; `read_grouped` checks the offsets of the texts that it reads.
                    record_batch.validate()
                    column = column_at(record_batch, name)
                    if pa.types.is_nested(column.type) and not self._is_checked[batch]:
                        column.validate(full=True)
                        self._is_checked[batch] = True
                    return column

                yield column_of
            except DAMAGE as error:
                if isinstance(error, UserError):
                    raise
                raise FileError(
                    f"{self._file.label}: cannot be read ({error}). Save the dataset again."
                ) from error

    def _map(self) -> Any:
        self._file.open().close()  # raises a clear error if the file is gone or cut short
        return pa.memory_map(self._file.location)


def _schema(mapped: Any) -> Any:
    """Reads the schema at the begin of a mapped file; raises EOFError if another message is there."""
    mapped.seek(len(_FILE_MAGIC) if mapped.read_at(len(_FILE_MAGIC), 0) == _FILE_MAGIC else 0)
    message = pa.ipc.read_message(mapped)
    if message.type != "schema":  # pyarrow would end the process
        raise EOFError(f"it begins with a message of type {message.type}, not with a schema")
    return pa.ipc.read_schema(message)


def _lies_in(column: Any, body: Any) -> bool:
    """True if the texts of the column lie in the mapped file, which means that they were not compressed."""
    # The last buffer of a text column holds its characters.
    texts = column.buffers()[-1]
    return texts is None or texts.size == 0 or body.address <= texts.address < body.address + body.size
