"""Order and evaluation of corpora that are sorted by topic and ten times as large as a window."""

import dataclasses
import io
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jtrain.data import PackedText, Source, open_dataset
from jtrain.data.inspect.order_report import OrderReport, measure_order
from jtrain.data.inspect.order_tables import lines_of
from jtrain.data.pretokenized.build import prepare
from jtrain.data.pretokenized.shard import Recipe
from jtrain.data.sources import file_parts
from jtrain.data.sources.file_parts import FileParts
from jtrain.data.sources.shuffle import epoch_key, spread_parts
from jtrain.data.sources.storage import StoredFile
from jtrain.data.stream import growing_order
from jtrain.errors import UserError
from tests.data.writers import write_tar

TOPICS, DOCUMENTS, SIZE = 16, 2400, 300
WINDOW = 1 << 16
"""A tenth of the corpus."""


def texts_of(*, is_sorted: bool = True) -> list[str]:
    """Returns texts of 16 topics, each with letters of its own."""
    rng = np.random.default_rng(0)
    letters = np.frombuffer(bytes(range(35, 125)).replace(b"\\", b""), np.uint8)
    topics = [rng.choice(letters, 12, replace=False) for _ in range(TOPICS)]
    order = np.repeat(np.arange(TOPICS), DOCUMENTS // TOPICS)
    order = order if is_sorted else rng.permutation(order)
    return [rng.choice(topics[topic], SIZE).tobytes().decode() for topic in order]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return texts_of()


@pytest.fixture(autouse=True)
def small_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_parts, "STRIPE_BYTES", 1 << 10)


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def write_in(form: str, folder: Path, texts: list[str]) -> Path:
    """Writes texts in their order; returns the path that reads them."""
    folder.mkdir()
    if form == "one file":
        return write(folder / "a.jsonl", texts)
    if form == "parquet":
        pq.write_table(pa.table({"text": texts}), folder / "a.parquet", row_group_size=8)
        return folder
    per_file = {"many files": 30, "text folder": 1, "tars": 4}[form]
    for number, start in enumerate(range(0, len(texts), per_file)):
        some = texts[start : start + per_file]
        if form == "text folder":
            (folder / f"{number:05}.txt").write_text(some[0])
        elif form == "many files":
            write(folder / f"{number:05}.jsonl", some)
        else:
            (folder / f"{number:05}").mkdir()
            write_tar(folder / f"{number:05}", some).rename(folder / f"{number:05}.tar")
            (folder / f"{number:05}").rmdir()
    return folder


def spec_of(path: Path | None, cache: Path, **fields: Any) -> PackedText:
    fields = {
        "seq_len": 64,
        "global_batch": 16,
        "eval_fraction": 0.1,
        "shuffle_window_bytes": WINDOW,
        **fields,
    }
    return PackedText(
        path=None if path is None else str(path), cache_dir=str(cache), engine="inline", **fields
    )


def measured(spec: PackedText, steps: int = 100) -> OrderReport:
    return measure_order(open_dataset(spec, seed=0), steps)


def assert_as_one_shuffle(report: OrderReport) -> None:
    correlation = report.autocorrelation[1]
    assert abs(correlation.found) < max(0.05, 3 * correlation.error)
    assert report.distinct_over_rows >= 0.95
    assert report.topics.met.found >= 0.95 * report.topics.met.chance
    # A shuffled corpus gives up to 1.02 and 1.34 with so few rows.
    assert report.topics.loss_ratio < 1.03
    assert report.topics.window_distance.found < 1.5 * report.topics.window_distance.chance


@pytest.mark.parametrize(
    "form",
    [
        "one file",
        "text folder",
        *(pytest.param(form, marks=pytest.mark.slow) for form in ("many files", "parquet", "tars")),
    ],
)
def test_a_sorted_corpus_of_ten_windows_is_read_as_one_shuffle(
    form: str, texts: list[str], tmp_path: Path
) -> None:
    # A tar of four texts takes 10 KiB, and is opened as a whole.
    window = 10 * WINDOW if form == "tars" else WINDOW
    spec = spec_of(write_in(form, tmp_path / "files", texts), tmp_path / "cache", shuffle_window_bytes=window)
    dataset = open_dataset(spec, seed=0)
    assert dataset.streams[0].size_bytes > 9 * window or form == "parquet"
    report = measure_order(dataset, 100)
    assert_as_one_shuffle(report)
    assert "nan" not in "\n".join(lines_of(report))


@pytest.mark.slow
def test_a_shuffled_corpus_and_a_prepared_one_are_too(texts: list[str], tmp_path: Path) -> None:
    shuffled = spec_of(write(tmp_path / "shuffled.jsonl", texts_of(is_sorted=False)), tmp_path / "cache")
    assert_as_one_shuffle(measured(shuffled))
    spec = spec_of(write(tmp_path / "a.jsonl", texts), tmp_path / "cache")
    ((name, source),) = spec.named_sources.items()
    recipe = Recipe(name=name, source=source, tokenizer="bytes", cache_dir=tmp_path / "cache")
    prepare([recipe], tmp_path / "prepared", workers=1, stream=io.StringIO())
    assert_as_one_shuffle(measured(dataclasses.replace(spec, prepared=str(tmp_path / "prepared"))))


@pytest.mark.slow
def test_many_sorted_sources_are_mixed_as_few(texts: list[str], tmp_path: Path) -> None:
    """Each of ten has a window of its own of many stripes."""
    sources = {
        f"s{n}": Source(path=str(write(tmp_path / f"{n}.jsonl", texts[n % 2 :: 2]))) for n in range(10)
    }
    spec = spec_of(None, tmp_path / "cache", sources=sources, shuffle_window_bytes=1 << 17)
    assert min(setup.window_bytes for setup in spec.setups(seed=0)) >= 64 * file_parts.STRIPE_BYTES
    assert_as_one_shuffle(measured(spec))


@pytest.mark.slow
def test_a_sorted_corpus_in_its_own_order_is_found(
    texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the bounds above: windows of parts that follow one another, as large parts make them."""
    spec = spec_of(write(tmp_path / "a.jsonl", texts), tmp_path / "cache")
    assert "nan" not in "\n".join(lines_of(measured(spec, 20))), "with the fewest steps"
    monkeypatch.setattr(growing_order, "spread_windows", lambda p, s, k, **_: np.array_split(p, 10))
    report = measured(spec, 40)
    assert report.topics.met.found < 5 < report.topics.met.chance
    assert report.topics.loss_ratio > 1.2
    assert report.topics.window_distance.found > 3 * report.topics.window_distance.chance


def test_a_run_goes_on_within_a_window_bit_for_bit(texts: list[str], tmp_path: Path, same_batch: Any) -> None:
    spec = spec_of(write(tmp_path / "a.jsonl", texts), tmp_path / "cache")
    with open_dataset(spec, seed=3).train_batches(inline=True) as batches:
        expected = list(itertools.islice(batches, 160))
    state = None
    for first, end in ((0, 7), (7, 95), (95, 160)):
        with open_dataset(spec, seed=3).train_batches(state, inline=True) as batches:
            for step in range(first, end):
                same_batch(next(batches), expected[step])
            state = json.loads(json.dumps(batches.state()))
    assert state["anchors"]["data"][1] > 0, "a window of its own came after the first one"


def test_an_evaluation_draws_from_the_whole_corpus(texts: list[str], tmp_path: Path) -> None:
    said: list[str] = []
    spec = spec_of(write(tmp_path / "a.jsonl", texts), tmp_path / "cache", eval_batches=2)
    held_out = open_dataset(spec, seed=0, say=said.append).held_out()
    tokens = np.concatenate([batch.batch.token_BL for batch in held_out.batches()])
    records = held_out.document_table.record
    topics = {int(record >> 32) * TOPICS // len(held_out.streams[0].names) for record in records}
    assert len(topics) == TOPICS
    assert len(tokens) == 32
    [line] = [line for line in said if "evaluations draw" in line]
    assert re.search(
        r"data: evaluations draw from \d+ held-out documents of \d+ parts in 1 file of 1 source", line
    )


def test_an_evaluation_of_one_part_of_many_is_refused(tmp_path: Path) -> None:
    """One document of each file of a hundred, and only one of them is held out."""
    for n in range(100):
        write(tmp_path / f"{n:03}.jsonl", ["x" * 1000])
    data = dict(global_batch=1, eval_batches=1)
    for fraction in np.arange(0.002, 0.2, 0.002).tolist():
        spec = spec_of(tmp_path, tmp_path / ".cache", eval_fraction=fraction, **data)
        try:
            dataset = open_dataset(spec, seed=0)
        except UserError:
            continue  # none is held out yet
        with pytest.raises(UserError, match=r"are of 1 of its 100 files and parts of .* Raise data.eval_f"):
            dataset.held_out().describe_sample()
        return
    raise AssertionError("none was held out")


@pytest.mark.parametrize("parts", [0, 1, 2, 7, 64, 1000])
def test_every_run_of_parts_is_spread_over_all(parts: int) -> None:
    order = spread_parts(parts, epoch_key(0, 1))
    assert sorted(order.tolist()) == list(range(parts))
    for start in range(0, parts - 15, 16):
        assert len({int(n) * 16 // parts for n in order[start : start + 16]}) >= 14, "16 strata, give or take"


def test_stripes_cover_each_file_once() -> None:
    files = [StoredFile(f"{n}", f"{n}", size, "", f"{n}") for n, size in enumerate((0, 5, 10, 25, -1))]
    parts = FileParts(files, [10, 10, 10, 10, 0])
    assert [(part.name, part.span) for part in parts] == [
        ("0", None), ("1", None), ("2", None), ("3", (0, 10)), ("3", (10, 20)), ("3", (20, 25)), ("4", None)
    ]  # fmt: skip
    assert parts.sizes().tolist() == [0, 5, 10, 10, 10, 5, 0]
    assert parts.file_of(np.arange(7)).tolist() == [0, 1, 2, 3, 3, 3, 4]
