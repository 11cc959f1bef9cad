"""Content that is not of its file's format is refused when the source is opened."""

import gzip
import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jtrain.data.sources.corpus import Corpus
from jtrain.data.sources.formats import BadRecord
from jtrain.data.sources.source import Source
from jtrain.errors import UserError

Open = Callable[..., Corpus]


@pytest.fixture
def open_file(tmp_path: Path) -> Open:
    def open_file(name: str, content: bytes, **fields: Any) -> Corpus:
        (tmp_path / name).write_bytes(content)
        return Corpus(Source(path=str(tmp_path / name), **fields), name="web", cache_dir=tmp_path / "cache")

    return open_file


def parquet() -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"text": ["one"]}), out)
    return out.getvalue()


def tar() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.text"))
    return out.getvalue()


GOOD = b'{"text": "one"}\n'
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.txt",
            gzip.compress(b"one"),
            r"read as text, but it begins like gzip .*end in \.gz, behind the suffix",
        ),
        ("a.txt", pa.compress(b"one", codec="zstd", asbytes=True), r"begins like zstd .*end in \.zst"),
        ("a.txt", parquet(), r"begins like Parquet \(b'PAR1.*Name it \.parquet"),
        ("a.txt", tar(), r"begins like tar .*Name it \.tar"),
        ("a.txt", b"%PDF-1.7\n", r"begins like PDF .*Extract its text first"),
        (
            "a.txt",
            b"PK\x03\x04docx",
            r"begins like zip .*Decompress it, or leave it out of data\.sources\.web\.path",
        ),
        ("a.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", r"begins like binary data .*Convert it to text"),
        (
            "a.csv",
            "text\none\n".encode("utf-16"),
            r"read as csv, but it begins like UTF-16 text .*Convert it to UTF-8",
        ),
        ("a.jsonl", POINTER, r"read as jsonl, but it begins like a Git LFS pointer .*git lfs pull"),
        (
            "a.jsonl",
            b'[\n{"text": "one"}]',
            r"read as jsonl, but it begins like a JSON array .*Name it \.json",
        ),
        ("a.parquet", POINTER, r"read as parquet, but it begins like a Git LFS pointer"),
        (
            "a.json",
            b"\n<!DOCTYPE html><html>",
            r"read as json, but it begins like an HTML page .*Download it again",
        ),
        ("a.jsonl.gz", gzip.compress(gzip.compress(GOOD)), r"read as jsonl, but it begins like gzip"),
        ("a.jsonl.gz", GOOD, r"not a whole gzip file: it begins with b'\{\"text.*drop \.gz from its name"),
        (
            "a.jsonl.zst",
            POINTER,
            r"not a whole zstd file: it begins like a Git LFS pointer with .*git lfs pull",
        ),
        ("a.tar", GOOD * 99, r"not a whole tar file"),
        ("a.arrayrecord", GOOD * 99, r"not a whole ArrayRecord file"),
    ],
    ids=[
        "gzip",
        "zstd",
        "parquet",
        "tar",
        "pdf",
        "zip",
        "png",
        "utf16",
        "pointer",
        "array",
        "parquet-pointer",
        "page",
        "gzip-twice",
        "no-gzip",
        "zstd-pointer",
        "no-tar",
        "no-arrayrecord",
    ],
)
def test_content_of_another_format_is_refused(
    name: str, content: bytes, message: str, open_file: Open
) -> None:
    with pytest.raises(UserError, match=rf"{name}: .*{message}") as found:
        open_file(name, content)
    assert not isinstance(found.value, BadRecord), "data.on_bad_record must not silence it"


def test_the_ways_out_of_a_wrong_suffix_work(open_file: Open) -> None:
    assert open_file("a.txt.gz", gzip.compress(b"one"))[0] == "one"
    assert open_file("a.parquet", parquet())[0] == "one"
    assert open_file("a.jsonl", GOOD)[0] == "one"
    assert open_file("a.json", b'[\n{"text": "one"}]')[0] == "one"
    assert open_file("a.html", b"<!doctype html><html>")[0] == "<!doctype html><html>", (
        "a page is text where it says so"
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"id,text\n1,one\n", r"a\.jsonl, line 1: no JSON: .*Mend the line\.$"),
        ("a.jsonl", b'{"body": "one"}\n' * 20, r"a\.jsonl, line 1: no field 'text'; its fields: 'body'"),
        ("a.json", b'[{"body": "one"}]', r"a\.json, record 0 \(at byte 1\): no field 'text'"),
        ("a.csv", b"text\na,b\nc,d\n", r"a\.csv, record 0 \(at byte 5\): 2 fields, but the header names 1"),
        ("a.txt", b"caf\xe9", r"a\.txt: not UTF-8 at byte 3 .*Convert the file to UTF-8, leave it out\.$"),
    ],
    ids=["csv", "field", "json", "columns", "latin1"],
)
def test_a_source_without_a_good_first_record_is_refused(
    name: str, content: bytes, message: str, open_file: Open
) -> None:
    with pytest.raises(
        UserError, match=rf"data\.sources\.web\.path='.*{name}': none of the first .*{message}"
    ) as found:
        open_file(name, content)
    assert "text_field='text' is wrong" in str(found.value)
    assert "skip" not in str(found.value)


def test_bad_records_among_good_ones_are_left_to_on_bad_record(open_file: Open, tmp_path: Path) -> None:
    corpus = open_file("a.jsonl", b"cut\n" * 7 + GOOD)
    assert [isinstance(text, BadRecord) for text in corpus.read(np.arange(8))] == [True] * 7 + [False]
    for name in ("b.jsonl", "c.jsonl"):
        (tmp_path / name).write_bytes(b"cut\n" * 20)
    with pytest.raises(UserError, match="none of the first 8 records tried in 1 of its 1 files"):
        open_file("b.jsonl", b"cut\n" * 20)
    corpus = Corpus(Source(path=str(tmp_path / "*.jsonl")), name="web", cache_dir=tmp_path / "cache")
    assert len(corpus) == 48, "one good file is enough"
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(UserError, match="none of the first 16 records tried in 2 of its 2 files"):
        Corpus(Source(path=str(tmp_path / "*.jsonl")), name="web", cache_dir=tmp_path / "cache")


def test_a_column_of_parquet_may_begin_with_nulls(open_file: Open) -> None:
    """Its type was checked when the file was opened."""
    out = io.BytesIO()
    pq.write_table(pa.table({"text": pa.array([None] * 20 + ["one"], pa.string())}), out)
    assert open_file("a.parquet", out.getvalue())[20] == "one"


def test_of_many_files_a_spread_is_checked(tmp_path: Path) -> None:
    """With 512 files every second one is: opening 100,000 small files for this would take seconds."""
    for i in range(512):
        (tmp_path / f"{i:03}.txt").write_bytes(b"one")
    (tmp_path / "011.txt").write_bytes(b"PK\x03\x04\xff")
    corpus = Corpus(Source(path=str(tmp_path)), name="web", cache_dir=tmp_path)
    assert isinstance(next(corpus.read(np.asarray([11]))), BadRecord), "it is found when it is read"
    (tmp_path / "010.txt").write_bytes(b"PK\x03\x04\xff")
    with pytest.raises(UserError, match=r"010\.txt: read as text, but it begins like zip"):
        Corpus(Source(path=str(tmp_path)), name="web", cache_dir=tmp_path)
