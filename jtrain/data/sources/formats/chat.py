"""Chats: lists of messages with role and content, as one text whose assistant messages are learned."""

import itertools
import reprlib
from typing import Any

ASSISTANT = "assistant"
"""Role whose messages are learned."""

LAYOUT_BYTES = 6
"""Bytes that `layout` adds to role and content of a message. JSON adds more, so a line is no shorter than its
text."""

_MOST_ROLES = 50
"""Roles or keys that a message lists."""

_CALLS = ("tool_calls", "function_call")
"""Keys whose values are part of what the assistant said, and that the layout cannot show."""


def layout(messages: list[tuple[str, str]]) -> list[tuple[str, bool]]:
    """Returns the parts of the text of a chat, each with True if it is learned. A chat template belongs here.

    A message is `<|role|>`, a line end, its content and a line end. The line end after an assistant's content
    is learned with it, since that is where a model has to stop.
    """
    parts = []
    for role, content in messages:
        parts += [(f"<|{role}|>\n", False), (f"{content}\n", role == ASSISTANT)]
    return parts


def render(value: Any, *, mask_prompt: bool) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Returns the text of a chat, and the spans of it that are learned.

    Args:
      value: list of `{"role": ..., "content": ...}`; other keys of a message are left out.
      mask_prompt: True to learn what assistants say, False to learn all of it, cut into the same tokens.

    Raises:
      ValueError: the value is no such list; the message goes on after the field's name.
    """
    if not isinstance(value, list):
        raise ValueError(f"is {type(value).__name__}, not a list of messages")
    # Not an empty document: nothing but a mistake writes a chat without messages.
    if not value:
        raise ValueError("is a list without messages")
    spans: list[tuple[int, int]] = []
    texts: list[str] = []
    end = 0
    parts = layout([_message(number, message) for number, message in enumerate(value)])
    # Adjacent parts of one kind are joined, so that the text is tokenised in fewer pieces.
    for is_learned, group in itertools.groupby(parts, key=lambda part: part[1]):
        texts.append("".join(text for text, _ in group))
        start, end = end, end + len(texts[-1])
        spans += [(start, end)] if is_learned or not mask_prompt else []
    # A document without a learned token would take room in rows and change nothing.
    if not spans:
        roles = ", ".join(sorted({reprlib.repr(message["role"]) for message in value})[:_MOST_ROLES])
        raise ValueError(
            f"holds no message of role {ASSISTANT!r}, so nothing of it is learned; its roles: {roles}. Call "
            f"the role {ASSISTANT!r}, or set mask_prompt=False to learn all of it"
        )
    return "".join(texts), tuple(spans)


def _message(number: int, message: Any) -> tuple[str, str]:
    """Returns role and content of a message; raises ValueError if it has none."""
    if not isinstance(message, dict):
        raise ValueError(
            f"holds {type(message).__name__} as message {number}, not an object with role and content"
        )
    for key in ("role", "content"):
        content = message.get(key)
        if isinstance(content, str):
            content.encode("utf-8")  # an escape in JSON may spell half a surrogate pair
            continue
        if isinstance(content, list):
            raise ValueError(
                f"holds a list as {key!r} of message {number}. Only text can be read of a message, no images "
                "and no parts: write its text there"
            )
        keys = ", ".join(map(reprlib.repr, itertools.islice(message, _MOST_ROLES))) or "none"
        kind = "no" if content is None else f"{type(content).__name__} as"
        raise ValueError(
            f"holds {kind} {key!r} in message {number}; its keys: {keys}. Role and content must be text"
        )
    # Dropping a call silently would train on an answer without the step that led to it.
    if calls := [key for key in _CALLS if message.get(key)]:
        raise ValueError(
            f"holds {calls[0]!r} in message {number}, which is no text. Write it into the message's content"
        )
    return message["role"], message["content"]
