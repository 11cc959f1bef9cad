import os
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jtrain.data.source import Corpus, find_files


def open_corpus(path: Path | str) -> Corpus:
    return Corpus(str(path), text_field="text", text_piece_bytes=1 << 16)


def test_every_format_reads_back_the_documents_in_order(
    write_texts: Callable[[Path, list[str]], Path], texts: list[str], tmp_path: Path
) -> None:
    corpus = open_corpus(write_texts(tmp_path, texts))
    assert [corpus[i] for i in range(len(corpus))] == texts


def test_a_folder_and_a_recursive_glob_mix_formats_by_suffix_and_skip_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b" / "lines.jsonl").write_text('{"text": "two"}\n\n{"text": "three"}')
    (tmp_path / "b" / "deep" / "c.py").write_text("four")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "empty.txt").write_text("")
    for path in (tmp_path, tmp_path / "**"):
        corpus = open_corpus(path)
        assert [corpus[i] for i in range(len(corpus))] == ["one", "four", "two", "three"]
        assert corpus.identity_of(3) == "b/lines.jsonl:1"
    assert len(open_corpus(tmp_path / "*" / "*.jsonl")) == 2


def test_stdlib_is_the_python_source_without_packages_and_tests_the_same_each_time() -> None:
    corpus = open_corpus("stdlib")
    names = set(corpus.names)
    assert {"os.py", "json/decoder.py"} <= names
    assert not [n for n in names if "site-packages" in n or "/test" in n or not n.endswith(".py")]
    assert corpus.size_bytes > 5_000_000
    assert corpus.names == sorted(corpus.names)
    assert corpus.fingerprint() == open_corpus("stdlib").fingerprint()
    with open(Path(sysconfig.get_paths()["stdlib"]) / "abc.py") as file:
        assert corpus[[corpus.identity_of(i) for i in range(len(corpus))].index("abc.py:0")] == file.read()


def test_the_split_depends_on_names_and_numbers_not_on_place_or_neighbours(tmp_path: Path) -> None:
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        for i in range(400):
            (tmp_path / folder / f"{i}.txt").write_text("x")
    here, there = open_corpus(tmp_path / "here"), open_corpus(tmp_path / "there")
    np.testing.assert_array_equal(here.split_positions(), there.split_positions())
    before = dict(zip(there.names, there.split_positions(), strict=True))
    (tmp_path / "there" / "0000.txt").write_text("a new file before all others")
    there = open_corpus(tmp_path / "there")
    after = dict(zip(there.names, there.split_positions(), strict=True))
    assert {name: after[name] for name in before} == before
    assert 0.4 < np.mean(list(before.values())) < 0.6
    assert len(set(before.values())) == 400


@pytest.mark.parametrize("path", ["nowhere", "nowhere/*.txt", "no?where"])
def test_a_missing_path_names_the_field_and_what_was_looked_for(path: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"data\.path='.*where.*nothing there; looked for .*where"):
        find_files(str(tmp_path / path))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"data\.path=.*looked for any file that is not hidden, below"):
        find_files(str(tmp_path))


def test_only_empty_files_are_refused(tmp_path: Path) -> None:
    for name in ("a.txt", "b.jsonl"):
        (tmp_path / name).write_text("")
    (tmp_path / "c.jsonl").write_text("\n\r\n\n")
    with pytest.raises(ValueError, match=r"data\.path=.*3 files, all of them empty \(first: .*a\.txt"):
        open_corpus(tmp_path)


def test_a_dangling_link_and_a_file_without_permission_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"data\.path=.*b\.txt cannot be read"):
        find_files(str(tmp_path))
    with pytest.raises(ValueError, match=r"data\.path=.*b\.txt cannot be read"):
        find_files(str(tmp_path / "*.txt"))
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may read anything, so chmod would prove nothing
    with pytest.raises(ValueError, match=r"data\.path=.*a\.txt cannot be read"):
        find_files(str(tmp_path / "a.txt"))


def test_a_folder_that_cannot_be_read_is_not_left_out_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "locked").mkdir()
    scandir = os.scandir

    def locked(path: str) -> Any:
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", locked)
    with pytest.raises(PermissionError, match=r"Permission denied: .*locked"):
        find_files(str(tmp_path))


def test_compressed_files_and_urls_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"data\.path=.*a\.jsonl\.gz is compressed"):
        find_files(str(tmp_path))
    with pytest.raises(ValueError, match=r"data\.path='gs://bucket/a': only files on this machine"):
        find_files("gs://bucket/a")
