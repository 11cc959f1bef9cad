"""Preference pairs of whole chats: their common prompt."""

import reprlib
from typing import Any

from jtrain.data.chat.messages import ASSISTANT, ChatMessage, read_messages


def num_prompt_of(chosen: Any, rejected: Any, field: str | None) -> int:
    """Returns the number of messages before the answers of two chats: all but the last.

    Args:
      field: name of the field of `rejected`.

    Raises:
      ValueError: a value is no chat that ends with an answer, or the prompts differ; the message goes on
        after the name of the field of `chosen`.
    """
    better = read_messages(chosen)
    try:
        worse = read_messages(rejected)
    except ValueError as error:
        raise ValueError(f"goes with the worse answer in {field!r}, which {error}") from error
    if len(better) != len(worse):
        raise ValueError(
            f"has {len(better)} messages, and {field!r} has {len(worse)}: the chats of a pair differ in "
            "their last message alone. Write the answers into prompt_field, text_field and rejected_field, "
            "or leave it out"
        )
    for number, (message, other) in enumerate(zip(better, worse, strict=True)):
        is_answer = number == len(better) - 1
        if is_answer and (message.role != ASSISTANT or other.role != ASSISTANT):
            raise ValueError(
                f"ends with a message of role {message.role!r}, and {field!r} with one of role "
                f"{other.role!r}: the answers of a pair are the last messages, both of role {ASSISTANT!r}"
            )
        if not is_answer and message != other:
            key, one, two = _difference(message, other)
            raise ValueError(
                f"and {field!r} have different prompts: message {number} has the {key} {reprlib.repr(one)} "
                f"in one and {reprlib.repr(two)} in the other. The chats of a pair differ in their last "
                "message alone"
            )
        if not is_answer and message.learned:
            raise ValueError(
                f"holds weight or train in message {number}, which is of the prompt: of a pair the answers "
                "alone are learned. Remove it"
            )
    return len(better) - 1


def _difference(message: ChatMessage, other: ChatMessage) -> tuple[str, Any, Any]:
    """Returns the first field in which two messages differ, and its values."""
    names = {"role": "role", "content": "content", "reasoning": "reasoning", "tool_calls": "calls"}
    for name, word in {**names, "others": "keys", "learned": "weight"}.items():
        if (one := getattr(message, name)) != (two := getattr(other, name)):
            return word, one, two
    raise AssertionError("the messages are equal")
