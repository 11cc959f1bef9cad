"""Messages of chats as records hold them: role, content, reasoning and tool calls, in the forms in the wild."""

import dataclasses
import itertools
import json
import reprlib
from typing import Any

UNIT = 1_000_000
"""Weight 1 of a token in the loss: weights are whole numbers of millionths, as arrays of integers hold them.
"""

MOST_WEIGHT = 1000
"""Largest weight of a message, which 32 bits hold in millionths."""

ASSISTANT = "assistant"
"""Role whose messages are learned."""

LAYOUT_BYTES = 6
"""Bytes that the built-in template adds to role and content of a message. JSON adds more, so a line is no
shorter than its text."""

_MOST_ROLES = 50
"""Roles or keys that a message lists."""

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message's reasoning; templates read the first one, and gpt-oss the second."""

_UNREADABLE = ("function_call", "images", "audio")
"""Keys of a message whose values the model would say or see, and that no template of text has a place for."""

_PASSED_ON = ("name", "tool_call_id")
"""Other keys of a message that templates read."""

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


@dataclasses.dataclass(frozen=True)
class ChatMessage:
    """Message of a chat.

    content: its text; empty if there is none beside reasoning or calls.
    reasoning: text that the model thinks before it says the content.
    tool_calls: calls as `{"type": "function", "function": {"name": ..., "arguments": {...}}}`.
    others: further keys that templates read, such as the name of a tool.
    learned: value of its `weight` or `train`; None if there is neither.
    weight: weight in the loss, in millionths; `UNIT` if it has none.
    """

    role: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()
    others: tuple[tuple[str, Any], ...] = ()
    learned: bool | None = None
    weight: int = UNIT


def read_messages(value: Any) -> list[ChatMessage]:
    """Returns the messages of a chat.

    Args:
      value: list of `{"role": ..., "content": ...}`, or of ShareGPT's `{"from": ..., "value": ...}`. A
        content is text or a list of parts `{"type": "text", "text": ...}`; an assistant's message may have
        `reasoning_content` and `tool_calls` beside it. `weight` (of an assistant's message) and `train`
        (true or false) say if the message is learned, and how much it weighs.

    Raises:
      ValueError: the value is no such list; the message goes on after the field's name.
    """
    if not isinstance(value, list):
        raise ValueError(f"is {type(value).__name__}, not a list of messages")
    # Not an empty document: nothing but a mistake writes a chat without messages.
    if not value:
        raise ValueError("is a list without messages")
    return [_message(number, message) for number, message in enumerate(value)]


def read_tools(value: Any) -> list[Any] | None:
    """Returns the tools of a chat: a list of JSON schemas of functions, or its JSON text; None if empty."""
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"has tools that are no JSON: {error}") from error
    if value is None or value == "" or value == []:
        return None
    if not isinstance(value, list):
        raise ValueError(f"has {type(value).__name__} as tools, not a list of schemas of functions")
    return [json.loads(tool) if isinstance(tool, str) else tool for tool in value]


def roles_of(messages: list[ChatMessage]) -> str:
    """Returns the roles of a chat, quoted, for a message."""
    return ", ".join(sorted({reprlib.repr(message.role) for message in messages})[:_MOST_ROLES])


def is_chat(value: Any) -> bool:
    """True for a list of messages, `{"role": ..., "content": ...}` or ShareGPT's."""
    return (
        isinstance(value, list)
        and bool(value)
        and isinstance(value[0], dict)
        and ("role" in value[0] or {"from", "value"} <= value[0].keys())
    )


def _message(number: int, message: Any) -> ChatMessage:
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
            f"holds {unreadable[0]!r} in message {number}, which chats of text have no place for. Write it "
            "into the message's content, or calls as 'tool_calls'"
        )
    role = _text_at(message, number, role_key)
    reasoning = next((message[key] for key in REASONING_KEYS if message.get(key)), "")
    if not isinstance(reasoning, str):
        raise ValueError(f"holds {type(reasoning).__name__} as reasoning of message {number}, not text")
    calls = _calls_of(number, message)
    # A message that only calls tools has no content in the form of OpenAI.
    has_content = message.get(content_key) is not None or not (calls or reasoning)
    content = _text_at(message, number, content_key) if has_content else ""
    if role_key == "from":
        if role not in _ROLE_OF:
            raise ValueError(
                f"holds {reprlib.repr(role)} as 'from' of message {number}; known are {', '.join(_ROLE_OF)}"
            )
        role = _ROLE_OF[role]
    passed_keys = tuple((key, message[key]) for key in _PASSED_ON if message.get(key) is not None)
    learned, weight = _stated(number, message, role)
    return ChatMessage(role, content, reasoning, calls, passed_keys, learned, weight)


def _calls_of(number: int, message: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Returns the tool calls of a message in one form; raises ValueError for what is no call."""
    calls = message.get("tool_calls") or []
    if isinstance(calls, str):
        try:
            calls = json.loads(calls)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"holds 'tool_calls' in message {number} that are no JSON: {error}") from error
    if not isinstance(calls, list):
        raise ValueError(f"holds {type(calls).__name__} as 'tool_calls' of message {number}, not a list")
    read = []
    for call in calls:
        function = (call.get("function") or call) if isinstance(call, dict) else {}
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"holds {reprlib.repr(call)} in 'tool_calls' of message {number}, which names no function: "
                '{"type": "function", "function": {"name": ..., "arguments": ...}}'
            )
        arguments = function.get("arguments")
        # OpenAI's form has them as JSON text, most templates write a mapping.
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments else {}
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"holds arguments of {function['name']!r} in message {number} that are no JSON: {error}"
                ) from error
        function = {**function, "arguments": {} if arguments is None else arguments}
        id_of_call = {"id": call["id"]} if call.get("id") is not None else {}
        read.append({**id_of_call, "type": "function", "function": function})
    return tuple(read)


def check_weights(messages: list[ChatMessage]) -> None:
    """Raises ValueError for a weight between 0 and 1, or above 1, which a source without `message_weights`
    would not honour.
    """
    for number, message in enumerate(messages):
        if message.weight not in (0, UNIT):
            raise ValueError(
                f"holds weight={message.weight / UNIT:g} in message {number} of role {message.role!r}; a "
                "weight is 0 or 1 unless the source says message_weights=True. Set it, or write train=true "
                "or false instead"
            )


def _stated(number: int, message: dict[str, Any], role: str) -> tuple[bool | None, int]:
    """Returns what `weight` and `train` of a message say, and its weight in millionths; raises ValueError for
    other values.
    """
    weight, train = message.get("weight"), message.get("train")
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if weight is not None and (role != ASSISTANT or not is_number or not 0 <= weight <= MOST_WEIGHT):
        raise ValueError(
            f"holds weight={reprlib.repr(weight)} in message {number} of role {reprlib.repr(role)}; a "
            f"weight is a number from 0 to {MOST_WEIGHT}, and of messages of role {ASSISTANT!r}. Write "
            "train=true or false instead"
        )
    millionths = UNIT if weight is None else round(weight * UNIT)
    if weight and not millionths:
        raise ValueError(
            f"holds weight={weight!r} in message {number}, which is less than a millionth. Write 0 to leave "
            "the message out"
        )
    if train is not None and not isinstance(train, bool):
        raise ValueError(f"holds train={reprlib.repr(train)} in message {number}; it is true or false")
    stated = [value for value in (weight and bool(weight), train) if value is not None]
    return (all(stated) if stated else None), millionths


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
