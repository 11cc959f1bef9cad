"""JSON lines that the C core cuts into ids are those that Python cuts, and it reads and writes nothing else."""

import ctypes
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jtrain.data import PackedText, Source, open_dataset
from jtrain.data.native.library import address
from jtrain.data.sources.chunk_cut import ChunkCut
from jtrain.data.sources.formats.long_lines import TextPart
from jtrain.data.sources.formats.masked_text import TextFields
from jtrain.data.sources.formats.record import text_of_json
from jtrain.data.stream import chunk_reader
from jtrain.data.tokenizer import ByteTokenizer

CANARY = 0xA5

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
plain_records = st.fixed_dictionaries({"text": texts, "id": values}) | st.fixed_dictionaries(
    {"meta": values, "text": texts}
)
pieces = (
    *(b"{", b"}", b"[", b"]", b":", b",", b'"', b"\\", b"\\u", b"\\ud83d", b"\\ude42", b"\\n", b"\\/", b" "),
    *(b"\t", b"\n", b"\r", b"\0", b"\x1f", b'"text"', b'"labels"', b"null", b"true", b"NaN", b"-0", b"01"),
    *(b"1e5", b"1.", b".5", b"\xc3\xa9", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe4\xbd\xa0"),
    b"\xef\xbb\xbf",
)


@st.composite
def damaged_lines(draw: st.DrawFn) -> bytes:
    """A line of JSON in which a few bytes are left out, put in or taken from elsewhere."""
    line = json.dumps(draw(plain_records), ensure_ascii=draw(st.booleans())).encode()
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(line)))
        line = line[:at] + draw(st.sampled_from(pieces)) + line[at + draw(st.integers(0, 3)) :]
    return line


def chunks_by_core(
    library: ctypes.CDLL, lines: list[bytes], first: list[int], num: list[int], chunk_bytes: int
) -> list[bytes | None]:
    """Ids of chunks, one line each; None for a line that the core leaves to Python. Checks what it writes."""
    # What follows a line in memory would end its strings and objects: a core that reads on would accept more.
    content = b"".join(line + b'"}' for line in lines)
    size = np.asarray([len(line) for line in lines], np.int64)
    start = np.cumsum(size + 2) - size - 2
    room = int(size.sum()) + 10 * len(lines)
    out, length = np.full(room + 64, CANARY, np.uint8), np.empty(len(lines), np.int32)
    columns = (start, start + size, np.asarray(first, np.int64), np.asarray(num, np.int64))
    num_ids = library.json_chunks(
        len(lines), content, *(address(column, np.int64) for column in columns),
        chunk_bytes, b"text", 4, address(out, np.uint8), address(length, np.int32),
    )  # fmt: skip
    assert (out[room:] == CANARY).all()
    end = np.cumsum(length.clip(0))
    assert num_ids == end[-1]
    is_left = (length < 0).tolist()
    return [
        None if left else ids.tobytes()
        for left, ids in zip(is_left, np.split(out[:num_ids], end[:-1]), strict=True)
    ]


def text_by_python(line: bytes) -> str | None:
    text = text_of_json(line, TextFields("text", "data.path", None), label="", way_out="", position_suffix="")
    return text if type(text) is str else None


@given(records=st.lists(plain_records, min_size=1, max_size=4), data=st.data())
def test_chunks_of_plain_lines_are_those_that_python_cuts(
    library: ctypes.CDLL, records: list[dict[str, Any]], data: st.DataObject
) -> None:
    separators = data.draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\t", "\r :")]))
    lines = [
        json.dumps(record, ensure_ascii=data.draw(st.booleans()), separators=separators).encode() + end
        for record in records
        if (end := data.draw(st.sampled_from([b"", b"\n", b" \r\n"]))) is not None
    ]
    chunk_bytes = data.draw(st.integers(1, 50))
    first, num = ([data.draw(st.integers(low, 3)) for _ in records] for low in (0, 1))
    cut = ChunkCut(chunk_bytes, border_tokens=2, exact=True)
    contents = [record["text"].encode() for record in records]
    parts = [TextPart(content, 0, len(content)) for content in contents]
    chunks = [cut.chunk(*part)[0] for part in zip(parts, first, num, strict=True)]
    lengths, ids = ByteTokenizer().encode_chunks(chunks)
    by_core = chunks_by_core(library, lines, first, num, chunk_bytes)
    # None of them needs Python.
    assert by_core == [part.tobytes() for part in np.split(ids, np.cumsum(lengths)[:-1])]


@settings(max_examples=1000)
@given(line=damaged_lines() | st.lists(st.sampled_from(pieces), max_size=12).map(b"".join))
@example(line=b'{"text": "a", "text": "b"}')
@example(line=b'{"text": "a", "text": 1}')
@example(line=b'{"text": "' + b"x" * 8 + b"\xe9" + b'"}')
@example(line=b'{"text": "\\ud800"}')
@example(line=b'{"text": "\\ud83d\\ude42", "x": [[{}, {"a": [1, -2.5e+3]}]]}')
@example(line=b'{"x": ' + b"[" * 70 + b"]" * 70 + b', "text": "a"}')
@example(line=b'{"x": ' + b"1" * 5000 + b', "text": "a"}')
def test_a_damaged_line_has_the_text_that_python_reads_or_is_left_to_it(
    library: ctypes.CDLL, line: bytes
) -> None:
    good = b'{"text": "good"}'
    before, chunk, after = chunks_by_core(library, [good, line, good], [0] * 3, [1] * 3, 1 << 20)
    assert before == after == b"\0good\0"
    if chunk is not None:
        text = text_by_python(line)
        assert text is not None
        assert chunk == (b"\0" + text.encode() + b"\0" if text else b"")


def test_rows_of_a_corpus_are_the_same_without_the_core(
    library: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several files, one of several stripes, long lines, and one with a bad line, which Python names."""
    rng = np.random.default_rng(0)
    for name, num_lines in (("a", 2500), ("b", 3), ("c", 40)):
        with (tmp_path / f"{name}.jsonl").open("w") as file:
            for number in range(num_lines):
                words = rng.choice(
                    ["naïve", "plain", "\U0001f642", '"quoted"', "new\nline"], rng.integers(0, 60)
                )
                text = " ".join(words) * (400 if number % 20 == 7 and name == "c" else 1)
                file.write(json.dumps({"id": number, "text": text}, ensure_ascii=bool(number % 2)) + "\n")
    with (tmp_path / "c.jsonl").open("a") as file:
        file.write('{"text": "half of it\n')
    spec = PackedText(
        sources={"all": Source(path=str(tmp_path))}, seq_len=256, global_batch=16, engine="inline", eval_fraction=0.0,
        on_bad_record="skip", cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip

    def rows() -> list[np.ndarray]:
        with open_dataset(spec, seed=3).train_batches() as batches:
            return [next(batches).token_BL for _ in range(60)]

    by_core = rows()
    monkeypatch.setattr(chunk_reader, "core", lambda: None)
    np.testing.assert_array_equal(by_core, rows())
