import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jtrain.data.formats import BadRecord, JsonLines, ParquetFile, RowGroupCache, TextFile


@example(content="0" * 14 + "🙂", piece_bytes=16)  # the last cut falls into the last character
@given(content=st.text(max_size=400), piece_bytes=st.integers(16, 100))
def test_pieces_of_a_text_file_are_the_file(
    content: str, piece_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever the cut, no byte is lost or doubled and no character is split."""
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(content.encode())
    file = TextFile(path, piece_bytes=piece_bytes)
    assert "".join(file[i] for i in range(len(file))) == content.removeprefix("\ufeff")
    assert len(file) == -(-len(content.encode()) // piece_bytes)


def test_pieces_end_behind_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {i}\n" for i in range(100)))
    file = TextFile(path, piece_bytes=64)
    assert len(file) == 13
    assert all(file[i].endswith("\n") and file[i].startswith("line ") for i in range(len(file)))


def test_bytes_that_are_no_utf8_name_file_and_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * 99 + b"\n" + b"y" * 50 + b"\xff" + b"z" * 100)
    with pytest.raises(BadRecord, match=r"a\.txt: not UTF-8 at byte 150 .*data\.on_bad_record='skip'"):
        TextFile(path, piece_bytes=1 << 16)[0]
    pieces = TextFile(path, piece_bytes=100)
    with pytest.raises(BadRecord, match="byte 150"):
        [pieces[i] for i in range(len(pieces))]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "un', r"no JSON: .*"),
        (b'{"text": "\xff"}', r"not UTF-8 at byte 40 of the file"),
        (b'{"body": "x"}', r"no field 'text'; its fields: 'body'\. Set data\.text_field"),
        (b'{"text": 3}', r"field 'text' is int, not text"),
        (b'["text"]', r"a JSON list, not an object"),
        (b'{"text": "\\ud800"}', r"field 'text' holds half a surrogate pair"),
    ],
    ids=["json", "utf8", "field", "type", "object", "surrogate"],
)
def test_a_bad_line_names_file_and_line(line: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\n{"text": "good"}\r\n\r\n' + b" " * 8 + b"\n" + line + b'\n{"text": "also good"}\n')
    file = JsonLines(path, field="text")
    assert (file[0], file[3]) == ("good", "also good")
    with pytest.raises(BadRecord, match=rf"a\.jsonl, line 5: {message}.*data\.on_bad_record='skip'"):
        file[2]


def test_a_surrogate_pair_spelt_by_escapes_is_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "🙂"}))
    assert JsonLines(path, field="text")[0] == "🙂"


def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path: Path) -> None:
    for name, content in (("a.txt", "one"), ("a.jsonl", '{"text": "one"}')):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content.encode())
    assert TextFile(tmp_path / "a.txt", piece_bytes=100)[0] == "one"
    assert JsonLines(tmp_path / "a.jsonl", field="text")[0] == "one"


def test_parquet_without_the_column_or_with_a_null_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["x", None], "n": [1, 2]}), path)
    cache = RowGroupCache(1 << 20)
    with pytest.raises(ValueError, match=r"a\.parquet: no column 'text'; its columns: body, n\. Set data\.text_field"):
        ParquetFile(path, field="text", cache=cache)
    with pytest.raises(ValueError, match=r"a\.parquet: column 'n' is int64, not text"):
        ParquetFile(path, field="n", cache=cache)
    file = ParquetFile(path, field="body", cache=cache)
    assert file[0] == "x"
    with pytest.raises(BadRecord, match=r"a\.parquet, row 1: column 'body' is null"):
        file[1]


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("hello, I am no Parquet file at all")
    with pytest.raises(ValueError, match=r"a\.parquet: no readable Parquet file"):
        ParquetFile(tmp_path / "a.parquet", field="text", cache=RowGroupCache(1))


def test_the_row_group_cache_keeps_to_its_bytes_and_reads_each_group_once() -> None:
    cache, reads = RowGroupCache(250), []

    def get(group: int) -> None:
        def read() -> pa.Array:
            reads.append(group)
            return pa.array([0] * 12, pa.int64())  # 96 bytes

        cache.get((Path("file"), group), read)

    for group in (0, 1, 0, 1, 2, 1, 0):
        get(group)
    assert reads == [0, 1, 2, 0]
