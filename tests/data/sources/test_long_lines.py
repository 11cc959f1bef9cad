"""Parts of long JSON lines that are read from marks are those of the whole text."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jtrain.data.sources.formats import JsonLines, long_lines
from jtrain.data.sources.formats.long_lines import MarkCache, marks_of, text_of_part
from jtrain.data.sources.source import Source
from jtrain.data.sources.storage import find_files
from jtrain.data.stream.chunk_order import Chunks
from jtrain.data.stream.chunk_stream import ChunkStream
from jtrain.data.stream.source_setup import SourceSetup

PIECES = st.sampled_from(
    ["a", " ", "\n", '"', "\\", "/", "\t", "\x01", "é", "你", "🙂", "\\n", "\\u00e9", '"text": "']
)
TEXTS = st.lists(PIECES, max_size=400).map("".join)


@given(text=TEXTS, repeats=st.integers(1, 40), ascii_only=st.booleans(), data=st.data())
def test_any_part_of_any_text_is_found_between_its_marks(
    text: str, repeats: int, ascii_only: bool, data: st.DataObject
) -> None:
    """Whatever is escaped, and although other fields hold the same key and the same words."""
    text *= repeats
    record = {"meta": {"text": text[:-1], "t": '"text": "'}, "text": text, "after": '\\"text": "'}
    line = json.dumps(record, ensure_ascii=ascii_only).encode()
    marks = marks_of(line, text, "text")
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
    """Its key is spelt with an escape, or the value under the key is another one."""
    assert marks_of(b'{"te\\u0078t": "some words"}', "some words", "text") is None
    assert marks_of(b'{"text": "other words"}', "some words", "text") is None


def test_only_so_many_marks_are_kept() -> None:
    """The line that was used the longest ago goes first."""
    text = "x" * 100_000
    marks = marks_of(json.dumps({"text": text}).encode(), text, "text")
    assert marks is not None
    assert len(marks.text) == 50
    kept, file = MarkCache(most_marks=120), object()
    for record in (0, 1):
        kept.add(file, record, marks)
    assert kept.get(file, 0) is marks
    kept.add(file, 2, marks)
    assert [kept.get(file, record) is not None for record in range(3)] == [True, False, True]


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
    """The second time, long lines are not parsed as a whole any more."""
    chunks = stream.locate(np.arange(len(stream)))
    chunks = Chunks(*(array[chunks.record >= 0] for array in chunks))
    without = stream.read_chunks(chunks)
    assert len(without.ids) > 500_000
    whole: list[int] = []
    read = JsonLines.read
    monkeypatch.setattr(JsonLines, "read", lambda self, records: whole.extend(records) or read(self, records))
    with_marks = stream.read_chunks(chunks)
    assert 0 < len(whole) < len(chunks.record) // 2, "short lines are read whole, long ones are not"
    np.testing.assert_array_equal(with_marks.lengths, without.lengths)
    np.testing.assert_array_equal(with_marks.ids, without.ids)


def test_a_marked_line_that_was_written_over_is_read_as_a_whole(stream: ChunkStream, tmp_path: Path) -> None:
    """So that the message of a bad record is the usual one."""
    records = np.asarray([14], np.int64)
    chunks = Chunks(records, np.asarray([3]), np.asarray([1]))
    stream.read_chunks(chunks)
    file = find_files(str(tmp_path / "texts"), field="path")[0]
    Path(file.location).write_bytes(b"\\q" * (file.size_bytes // 2) + b"\n" * (file.size_bytes % 2))
    with pytest.raises(ValueError, match=r"0\.jsonl, line 1: no JSON"):
        stream.read_chunks(chunks)
