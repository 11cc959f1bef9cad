"""Files of object stores and web servers: found, opened, read by range, and refused with the way out."""

import contextlib
import gzip
import io
import re
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jtrain.data.sources.cache import local_copy
from jtrain.errors import FileError
from tests.data.sources.object_store import Store, gs_store, hf_store, s3_store, web_store
from tests.data.sources.test_storage import FIELD, every, find, open_corpus

STORES: dict[str, Callable[[pytest.MonkeyPatch], contextlib.AbstractContextManager[Store]]] = {
    "s3": s3_store,
    "gs": gs_store,
    "hf": hf_store,
    "http": lambda _: web_store(),
}


@pytest.fixture(params=["s3", "gs", "hf"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with STORES[request.param](monkeypatch) as store:
        yield store


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with web_store() as store:
        yield store


def parquet_bytes(texts: list[str], **columns: list[Any]) -> bytes:
    out = io.BytesIO()
    options = {"row_group_size": 50, "compression": "none", "use_dictionary": False}
    pq.write_table(pa.table({"text": texts, **columns}), out, **options)
    return out.getvalue()


def tar_bytes(texts: list[str]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for i, text in enumerate(texts):
            info = tarfile.TarInfo(f"{i}.text")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return out.getvalue()


def test_an_object_store_gives_every_format_under_the_names_of_the_same_folder_here(
    store: Store, tmp_path: Path
) -> None:
    """Files, names, records and the held-out split equal those of a local copy."""
    contents = {
        "a/deep/one.txt": b"one",
        "a/lines.jsonl.gz": gzip.compress(b'{"text": "two"}\n{"text": "three"}\n'),
        "a/lines.jsonl.zst": pa.compress(b'{"text": "four"}\n', codec="zstd", asbytes=True),
        "a/rows.parquet": parquet_bytes(["five", "six"]),
        "a/samples.tar": tar_bytes(["seven", "eight"]),
    }
    for name, content in {**contents, "a/.hidden": b"no", "beside.txt": b"no"}.items():
        store.files[name] = content
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    here = open_corpus(tmp_path / "a", tmp_path / "cache")
    for pattern in ("a", "a/", "a/**"):
        there = open_corpus(f"{store.url}/{pattern}", tmp_path / "cache")
        assert list(there.names) == list(here.names)
        assert every(there) == every(here) == ["one", "two", "three", "four", "five", "six", "seven", "eight"]
        assert there.fingerprint() == here.fingerprint()
    assert every(open_corpus(f"{store.url}/a/rows.parquet", tmp_path / "cache")) == ["five", "six"]
    assert every(open_corpus(f"{store.url}/a/*.tar", tmp_path / "cache")) == ["seven", "eight"]


def test_what_a_store_does_not_hold_is_named(store: Store, tmp_path: Path) -> None:
    store.files["a/one.txt"] = b"one"
    for path in ("nowhere", "a/two.txt", "a/*.parquet"):
        url = f"{store.url}/{path}"
        with pytest.raises(FileError, match=rf"{FIELD}='{re.escape(url)}': nothing there"):
            find(url)


@pytest.mark.usefixtures("no_waits")
def test_a_remote_file_that_vanishes_or_shrinks_during_a_run_is_named(store: Store, tmp_path: Path) -> None:
    texts = [f"{i} " * 300 for i in range(100)]
    store.files["rows.parquet"] = parquet_bytes(texts)
    corpus = open_corpus(f"{store.url}/rows.parquet", tmp_path)
    assert corpus[99] == texts[99]
    corpus.close()
    store.files["rows.parquet"] = store.files["rows.parquet"][:20_000]
    with pytest.raises(OSError, match=r"rows\.parquet: "):
        corpus[99]
    del store.files["rows.parquet"]
    with pytest.raises(FileError, match=r"rows\.parquet: nothing there"):
        corpus[0]


@pytest.mark.parametrize("scheme", ["gs", "hf", "http"])
@pytest.mark.parametrize("status", [401, 403])
def test_a_store_that_refuses_asks_for_credentials(
    scheme: str, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with STORES[scheme](monkeypatch) as store:
        store.files["a.txt"] = b"one"
        store.refuse = status
        with pytest.raises(FileError, match=rf"{FIELD}='.*a\.txt': the store refuses .*credentials"):
            find(f"{store.url}/a.txt")


def test_s3_without_credentials_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with s3_store(monkeypatch) as store:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
        with pytest.raises(
            FileError, match=rf"{FIELD}='s3://corpus/a\.txt': the store refuses .*credentials"
        ):
            find(f"{store.url}/a.txt")


def test_a_remote_file_of_which_only_a_part_arrives_is_no_copy(web: Store, tmp_path: Path) -> None:
    web.files["a.txt"] = b"x" * 1000
    [file] = find(f"{web.url}/a.txt")
    web.files["a.txt"] = b"x" * 400
    with pytest.raises(OSError, match=r"a\.txt: 400 of 1,000 bytes arrived"):
        local_copy(file, compression=None, cache_dir=tmp_path)
    assert not [path for path in (tmp_path / "files").iterdir() if path.suffix != ".lock"]


@pytest.mark.usefixtures("no_waits")
def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    with web_store() as store:
        url = f"{store.url}/a.txt"
    with pytest.raises(
        OSError, match=rf"{FIELD}='{url}': \[Errno 111\] Connect call failed.* 6 tries .*store is back"
    ):
        find(url)


def test_remote_parquet_is_read_by_footer_and_column(web: Store, tmp_path: Path) -> None:
    """Of a 4 MB file, opening fetches the end, and reading a row fetches the text of its row group."""
    texts = [f"{i:03} " * 100 for i in range(200)]
    web.files["rows.parquet"] = parquet_bytes(texts, image=["\x01" * 20_000] * 200)
    size = len(web.files["rows.parquet"])
    assert size > 4_000_000
    corpus = open_corpus(f"{web.url}/rows.parquet", tmp_path)
    assert not any(tmp_path.iterdir())

    def asked() -> int:
        ranges = [
            request.range.removeprefix("bytes=").split("-") for request in web.requests if request.range
        ]
        assert len(ranges) == len([request for request in web.requests if request.method == "GET"])
        return sum(int(last) - int(first) + 1 for first, last in ranges)

    assert 0 < asked() <= 1 << 16
    web.requests.clear()
    assert list(corpus.read(np.asarray([120, 149, 100]))) == [texts[120], texts[149], texts[100]]
    assert 50 * 400 < asked() < 50 * 430 + (1 << 16), "one column of one row group, and the footer again"


def test_a_server_that_cannot_send_ranges_is_refused_for_parquet_and_fine_for_the_rest(
    web: Store, tmp_path: Path
) -> None:
    web.ranges = False
    web.files["lines.jsonl"] = b'{"text": "one"}\n' * 10_000
    web.files["rows.parquet"] = parquet_bytes(["x" * 1000] * 200)
    assert len(open_corpus(f"{web.url}/lines.jsonl?key=1", tmp_path)) == 10_000
    with pytest.raises(OSError, match=r"rows\.parquet: asked for bytes .*the server cannot send ranges"):
        open_corpus(f"{web.url}/rows.parquet", tmp_path)


def test_many_remote_files_are_opened_together(
    web: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Sixteen files are opened at a time; they are numbered by name, whichever opens first."""
    with gs_store(monkeypatch) as store:
        for i in range(40):
            store.files[f"{i:02}.parquet"] = parquet_bytes([f"text {i}"])
        assert every(open_corpus(f"{store.url}/*.parquet", tmp_path)) == [f"text {i}" for i in range(40)]
