import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jtrain.data.pretokenized import index_format
from jtrain.data.pretokenized.build import prepare
from jtrain.data.pretokenized.index_format import BLOCK
from jtrain.data.pretokenized.reader import PreparedIndex
from jtrain.data.pretokenized.shard import Recipe
from jtrain.data.sources import file_parts
from jtrain.data.sources.corpus import Corpus
from jtrain.data.sources.source import Source
from jtrain.data.tokenizer import ByteTokenizer, HFTokenizer
from jtrain.errors import FileError
from tests.data.documents import encode_document

NUM_DOCUMENTS = 5 * BLOCK + 3  # the last block is not full


def documents() -> list[str]:
    """Texts of documents: empty, short and long ones."""
    rng = np.random.default_rng(0)
    return [
        "" if i % 7 == 3 else "the cat ü " * int(rng.integers(1, 60)) + str(i) for i in range(NUM_DOCUMENTS)
    ]


def make(folder: Path, tokenizer: str = "bytes", lines: list[str] | None = None) -> Path:
    """Prepares these lines of JSON as source `web`, in several shards; returns the folder of its index."""
    folder.mkdir(exist_ok=True)
    path = folder / "web.jsonl"
    path.write_text("\n".join(lines or [json.dumps({"text": text}) for text in documents()]))
    recipe = Recipe(
        name="web",
        source=Source(path=str(path)),
        tokenizer=tokenizer,
        on_bad_record="skip",
        cache_dir=folder / "cache",
    )
    command = f"python -m jtrain.data prepare --config tiny --out {folder / 'out'}"
    with open(folder / "progress", "w") as stream:
        prepare([recipe], folder / "out", workers=1, stream=stream, command=command, shard_bytes=4096)
    return folder / "out" / "web"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> PreparedIndex:
    """Index of byte tokens; shared by tests, which must not change it."""
    return PreparedIndex(make(tmp_path_factory.mktemp("prepared")))


def test_a_file_in_parts_is_listed_once_and_its_records_keep_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_parts, "STRIPE_BYTES", 512)
    index = PreparedIndex(make(tmp_path))
    assert index.num_files == 1
    assert (tmp_path / "out" / "web" / "files.json").read_text().count("web.jsonl") == 1
    corpus = Corpus(Source(path=str(tmp_path / "web.jsonl")), name="web", cache_dir=tmp_path / "cache")
    names = [corpus.identity_of(record) for record in range(NUM_DOCUMENTS)]
    assert len({name.partition(":")[0] for name in names}) > 20
    assert [index.identity_of(record) for record in range(NUM_DOCUMENTS)] == names
    assert index.verify() == []


@given(records=st.lists(st.integers(0, NUM_DOCUMENTS - 1), max_size=40))
def test_any_records_in_any_order_have_the_ids_of_their_documents(
    index: PreparedIndex, records: list[int]
) -> None:
    numbers = np.asarray(records, np.int64)
    lengths, ids = index.read(numbers)
    want = [encode_document(ByteTokenizer(), documents()[record]) for record in records]
    assert lengths.dtype == np.int32
    assert lengths.tolist() == index.lengths(numbers).tolist() == [len(one) for one in want]
    assert ids.dtype == index.dtype == np.uint8
    assert ids.tolist() == np.concatenate([*want, np.empty(0, np.int32)]).tolist()


@given(data=st.data())
def test_any_spans_of_any_records_have_their_ids(index: PreparedIndex, data: st.DataObject) -> None:
    """Spans may be empty, overlap, and lie in any order."""
    want, records, starts, ends = [np.empty(0, np.int32)], [], [], []
    for record in data.draw(st.lists(st.integers(0, NUM_DOCUMENTS - 1), max_size=20)):
        ids = encode_document(ByteTokenizer(), documents()[record])
        start = data.draw(st.integers(0, len(ids)))
        end = data.draw(st.integers(start, len(ids)))
        want.append(ids[start:end])
        records, starts, ends = [*records, record], [*starts, start], [*ends, end]
    got = index.read_spans(*(np.asarray(numbers, np.int64) for numbers in (records, starts, ends)))
    assert got.dtype == index.dtype
    assert got.tolist() == np.concatenate(want).tolist()


def test_the_start_of_a_block_is_the_number_of_tokens_before_it(index: PreparedIndex) -> None:
    lengths = index.lengths(np.arange(NUM_DOCUMENTS))
    want = [int(lengths[: block * BLOCK].sum()) for block in range(index.num_blocks + 1)]
    assert index.num_blocks == 6
    assert index.token_starts(np.arange(7)).tolist() == want
    assert want[-1] == index.num_tokens
    got = index.token_starts(np.asarray([6, 0, 3]))
    assert got.dtype == np.int64
    assert got.tolist() == [want[6], 0, want[3]]
    for block in (-1, 7):
        with pytest.raises(IndexError, match=rf"blocks {block} to {block} asked for, of 7"):
            index.token_starts(np.asarray([block]))


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (3, 2), (0, 10_000)])
def test_a_span_beyond_its_record_is_refused(index: PreparedIndex, start: int, end: int) -> None:
    """Without a check it would be the text of other documents."""
    with pytest.raises(IndexError, match=rf"tokens {start} to {end} of record 5 asked for, which has"):
        index.read_spans(np.asarray([5]), np.asarray([start]), np.asarray([end]))


def test_counts_and_names_are_those_of_the_source(index: PreparedIndex) -> None:
    want = [len(encode_document(ByteTokenizer(), text)) for text in documents()]
    assert len(index) == index.num_records == NUM_DOCUMENTS
    assert index.num_tokens == sum(want)
    assert index.num_empty == sum(not text for text in documents())
    assert index.num_skipped == len(index.skipped) == 0
    assert index.identity_of(5) == "web.jsonl:5"
    assert index.file_ends.tolist() == [NUM_DOCUMENTS]
    assert len((Path(index.location) / index_format.SHARDS).read_text().splitlines()) > 2, (
        "one shard alone proves little"
    )


def test_a_larger_vocabulary_takes_two_bytes_for_an_id(tokenizer_json: Path, tmp_path: Path) -> None:
    tokenizer = HFTokenizer(tokenizer_json)
    index = PreparedIndex(make(tmp_path, str(tokenizer_json)))
    assert index.dtype == np.uint16
    lengths, ids = index.read(np.arange(len(index)))
    want = [encode_document(tokenizer, text) for text in documents()]
    assert lengths.tolist() == [len(one) for one in want]
    np.testing.assert_array_equal(ids, np.concatenate(want))
    assert max(lengths) > 100


def test_an_open_index_can_be_sent_to_another_process(index: PreparedIndex) -> None:
    again = pickle.loads(pickle.dumps(index))
    numbers = np.asarray([3, 80, 0], np.int64)
    np.testing.assert_array_equal(again.read(numbers)[1], index.read(numbers)[1])


def test_reading_needs_no_jax_and_one_descriptor(index: PreparedIndex) -> None:
    """Reads in a process where jax cannot be imported; ids.bin is open only during a read."""
    code = f"""
import os, sys
sys.modules["jax"] = None
from pathlib import Path
import numpy as np
from jtrain.data.pretokenized.reader import PreparedIndex
import jtrain.data.pretokenized.build
before = len(os.listdir("/proc/self/fd"))
index = PreparedIndex(Path({str(Path(index.location))!r}))
index.read(np.arange(len(index)))
print(len(os.listdir("/proc/self/fd")) - before)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "1\n"


def test_a_record_out_of_range_is_refused(index: PreparedIndex) -> None:
    """Without a check, a negative number would read from the end."""
    for record in (-1, NUM_DOCUMENTS):
        with pytest.raises(IndexError, match=rf"{record} asked for, of {NUM_DOCUMENTS}"):
            index.lengths(np.asarray([record]))
        with pytest.raises(IndexError):
            index.read(np.asarray([record]))


def test_where_there_is_no_index_the_message_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(
        FileError, match=r"no prepared index there.*jtrain\.data prepare --config NAME --out /"
    ):
        PreparedIndex(tmp_path / "web")


def test_a_stale_index_is_refused_with_the_command_that_mends_it(
    index: PreparedIndex, tmp_path: Path
) -> None:
    index.check(corpus=index.made_of["corpus"], tokenizer="bytes", format="auto", text_piece_bytes=1 << 16)
    index.check()
    message = (
        r"data\.sources\.web: the prepared index .*/web is stale: it was made with tokenizer='bytes', now "
        r"'abc'\. Make it again: python -m jtrain\.data prepare --config tiny --out "
        rf"{Path(index.location).parent}$"
    )
    with pytest.raises(ValueError, match=message):
        index.check(corpus=index.made_of["corpus"], tokenizer="abc")
    with pytest.raises(ValueError, match=r"with text_field='text', now 'body'"):
        index.check(text_field="body")
    one = PreparedIndex(shutil.copytree(Path(index.location), tmp_path / "data"))
    with pytest.raises(ValueError, match=r"^data: the prepared index .*/data is stale"):
        one.check(tokenizer="abc")


def test_an_index_that_leaves_out_bad_records_is_refused_where_none_may_be(tmp_path: Path) -> None:
    index = PreparedIndex(make(tmp_path, lines=['{"text": "good"}', "not json", '{"text": "also"}']))
    assert index.num_skipped == 1
    assert list(index.skipped) == [1]
    assert "web.jsonl, line 2: no JSON" in index.skipped[1]
    assert index.lengths(np.arange(3)).tolist() == [6, 0, 6]
    index.check(on_bad_record="skip")
    with pytest.raises(ValueError, match=r"leaves out 1 bad records, but data\.on_bad.*record 1: .*line 2"):
        index.check(on_bad_record="fail")


DATA_FILES = (index_format.LENGTHS, index_format.IDS, index_format.SHARDS, index_format.FILES)


@pytest.mark.parametrize("name", [*DATA_FILES, index_format.INDEX])
def test_a_file_cut_short_or_gone_is_found_when_the_index_is_opened(name: str, tmp_path: Path) -> None:
    folder = make(tmp_path)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-1] if name != index_format.INDEX else content[: len(content) // 2])
    with pytest.raises(
        ValueError, match=rf"is damaged: {name} .*Make it again: rm -r {folder} && python -m jtrain"
    ):
        PreparedIndex(folder)
    (folder / name).unlink()
    with pytest.raises((ValueError, FileError), match=r"is missing|no prepared index there"):
        PreparedIndex(folder)


@pytest.mark.parametrize("name", DATA_FILES)
def test_a_flipped_bit_anywhere_is_found_by_verify(name: str, tmp_path: Path) -> None:
    folder = make(tmp_path)
    assert PreparedIndex(folder).verify() == []
    content = (folder / name).read_bytes()
    for byte in (0, len(content) // 2, len(content) - 1):
        damaged = bytearray(content)
        damaged[byte] ^= 4
        (folder / name).write_bytes(damaged)
        [line, *_] = PreparedIndex(folder).verify()
        assert line.startswith(name)
    (folder / name).write_bytes(content)
    assert PreparedIndex(folder).verify() == []


def test_a_changed_index_json_does_not_match_its_digest(tmp_path: Path) -> None:
    folder = make(tmp_path)
    body = (folder / index_format.INDEX).read_text()
    (folder / index_format.INDEX).write_text(body.replace('"uint8"', '"uint16"'))
    with pytest.raises(ValueError, match=r"index\.json does not match its own digest"):
        PreparedIndex(folder)


def test_another_format_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path)
    body = json.loads((folder / index_format.INDEX).read_text())
    body |= {"format": 99}
    del body["digest"]
    digest = index_format.digest(json.dumps(body, sort_keys=True).encode())
    (folder / index_format.INDEX).write_text(json.dumps(body | {"digest": digest}))
    with pytest.raises(ValueError, match=r"index format 99; this jtrain reads format 1\. Make it again"):
        PreparedIndex(folder)


def test_a_wrong_length_is_found_by_reading_near_it(tmp_path: Path) -> None:
    """Reading finds the damage without `verify`: ids of another place would be the text of other
    documents.
    """
    folder = make(tmp_path)
    content = bytearray((folder / index_format.LENGTHS).read_bytes())
    content[4 * 20] ^= 1
    (folder / index_format.LENGTHS).write_bytes(content)
    index = PreparedIndex(folder)
    index.read(np.arange(16))
    with pytest.raises(ValueError, match=r"lengths and starts disagree at record 31"):
        index.read(np.asarray([5, 31]))


def test_an_index_replaced_while_in_use_is_not_read(tmp_path: Path) -> None:
    """Record numbers of the old index would name other documents in the new one."""
    index = PreparedIndex(make(tmp_path))
    make(tmp_path, lines=['{"text": "other"}'])
    assert len(PreparedIndex(Path(index.location))) == 1
    with pytest.raises(OSError, match="was made again while it was in use"):
        index.read(np.asarray([0]))
    with pytest.raises(OSError, match="was made again while it was in use"):
        _ = index.mapped_ids


@given(data=st.data())
def test_places_in_the_map_hold_the_ids_that_are_read(index: PreparedIndex, data: st.DataObject) -> None:
    record = data.draw(st.integers(0, NUM_DOCUMENTS - 1))
    records = np.asarray([record])
    length = int(index.lengths(records)[0])
    start = data.draw(st.integers(0, length))
    end = data.draw(st.integers(start, length))
    spans = records, np.asarray([start]), np.asarray([end])
    place = int(index.places(*spans)[0])
    assert index.mapped_ids is not None
    np.testing.assert_array_equal(index.mapped_ids[place : place + end - start], index.read_spans(*spans))


def test_an_index_is_complete_without_its_raw_files(tmp_path: Path) -> None:
    """Identities, counts and ids are in the index; what the raw files alone could tell is not compared."""
    folder = make(tmp_path / "raw")
    moved = PreparedIndex(shutil.copytree(folder, tmp_path / "moved" / "web"))
    shutil.rmtree(tmp_path / "raw")
    _, ids = moved.read(np.arange(NUM_DOCUMENTS))
    assert (
        ids.tolist()
        == np.concatenate([encode_document(ByteTokenizer(), text) for text in documents()]).tolist()
    )
    assert (moved.names, moved.file_ends.tolist()) == (["web.jsonl"], [NUM_DOCUMENTS])
    assert moved.identity_of(7) == "web.jsonl:7"
    moved.check(on_bad_record="fail", tokenizer="bytes", text_field="text")
    with pytest.raises(ValueError, match=r"tokenizer='bytes', now 'abc'"):
        moved.check(tokenizer="abc")
    assert moved.verify() == []
