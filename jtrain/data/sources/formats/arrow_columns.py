"""Columns of Arrow tables, decoded from Parquet or mapped: their types, sizes and texts."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Int

from jtrain.data.chat.messages import LAYOUT_BYTES, ROLE_BYTES
from jtrain.data.sources.formats.masked_text import MaskFields, TextFields, set_messages, without_input
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
        for name in mask.names[1:]:
            _type_at(schema, name, label=label, field=field, setting="tools_field")
        if reason := without_input(mask, schema.names):
            raise UserError(f"{label}: {reason}.")
        return
    if mask is None and {"input_ids", "labels"} <= set(schema.names):
        raise UserError(
            f"{label}: its columns 'input_ids' and 'labels' are token ids and their targets, which text does "
            f"not have. Adopt the ids (python -m jtrain.data adopt), or write the file without 'labels'."
        )
    if reason := without_input(mask, schema.names):
        raise UserError(f"{label}: {reason}.")
    settings = [(fields.text, "text_field")]
    settings += [(name, mask.setting) for name in mask.names] if mask else []
    kinds = {n: _type_at(schema, n, label=label, field=field, setting=setting) for n, setting in settings}
    if mask is not None and mask.is_prompt and not any(map(_chat_defect, kinds.values())):
        return  # prompt and completion are lists of messages both
    for name, setting in settings:
        kind = kinds[name]
        if _is_text(kind):
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


def _is_text(kind: Any) -> bool:
    """True for text in any of Arrow's layouts, dictionaries included."""
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _is_list(kind: Any) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


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
    for key in _message_keys(fields):
        if key not in fields:
            return f"no field {key!r}, only {', '.join(map(repr, fields))}"
        if not (_is_text(fields[key]) or (key == "content" and _is_parts(fields[key]))):
            return f"field {key!r} is {fields[key]} and not text"
    return ""


def _is_parts(kind: Any) -> bool:
    """True for lists of `{"type": ..., "text": ...}`; reading a part of another type than text says so."""
    return (
        _is_list(kind)
        and pa.types.is_struct(kind.value_type)
        and kind.value_type.get_field_index("text") >= 0
    )


def _message_keys(names: Collection[str]) -> tuple[str, str]:
    """Returns the fields of role and content of messages with these fields."""
    return ("from", "value") if {"from", "value"} <= set(names) else ("role", "content")


def grouped_sizes(
    first: int,
    end: int,
    group_starts: Int[np.ndarray, " groups_and_end"],
    column_of: Callable[[int, str], Any],
    fields: TextFields,
) -> Int[np.ndarray, " n"]:
    """Returns the bytes of the texts of rows `first` to `end` - 1, summed over columns; 0 for a null."""
    # side="right" steps over empty groups, whose start equals that of the next.
    low, high = np.searchsorted(group_starts, (first, end - 1), side="right") - 1
    sizes_of_groups = []
    for group in range(int(low), int(high) + 1):
        start, stop = int(group_starts[group]), int(group_starts[group + 1])
        # Only the rows of this group that lie within [first, end).
        total = np.zeros(min(end, stop) - max(first, start), np.int64)
        # Fields of a prompt of several end with a line end each.
        total += len(fields.in_text) if len(fields.in_text) > 2 else 0
        for name in fields.in_text:
            total += _text_sizes(column_of(group, name).slice(max(first - start, 0), len(total)))
        sizes_of_groups.append(total)
    return np.concatenate([np.empty(0, np.int64), *sizes_of_groups])


def _text_sizes(column: Any) -> Int[np.ndarray, " n"]:
    """Returns the bytes of texts, of chats, or of contents in parts; 0 for a null."""
    import pyarrow.compute as pc

    kind = column.type
    if pa.types.is_dictionary(kind):
        return _text_sizes(column.cast(pa.large_string()))
    if pa.types.is_struct(kind):  # a message, or a part of one
        names = [field.name for field in kind.fields]
        if "text" in names:
            return _text_sizes(column.flatten()[names.index("text")])
        sizes = [_text_sizes(column.flatten()[names.index(key)]) for key in _message_keys(names)]
        return sizes[0] + sizes[1] + LAYOUT_BYTES + (ROLE_BYTES if "from" in names else 0)
    if not _is_list(kind):
        lengths = column.view(pa.binary_view()) if pa.types.is_string_view(kind) else column
        lengths = lengths.cast(pa.large_binary()) if pa.types.is_string_view(kind) else lengths
        lengths = pc.fill_null(pc.call_function("binary_length", [lengths]), 0)
        return lengths.to_numpy(zero_copy_only=False).astype(np.int64)
    # A list that is null has no values in `flatten`, so it counts as empty.
    counts = pc.fill_null(pc.call_function("list_value_length", [column]), 0).to_numpy(zero_copy_only=False)
    ends = np.cumsum(counts, dtype=np.int64)
    # Sum over the values of each list as a difference of cumulative sums.
    bytes_before = np.append(0, np.cumsum(_text_sizes(column.flatten())))
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
            columns = {name: _values(column_of(group, name), rows, name) for name in mask.names}
            group_texts = [
                _mask_or_error(mask, text, {name: values[i] for name, values in columns.items()})
                for i, text in enumerate(group_texts)
            ]
        for position, text in zip(positions, group_texts, strict=True):
            # A ValueError stands for a bad value up to here, where file and row are known.
            if isinstance(text, ValueError):
                text = BadRecord(f"{label}, row {records[position]}: {text}. Mend the row, {SKIP}")
            texts[position] = text
    return texts


def _values(column: Any, rows: list[int], name: str) -> list[Any]:
    """Returns the values of a column's rows; a ValueError that says why for each that cannot be read."""
    if pa.types.is_dictionary(column.type):
        # Of the rows that are read alone: the dictionary stays one.
        column, rows = column.take(pa.array(rows, pa.int64())).cast(pa.large_string()), list(range(len(rows)))
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


def _mask_or_error(mask: MaskFields, text: Any, values: dict[str, Any]) -> str | ValueError:
    # A field of several may be null, as Alpaca's input; the first one, and a text, may not.
    first, *others = mask.names
    values |= {name: None for name in others if str(values[name]) == f"column {name!r} is null"}
    for part in (text, *(values[name] for name in (first, *others))):
        if isinstance(part, ValueError):
            return part
    try:
        return mask.join(text, mask.value_of(values.__getitem__))
    except ValueError as error:
        return ValueError(f"column {mask.field!r} {error}")
