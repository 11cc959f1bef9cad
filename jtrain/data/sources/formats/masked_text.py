"""Loss masks in records: a prompt before the text, or a field with the spans of it that are learned."""

import dataclasses
import json
import reprlib
from collections.abc import Callable, Collection
from typing import Any, Literal

from jtrain.data.sources.formats import chat
from jtrain.errors import UserError

_WITHOUT_FIELDS = ("text", "webdataset", "grain")
"""Formats of whose records only the text is read, so that they can hold no loss mask."""

_WITHOUT_LISTS = ("csv", "tsv")
"""Formats whose fields are text, so that they can hold no messages."""


class MaskedText(str):
    """Text of which only some spans are learned. It is the text itself to everything that knows no masks.

    learned: spans (start, end) in characters, ascending and apart. The end of the document is learned if the
      last span reaches the end of the text.
    """

    learned: tuple[tuple[int, int], ...]

    def __new__(cls, text: str, learned: tuple[tuple[int, int], ...]) -> "MaskedText":
        # str is immutable, so the text is set in __new__; an attribute can follow.
        new = super().__new__(cls, text)
        new.learned = learned
        return new


@dataclasses.dataclass(frozen=True)
class MaskFields:
    """Field of a record that says what is learned, beside the one in `text_field` or alone; see `Source`.

    field: name of the field of the prompt, the mask or the messages; of a prompt of several, joined by +.
    setting: name of the setting that names it.
    mask_prompt: False if the prompt, or what assistants did not say, is learned as well.
    """

    field: str
    setting: Literal["prompt_field", "mask_field", "messages_field"]
    mask_prompt: bool

    @property
    def is_prompt(self) -> bool:
        return self.setting == "prompt_field"

    @property
    def is_chat(self) -> bool:
        """True if the field holds the whole text, as messages, and `text_field` is not read."""
        return self.setting == "messages_field"

    @property
    def names(self) -> list[str]:
        """Fields that are read of a record."""
        return [name for name in self.field.split("+") if name] if self.is_prompt else [self.field]

    def value_of(self, read: Callable[[str], Any]) -> Any:
        """Returns the value to give to `join`; `read` returns the value of a field of the record."""
        values = [read(name) for name in self.names]
        if len(values) == 1:
            return values[0]
        # Alpaca's `input` is empty where the instruction is all of the prompt.
        texts = [value for value in values if value is not None and value != ""]
        if wrong := [value for value in texts if not isinstance(value, str)]:
            return wrong[0]
        return "".join(f"{text}\n" for text in texts)

    def __str__(self) -> str:
        """Text that changes whenever other tokens could be learned."""
        suffix = "" if self.setting == "mask_field" else f", mask_prompt={self.mask_prompt}"
        return f"{self.setting}={self.field!r}{suffix}"

    def join(self, text: Any, value: Any) -> MaskedText:
        """Returns the text to train on, of a record's text and the value in `field`.

        Raises:
          ValueError: the value is no prompt, no mask of this text, or no chat; the message goes on after the
            field's name.
        """
        if self.is_chat:
            return MaskedText(*chat.render(value, mask_prompt=self.mask_prompt))
        if not self.is_prompt:
            return MaskedText(text, _spans(value, len(text)))
        if chat.is_chat(text) and chat.is_chat(value):
            rendered = chat.render([*value, *text], mask_prompt=self.mask_prompt, num_prompt=len(value))
            return MaskedText(*rendered)
        if not isinstance(value, str) or not isinstance(text, str):
            kinds = ["a list of messages" if chat.is_chat(v) else type(v).__name__ for v in (value, text)]
            raise ValueError(
                f"is {kinds[0]}, and the text {kinds[1]}: both are text, or both are lists of messages"
            )
        value.encode("utf-8")  # an escape in JSON may spell half a surrogate pair
        # A learned prompt has a span of its own, so that the text is cut into the same tokens either way.
        border, end = len(value), len(value) + len(text)
        return MaskedText(
            value + text, ((border, end),) if self.mask_prompt else ((0, border), (border, end))
        )


@dataclasses.dataclass(frozen=True)
class TextFields:
    """Fields of a record that make up its text, and what is learned of it.

    text: JSON key, column, or member suffix of the text; a field of a JSON object or struct as `meta.text`.
    config_path: config path of the source, such as `data.sources.web`, for messages.
    mask: field that says what is learned of each text; None if all of it is.
    """

    text: str
    config_path: str
    mask: MaskFields | None = None

    @property
    def read(self) -> list[str]:
        """Fields that are read of a record."""
        if self.mask is None:
            return [self.text]
        # The first is the column that stands for the text where one must be checked.
        return self.mask.names if self.mask.is_chat else [self.text, *self.mask.names]

    @property
    def in_text(self) -> list[str]:
        """Fields that make up the text: a prompt belongs to it."""
        # Spans are numbers beside the text; a prompt or a chat is text itself.
        return self.read if self.mask is not None and self.mask.setting != "mask_field" else [self.text]


def check_format(format: str, *, label: str, setting: str, name: str) -> None:
    """Raises UserError if this format's records hold no masks, or no lists of messages.

    Args:
      label: file or setting that has the format, for the message.
      setting: config path of `prompt_field`, `mask_field` or `messages_field`, whose value is `name`.
    """
    if format in _WITHOUT_FIELDS:
        raise UserError(
            f"{label}: of {format} records only the text is read, but {setting}={name!r}. Write them as JSON "
            f"lines, CSV or Parquet, or remove {setting}."
        )
    if format in _WITHOUT_LISTS and setting.endswith(".messages_field"):
        raise UserError(
            f"{label}: a field of {format} is text and no list of messages, but {setting}={name!r}. Write "
            f"them as JSON lines or Parquet, or remove {setting}."
        )


def without_input(mask: MaskFields | None, names: Collection[str]) -> str:
    """Returns why a prompt is not whole, for a record with the fields of Alpaca; empty if it is.

    Args:
      names: fields of a record that are not empty, or columns.
    """
    if mask is None or not mask.is_prompt or mask.field != "instruction" or "input" not in names:
        return ""
    return (
        "it has an 'input' beside the 'instruction', which belongs to the prompt. Set prompt_field to "
        "'instruction+input', or to 'instruction+' to leave it out"
    )


def set_messages(field: str, name: str) -> str:
    """Returns how to train on the chat in a field of a source, for messages.

    Args:
      field: config path of the source.
      name: field of the chat.
    """
    # `data.path` has no field for messages: only sources by name do.
    if field == "data":
        return f"To train on the chat there, name the source in data.sources, with messages_field={name!r}"
    return f"To train on the chat there, set {field}.messages_field={name!r}"


def _spans(value: Any, num_characters: int) -> tuple[tuple[int, int], ...]:
    """Returns the spans of a mask: a list of [start, end], or its JSON, for a text of `num_characters`."""
    # A CSV field, or a column that holds the list as JSON.
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"is no JSON: {error}") from error
    if not isinstance(value, list):
        raise ValueError(
            f"is {type(value).__name__}, not a list of spans [start, end] in characters of the text"
        )
    last_end = 0
    for span in value:
        # `type(n)`, since True is an int to isinstance.
        if not (isinstance(span, list) and [type(n) for n in span] == [int, int]):
            raise ValueError(
                f"holds {reprlib.repr(span)} where a span [start, end] in characters of the text belongs"
            )
        start, end = span
        if not 0 <= start < end <= num_characters:
            raise ValueError(
                f"holds {span}, which is no span of the text's {num_characters:,} characters (0 <= start < "
                "end)"
            )
        if start < last_end:
            raise ValueError(
                f"holds {span} after a span that ends at {last_end}: spans ascend and do not overlap"
            )
        last_end = end
    return tuple((start, end) for start, end in value)
