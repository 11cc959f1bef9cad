"""Chats: lists of messages with role and content, as one text whose assistant messages are learned."""

import itertools
import reprlib
from typing import Any, NamedTuple

ASSISTANT = "assistant"
"""Role whose messages are learned."""

LAYOUT_BYTES = 6
"""Bytes that `layout` adds to role and content of a message. JSON adds more, so a line is no shorter than its
text."""

_MOST_ROLES = 50
"""Roles or keys that a message lists."""

_UNREADABLE = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking", "images", "audio")
"""Keys of a message whose values the model would say or see, and that the layout has no place for."""

_ROLE_OF = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    "system": "system",
    "tool": "tool",
}
"""Role of each `from` of ShareGPT."""

ROLE_BYTES = len(ASSISTANT) - len("gpt")
"""Most bytes by which a role is longer than the `from` that stands for it."""


class Message(NamedTuple):
    """Message of a chat; `learned` is what its `weight` or `train` says, None if they say nothing."""

    role: str
    content: str
    learned: bool | None


def layout(messages: list[Message]) -> list[tuple[str, int]]:
    """Returns the parts of the text of a chat, each with the number of its message; -1: not of a message.

    This is the place for chat templates. A message is `<|role|>`, a line end, its content and a line end. The
    line end after an assistant's content belongs to the message, since that is where a model has to stop.
    """
    parts = []
    for number, message in enumerate(messages):
        parts += [(f"<|{message.role}|>\n", -1), (f"{message.content}\n", number)]
    return parts


def render(value: Any, *, mask_prompt: bool, num_prompt: int = 0) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Returns the text of a chat, and the spans of it that are learned.

    Args:
      value: list of `{"role": ..., "content": ...}`, or of ShareGPT's `{"from": ..., "value": ...}`. A
        content is text or a list of parts `{"type": "text", "text": ...}`. `weight` (0 or 1, of an
        assistant's message) and `train` (true or false) say if the message is learned.
      mask_prompt: True to learn what assistants say, False to learn all of it, cut into the same tokens.
      num_prompt: first messages that are not learned, whoever says them, as they are a prompt.

    Raises:
      ValueError: the value is no such list; the message goes on after the field's name.
    """
    if not isinstance(value, list):
        raise ValueError(f"is {type(value).__name__}, not a list of messages")
    # Not an empty document: nothing but a mistake writes a chat without messages.
    if not value:
        raise ValueError("is a list without messages")
    messages = [_message(number, message) for number, message in enumerate(value)]

    def is_answer(number: int) -> bool:
        """True if the text is cut before and after the message, whether or not it is learned."""
        message = messages[max(number, 0)]
        by_role = message.role == ASSISTANT and number >= num_prompt
        return number >= 0 and (message.learned is not None or by_role)

    def is_learned(number: int) -> bool:
        stated = messages[max(number, 0)].learned if number >= 0 else None
        return stated if stated is not None else not mask_prompt or is_answer(number)

    spans: list[tuple[int, int]] = []
    texts: list[str] = []
    end = 0
    # Adjacent parts of one kind are joined, so that the text is tokenised in fewer pieces.
    for (_, learned), group in itertools.groupby(
        layout(messages), key=lambda part: (is_answer(part[1]), is_learned(part[1]))
    ):
        texts.append("".join(text for text, _ in group))
        start, end = end, end + len(texts[-1])
        spans += [(start, end)] if learned else []
    # A document without a learned token would take room in rows and change nothing.
    if not spans:
        if any(message.learned is False for message in messages):
            raise ValueError("holds no message that is learned, by their weight and train. Leave it out")
        roles = ", ".join(sorted({reprlib.repr(message.role) for message in messages})[:_MOST_ROLES])
        raise ValueError(
            f"holds no message of role {ASSISTANT!r}, so nothing of it is learned; its roles: {roles}. Call "
            f"the role {ASSISTANT!r}, or set mask_prompt=False to learn all of it"
        )
    return "".join(texts), tuple(spans)


def is_chat(value: Any) -> bool:
    """True for a list of messages, `{"role": ..., "content": ...}` or ShareGPT's."""
    return (
        isinstance(value, list)
        and bool(value)
        and isinstance(value[0], dict)
        and ("role" in value[0] or {"from", "value"} <= value[0].keys())
    )


def _message(number: int, message: Any) -> Message:
    """Returns a message; raises ValueError if it has no role or content, or what the layout cannot show."""
    if not isinstance(message, dict):
        raise ValueError(
            f"holds {type(message).__name__} as message {number}, not an object with role and content"
        )
    role_key, content_key = ("role", "content")
    if message.get("role") is None and message.get("from") is not None:
        role_key, content_key = ("from", "value")
    # Dropping a call or a thought silently would train on an answer without the step that led to it.
    if unreadable := [key for key in _UNREADABLE if message.get(key)]:
        raise ValueError(
            f"holds {unreadable[0]!r} in message {number}, which the layout of chats has no place for. Write "
            "it into the message's content"
        )
    role, content = (_text_at(message, number, key) for key in (role_key, content_key))
    if role_key == "from":
        if role not in _ROLE_OF:
            raise ValueError(
                f"holds {reprlib.repr(role)} as 'from' of message {number}; known are {', '.join(_ROLE_OF)}"
            )
        role = _ROLE_OF[role]
    return Message(role, content, _stated(number, message, role))


def _stated(number: int, message: dict[str, Any], role: str) -> bool | None:
    """Returns what `weight` and `train` of a message say; raises ValueError for other values."""
    weight, train = message.get("weight"), message.get("train")
    if weight is not None and (role != ASSISTANT or isinstance(weight, bool) or weight not in (0, 1)):
        raise ValueError(
            f"holds weight={reprlib.repr(weight)} in message {number} of role {reprlib.repr(role)}; a weight "
            f"is 0 or 1, and of messages of role {ASSISTANT!r}. Write train=true or false instead"
        )
    if train is not None and not isinstance(train, bool):
        raise ValueError(f"holds train={reprlib.repr(train)} in message {number}; it is true or false")
    stated = [value for value in (weight and bool(weight), train) if value is not None]
    return all(stated) if stated else None


def _text_at(message: dict[str, Any], number: int, key: str) -> str:
    value = message.get(key)
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        kinds = [part.get("type", "text") for part in value]
        texts = [part.get("text") for part in value]
        if set(kinds) == {"text"} and all(isinstance(text, str) for text in texts):
            value = "".join(map(str, texts))
    if isinstance(value, str):
        value.encode("utf-8")  # an escape in JSON may spell half a surrogate pair
        return value
    if isinstance(value, list):
        raise ValueError(
            f"holds a list as {key!r} of message {number}. Only text and parts of type text can be read of a "
            "message, no images: write its text there"
        )
    keys = ", ".join(map(reprlib.repr, itertools.islice(message, _MOST_ROLES))) or "none"
    kind = "no" if value is None else f"{type(value).__name__} as"
    raise ValueError(
        f"holds {kind} {key!r} in message {number}; its keys: {keys}. Role and content must be text"
    )
