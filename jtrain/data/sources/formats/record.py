"""Interface of all formats: documents by number, and the error for a bad one."""

import abc
import itertools
import json
import reprlib
from collections.abc import Collection
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int

from jtrain.data.chat.messages import is_chat
from jtrain.data.sources.formats.masked_text import TextFields, set_messages, without_input
from jtrain.data.sources.retry import FileLost
from jtrain.errors import UserError

_DECODER = json.JSONDecoder()
_LINE_ENDS = ("\n", "\r\n", "")

_MOST_NAMED = 50
"""Fields or columns that a message lists."""

SKIP = "or set data.on_bad_record='skip'."


class BadRecord(UserError):
    """Record that is not UTF-8 or violates its format; the message names the file and the place in it."""

    __module__ = "jtrain.data.sources.formats"  # where users import it from


class Records(abc.ABC):
    """Documents of one file, by number. Each read opens the file again, so idle files hold no descriptor."""

    __slots__ = ()

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def read(self, records: list[int]) -> list[str | BadRecord]:
        """Returns texts in the given order, BadRecord for bad records; raises OSError if the file fails."""

    def __getitem__(self, record: int) -> str:
        """Returns one text; raises BadRecord, or OSError if the file itself fails."""
        [text] = self.read([record])
        if isinstance(text, BadRecord):
            raise text
        return text

    sizes_need_reading: ClassVar[bool] = True
    """True if `sizes` reads the records; False if it looks their sizes up in an index."""

    checks_columns: ClassVar[bool] = False
    """True if a file without the fields that are read cannot be opened."""

    def sizes(self, first: int, end: int) -> Int[np.ndarray, " n"]:
        """Returns the UTF-8 bytes of the texts of records `first` to `end` - 1, or a few more; 0 for a bad
        record.
        """
        texts = self.read(list(range(first, end)))
        sizes = [0 if isinstance(text, BadRecord) else len(text.encode("utf-8")) for text in texts]
        return np.asarray(sizes, np.int64)

    def count_before(self, offsets: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Returns the number of records that begin before each of these bytes of the file, ascending; for
        files that `FileParts` cuts into stripes.
        """
        raise NotImplementedError(type(self).__name__)

    @property
    def group_starts(self) -> Int[np.ndarray, " groups_and_end"]:
        """First record of each group that is decoded as a whole, then the number of records."""
        return np.asarray([0, len(self)], np.int64)

    @property
    def group_bytes(self) -> Int[np.ndarray, " groups"]:
        """Bytes decoded into memory to read any record of each group; 0 if records are read one by one."""
        return np.zeros(1, np.int64)

    def hold(self, record: int) -> object:
        """Returns what is decoded to read a record: while it lives, its group is not decoded again; or
        None.
        """
        return None

    def close(self) -> None:  # noqa: B027 (most formats keep nothing)
        """Frees everything kept between reads."""


def plain_text_of_json(line: bytes, text_field: str) -> str | None:
    """Returns what `text_of_json` returns without a mask, in half its time; None if only that can tell."""
    try:
        content = line.decode("utf-8")
        # 2.1 us for a short line; `loads` of its bytes takes 3.8. The line's end is checked below.
        record, end = _DECODER.raw_decode(content)
        text = record[text_field]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    # `type(...) is` suffices: JSON gives no subclasses of str and dict.
    is_plain = content[end:] in _LINE_ENDS and type(text) is str and type(record) is dict
    is_plain = is_plain and "labels" not in record
    # An escape may spell half a surrogate pair, so lines with any are left to `text_of_json`.
    return text if is_plain and b"\\u" not in line else None


class LostFile(Records):
    """File that was gone when a lazily opened corpus came to it: one bad record, since nobody knows more."""

    __slots__ = ("_reason",)

    def __init__(self, error: FileLost) -> None:
        self._reason = str(error)

    def __len__(self) -> int:
        return 1

    def read(self, records: list[int]) -> list[str | BadRecord]:
        return [BadRecord(self._reason) for _ in records]


def text_of_json(
    line: bytes, fields: TextFields, *, label: str, way_out: str, position_suffix: str = ""
) -> str | BadRecord:
    """Returns the text in a JSON object; a `MaskedText` if `fields.mask` is set.

    Returns a BadRecord if `line` is not UTF-8, not JSON or not an object, or a field is missing or not of its
    kind.

    Args:
      line: the object, as UTF-8.
      label: file and place of the object, for messages.
      way_out: how to mend the object, for messages.
      position_suffix: words after `at byte N` in the message about bytes that are not UTF-8.
    """

    def bad(reason: str) -> BadRecord:
        return BadRecord(f"{label}: {reason}. {way_out}, {SKIP}")

    text_field, mask = fields.text, fields.mask

    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return bad(f"not UTF-8 at byte {error.start}{position_suffix} ({error.reason})")
    except (ValueError, RecursionError) as error:  # ValueError also for numbers of over 4,300 digits
        return bad(f"no JSON: {error}")
    if not isinstance(record, dict):
        return bad(f"a JSON {type(record).__name__}, not an object with a field {fields.read[0]!r}")
    if mask is not None and mask.is_chat:
        text = ""
    # The plain key first, which is nearly always there; `field_at` also follows dots and explains.
    elif not isinstance(text := record.get(text_field), str):
        try:
            text = field_at(record, text_field)
        except KeyError as error:
            chats = [set_messages(fields.config_path, key) for key, value in record.items() if is_chat(value)]
            # One way out: the chat, if there is one.
            advice = ". ".join([*chats, f"Set {fields.config_path}.text_field"][:1])
            return bad(f"no field {text_field!r}; {error.args[0]}. {advice}")
        is_answer = mask is not None and mask.is_prompt and is_chat(text)
        if is_chat(text) and not is_answer:
            return bad(
                f"field {text_field!r} is a list of messages. {set_messages(fields.config_path, text_field)}"
            )
        if not isinstance(text, str) and not is_answer:
            return bad(f"field {text_field!r} is {type(text).__name__}, not text")
    # An escape may spell half a surrogate pair, which cannot be encoded.
    if isinstance(text, str) and b"\\u" in line and b"\\ud" in line.lower():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return bad(f"field {text_field!r} holds half a surrogate pair ({error.reason})")
    labels = record.get("labels")
    # The targets of token ids, as trainers write them: -100 is what is not learned. Other labels are of
    # classes.
    if isinstance(labels, list) and -100 in labels:
        return bad(
            "field 'labels' holds -100, so it masks token ids, and text has none. Adopt the ids (python -m "
            "jtrain.data adopt), name what is learned of the text in a mask_field, or remove 'labels'"
        )
    if mask is None:
        return text
    if reason := without_input(mask, {key for key, value in record.items() if value}):
        return bad(reason)
    try:
        return mask.join(text, mask.value_of(lambda name: field_at(record, name)))
    except KeyError as error:
        return bad(f"no field {mask.field!r}; {error.args[0]}. Set {fields.config_path}.{mask.setting}")
    except ValueError as error:
        return bad(f"field {mask.field!r} {error}")


def names_of(names: Collection[str]) -> str:
    """Returns the first names, quoted, for a message: a record may have a million fields, of any length."""
    quoted = ", ".join(map(reprlib.repr, itertools.islice(names, _MOST_NAMED)))
    return f"{quoted} and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else quoted or "none"


def field_at(record: dict[str, Any], path: str) -> Any:
    """Returns the value under the key `path`, or else the value that the keys between its dots lead to.

    Raises:
      KeyError: there is none; its argument names the fields that are there.
    """
    # The path as a whole first: a key may hold dots.
    if path in record:
        return record[path]
    value: Any = record
    above = "its fields"
    for key in path.split("."):
        if not isinstance(value, dict):
            raise KeyError(f"{above} is {type(value).__name__}, not an object")
        if key not in value:
            raise KeyError(f"{above}: {names_of(value)}")
        value = value[key]
        above = f"the fields of {key!r}" if isinstance(value, dict) else f"field {key!r}"
    return value
