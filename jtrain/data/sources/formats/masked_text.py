"""Loss masks in records: a prompt before the text, or a field with the spans of it that are learned."""

import dataclasses
import hashlib
import json
import reprlib
from collections.abc import Callable, Collection
from typing import Any, Literal

from jtrain.data.chat.messages import UNIT, is_chat
from jtrain.data.chat.pairs import num_prompt_of
from jtrain.data.chat.template import ChatRule
from jtrain.data.chat.turns import RenderedChat, render_chat
from jtrain.errors import UserError

_WITHOUT_FIELDS = ("text", "webdataset", "grain")
"""Formats of whose records only the text is read, so that they can hold no loss mask."""

_WITHOUT_LISTS = ("csv", "tsv")
"""Formats whose fields are text, so that they can hold no messages."""


class MaskedText(str):
    """Text of which only some spans are learned. It is the text itself to everything that knows no masks.

    learned: spans (start, end) in characters, ascending and apart. The end of the document is learned if the
      last span reaches the end of the text.
    weights: weight of each span, in millionths; empty if all of them weigh 1.
    of_template: True for the text of a chat template, which writes special tokens: they are tokens of the
      tokenizer, and the document has no other begin.
    ends: True if the end id of the document belongs to the text.
    turns: texts of the turns of a chat that is one record a turn; empty if the text is the only record.
    rejected: the worse text of a pair, of which this is the better one; None if the text is no pair.
    """

    learned: tuple[tuple[int, int], ...]
    weights: tuple[int, ...] = ()
    of_template: bool = False
    ends: bool = True
    turns: tuple["MaskedText", ...] = ()
    rejected: "MaskedText | None" = None

    def __new__(cls, text: str, learned: tuple[tuple[int, int], ...]) -> "MaskedText":
        # str is immutable, so the text is set in __new__; an attribute can follow.
        new = super().__new__(cls, text)
        new.learned = learned
        return new

    @property
    def weight_of_spans(self) -> tuple[int, ...]:
        """Weight of each span in millionths."""
        return self.weights or (UNIT,) * len(self.learned)

    @classmethod
    def of_chat(cls, rendered: list[RenderedChat], rule: ChatRule) -> "MaskedText":
        """Returns the text of a chat; of one that is split, the first turn with all of them in `turns`."""
        texts = []
        for chat in rendered:
            texts.append(cls(chat.text, chat.learned))
            texts[-1].weights = chat.weights
            texts[-1].of_template, texts[-1].ends = not rule.template.is_built_in, chat.ends
        # The first turn stands for the record where only one text is asked for.
        if len(texts) > 1:
            texts[0].turns = tuple(texts)
        return texts[0]


@dataclasses.dataclass(frozen=True)
class MaskFields:
    """Field of a record that says what is learned, beside the one in `text_field` or alone; see `Source`.

    field: name of the field of the prompt, the mask or the messages; of a prompt of several, joined by +.
    setting: name of the setting that names it.
    mask_prompt: False if the prompt, or what assistants did not say, is learned as well.
    rule: rule by which chats become text.
    rejected: field of the worse answer of a preference pair; None if records are no pairs.
    """

    field: str
    setting: Literal["prompt_field", "mask_field", "messages_field"]
    mask_prompt: bool
    rule: ChatRule = dataclasses.field(default_factory=ChatRule)
    rejected: str | None = None

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
        rejected = [] if self.rejected is None else [self.rejected]
        if self.is_prompt:
            return [*(name for name in self.field.split("+") if name), *rejected]
        tools = [self.rule.tools_field] if self.is_chat and self.rule.tools_field else []
        return [self.field, *tools, *rejected]

    @property
    def is_split(self) -> bool:
        """True if a chat may be one record a turn."""
        return not self.rule.template.is_built_in and self.rule.on_rewritten_turn == "split"

    @property
    def digest(self) -> str:
        """Hash of all that decides what a chat becomes, for names of files."""
        # By the text of `__str__`, which changes with all that the mask depends on.
        return hashlib.blake2b(str(self).encode(), digest_size=8).hexdigest()

    def value_of(self, read: Callable[[str], Any]) -> Any:
        """Returns the value to give to `join`; `read` returns the value of a field of the record."""
        if self.rejected is not None:
            value = dataclasses.replace(self, rejected=None).value_of(read)
            if (rejected := _optional(read, self.rejected)) is None:
                raise ValueError(
                    f"has no worse answer beside it, in the field {self.rejected!r} of rejected_field"
                )
            return value, rejected
        if self.is_chat:
            tools = self.rule.tools_field
            return read(self.field), _optional(read, tools) if tools else None
        values = [read(name) for name in self.names]
        if len(values) == 1:
            return values[0]
        # Alpaca's `input` is empty where the instruction is all of the prompt.
        texts = [value for value in values if value is not None and value != ""]
        if wrong := [value for value in texts if not isinstance(value, str)]:
            return wrong[0]
        # A line end behind each, so that the last one divides the prompt from its completion.
        return "".join(f"{text}\n" for text in texts)

    def __str__(self) -> str:
        """Text that changes whenever other tokens could be learned."""
        suffix = "" if self.setting == "mask_field" else f", mask_prompt={self.mask_prompt}"
        suffix += "" if self.rejected is None else f", rejected_field={self.rejected!r}"
        return f"{self.setting}={self.field!r}{suffix}{self.rule if self.setting != 'mask_field' else ''}"

    def join(self, text: Any, value: Any) -> MaskedText:
        """Returns the text to train on, of a record's text and the value in `field`.

        Raises:
          ValueError: the value is no prompt, no mask of this text, or no chat; the message goes on after the
            field's name.
        """
        if self.rejected is not None:
            return self._pair(text, *value)
        if self.is_chat:
            messages, tools = value
            return self._text_of_chat(messages, tools=tools)
        if not self.is_prompt:
            return MaskedText(text, _spans(value, len(text)))
        # Two lists of messages are one chat, whose first part is the prompt.
        if is_chat(text) and is_chat(value):
            return self._text_of_chat([*value, *text], num_prompt=len(value))
        if not isinstance(value, str) or not isinstance(text, str):
            kinds = ["a list of messages" if is_chat(v) else type(v).__name__ for v in (value, text)]
            raise ValueError(
                f"is {kinds[0]}, and the text {kinds[1]}: both are text, or both are lists of messages"
            )
        if self.rule.message_weights:
            raise ValueError(
                "is text, and message_weights weighs messages. Write prompt and completion as lists of "
                "messages, or set message_weights=False"
            )
        value.encode("utf-8")  # an escape in JSON may spell half a surrogate pair
        # A learned prompt has a span of its own, so that the text is cut into the same tokens either way.
        border, end = len(value), len(value) + len(text)
        return MaskedText(
            value + text, ((border, end),) if self.mask_prompt else ((0, border), (border, end))
        )

    def _pair(self, chosen: Any, value: Any, rejected: Any) -> MaskedText:
        """Returns the better text of a pair, with the worse one in `rejected`.

        Args:
          value: as of `join` for the better text alone.
        """
        single, num_prompt, tools = dataclasses.replace(self, rejected=None), 0, None
        if self.is_chat:
            chosen, tools = value
            num_prompt = num_prompt_of(chosen, rejected, self.rejected)
        sides = []
        for side in (chosen, rejected):
            try:
                text = (
                    self._text_of_chat(side, num_prompt=num_prompt, tools=tools)
                    if self.is_chat
                    else single.join(side, value)
                )
                if not text:
                    raise ValueError("has neither a prompt nor an answer, so that nothing of it is learned")
            except ValueError as error:
                if side is chosen:
                    raise
                raise ValueError(f"goes with the worse answer in {self.rejected!r}, which {error}") from error
            sides.append(text)
        better, worse = sides
        if better == worse:
            raise ValueError(
                f"goes with the same answer twice, the one in {self.rejected!r} being no other. Leave the "
                "pair out: it prefers neither"
            )
        better.rejected = worse
        return better

    def _text_of_chat(self, messages: Any, *, num_prompt: int = 0, tools: Any = None) -> MaskedText:
        rendered = render_chat(
            messages, self.rule, mask_prompt=self.mask_prompt, num_prompt=num_prompt, tools=tools
        )
        return MaskedText.of_chat(rendered, self.rule)


def _optional(read: Callable[[str], Any], name: str) -> Any:
    """Returns the value of a field that not every record has."""
    try:
        return read(name)
    except KeyError:
        return None


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
        if self.mask is None or self.mask.setting == "mask_field":
            return [self.text]
        if not self.mask.is_chat:
            return self.read
        return [self.mask.field, *([] if self.mask.rejected is None else [self.mask.rejected])]


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
    """Returns why a record has more than is read of it: an input of Alpaca, or the tools of a chat; or empty.

    Args:
      names: fields of a record that are not empty, or columns.
    """
    if mask is not None and mask.is_chat and mask.rule.tools_field is None and "tools" in names:
        return (
            "it has 'tools' beside the messages, which its chat template writes. Set tools_field to 'tools', "
            "or to '' to leave them out"
        )
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
