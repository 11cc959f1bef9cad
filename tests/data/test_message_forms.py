"""Forms of chats and pairs in the wild: each is read as it is meant, or refused by the name of what is not."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jtrain.data import Source
from jtrain.data.sources.corpus import Corpus
from jtrain.errors import UserError
from tests.data.masked_sources import write_records

HI = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
HI_TEXT = "<|user|>\nHi\n<|assistant|>\nHello!\n"


def read(folder: Path, kind: str, record: dict[str, Any], **fields: Any) -> tuple[str, list[str]]:
    """Text of the record, and what of it is learned; its size is checked by the way."""
    path = write_records(folder, kind, [record])
    corpus = Corpus(Source(path=path, **fields), name="sft", cache_dir=folder / "cache")
    text: Any = corpus[0]
    assert corpus.sizes(0, 1)[0] >= len(text.encode()), "or its end would be in no chunk"
    return str(text), [text[start:end] for start, end in text.learned]


def message(role: str, content: Any, **keys: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **keys}


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], str, list[str]]] = {
    "sharegpt": (
        {"conversations": [{"from": "system", "value": "S"}, {"from": "human", "value": "Hi"},
                           {"from": "gpt", "value": "Hello!"}]},
        {"messages_field": "conversations"}, f"<|system|>\nS\n{HI_TEXT}", ["Hello!\n"],
    ),
    "parts": (
        {"m": [message("user", [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]),
               message("assistant", [{"type": "text", "text": "Hello!"}])]},
        {"messages_field": "m"}, HI_TEXT, ["Hello!\n"],
    ),
    "weight": (
        {"m": [message("user", "Hi", weight=None), message("assistant", "bad", weight=0),
               message("user", "?", weight=None), message("assistant", "good", weight=1)]},
        {"messages_field": "m"},
        "<|user|>\nHi\n<|assistant|>\nbad\n<|user|>\n?\n<|assistant|>\ngood\n", ["good\n"],
    ),
    "train": (
        {"m": [message("user", "me", train=True), message("assistant", "bad", train=False),
               message("assistant", "good", train=None)]},
        {"messages_field": "m"}, "<|user|>\nme\n<|assistant|>\nbad\n<|assistant|>\ngood\n", ["me\n", "good\n"],
    ),
    "train without a mask": (
        {"m": [message("user", "me", train=None), message("assistant", "bad", train=False),
               message("assistant", "good", train=None)]},
        {"messages_field": "m", "mask_prompt": False},
        "<|user|>\nme\n<|assistant|>\nbad\n<|assistant|>\ngood\n",
        ["<|user|>\nme\n<|assistant|>\n", "<|assistant|>\n", "good\n"],
    ),
    "conversational pair": (
        {"prompt": [*HI, message("user", "1 + 1?")], "completion": [message("assistant", "2")]},
        {"prompt_field": "prompt", "text_field": "completion"},
        f"{HI_TEXT}<|user|>\n1 + 1?\n<|assistant|>\n2\n", ["2\n"],
    ),
    "alpaca": (
        {"instruction": "Add.", "input": "1, 1", "output": "2"},
        {"prompt_field": "instruction+input", "text_field": "output"}, "Add.\n1, 1\n2", ["2"],
    ),
    "alpaca without input": (
        {"instruction": "Hi", "input": "", "output": "Hello!"},
        {"prompt_field": "instruction+input", "text_field": "output"}, "Hi\nHello!", ["Hello!"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_read_as_it_is_meant(form: str, kind: str, tmp_path: Path) -> None:
    record, fields, text, learned = FORMS[form]
    assert read(tmp_path, kind, record, **fields) == (text, learned)


def test_a_null_input_in_a_column_is_an_empty_one(tmp_path: Path) -> None:
    record = {"instruction": ["Hi", "Add."], "input": [None, "1, 1"], "output": ["Hello!", "2"]}
    pq.write_table(pa.table(record), tmp_path / "a.parquet")
    source = Source(path=str(tmp_path / "a.parquet"), prompt_field="instruction+input", text_field="output")
    corpus = Corpus(source, name="sft", cache_dir=tmp_path)
    assert list(corpus.read(np.arange(2))) == ["Hi\nHello!", "Add.\n1, 1\n2"]


def answer(**keys: Any) -> dict[str, Any]:
    return {"m": [message("user", "Hi"), message("assistant", "Hello!", **keys)]}


ALPACA = {"instruction": "Add.", "input": "1, 1", "output": "2"}
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (answer(reasoning_content="Hm"), {}, r"'reasoning_content' in message 1 .*built-in chat template leaves out: 'Hm'"),
    (answer(weight=0.5), {}, r"weight=0\.5 in message 1 of role 'assistant'; a weight is 0 or 1"),
    ({"m": [message("user", "Hi", weight=1)]}, {}, r"weight=1 in message 0 of role 'user'"),
    (answer(train="yes"), {}, r"train='yes' in message 1; it is true or false"),
    (answer(weight=0), {}, r"holds no message that is learned, by their weight and train"),
    ({"text": "a", "labels": [-100, 5]}, {"messages_field": None}, r"'labels' holds -100, .*Adopt the ids"),
    (ALPACA, {"messages_field": None, "prompt_field": "instruction", "text_field": "output"},
     r"has an 'input' beside the 'instruction'.*Set prompt_field to 'instruction\+input'"),
    ({"prompt": HI, "completion": "x"},
     {"messages_field": None, "prompt_field": "prompt", "text_field": "completion"},
     r"field 'prompt' is a list of messages, and the text str: both are text, or both are lists"),
]  # fmt: skip


@pytest.mark.parametrize(("record", "fields", "why"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_its_name(
    record: dict[str, Any], fields: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=why):
        read(tmp_path, "jsonl", record, **{"messages_field": "m", **fields})


def test_columns_of_masked_ids_and_of_alpaca_are_refused_when_they_are_opened(tmp_path: Path) -> None:
    ids = {"text": ["a"], "input_ids": [[1, 2]], "labels": [[-100, 2]]}
    pq.write_table(pa.table(ids), tmp_path / "ids.parquet")
    with pytest.raises(UserError, match=r"'input_ids' and 'labels' are token ids .* Adopt the ids"):
        Corpus(Source(path=str(tmp_path / "ids.parquet")), name="web", cache_dir=tmp_path)
    for kind in ("csv", "parquet"):
        path = write_records(tmp_path, kind, [ALPACA])
        source = Source(path=path, prompt_field="instruction", text_field="output")
        with pytest.raises(UserError, match=r"has an 'input' beside the 'instruction'"):
            Corpus(source, name="sft", cache_dir=tmp_path)


def test_labels_of_classes_are_no_masks(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a", "labels": [0, 3]}) + "\n")
    assert Corpus(Source(path=str(tmp_path / "a.jsonl")), name="web", cache_dir=tmp_path)[0] == "a"
