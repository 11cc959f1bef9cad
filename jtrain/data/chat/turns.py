"""Turns of a chat in its text: what a model would sample, from the generation prompt to the stop token.

Of a chat with messages m0 ... mn, turn i is found by three texts of the template: the prompt (m0 ... mi-1
with the generation prompt), the turn when it was sampled (m0 ... mi), and the whole chat. What is sampled is
the second text behind the first one, through the first stop token. It is learned where the whole chat begins
with the same characters; otherwise the template rewrites the turn once it is history, and the model would be
trained on what it never says.
"""

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jtrain.data.chat.messages import (
    ASSISTANT,
    UNIT,
    ChatMessage,
    check_weights,
    read_messages,
    read_tools,
    roles_of,
)
from jtrain.data.chat.template import ChatRule, ChatTemplate

_THINK = re.compile(r"</?think(?:ing)?>")
"""Marks of reasoning within a content, which templates move or write otherwise."""

_EXCERPT = 40

_IN_QUOTES = str.maketrans({"\\": r"\\", "'": r"\'", "\n": r"\n", "\r": r"\r"})
"""Spelling of characters in single quotes."""


@dataclasses.dataclass(frozen=True)
class RenderedChat:
    """Text of a chat, or of one turn of it with all that precedes the turn.

    learned: spans of the text that are learned, in characters.
    ends: True if the last turn has no stop token in the text, so that the end of the document is one.
    blocks: spans of the template's own blocks `{% generation %}`.
    weights: weight of each learned span, in millionths.
    """

    text: str
    learned: tuple[tuple[int, int], ...]
    ends: bool
    blocks: tuple[tuple[int, int], ...] = ()
    weights: tuple[int, ...] = ()


class _Turn(NamedTuple):
    """Turn of a chat as it was sampled.

    start, end: first character that is sampled, and the one behind its stop token.
    ends: True if it stops with the end of the document.
    rewritten: text through the stop token, if the whole chat begins with another one; otherwise empty.
    """

    number: int
    start: int
    end: int
    ends: bool
    rewritten: str = ""


def render_chat(
    value: Any, rule: ChatRule, *, mask_prompt: bool, num_prompt: int = 0, tools: Any = None
) -> list[RenderedChat]:
    """Returns the text of a chat and what of it is learned: one text, or one a turn if the chat is split.

    Args:
      value: list of messages; see `read_messages`.
      mask_prompt: True to learn what assistants say, False to learn all of it, cut into the same tokens.
      num_prompt: first messages that are not learned, whoever says them, as they are a prompt.
      tools: list of the tools' schemas, or its JSON text.

    Raises:
      ValueError: the value is no chat, or a turn of it is not what a model would sample; the message goes on
        after the field's name.
    """
    messages, schemas = read_messages(value), read_tools(tools)
    template = rule.template
    if not rule.message_weights:
        check_weights(messages)
    borders, learned = _choose_turns(messages, rule, mask_prompt=mask_prompt, num_prompt=num_prompt)
    _check_messages(messages, template)
    if template.is_built_in:
        text, turns = _turns_of_built_in(template, messages, borders)
        blocks = ()
    else:
        text, blocks = template.render(messages, schemas)
        turns = _sampled_turns(template, messages, schemas, borders, text)
    text.encode("utf-8")  # an escape in JSON may spell half a surrogate pair
    spans, weights, end, checked, ends = list[tuple[int, int]](), list[int](), 0, 0, True
    for turn in turns:
        _check_contents(template, messages, schemas, turn, text, first=checked)
        if turn.rewritten:
            if rule.on_rewritten_turn == "split":
                return _split(template, messages, schemas, [n for n in borders if n in learned], text)
            sampled_excerpt, history_excerpt = _difference(turn.rewritten, text)
            raise ValueError(
                f"holds a turn, message {turn.number}, that {template.origin} writes otherwise once it is "
                f"history: {sampled_excerpt!r} when it is sampled, {history_excerpt!r} later. Set "
                "on_rewritten_turn='split' for one record a turn, or train_on='last'"
            )
        if not mask_prompt and end < turn.start:
            spans.append((end, turn.start))
            weights.append(UNIT)
        end, checked, ends = turn.end, turn.number + 1, turn.ends
        if turn.number in learned:
            spans.append((turn.start, end))
            weights.append(messages[turn.number].weight)
    if not mask_prompt and end < len(text):
        spans.append((end, len(text)))
        weights.append(UNIT)
    return [RenderedChat(text, tuple(spans), ends, blocks, tuple(weights))]


_PROBE = [
    {"role": role, "content": content}
    for role, content in (("user", "one"), (ASSISTANT, "two"), ("user", "three"), (ASSISTANT, "four"))
]


def compare_blocks(rule: ChatRule) -> str:
    """Returns where the template's own blocks `{% generation %}` differ from what a model samples of a plain
    chat; empty if they do not, if there are none, or if the template takes no plain chat.
    """
    if rule.template.is_built_in:
        return ""
    try:
        [chat, *_] = render_chat(_PROBE, dataclasses.replace(rule, train_on="all"), mask_prompt=True)
    except ValueError:
        return ""
    if not chat.blocks or chat.blocks == chat.learned:
        return ""
    unlearned = [chat.text[start:end] for start, end in _outside(chat.blocks, chat.learned)]
    missing = [chat.text[start:end] for start, end in _outside(chat.learned, chat.blocks)]
    differences = [f"they mark {unlearned[0]!r}, which no model samples"] if unlearned else []
    differences += [f"they leave out {missing[0]!r}"] if missing else []
    return (
        f"{rule.template.origin}: its blocks {{% generation %}} are not what a model samples: "
        f"{' and '.join(differences)}. What is sampled is learned, not the blocks"
    )


def _outside(
    spans: tuple[tuple[int, int], ...], others: tuple[tuple[int, int], ...]
) -> Iterator[tuple[int, int]]:
    """Yields the parts of spans that lie in none of the others; both ascend."""
    for start, end in spans:
        for low, high in others:
            if low < end and start < high:
                if start < low:
                    yield start, low
                start = max(start, high)
        if start < end:
            yield start, end


def _choose_turns(
    messages: list[ChatMessage], rule: ChatRule, *, mask_prompt: bool, num_prompt: int
) -> tuple[list[int], set[int]]:
    """Returns the messages at whose borders the text is cut, and those of them that are learned."""
    answers = [
        number
        for number, message in enumerate(messages)
        if message.learned is not None or (message.role == ASSISTANT and number >= num_prompt)
    ]
    learned = {number for number in answers if messages[number].learned is not False}
    if rule.train_on == "last":
        learned = {number for number in learned if number == answers[-1]}
    # A document without a learned token would take room in rows and change nothing.
    if not learned and any(message.learned is False for message in messages):
        raise ValueError("holds no message that is learned, by their weight and train. Leave it out")
    if not learned and mask_prompt:
        raise ValueError(
            f"holds no message of role {ASSISTANT!r}, so nothing of it is learned; its roles: "
            f"{roles_of(messages)}. Call the role {ASSISTANT!r}, or set mask_prompt=False to learn all of it"
        )
    if not rule.template.is_built_in:
        for number in learned:
            if messages[number].role != ASSISTANT:
                raise ValueError(
                    f"holds train=true in message {number} of role {messages[number].role!r}, which no model "
                    f"samples. Remove it, or set chat_template='roles'"
                )
    # The built-in template is tokenised from border to border of every answer, learned or not.
    keeps_all = rule.template.is_built_in or not mask_prompt
    return (answers if keeps_all else sorted(learned)), learned


def _check_messages(messages: list[ChatMessage], template: ChatTemplate) -> None:
    """Raises ValueError for a message out of order, or one that spells a special token."""
    if template.is_built_in:
        return
    for number, message in enumerate(messages):
        previous = messages[number - 1] if number else None
        # A result of a tool follows a call or another result.
        if message.role == "tool" and not (previous and (previous.role == "tool" or previous.tool_calls)):
            raise ValueError(
                f"holds message {number} of role 'tool' after {previous.role if previous else 'nothing'!r}: "
                "a role out of order, as it answers no call. Add the message with its tool_calls, or remove "
                "it"
            )
        for key, text in _strings_of(message):
            for special in template.specials:
                if special in text:
                    raise ValueError(
                        f"spells {special!r} in {key!r} of message {number}, a special token of the "
                        "tokenizer, which would begin or end a turn there. Remove it, or write reasoning "
                        "into 'reasoning_content'"
                    )


def _turns_of_built_in(
    template: ChatTemplate, messages: list[ChatMessage], borders: list[int]
) -> tuple[str, list[_Turn]]:
    """Returns the text and the turns of a chat of which each message is written by itself.

    A chat of thousands of messages takes its own time, not that of every beginning of it.
    """
    text, _ = template.render(messages)
    marks = [_marks_of(template, message.role) for message in messages]
    sizes = (sum(mark) + len(message.content) for mark, message in zip(marks, messages, strict=True))
    edges = [0, *itertools.accumulate(sizes)]
    assert edges[-1] == len(text), "the built-in template writes nothing else"
    return text, [_Turn(n, edges[n] + marks[n][0], edges[n + 1], ends=True) for n in borders]


@functools.lru_cache(maxsize=256)
def _marks_of(template: ChatTemplate, role: str) -> tuple[int, int]:
    """Returns the characters that the built-in template writes before and behind a content of a role."""
    prefix_length = len(template.render([], prompts=role)[0])
    return prefix_length, len(template.render([ChatMessage(role, "")])[0]) - prefix_length


def _sampled_turns(
    template: ChatTemplate,
    messages: list[ChatMessage],
    tools: list[Any] | None,
    borders: list[int],
    text: str,
) -> Iterator[_Turn]:
    """Yields turns as a model samples them; raises ValueError for one that no model could sample."""
    for number in borders:
        start, sampled, ends = _sample(template, messages, tools, number, text)
        is_rewritten = not text.startswith(sampled)
        yield _Turn(number, start, len(sampled), ends, sampled if is_rewritten else "")


def _split(
    template: ChatTemplate,
    messages: list[ChatMessage],
    tools: list[Any] | None,
    learned: list[int],
    text: str,
) -> list[RenderedChat]:
    """Returns each learned turn of a chat with the text that the model had read by then."""
    chats = []
    for number in learned:
        start, sampled, ends = _sample(template, messages, tools, number, text)
        turn = _Turn(number, start, len(sampled), ends, sampled)
        _check_contents(template, messages, tools, turn, text, first=number)
        weights = (messages[number].weight,)
        chats.append(RenderedChat(sampled, ((start, len(sampled)),), ends, weights=weights))
    return chats


def _sample(
    template: ChatTemplate, messages: list[ChatMessage], tools: list[Any] | None, number: int, text: str
) -> tuple[int, str, bool]:
    """Returns where a turn begins that is sampled, the text through its stop token, and True if it stops with
    the end of the document.
    """
    prompt, _ = template.render(messages[:number], tools, prompts=messages[number].role)
    history = text
    if number + 1 < len(messages):
        history, _ = template.render(messages[: number + 1], tools)
    if not history.startswith(prompt):
        written, expected = _difference(history, prompt)
        raise ValueError(
            f"holds a turn, message {number}, that cannot be sampled: {template.origin} writes {written!r} "
            f"where its generation prompt has {expected!r}. Set template_options (enable_thinking, say) so "
            "that both agree, or another chat_template"
        )
    start = len(prompt)
    # The stop token that comes first; of two that begin alike, the longer one.
    stops = [
        (position, -len(stop)) for stop in template.stops if (position := history.find(stop, start)) >= 0
    ]
    if stops:
        first, length = min(stops)
        return start, history[: first - length], False
    # Where the history reads otherwise it does not show how the turn stops, and the turn stands alone.
    if number + 1 == len(messages) or not text.startswith(history):
        return start, history, True
    # A stop token may belong to the next message, as `<|user|>` in GLM.
    next_stop = next((stop for stop in template.stops if text.startswith(stop, len(history))), "")
    if not next_stop:
        stop_texts = ", ".join(map(repr, template.stops)) or "none"
        raise ValueError(
            f"holds a turn, message {number}, that cannot stop: {template.origin} writes no stop token "
            f"after it (known: {stop_texts}), but goes on with {text[len(history) :][:_EXCERPT]!r}. Name "
            "the token in stop_tokens, or add it to the template"
        )
    return start, history + next_stop, False


def _check_contents(
    template: ChatTemplate,
    messages: list[ChatMessage],
    tools: list[Any] | None,
    turn: _Turn,
    text: str,
    *,
    first: int,
) -> None:
    """Raises ValueError if the template leaves out a part of the turn, or of messages from `first` on that it
    answers.
    """
    text = turn.rewritten or text
    turn_text, prompt = text[turn.start : turn.end], text[: turn.start]
    for number, message in enumerate(messages[first : turn.number + 1], start=first):
        # What is left of the reasoning of earlier turns is the template's choice, as it is when sampling.
        is_turn = number == turn.number
        strings = _strings_of(message, with_reasoning=is_turn)
        for key, string in strings:
            if lost := [
                piece for piece in _pieces(string) if not _is_in(piece, turn_text if is_turn else prompt)
            ]:
                raise ValueError(
                    f"holds {key!r} in message {number} of role {message.role!r} that {template.origin} "
                    f"leaves out: {lost[0][:_EXCERPT]!r} is not in its text. Set another chat_template, or "
                    "write it into the content"
                )
    for tool in tools or []:
        name = (tool.get("function") or tool).get("name") if isinstance(tool, dict) else None
        if not isinstance(name, str) or not _is_in(name, prompt):
            raise ValueError(
                f"has tools that {template.origin} leaves out: {str(name)!r} is not in its text. Set another "
                "chat_template, or tools_field='' to leave them out"
            )


def _strings_of(message: ChatMessage, *, with_reasoning: bool = True) -> Iterator[tuple[str, str]]:
    """Yields the texts of a message, each with its key."""
    content = message.content
    if not with_reasoning and message.role == ASSISTANT:
        # Reasoning that is part of the content.
        content = _THINK.split(content)[-1]
    yield "content", content
    if message.reasoning and with_reasoning:
        yield "reasoning_content", message.reasoning
    for call in message.tool_calls:
        yield "tool_calls", call["function"]["name"]
        yield from (("tool_calls", leaf) for leaf in _leaves(call["function"]["arguments"]))


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield str(key)
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, str):
        yield value


def _pieces(string: str) -> list[str]:
    return [piece.strip() for piece in _THINK.split(string) if piece.strip()]


def _is_in(piece: str, text: str) -> bool:
    """True if a text has the piece, as it is, or as JSON or a string of Python spells it."""
    spellings = [piece, *(json.dumps(piece, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True))]
    # LFM2 writes calls as Python's, 'don\\'t'.
    spellings.append(piece.translate(_IN_QUOTES))
    return any(spelling in text for spelling in spellings)


def _difference(text: str, other: str) -> tuple[str, str]:
    """Returns excerpts of two texts from a little before the first place where they differ."""
    common_length = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), None)
    first = max((min(len(text), len(other)) if common_length is None else common_length) - _EXCERPT // 4, 0)
    return text[first:][:_EXCERPT], other[first:][:_EXCERPT]
