"""Labels of -100 beside adopted ids become the loss mask; other labels than these and the ids are refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jtrain.data import PackedText, Source, open_dataset
from jtrain.errors import UserError
from jtrain.layout.constants import IGNORE
from tests.data.pretokenized.adopting import END, run
from tests.data.whole_samples import count_without_prompt, samples, spec

IDS = [[5, 6, 7, 8, END], [9, END], [], [10, 11, 12, END]]
LABELS = [[-100, -100, 7, 8, END], [9, END], [], [-100, 11, -100, END]]
RUNS = [[0, 2, 0], [7, 8, 0], [9, 10, 0]]
"""Of the tokens of all documents, one after another."""


def write_parquet(folder: Path, labels: list[list[int]], ids: list[list[int]] = IDS) -> None:
    pq.write_table(pa.table({"input_ids": ids, "labels": labels}), folder / "a.parquet", row_group_size=2)


def write_mds(folder: Path, labels: list[list[int]], ids: list[list[int]] = IDS) -> None:
    rows = [
        [np.asarray(column, "<i8").tobytes() for column in pair] for pair in zip(labels, ids, strict=True)
    ]
    blobs = [b"".join([*(np.uint32(len(c)).tobytes() for c in row), *row]) for row in rows]
    starts = 4 * (len(blobs) + 2) + np.cumsum([0, *map(len, blobs)])
    content = np.asarray([len(blobs), *starts], "<u4").tobytes() + b"".join(blobs)
    (folder / "shard.00000.mds").write_bytes(content)
    columns = {
        "column_names": ["labels", "tokens"],
        "column_encodings": ["bytes"] * 2,
        "column_sizes": [None] * 2,
    }
    entry = {"format": "mds", "samples": len(ids), "raw_data": {"basename": "shard.00000.mds"}, **columns}
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [entry]}))


WRITERS = {"parquet": write_parquet, "mds": write_mds}


@pytest.mark.parametrize("kind", WRITERS)
def test_labels_become_the_mask(kind: str, tmp_path: Path, tokenizer_json: Path) -> None:
    (tmp_path / "in").mkdir()
    WRITERS[kind](tmp_path / "in", LABELS)
    index = run(tmp_path / "in", tmp_path / "out", tokenizer_json)
    records = np.arange(len(IDS))
    lengths = index.lengths(records).astype(np.int64)
    assert index.read(records)[1].tolist() == [token for document in IDS for token in document]
    assert index.ignored(records, np.zeros_like(lengths), lengths).tolist() == RUNS
    assert index.verify() == []
    index.check_mask(None)


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize(
    ("labels", "why"),
    [
        (
            [[6, 7, 8, END, -100], *LABELS[1:]],
            r"token 0 of this part has label 6 and id 5\. Write labels that are",
        ),
        ([[7, 8, END], *LABELS[1:]], r"column 'labels' has not as many labels as there are ids"),
    ],
    ids=["shifted", "short"],
)
def test_labels_of_other_tokens_are_refused(
    kind: str, labels: list[list[int]], why: str, tmp_path: Path, tokenizer_json: Path
) -> None:
    (tmp_path / "in").mkdir()
    WRITERS[kind](tmp_path / "in", labels)
    with pytest.raises(UserError, match=why):
        run(tmp_path / "in", tmp_path / "out", tokenizer_json)


def test_labels_of_classes_are_none_and_files_without_labels_are_told_apart(
    tmp_path: Path, tokenizer_json: Path
) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"input_ids": IDS, "labels": [1, 0, 1, 0]}), tmp_path / "in" / "b.parquet")
    assert not (
        run(tmp_path / "in", tmp_path / "out", tokenizer_json),
        (tmp_path / "out/data/masks.bin").exists(),
    )[1]
    write_parquet(tmp_path / "in", LABELS)
    with pytest.raises(UserError, match=r"a\.parquet has a column of labels, and .*b\.parquet has none"):
        run(tmp_path / "in", tmp_path / "more", tokenizer_json)


@pytest.mark.parametrize("packing", [None, "concat"])
@pytest.mark.parametrize("kind", WRITERS)
def test_rows_hold_whole_adopted_samples(kind: str, packing: Any, tmp_path: Path) -> None:
    """By default no token is learned without its prompt, in training and in evaluations; concat cuts them."""
    made = samples(60, 12)
    parts = [[part for turn in sample for part in turn] for sample in made]
    ids = [[*"".join(texts).encode(), 0] for texts in parts]
    masks = [
        [-100 if i % 2 == 0 else code for i, text in enumerate(texts) for code in text.encode()]
        for texts in parts
    ]
    (tmp_path / "in").mkdir()
    WRITERS[kind](tmp_path / "in", [[*mask, 0] for mask in masks], ids)
    run(tmp_path / "in", tmp_path / "out", "bytes", name="sft")
    source = Source(path=str(tmp_path / "in"))
    fields = {"prepared": str(tmp_path / "out"), "packing": packing}
    dataset = open_dataset(spec(source, **fields), seed=0)
    lacking, whole = count_without_prompt(dataset.train_batches(), made, "mask")
    held = open_dataset(spec(source, **fields, eval_fraction=0.5), seed=0).held_out()
    held_lacking, _ = count_without_prompt((one.batch for one in held.batches()), made, "mask")
    if packing == "concat":
        assert min(lacking, held_lacking) > 100
        return
    assert lacking == held_lacking == 0
    assert whole == {answer for sample in made for _, answer in sample}
    drop = dataclasses.replace(source, on_too_long="drop")
    dropping = open_dataset(spec(drop, **fields), seed=0)
    assert "of them longer than a row (on_too_long='drop')" in dropping.describe()
    with pytest.raises(
        UserError, match=r"on_too_long='drop' keeps samples whole, but data\.packing='concat'"
    ):
        open_dataset(spec(drop, **{**fields, "packing": "concat"}), seed=0)
    masked = dataclasses.replace(source, mask_field="mask")
    with pytest.raises(
        UserError, match=r"ids whose loss mask is in their labels, but mask_field='mask' is set"
    ):
        open_dataset(spec(masked, **fields), seed=0)


def test_labels_without_masks_make_no_samples(tmp_path: Path) -> None:
    """Blocks for pretraining often have labels that are the ids."""
    ids = [[*b"pretraining", 0]] * 40
    (tmp_path / "in").mkdir()
    write_parquet(tmp_path / "in", ids, ids)
    run(tmp_path / "in", tmp_path / "out", "bytes", name="sft")
    source, prepared = Source(path=str(tmp_path / "in")), str(tmp_path / "out")
    dataset = open_dataset(spec(source, prepared=prepared), seed=0)
    assert [setup.row_tokens for setup in dataset.setups] == [None]
    assert dataset.first_state()["planner"]["packing"] == "concat"
    with pytest.raises(
        UserError, match=r"sft\.on_too_long='drop' is for samples, and text may be cut anywhere"
    ):
        open_dataset(spec(dataclasses.replace(source, on_too_long="drop"), prepared=prepared), seed=0)


def test_labels_are_not_learned_in_training(tmp_path: Path, tokenizer_json: Path) -> None:
    """Three quarters of each document are masked; rows hold as few targets as an evaluation's."""
    ids = [[20 + (i + j) % 200 for j in range(40)] for i in range(40)]
    labels = [[-100] * 30 + document[30:] for document in ids]
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"input_ids": ids, "labels": labels}), tmp_path / "in" / "a.parquet")
    run(tmp_path / "in", tmp_path / "out", tokenizer_json)
    spec = PackedText(
        path=str(tmp_path / "in" / "*.parquet"),
        tokenizer=str(tokenizer_json),
        prepared=str(tmp_path / "out"),
        engine="inline",
        seq_len=64,
        global_batch=4,
        eval_fraction=0.0,
    )
    with open_dataset(spec, seed=0).train_batches() as batches:
        batch = next(iter(batches))
    is_learned = batch.target_BL != IGNORE
    assert 0.15 < is_learned.mean() < 0.3
