"""Masks of chats against a scripted model that samples each turn, token by token, until a stop token."""

from collections import Counter
from pathlib import Path
from typing import Any, Literal

from bench.data_parts.chats import write_tokenizer
from jtrain.data.chat.messages import ASSISTANT, read_messages
from jtrain.data.loss_mask import encode_parts, learned_spans, split_chunk
from jtrain.data.sources.formats.masked_text import MaskedText
from jtrain.data.sources.source import Source
from jtrain.data.tokenizer import make_tokenizer, whole_document

type Conversation = tuple[str, list[dict[str, Any]], list[Any] | None]
"""Kind, messages and tools."""

type SampledTurn = tuple[list[int], list[int]]
"""Ids that a model reads, and those that it says."""


class SampledMasks:
    """Masks of one template.

    Args:
      folder: folder to write the tokenizer to.
      template: Jinja of the template.
      stops: tokens at which its model stops.
    """

    def __init__(
        self,
        folder: Path,
        template: str,
        stops: tuple[str, ...],
        *,
        on_rewritten_turn: Literal["refuse", "split"],
    ) -> None:
        write_tokenizer(folder, template, stops)
        source = Source(
            path="unused",
            messages_field="messages",
            tools_field="tools",
            on_rewritten_turn=on_rewritten_turn,
        )
        mask = source.mask_with(str(folder), None, name="chats")
        assert mask is not None
        self._mask, self._template = mask, mask.rule.template
        self._tokenizer = make_tokenizer(str(folder))
        self._stop_ids = {int(self._ids(stop)[0]) for stop in stops}
        self.reasons: dict[str, str] = {}
        """First reason of a refusal, by kind."""

    def compare(self, conversations: list[Conversation]) -> Counter[tuple[str, str]]:
        """Returns how many conversations of each kind are equal, split and equal, refused, or different."""
        counts: Counter[tuple[str, str]] = Counter()
        for kind, messages, tools in conversations:
            try:
                text = self._mask.join("", (messages, tools))
            except ValueError as error:
                self.reasons.setdefault(kind, str(error))
                counts[kind, "refused"] += 1
                continue
            learned = [turn for record in text.turns or (text,) for turn in self._learned(record)]
            sampled = self._sample(messages, tools)
            is_equal = len(learned) == len(sampled) and all(map(self._is_said, learned, sampled))
            counts[kind, ("split " if text.turns else "") + ("equal" if is_equal else "different")] += 1
        return counts

    def template_blocks(self, conversations: list[Conversation]) -> Counter[str]:
        """Returns how the template's own blocks `{% generation %}` differ from what a model samples: the
        turns that are equal, that go on behind the stop token, and that begin within the generation prompt or
        later.
        """
        counts: Counter[str] = Counter()
        for _, messages, tools in conversations:
            try:
                blocks = self._template.render(read_messages(messages), tools)[1]
                spans = self._mask.join("", (messages, tools)).learned
            except ValueError:
                continue
            if not blocks:
                return counts
            # A block of a turn is the one that overlaps it most.
            for start, end in spans:
                overlapping = [block for block in blocks if block[0] < end and start < block[1]]
                if not overlapping:
                    counts["no block"] += 1
                    continue
                first, last = overlapping[0][0], overlapping[-1][1]
                counts["turns"] += 1
                counts["equal"] += (first, last) == (start, end)
                counts["text behind the stop token"] += last > end
                counts["stop token left out"] += last < end
                counts["part of the generation prompt"] += first < start
                counts["begins late"] += first > start
        return counts

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode_marked([text], [[]])[0][0].tolist()

    def _sample(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> list[SampledTurn]:
        """Returns each turn of the assistant as a model samples it whose script is the template's own text."""
        read, turns = read_messages(messages), []
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            prompt = self._ids(self._template.render(read[:number], tools, prompts=ASSISTANT)[0])
            script = self._ids(self._template.render(read[: number + 1], tools)[0])[len(prompt) :]
            answer = []
            for token in script:
                answer.append(token)
                if token in self._stop_ids:
                    break
            turns.append((prompt, answer))
        return turns

    def _learned(self, text: MaskedText) -> list[SampledTurn]:
        """Returns each run of learned tokens, and the tokens before it."""
        chunk = split_chunk(whole_document(self._tokenizer, text), 0, text)
        (_, ids), ignored = encode_parts(self._tokenizer, [chunk])
        spans = learned_spans(ignored, len(ids))
        return [(ids[:start].tolist(), ids[start:end].tolist()) for start, end in spans if start < end]

    def _is_said(self, learned: SampledTurn, sampled: SampledTurn) -> bool:
        """True if the tokens are those that were sampled, through a stop token."""
        if learned[0] != sampled[0]:
            return False
        # The script of a turn may end before its stop token, which belongs to what follows.
        has_stop = sampled[1][-1:] and sampled[1][-1] in self._stop_ids
        return (
            learned[1] == sampled[1]
            if has_stop
            else (learned[1][:-1] == sampled[1] and learned[1][-1] in self._stop_ids)
        )
