"""Parquet files: row groups are decoded as a whole and cached."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Int

from jtrain.data.sources.formats.chat import LAYOUT_BYTES
from jtrain.data.sources.formats.masked_text import MaskFields, TextFields, set_messages
from jtrain.data.sources.formats.record import SKIP, BadRecord, Records
from jtrain.data.sources.formats.row_group_cache import DecodedColumns, RowGroupCache
from jtrain.data.sources.storage import StoredFile
from jtrain.errors import FileError, UserError

DAMAGE = (
    pa.ArrowException,
    OSError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    OverflowError,
    MemoryError,
)
"""Errors of pyarrow for a damaged file, also for names that are not UTF-8 and numbers too large."""

_MOST_ROWS = (1 << 31) - 1
"""Rows of a row group that Arrow can number."""


_MOST_DECODED_BYTES = 1 << 31
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
        with _arrow_file(file) as opened:
            try:
                with pq.ParquetFile(opened) as parquet:
                    metadata = parquet.metadata
                    check_columns(parquet.schema_arrow, fields, label=file.label)
                    row_groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
                    paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
            except DAMAGE as error:
                if isinstance(error, UserError) or file.label in str(error):
                    raise  # of the columns, or an error of the store, already translated
                raise UserError(
                    f"{file.label}: not a readable Parquet file ({error}): cut short, or of another format. "
                    f"Replace it, or leave it out of {fields.at}.path."
                ) from error
        # Several if both a column `meta.text` and a field of a struct column `meta` exist: Arrow then decodes
        # both.
        read = fields.read
        columns = [i for i, path in enumerate(paths) if path in read or path.startswith(f"{read[-1]}.list.")]
        rows = [group.num_rows for group in row_groups]
        if rows and not 0 <= min(rows) <= max(rows) <= _MOST_ROWS:
            raise UserError(
                f"{file.label}: a row group of {max(rows, key=abs):,} rows, and row groups have 0 to "
                f"{_MOST_ROWS:,}: damaged. Replace it, or leave it out of {fields.at}.path."
            )
        self._group_starts = np.cumsum([0, *rows], dtype=np.int64)
        sizes = [sum(group.column(i).total_uncompressed_size for i in columns) for group in row_groups]
        self._group_bytes = np.asarray(sizes, np.int64)

    @property
    def group_starts(self) -> Int[np.ndarray, " groups_and_end"]:
        return self._group_starts

    @property
    def group_bytes(self) -> Int[np.ndarray, " groups"]:
        """Decoded size of each row group's text by the file's metadata; with dictionaries it takes more
        memory.
        """
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
            self._decoded(int(np.searchsorted(self._group_starts, record, side="right")) - 1)
        )

    def _column(self, group: int, name: str) -> Any:
        return self._decoded(group)[name]

    def _decoded(self, group: int) -> DecodedColumns:
        key = (self._file.key, self._fields, group)
        return self._groups.get(key, lambda: self._read_group(group))

    def _read_group(self, group: int) -> DecodedColumns:
        import pyarrow.parquet as pq

        names = self._fields.read
        with _arrow_file(self._file) as opened:
            try:
                with pq.ParquetFile(opened) as parquet:
                    table = decoded_group(parquet, group, names, label=self._file.label)
                columns = {name: column_at(table, name) for name in names}
                whole = {
                    n: c.chunk(0) if c.num_chunks == 1 else c.combine_chunks() for n, c in columns.items()
                }
            except DAMAGE as error:
                if self._file.label in str(error):
                    raise  # an error of the store, already translated
                said = " ".join(str(error).split())
                raise FileError(
                    f"{self._file.label}: row group {group} cannot be read ({said}). Replace the file."
                ) from error
        return DecodedColumns(whole)


def decoded_group(parquet: Any, group: int, names: list[str], *, label: str) -> Any:
    """Returns columns of a row group as a table, decoded piece by piece: a few bytes can stand for any number
    of rows.

    Raises:
      FileError: the row group decodes to 2 GiB or more, or has not as many rows as the file says.
    """
    batches, size_bytes = [], 0
    for batch in parquet.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=names, use_threads=False):
        batches.append(batch)
        size_bytes += batch.nbytes
        if size_bytes >= _MOST_DECODED_BYTES:
            raise FileError(
                f"{label}: row group {group} decodes to {_MOST_DECODED_BYTES >> 30} GiB or more, which "
                "Arrow's text columns cannot hold. Write the file again with smaller row groups."
            )
    if not batches:
        batches = parquet.read_row_group(group, columns=names, use_threads=False).to_batches()
    rows = sum(batch.num_rows for batch in batches)
    if rows != (wanted := parquet.metadata.row_group(group).num_rows):
        raise FileError(
            f"{label}: row group {group} has {rows:,} rows, and the file says {wanted:,}. Replace it."
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


def check_columns(schema: Any, fields: TextFields, *, label: str) -> None:
    """Checks that an Arrow schema has the columns that are read, or struct columns with such fields.

    Raises:
      UserError: there is no such column, or it is not of text, not of messages, or a mask's is not of spans.
    """
    field, mask = fields.at, fields.mask
    if mask is not None and mask.is_chat:
        kind = _type_at(schema, mask.field, label=label, field=field, setting=mask.setting)
        if why := _no_chat(kind):
            raise UserError(
                f"{label}: column {mask.field!r} is {kind}, not lists of messages: {why}. Set "
                f"{field}.messages_field to a column of list<struct<role: string, content: string>>."
            )
        return
    for name, setting in [(fields.text, "text_field"), *([(mask.field, mask.setting)] if mask else [])]:
        kind = _type_at(schema, name, label=label, field=field, setting=setting)
        if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
            continue
        if setting == "mask_field":
            if not _is_spans(kind):
                raise UserError(
                    f"{label}: column {name!r} is {kind}, not lists of spans [start, end] in characters of "
                    f"the text. Set {field}.mask_field to a column of list<list<int64>>, or of such lists as "
                    "JSON."
                )
        elif setting == "text_field" and not _no_chat(kind):
            raise UserError(f"{label}: column {name!r} is of lists of messages. {set_messages(field, name)}.")
        else:
            raise UserError(
                f"{label}: column {name!r} is {kind}, not text. Set {field}.{setting} to a text column; in "
                "a struct, as 'column.field'."
            )


def _type_at(schema: Any, name: str, *, label: str, field: str, setting: str) -> Any:
    """Returns the type of a column, or of a field of a struct column; raises UserError if there is none."""
    fields = {name: schema.field(name).type for name in schema.names}
    path, kind = "", None
    for key in _keys(schema.names, name):
        if key not in fields:
            there = ", ".join(path + name for name in fields)
            said = f"its columns: {there}" if fields else f"column {path[:-1]!r} is {kind} and has no fields"
            chats = [
                set_messages(field, other) for other in schema.names if not _no_chat(schema.field(other).type)
            ]
            advice = [*(chats if setting == "text_field" else []), f"Set {field}.{setting} to one of them"]
            raise UserError(f"{label}: no column {name!r}; {said}. {advice[0]}.")
        kind = fields[key]
        path += f"{key}."
        fields = {f.name: f.type for f in kind.fields} if pa.types.is_struct(kind) else {}
    return kind


def _is_spans(kind: Any) -> bool:
    """True for lists of lists of integers; a column of empty lists only may have no type of its own."""
    for _ in range(2):
        if pa.types.is_null(kind):
            return True
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
            return False
        kind = kind.value_type
    return pa.types.is_integer(kind) or pa.types.is_null(kind)


def _no_chat(kind: Any) -> str:
    """Returns why a type is not that of lists of messages; empty if it is."""
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(
        kind.value_type
    ):
        return "no list of structs"
    fields = {field.name: field.type for field in kind.value_type.fields}
    for key in ("role", "content"):
        if key not in fields:
            return f"no field {key!r}, only {', '.join(map(repr, fields))}"
        if not (pa.types.is_string(fields[key]) or pa.types.is_large_string(fields[key])):
            return f"field {key!r} is {fields[key]} and not text"
    return ""


def grouped_sizes(
    first: int,
    end: int,
    group_starts: Int[np.ndarray, " groups_and_end"],
    column_of: Callable[[int, str], Any],
    fields: TextFields,
) -> Int[np.ndarray, " n"]:
    """Returns the bytes of the texts of rows `first` to `end` - 1, summed over columns; 0 where there is
    none.
    """
    import pyarrow.compute as pc

    is_chat = fields.mask is not None and fields.mask.is_chat
    low, high = np.searchsorted(group_starts, (first, end - 1), side="right") - 1
    found = []
    for group in range(int(low), int(high) + 1):
        start, stop = int(group_starts[group]), int(group_starts[group + 1])
        total = np.zeros(min(end, stop) - max(first, start), np.int64)
        for name in fields.in_text:
            texts = column_of(group, name).slice(max(first - start, 0), len(total))
            if is_chat:
                total += _chat_sizes(texts)
                continue
            sizes = pc.fill_null(pc.call_function("binary_length", [texts]), 0)
            total += sizes.to_numpy(zero_copy_only=False).astype(np.int64)
        found.append(total)
    return np.concatenate([np.empty(0, np.int64), *found])


def _chat_sizes(chats: Any) -> Int[np.ndarray, " n"]:
    """Returns the bytes of the texts of chats."""
    import pyarrow.compute as pc

    messages = chats.flatten()
    sizes = np.full(len(messages), LAYOUT_BYTES, np.int64)
    for key in ("role", "content"):
        found = pc.fill_null(pc.call_function("binary_length", [messages.field(key)]), 0)
        sizes += found.to_numpy(zero_copy_only=False).astype(np.int64)
    counts = pc.fill_null(pc.call_function("list_value_length", [chats]), 0).to_numpy(zero_copy_only=False)
    ends = np.cumsum(counts, dtype=np.int64)
    total = np.append(0, np.cumsum(sizes))
    return total[ends] - total[ends - counts]


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
    column_of: Callable[[int, str], Any],
    fields: TextFields,
    *,
    label: str,
) -> list[str | BadRecord]:
    """Returns the texts of rows in the given order, fetching the columns of each group once."""
    mask = fields.mask
    places_of: dict[int, list[int]] = {}
    for place, group in enumerate((np.searchsorted(group_starts, records, side="right") - 1).tolist()):
        places_of.setdefault(group, []).append(place)
    texts: list[str | BadRecord] = [""] * len(records)
    for group, places in places_of.items():
        start = int(group_starts[group])
        rows = [records[place] - start for place in places]
        # Not `take`: its first call imports pyarrow.compute, 80 ms in each loader, and it is no faster for
        # few rows.
        found: list[Any] = [""] * len(rows)
        if mask is None or not mask.is_chat:
            found = _values(column_of(group, fields.text), rows, fields.text)
        if mask is not None:
            values = _values(column_of(group, mask.field), rows, mask.field)
            found = [_masked_or_why(mask, text, value) for text, value in zip(found, values, strict=True)]
        for place, text in zip(places, found, strict=True):
            if isinstance(text, ValueError):
                text = BadRecord(f"{label}, row {records[place]}: {text}. Mend the row, {SKIP}")
            texts[place] = text
    return texts


def _values(column: Any, rows: list[int], name: str) -> list[Any]:
    """Returns the values of a column's rows; a ValueError that says why for each that cannot be read."""
    texts = {
        pa.string(): pa.binary(),
        pa.large_string(): pa.large_binary(),
        pa.string_view(): pa.binary_view(),
    }
    content = column.view(texts[column.type]) if column.type in texts else None
    return [_value_or_why(column, content, row, name) for row in rows]


def _value_or_why(column: Any, content: Any, row: int, name: str) -> Any:
    """Returns the value of a row, or a ValueError; `content` is a column of texts as bytes."""
    try:
        if content is not None:
            content.slice(row, 1).validate(
                full=True
            )  # 1 us: nothing else checks the offsets of a file that is mapped
        value = column[row].as_py()
    except UnicodeDecodeError as error:
        return ValueError(f"not UTF-8 at byte {error.start} of its text ({error.reason})")
    except pa.ArrowInvalid as error:
        return ValueError(f"damaged ({error})")
    return ValueError(f"column {name!r} is null") if value is None else value


def _masked_or_why(mask: MaskFields, text: str | ValueError, value: Any) -> str | ValueError:
    for one in (text, value):
        if isinstance(one, ValueError):
            return one
    try:
        return mask.join(str(text), value)
    except ValueError as error:
        return ValueError(f"column {mask.field!r} {error}")
