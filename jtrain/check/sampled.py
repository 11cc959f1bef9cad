"""Learned = sampled: each target against what a model that is given the prompt would have to say.

A scripted model says what the record says: it is given the generation prompt and goes on through the stop
token. Its texts come from the template and the raw messages alone; the learned texts come from the tokens and
targets of a batch. Nothing between the two (spans, offsets, masks, packing, collation) is taken for granted.
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, override

import numpy as np

from jtrain.check.lines import Differs
from jtrain.check.records import Piece, Sample
from jtrain.data import TextDataset
from jtrain.data.chat.messages import ASSISTANT, is_chat, read_messages, read_tools
from jtrain.data.sources.corpus import Corpus
from jtrain.data.sources.formats.masked_text import MaskedText, MaskFields
from jtrain.data.tokenizer_files import folder_of
from jtrain.layout.constants import IGNORE

END = "\N{SYMBOL FOR END OF TEXT}"
"""Stands for the token that ends a document."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """Prompt of a model, and the texts that it may say to it: one, or another for each stop token."""

    prompt: str
    says: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _WithValues(MaskFields):
    """Mask whose texts keep what they were made of."""

    @override
    def join(self, text: Any, value: Any) -> MaskedText:
        joined = super().join(text, value)
        # Texts of training need no values, so the class does not declare them.
        joined.made_of = (text, value)  # pyright: ignore[reportAttributeAccessIssue]
        return joined


class Script:
    """Scripted model of one source: its records, and its tokens as text."""

    def __init__(self, dataset: TextDataset, source: int) -> None:
        stream = dataset.streams[source]
        self.setup, self.tokenizer = stream.setup, stream.tokenizer
        mask = self.setup.mask()
        assert mask is not None
        fields = {field.name: getattr(mask, field.name) for field in dataclasses.fields(mask)}
        self.mask = _WithValues(**fields)
        self._corpus = Corpus(
            self.setup.source,
            name=self.setup.name,
            cache_dir=Path(self.setup.cache_dir),
            decoded_cache_bytes=0,
            mask=self.mask,
        )

    @functools.cached_property
    def _rust(self) -> Any:
        from tokenizers import Tokenizer  # lazy: bytes need none

        path = Path(self.setup.tokenizer).expanduser()
        folder = folder_of(self.setup.tokenizer)
        return Tokenizer.from_file(
            str(path if path.is_file() or folder is None else folder / "tokenizer.json")
        )

    def read(self, ids: np.ndarray) -> str:
        """Text of tokens, special ones as they are spelled, the end of a document as END."""
        parts: list[str] = []
        for is_end, run in itertools.groupby(ids.tolist(), key=lambda i: i == self.tokenizer.end_id):
            run = list(run)
            parts.append(END * len(run) if is_end else self._decode(run))
        return "".join(parts)

    def _decode(self, ids: list[int]) -> str:
        if self.setup.tokenizer == "bytes":
            return bytes(ids).decode("utf-8", errors="replace")
        return self._rust.decode(ids, skip_special_tokens=False)

    def same(self, text: str) -> str:
        """A text as its tokens spell it: tokenizers may normalise, and a stop token may end the document."""
        if self.setup.tokenizer == "bytes":
            return text.replace("\0", END)
        document, end, _ = text.partition(END)
        return self.read(np.asarray(self._rust.encode(document, add_special_tokens=False).ids)) + end

    def turns(self, record: int, side: int | None = None) -> list[Turn]:
        """Turns of a record that are learned, in order; of one text of a pair."""
        [text] = self._corpus.read(np.asarray([record], np.int64))
        made_of = getattr(text, "made_of", None)
        assert made_of is not None, "a record in a batch can be read"
        text, value = made_of
        if side is None:
            return list(self._turns(text, value))
        value, rejected = value
        if not self.mask.is_chat:
            return list(self._turns(rejected if side else text, value))
        chat = rejected if side else value[0]
        # The last message is the answer; all before it is the prompt of both.
        return list(self._of_chat(chat, value[1], first=len(read_messages(chat)) - 1))

    def _turns(self, text: Any, value: Any) -> Iterator[Turn]:
        if self.mask.is_chat:
            yield from self._of_chat(value[0], value[1], first=0)
        elif self.mask.is_prompt and is_chat(value):
            yield from self._of_chat([*value, *text], None, first=len(value))
        elif self.mask.is_prompt:
            yield Turn(value, (text + END,))
        else:
            for start, end in json.loads(value) if isinstance(value, str) else value:
                yield Turn(text[:start], (text[start:end] + END * (end == len(text)),))

    def _of_chat(self, chat: Any, tools: Any, *, first: int) -> Iterator[Turn]:
        rule = self.mask.rule
        template, messages, schemas = rule.template, read_messages(chat), read_tools(tools)
        text, _ = template.render(messages, schemas)
        answers = [
            number
            for number, message in enumerate(messages)
            if message.learned or (message.learned is None and message.role == ASSISTANT and number >= first)
        ]
        stated = [n for n, message in enumerate(messages) if message.learned is not None or n in answers]
        if rule.train_on == "last":
            answers = [number for number in answers if number == stated[-1]]
        for number in answers:
            prompt, _ = template.render(messages[:number], schemas, prompts=messages[number].role)
            history, _ = template.render(messages[: number + 1], schemas)
            answer = history.removeprefix(prompt)
            if stops := [(at, -len(stop)) for stop in template.stops if (at := answer.find(stop)) >= 0]:
                at, length = min(stops)
                yield Turn(prompt, (answer[: at - length],))
            elif template.is_built_in or number + 1 < len(messages):
                remainder = text.removeprefix(history)
                next_stops = [stop for stop in template.stops if remainder.startswith(stop)]
                ending = END * (number + 1 == len(messages))
                yield Turn(prompt, tuple(answer + stop for stop in next_stops) or (answer + ending,))
            else:
                yield Turn(prompt, (answer + END,))


def learned_is_sampled(dataset: TextDataset, samples: list[Sample]) -> str:
    """Proves that the targets of batches are what is sampled, and nothing else.

    Raises:
      Differs: names the record, what is learned, and what a model says.
    """
    scripts: dict[int, Script] = {}
    num_records = num_learned = num_tokens = 0
    without_texts: set[str] = set()
    for sample in samples:
        for piece in sample.pieces:
            stream = dataset.streams[piece.source]
            ids, target = (piece.of(sample.arrays[name]) for name in ("token_BL", "target_BL"))
            # A target is the next token: a token is learned if the one before it has a target.
            is_learned = np.concatenate([[False], target[:-1] != IGNORE])
            _check_ids(piece, ids, target)
            num_learned, num_tokens = num_learned + int(is_learned.sum()), num_tokens + len(ids)
            num_records += 1
            if stream.corpus is None and stream.has_samples:
                without_texts.add(stream.setup.name)
            elif stream.setup.source.mask is None or not stream.setup.source.mask.mask_prompt:
                if not is_learned[1:].all():
                    column = int(np.flatnonzero(~is_learned[1:])[0]) + 1
                    raise Differs(f"token {column} of {piece.name} is not learned, and all of its text is")
            else:
                if piece.source not in scripts:
                    scripts[piece.source] = Script(dataset, piece.source)
                _check_piece(scripts[piece.source], piece, ids, is_learned)
    text = f"{num_records} records, {num_learned:,} of {num_tokens:,} tokens learned"
    if without_texts:
        text += f"; prepared, and so without texts to compare with: {', '.join(sorted(without_texts))}"
    return text


def _check_ids(piece: Piece, ids: np.ndarray, target: np.ndarray) -> None:
    """Raises Differs for a target that is not the next token, or behind the last one."""
    expected = np.append(ids[1:], IGNORE)
    if (wrong := np.flatnonzero((target != IGNORE) & (target != expected))).size:
        column = piece.start + int(wrong[0])
        raise Differs(f"the target at row {piece.row}, column {column} is not the next token of {piece.name}")


def _check_piece(script: Script, piece: Piece, ids: np.ndarray, is_learned: np.ndarray) -> None:
    """Raises Differs unless the learned runs of a piece are turns of its record, and none is left out."""
    turns = script.turns(piece.record, piece.side)
    texts = [
        tuple(dict.fromkeys(t for said in turn.says for t in (script.same(said), said))) for turn in turns
    ]
    # Begin and end of each run of learned tokens.
    edges = np.flatnonzero(np.diff(np.concatenate([[0], is_learned, [0]]))).reshape(-1, 2).tolist()
    matched = 0
    for start, end in edges:
        read, run = script.read(ids[:start]), script.read(ids[start:end])
        # A run that ends with the piece may go on in another one.
        is_cut = end == len(ids)
        match = next(
            (
                number
                # In order: a run is of a turn behind the last one that was found.
                for number in range(matched, len(turns))
                if (run in texts[number] or (is_cut and any(t.startswith(run) for t in texts[number])))
                and _follows(read, turns[number].prompt, script.same)
            ),
            None,
        )
        if match is None:
            expected = texts[matched][0] if matched < len(turns) else "nothing more"
            raise Differs(
                f"{piece.name} (row {piece.row}): {_excerpt(run)} is learned after {_excerpt(read[-30:])}, "
                f"and a model says {_excerpt(expected)}"
            )
        matched = match + 1
    if len(edges) == len(turns):
        return
    # Turns without a run are in another piece of the record, or were left out of it.
    text = script.read(ids)
    for turn, said in zip(turns, texts, strict=True):
        tail = script.same(turn.prompt)[-30:]
        missing = sum(text.count(tail + option) for option in said[:1])
        learned = sum(script.read(ids[start:end]) in said for start, end in edges)
        if missing > learned:
            raise Differs(f"{piece.name} (row {piece.row}): {_excerpt(said[0])} is sampled and not learned")


def _follows(read: str, prompt: str, same: Callable[[str], str]) -> bool:
    """True if a text ends with the prompt, or is the end of it where a record is cut between turns."""
    return any(read.endswith(p[-200:]) or p.endswith(read) for p in (prompt, same(prompt)))


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:28]} ... {text[-28:]}")


def targets_are_never_zero(samples: list[Sample], *, rows: int) -> str:
    """Proves that no batch is without a target.

    Args:
      samples: consecutive rows of the run, in batches of any size.
      rows: rows of one batch of the run.

    Raises:
      Differs: names the first record of a batch without targets.
    """
    counts = [(target_L != IGNORE).sum() for s in samples for target_L in s.arrays["target_BL"]]
    size = samples[0].arrays["target_BL"].shape[0]
    # Whole batches, or the part of one that there is.
    for first in range(0, max(len(counts) - rows + 1, 1), rows):
        batch = counts[first : first + rows]
        # A part of a batch says nothing unless it has a target.
        if len(batch) == rows and not sum(batch):
            piece = next((p for p in samples[first // size].pieces), None)
            raise Differs(
                f"batch {first // rows} has no target in {rows} rows; first record: "
                f"{piece.name if piece else 'none'}"
            )
    if not sum(counts):
        raise Differs(f"the first {len(counts)} rows have no target at all")
    empty = sum(count == 0 for count in counts)
    fewest = min(sum(counts[i : i + rows]) for i in range(0, max(len(counts) - rows + 1, 1), rows))
    return (
        f"{len(counts)} rows, {empty} of them without targets; a batch of {rows} rows has {fewest:,} or more"
    )
