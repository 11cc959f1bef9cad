import io
import os
import re
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jtrain.data.sources.corpus import Corpus
from jtrain.data.sources.formats import BadRecord, TextFile
from jtrain.data.sources.formats.parquet import ParquetFile
from jtrain.data.sources.source import FileKeys, Source, split_positions
from jtrain.data.sources.storage import CacheLost, StoredFile
from jtrain.errors import FileError
from tests.data.descriptors import descriptors
from tests.data.writers import WRITERS, Write, write_array_record, write_csv, write_json_array, write_parquet
from tests.processes import program, run_together


@pytest.fixture(params=WRITERS, ids=lambda write: write.__name__.removeprefix("write_"))
def write(request: pytest.FixtureRequest) -> Write:
    """Writes documents to a folder in one format and returns the path that reads them in that order."""
    return request.param


@pytest.fixture
def open_corpus(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Corpus]:
    cache_dir = tmp_path_factory.mktemp("cache")

    def open_corpus(path: Path | str, **fields: Any) -> Corpus:
        return Corpus(Source(path=str(path), **fields), name="web", cache_dir=cache_dir)

    return open_corpus


def every(corpus: Corpus) -> list[str | BadRecord]:
    return list(corpus.read(np.arange(len(corpus))))


def test_every_format_reads_back_the_documents_in_order(
    write: Write, texts: list[str], tmp_path: Path, open_corpus: Callable[..., Corpus]
) -> None:
    """Reads give the same one by one, together, together in any order, and after closing."""
    corpus = open_corpus(write(tmp_path, texts))
    assert [corpus[i] for i in range(len(corpus))] == texts
    assert every(corpus) == texts
    run = np.random.default_rng(0).integers(0, len(texts), 200)
    assert list(corpus.read(run)) == [texts[i] for i in run]
    corpus.close()
    assert list(corpus.read(run)) == [texts[i] for i in run]


def test_sizes_bound_the_texts_from_above(
    write: Write, texts: list[str], tmp_path: Path, open_corpus: Callable[..., Corpus]
) -> None:
    corpus = open_corpus(write(tmp_path, texts))
    sizes = np.concatenate([corpus.sizes(first, end) for first, end in corpus.file_bounds()])
    assert (sizes >= [len(text.encode()) for text in texts]).all()
    assert sizes.sum() < 3 * sum(len(text.encode()) for text in texts), (
        "no more than escapes and other fields"
    )


def test_between_reads_no_file_is_open(
    write: Write, texts: list[str], tmp_path: Path, open_corpus: Callable[..., Corpus]
) -> None:
    write(tmp_path, texts)
    every(open_corpus(tmp_path))
    before = descriptors()
    corpora = [open_corpus(tmp_path) for _ in range(3)]
    assert [every(corpus) for corpus in corpora] == [texts] * 3
    assert descriptors() <= before


def test_a_folder_and_a_recursive_glob_mix_formats_by_suffix_and_skip_hidden_files(
    tmp_path: Path, open_corpus: Callable[..., Corpus]
) -> None:
    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b" / "lines.jsonl").write_text('{"text": "two"}\n\n{"text": "three"}')
    (tmp_path / "b" / "deep" / "c.txt").write_text("four")
    pq.write_table(pa.table({"text": ["five", "six"]}), tmp_path / "z.parquet", row_group_size=1)
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "empty.txt").write_text("")
    for path in (tmp_path, tmp_path / "**", f"file://{tmp_path}"):
        corpus = open_corpus(path)
        assert every(corpus) == ["one", "four", "two", "three", "five", "six"]
        assert list(corpus.read(np.asarray([5, 1, 4, 0, 3]))) == ["six", "four", "five", "one", "three"]
        assert corpus.identity_of(3) == "b/lines.jsonl:1"
        assert corpus.file_ends.tolist() == [1, 2, 4, 4, 6]
        assert corpus.group_starts.tolist() == [0, 1, 2, 4, 4, 5, 6]
        assert [bool(size) for size in corpus.group_bytes] == [False, False, False, False, True, True]
    assert len(open_corpus(tmp_path / "*" / "*.jsonl")) == 2


def test_the_format_can_be_said_where_the_suffix_does_not(
    tmp_path: Path, open_corpus: Callable[..., Corpus]
) -> None:
    (tmp_path / "part-0001").write_text('{"body": "one"}\n{"body": "two"}\n')
    assert every(open_corpus(tmp_path, format="jsonl", text_field="body")) == ["one", "two"]
    assert len(open_corpus(tmp_path, format="text")) == 1


def test_a_bad_record_stands_in_its_place_and_spoils_no_other(
    tmp_path: Path, open_corpus: Callable[..., Corpus]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": 2}\n{"text": "three"}\n')
    (tmp_path / "b.txt").write_bytes(b"\xff")
    found = list(open_corpus(tmp_path).read(np.asarray([2, 3, 1, 0])))
    assert (found[0], found[3]) == ("three", "one")
    assert isinstance(found[1], BadRecord)
    assert isinstance(found[2], BadRecord)
    assert "b.txt: not UTF-8 at byte 0" in str(found[1])
    assert "a.jsonl, line 2: field 'text' is int" in str(found[2])


def test_stdlib_is_the_python_source_without_packages_and_tests_the_same_each_time(
    open_corpus: Callable[..., Corpus],
) -> None:
    corpus = open_corpus("stdlib")
    names = set(corpus.names)
    assert {"os.py", "json/decoder.py"} <= names
    assert not [n for n in names if "site-packages" in n or "/test" in n or not n.endswith(".py")]
    assert corpus.size_bytes > 5_000_000
    assert list(corpus.names) == sorted(corpus.names)
    assert corpus.fingerprint() == open_corpus("stdlib").fingerprint()
    with open(Path(sysconfig.get_paths()["stdlib"]) / "abc.py") as file:
        assert corpus[[corpus.identity_of(i) for i in range(len(corpus))].index("abc.py:0")] == file.read()


def test_the_split_depends_on_names_and_numbers_not_on_place_or_neighbours(
    tmp_path: Path, open_corpus: Callable[..., Corpus]
) -> None:
    def positions_of(corpus: Corpus, records: np.ndarray) -> np.ndarray:
        names, ends = corpus.identities
        return split_positions(ends, FileKeys(names), records)

    def positions(corpus: Corpus) -> dict[str, float]:
        return dict(zip(corpus.names, positions_of(corpus, np.arange(len(corpus))).tolist(), strict=True))

    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        for i in range(400):
            (tmp_path / folder / f"{i}.txt").write_text("x")
    before = positions(open_corpus(tmp_path / "there"))
    assert positions(open_corpus(tmp_path / "here")) == before
    (tmp_path / "there" / "0000.txt").write_text("a new file before all others")
    corpus = open_corpus(tmp_path / "there")
    after = positions(corpus)
    assert {name: after[name] for name in before} == before
    assert 0.4 < np.mean(list(before.values())) < 0.6
    assert len(set(before.values())) == 400
    some = np.asarray([17, 3, 300], np.int64)
    np.testing.assert_array_equal(positions_of(corpus, some), positions_of(corpus, np.arange(401))[some])


def test_the_fingerprint_follows_names_sizes_and_counts_but_not_place_or_time(
    tmp_path: Path, open_corpus: Callable[..., Corpus]
) -> None:
    found = []
    for folder, content in (("a", "one\n"), ("b", "one\n"), ("c", "four\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text(content)
        os.utime(tmp_path / folder / "x.txt", (0, len(found)))
        found.append(open_corpus(tmp_path / folder).fingerprint())
    assert found[0] == found[1] != found[2]


def test_only_empty_files_are_refused(tmp_path: Path, open_corpus: Callable[..., Corpus]) -> None:
    for name in ("a.txt", "b.jsonl", "d.array_record"):
        (tmp_path / name).write_text("")
    (tmp_path / "c.jsonl").write_text("\n\r\n\n")
    with pytest.raises(
        ValueError, match=r"data\.sources\.web\.path=.*4 files, all of them empty \(first: a\.txt"
    ):
        open_corpus(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "format",
            "xml",
            r"data\.sources\.web\.format='xml' must be one of auto, text, jsonl, json, csv, tsv, parquet",
        ),
        ("weight", -0.5, r"data\.sources\.web\.weight=-0\.5 must be a number, zero or more"),
        ("weight", float("nan"), r"data\.sources\.web\.weight=nan must be a number"),
        ("text_piece_bytes", 8, r"data\.sources\.web\.text_piece_bytes=8 must be at least 16"),
        ("on_too_long", "cut", r"on_too_long='cut' must be one of split_turns, drop, refuse"),
        ("path", "", r"data\.sources\.web\.path is empty"),
    ],
)
def test_a_value_that_cannot_be_is_refused(field: str, value: Any, message: str, tmp_path: Path) -> None:
    source = Source(path=str(tmp_path))
    object.__setattr__(source, field, value)  # as it arrives in a run without the type checks of these tests
    with pytest.raises(ValueError, match=message):
        source.check("web")
    with pytest.raises(ValueError, match=message):
        Corpus(source, name="web", cache_dir=tmp_path)


def test_a_file_that_vanishes_or_is_cut_short_during_a_run_is_named(
    write: Write, texts: list[str], tmp_path: Path, open_corpus: Callable[..., Corpus]
) -> None:
    """All its records are bad, and none of another file; once restored, it is read again. Copies:
    `check_lost_copy`.
    """
    write(tmp_path, texts)
    corpus = open_corpus(tmp_path)
    # All formats have it.
    files = [Path(cast(TextFile, records)._file.location) for records in corpus.files.records]
    if files[0].parent != tmp_path:
        check_lost_copy(corpus, files[0], texts)
        return
    content = files[3 % len(files)].read_bytes()
    run = np.arange(len(texts))[::-1]
    damaged = np.searchsorted(corpus.file_ends, run, side="right") == 3 % len(files)

    def check(message: str) -> None:
        for bad, found, number in zip(damaged.tolist(), corpus.read(run), run.tolist(), strict=True):
            assert isinstance(found, BadRecord) == bad
            assert re.search(message, str(found)) if bad else found == texts[number]

    files[3 % len(files)].write_bytes(content[: len(content) // 2])
    check(rf"{corpus.names[3 % len(files)]}: {len(content):,} bytes when this run opened")
    files[3 % len(files)].unlink()
    check(rf"{corpus.names[3 % len(files)]}: .*gone since this run opened it.*Put it back")
    with pytest.raises(FileError, match="gone since this run opened it"):
        corpus[3]
    files[3 % len(files)].write_bytes(content)
    assert list(corpus.read(run)) == texts[::-1]


def check_lost_copy(corpus: Corpus, copy: Path, texts: list[str]) -> None:
    """A copy in the cache that is damaged or gone stops the run: skipping its records would skip the
    corpus.
    """
    content = copy.read_bytes()
    copy.write_bytes(content[:100])
    with pytest.raises(
        CacheLost, match=rf"{corpus.names[0]}: its copy .* has 100 bytes, not {len(content):,}\. Remove"
    ):
        every(corpus)
    copy.unlink()
    with pytest.raises(
        CacheLost, match=rf"{corpus.names[0]}: its copy .* is gone\. .*set data\.cache_dir to another"
    ):
        every(corpus)
    again = Corpus(corpus.source, name="web", cache_dir=copy.parents[1])  # as the message says
    assert every(again) == texts


def test_all_sources_of_a_process_share_one_bound_of_decoded_text(
    tmp_path: Path, open_corpus: Callable[..., Corpus]
) -> None:
    """Six sources of 40 KB share a cache with room for two row groups."""
    corpora = []
    for i in range(6):
        path = tmp_path / f"{i}.parquet"
        pq.write_table(pa.table({"text": [f"{i}{j}" * 500 for j in range(40)]}), path, row_group_size=20)
        corpora.append(
            Corpus(Source(path=str(path)), name=f"s{i}", cache_dir=tmp_path, decoded_cache_bytes=50_001)
        )
    for corpus in corpora:
        every(corpus)
    cache, *others = [cast(ParquetFile, corpus.files.records[0])._groups for corpus in corpora]
    assert all(other is cache for other in others)
    assert 20_000 < cache.kept_bytes <= 50_001
    for corpus in corpora:
        corpus.close()
    assert cache.kept_bytes == 0


def test_corpora_are_read_without_jax(tmp_path: Path) -> None:
    """Loader processes run without jax, which would cost each of them 80 MB."""
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    write_parquet(tmp_path, ["two"])
    write_array_record(tmp_path, ["three"])
    write_csv(tmp_path, ["four"])
    write_json_array(tmp_path, ["five"])
    [ended] = run_together([program(__file__, "read_without_jax", tmp_path)], [{}])
    assert ended.code == 0, ended.errors
    assert ended.output.strip() == "['five', 'four', 'one', 'three', 'two']"


def test_arrow_reads_a_local_file_without_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of Arrow's that needs the interpreter while it ends would abort the process."""
    write_parquet(tmp_path, ["two"])
    readers: set[int] = set()

    class Watched(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            readers.add(threading.get_native_id())
            return super().read(size)

    monkeypatch.setattr(StoredFile, "open", lambda self: Watched(self.location))
    corpus = Corpus(Source(path=str(tmp_path)), name="web", cache_dir=tmp_path / ".cache")
    assert list(corpus.read(np.arange(1))) == ["two"]
    assert readers <= {threading.get_native_id()}
