"""Preference pairs from a file to a batch: two texts, each as it would be alone, side by side in one row."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from bench.data_parts import chats
from jtrain.data import PackedText, Source, open_dataset
from jtrain.data.inspect.step_contents import pieces_of_step
from jtrain.errors import UserError
from jtrain.layout.constants import IGNORE
from tests.data.chat import templates
from tests.data.masked_sources import write_records
from tests.data.writers import write_saved_dataset

COUNT = 20
SETTINGS: dict[str, dict[str, Any]] = {
    "text": dict(prompt_field="prompt", text_field="chosen", rejected_field="rejected"),
    "messages": dict(prompt_field="prompt", text_field="chosen", rejected_field="rejected"),
    "chats": dict(messages_field="chosen", rejected_field="rejected"),
}


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def record(form: str, number: int) -> dict[str, Any]:
    """Pair whose prompt has more than one turn where it has turns, with answers of different lengths."""
    better, worse = "Yes" * (number % 5 + 1), "No" * (number % 7 + 1)
    if form == "text":
        return {"prompt": f"Is {number} even? ", "chosen": better, "rejected": worse}
    prompt = [said("user", "Hi"), said("assistant", f"Hello {number}"), said("user", f"Is {number} even?")]
    answers = {"chosen": [said("assistant", better)], "rejected": [said("assistant", worse)]}
    if form == "messages":
        return {"prompt": prompt, **answers}
    return {name: prompt + answer for name, answer in answers.items()}


def spec_of(
    folder: Path, records: list[dict[str, Any]] | str, source: dict[str, Any], **fields: Any
) -> PackedText:
    """Data of some records, or of a path."""
    chats.write_tokenizer(folder / "tokenizer", templates.PLAIN, (templates.STOP,))
    path = records if isinstance(records, str) else write_records(folder, "jsonl", records)
    return PackedText(
        sources={"pairs": Source(path=path, tokenizer=str(folder / "tokenizer"), **source)},
        **{
            **dict(seq_len=256, global_batch=2, eval_fraction=0.0, epochs=1, engine="inline"),
            **dict(cache_dir=str(folder / "cache")),
            **fields,
        },
    )


def texts_of(spec: PackedText) -> list[list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Ids and targets of the texts of each row; checks that positions are those of each text alone."""
    rows = []
    with open_dataset(spec, seed=0).train_batches() as batches:
        for batch in batches:
            arrays = (batch.token_BL, batch.target_BL, batch.position_BL, batch.segment_BL)
            for token, target, position, segment in zip(*arrays, strict=True):
                rows.append([])
                for number in range(1, int(segment.max()) + 1):
                    places = np.flatnonzero(segment == number)
                    assert (np.diff(places) == 1).all()
                    assert position[places].tolist() == list(range(len(places)))
                    rows[-1].append((tuple(token[places].tolist()), tuple(target[places].tolist())))
    return rows


@pytest.mark.parametrize("kind", ("jsonl", "parquet", "save_to_disk"))
@pytest.mark.parametrize("form", SETTINGS)
def test_both_texts_of_a_pair_are_what_they_are_alone(form: str, kind: str, tmp_path: Path) -> None:
    """The same ids and targets as a run on the better, or the worse answers alone; the pair lies in one row."""
    records = [record(form, number) for number in range(COUNT)]
    path = tmp_path / "source"
    path.mkdir()
    where = (
        str(write_saved_dataset(path, pa.Table.from_pylist(records)))
        if kind == "save_to_disk"
        else write_records(path, kind, records)
    )
    rows = texts_of(spec_of(tmp_path, where, SETTINGS[form]))
    assert all(len(row) % 2 == 0 for row in rows)
    assert max(map(len, rows)) > 2, "rows have several pairs"
    pairs = [pair for row in rows for pair in itertools.batched(row, 2)]
    assert len(pairs) == COUNT
    better, worse = (
        {text for row in texts_of(spec_of(tmp_path, where, alone)) for text in row}
        for alone in alone_settings(form)
    )
    assert {chosen for chosen, _ in pairs} == better
    assert {rejected for _, rejected in pairs} == worse
    # The two of a pair share their prompt, which is not learned.
    for (ids, targets), (others, other_targets) in pairs:
        prompt = next(i for i, target in enumerate(targets) if target != IGNORE) + 1
        assert ids[:prompt] == others[:prompt]
        assert other_targets[: prompt - 1] == (IGNORE,) * (prompt - 1)


def alone_settings(form: str) -> list[dict[str, Any]]:
    """Settings of sources of the better and of the worse answers alone."""
    if form == "chats":
        return [dict(messages_field=name, train_on="last") for name in ("chosen", "rejected")]
    return [dict(prompt_field="prompt", text_field=name) for name in ("chosen", "rejected")]


def chat(*texts: str, last: str = "assistant") -> list[dict[str, str]]:
    roles = [*(("user", "assistant")[i % 2] for i in range(len(texts) - 1)), last]
    return [said(role, text) for role, text in zip(roles, texts, strict=True)]


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "prompts differ": (
        "chats",
        {"chosen": chat("Is it?", "Yes"), "rejected": chat("Was it?", "No")},
        r"field 'chosen' and 'rejected' have different prompts: message 0 has the content 'Is it\?' in one and "
        r"'Was it\?' in the other",
    ),
    "lengths differ": (
        "chats",
        {"chosen": chat("a", "b", "c", "d"), "rejected": chat("a", "b")},
        r"has 4 messages, and 'rejected' has 2: the chats of a pair differ in their last message alone",
    ),
    "no answer": (
        "chats",
        {"chosen": chat("a", "b", last="user"), "rejected": chat("a", "c")},
        r"ends with a message of role 'user', and 'rejected' with one of role 'assistant'",
    ),
    "a learned prompt": (
        "chats",
        {
            name: [said("user", "a"), said("assistant", "b") | {"weight": 1}, *chat("c", answer)]
            for name, answer in (("chosen", "d"), ("rejected", "e"))
        },
        r"holds weight or train in message 1, which is of the prompt",
    ),
    "no worse answer": (
        "text",
        {"prompt": "a", "chosen": "b"},
        r"has no worse answer beside it, in the field 'rejected'",
    ),
    "a worse chat that is none": (
        "chats",
        {"chosen": chat("a", "b"), "rejected": "c"},
        r"goes with the worse answer in 'rejected', which is str, not a list of messages",
    ),
    "a worse answer of another kind": (
        "text",
        {"prompt": "a", "chosen": "b", "rejected": chat("a", "b")},
        r"goes with the worse answer in 'rejected', which is str, and the text a list of messages",
    ),
    "nothing": ("text", {"prompt": "", "chosen": "", "rejected": "b"}, r"neither a prompt nor an answer"),
    "twice the same": ("text", {"prompt": "a", "chosen": "b", "rejected": "b"}, r"the same answer twice"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_pair_is_refused_with_its_record_or_left_out(case: str, tmp_path: Path) -> None:
    form, bad, why = BAD[case]
    records = [record(form, number) for number in range(COUNT)]
    records[7] = bad
    with pytest.raises(UserError, match=rf"a\.jsonl, line 8: .*{why}"):
        texts_of(spec_of(tmp_path, records, SETTINGS[form]))
    rows = texts_of(spec_of(tmp_path, records, SETTINGS[form], on_bad_record="skip"))
    assert sum(map(len, rows)) == 2 * (COUNT - 1)


def test_a_pair_longer_than_a_row_is_refused_or_dropped(tmp_path: Path) -> None:
    records = [record("text", number) for number in range(COUNT)]
    records[3]["rejected"] = "No" * 200
    with pytest.raises(
        UserError, match=r"tokens are more than a row of data\.seq_len=256, and a pair is in one row"
    ):
        texts_of(spec_of(tmp_path, records, SETTINGS["text"]))
    rows = texts_of(spec_of(tmp_path, records, SETTINGS["text"] | dict(on_too_long="drop")))
    assert sum(map(len, rows)) == 2 * (COUNT - 1)


def test_both_texts_of_a_pair_are_shown_apart(tmp_path: Path) -> None:
    records = [record("chats", number) for number in range(COUNT)]
    pieces = pieces_of_step(
        open_dataset(spec_of(tmp_path, records, SETTINGS["chats"]), seed=0), 0, tokens=True
    )
    better, worse = pieces[:2]
    assert (better["answer"], worse["answer"]) == ("better", "worse")
    assert better["document"] == worse["document"]
    assert (better["start_token"], better["end_token"]) == (0, worse["start_token"])
    assert "[['Yes" in better["marked"]
    assert "[['No" in worse["marked"]
    assert better["marked"].partition("[[")[0] == worse["marked"].partition("[[")[0]
    for piece in (better, worse):
        learned = [
            token
            for token, is_learned in zip(piece["tokens"], piece["is_learned"], strict=True)
            if is_learned
        ]
        assert learned[-1] == templates.STOP


def test_a_run_goes_on_with_the_same_pairs(tmp_path: Path) -> None:
    """After a stop, and read by processes instead of the trainer."""
    records = [record("chats", number) for number in range(COUNT)]
    spec = spec_of(tmp_path, records, SETTINGS["chats"], epochs=None)
    with open_dataset(spec, seed=0).train_batches() as batches:
        want = list(itertools.islice(batches, 2))
        state = json.loads(json.dumps(batches.state()))
        want += list(itertools.islice(batches, 3))
    other = spec_of(tmp_path, records, SETTINGS["chats"], epochs=None, engine="processes", max_loaders=1)
    with open_dataset(other, seed=0).train_batches(state) as batches:
        for expected, got in zip(want[2:], batches, strict=False):
            for name in ("token_BL", "target_BL", "position_BL", "segment_BL"):
                np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))


@pytest.mark.parametrize(
    ("source", "fields", "why"),
    [
        (dict(rejected_field="rejected"), {}, r"rejected_field='rejected' needs the prompt of both answers"),
        (
            dict(prompt_field="prompt", rejected_field="text"),
            {},
            r"rejected_field='text' must name a field of its own",
        ),
        (SETTINGS["text"] | dict(mask_prompt=False), {}, r"but mask_prompt=False\. Remove mask_prompt"),
        (SETTINGS["chats"] | dict(on_rewritten_turn="split"), {}, r"but on_rewritten_turn='split'\. Remove"),
        (SETTINGS["text"], dict(packing="concat"), r"but data\.packing='concat' cuts them"),
        (SETTINGS["text"], dict(prepared="folder"), r"prepared tokens holds no preference pairs"),
    ],
)
def test_settings_that_pairs_do_not_have_are_refused(
    source: dict[str, Any], fields: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=why):
        spec_of(tmp_path, [record("text", 0)], source, **fields)


def test_pairs_beside_other_samples_are_refused(tmp_path: Path) -> None:
    one, other = Source(path="a", **SETTINGS["text"]), Source(path="b", prompt_field="prompt")
    with pytest.raises(UserError, match=r"a run has pairs in all sources or in none"):
        PackedText(sources={"pairs": one, "answers": other}, seq_len=64, global_batch=2)
