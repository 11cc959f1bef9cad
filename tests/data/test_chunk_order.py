"""Each chunk of a source is in exactly one slot of an epoch, whatever the format, and epochs differ."""

import io
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jtrain.data.pretokenized.build import prepare
from jtrain.data.pretokenized.shard import Recipe
from jtrain.data.sources.source import Source
from jtrain.data.stream.chunk_order import PreparedChunks, SizedChunks
from jtrain.data.stream.chunk_stream import ChunkStream
from jtrain.data.stream.source_setup import SourceSetup
from jtrain.data.stream.windowed_order import WindowedChunks
from tests.data.writers import WRITERS

CHUNK = 64


def lengths_of_texts() -> list[int]:
    """Empty documents, short ones, some of exactly a chunk, and long ones."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(4.2, 1.3, 230).astype(int).tolist()
    return [*lengths, 0, 1, CHUNK - 2, CHUNK - 1, CHUNK, 10 * CHUNK - 2, 5000]


TEXTS = [
    "".join(chr(97 + (i * 7 + j * j) % 26) for j in range(length))
    for i, length in enumerate(lengths_of_texts())
]


def stream(path: Path, tmp_path: Path, **fields: Any) -> ChunkStream:
    setup = {"name": "web", "tokenizer": "bytes", "end_token": None, "seed": 0, "eval_fraction": 0.0}
    setup |= {
        "on_bad_record": "fail",
        "window_bytes": 1 << 26,
        "decoded_cache_bytes": 1 << 20,
        "prepared": None,
    }
    setup |= {
        "chunk_tokens": CHUNK,
        "chunk_bytes": None,
        "eager_bytes": None,
        "cache_dir": str(tmp_path / "cache"),
    }
    return ChunkStream(SourceSetup(source=Source(path=str(path)), **{**setup, **fields}))


def prepared(path: Path, tmp_path: Path) -> ChunkStream:
    recipe = Recipe(
        name="web", source=Source(path=str(path)), tokenizer="bytes", cache_dir=tmp_path / "cache"
    )
    prepare([recipe], tmp_path / "prepared", workers=1, stream=io.StringIO())
    return stream(path, tmp_path, prepared=str(tmp_path / "prepared"))


def documents_of_epoch(source: ChunkStream, epoch: int) -> list[bytes]:
    """Returns the documents that the chunks of an epoch make when they are put together again; checks their
    lengths.
    """
    numbers = np.arange(epoch * len(source), (epoch + 1) * len(source))
    chunks, read = source.locate(numbers), source.read(numbers)
    parts: dict[int, dict[int, bytes]] = {}
    end = 0
    for record, first, length in zip(
        chunks.record.tolist(), chunks.first.tolist(), read.lengths.tolist(), strict=True
    ):
        content, end = read.ids[end : end + length].tobytes(), end + length
        assert length <= CHUNK
        assert record >= 0 or not length
        if length:
            assert first not in parts.setdefault(record, {}), "a chunk is in two slots"
            parts[record][first] = content
    return [
        b"".join(parts.get(record, {})[at] for at in sorted(parts.get(record, {})))
        for record in range(len(TEXTS))
    ]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__.removeprefix("write_"))
def test_each_chunk_is_in_one_slot_of_each_epoch(
    write: Callable[[Path, Sequence[str]], Path], tmp_path: Path
) -> None:
    (tmp_path / "files").mkdir()
    source = stream(write(tmp_path / "files", [text or " " for text in TEXTS]), tmp_path)
    want = [b"\0" + (text or " ").encode() + b"\0" for text in TEXTS]
    for epoch in range(2):
        assert Counter(documents_of_epoch(source, epoch)) == Counter(want)
    orders = [
        source.locate(np.arange(len(source)) + epoch * len(source)).record.tolist() for epoch in range(2)
    ]
    assert orders[0] != orders[1]


def test_each_chunk_of_a_prepared_source_is_in_one_slot_of_each_epoch(tmp_path: Path) -> None:
    """Document lengths are known to the token, so every chunk but the last of a document is full."""
    (tmp_path / "files").mkdir()
    path = WRITERS[1](tmp_path / "files", TEXTS)
    source = prepared(path, tmp_path)
    assert isinstance(source.order, PreparedChunks)
    want = [b"\0" + text.encode() + b"\0" if text else b"" for text in TEXTS]
    for epoch in range(2):
        assert documents_of_epoch(source, epoch) == want
    numbers = np.arange(len(source))
    assert source.lengths(numbers).tolist() == source.read(numbers).lengths.tolist()
    full = sum(-(-len(text) // CHUNK) for text in want)
    assert np.count_nonzero(source.lengths(numbers)) == full


def test_chunks_may_be_read_one_by_one_and_in_any_order(tmp_path: Path) -> None:
    """The order must not depend on which process reads which chunks when, nor on what it has read before."""
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "a.parquet", row_group_size=10)
    source = stream(tmp_path / "a.parquet", tmp_path, window_bytes=1 << 12)
    assert isinstance(source.order, WindowedChunks)
    numbers = np.random.default_rng(0).permutation(2 * len(source))
    together = source.read(numbers)
    starts = np.cumsum(together.lengths) - together.lengths
    for i in range(0, len(numbers), 41):
        alone = stream(tmp_path / "a.parquet", tmp_path, window_bytes=1 << 12).read(numbers[i : i + 1])
        assert alone.ids.tolist() == together.ids[starts[i] : starts[i] + together.lengths[i]].tolist()


def test_a_window_touches_few_row_groups_and_mixes_them(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"text": ["x" * 200] * 1000}),
        tmp_path / "a.parquet",
        row_group_size=50,
        use_dictionary=False,
    )
    source = stream(tmp_path / "a.parquet", tmp_path, window_bytes=5 * 50 * 200)
    records = source.locate(np.arange(len(source))).record
    group = (records // 50)[records >= 0]
    runs = [len(set(run.tolist())) for run in np.array_split(group, 40)][:-1]
    assert max(runs) <= 10, "two neighbouring windows of at most five groups"
    assert np.median(runs) >= 3
    whole = stream(tmp_path / "a.parquet", tmp_path).locate(np.arange(200)).record
    assert np.std(whole[whole >= 0]) > 200, "what fits into one window is shuffled as a whole"


def test_text_that_was_compressed_more_than_its_slots_allow_is_all_there(tmp_path: Path) -> None:
    """A column of few different texts is stored as a dictionary, a hundredth of its text."""
    texts = [letter * 3000 for letter in "ab"] * 100
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    source = stream(tmp_path / "a.parquet", tmp_path)
    numbers = np.arange(len(source))
    chunks, read = source.locate(numbers), source.read(numbers)
    assert int(chunks.num.max()) > 1, "a slot holds several chunks here"
    assert int(read.lengths.sum()) == 200 * 3002


def test_documents_of_a_step_are_as_good_as_drawn_at_random(tmp_path: Path) -> None:
    """Forty long documents: neighbouring chunks are of one document as often as chance has it, and no
    more.
    """
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{i % 10}{"x" * 9000}"}}\n' for i in range(40)))
    source = stream(tmp_path / "a.jsonl", tmp_path)
    assert isinstance(source.order, SizedChunks)
    records = source.locate(np.arange(5000)).record
    same = [float((records[lag:] == records[:-lag]).mean()) for lag in (1, 10, 100)]
    np.testing.assert_allclose(same, 1 / 40, atol=0.01)


def test_words_are_cut_between_two_words_where_a_tokenizer_makes_them(
    tmp_path: Path, tokenizer_json: Path
) -> None:
    words = [f"w{i}" for i in range(4000)]
    (tmp_path / "a.txt").write_text(" ".join(words))
    source = stream(tmp_path / "a.txt", tmp_path, tokenizer=str(tokenizer_json))
    chunks = source.chunks_of(np.asarray([0]))
    read = source.read_chunks(chunks)
    ends = np.cumsum(read.lengths)
    texts = [source.tokenizer.decode(ids.tolist()) for ids in np.split(read.ids, ends[:-1]) if len(ids)]
    assert len(texts) > 20
    assert all(text.strip().split()[-1] in words for text in texts)
    assert "".join(texts).split() == words
    assert np.median(read.lengths[read.lengths > 0]) <= CHUNK * 1.05
