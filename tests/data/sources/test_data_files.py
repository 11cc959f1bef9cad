"""Choice of the data files of a folder."""

import gzip
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from jtrain.data import PackedText, open_dataset
from jtrain.data.sources.corpus import Corpus
from jtrain.data.sources.source import Source
from jtrain.data.sources.storage import search

OneFolder = Callable[..., Corpus]


@pytest.fixture
def open_folder(tmp_path: Path) -> OneFolder:
    """Writes files into a folder and opens `path` in it: the folder itself unless said otherwise."""

    def open_folder(files: dict[str, str | bytes], path: str = "", **fields: Any) -> Corpus:
        for name, content in files.items():
            file = tmp_path / "corpus" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.encode() if isinstance(content, str) else content)
        source = Source(path=str(tmp_path / "corpus") + path, **fields)
        return Corpus(source, name="web", cache_dir=tmp_path / "cache")

    return open_folder


LINE = '{"text": "one"}\n'
DATASET = {
    "train/a.jsonl": LINE * 9,
    "train/b.jsonl.gz": gzip.compress(LINE.encode()),
    "train/LICENSE.txt": "may be used",
    "extra.txt": "text",
    "README.md": "# A dataset",
    "README_zh.md": "# A dataset",
    "LICENSE": "may be used",
    "dataset_infos.json": '{"default": {}}',
    "load.py": "import json",
    "_SUCCESS": "",
    ".gitattributes": "*.gz filter=lfs",
}


def test_a_folder_of_records_takes_those_and_txt_files_and_says_what_it_leaves_out(
    open_folder: OneFolder,
) -> None:
    corpus = open_folder(DATASET)
    assert list(corpus.names) == ["extra.txt", "train/a.jsonl", "train/b.jsonl.gz"]
    assert corpus.left_out.startswith(
        f"left out of {corpus.source.path}, as not data: LICENSE, README.md, README_zh.md"
    )
    assert corpus.left_out.endswith(
        " and 3 more; to take them, set data.sources.web.path to a file or to a glob such as "
        f"'{corpus.source.path}/**'"
    ), corpus.left_out


@pytest.mark.parametrize("path", ["/**", "/*.md", "/README.md", "/load.py"])
def test_a_glob_or_a_file_takes_all_that_it_names(path: str, open_folder: OneFolder) -> None:
    want = {"/**": set(DATASET) - {".gitattributes"}, "/*.md": {"README.md", "README_zh.md"}}
    corpus = open_folder(DATASET, path)
    assert set(corpus.names) == want.get(path, {path[1:]})
    assert corpus.left_out == ""


def test_a_folder_of_text_is_all_text_but_for_the_documentation_at_its_top(open_folder: OneFolder) -> None:
    """A corpus of repositories keeps the README of each."""
    files = {
        "a.py": "1",
        "b/c.md": "2",
        "b/README.md": "3",
        "b/Makefile": "4",
        "d.txt": "5",
        "README.md": "no",
    }
    corpus = open_folder(files)
    assert list(corpus.names) == ["a.py", "b/Makefile", "b/README.md", "b/c.md", "d.txt"]
    assert "as not data: README.md; to take them" in corpus.left_out
    assert open_folder({}, "/b").left_out.count("README.md;") == 1


def test_a_declared_format_takes_every_file_but_documentation_and_metadata(open_folder: OneFolder) -> None:
    corpus = open_folder({"part-0": LINE, "README.md": "#", "b/_SUCCESS": "", "c.json": LINE}, format="jsonl")
    assert list(corpus.names) == ["c.json", "part-0"]


def test_a_folder_of_documentation_alone_is_refused_and_its_way_out_works(open_folder: OneFolder) -> None:
    message = (
        r"web\.path='.*corpus' holds only documentation and metadata \(LICENSE, README\.md\)\. Add "
        r"data, or, to take"
    )
    with pytest.raises(ValueError, match=message):
        open_folder({"README.md": "# Book", "LICENSE": "x"})
    assert list(open_folder({}, "/**").names) == ["LICENSE", "README.md"]


def test_a_folder_that_is_mostly_something_else_asks_which_is_the_corpus(open_folder: OneFolder) -> None:
    """Source code with a package.json must not become a corpus of one JSON file."""
    files = {f"src/{i}.py": f"print({i})\n" * 20 for i in range(5)}
    message = (
        r"web\.path='.*corpus' holds 2 files of \.json \(\d+ bytes\), but most of it is 6 files of \.py, no "
        r"suffix \(901 bytes\): which of them is the corpus\? .*'(.*/\*\*/\*\.py)' or "
        r"'(.*/\*\*/\*\.json\.gz)'"
    )
    with pytest.raises(ValueError, match=message):
        open_folder(
            {**files, "src/a.json.gz": gzip.compress(LINE.encode()), "src/b.json": LINE, "src/c": "x"}
        )
    assert len(open_folder({}, "/**/*.py").names) == 5
    assert open_folder({}, "/**/*.json.gz")[0] == "one"


def test_the_folder_of_a_store_takes_the_same_files() -> None:
    memory = fsspec.filesystem("memory")
    for name, content in DATASET.items():
        memory.pipe_file(f"/corpus/{name}", content.encode() if isinstance(content, str) else content)
    found = search("memory://corpus", field="data.path")
    assert found.is_folder
    assert {file.name for file in found.files} == set(DATASET) - {".gitattributes"}
    for path in ("memory://corpus/**", "memory://corpus/README.md"):
        assert not search(path, field="data.path").is_folder


def test_stdlib_takes_the_same_files_as_ever() -> None:
    """Its documentation-like names are modules, and nothing is left out."""
    found = search("stdlib", field="data.path")
    assert not found.is_folder
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    want = {
        str(f.relative_to(root)) for f in root.rglob("*.py") if not skipped & set(f.relative_to(root).parts)
    }
    assert {file.name for file in found.files} == want


def test_the_plan_of_a_run_says_what_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{i} {"x" * 90}"}}\n' for i in range(200)))
    (tmp_path / "README.md").write_text("# A dataset")
    spec = PackedText(path=str(tmp_path), seq_len=32, global_batch=2, cache_dir=str(tmp_path / ".cache"))
    line, note = open_dataset(spec, seed=0).describe().splitlines()
    assert "200 documents in 1 files" in line
    assert note.startswith(
        f"left out of {tmp_path}, as not data: README.md; to take them, set data.path to a file"
    )
