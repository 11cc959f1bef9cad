"""Prepared indexes hold the ids of their documents, the same bytes however many workers made them."""

import dataclasses
import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jtrain.data.pretokenized import index_format, reader, writer
from jtrain.data.pretokenized.build import SHARD_BYTES, prepare, prepare_command
from jtrain.data.pretokenized.build_process import BuildProcess
from jtrain.data.pretokenized.reader import PreparedIndex
from jtrain.data.pretokenized.shard import Recipe
from jtrain.data.sources.corpus import Corpus
from jtrain.data.sources.source import Source
from jtrain.data.tokenizer import make_tokenizer
from tests.data.documents import encode_document
from tests.data.two_sources import contents, recipes_of, write_lines


def test_every_format_has_the_ids_of_its_documents(
    write_texts: Callable[[Path, list[str]], Path], texts: list[str], tokenizer_json: Path, tmp_path: Path
) -> None:
    """Shards end anywhere, and two workers make them."""
    (tmp_path / "data").mkdir()
    source = Source(path=str(write_texts(tmp_path / "data", texts)))
    tokenizer = make_tokenizer(str(tokenizer_json))
    recipe = Recipe(name="a", source=source, tokenizer=str(tokenizer_json), cache_dir=tmp_path / "cache")
    [made] = prepare([recipe], tmp_path / "out", workers=2, stream=io.StringIO(), shard_bytes=3000)
    index = PreparedIndex(tmp_path / "out" / "a")
    assert len((Path(index.location) / index_format.SHARDS).read_text().splitlines()) > 2
    want = [encode_document(tokenizer, text) for text in texts]
    lengths, ids = index.read(np.arange(len(index)))
    assert lengths.tolist() == [len(one) for one in want]
    np.testing.assert_array_equal(ids, np.concatenate(want))
    assert (made.state, made.records, made.tokens) == ("made", 60, len(ids))
    corpus = Corpus(source, name="a", cache_dir=tmp_path / "cache")
    assert [index.identity_of(i) for i in range(60)] == [corpus.identity_of(i) for i in range(60)]
    index.check(corpus=corpus.fingerprint(), tokenizer=tokenizer.identity)


def test_the_number_of_workers_changes_no_byte(tmp_path: Path) -> None:
    write_lines(tmp_path, lines=600)
    made = []
    for workers in (1, 3):
        prepare(
            recipes_of(tmp_path),
            tmp_path / f"{workers}",
            workers=workers,
            stream=io.StringIO(),
            shard_bytes=2048,
        )
        made.append(contents(tmp_path / f"{workers}"))
    assert len(made[0]) == 13, "six files of each source, the mask of one"
    assert made[0] == made[1]
    assert made[0]["web/units.jsonl"].count(b"\n") > 5


def write_bad_lines(folder: Path) -> None:
    write_lines(folder, lines=300)
    lines = (folder / "web.jsonl").read_text().splitlines()
    lines[7], lines[250] = '{"body": "x"}', "{not json"
    (folder / "web.jsonl").write_text("\n".join(lines))


def test_a_bad_record_stops_or_is_named_and_counted(tmp_path: Path) -> None:
    write_bad_lines(tmp_path)
    with pytest.raises(
        ValueError, match=r"data\.sources\.web: .*web\.jsonl, line 8: no field 'text'.*on_bad_record"
    ):
        prepare(recipes_of(tmp_path), tmp_path / "out", workers=1, stream=io.StringIO(), shard_bytes=2048)
    skipping = recipes_of(tmp_path, on_bad_record="skip")
    stream = io.StringIO()
    made = prepare(skipping, tmp_path / "out", workers=2, stream=stream, shard_bytes=2048)
    assert [row.skipped for row in made] == [2, 0]
    assert re.search(r"web: 300 records, [\d,]+ tokens, 2 bad ones left out", stream.getvalue())
    index = PreparedIndex(tmp_path / "out" / "web")
    assert list(index.skipped) == [7, 250]
    assert index.lengths(np.asarray([6, 7, 250])).tolist()[1:] == [0, 0]
    said = [
        json.loads(line) for line in (Path(index.location) / index_format.SKIPPED).read_text().splitlines()
    ]
    assert [line["document"] for line in said] == ["web.jsonl:7", "web.jsonl:250"]
    with pytest.raises(ValueError, match=r"leaves out 2 bad records, but data\.on_bad_record='fail'"):
        prepare(recipes_of(tmp_path), tmp_path / "out", workers=2, stream=io.StringIO(), shard_bytes=2048)


@pytest.mark.parametrize(("name", "field"), [("web", "data.sources.web"), ("data", "data")])
def test_what_an_unfinished_call_left_out_is_not_taken_over_where_none_may_be(
    name: str, field: str, tmp_path: Path
) -> None:
    """`data` is the name of the single source of `data.path`."""
    write_bad_lines(tmp_path)
    skipping = [dataclasses.replace(recipes_of(tmp_path, on_bad_record="skip")[0], name=name)]
    (tmp_path / "out").mkdir()
    with BuildProcess(tmp_path / "out") as host:
        writer.IndexWriter(0, skipping[0], tmp_path / "out", 2048, host)
    prepare(skipping, tmp_path / "other", workers=1, stream=io.StringIO(), shard_bytes=2048)
    partial = tmp_path / "out" / f".{name}.partial"
    for file in (index_format.IDS, index_format.SKIPPED):
        (partial / file).write_bytes((tmp_path / "other" / name / file).read_bytes())
    sizes = {
        index_format.IDS: 1,
        index_format.SKIPPED: (partial / index_format.SKIPPED).read_bytes().index(b"\n") + 1,
    }
    state = {"units": 3, "tokens": 1, "empty": 0, "skipped": 1, "bytes": sizes}
    (partial / "00000003.state.json").write_text(json.dumps(state))
    message = rf"^{field}: .*{name}\.partial leaves out 1 bad records.* first is web\.jsonl:7: .*remove /"
    failing = dataclasses.replace(skipping[0], on_bad_record="fail")
    with pytest.raises(ValueError, match=message):
        prepare([failing], tmp_path / "out", workers=1, stream=io.StringIO(), shard_bytes=2048)


def test_a_source_that_changed_gets_a_new_index_in_the_place_of_the_old(tmp_path: Path) -> None:
    write_lines(tmp_path, lines=90)
    out = tmp_path / "out"
    prepare(recipes_of(tmp_path), out, workers=1, stream=io.StringIO())
    untouched = (out / "book" / index_format.INDEX).stat()
    again = prepare(recipes_of(tmp_path), out, workers=1, stream=io.StringIO())
    assert [row.state for row in again] == ["there", "there"]
    (tmp_path / "web.jsonl").write_text('{"text": "new"}\n')
    stream = io.StringIO()
    again = prepare(recipes_of(tmp_path), out, workers=1, stream=stream)
    assert [row.state for row in again] == ["made", "there"]
    assert "web: the index there was made of other data; it will be replaced." in stream.getvalue()
    assert PreparedIndex(out / "web").read(np.asarray([0]))[1].tolist() == [0, *b"new", 0]
    assert (out / "book" / index_format.INDEX).stat() == untouched
    assert sorted(path.name for path in out.iterdir()) == ["book", "web"]


def test_shards_do_not_cut_what_is_decoded_as_a_whole(tmp_path: Path) -> None:
    """A row group in two shards would be decoded twice."""
    pq.write_table(pa.table({"text": ["x" * 50] * 100}), tmp_path / "a.parquet", row_group_size=17)
    corpus = Corpus(Source(path=str(tmp_path)), name="a", cache_dir=tmp_path / "cache")
    starts = writer.shard_starts(corpus, corpus.size_bytes // 4).tolist()
    assert starts == [0, 17, 34, 68, 100]
    assert writer.shard_starts(corpus, 1).tolist() == [0, 17, 34, 51, 68, 85, 100]
    assert writer.shard_starts(corpus, SHARD_BYTES).tolist() == [0, 100]
    (tmp_path / "a.parquet").unlink()
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 10)
    corpus = Corpus(Source(path=str(tmp_path)), name="a", cache_dir=tmp_path / "cache")
    assert writer.shard_starts(corpus, 14 * 4).tolist() == [0, 4, 8, 10]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "web.parquet"
    pq.write_table(pa.table({"text": [f"{i} " * 50 for i in range(300)]}), path, use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[4:400] = b"\xff" * 396
    path.write_bytes(content)
    recipe = Recipe(
        name="web", source=Source(path=str(path)), tokenizer="bytes", cache_dir=tmp_path / "cache"
    )
    with pytest.raises(ValueError, match=r"data\.sources\.web: .*web\.parquet: row group 0 cannot be read"):
        prepare([recipe], tmp_path / "out", workers=1, stream=io.StringIO())


def test_a_row_group_that_cannot_be_read_is_left_out_where_that_is_the_policy(tmp_path: Path) -> None:
    """Only bad records are left out, as in a run that reads the source directly."""
    path = tmp_path / "web.parquet"
    texts = [f"{i} " * 50 for i in range(300)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=50, use_dictionary=False)
    content = bytearray(path.read_bytes())
    at = pq.read_metadata(path).row_group(2).column(0).data_page_offset
    content[at : at + 60] = bytes(60)
    path.write_bytes(content)
    source = Source(path=str(path))
    recipe = Recipe(
        name="data", source=source, tokenizer="bytes", on_bad_record="skip", cache_dir=tmp_path / "cache"
    )
    prepare([recipe], tmp_path / "out", workers=2, stream=io.StringIO(), shard_bytes=4096)
    index = PreparedIndex(tmp_path / "out" / "data")
    want = [0 if 100 <= i < 150 else len(text) + 2 for i, text in enumerate(texts)]
    assert index.lengths(np.arange(300)).tolist() == want
    assert list(index.skipped) == list(range(100, 150))
    failing = dataclasses.replace(recipe, on_bad_record="fail")
    message = (
        r"^data: the prepared index .* leaves out 50 bad records, .*web\.parquet: row group 2 cannot be read"
    )
    with pytest.raises(ValueError, match=message):
        prepare([failing], tmp_path / "out", workers=1, stream=io.StringIO())
    with pytest.raises(ValueError, match=r"^data: .*web\.parquet: row group 2 cannot be read"):
        prepare([failing], tmp_path / "other", workers=1, stream=io.StringIO())


def test_arguments_that_cannot_be_are_refused(tmp_path: Path) -> None:
    write_lines(tmp_path, lines=30)
    recipes = recipes_of(tmp_path)
    with pytest.raises(ValueError, match=r"--workers 0 must be at least 1"):
        prepare(recipes, tmp_path / "out", workers=0, stream=io.StringIO())
    for name in ("../web", ".web", "a/b", ""):
        odd = Recipe(name=name, source=recipes[0].source, tokenizer="bytes", cache_dir=tmp_path)
        with pytest.raises(ValueError, match=r"the name is a folder's too"):
            prepare([odd], tmp_path / "out", workers=1, stream=io.StringIO())
    (tmp_path / "out" / "web").mkdir(parents=True)
    with pytest.raises(
        ValueError, match=r"out/web exists and is not a prepared index\. Remove it, or choose another"
    ):
        prepare(recipes, tmp_path / "out", workers=1, stream=io.StringIO())


class Terminal(io.StringIO):
    """Stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_and_anything_else_plain_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jtrain.data.pretokenized.progress.LINE_S", 0.0)
    write_lines(tmp_path, lines=300)
    for stream in (io.StringIO(), Terminal()):
        prepare(
            recipes_of(tmp_path), tmp_path / type(stream).__name__, workers=2, stream=stream, shard_bytes=2048
        )
        said = stream.getvalue()
        assert re.search(r"web: 300 records, [\d,]+ tokens\.", said)
        assert re.search(r"400/400|400 of 400 records", said)
        assert ("\x1b[" in said) == isinstance(stream, Terminal)


def test_the_verb_prints_and_writes_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_lines(tmp_path, lines=30)

    def run() -> list[tuple[str, str, int]]:
        rows = prepare_command(
            {
                "web": Source(path=str(tmp_path / "web.jsonl")),
                "std": Source(path=str(tmp_path / "book.jsonl")),
            },
            tmp_path / "out",
            tokenizer="bytes",
            end_token=None,
            on_bad_record="fail",
            cache_dir=tmp_path / "cache",
            workers=None,
            command="python -m jtrain.data prepare --config x",
        )
        return [(row.name, row.state, row.records) for row in rows]

    assert run() == [("web", "made", 30), ("std", "made", 10)]
    printed = capsys.readouterr()
    assert re.search(r"web +30 +[\d,]+ .* made", printed.out)
    assert "web: 30 records" in printed.err
    assert reader.command(str(tmp_path / "out" / "web")) == "python -m jtrain.data prepare --config x"
    run()
    assert re.search(r"web +30 +[\d,]+ .* there", capsys.readouterr().out)


def test_an_index_is_not_written_to_a_url(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--out s3:/bucket: indexes can only be written to local folders"):
        prepare_command(
            {},
            Path("s3://bucket"),
            tokenizer="bytes",
            end_token=None,
            on_bad_record="fail",
            cache_dir=tmp_path,
            workers=1,
            command="",
        )


def test_workers_have_no_jax_and_one_thread_for_tokenising(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source of format grain makes its worker import a module of this test, which reports what is loaded
    and set.
    """
    monkeypatch.setenv("RAYON_NUM_THREADS", "7")
    recipe = Recipe(
        name="g",
        source=Source(path="tests.data.grain_sources:surroundings", format="grain"),
        tokenizer="bytes",
        cache_dir=tmp_path / "cache",
    )
    prepare([recipe], tmp_path / "out", workers=1, stream=io.StringIO())
    assert PreparedIndex(tmp_path / "out" / "g").read(np.asarray([0]))[1].tobytes() == b"\0None 1\0"
    assert os.environ["RAYON_NUM_THREADS"] == "7"
