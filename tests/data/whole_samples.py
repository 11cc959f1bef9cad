"""Corpora of samples whose turns tell which prompt each learned token needs, in every form, and their count."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.data import PackedText, Source
from jtrain.layout.constants import IGNORE
from jtrain.layout.dims import Batch
from tests.data.masked_sources import write_records

Turn = tuple[str, str]
"""A prompt and its answer, which both begin with the number of the turn."""

SEQ_LEN = 128


def turns_of(numbers: range, rng: np.random.Generator, most: int) -> list[Turn]:
    """Turns whose number tells them apart from all others."""
    pads = rng.integers(0, most, (len(numbers), 2)).tolist()
    return [(f"q{n}{'q' * a};", f"A{n}{'A' * b}.") for n, (a, b) in zip(numbers, pads, strict=True)]


def samples(count: int, most_turns: int, most: int = 40) -> list[list[Turn]]:
    rng, end, made = np.random.default_rng(0), 0, []
    for num in rng.integers(1, most_turns + 1, count).tolist():
        made.append(turns_of(range(end, end := end + num), rng, most))
    return made


FORMS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "messages": ({"messages_field": "messages"}, (12, 40)),
    "sharegpt": ({"messages_field": "conversations"}, (12, 40)),
    "prompt": ({"prompt_field": "prompt", "text_field": "completion"}, (1, 40)),
    "pair": ({"prompt_field": "prompt", "text_field": "completion"}, (2, 12)),
    "alpaca": ({"prompt_field": "instruction+input", "text_field": "output"}, (1, 40)),
    "mask": ({"mask_field": "mask"}, (12, 40)),
}
"""Fields of a source, and the most turns of a sample and letters of a text of which no turn exceeds a row."""


def samples_of(form: str, count: int = 60) -> list[list[Turn]]:
    return samples(count, *FORMS[form][1])


def record_of(form: str, turns: list[Turn]) -> dict[str, Any]:
    said = [(role, text) for turn in turns for role, text in zip(("user", "assistant"), turn, strict=True)]
    messages = [{"role": role, "content": text} for role, text in said]
    prompt, answer = turns[-1]
    match form:
        case "messages":
            return {"messages": messages}
        case "sharegpt":
            speakers = {"user": "human", "assistant": "gpt"}
            return {"conversations": [{"from": speakers[role], "value": text} for role, text in said]}
        case "prompt":
            return {"prompt": prompt, "completion": answer}
        case "pair":
            return {"prompt": messages[:-1], "completion": messages[-1:]}
        case "alpaca":
            return {"instruction": prompt[:2], "input": prompt[2:], "output": answer}
        case _:
            ends = np.cumsum([len(text) for _, text in said]).tolist()
            spans = [list(span) for span in zip(ends[::2], ends[1::2], strict=True)]
            return {"text": "".join(text for _, text in said), "mask": spans}


def learned_answers(form: str, turns: list[Turn]) -> dict[str, str]:
    """Answers of a sample that are learned, and the text right before each one."""
    befores = {
        "messages": (chat := [f"<|user|>\n{prompt}\n<|assistant|>\n" for prompt, _ in turns]),
        "sharegpt": chat,
        "alpaca": [f"{prompt[:2]}\n{prompt[2:]}\n" for prompt, _ in turns],
    }.get(form, [prompt for prompt, _ in turns])
    if form == "pair":
        # Earlier answers are read as part of the prompt.
        earlier = "".join(
            f"{before}{answer}\n" for before, (_, answer) in zip(chat, turns[:-1], strict=False)
        )
        return {turns[-1][1]: earlier + chat[-1]}
    return {answer: before for (_, answer), before in zip(turns, befores, strict=True)}


def source_of(folder: Path, form: str, made: list[list[Turn]], kind: str = "jsonl", **fields: Any) -> Source:
    return Source(
        path=write_records(folder, kind, [record_of(form, s) for s in made]), **FORMS[form][0], **fields
    )


def spec(source: Source, **fields: Any) -> PackedText:
    """Default settings, packing included."""
    small = {"seq_len": SEQ_LEN, "global_batch": 8, "engine": "inline", "epochs": 1, "eval_fraction": 0.0}
    return PackedText(sources={"sft": source}, **{**small, **fields})


def learned_runs(batch: Batch) -> list[tuple[str, str]]:
    """What comes before each learned run of tokens in its piece, and the run."""
    runs = []
    for token, target, segment in zip(batch.token_BL, batch.target_BL, batch.segment_BL, strict=True):
        for number in range(1, int(segment.max()) + 1):
            here = segment == number
            text = bytes(token[here].tolist()).decode("latin-1")
            learned = np.concatenate([[False], (target[here] != IGNORE)[:-1], [False]])
            borders = np.flatnonzero(np.diff(learned.astype(np.int8))) + 1
            runs += [(text[:a], text[a:b]) for a, b in borders.reshape(-1, 2).tolist()]
    return runs


def count_without_prompt(batches: Iterable[Batch], made: list[list[Turn]], form: str) -> tuple[int, set[str]]:
    """Number of learned tokens whose prompt is not in their piece, and the answers that are there whole."""
    before_of = {answer: before for turns in made for answer, before in learned_answers(form, turns).items()}
    answer_of = {re.match(r"A\d+", answer).group(): answer for answer in before_of}  # type: ignore[union-attr]
    lacking, whole = 0, set()
    for batch in batches:
        for before, run in learned_runs(batch):
            answer = answer_of.get((re.match(r"A\d+", run) or [""])[0], "?")
            if not before.endswith(before_of.get(answer, "?")):
                lacking += len(run)
            elif run.rstrip("\0\n") == answer:
                whole.add(answer)
    return lacking, whole
