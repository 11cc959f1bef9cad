import contextlib
import gzip
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from jtrain.data.sources.cache import local_copy, write_once
from jtrain.data.sources.corpus import Corpus
from jtrain.data.sources.source import Source
from jtrain.data.sources.storage import StoredFile, find_files
from jtrain.errors import FileError
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
