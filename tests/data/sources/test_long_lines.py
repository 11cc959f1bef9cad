"""Parts of long JSON lines that are read from marks are those of the whole text."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jtrain.data.sources.corpus import Corpus
from jtrain.data.sources.formats import JsonLines, long_lines, text
from jtrain.data.sources.formats.long_lines import Marks, marks_of, text_of_part
from jtrain.data.sources.formats.masked_text import TextFields
from jtrain.data.sources.latest_values import LatestValues
from jtrain.data.sources.source import Source
from jtrain.data.sources.storage import find_files
from jtrain.data.stream.chunk_order import Chunks
from jtrain.data.stream.chunk_stream import ChunkStream
from jtrain.data.stream.source_setup import SourceSetup

PIECES = st.sampled_from(
    ["a", " ", "\n", '"', "\\", "/", "\t", "\x01", "é", "你", "🙂", "\\n", "\\u00e9", '"text": "']
)
TEXTS = st.lists(PIECES, max_size=400).map("".join)


def marks_in(line: bytes) -> Marks | None:
    return marks_of(lambda start, end: line[start:end], 0, len(line), JsonLines._text_of.__get__(Fields()))


class Fields:
    """What `_text_of` needs of `JsonLines`."""

    _fields = TextFields("text", "data")


@given(
    text=TEXTS,
    repeats=st.integers(1, 40),
    ascii_only=st.booleans(),
    block_bytes=st.integers(40, 99),
    data=st.data(),
)
def test_any_part_of_any_text_is_found_between_its_marks(
    text: str, repeats: int, ascii_only: bool, block_bytes: int, data: st.DataObject
) -> None:
    """Whatever is escaped, wherever a block ends, and although other fields hold the same key and words."""
    text *= repeats
    record = {"meta": {"text": text[:-1], "t": '"text": "'}, "text": text, "after": '\\"text": "'}
    line = json.dumps(record, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_lines, "_BLOCK_BYTES", block_bytes)
        patch.setattr(long_lines, "_LONG_STRING_BYTES", 64)
        patch.setattr(long_lines, "_MARK_BYTES", 40)
        marks = marks_in(line)
    if len(text) < 64:
        return  # no long string
    assert marks is not None
    content = text.encode()
    assert marks.total == len(content)
    start = data.draw(st.integers(0, len(content)))
    stop = data.draw(st.integers(start, len(content) + 3))
    first, low, high = marks.around(start, stop)
    part = text_of_part(line[low:high])
    assert first <= start
    assert first + len(part) >= min(stop, len(content))
    assert content[first : first + len(part)] == part


def test_a_text_that_is_not_in_the_line_has_no_marks() -> None:
    """It is short, or no text, or the line is no JSON: reading it as a whole then says what it is."""
    long = b"words " * 1000
    assert marks_in(b'{"text": "%s"}' % long) is not None
    for line in (
        b'{"body": "%s", "text": "short"}',
        b'{"body": "%s", "text": ["%s"]}',
        b'{"text": "%s"',
        b'{"text": "%s"} 1',
        b'["%s"]',
        b'{"text": "%s", "labels": [-100]}',
        b'{"text": "%s\\q"}',
        b'{"text": "%s\\ud83d"}',
        b'{"text": "%s\\ude00\\ud83d"}',
        b'{"text": "%s\\u00g0"}',
        b'{"text": "%s\xff"}',
        b'{"text": "%s\t"}',
        b'{"text": "%s", "b": "\\u0001long string 0"}',
    ):
        assert marks_in(line.replace(b"%s", long)) is None, line
    # The last of two fields of one name counts, as for the parser.
    twice = b'{"text": "%s", "text": "%s."}'.replace(b"%s", long)
    assert marks_in(twice).total == len(long) + 1  # type: ignore[union-attr]


def test_only_so_many_marks_are_kept() -> None:
    """The line that was used the longest ago goes first."""
    text = "x" * 100_000
    marks = marks_in(json.dumps({"text": text}).encode())
    assert marks is not None
    assert len(marks.text) == 50
    assert marks.size_bytes == 50 * 16
    kept = LatestValues[Marks](120 * 16)
    for record in (0, 1):
        kept.add(record, marks, marks.size_bytes)
    assert kept.get(0) is marks
    kept.add(2, marks, marks.size_bytes)
    assert [kept.get(record) is not None for record in range(3)] == [True, False, True]
    kept.add(3, marks, 1 << 20)
    assert len(kept) == 1, "the newest one stays"


@pytest.fixture
def stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ChunkStream:
    """Stream of chunks of at most 1,000 bytes of texts of up to 60 KB, in lines in two files."""
    monkeypatch.setattr(long_lines, "_MARK_BYTES", 300)
    texts = [f'{n}: "wörd" 🙂\\\n' * (n * 120) for n in range(1, 30)]
    (tmp_path / "texts").mkdir()
    for at in range(2):
        content = "".join(json.dumps({"text": text}, ensure_ascii=bool(at)) + "\n" for text in texts[at::2])
        (tmp_path / "texts" / f"{at}.jsonl").write_text(content)
    return ChunkStream(
        SourceSetup(
            name="web",
            source=Source(path=str(tmp_path / "texts"), format="auto", text_field="text"),
            tokenizer="bytes",
            end_token=None,
            seed=0,
            eval_fraction=0.0,
            on_bad_record="fail",
            chunk_tokens=1000,
            chunk_bytes=None,
            window_bytes=1 << 20,
            eager_bytes=None,
            decoded_cache_bytes=1 << 20,
            cache_dir=str(tmp_path / "cache"),
            prepared=None,
        )
    )


def test_chunks_are_the_same_with_and_without_marks(
    stream: ChunkStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long lines are never read as a whole."""
    chunks = stream.locate(np.arange(len(stream)))
    chunks = Chunks(*(array[chunks.record >= 0] for array in chunks))
    whole: list[int] = []
    read = JsonLines.read
    monkeypatch.setattr(JsonLines, "read", lambda self, records: whole.extend(records) or read(self, records))
    with_marks = stream.read_chunks(chunks)
    assert 0 < len(whole) < len(chunks.record) // 2, "short lines are read whole, long ones are not"
    monkeypatch.setattr(JsonLines, "parts", lambda self, records, spans, min_bytes: [None] * len(records))
    without = stream.read_chunks(chunks)
    np.testing.assert_array_equal(with_marks.lengths, without.lengths)
    np.testing.assert_array_equal(with_marks.ids, without.ids)
    assert len(without.ids) > 500_000


def test_a_marked_line_that_was_written_over_is_read_as_a_whole(stream: ChunkStream, tmp_path: Path) -> None:
    """So that the message of a bad record is the usual one."""
    records = np.asarray([14], np.int64)
    chunks = Chunks(records, np.asarray([3]), np.asarray([1]))
    stream.read_chunks(chunks)
    file = find_files(str(tmp_path / "texts"), field="path")[0]
    Path(file.location).write_bytes(b"\\q" * (file.size_bytes // 2) + b"\n" * (file.size_bytes % 2))
    with pytest.raises(ValueError, match=r"0\.jsonl, line 1: no JSON"):
        stream.read_chunks(chunks)


def test_a_long_line_is_read_a_few_times_in_blocks_however_many_chunks_it_has(
    stream: ChunkStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line of 2 MB, 2,000 chunks: two scans and the chunks themselves, and nothing of a megabyte at once."""
    line = json.dumps({"id": 1, "text": 'A "word"\n' * 200_000}) + "\n"
    (tmp_path / "one.jsonl").write_text(line + '{"text": "short"}\n')
    reads: list[int] = []
    content = text._content
    monkeypatch.setattr(text, "_content", lambda *span: reads.append(span[2] - span[1]) or content(*span))
    monkeypatch.setattr(long_lines, "_BLOCK_BYTES", 1 << 16)
    monkeypatch.setattr(text, "_BLOCK_BYTES", 1 << 16)
    source = dataclasses.replace(stream.setup.source, path=str(tmp_path / "one.jsonl"))
    long = ChunkStream(dataclasses.replace(stream.setup, source=source))
    chunks = long.locate(np.arange(len(long)))
    order = np.random.default_rng(0).permutation(np.flatnonzero(chunks.record == 0))
    assert len(order) > 2000
    tokens = sum(
        int(long.read_chunks(Chunks(*(array[order[i : i + 99]] for array in chunks))).lengths.sum())
        for i in range(0, len(order), 99)
    )
    assert tokens == len(json.loads(line)["text"]) + 2
    assert max(reads) <= 1 << 17
    # Line ends, strings, marks; and each chunk with what lies between it and the next mark on both sides.
    assert sum(reads) < 5 * len(line)


def test_a_stripe_within_a_long_line_does_not_look_for_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte is read four times (stripes, the line's end, the first record), not once for each of 33
    stripes.
    """
    line = json.dumps({"text": "x" * (8 << 20)}) + "\n"
    (tmp_path / "one.jsonl").write_text(line)
    read_bytes: list[int] = []
    content = text._content
    monkeypatch.setattr(
        text, "_content", lambda *span: read_bytes.append(span[2] - span[1]) or content(*span)
    )
    opened = Corpus(
        Source(path=str(tmp_path / "one.jsonl")), name="web", cache_dir=tmp_path / "cache", eager_bytes=0
    )
    assert len(opened.names) == 33
    assert sum(len(records) for records in opened.files) == 1
    assert sum(read_bytes) < 5 * len(line)
