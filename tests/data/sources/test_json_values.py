"""JSON files: one object, an array of objects, or JSON lines, decided by the first bytes."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jtrain.data.sources.cache import SMALL_TABLE_BYTES
from jtrain.data.sources.corpus import Corpus
from jtrain.data.sources.formats import BadRecord, JsonLines, Records, json_values
from jtrain.data.sources.formats.json_values import JsonValues, open_json
from jtrain.data.sources.formats.masked_text import TextFields
from jtrain.data.sources.source import Source
from jtrain.data.sources.storage import find_files

VALUES = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('ab"\\{}[],: \nü🙂'), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def opened(path: Path) -> Records:
    [file] = find_files(str(path), field="data.sources.web.path")
    return open_json(file, TextFields("text", "data.sources.web"), cache_dir=path.parent / "cache")


@pytest.mark.parametrize("form", ["array", "one after another"])
@settings(max_examples=40)
@given(
    others=st.lists(VALUES, min_size=1, max_size=4),
    indent=st.sampled_from([None, 1]),
    block_bytes=st.sampled_from([1, 7, 1 << 24]),
)
def test_every_object_is_a_record_whatever_its_strings_hold(
    others: list[Any],
    form: str,
    indent: int | None,
    block_bytes: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Brackets, quotes and backslashes in strings, and blocks that cut them anywhere, move no boundary."""
    objects = [{"other": other, "text": f'{i}"]}}\\'} for i, other in enumerate(others)]
    path = tmp_path_factory.mktemp("json") / "a.json"
    if form == "array":
        path.write_text(json.dumps(objects, indent=indent, ensure_ascii=False))
    else:
        path.write_text("\n".join(json.dumps(o, indent=indent, ensure_ascii=False) for o in objects))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_values, "BLOCK_BYTES", block_bytes)
        file = opened(path)
    assert file.read(list(range(len(file)))) == [item["text"] for item in objects]


@pytest.mark.parametrize(
    ("content", "kind", "texts"),
    [
        ('{"text": "one"}', JsonValues, ["one"]),
        ('{"text": "one"}\n{"text": "two"}\n', JsonLines, ["one", "two"]),
        ('\ufeff{"text": "one"}\n\n{"text": "two"}', JsonLines, ["one", "two"]),
        ('{\n "text": "one"\n}\n', JsonValues, ["one"]),
        ('\ufeff [{"text": "one"}, {"text": "two"}]\n', JsonValues, ["one", "two"]),
        ("[]", JsonValues, []),
        ("", JsonValues, []),
        (" \n", JsonValues, []),
    ],
    ids=[
        "object",
        "lines",
        "mark and blank lines",
        "object over lines",
        "array",
        "empty array",
        "empty",
        "blank",
    ],
)
def test_the_first_bytes_say_which_form_it_is(
    content: str, kind: type, texts: list[str], tmp_path: Path
) -> None:
    (tmp_path / "a.json").write_text(content)
    file = opened(tmp_path / "a.json")
    assert type(file) is kind
    assert file.read(list(range(len(file)))) == texts


def test_json_gz_gives_records_and_not_json_source(tmp_path: Path) -> None:
    """Before, such a file was text: 3,000 records trained as 42 pieces of JSON."""
    lines = "".join(json.dumps({"text": f"text {i} " * 100, "id": i}) + "\n" for i in range(3000))
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(lines.encode()))
    corpus = Corpus(Source(path=str(tmp_path)), name="web", cache_dir=tmp_path / "cache")
    assert len(corpus) == 3000
    assert corpus[2999] == "text 2999 " * 100


def test_a_bad_value_among_good_ones_is_a_bad_record(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(
        '[{"text": "one"}, "a, b", [{"text": "no"}], {"text" "x"}, null, {"text": "two"}]'
    )
    found = opened(tmp_path / "a.json").read([0, 1, 2, 3, 4, 5])
    assert (found[0], found[5]) == ("one", "two")
    assert all(isinstance(record, BadRecord) for record in found[1:5])
    assert "a.json, record 1 (at byte 18): a JSON str, not an object with a field 'text'. Mend" in str(
        found[1]
    )
    assert "record 2 (at byte 26): a JSON list" in str(found[2])
    assert "record 3 (at byte 44): no JSON: Expecting ':'" in str(found[3])
    assert "record 4 (at byte 58): a JSON NoneType" in str(found[4])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"text": "one"}, {"text": "tw', r"it ends inside of a value: cut short, or a quote is missing"),
        ('[{"text": "one"}', r"it ends inside of a value"),
        ('[{"text": "one"}] [{"text": "two"}]', r"it goes on after the end of its array, at byte 18"),
        ('{\n"text": "one"}}', r"it closes a bracket at byte 16 that it did not open"),
        ('text: "one"', r"it begins with b'text: \"one\"', not with an object or an array"),
    ],
    ids=["cut in a value", "cut between", "goes on", "closes", "no JSON"],
)
def test_a_file_that_is_not_whole_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(
        ValueError, match=rf"a\.json: not a whole JSON file: {message}.*data\.sources\.web\.path"
    ):
        opened(tmp_path / "a.json")


def test_the_values_of_a_large_file_are_found_once_and_kept_in_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": f"{i} " + "x" * 97} for i in range(12_000)]))
    assert path.stat().st_size > SMALL_TABLE_BYTES
    assert opened(path).read([11_999, 0]) == ["11999 " + "x" * 97, "0 " + "x" * 97]
    [index] = [file for file in (tmp_path / "cache" / "index").iterdir() if file.suffix == ".values"]
    made = index.stat().st_mtime_ns
    assert opened(path).read([5]) == ["5 " + "x" * 97]
    assert index.stat().st_mtime_ns == made
