"""A corpus that is opened as it is read: each chunk once per epoch, whoever reads what, killed or resumed
anywhere.
"""

import itertools
import json
import os
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jtrain.data import PackedText, open_dataset
from jtrain.data.inspect.resource_estimate import budget
from jtrain.data.sources import file_parts
from jtrain.data.sources.chunk_cut import ChunkCut
from jtrain.data.sources.corpus import Corpus
from jtrain.data.sources.formats import BadRecord
from jtrain.data.sources.generations import Generation
from jtrain.data.sources.source import Source
from jtrain.data.stream.chunk_stream import ChunkStream
from jtrain.data.stream.growing_order import GrowingChunks
from jtrain.layout.dims import Batch
from tests.data.test_chunk_order import CHUNK, TEXTS, stream

WINDOW = 1 << 12
ONE_FILE = (Generation(0, 0, 0, 1),)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty JSON lines files of documents of every length, one of them empty, and a text file."""
    (tmp_path / "files").mkdir()
    for i in range(39):
        lines = [json.dumps({"text": text}) for text in TEXTS[6 * i :][:6]]
        (tmp_path / "files" / f"{i:02}.jsonl").write_text("\n".join([*lines, ""]))
    (tmp_path / "files" / "empty.jsonl").write_text("")
    (tmp_path / "files" / "last.txt").write_text(TEXTS[-1])
    return tmp_path / "files"


def growing(folder: Path, tmp_path: Path, **fields: Any) -> ChunkStream:
    return stream(folder, tmp_path, **{"window_bytes": WINDOW, "eager_bytes": 1000, **fields})


def epoch_slots(source: ChunkStream) -> int:
    """Returns the number of chunks of an epoch: where the anchors of epoch 1 begin."""
    order = source.order
    assert isinstance(order, GrowingChunks)
    return next(order.anchor(n).first for n in itertools.count(0, 50) if order.anchor(n).epoch == 1)


def documents(source: ChunkStream, numbers: np.ndarray) -> Counter[bytes]:
    chunks, read = source.locate(numbers), source.read(numbers)
    parts: dict[int, dict[int, bytes]] = {}
    end = 0
    for record, first, length in zip(
        chunks.record.tolist(), chunks.first.tolist(), read.lengths.tolist(), strict=True
    ):
        content, end = read.ids[end : end + length].tobytes(), end + length
        if length:
            assert first not in parts.setdefault(record, {})
            parts[record][first] = content
    return Counter(b"".join(part[at] for at in sorted(part)) for part in parts.values())


def test_each_chunk_is_in_each_epoch_once_and_epochs_differ(folder: Path, tmp_path: Path) -> None:
    source = growing(folder, tmp_path)
    assert source.num_documents is None
    slots = epoch_slots(source)
    texts = [*TEXTS[: 6 * 39], TEXTS[-1]]
    want = Counter(b"\0" + text.encode() + b"\0" for text in texts if text)
    orders = []
    for epoch in range(2):
        numbers = np.arange(epoch * slots, (epoch + 1) * slots)
        assert documents(source, numbers) == want
        orders.append(source.locate(numbers).record.tolist())
    assert orders[0] != orders[1]


@pytest.mark.slow
def test_chunks_may_be_read_by_anyone_in_any_order_from_any_anchor(folder: Path, tmp_path: Path) -> None:
    source = growing(folder, tmp_path)
    order = source.order
    assert isinstance(order, GrowingChunks)
    slots = epoch_slots(source)
    numbers = np.random.default_rng(0).permutation(2 * slots)
    together = source.read(numbers)
    starts = np.cumsum(together.lengths) - together.lengths
    for i in range(0, len(numbers), 29):
        alone = growing(folder, tmp_path).read(numbers[i : i + 1], anchor=order.anchor(int(numbers[i])))
        assert alone.ids.tolist() == together.ids[starts[i] : starts[i] + together.lengths[i]].tolist()
        assert alone.anchor == order.anchor(int(numbers[i]))
    late = growing(folder, tmp_path)
    late.read(np.asarray([slots]), anchor=order.anchor(slots))
    assert late.read(np.asarray([3])).ids.tolist() == source.read(np.asarray([3])).ids.tolist(), (
        "an earlier chunk"
    )


def test_files_of_old_windows_are_forgotten(folder: Path, tmp_path: Path) -> None:
    """Memory must not grow with the corpus."""
    source = growing(folder, tmp_path)
    for start in range(0, epoch_slots(source), 16):
        source.read(np.arange(start, start + 16))
    assert source.corpus is not None
    assert sum(records is not None for records in source.corpus.files.records) < 20


def spec(folder: Path, **fields: Any) -> PackedText:
    fields = {
        "seq_len": 64,
        "global_batch": 8,
        "shuffle_window_bytes": 1 << 16,
        "eval_fraction": 0.05,
        **fields,
    }
    return PackedText(path=str(folder), cache_dir=str(folder.parent / "cache"), **fields)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Sixty files of 6 KB: twice as much as is opened before the first step."""
    (tmp_path / "large").mkdir()
    for i in range(60):
        lines = [json.dumps({"text": f"{i}.{j} " * (20 + 7 * j)}) for j in range(12)]
        (tmp_path / "large" / f"{i:02}.jsonl").write_text("\n".join(lines))
    return tmp_path / "large"


def test_a_run_resumes_where_it_was_and_processes_read_the_same(large: Path, same_batch: Any) -> None:
    dataset = open_dataset(spec(large, engine="inline"), seed=3)
    assert dataset.streams[0].num_documents is None
    with dataset.train_batches() as batches:
        want: list[Batch] = list(itertools.islice(batches, 400))
    state = None
    done = 0
    for steps, engine in ((70, "inline"), (230, "processes"), (100, "inline")):
        again = open_dataset(spec(large, engine=engine, max_loaders=3), seed=3)
        with again.train_batches(state) as batches:
            for batch in itertools.islice(batches, steps):
                same_batch(batch, want[done])
                done += 1
            state = json.loads(json.dumps(batches.state()))
    assert state["anchors"]["data"][2] > 1000, "the run went on from the window that it had reached"


def test_kills_do_not_change_the_stream_of_windows(large: Path, same_batch: Any) -> None:
    """A loader that takes over, and a constructor that starts again, begin at a window and not at the first
    one.
    """
    dataset = open_dataset(spec(large, max_loaders=2), seed=3)
    with dataset.train_batches(inline=True) as batches:
        want: list[Batch] = list(itertools.islice(batches, 300))
    with dataset.train_batches() as batches:
        for step, (batch, expected) in enumerate(zip(batches, want, strict=False)):
            same_batch(batch, expected)
            if (victim := {150: "loader", 220: "constr"}.get(step)) is not None:
                pids = batches._plane.pids()  # pyright: ignore[reportAttributeAccessIssue]
                os.kill(
                    next(pid for pid in pids if victim in Path(f"/proc/{pid}/comm").read_text()),
                    signal.SIGKILL,
                )
            if step == len(want) - 1:
                break
        said = "\n".join(batches.take_messages())
    assert "took over" in said
    assert "the constructor died" in said


@pytest.mark.parametrize("eager_bytes", [1000, None], ids=["growing", "eager"])
def test_a_file_that_vanishes_is_bad_documents_whether_it_was_opened_before_or_not(
    eager_bytes: int | None, folder: Path, tmp_path: Path
) -> None:
    """Of a file that was never opened nobody knows how many documents it had: it counts as one."""
    policies = "skip", "fail"
    skipping, failing = (
        growing(folder, tmp_path, eager_bytes=eager_bytes, on_bad_record=p) for p in policies
    )
    corpus = skipping.corpus
    assert corpus is not None
    for source in (skipping, failing):
        source.read(np.arange(4))
    is_open = [records is not None for records in corpus.files.records]
    assert all(is_open) == (eager_bytes is None)
    victim = corpus.names[30 if all(is_open) else is_open.index(False)]
    if victim == "empty.jsonl":
        victim = corpus.names[is_open.index(False) + 1]
    (folder / victim).unlink()
    slots = len(skipping) if all(is_open) else epoch_slots(skipping)
    skipped = skipping.read(np.arange(slots)).skipped
    why = f"{folder}/{victim}: it is gone since this run opened it. Put it back, and start again."
    left = range(1 if eager_bytes else 6)
    assert sorted(reason for _, reason in skipped) == [f"document {victim}:{n}: {why}" for n in left]
    with pytest.raises(BadRecord, match=re.escape(why)):
        failing.read(np.arange(slots))


def test_an_evaluation_keeps_open_the_files_that_it_reads(large: Path) -> None:
    """It draws from all files, and the plan of the run and its resources open none but a few."""
    dataset = open_dataset(spec(large, eval_batches=1, eval_fraction=0.5), seed=3)
    corpus = dataset.streams[0].corpus
    assert corpus is not None
    assert "documents in 60 files" in dataset.describe()
    assert budget(dataset, rows=8).total("processes") > 0
    assert len(list(dataset.held_out().batches())) == 1
    assert sum(records is not None for records in corpus.files.records) < 40


def test_held_out_documents_are_the_same_opened_or_not(large: Path) -> None:
    lazy = open_dataset(spec(large), seed=0).streams[0]
    eager = open_dataset(spec(large, shuffle_window_bytes=1 << 26), seed=0).streams[0]
    assert (lazy.num_documents, eager.num_documents) == (None, 720)
    found = [
        {stream.identity_of(int(record)) for records in stream.held_out_records() for record in records}
        for stream in (lazy, eager)
    ]
    assert found[0] == found[1]
    assert 10 < len(found[0]) < 80


def test_parts_of_a_file_hold_each_line_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines end anywhere, a part may hold no line, and blank lines are none; identities do not depend on
    opening.
    """
    monkeypatch.setattr(file_parts, "STRIPE_BYTES", 50)
    lines = [json.dumps({"text": "x" * n}) for n in (0, 3, 200, 36, 37, 38, 39, 1)]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines) + "\n")
    lazy = Corpus(Source(path=str(tmp_path)), name="a", cache_dir=tmp_path / "cache", eager_bytes=10)
    eager = Corpus(Source(path=str(tmp_path)), name="a", cache_dir=tmp_path / "cache")
    assert len(lazy.names) > 8
    records = [
        np.arange(lazy.count(n)) + (int(lazy.file_ends[n - 1]) if n else 0) for n in range(len(lazy.names))
    ]
    texts = list(lazy.read(np.concatenate(records)))
    assert texts == ["x" * n for n in (0, 3, 200, 36, 37, 38, 39, 1)] == list(eager.read(np.arange(8)))
    here = [lazy.identity_of(int(record)) for record in np.concatenate(records)]
    assert here == [eager.identity_of(record) for record in range(8)]


@pytest.mark.parametrize("parts", [1, 50])
def test_a_corpus_without_records_is_refused(
    parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_parts, "STRIPE_BYTES", 5000 // parts)
    (tmp_path / "a.jsonl").write_text("\n" * 5000)
    corpus = Corpus(Source(path=str(tmp_path)), name="a", cache_dir=tmp_path / "cache", eager_bytes=10)
    assert len(corpus.names) == parts
    order = GrowingChunks(
        corpus,
        ChunkCut(CHUNK, 2, exact=True),
        seed=0,
        generations=(Generation(0, 0, 0, parts),),
        window_bytes=100,
    )
    with pytest.raises(ValueError, match=r"none of its 1 files holds a record\. Set the source's path"):
        order.anchor(0)
