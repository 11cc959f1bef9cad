"""Loss masks in records: a prompt before the text, or a column with the spans of the text that are learned."""

import dataclasses
import json
from typing import Any

from jtrain.errors import UserError

CHAT = (
    "a chat (a list of messages with a role), and no template renders chats to text yet. Render it to text before, and "
    "say what is learned by a column of spans (mask_field) or by a prompt and its completion (prompt_field, text_field)"
)


_WITHOUT_FIELDS = ("text", "webdataset", "grain")
"""Formats of whose records only the text is read, so that they can hold no loss mask."""


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
    """Field of a record that says, with the text in `text_field`, what is learned; see `Source`.

    field: name of the prompt's or the mask's field.
    is_prompt: True for a prompt, False for a mask.
    mask_prompt: False if the prompt is learned as well.
    """

    field: str
    is_prompt: bool
    mask_prompt: bool

    @property
    def setting(self) -> str:
        """Name of the setting that names the field."""
        return "prompt_field" if self.is_prompt else "mask_field"

    def __str__(self) -> str:
        """Text that changes whenever other tokens could be learned."""
        return f"{self.setting}={self.field!r}" + (f", mask_prompt={self.mask_prompt}" if self.is_prompt else "")

    def join(self, text: str, value: Any) -> MaskedText:
        """Returns the text to train on, of a record's text and the value in `field`.

        Raises:
          ValueError: the value is no prompt, or no mask of this text; the message goes on after the field's name.
        """
        if not self.is_prompt:
            return MaskedText(text, _spans(value, len(text)))
        if not isinstance(value, str):
            raise ValueError(f"is {CHAT if is_chat(value) else f'{type(value).__name__}, not text'}")
        value.encode("utf-8")  # an escape in JSON may spell half a surrogate pair
        border, end = len(value), len(value) + len(text)
        return MaskedText(value + text, ((border, end),) if self.mask_prompt else ((0, border), (border, end)))


def check_mask(
    field: str,
    *,
    prompt_field: str | None,
    mask_prompt: bool,
    mask_field: str | None,
    text_field: str,
    format: str,
) -> None:
    """Raises UserError if these fields of a `Source`, at config path `field`, do not go together."""
    if prompt_field is not None and mask_field is not None:
        raise UserError(
            f"{field}: prompt_field={prompt_field!r} and mask_field={mask_field!r} are both set. Remove one: a prompt "
            "and its completion need no spans, and spans can leave out a prompt that is part of the text."
        )
    if prompt_field is None and not mask_prompt:
        raise UserError(f"{field}.mask_prompt=False has no prompt to learn. Set {field}.prompt_field, or remove it.")
    for setting, name in (("prompt_field", prompt_field), ("mask_field", mask_field)):
        if name is None:
            continue
        if name == text_field:
            of = "completion" if setting == "prompt_field" else "text"
            raise UserError(
                f"{field}.{setting}={name!r} is also its text_field. Set {field}.text_field to the field of the {of}."
            )
        check_format(format, what=f"{field}.format={format!r}", setting=f"{field}.{setting}", name=name)


def check_format(format: str, *, what: str, setting: str, name: str) -> None:
    """Raises UserError if only the text is read of this format's records.

    Args:
      what: file or setting that has the format, for the message.
      setting: config path of `prompt_field` or `mask_field`, whose value is `name`.
    """
    if format in _WITHOUT_FIELDS:
        raise UserError(
            f"{what}: of {format} records only the text is read, but {setting}={name!r}. Write them as JSON lines, CSV "
            f"or Parquet, or remove {setting}."
        )


def is_chat(value: Any) -> bool:
    """True for a list of messages: `{"role": ..., "content": ...}`, or `{"from": ..., "value": ...}`."""
    return (
        isinstance(value, list) and bool(value) and isinstance(value[0], dict) and bool({"role", "from"} & {*value[0]})
    )


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
            raise ValueError(f"holds {span!r} where a span [start, end] in characters of the text belongs")
        start, end = span
        if not 0 <= start < end <= characters:
            raise ValueError(
                f"holds {span}, which is no span of the text's {characters:,} characters (0 <= start < end)"
            )
        if start < before:
            raise ValueError(f"holds {span} after a span that ends at {before}: spans ascend and do not overlap")
        before = end
    return tuple((start, end) for start, end in value)
