"""Columns of Arrow tables, decoded from Parquet or mapped: their types, sizes and texts."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Int

from jtrain.data.sources.formats.chat import LAYOUT_BYTES
from jtrain.data.sources.formats.masked_text import MaskFields, TextFields, set_messages
from jtrain.data.sources.formats.record import SKIP, BadRecord
from jtrain.errors import UserError

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


def check_columns(schema: Any, fields: TextFields, *, label: str) -> None:
    """Checks that an Arrow schema has the columns that are read, or struct columns with such fields.

    Raises:
      UserError: there is no such column, or it is not of text, not of messages, or a mask's is not of spans.
    """
    field, mask = fields.config_path, fields.mask
    if mask is not None and mask.is_chat:
        kind = _type_at(schema, mask.field, label=label, field=field, setting=mask.setting)
        if defect := _chat_defect(kind):
            raise UserError(
                f"{label}: column {mask.field!r} is {kind}, not lists of messages: {defect}. Set "
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
        elif setting == "text_field" and not _chat_defect(kind):
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
    # Descends through struct columns: at each key `fields` are those of the struct reached so far.
    for key in _keys(schema.names, name):
        if key not in fields:
            column_names = ", ".join(path + name for name in fields)
            description = (
                f"its columns: {column_names}"
                if fields
                else f"column {path[:-1]!r} is {kind} and has no fields"
            )
            chats = [
                set_messages(field, column_name)
                for column_name in schema.names
                if not _chat_defect(schema.field(column_name).type)
            ]
            # Only the first advice is shown, and a chat among the columns is the likeliest mistake.
            advice = [*(chats if setting == "text_field" else []), f"Set {field}.{setting} to one of them"]
            raise UserError(f"{label}: no column {name!r}; {description}. {advice[0]}.")
        kind = fields[key]
        path += f"{key}."
        fields = {f.name: f.type for f in kind.fields} if pa.types.is_struct(kind) else {}
    return kind


def _is_spans(kind: Any) -> bool:
    """True for lists of lists of integers; a column of empty lists only may have no type of its own."""
    # Spans are lists of lists: two levels down lie the numbers.
    for _ in range(2):
        if pa.types.is_null(kind):
            return True
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
            return False
        kind = kind.value_type
    return pa.types.is_integer(kind) or pa.types.is_null(kind)


def _chat_defect(kind: Any) -> str:
    """Returns the reason why a type is no list of messages; empty if it is one."""
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
    """Returns the bytes of the texts of rows `first` to `end` - 1, summed over columns; 0 for a null."""
    import pyarrow.compute as pc

    is_chat = fields.mask is not None and fields.mask.is_chat
    # side="right" steps over empty groups, whose start equals that of the next.
    low, high = np.searchsorted(group_starts, (first, end - 1), side="right") - 1
    sizes_of_groups = []
    for group in range(int(low), int(high) + 1):
        start, stop = int(group_starts[group]), int(group_starts[group + 1])
        # Only the rows of this group that lie within [first, end).
        total = np.zeros(min(end, stop) - max(first, start), np.int64)
        for name in fields.in_text:
            texts = column_of(group, name).slice(max(first - start, 0), len(total))
            if is_chat:
                total += _chat_sizes(texts)
                continue
            sizes = pc.fill_null(pc.call_function("binary_length", [texts]), 0)
            total += sizes.to_numpy(zero_copy_only=False).astype(np.int64)
        sizes_of_groups.append(total)
    return np.concatenate([np.empty(0, np.int64), *sizes_of_groups])


def _chat_sizes(chats: Any) -> Int[np.ndarray, " n"]:
    """Returns the bytes of the texts of chats."""
    import pyarrow.compute as pc

    messages = chats.flatten()
    sizes = np.full(len(messages), LAYOUT_BYTES, np.int64)
    for key in ("role", "content"):
        lengths = pc.fill_null(pc.call_function("binary_length", [messages.field(key)]), 0)
        sizes += lengths.to_numpy(zero_copy_only=False).astype(np.int64)
    # A chat that is null has no messages in `flatten`, so it counts as empty.
    counts = pc.fill_null(pc.call_function("list_value_length", [chats]), 0).to_numpy(zero_copy_only=False)
    ends = np.cumsum(counts, dtype=np.int64)
    # Sum over each chat's messages as a difference of cumulative sums.
    bytes_before = np.append(0, np.cumsum(sizes))
    return bytes_before[ends] - bytes_before[ends - counts]


def column_at(table: Any, text_field: str) -> Any:
    """Returns the column of a table or record batch; a text in a struct that is null is null itself."""
    column_name, *nested_keys = _keys(table.schema.names, text_field)
    column = table.column(column_name)
    for key in nested_keys:
        kind = column.type
        # `flatten`, unlike `field`, makes a value null where its struct is null.
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
    # Grouped by row group, since each is decoded as a whole; the cache may hold only one.
    positions_of_group: dict[int, list[int]] = {}
    for position, group in enumerate((np.searchsorted(group_starts, records, side="right") - 1).tolist()):
        positions_of_group.setdefault(group, []).append(position)
    texts: list[str | BadRecord] = [""] * len(records)
    for group, positions in positions_of_group.items():
        start = int(group_starts[group])
        rows = [records[position] - start for position in positions]
        # Not `take`: its first call imports pyarrow.compute, 80 ms in each loader, and it is no faster for
        # few rows.
        group_texts: list[Any] = [""] * len(rows)
        if mask is None or not mask.is_chat:
            group_texts = _values(column_of(group, fields.text), rows, fields.text)
        if mask is not None:
            values = _values(column_of(group, mask.field), rows, mask.field)
            group_texts = [
                _mask_or_error(mask, text, value) for text, value in zip(group_texts, values, strict=True)
            ]
        for position, text in zip(positions, group_texts, strict=True):
            # A ValueError stands for a bad value up to here, where file and row are known.
            if isinstance(text, ValueError):
                text = BadRecord(f"{label}, row {records[position]}: {text}. Mend the row, {SKIP}")
            texts[position] = text
    return texts


def _values(column: Any, rows: list[int], name: str) -> list[Any]:
    """Returns the values of a column's rows; a ValueError that says why for each that cannot be read."""
    texts = {
        pa.string(): pa.binary(),
        pa.large_string(): pa.large_binary(),
        pa.string_view(): pa.binary_view(),
    }
    # As bytes: validating text would decode all of it a second time.
    content = column.view(texts[column.type]) if column.type in texts else None
    return [_value_or_error(column, content, row, name) for row in rows]


def _value_or_error(column: Any, content: Any, row: int, name: str) -> Any:
    """Returns the value of a row, or a ValueError; `content` is a column of texts as bytes."""
    try:
        if content is not None:
            # 1 us: nothing else checks the offsets of a file that is mapped.
            content.slice(row, 1).validate(full=True)
        value = column[row].as_py()
    except UnicodeDecodeError as error:
        return ValueError(f"not UTF-8 at byte {error.start} of its text ({error.reason})")
    except pa.ArrowInvalid as error:
        return ValueError(f"damaged ({error})")
    return ValueError(f"column {name!r} is null") if value is None else value


def _mask_or_error(mask: MaskFields, text: str | ValueError, value: Any) -> str | ValueError:
    for part in (text, value):
        if isinstance(part, ValueError):
            return part
    try:
        return mask.join(str(text), value)
    except ValueError as error:
        return ValueError(f"column {mask.field!r} {error}")
