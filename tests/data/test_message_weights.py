"""Weights of messages from the file to the batch: each target has its message's, wherever it is packed."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jtrain.data import PackedText, Source, open_dataset
from jtrain.errors import UserError
from jtrain.layout.constants import IGNORE
from jtrain.layout.dims import Batch
from tests.check.example_runs import STOP, TEMPLATE

WEIGHTS = (0.25, None, 3, 0, 1.5)
"""Weights of answers, in turn; a message without one weighs 1."""
FORMS: dict[str, dict[str, Any]] = {
    "template": {"chat_template": TEMPLATE, "stop_tokens": (STOP,)},
    "split": {"chat_template": TEMPLATE, "stop_tokens": (STOP,), "on_rewritten_turn": "split"},
    "roles": {"chat_template": "roles"},
}


def write_chats(path: Path, *, in_pairs: bool = False) -> dict[str, float]:
    """Writes 60 chats of two answers each; returns the weight of each answer that is learned, by its text."""
    weights, lines = dict[str, float](), []
    for number in range(60):
        messages = []
        for turn in range(2):
            # A message of the prompt is only read, unless it has a weight.
            weight = WEIGHTS[(2 * number + turn) % len(WEIGHTS)] if turn or not in_pairs else None
            answer = {"role": "assistant", "content": f"answer {number} {turn}{'!' * (number % 7)}"}
            messages += [{"role": "user", "content": f"q{number}"}, answer | {"weight": weight}]
            if weight != 0 and (turn or not in_pairs):
                weights[answer["content"]] = 1.0 if weight is None else float(weight)
        record = {"prompt": messages[:3], "completion": messages[3:]} if in_pairs else {"messages": messages}
        lines.append(json.dumps(record) + "\n")
    if in_pairs:
        # A completion of weight 0 is a record without a target, which is refused.
        lines = [line for line in lines if json.loads(line)["completion"][0]["weight"] != 0]
    path.write_text("".join(lines))
    return weights


def spec(path: Path, **fields: Any) -> PackedText:
    of_data = {name: fields.pop(name) for name in ("engine", "prepared") if name in fields}
    source = Source(**{"path": str(path), "messages_field": "messages", "message_weights": True, **fields})
    settings: dict[str, Any] = {"seq_len": 256, "global_batch": 4, "eval_fraction": 0.0, "engine": "inline"}
    return PackedText(sources={"chats": source}, **settings | of_data)


def check(batch: Batch, weights: dict[str, float]) -> set[str]:
    """Compares the weight of every target with that of its answer; returns the answers that were learned."""
    seen = set()
    assert batch.weight_BL.dtype == np.float32
    np.testing.assert_array_equal(batch.weight_BL > 0, batch.target_BL != IGNORE)
    for target, weight in zip(batch.target_BL, batch.weight_BL, strict=True):
        learned = (target != IGNORE).astype(int)
        for start, end in np.flatnonzero(np.diff(learned, prepend=0, append=0)).reshape(-1, 2):
            text = bytes(target[start:end].astype(np.uint8)).decode()
            [answer] = [
                answer for answer in weights if text.startswith(answer) and text[len(answer)] in "<\n"
            ]
            np.testing.assert_array_equal(weight[start:end], np.float32(weights[answer]))
            seen.add(answer)
    return seen


@pytest.mark.parametrize("form", FORMS)
def test_every_target_has_the_weight_of_its_message(form: str, tmp_path: Path) -> None:
    """Several chats a row; an answer of weight 0 is no target."""
    weights = write_chats(tmp_path / "chats.jsonl")
    dataset = open_dataset(spec(tmp_path / "chats.jsonl", **FORMS[form]), seed=0)
    with dataset.train_batches() as batches:
        seen = [check(batch, weights) for batch in itertools.islice(batches, 24)]
    assert set.union(*seen) == weights.keys()
    assert len(set(weights.values())) == 4


def test_processes_deliver_the_weights_that_one_process_makes(tmp_path: Path) -> None:
    """Through shared memory, and with the columns of a context axis."""
    write_chats(tmp_path / "chats.jsonl")
    batches = []
    for engine in ("inline", "processes"):
        dataset = open_dataset(spec(tmp_path / "chats.jsonl", engine=engine, **FORMS["template"]), seed=0)
        with dataset.train_batches(context=2) as stream:
            batches.append(list(itertools.islice(stream, 3)))
    assert len(np.unique([batch.weight_BL for batch in batches[0]])) == 5
    for inline, delivered in zip(*batches, strict=True):
        np.testing.assert_array_equal(inline.weight_BL, delivered.weight_BL)
        np.testing.assert_array_equal(inline.target_BL, delivered.target_BL)


def test_completions_of_messages_have_weights_as_well(tmp_path: Path) -> None:
    weights = write_chats(tmp_path / "pairs.jsonl", in_pairs=True)
    fields = dict(messages_field=None, prompt_field="prompt", text_field="completion", **FORMS["template"])
    dataset = open_dataset(spec(tmp_path / "pairs.jsonl", **fields), seed=0)
    with dataset.train_batches() as batches:
        seen = set.union(*(check(batch, weights) for batch in itertools.islice(batches, 24)))
    assert seen == weights.keys()


@pytest.mark.parametrize(
    ("fields", "answer", "why"),
    [
        ({"message_weights": False}, {"weight": 0.5}, r"weight=0\.5 in message 1 .*message_weights=True"),
        ({}, {"weight": 1001}, r"weight=1001 in message 1 .*a number from 0 to 1000"),
        ({}, {"weight": -1}, r"weight=-1 in message 1 "),
        ({}, {"weight": float("nan")}, r"weight=nan in message 1 "),
        ({}, {"weight": True}, r"weight=True in message 1 "),
        ({}, {"weight": 1e-9}, r"weight=1e-09 in message 1, which is less than a millionth"),
        ({"prepared": "x"}, {}, r"data\.sources\.chats\.message_weights=True, but data\.prepared='x'"),
        ({"messages_field": None}, {}, r"chats\.message_weights=True is for chats"),
        (
            {"messages_field": None, "prompt_field": "p", "text_field": "c", "rejected_field": "r"},
            {},
            r"rejected_field='r' has pairs, whose loss has no weights, but message_weights=True",
        ),
        (
            {"messages_field": None, "prompt_field": "prompt", "text_field": "completion"},
            {},
            r"field 'prompt' is text, and message_weights weighs messages",
        ),
    ],
)
def test_weights_that_cannot_be_honoured_are_refused(
    fields: dict[str, Any], answer: dict[str, Any], why: str, tmp_path: Path
) -> None:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!", **answer}]
    record = {"messages": messages, "prompt": "?", "completion": "!"}
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(UserError, match=why):
        next(open_dataset(spec(tmp_path / "a.jsonl", **fields), seed=0).train_batches())
