"""CSV and TSV files."""

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jtrain.data.sources.formats import BadRecord, delimited
from jtrain.data.sources.formats.delimited import DelimitedFile
from jtrain.data.sources.formats.masked_text import TextFields
from jtrain.data.sources.storage import find_files


def opened(path: Path, text_field: str = "text") -> DelimitedFile:
    [file] = find_files(str(path), field="data.sources.web.path")
    kind, cache_dir = path.suffix.removeprefix("."), path.parent / "cache"
    return DelimitedFile(file, TextFields(text_field, "data.sources.web"), kind=kind, cache_dir=cache_dir)


@pytest.mark.parametrize("kind", ["csv", "tsv"])
@settings(max_examples=40)
@given(texts=st.lists(st.text(st.sampled_from('ab ",\t\r\nü🙂'), max_size=9), max_size=6))
def test_rows_are_read_in_any_order_whatever_their_fields_hold(
    kind: str, texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    out = io.StringIO(newline="")
    rows = [["text", "id"], *([text, str(i)] for i, text in enumerate(texts))]
    csv.writer(out, delimiter="," if kind == "csv" else "\t").writerows(rows)
    path = tmp_path_factory.mktemp("csv") / f"a.{kind}"
    path.write_bytes(out.getvalue().encode())
    file = opened(path)
    order = list(range(len(texts)))[::-1]
    assert file.read(order) == texts[::-1]
    assert opened(path, "id").read(order) == [str(i) for i in order]


def test_mark_blank_lines_line_ends_and_lone_quotes_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(
        b'\xef\xbb\xbftext,id\r\n\r\none 5" pipe,1\r\n\n"two\r\nlines, ""quoted""",2'
    )
    file = opened(tmp_path / "a.csv")
    assert file.read([0, 1]) == ['one 5" pipe', 'two\r\nlines, "quoted"']
    assert len(file) == 2
    for content in (b"", b"text,id\n", b"\n\n"):
        (tmp_path / "a.csv").write_bytes(content)
        assert len(opened(tmp_path / "a.csv")) == 0


def test_a_long_field_is_text(tmp_path: Path) -> None:
    """The csv module's own limit is 128 KiB."""
    (tmp_path / "a.csv").write_text('text\n"' + "word\n" * 100_000 + '"\n')
    assert opened(tmp_path / "a.csv")[0] == "word\n" * 100_000


def test_a_bad_row_is_named_and_spoils_no_other(tmp_path: Path) -> None:
    content = b'id,text\n1,one\n2,two, too\n3,"a"b\n4,t\xffo\n5,a\rb\n6,six\n7,"open\n'
    (tmp_path / "a.csv").write_bytes(content)
    found = opened(tmp_path / "a.csv").read([0, 1, 2, 3, 4, 5, 6])
    assert (found[0], found[5]) == ("one", "six")
    bad = [str(found[i]) for i in (1, 2, 3, 4, 6) if isinstance(found[i], BadRecord)]
    assert (
        "a.csv, record 1 (at byte 14): 3 fields, but the header names 2. Mend the record, or set data.on"
        in bad[0]
    )
    assert "a.csv, record 2 (at byte 25): ',' expected after '\"' (a field with commas, quotes or" in bad[1]
    assert "record 3 (at byte 32): not UTF-8 at byte 3 of the record" in bad[2]
    assert "record 4 (at byte 38): new-line character seen in unquoted field" in bad[3]
    assert "record 6 (at byte 50): unexpected end of data" in bad[4]


def test_a_quote_that_is_never_closed_costs_a_bounded_part_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delimited, "FIELD_BYTES", 1 << 18)
    limit = csv.field_size_limit(1 << 18)
    try:
        (tmp_path / "a.csv").write_text('text\none\n"open\n' + "fill\n" * 60_000 + "last\n")
        file = opened(tmp_path / "a.csv")
        assert (file[0], file[len(file) - 1]) == ("one", "last")
        assert 60_000 - (1 << 18) // 5 <= len(file) < 60_000
        with pytest.raises(BadRecord, match=r"record 1 \(at byte 9\): field larger than field limit"):
            file[1]
    finally:
        csv.field_size_limit(limit)


def test_a_file_without_line_ends_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delimited, "FIELD_BYTES", 1 << 10)
    (tmp_path / "a.csv").write_text("text\n" + "x" * 4096)
    with pytest.raises(
        ValueError, match=r"a\.csv: a line of more than 2,048 bytes\. Split it, or leave the file out"
    ):
        opened(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (
            "id,body",
            r"no column 'text'; its header: 'id', 'body'\. Set data\.sources\.web\.text_field to one of them",
        ),
        ("id;text", r"no column 'text'; its header: 'id;text'\. .*Columns are separated by ','"),
        ("text,text", r"2 columns 'text': 'text', 'text'\. Rename all of them but one"),
        (
            '"text"x,id',
            r"its header cannot be read \(',' expected after '\"'\)\. Mend it, or leave the file out",
        ),
    ],
    ids=["column", "separator", "twice", "broken"],
)
def test_a_header_without_the_column_is_refused(header: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"{header}\n1,2\n")
    with pytest.raises(ValueError, match=rf"a\.csv: {message}"):
        opened(tmp_path / "a.csv")


def test_the_rows_of_a_large_file_are_found_once_and_kept_in_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("id\ttext\n" + "".join(f'{i}\t"{"x" * 97}\n{i}"\n' for i in range(12_000)))
    assert opened(path).read([11_999, 0]) == ["x" * 97 + "\n11999", "x" * 97 + "\n0"]
    [index] = [file for file in (tmp_path / "cache" / "index").iterdir() if file.suffix == ".tsv-rows"]
    made = index.stat().st_mtime_ns
    assert opened(path, "id").read([5]) == ["5"]
    assert index.stat().st_mtime_ns == made
