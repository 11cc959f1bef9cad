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

from jtrain.data import prepared
from jtrain.data.prepare import prepare
from jtrain.data.prepared import BLOCK, Prepared
from jtrain.data.source import Source
from jtrain.data.tokenizer import ByteTokenizer, HFTokenizer
from jtrain.data.unit import Recipe

NUM_DOCUMENTS = 5 * BLOCK + 3  # the last block is not full


def documents() -> list[str]:
    """Empty, short and long ones."""
    rng = np.random.default_rng(0)
    return ["" if i % 7 == 3 else "the cat ü " * int(rng.integers(1, 60)) + str(i) for i in range(NUM_DOCUMENTS)]


def make(folder: Path, tokenizer: str = "bytes", lines: list[str] | None = None) -> Path:
    """Prepares these lines of JSON as source `web`, in several units; the folder of its index."""
    folder.mkdir(exist_ok=True)
    path = folder / "web.jsonl"
    path.write_text("\n".join(lines or [json.dumps({"text": text}) for text in documents()]))
    recipe = Recipe(
        name="web", source=Source(path=str(path)), tokenizer=tokenizer, on_bad_record="skip", cache_dir=folder / "cache"
    )
    command = f"python -m jtrain.data prepare --config tiny --out {folder / 'out'}"
    with open(folder / "progress", "w") as stream:
        prepare([recipe], folder / "out", workers=1, stream=stream, command=command, unit_bytes=4096)
    return folder / "out" / "web"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Of bytes; not to be changed."""
    return Prepared(make(tmp_path_factory.mktemp("prepared")))


@given(records=st.lists(st.integers(0, NUM_DOCUMENTS - 1), max_size=40))
def test_any_records_in_any_order_have_the_ids_of_their_documents(index: Prepared, records: list[int]) -> None:
    numbers = np.asarray(records, np.int64)
    lengths, ids = index.read(numbers)
    want = [ByteTokenizer().encode_document(documents()[record]) for record in records]
    assert lengths.dtype == np.int32
    assert lengths.tolist() == index.lengths(numbers).tolist() == [len(one) for one in want]
    assert ids.dtype == index.dtype == np.uint8
    assert ids.tolist() == np.concatenate([*want, np.empty(0, np.int32)]).tolist()


def test_counts_and_names_are_those_of_the_source(index: Prepared) -> None:
    want = [len(ByteTokenizer().encode_document(text)) for text in documents()]
    assert len(index) == index.num_records == NUM_DOCUMENTS
    assert index.num_tokens == sum(want)
    assert index.num_empty == sum(not text for text in documents())
    assert index.num_skipped == len(index.skipped) == 0
    assert index.identity_of(5) == "web.jsonl:5"
    assert index.file_ends.tolist() == [NUM_DOCUMENTS]
    assert len((index.folder / prepared.UNITS).read_text().splitlines()) > 2, "one unit alone proves little"


def test_a_larger_vocabulary_takes_two_bytes_for_an_id(tokenizer_json: Path, tmp_path: Path) -> None:
    tokenizer = HFTokenizer(tokenizer_json)
    index = Prepared(make(tmp_path, str(tokenizer_json)))
    assert index.dtype == np.uint16
    lengths, ids = index.read(np.arange(len(index)))
    want = [tokenizer.encode_document(text) for text in documents()]
    assert lengths.tolist() == [len(one) for one in want]
    np.testing.assert_array_equal(ids, np.concatenate(want))
    assert max(lengths) > 100


def test_an_open_index_can_be_sent_to_another_process(index: Prepared) -> None:
    again = pickle.loads(pickle.dumps(index))
    numbers = np.asarray([3, 80, 0], np.int64)
    np.testing.assert_array_equal(again.read(numbers)[1], index.read(numbers)[1])


def test_reading_needs_no_jax_and_one_descriptor(index: Prepared) -> None:
    """In a process where jax cannot be imported; ids are opened for each read only."""
    code = f"""
import os, sys
sys.modules["jax"] = None
from pathlib import Path
import numpy as np
from jtrain.data.prepared import Prepared
import jtrain.data.prepare
before = len(os.listdir("/proc/self/fd"))
index = Prepared(Path({str(index.folder)!r}))
index.read(np.arange(len(index)))
print(len(os.listdir("/proc/self/fd")) - before)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "1\n"


def test_a_record_out_of_range_is_refused(index: Prepared) -> None:
    """A negative number would otherwise read from the end."""
    for record in (-1, NUM_DOCUMENTS):
        with pytest.raises(IndexError, match=rf"{record} asked of {NUM_DOCUMENTS}"):
            index.lengths(np.asarray([record]))
        with pytest.raises(IndexError):
            index.read(np.asarray([record]))


def test_where_there_is_no_index_the_message_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no prepared index there.*jtrain\.data prepare --config NAME --out /"):
        Prepared(tmp_path / "web")


def test_a_stale_index_is_refused_with_the_command_that_mends_it(index: Prepared, tmp_path: Path) -> None:
    index.check(corpus=index.made_of["corpus"], tokenizer="bytes", format="auto", text_piece_bytes=1 << 16)
    index.check()
    message = (
        r"data\.sources\.web: the prepared index .*/web is stale: it was made with tokenizer='bytes', now 'abc'\. "
        rf"Make it again: python -m jtrain\.data prepare --config tiny --out {index.folder.parent}$"
    )
    with pytest.raises(ValueError, match=message):
        index.check(corpus=index.made_of["corpus"], tokenizer="abc")
    with pytest.raises(ValueError, match=r"with text_field='text', now 'body'"):
        index.check(text_field="body")
    one = Prepared(shutil.copytree(index.folder, tmp_path / "data"))
    with pytest.raises(ValueError, match=r"^data: the prepared index .*/data is stale"):
        one.check(tokenizer="abc")


def test_an_index_that_leaves_out_bad_records_is_refused_where_none_may_be(tmp_path: Path) -> None:
    index = Prepared(make(tmp_path, lines=['{"text": "good"}', "not json", '{"text": "also"}']))
    assert index.num_skipped == 1
    assert list(index.skipped) == [1]
    assert "web.jsonl, line 2: no JSON" in index.skipped[1]
    assert index.lengths(np.arange(3)).tolist() == [6, 0, 6]
    index.check(on_bad_record="skip")
    with pytest.raises(ValueError, match=r"leaves out 1 bad records, but data\.on_bad.*record 1: .*line 2"):
        index.check(on_bad_record="fail")


DATA_FILES = (prepared.LENGTHS, prepared.IDS, prepared.UNITS, prepared.FILES)


@pytest.mark.parametrize("name", [*DATA_FILES, prepared.INDEX])
def test_a_file_cut_short_or_gone_is_found_when_the_index_is_opened(name: str, tmp_path: Path) -> None:
    folder = make(tmp_path)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-1] if name != prepared.INDEX else content[: len(content) // 2])
    with pytest.raises(ValueError, match=rf"is damaged: {name} .*Make it again: rm -r {folder} && python -m jtrain"):
        Prepared(folder)
    (folder / name).unlink()
    with pytest.raises((ValueError, FileNotFoundError), match=r"is missing|no prepared index there"):
        Prepared(folder)


@pytest.mark.parametrize("name", DATA_FILES)
def test_a_flipped_bit_anywhere_is_found_by_verify(name: str, tmp_path: Path) -> None:
    folder = make(tmp_path)
    assert Prepared(folder).verify() == []
    content = (folder / name).read_bytes()
    for byte in (0, len(content) // 2, len(content) - 1):
        damaged = bytearray(content)
        damaged[byte] ^= 4
        (folder / name).write_bytes(damaged)
        [line, *_] = Prepared(folder).verify()
        assert line.startswith(name)
    (folder / name).write_bytes(content)
    assert Prepared(folder).verify() == []


def test_a_changed_index_json_does_not_match_its_digest(tmp_path: Path) -> None:
    folder = make(tmp_path)
    body = (folder / prepared.INDEX).read_text()
    (folder / prepared.INDEX).write_text(body.replace('"uint8"', '"uint16"'))
    with pytest.raises(ValueError, match=r"index\.json does not match its own digest"):
        Prepared(folder)


def test_another_format_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path)
    body = json.loads((folder / prepared.INDEX).read_text())
    body |= {"format": 99}
    del body["digest"]
    digest = prepared.digest(json.dumps(body, sort_keys=True).encode())
    (folder / prepared.INDEX).write_text(json.dumps(body | {"digest": digest}))
    with pytest.raises(ValueError, match=r"an index of format 99, and this jtrain reads format 1\. Make it again"):
        Prepared(folder)


def test_a_wrong_length_is_found_by_reading_near_it(tmp_path: Path) -> None:
    """Without `verify`: ids of the wrong place would be text nobody asked for."""
    folder = make(tmp_path)
    content = bytearray((folder / prepared.LENGTHS).read_bytes())
    content[4 * 20] ^= 1
    (folder / prepared.LENGTHS).write_bytes(content)
    index = Prepared(folder)
    index.read(np.arange(16))
    with pytest.raises(ValueError, match=r"lengths and starts disagree at record 31"):
        index.read(np.asarray([5, 31]))


def test_an_index_replaced_while_in_use_is_not_read(tmp_path: Path) -> None:
    """Its numbers would name other documents."""
    index = Prepared(make(tmp_path))
    make(tmp_path, lines=['{"text": "other"}'])
    assert len(Prepared(index.folder)) == 1
    with pytest.raises(OSError, match="was made again while it was in use"):
        index.read(np.asarray([0]))
