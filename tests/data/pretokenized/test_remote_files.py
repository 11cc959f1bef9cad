"""Prepared indexes in an object store: the same ids as on the local disk, by byte ranges, with pages kept
locally.
"""

import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jtrain.data.pretokenized import index_format, remote_files
from jtrain.data.pretokenized.reader import PreparedIndex
from jtrain.errors import FileError
from tests.data.pretokenized.test_reader import NUM_DOCUMENTS, make
from tests.data.sources.object_store import Store, s3_store, web_store


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> PreparedIndex:
    """Index on the local disk, which the stores serve."""
    return PreparedIndex(make(tmp_path_factory.mktemp("prepared")))


def upload(local: PreparedIndex, store: Store) -> str:
    """Puts the index into a store as `prepared/web`; returns its URL."""
    for path in Path(local.location).iterdir():
        store.files[f"prepared/web/{path.name}"] = path.read_bytes()
    store.files["prepared/command.txt"] = b"prepare!"
    store.requests.clear()
    return f"{store.url}/prepared/web"


@pytest.fixture
def store() -> Iterator[Store]:
    with web_store() as store:
        yield store


def gets(store: Store, name: str) -> list[tuple[int, int]]:
    """First and last byte of each range of a file that was asked for since the last call."""
    ranges = [r.range for r in store.requests if r.method == "GET" and r.path.endswith(name)]
    assert None not in ranges, "no file may be fetched whole"
    store.requests.clear()
    bounds = [r.removeprefix("bytes=").partition("-") for r in ranges if r]
    return sorted((int(first), int(last)) for first, _, last in bounds)


def assert_same(index: PreparedIndex, local: PreparedIndex) -> None:
    """Compares all that a run reads, in an order that is not that of the file."""
    records = np.random.default_rng(0).permutation(NUM_DOCUMENTS)
    lengths, ids = index.read(records)
    want_lengths, want = local.read(records)
    np.testing.assert_array_equal(lengths, want_lengths)
    np.testing.assert_array_equal(ids, want)
    assert ids.dtype == want.dtype
    starts, ends = lengths // 3, lengths - lengths // 4
    np.testing.assert_array_equal(
        index.read_spans(records, starts, ends), local.read_spans(records, starts, ends)
    )
    blocks = np.arange(local.num_blocks + 1)[::-1]
    np.testing.assert_array_equal(index.token_starts(blocks), local.token_starts(blocks))
    assert (index.names, index.file_ends.tolist()) == (local.names, local.file_ends.tolist())
    assert index.made_of == local.made_of
    assert index.name == "web"


def test_an_index_behind_a_url_is_read_by_ranges(store: Store, local: PreparedIndex, tmp_path: Path) -> None:
    url = upload(local, store)
    index = PreparedIndex(url, cache_dir=tmp_path)
    fetched = {r.path.rpartition("/")[2] for r in store.requests if r.method == "GET"}
    assert fetched == {index_format.INDEX}, "opening reads no table"
    assert_same(index, local)
    assert_same(pickle.loads(pickle.dumps(index)), local)
    assert index.verify() == []


def test_an_index_in_a_bucket_is_read(
    monkeypatch: pytest.MonkeyPatch, local: PreparedIndex, tmp_path: Path
) -> None:
    with s3_store(monkeypatch) as store:
        assert_same(PreparedIndex(upload(local, store), cache_dir=tmp_path), local)


def test_spans_near_each_other_share_a_request(
    store: Store, local: PreparedIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = PreparedIndex(upload(local, store), cache_dir=tmp_path)
    index.read(np.asarray([79, 0, 40]))
    assert len(gets(store, index_format.IDS)) == 1
    monkeypatch.setattr(remote_files, "GAP_BYTES", 8)
    index.read(np.asarray([79, 0, 41, 40]))
    assert len(gets(store, index_format.IDS)) == 3, "40 and 41 lie beside each other"
    monkeypatch.setattr(remote_files, "REQUEST_BYTES", 100)
    _, ids = index.read(np.asarray([0, 1, 2]))
    parts = gets(store, index_format.IDS)
    assert len(parts) == -(-len(ids) // 100) > 3
    assert [end + 1 for _, end in parts[:-1]] == [start for start, _ in parts[1:]]
    np.testing.assert_array_equal(ids, local.read(np.asarray([0, 1, 2]))[1])


def test_a_page_of_lengths_is_fetched_once_per_host(
    store: Store, local: PreparedIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of 64 bytes make several of this small index."""
    monkeypatch.setattr(remote_files, "PAGE_BYTES", 64)
    url = upload(local, store)
    index = PreparedIndex(url, cache_dir=tmp_path)
    index.lengths(np.asarray([20, 21]))
    assert gets(store, index_format.LENGTHS) == [(64, 127)]
    index.lengths(np.asarray([30]))
    assert gets(store, index_format.LENGTHS) == []
    other = PreparedIndex(url, cache_dir=tmp_path)
    np.testing.assert_array_equal(other.lengths(np.arange(16, 32)), local.lengths(np.arange(16, 32)))
    assert gets(store, index_format.LENGTHS) == []
    [copy] = tmp_path.rglob(index_format.LENGTHS)
    content = bytearray(copy.read_bytes())
    content[70] ^= 1
    copy.write_bytes(content)
    third = PreparedIndex(url, cache_dir=tmp_path)
    assert_same(third, local)
    assert (64, 127) in [
        (a, a + 63) for first, last in gets(store, index_format.LENGTHS) for a in range(first, last, 64)
    ]


def test_an_index_that_was_made_again_uses_no_old_page(
    store: Store, local: PreparedIndex, tmp_path: Path
) -> None:
    url = upload(local, store)
    PreparedIndex(url, cache_dir=tmp_path).lengths(np.arange(16))
    other = PreparedIndex(make(tmp_path / "other", lines=['{"text": "other"}'] * NUM_DOCUMENTS))
    assert PreparedIndex(upload(other, store), cache_dir=tmp_path).lengths(np.arange(16)).tolist() == [7] * 16


def test_opening_takes_as_many_requests_for_a_large_index(
    store: Store, local: PreparedIndex, tmp_path: Path
) -> None:
    """An index of 4 million empty records: its lengths take 18 MB, of which two pages are fetched."""
    url = upload(local, store)
    PreparedIndex(url, cache_dir=tmp_path)
    few = len(store.requests)
    body = json.loads((Path(local.location) / index_format.INDEX).read_text())
    del body["digest"]
    body["records"] = 1 << 22
    body["bytes"][index_format.LENGTHS] = (1 << 22) * 4 + (1 << 18) * 8 + 8
    store.files[f"prepared/web/{index_format.LENGTHS}"] = bytes(body["bytes"][index_format.LENGTHS])
    store.files[f"prepared/web/{index_format.INDEX}"] = index_format.sign(body).encode()
    store.requests.clear()
    index = PreparedIndex(url, cache_dir=tmp_path)
    assert len(store.requests) == few
    index.read(np.asarray([3_000_000]))
    assert (
        sum(last + 1 - first for first, last in gets(store, index_format.LENGTHS))
        == 2 * remote_files.PAGE_BYTES
    )


def test_a_store_that_sends_no_ranges_is_refused(store: Store, local: PreparedIndex, tmp_path: Path) -> None:
    url = upload(local, store)
    store.ranges = False
    index = PreparedIndex(url, cache_dir=tmp_path)
    with pytest.raises(
        FileError, match=r"ids\.bin: asked for [\d,]+ bytes, the server sent [\d,]+, so it cannot send"
    ):
        index.read(np.asarray([2]))


def test_a_cache_folder_that_cannot_be_written_is_named(
    store: Store, local: PreparedIndex, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    index = PreparedIndex(upload(local, store), cache_dir=tmp_path / "file")
    with pytest.raises(
        FileError, match=r"lengths\.bin, up to 0 MiB, cannot be written to .* or set data\.cache_dir"
    ):
        index.lengths(np.asarray([0]))
    assert PreparedIndex(f"{store.url}/prepared/web", cache_dir=tmp_path / "ok").lengths(
        np.asarray([0])
    ).shape == (1,)


def test_a_damaged_or_missing_remote_index_is_one_message(
    store: Store, local: PreparedIndex, tmp_path: Path
) -> None:
    url = upload(local, store)
    store.files["prepared/web/ids.bin"] = store.files["prepared/web/ids.bin"][:-1]
    with pytest.raises(
        ValueError, match=r"ids\.bin has \d+ bytes, \d+ were written\. Copy it there again, .*: prepare!"
    ):
        PreparedIndex(url, cache_dir=tmp_path)
    with pytest.raises(FileError, match=r"prepared/nowhere/index\.json: nothing there"):
        PreparedIndex(f"{store.url}/prepared/nowhere", cache_dir=tmp_path)
