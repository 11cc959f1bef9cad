import contextlib
import gzip
import io
import json
import os
import re
import shutil
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jtrain.data.sources.cache import local_copy, write_once
from jtrain.data.sources.corpus import Corpus
from jtrain.data.sources.source import Source
from jtrain.data.sources.storage import StoredFile, find_files
from jtrain.errors import FileError
from tests.data.sources.object_store import Store, gs_store, hf_store, s3_store, web_store
from tests.processes import program, run_together

FIELD = "data.sources.web.path"


def find(path: Path | str) -> list[StoredFile]:
    return find_files(str(path), field=FIELD)


def open_corpus(path: Path | str, cache_dir: Path, **fields: Any) -> Corpus:
    return Corpus(Source(path=str(path), **fields), name="web", cache_dir=cache_dir)


def every(corpus: Corpus) -> list[Any]:
    return list(corpus.read(np.arange(len(corpus))))


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Drops root's right to read everything, with which the permission tests could not fail."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Folder that other users may enter, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for path in folder.rglob("*"):
        path.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.parametrize("path", ["nowhere", "nowhere/*.txt", "no?where"])
def test_a_missing_path_names_the_field_and_what_was_looked_for(path: str, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=rf"{FIELD}='.*where.*nothing there; looked for .*where"):
        find(tmp_path / path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=rf"{FIELD}=.*looked for any file that is not hidden, below"):
        find(tmp_path)


def test_a_dangling_link_and_what_is_no_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone")
    for path in (tmp_path, tmp_path / "*.txt"):
        with pytest.raises(OSError, match=rf"{FIELD}=.*b\.txt cannot be read \(No such file or directory\)"):
            find(path)
    (tmp_path / "b.txt").unlink()
    os.mkfifo(tmp_path / "b.txt")  # opening it would wait for a writer
    with pytest.raises(FileError, match=rf"{FIELD}=.*b\.txt cannot be read \(it is not a regular file\)"):
        find(tmp_path)


def test_what_may_not_be_read_is_named_and_never_left_out_in_silence(open_folder: Path) -> None:
    (open_folder / "a.txt").write_text("x")
    (open_folder / "locked.txt").write_text("x")
    (open_folder / "locked.txt").chmod(0)
    with (
        unprivileged(),
        pytest.raises(FileError, match=rf"{FIELD}=.*locked\.txt cannot be read \(Permission"),
    ):
        find(open_folder)
    (open_folder / "locked.txt").unlink()
    (open_folder / "locked").mkdir()
    (open_folder / "locked" / "b.txt").write_text("x")
    (open_folder / "locked").chmod(0)
    with unprivileged():
        with pytest.raises(FileError, match=rf"{FIELD}: the folder .*locked cannot be read \(Permission"):
            find(open_folder)
        with pytest.raises(FileError, match=rf"{FIELD}=.*locked/b\.txt' cannot be reached"):
            find(open_folder / "locked" / "b.txt")


def test_a_file_that_is_shut_during_a_run_is_named(open_folder: Path) -> None:
    (open_folder / "a.txt").write_text("x")
    with unprivileged():
        corpus = open_corpus(open_folder, open_folder)
        assert corpus[0] == "x"
    (open_folder / "a.txt").chmod(0)
    with (
        unprivileged(),
        pytest.raises(FileError, match=r"a\.txt: may no longer be read \(Permission denied\)"),
    ):
        corpus[0]


def test_a_file_whose_folder_became_something_else_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text("x")
    corpus = open_corpus(tmp_path / "folder", tmp_path)
    shutil.rmtree(tmp_path / "folder")
    (tmp_path / "folder").write_text("")
    with pytest.raises(OSError, match=r"folder/a\.txt: cannot be opened \(Not a directory\)"):
        corpus[0]


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(
        ValueError, match=rf"{FIELD}='nope://a/b': no reader for nope:// .*Use s3://, gs://, hf://"
    ):
        find("nope://a/b")


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [("s3://a/b", "s3fs", "s3"), ("gs://a/b", "gcsfs", "gs"), ("https://localhost/b", "aiohttp", "http")],
)
def test_a_missing_package_says_which_extra_brings_it(url: str, package: str, extra: str) -> None:
    [ended] = run_together([program(__file__, "find_without", package, url, FIELD)], [{}])
    said = ended.errors.splitlines()[-1]
    scheme = url.partition(":")[0]
    assert said.startswith(
        f"jtrain_kernels.errors.UserError: {FIELD}='{url}': the reader of {scheme}:// is not installed ("
    ), said
    assert said.endswith(f"Run pip install 'jtrain[{extra}]'."), said


# Copies in the cache


@pytest.mark.parametrize("codec", ["gz", "zst"])
@pytest.mark.parametrize("damage", ["cut", "corrupt"])
def test_a_compressed_file_that_is_cut_short_or_corrupt_is_refused(
    codec: str, damage: str, tmp_path: Path
) -> None:
    content = "".join(json.dumps({"text": f"{i * i}"}) + "\n" for i in range(20_000)).encode()
    packed = gzip.compress(content) if codec == "gz" else pa.compress(content, codec="zstd", asbytes=True)
    half = len(packed) // 2
    path = tmp_path / f"a.jsonl.{codec}"
    path.write_bytes(packed[:half] if damage == "cut" else packed[:half] + bytes(40) + packed[half + 40 :])
    with pytest.raises(
        OSError, match=rf"a\.jsonl\.{codec}: not a whole (gzip|zstd) file .*cut short or corrupt"
    ):
        open_corpus(path, tmp_path / "cache")
    assert not [f for f in (tmp_path / "cache" / "files").iterdir() if f.suffix != ".lock"], (
        "no half copy stays"
    )
    path.write_bytes(packed)
    assert open_corpus(path, tmp_path / "cache")[19_999] == str(19_999**2)


def test_a_copy_is_made_once_and_anew_when_the_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"one"))
    first = local_copy(find(path)[0], compression="gzip", cache_dir=tmp_path / "cache")
    again = local_copy(find(path)[0], compression="gzip", cache_dir=tmp_path / "cache")
    assert first == again
    assert (first.name, first.label) == ("a.txt.gz", str(path)), (
        "messages and identity are of the file, not its copy"
    )
    path.write_bytes(gzip.compress(b"two"))
    os.utime(path, ns=(0, 1))
    changed = local_copy(find(path)[0], compression="gzip", cache_dir=tmp_path / "cache")
    assert Path(first.location).read_bytes() == b"one"
    assert Path(changed.location).read_bytes() == b"two"


def test_one_writer_makes_a_copy_while_the_others_wait_and_a_dead_one_leaves_no_half(tmp_path: Path) -> None:
    path, writes = tmp_path / "cache" / "a", []

    def write(out: Any) -> None:
        writes.append(1)
        out.write(b"whole")
        time.sleep(0.2)

    threads = [
        threading.Thread(target=write_once, args=(path, write), kwargs={"label": "a"}) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(writes), path.read_bytes()) == (1, b"whole")

    [ended] = run_together([program(__file__, "die_writing", f"{path}2")], [{}])
    assert ended.code == -9
    assert Path(f"{path}2.tmp").read_bytes() == b"ha"
    assert write_once(Path(f"{path}2"), write, label="a").read_bytes() == b"whole"
    assert not Path(f"{path}2.tmp").exists()


def test_a_cache_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut, an empty file under the name would pass for an index of 0 records."""
    path, fsync, synced = tmp_path / "cache" / "a", os.fsync, []

    def sync(handle: int) -> None:
        fsync(handle)
        synced.append((Path(os.readlink(f"/proc/self/fd/{handle}")).read_bytes(), path.exists()))

    def write(out: Any) -> None:
        out.write(b"whole")

    monkeypatch.setattr(os, "fsync", sync)
    write_once(path, write, label="a")
    assert synced == [(b"whole", False)]


def test_a_cache_folder_that_is_full_or_no_folder_says_what_to_set(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"one" * 100_000))
    [file] = find(path)
    (tmp_path / "cache" / "files").mkdir(parents=True)
    (tmp_path / "cache" / "files" / f"{file.key}-a.txt.gz.tmp").symlink_to("/dev/full")
    with pytest.raises(
        OSError, match=r"a\.txt\.gz: its copy .* cannot be written to .*No space left.*data\.cache_dir"
    ):
        local_copy(file, compression="gzip", cache_dir=tmp_path / "cache")
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", Path("/proc/nowhere"), tmp_path / ("x" * 300)):
        with pytest.raises(
            FileError, match=r"a\.txt\.gz: its copy .* cannot be written to .*data\.cache_dir"
        ):
            local_copy(file, compression="gzip", cache_dir=folder)
    assert local_copy(file, compression="gzip", cache_dir=tmp_path / "other").size_bytes == 300_000


# Object stores

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
