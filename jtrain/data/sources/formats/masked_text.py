"""Loss masks in records: a prompt before the text, or a column with the spans of the text that are learned."""

import dataclasses
import json
import reprlib
from typing import Any, Literal

from jtrain.data.sources.formats import chat
from jtrain.errors import UserError

_WITHOUT_FIELDS = ("text", "webdataset", "grain")
"""Formats of whose records only the text is read, so that they can hold no loss mask."""

_WITHOUT_LISTS = ("csv", "tsv")
"""Formats whose fields are text, so that they can hold no messages."""


class MaskedText(str):
    """Text of which only some spans are learned. It is the text itself to everything that knows no masks.

    learned: spans (start, end) in characters, ascending and apart. The end of the document is learned if the last span
      reaches the end of the text.
    """

    learned: tuple[tuple[int, int], ...]

    def __new__(cls, text: str, learned: tuple[tuple[int, int], ...]) -> "MaskedText":
        new = super().__new__(cls, text)
        new.learned = learned
        return new


@dataclasses.dataclass(frozen=True)
class MaskFields:
    """Field of a record that says, with the text in `text_field` or without it, what is learned; see `Source`.

    field: name of the field of the prompt, the mask or the messages.
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

    def read(self, text_field: str) -> list[str]:
        """Returns the fields that are read of a record."""
        return [self.field] if self.is_chat else [text_field, self.field]

    def __str__(self) -> str:
        """Text that changes whenever other tokens could be learned."""
        more = "" if self.setting == "mask_field" else f", mask_prompt={self.mask_prompt}"
        return f"{self.setting}={self.field!r}{more}"

    def join(self, text: str, value: Any) -> MaskedText:
        """Returns the text to train on, of a record's text and the value in `field`.

        Raises:
          ValueError: the value is no prompt, no mask of this text, or no chat; the message goes on after the field's
            name.
        """
        if self.is_chat:
            return MaskedText(*chat.render(value, mask_prompt=self.mask_prompt))
        if not self.is_prompt:
            return MaskedText(text, _spans(value, len(text)))
        if not isinstance(value, str):
            kind = "a list of messages, and a prompt is text" if is_chat(value) else f"{type(value).__name__}, not text"
            raise ValueError(f"is {kind}")
        value.encode("utf-8")  # an escape in JSON may spell half a surrogate pair
        border, end = len(value), len(value) + len(text)
        return MaskedText(value + text, ((border, end),) if self.mask_prompt else ((0, border), (border, end)))


def mask_fields(
    *, prompt_field: str | None, mask_field: str | None, messages_field: str | None, mask_prompt: bool
) -> MaskFields | None:
    """Returns the one of these fields of a `Source` that is set; None if none is."""
    if prompt_field is not None:
        return MaskFields(prompt_field, "prompt_field", mask_prompt)
    if mask_field is not None:
        return MaskFields(mask_field, "mask_field", mask_prompt)
    return None if messages_field is None else MaskFields(messages_field, "messages_field", mask_prompt)


def check_mask(
    field: str,
    *,
    prompt_field: str | None,
    mask_prompt: bool,
    mask_field: str | None,
    messages_field: str | None,
    text_field: str,
    format: str,
) -> None:
    """Raises UserError if these fields of a `Source`, at config path `field`, do not go together."""
    if messages_field is not None:
        others = {"prompt_field": prompt_field, "mask_field": mask_field}
        others["text_field"] = None if text_field == "text" else text_field
        for setting, name in others.items():
            if name is not None:
                raise UserError(
                    f"{field}: messages_field={messages_field!r} and {setting}={name!r} are both set. Remove one: the "
                    "text of a chat, and what is learned of it, are in its messages alone."
                )
    if prompt_field is not None and mask_field is not None:
        raise UserError(
            f"{field}: prompt_field={prompt_field!r} and mask_field={mask_field!r} are both set. Remove one: a prompt "
            "and its completion need no spans, and spans can leave out a prompt that is part of the text."
        )
    if prompt_field is None and messages_field is None and not mask_prompt:
        raise UserError(
            f"{field}.mask_prompt=False has no prompt to learn. Set {field}.prompt_field or {field}.messages_field, or "
            "remove it."
        )
    fields = {"prompt_field": prompt_field, "mask_field": mask_field, "messages_field": messages_field}
    for setting, name in fields.items():
        if name is None:
            continue
        if name == text_field and setting != "messages_field":
            of = "completion" if setting == "prompt_field" else "text"
            raise UserError(
                f"{field}.{setting}={name!r} is also its text_field. Set {field}.text_field to the field of the {of}."
            )
        check_format(format, what=f"{field}.format={format!r}", setting=f"{field}.{setting}", name=name)


def check_format(format: str, *, what: str, setting: str, name: str) -> None:
    """Raises UserError if only the text is read of this format's records, or if they hold no lists of messages.

    Args:
      what: file or setting that has the format, for the message.
      setting: config path of `prompt_field`, `mask_field` or `messages_field`, whose value is `name`.
    """
    if format in _WITHOUT_FIELDS:
        raise UserError(
            f"{what}: of {format} records only the text is read, but {setting}={name!r}. Write them as JSON lines, CSV "
            f"or Parquet, or remove {setting}."
        )
    if format in _WITHOUT_LISTS and setting.endswith(".messages_field"):
        raise UserError(
            f"{what}: a field of {format} is text and no list of messages, but {setting}={name!r}. Write them as JSON "
            f"lines or Parquet, or remove {setting}."
        )


def set_messages(field: str, name: str) -> str:
    """Returns how to train on the chat in a field of a source, for messages.

    Args:
      field: config path of the source.
      name: field of the chat.
    """
    if field == "data":
        return f"To train on the chat there, name the source in data.sources, with messages_field={name!r}"
    return f"To train on the chat there, set {field}.messages_field={name!r}"


def is_chat(value: Any) -> bool:
    """True for a list of messages: `{"role": ..., "content": ...}`."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]


def _spans(value: Any, characters: int) -> tuple[tuple[int, int], ...]:
    """Returns the spans of a mask, a list of [start, end] or the JSON of one, for a text of so many characters."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"is no JSON: {error}") from error
    if not isinstance(value, list):
        raise ValueError(f"is {type(value).__name__}, not a list of spans [start, end] in characters of the text")
    before = 0
    for span in value:
        if not (isinstance(span, list) and [type(n) for n in span] == [int, int]):
            raise ValueError(f"holds {reprlib.repr(span)} where a span [start, end] in characters of the text belongs")
        start, end = span
        if not 0 <= start < end <= characters:
            raise ValueError(
                f"holds {span}, which is no span of the text's {characters:,} characters (0 <= start < end)"
            )
        if start < before:
            raise ValueError(f"holds {span} after a span that ends at {before}: spans ascend and do not overlap")
        before = end
    return tuple((start, end) for start, end in value)
