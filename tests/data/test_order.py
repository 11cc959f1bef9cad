from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jtrain.data import order
from jtrain.data.formats import ParquetFile
from jtrain.data.order import WindowedOrder, shuffled
from jtrain.data.source import Corpus


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """Two Parquet files of 6 row groups of 50 rows, about 5 KB each, with a text file between them."""
    rng = np.random.default_rng(0)
    for name in ("a", "c"):
        texts = [f"{name}{i} " + "".join(rng.choice(list("abcdefgh"), 100)) for i in range(300)]
        pq.write_table(pa.table({"text": texts}), tmp_path / f"{name}.parquet", row_group_size=50)
    (tmp_path / "b.txt").write_text("a document that is read on its own")
    return Corpus(str(tmp_path), text_field="text", text_piece_bytes=1000)


def test_each_windowed_epoch_is_another_permutation(corpus: Corpus) -> None:
    records = np.flatnonzero(np.arange(len(corpus)) % 9)  # a split leaves holes
    endless = WindowedOrder(records, corpus, seed=3, window_bytes=20_000)
    again = WindowedOrder(records, corpus, seed=3, window_bytes=20_000)
    other = WindowedOrder(records, corpus, seed=4, window_bytes=20_000)
    n = len(records)
    epochs = [[endless[e * n + i] for i in range(n)] for e in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == records.tolist()
    assert len({tuple(epoch) for epoch in [*epochs, records.tolist(), [other[i] for i in range(n)]]}) == 5
    assert [again[n + i] for i in range(n)] == epochs[1]


def test_a_window_touches_few_row_groups_and_mixes_them(corpus: Corpus) -> None:
    records = np.arange(len(corpus))
    endless = WindowedOrder(records, corpus, seed=3, window_bytes=20_000)
    group = np.searchsorted(corpus.group_starts, [endless[i] for i in range(len(records))], side="right")
    runs = [len(set(group[i : i + 50].tolist())) for i in range(0, 550, 50)]
    assert max(runs) <= 10, "two neighbouring windows of at most five groups"
    assert min(runs) >= 2


def test_parquet_beyond_the_cache_is_shuffled_in_windows_and_anything_else_globally(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts row groups decoded: a global shuffle through a small cache decodes one per record."""
    decoded = []
    files = [file for file in corpus._records if isinstance(file, ParquetFile)]
    for file in files:
        read = file._read_group
        monkeypatch.setattr(file, "_read_group", lambda g, read=read: (decoded.append(g), read(g))[1])
    n = len(corpus)
    everywhere = shuffled(np.arange(n), corpus, seed=0)
    assert sorted(everywhere[i] for i in range(n)) == list(range(n))
    assert np.std([everywhere[i] for i in range(50)]) > n / 8, "the first records come from all over"

    monkeypatch.setattr(order, "ROW_GROUP_CACHE_BYTES", 50_000)
    for file in files:
        file._cache._max_bytes = 50_000
    counts = []
    for documents in (shuffled(np.arange(n), corpus, seed=0), everywhere):
        decoded.clear()
        assert len({corpus[documents[i]] for i in range(n)}) == n
        counts.append(len(decoded))
    assert counts[0] <= 16
    assert counts[1] > 100
