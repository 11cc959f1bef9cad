"""Labels of -100 beside adopted ids become the loss mask; other labels than these and the ids are refused."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jtrain.data import PackedText, open_dataset
from jtrain.errors import UserError
from jtrain.layout.constants import IGNORE
from tests.data.pretokenized.adopting import END, run

IDS = [[5, 6, 7, 8, END], [9, END], [], [10, 11, 12, END]]
LABELS = [[-100, -100, 7, 8, END], [9, END], [], [-100, 11, -100, END]]
RUNS = [[0, 2], [7, 8], [9, 10]]
"""Of the tokens of all documents, one after another."""


def write_parquet(folder: Path, labels: list[list[int]]) -> None:
    pq.write_table(pa.table({"input_ids": IDS, "labels": labels}), folder / "a.parquet", row_group_size=2)


def write_mds(folder: Path, labels: list[list[int]]) -> None:
    samples = [
        [np.asarray(column, "<i8").tobytes() for column in pair] for pair in zip(labels, IDS, strict=True)
    ]
    blobs = [b"".join([*(np.uint32(len(c)).tobytes() for c in sample), *sample]) for sample in samples]
    starts = 4 * (len(blobs) + 2) + np.cumsum([0, *map(len, blobs)])
    content = np.asarray([len(blobs), *starts], "<u4").tobytes() + b"".join(blobs)
    (folder / "shard.00000.mds").write_bytes(content)
    columns = {
        "column_names": ["labels", "tokens"],
        "column_encodings": ["bytes"] * 2,
        "column_sizes": [None] * 2,
    }
    entry = {"format": "mds", "samples": len(IDS), "raw_data": {"basename": "shard.00000.mds"}, **columns}
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
