import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jtrain.data.sources.cache import SMALL_TABLE_BYTES
from jtrain.data.sources.formats import BadRecord, JsonLines, RowGroupCache, TextFile, format_of
from jtrain.data.sources.formats.masked_text import TextFields
from jtrain.data.sources.formats.parquet import ParquetFile
from jtrain.data.sources.formats.row_group_cache import DecodedColumns
from jtrain.data.sources.storage import CacheLost, StoredFile, find_files


def stored(path: Path) -> StoredFile:
    return find_files(str(path), field="data.sources.web.path")[0]


def text_file(path: Path, *, piece_bytes: int) -> TextFile:
    return TextFile(stored(path), piece_bytes=piece_bytes)


def json_lines(path: Path, *, text_field: str = "text") -> JsonLines:
    return JsonLines(
        stored(path), TextFields(text_field, "data.sources.web"), cache_dir=path.parent / "cache"
    )


def parquet(path: Path, *, text_field: str = "text", cache_bytes: int = 1 << 20) -> ParquetFile:
    return ParquetFile(
        stored(path), TextFields(text_field, "data.sources.web"), groups=RowGroupCache(cache_bytes)
    )


@example(content="0" * 14 + "🙂", piece_bytes=16)  # the last cut falls into the last character
@given(content=st.text(max_size=400), piece_bytes=st.integers(16, 100))
def test_pieces_of_a_text_file_are_the_file(
    content: str, piece_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Wherever it is cut, no byte is lost or doubled and no character is split."""
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(content.encode())
    file = text_file(path, piece_bytes=piece_bytes)
    assert "".join(file[i] for i in range(len(file))) == content.removeprefix("\ufeff")
    assert len(file) == -(-len(content.encode()) // piece_bytes)


def test_pieces_end_behind_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {i}\n" for i in range(100)))
    file = text_file(path, piece_bytes=64)
    assert len(file) == 13
    assert all(file[i].endswith("\n") and file[i].startswith("line ") for i in range(len(file)))


def test_bytes_that_are_no_utf8_name_file_and_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * 99 + b"\n" + b"y" * 50 + b"\xff" + b"z" * 100)
    with pytest.raises(BadRecord, match=r"a\.txt: not UTF-8 at byte 150 .*data\.on_bad_record='skip'"):
        text_file(path, piece_bytes=1 << 16)[0]
    pieces = text_file(path, piece_bytes=100)
    with pytest.raises(BadRecord, match="byte 150"):
        [pieces[i] for i in range(len(pieces))]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "un', r"no JSON: .*"),
        (b'{"text": "\xff"}', r"not UTF-8 at byte 10 of the line"),
        (b'{"body": "x"}', r"no field 'text'; its fields: 'body'\. Set data\.sources\.web\.text_field"),
        (b'{"text": 3}', r"field 'text' is int, not text"),
        (b'{"text": ' + b"1" * 5000 + b"}", r"no JSON: Exceeds the limit"),
        (b'["text"]', r"a JSON list, not an object"),
        (b'{"text": "\\ud800"}', r"field 'text' holds half a surrogate pair"),
    ],
    ids=["json", "utf8", "field", "type", "number", "object", "surrogate"],
)
def test_a_bad_line_names_file_and_line(line: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\n{"text": "good"}\r\n\r\n' + b" " * 8 + b"\n" + line + b'\n{"text": "also good"}\n')
    file = json_lines(path)
    assert (file[0], file[3]) == ("good", "also good")
    with pytest.raises(BadRecord, match=rf"a\.jsonl, line 5: {message}.*data\.on_bad_record='skip'"):
        file[2]
    texts = file.read([3, 2, 0])
    assert (texts[0], texts[2]) == ("also good", "good"), "a bad record spoils none of its run"
    assert isinstance(texts[1], BadRecord)


def test_a_bad_line_far_into_a_large_file_is_named_by_its_byte(tmp_path: Path) -> None:
    """Counting the lines before each of many bad ones would take longer than reading the file."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "' + b"x" * (1 << 24) + b'"}\n[]\n')
    with pytest.raises(BadRecord, match=r"a\.jsonl, the line at byte 16,777,229: a JSON list"):
        json_lines(path)[1]


def test_a_surrogate_pair_spelt_by_escapes_is_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "🙂"}))
    assert json_lines(path)[0] == "🙂"


def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path: Path) -> None:
    for name, content in (("a.txt", "one"), ("a.jsonl", '{"text": "one"}')):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content.encode())
    assert text_file(tmp_path / "a.txt", piece_bytes=100)[0] == "one"
    assert json_lines(tmp_path / "a.jsonl")[0] == "one"


def test_the_lines_of_a_large_file_are_found_once_and_kept_in_the_cache(tmp_path: Path) -> None:
    """The second opening does not read the file, and no index stays in memory or open."""
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": f"{i} " + "x" * (i % 97)}) + "\n\n" * (i % 3 == 0) for i in range(20_000)]
    path.write_text("\n".join(lines))
    assert path.stat().st_size > SMALL_TABLE_BYTES
    first = json_lines(path)
    assert len(first) == 20_000
    first_texts = first.read(list(range(11)))
    assert first.read([19_999, 0, 97]) == ["19999 " + "x" * (19_999 % 97), "0 ", "97 "]
    [index] = [file for file in (tmp_path / "cache" / "index").iterdir() if file.suffix == ".lines"]
    made = index.stat().st_mtime_ns
    again = json_lines(path)
    assert again.read([5, 7]) == first.read([5, 7])
    assert index.stat().st_mtime_ns == made

    index.unlink()
    with pytest.raises(
        CacheLost, match=r"a\.jsonl: its index .*\.lines is gone .*set data\.cache_dir to another"
    ):
        again.read([5])
    cut = json_lines(path)
    index.write_bytes(index.read_bytes()[:168])
    assert cut.read([9]) == first_texts[9:10]
    with pytest.raises(CacheLost, match=r"a\.jsonl: its index .*\.lines was cut short\. Remove it"):
        cut.read([9, 10])


def test_parquet_without_the_column_or_with_a_null_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["x", None], "n": [1, 2]}), path)
    message = (
        r"a\.parquet: no column 'text'; its columns: body, n\. Set data\.sources\.web\.text_field to one"
    )
    with pytest.raises(ValueError, match=message):
        parquet(path)
    with pytest.raises(ValueError, match=r"a\.parquet: column 'n' is int64, not text"):
        parquet(path, text_field="n")
    file = parquet(path, text_field="body")
    assert file[0] == "x"
    with pytest.raises(
        BadRecord, match=r"a\.parquet, row 1: column 'body' is null.*data\.on_bad_record='skip'"
    ):
        file[1]


def test_parquet_text_that_is_no_utf8_is_one_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    raw = pa.array([b"one", b"t\xffo", b"three"], pa.binary())
    text = pa.StringArray.from_buffers(3, raw.buffers()[1], raw.buffers()[2])
    pq.write_table(pa.table({"text": text}), path)
    texts = parquet(path).read([0, 1, 2])
    assert (texts[0], texts[2]) == ("one", "three")
    assert isinstance(texts[1], BadRecord)
    assert "a.parquet, row 1: not UTF-8 at byte 1 of its text" in str(texts[1])


def test_a_file_that_is_no_parquet_or_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_text("hello, I am no Parquet file at all")
    with pytest.raises(
        ValueError, match=r"a\.parquet: not a readable Parquet file .*cut short, or of another format"
    ):
        parquet(path)
    pq.write_table(pa.table({"text": ["x" * 1000] * 10}), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"a\.parquet: not a readable Parquet file"):
        parquet(path)


def test_a_corrupt_row_group_names_file_and_group(tmp_path: Path) -> None:
    """The footer is intact, so opening the file finds no damage."""
    path = tmp_path / "a.parquet"
    texts = [f"{i} " * 50 for i in range(100)]
    pq.write_table(
        pa.table({"text": texts}), path, row_group_size=50, compression="zstd", use_dictionary=False
    )
    content = bytearray(path.read_bytes())
    offset = pq.read_metadata(path).row_group(1).column(0).data_page_offset
    content[offset : offset + 60] = bytes(60)
    path.write_bytes(content)
    file = parquet(path)
    assert file[49] == texts[49]
    with pytest.raises(OSError, match=r"a\.parquet: row group 1 cannot be read .*Replace the file"):
        file[50]


def test_a_run_of_rows_decodes_each_row_group_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group is decoded once even if the cache holds one group and the records alternate between
    groups.
    """
    path = tmp_path / "a.parquet"
    texts = [f"document {i}" for i in range(400)]
    pq.write_table(pa.table({"text": texts, "other": texts}), path, row_group_size=100)
    decoded = []
    read = ParquetFile.read_group
    monkeypatch.setattr(
        ParquetFile, "read_group", lambda self, group: (decoded.append(group), read(self, group))[1]
    )
    file = parquet(path, cache_bytes=1)
    run = [399, 3, 250, 1, 398, 251, 2, 0]
    assert file.read(run) == [texts[i] for i in run]
    assert sorted(decoded) == [0, 2, 3]


def test_the_row_group_cache_keeps_to_its_bytes_and_reads_each_group_once() -> None:
    cache, reads = RowGroupCache(250), []

    def get(group: int) -> None:
        def read() -> DecodedColumns:
            reads.append(group)
            return DecodedColumns(text=pa.array([0] * 12, pa.int64()))  # 96 bytes

        cache.get((Path("file"), group), read)

    for group in (0, 1, 0, 1, 2, 1, 0):
        get(group)
    assert reads == [0, 1, 2, 0]
    cache.drop(Path("file"))
    assert cache.kept_bytes == 0
    get(0)
    assert reads == [0, 1, 2, 0, 0]


def test_a_suffix_says_format_and_compression() -> None:
    want = {
        "a.jsonl": ("jsonl", None),
        "a.jsonl.gz": ("jsonl", "gzip"),
        "a.ndjson.zst": ("jsonl", "zstd"),
        "a.json.gz": ("json", "gzip"),
        "a.csv": ("csv", None),
        "a.tsv.gz": ("tsv", "gzip"),
        "a.parquet": ("parquet", None),
        "b/a.array_record": ("arrayrecord", None),
        "a.tar.zst": ("webdataset", "zstd"),
        "a.tgz": ("webdataset", "gzip"),
        "a.arrow": ("arrow", None),
        "A.FEATHER": ("arrow", None),
        "a.JSONL.xz": ("jsonl", "xz"),
        "a.csv.bz2": ("csv", "bz2"),
        "a.txt.gz": ("text", "gzip"),
        "a.b": ("text", None),
        "a": ("text", None),
    }
    assert {name: format_of(name, field="data.sources.web.path") for name in want} == want
    with pytest.raises(
        ValueError,
        match=r"web\.path: a\.jsonl\.lz4 is compressed as \.lz4; only \.gz, \.zst, \.bz2, \.xz are read",
    ):
        format_of("a.jsonl.lz4", field="data.sources.web.path")


@pytest.mark.parametrize(
    ("record", "field", "text"),
    [
        ({"meta": {"text": "nested"}}, "meta.text", "nested"),
        ({"a": {"b": {"c": "deep"}}}, "a.b.c", "deep"),
        ({"meta": {"text": "nested"}, "meta.text": "exact"}, "meta.text", "exact"),
    ],
    ids=["nested", "deep", "exact"],
)
def test_a_text_field_may_lie_in_another_and_an_exact_key_wins(
    record: dict[str, Any], field: str, text: str, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    assert json_lines(tmp_path / "a.jsonl", text_field=field)[0] == text
    pq.write_table(pa.Table.from_pylist([record, record]), tmp_path / "a.parquet")
    rows = parquet(tmp_path / "a.parquet", text_field=field)
    assert rows.read([1, 0]) == [text, text]
    assert rows.group_bytes[0] > 0


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (
            "meta.body",
            r"no field 'meta\.body'; the fields of 'meta': 'text', 'n'\. Set data\.sources\.web\.text_field",
        ),
        ("body.text", r"no field 'body\.text'; its fields: 'meta'"),
        ("meta.n.text", r"no field 'meta\.n\.text'; field 'n' is int, not an object"),
        ("meta.n", r"field 'meta\.n' is int, not text"),
    ],
)
def test_a_nested_field_that_is_not_there_names_those_that_are(
    field: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text('{"meta": {"text": "x", "n": 1}}\n')
    with pytest.raises(BadRecord, match=message):
        json_lines(tmp_path / "a.jsonl", text_field=field)[0]


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (
            "meta.body",
            r"no column 'meta\.body'; its columns: meta\.text, meta\.n\. Set data\.sources\.web\.text_field",
        ),
        ("meta.n.text", r"no column 'meta\.n\.text'; column 'meta\.n' is int64 and has no fields"),
        ("meta", r"column 'meta' is struct<.*>, not text\. .*in a struct, as 'column\.field'"),
    ],
)
def test_a_struct_column_without_the_text_names_its_fields(field: str, message: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({"meta": [{"text": "x", "n": 1}, None]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=rf"a\.parquet: {message}"):
        parquet(tmp_path / "a.parquet", text_field=field)
    with pytest.raises(BadRecord, match=r"a\.parquet, row 1: column 'meta\.text' is null"):
        parquet(tmp_path / "a.parquet", text_field="meta.text")[1]
