"""Files of a source by suffix and content: what is read, and what is refused by its name."""

import bz2
import io
import json
import lzma
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from jtrain.data.sources.corpus import Corpus
from jtrain.data.sources.source import Source
from jtrain.errors import FileError, UserError

LINES = b'{"text": "one"}\n{"text": "two"}\n'


def corpus(path: Path, **fields: str) -> Corpus:
    return Corpus(Source(path=str(path), **fields), name="web", cache_dir=path.parent.with_name("cache"))  # type: ignore[arg-type]


def texts(path: Path, **fields: str) -> list[object]:
    opened = corpus(path, **fields)
    return list(opened.read(np.arange(len(opened))))


@pytest.mark.parametrize("name", ["UP.JSONL", "Up.Jsonl.Bz2", "a.ndjson.xz", "a.jsonl.bz2"])
def test_suffixes_count_in_any_case_and_compression(name: str, tmp_path: Path) -> None:
    codec = {"2": bz2.compress, "z": lzma.compress}.get(name[-1], bytes)
    (tmp_path / name).write_bytes(codec(LINES))
    assert texts(tmp_path / name) == ["one", "two"]


@pytest.mark.parametrize("name", ["a.jsonl.bz2", "a.jsonl.xz"])
def test_a_compressed_file_that_is_cut_or_is_none_is_named(name: str, tmp_path: Path) -> None:
    codec = bz2.compress if name.endswith("bz2") else lzma.compress
    (tmp_path / name).write_bytes(codec(LINES * 99)[:-20])
    with pytest.raises(
        FileError, match=rf"{name}: not a whole {name[-3:].lstrip('.')} file .*cut short or corrupt"
    ):
        corpus(tmp_path / name)
    (tmp_path / name).write_bytes(LINES)
    with pytest.raises(UserError, match=rf"{name}: not a whole .* file: it begins with"):
        corpus(tmp_path / name)


@pytest.mark.parametrize("name", ["a.bin", "a.npy", "shard.00000.mds"])
def test_token_files_lead_to_adopt(name: str, tmp_path: Path) -> None:
    np.arange(9000, dtype=np.uint16).tofile(tmp_path / name)
    why = rf"path='.*' holds token ids and no text \({name}\)\. .*adopt --from .* --out OUT --tokenizer"
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(UserError, match=why):
            corpus(path)
    (tmp_path / "a.txt").write_text("x" * 50_000)
    assert len(texts(tmp_path / "*.txt")) == 1


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "a.jsonl").write_bytes(LINES)
    (tmp_path / "near").mkdir()
    (tmp_path / "near" / "link").symlink_to(tmp_path / "far", target_is_directory=True)
    (tmp_path / "far" / "loop").symlink_to(tmp_path / "near", target_is_directory=True)
    assert texts(tmp_path / "near") == ["one", "two"]


def test_an_array_record_that_is_cut_between_its_blocks_is_named(tmp_path: Path) -> None:
    """Beside three whole ones its documents would be missing without a word."""
    rng = np.random.default_rng(0)
    for number in range(4):
        writer = ArrayRecordWriter(str(tmp_path / f"{number}.array_record"), "group_size:1")
        for _ in range(400):
            writer.write(rng.integers(97, 123, 300, np.uint8).tobytes())
        writer.close()
    cut = tmp_path / "2.array_record"
    assert cut.stat().st_size > 1 << 16
    cut.write_bytes(cut.read_bytes()[: 1 << 16])
    with pytest.raises(
        UserError, match=r"2\.array_record: not a whole ArrayRecord file \(its footer is missing\)"
    ):
        corpus(tmp_path)


@pytest.mark.parametrize("name", ["part-00000", "a.txt", "a.log", "part-00000.bz2"])
def test_json_lines_of_any_name_are_read_as_such(name: str, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    content = LINES + json.dumps({"text": "x" * 100_000}).encode()
    (tmp_path / "d" / name).write_bytes(bz2.compress(content) if name.endswith("bz2") else content)
    assert texts(tmp_path / "d" / name)[:2] == ["one", "two"]
    assert texts(tmp_path / "d")[:2] == ["one", "two"]
    assert str(corpus(tmp_path / "d" / name, format="text")[0]).startswith('{"text": "one"}')


@pytest.mark.parametrize("record", [{"text": "one"}, {"body": {"text": "one"}}])
@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
@pytest.mark.parametrize("name", ["part-0", "a.txt"])
def test_a_single_json_line_with_the_field_is_a_record(
    name: str, end: str, record: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(json.dumps(record) + end)
    field = "text" if "text" in record else "body.text"
    assert texts(tmp_path / name, text_field=field) == ["one"]
    assert texts(tmp_path / name, format="text") == [json.dumps(record) + end]


def test_text_that_only_begins_like_json_stays_text(tmp_path: Path) -> None:
    contents = ("{\n}\n", '{"text": 1}\nand more\n', "{not json}\n{}\n", "[1]\n[2]\n", '{"color": "red"}\n')
    for content in contents:
        (tmp_path / "a.txt").write_text(content)
        assert texts(tmp_path / "a.txt") == [content]


def test_a_file_of_json_lines_among_texts_of_its_suffix_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("prose\n")
    (tmp_path / "b.txt").write_bytes(LINES)
    with pytest.raises(
        UserError, match=r"b\.txt: read as text, but it begins like JSON lines .*format='jsonl'"
    ):
        corpus(tmp_path)


def test_members_of_a_tar_in_json_give_a_field_and_never_their_source(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number in range(3):
            content = json.dumps({"id": number, "text": f"text {number}"}).encode()
            member = tarfile.TarInfo(f"{number}.JSON" if number else "0.json")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    opened = corpus(tmp_path / "a.tar", text_field="json.text")
    assert [opened[n] for n in range(3)] == ["text 0", "text 1", "text 2"]
    with pytest.raises(
        UserError, match=r"0\.json is JSON, whose source is no text\. Set .*such as 'json\.text'"
    ):
        corpus(tmp_path / "a.tar", text_field="json")


def test_a_file_that_joins_does_not_change_what_the_others_are(tmp_path: Path) -> None:
    (tmp_path / "part-0").write_bytes(LINES)
    (tmp_path / "zz-notes").write_text("Not data.\n")
    opened = Corpus(Source(path=str(tmp_path)), name="web", cache_dir=tmp_path / "cache", num_files=1)
    assert list(opened.read(np.arange(2))) == ["one", "two"]


def test_long_chats_without_a_suffix_are_json_lines(tmp_path: Path) -> None:
    """Their first line is longer than what is looked at, and holds the field that is read."""
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a" * 100_000}]
    (tmp_path / "part-0").write_text(json.dumps({"messages": messages}) + "\n")
    assert len(corpus(tmp_path / "part-0", messages_field="messages")) == 1


@pytest.mark.parametrize("prompt", ["", "+", "instruction+"])
def test_a_prompt_without_a_name_is_refused(prompt: str) -> None:
    with pytest.raises(UserError, match=r"data\.prompt_field='.*' names no field on one side of a \+"):
        Source(path="a.jsonl", prompt_field=prompt).check("data")
