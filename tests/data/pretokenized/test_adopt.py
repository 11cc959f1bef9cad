"""Token files of other projects are adopted in place: their documents are records, their ids stay where they lie."""

import io
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jtrain.data.pretokenized import adopt as adopting
from jtrain.data.pretokenized import reader
from jtrain.data.pretokenized.adopt import adopt
from jtrain.data.pretokenized.foreign import dense, foreign_file
from jtrain.data.pretokenized.reader import PreparedIndex
from jtrain.data.sources.formats.masked_text import MaskFields
from jtrain.data.tokenizer import make_tokenizer
from jtrain.errors import FileError, UserError
from tests.data.pretokenized import foreign_writers as write
from tests.data.pretokenized.foreign_writers import Documents

END = 1
"""End id of `tokenizer_json`, whose vocabulary has 278 ids."""


@pytest.fixture
def documents() -> Documents:
    """Documents of 1 to 300 ids, each ended by the end id, which is nowhere else."""
    rng = np.random.default_rng(0)
    return [[*(int(i) for i in rng.integers(2, 278, rng.integers(0, 300))), END] for _ in range(83)]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of some 500 ids: documents lie in several, and several in one."""
    for module in (dense, foreign_file, adopting):
        monkeypatch.setattr(module, "PART_BYTES", 1000)


def run(path: Path | str, out: Path, tokenizer: Path | str, **more: object) -> PreparedIndex:
    options = {"name": "data", "end_token": None, "dtype": None, "column": None, "command": "adopt!"}
    options |= {"stream": io.StringIO(), **more}
    adopt(str(path), out, tokenizer=str(tokenizer), **options)
    return PreparedIndex(out / str(options["name"]))


def assert_holds(index: PreparedIndex, documents: Documents) -> None:
    """Compares counts, all ids, random spans and hashes."""
    assert index.num_records == len(documents)
    assert index.num_tokens == sum(map(len, documents))
    assert index.num_empty == sum(not document for document in documents)
    order = np.random.default_rng(1).permutation(len(documents))
    lengths, ids = index.read(order)
    assert lengths.tolist() == [len(documents[i]) for i in order]
    assert ids.dtype == index.dtype
    assert index.dtype in (np.uint8, np.uint16, np.uint32)
    assert ids.tolist() == [token for i in order for token in documents[i]]
    spans = index.read_spans(order, lengths // 3, lengths - lengths // 4)
    cut = [documents[i][len(documents[i]) // 3 : len(documents[i]) - len(documents[i]) // 4] for i in order]
    assert spans.tolist() == [token for document in cut for token in document]
    assert index.token_starts(np.asarray([index.num_blocks])).tolist() == [index.num_tokens]
    assert index.verify() == []


def test_an_adopted_index_is_refused_where_a_loss_mask_is_wanted(
    documents: Documents, tokenizer_json: Path, tmp_path: Path
) -> None:
    write.write_raw(tmp_path / "train.bin", documents)
    index = run(tmp_path / "train.bin", tmp_path / "out", tokenizer_json)
    index.check_mask(None)
    with pytest.raises(UserError, match=r"holds ids without a loss mask, but mask_field='m' is set.*remove mask_field"):
        index.check_mask(MaskFields("m", is_prompt=False, mask_prompt=True))


LAYOUTS: dict[str, Callable[[Path, Documents], None]] = {
    "megatron": lambda folder, documents: write.write_megatron(folder / "a", documents),
    "megatron-int32": lambda folder, documents: write.write_megatron(folder / "a", documents, dtype="int32"),
    "megatron-int64": lambda folder, documents: write.write_megatron(folder / "a", documents, dtype="int64"),
    "megatron-sequences": lambda folder, documents: write.write_megatron(folder / "a", documents, sequences=3),
    "megatron-multimodal": lambda folder, documents: write.write_megatron(folder / "a", documents, index="multimodal"),
    "fairseq": lambda folder, documents: write.write_megatron(folder / "a", documents, index="fairseq"),
    "nanogpt": lambda folder, documents: write.write_raw(folder / "train.bin", documents),
    "llm.c": lambda folder, documents: write.write_llm_c(folder / "train.bin", documents),
    "llm.c-llama-3": lambda folder, documents: write.write_llm_c(folder / "train.bin", documents, model="llama-3"),
    "olmo": lambda folder, documents: write.write_raw(folder / "part-0-00000.npy", documents),
    "numpy": lambda folder, documents: write.write_npy(folder / "a.npy", documents),
    "mds": lambda folder, documents: write.write_mds(folder, documents),
    "mds-bytes": lambda folder, documents: write.write_mds(folder, documents, encoding="bytes"),
    "mds-own-dtype": lambda folder, documents: write.write_mds(folder, documents, encoding="ndarray"),
    "mds-input_ids": lambda folder, documents: write.write_mds(folder, documents, column="input_ids"),
    "parquet": lambda folder, documents: write.write_parquet_ids(folder / "a.parquet", documents),
    "parquet-int64": lambda folder, documents: write.write_parquet_ids(folder / "a.parquet", documents, kind="int64"),
}


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_holds_its_documents(
    name: str, documents: Documents, tokenizer_json: Path, tmp_path: Path
) -> None:
    (tmp_path / "theirs").mkdir()
    LAYOUTS[name](tmp_path / "theirs", documents)
    before = {path: path.read_bytes() for path in (tmp_path / "theirs").iterdir()}
    index = run(tmp_path / "theirs", tmp_path / "out", tokenizer_json)
    assert_holds(index, documents)
    assert before == {path: path.read_bytes() for path in (tmp_path / "theirs").iterdir()}
    ours = {path.name: path.stat().st_size for path in Path(index.location).iterdir()}
    assert (reader.IDS in ours) == name.startswith("parquet"), "only Parquet's ids are copied"
    assert index.made_of["tokenizer"] == make_tokenizer(str(tokenizer_json)).identity


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("kind", ["megatron", "raw", "mds", "parquet"])
def test_several_files_are_one_source_and_name_their_documents(
    kind: str, documents: Documents, tokenizer_json: Path, tmp_path: Path
) -> None:
    """The documents lie in three files, 30 in each but the last; MDS shards have 20."""
    theirs = tmp_path / "theirs"
    (theirs / "deep").mkdir(parents=True)
    parts = {theirs / "a": documents[:30], theirs / "b": documents[30:60], theirs / "deep" / "c": documents[60:]}
    for path, some in parts.items():
        if kind == "megatron":
            write.write_megatron(path, some)
        elif kind == "raw":
            write.write_raw(path.with_suffix(".bin"), some)
        elif kind == "parquet":
            write.write_parquet_ids(path.with_suffix(".parquet"), some)
    if kind == "mds":
        write.write_mds(theirs, documents)
    index = run(theirs, tmp_path / "out", tokenizer_json)
    assert_holds(index, documents)
    suffix = {"megatron": ".bin", "raw": ".bin", "parquet": ".parquet"}.get(kind)
    want = [f"a{suffix}:29", f"b{suffix}:0", f"deep/c{suffix}:22"]
    if kind == "mds":
        want = ["shard.00001.mds:9", "shard.00001.mds:10", "shard.00004.mds:2"]
    assert [index.identity_of(record) for record in (29, 30, 82)] == want


@pytest.mark.usefixtures("small_parts")
def test_the_border_of_a_document_may_lie_anywhere(tokenizer_json: Path, tmp_path: Path) -> None:
    """Documents of exactly one part, of many parts, of the end id alone, and one without an end id as the last."""
    documents = [[5] * 499 + [END], [END], [END], [6] * 2600 + [END], [7] * 30]
    write.write_raw(tmp_path / "a.bin", documents)
    write.write_raw(tmp_path / "b.bin", [[8, 9]])
    assert_holds(run(tmp_path, tmp_path / "out", tokenizer_json), [*documents, [8, 9]])


@pytest.mark.usefixtures("small_parts")
def test_empty_documents_and_files_are_records_and_nothing(
    documents: Documents, tokenizer_json: Path, tmp_path: Path
) -> None:
    documents[0] = documents[40] = documents[41] = documents[82] = []
    for folder, kind in ((tmp_path / "m", "megatron"), (tmp_path / "p", "parquet"), (tmp_path / "s", "mds")):
        folder.mkdir()
        if kind == "megatron":
            write.write_megatron(folder / "a", documents)
        elif kind == "mds":
            write.write_mds(folder, documents, encoding="bytes")
        else:
            write.write_parquet_ids(folder / "a.parquet", documents)
        assert_holds(run(folder, tmp_path / "out", tokenizer_json, name=kind), documents)
    (tmp_path / "raw").mkdir()
    write.write_raw(tmp_path / "raw" / "b.bin", documents[1:3])
    (tmp_path / "raw" / "a.bin").touch()
    (tmp_path / "raw" / "c.bin").touch()
    index = run(tmp_path / "raw", tmp_path / "out", tokenizer_json, name="raw")
    assert_holds(index, documents[1:3])
    assert index.identity_of(1) == "b.bin:1"
    assert index.file_ends.tolist() == [0, 2, 2]


def test_a_megatron_prefix_is_a_path(documents: Documents, tokenizer_json: Path, tmp_path: Path) -> None:
    write.write_megatron(tmp_path / "web_text_document", documents)
    write.write_megatron(tmp_path / "other", documents[:5])
    assert_holds(run(tmp_path / "web_text_document", tmp_path / "out", tokenizer_json), documents)


def test_the_vocabulary_gives_the_width_of_raw_ids_and_an_option_overrides_it(
    documents: Documents, tokenizer_json: Path, tmp_path: Path
) -> None:
    write.write_raw(tmp_path / "a.npy", documents, dtype="uint32")
    with pytest.raises(ValueError, match=r"a\.npy: every second of its ids is 0, .* Set --dtype uint32\."):
        run(tmp_path / "a.npy", tmp_path / "out", tokenizer_json)
    index = run(tmp_path / "a.npy", tmp_path / "out", tokenizer_json, dtype="uint32")
    assert_holds(index, documents)
    assert index.dtype == np.uint32


@pytest.mark.usefixtures("small_parts")
def test_an_id_beyond_the_vocabulary_is_refused_with_its_place(
    documents: Documents, tokenizer_json: Path, tmp_path: Path
) -> None:
    documents[50][0] = 60_000
    place = sum(map(len, documents[:50]))
    write.write_megatron(tmp_path / "a", documents)
    vocab_size = make_tokenizer(str(tokenizer_json)).vocab_size
    message = (
        rf"a\.bin: id 60,000, token {place:,}, is not below the vocabulary of --tokenizer .*, {vocab_size}\. "
        r"Set --tokenizer to the one that made"
    )
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "a.bin", tmp_path / "out", tokenizer_json)
    documents[50][0] = -7
    write.write_megatron(tmp_path / "a", documents, dtype="int32")
    with pytest.raises(ValueError, match=r"id 4,294,967,289 \(-7 as a signed number\), token"):
        run(tmp_path / "a", tmp_path / "out", tokenizer_json)


def test_files_without_the_end_id_are_refused(tokenizer_json: Path, tmp_path: Path) -> None:
    write.write_raw(tmp_path / "a.bin", [[5] * 100, [6] * 20])
    with pytest.raises(ValueError, match=r"none of the 120 ids is 1, the end id of --tokenizer .* Set --end-token"):
        run(tmp_path / "a.bin", tmp_path / "out", tokenizer_json)
    write.write_raw(tmp_path / "a.bin", [[5] * 100 + [0], [6] * 20 + [0]])
    index = run(tmp_path / "a.bin", tmp_path / "out", tokenizer_json, end_token="<|begin_of_text|>")
    assert index.lengths(np.arange(2)).tolist() == [101, 21]
    with pytest.raises(ValueError, match=r"^--end-token='nothing' is not one of the"):
        run(tmp_path / "a.bin", tmp_path / "out", tokenizer_json, end_token="nothing")


def test_another_tokenizer_is_refused_and_fields_of_text_are_not_compared(
    documents: Documents, tokenizer_json: Path, tmp_path: Path
) -> None:
    write.write_raw(tmp_path / "a.bin", documents)
    index = run(tmp_path / "a.bin", tmp_path / "out", tokenizer_json)
    index.check(tokenizer=make_tokenizer(str(tokenizer_json)).identity, text_field="text", format="auto")
    with pytest.raises(ValueError, match=r"is stale: it was made with tokenizer='.*', now 'bytes'\. .*: adopt!$"):
        index.check(tokenizer="bytes", text_field="text", format="auto")


def test_a_changed_file_is_one_message_at_open_and_at_reading(
    documents: Documents, tokenizer_json: Path, tmp_path: Path
) -> None:
    for i in range(100):
        write.write_raw(tmp_path / f"{i:03}.bin", documents[:3])
    index = run(tmp_path, tmp_path / "out", tokenizer_json)
    content = bytearray((tmp_path / "000.bin").read_bytes())
    (tmp_path / "000.bin").write_bytes(content[:-2])
    message = (
        r"out/data reads its ids from .*000\.bin, which moved or changed .*: it had [\d,]+ bytes and has .* adopt!"
    )
    with pytest.raises(FileError, match=message):
        PreparedIndex(index.location)
    with pytest.raises(FileError, match=message):
        index.read(np.asarray([0]))
    content[0] ^= 1
    (tmp_path / "000.bin").write_bytes(content)
    with pytest.raises(FileError, match=r"its first or last bytes are others"):
        PreparedIndex(index.location)
    (tmp_path / "000.bin").unlink()
    with pytest.raises(FileError, match=r"it cannot be opened \(No such file"):
        PreparedIndex(index.location)
    shutil.copy(tmp_path / "001.bin", tmp_path / "000.bin")
    PreparedIndex(index.location).read(np.asarray([0]))
    unchecked = next(i for i in range(100) if i not in np.linspace(0, 99, 64, dtype=int))
    (tmp_path / f"{unchecked:03}.bin").write_bytes(content)
    with pytest.raises(FileError, match=rf"{unchecked:03}\.bin, which moved or changed"):
        PreparedIndex(index.location).read(np.arange(300))


def test_a_change_in_the_middle_is_found_by_verify(documents: Documents, tokenizer_json: Path, tmp_path: Path) -> None:
    write.write_raw(tmp_path / "a.bin", documents)
    index = run(tmp_path / "a.bin", tmp_path / "out", tokenizer_json)
    content = bytearray((tmp_path / "a.bin").read_bytes())
    assert len(content) > 3 * 4096
    content[len(content) // 2] ^= 1
    (tmp_path / "a.bin").write_bytes(content)
    [line] = PreparedIndex(index.location).verify()
    assert re.match(r".*a\.bin: tokens 0 to \d+ have other ids than were written", line)


def test_moved_files_are_adopted_again_without_reading_them(
    documents: Documents, tokenizer_json: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old").mkdir()
    write.write_raw(tmp_path / "old" / "a.bin", documents)
    run(tmp_path / "old", tmp_path / "out", tokenizer_json)
    (tmp_path / "old").rename(tmp_path / "new")
    with pytest.raises(FileError, match=r"old/a\.bin, which moved or changed.*moved files with the same contents"):
        PreparedIndex(tmp_path / "out" / "data")

    def scan(self: dense.SplitFile, part: int) -> foreign_file.Found:
        raise AssertionError("the file is read again")

    monkeypatch.setattr(dense.SplitFile, "scan", scan)
    assert_holds(run(tmp_path / "new", tmp_path / "out", tokenizer_json), documents)
    row = adopt(
        str(tmp_path / "new"),
        tmp_path / "out",
        name="data",
        tokenizer=str(tokenizer_json),
        end_token=None,
        dtype=None,
        column=None,
        command="adopt!",
        stream=io.StringIO(),
    )
    assert row.state == "there"


def test_an_interrupted_call_goes_on_after_the_files_it_has_scanned(
    documents: Documents, tokenizer_json: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(20):
        write.write_raw(tmp_path / f"{i:02}.bin", documents[i : i + 3])
    monkeypatch.setattr(adopting, "_SAVE_S", 0.0)
    monkeypatch.setattr(adopting, "_threads", lambda: 1)
    scan, scanned = dense.SplitFile.scan, []

    def failing(self: dense.SplitFile, part: int) -> foreign_file.Found:
        if self.path.name == "12.bin" and "12.bin" not in scanned:
            scanned.append("12.bin")
            raise KeyboardInterrupt
        scanned.append(self.path.name)
        return scan(self, part)

    monkeypatch.setattr(dense.SplitFile, "scan", failing)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, tmp_path / "out", tokenizer_json)
    scanned[:] = ["12.bin"]
    stream = io.StringIO()
    index = run(tmp_path, tmp_path / "out", tokenizer_json, stream=stream)
    assert re.search(r"data: goes on after (\d+) of 20 files", stream.getvalue())
    assert "05.bin" not in scanned
    assert_holds(index, [document for i in range(20) for document in documents[i : i + 3]])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["data"]


def test_compressed_shards_are_refused_with_the_way_out(
    documents: Documents, tokenizer_json: Path, tmp_path: Path
) -> None:
    write.write_mds(tmp_path / "a", documents, compression="zstd:3")
    with pytest.raises(FileError, match=r"shard\.00000\.mds\.zstd is compressed \(zstd:3\).*compression=None"):
        run(tmp_path / "a", tmp_path / "out", tokenizer_json)


def test_an_mds_column_is_named_where_it_is_not_known(
    documents: Documents, tokenizer_json: Path, tmp_path: Path
) -> None:
    write.write_mds(tmp_path / "a", documents, column="ids")
    with pytest.raises(ValueError, match=r"which column holds the ids\? Set --column to one of id, ids, zz\."):
        run(tmp_path / "a", tmp_path / "out", tokenizer_json)
    with pytest.raises(ValueError, match=r"no column 'nothing'\. Set --column to one of id, ids, zz\."):
        run(tmp_path / "a", tmp_path / "out", tokenizer_json, column="nothing")
    with pytest.raises(ValueError, match=r"column 'id' is of encoding 'str', and ids are bytes or ndarray"):
        run(tmp_path / "a", tmp_path / "out", tokenizer_json, column="id")
    assert_holds(run(tmp_path / "a", tmp_path / "out", tokenizer_json, column="ids"), documents)


def test_parquet_without_lists_of_ids_is_refused(documents: Documents, tokenizer_json: Path, tmp_path: Path) -> None:
    write.write_parquet_ids(tmp_path / "a.parquet", documents, column="ids", kind="float")
    with pytest.raises(ValueError, match=r"no column 'input_ids'\. Set --column to one of ids, attention_mask"):
        run(tmp_path / "a.parquet", tmp_path / "out", tokenizer_json)
    with pytest.raises(ValueError, match=r"column 'ids' is list<.*float>, and ids are lists of integers"):
        run(tmp_path / "a.parquet", tmp_path / "out", tokenizer_json, column="ids")


def test_files_cut_short_or_of_another_kind_are_refused(
    documents: Documents, tokenizer_json: Path, tmp_path: Path
) -> None:
    def refused(path: Path, message: str) -> None:
        with pytest.raises((ValueError, FileError), match=message):
            run(path, tmp_path / "out", tokenizer_json)

    write.write_megatron(tmp_path / "m", documents)
    idx, ids = (tmp_path / "m.idx").read_bytes(), (tmp_path / "m.bin").read_bytes()
    (tmp_path / "m.bin").write_bytes(ids[:-2])
    refused(tmp_path / "m", r"m\.bin: [\d,]+ bytes, and m\.idx says [\d,]+: one of them was cut short")
    (tmp_path / "m.idx").write_bytes(idx[:-3])
    refused(tmp_path / "m", r"m\.idx: [\d,]+ bytes, and its head says [\d,]+: cut short")
    (tmp_path / "m.idx").write_bytes(b"x" + idx[1:])
    refused(tmp_path / "m", r"m\.idx: not an index of Megatron")
    (tmp_path / "m.idx").write_bytes(idx[:17] + b"\7" + idx[18:])
    refused(tmp_path / "m", r"m\.idx: version 1 with dtype code 7; version 1 with codes 1, 2, 3, 4, 5, 8 can be read")
    (tmp_path / "m.idx").write_bytes(idx[: 42 + 4 * len(documents)] + b"\1" + idx[43 + 4 * len(documents) :])
    refused(tmp_path / "m", r"m\.idx: its sequences do not lie one after another")
    (tmp_path / "m.bin").unlink()
    refused(tmp_path / "m", r"m\.bin is missing, and its \.idx is there")
    write.write_llm_c(tmp_path / "c.bin", documents)
    content = (tmp_path / "c.bin").read_bytes()
    (tmp_path / "c.bin").write_bytes(content[:-2])
    refused(tmp_path / "c.bin", r"c\.bin: [\d,]+ bytes, and its head says [\d,]+: cut short")
    (tmp_path / "r.bin").write_bytes(b"\0\0\0")
    refused(tmp_path / "r.bin", r"r\.bin: 3 bytes are no whole number of uint16 ids\..* set --dtype")
    np.save(tmp_path / "n.npy", np.zeros((4, 2), np.uint16))
    refused(tmp_path / "n.npy", r"n\.npy: an array of shape \(4, 2\); a flat one is needed")
    np.save(tmp_path / "f.npy", np.zeros(4))
    refused(tmp_path / "f.npy", r"f\.npy: ids must be little-endian integers, and these are float64")
    refused(Path("s3:/x"), r"nothing there")
    with pytest.raises(ValueError, match=r"--from s3://x: files can only be adopted on a local disk"):
        run("s3://x", tmp_path / "out", tokenizer_json)


def test_a_folder_of_several_layouts_is_refused(documents: Documents, tokenizer_json: Path, tmp_path: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            run(tmp_path, tmp_path / "out", tokenizer_json)

    (tmp_path / "a.txt").touch()
    refused(r"no token files\. Set --from to a file, folder or glob of one layout: Megatron")
    write.write_raw(tmp_path / "a.bin", documents)
    write.write_raw(tmp_path / "a.npy", documents)
    refused(r"files of several layouts \(1 \.bin, 1 \.npy\)")
    (tmp_path / "a.npy").unlink()
    write.write_llm_c(tmp_path / "b.bin", documents)
    refused(r"some \.bin files below .* have a header, others none")
    write.write_llm_c(tmp_path / "a.bin", documents, model="llama-3")
    refused(r"the ids are of several dtypes: uint32 \(.*a\.bin\), uint16 \(.*b\.bin\)")
    write.write_megatron(tmp_path / "b", documents)
    refused(r"a\.bin has no \.idx beside it, and others have")


def test_the_index_of_files_is_small(tokenizer_json: Path, tmp_path: Path) -> None:
    """4.5 bytes per document for files without gaps, whatever they hold."""
    write.write_raw(tmp_path / "a.bin", [[5] * 99 + [END]] * 1600)
    index = run(tmp_path / "a.bin", tmp_path / "out", tokenizer_json)
    sizes = {path.name: path.stat().st_size for path in Path(index.location).iterdir()}
    assert sizes[reader.LENGTHS] == 1600 * 4 + 101 * 8
    assert sizes[reader.PLACES] == 4 * 8
    assert sum(sizes.values()) < 1600 * 6


def test_reading_opens_no_file_for_longer_than_a_read(
    documents: Documents, tokenizer_json: Path, tmp_path: Path
) -> None:
    write.write_mds(tmp_path / "a", documents, per_shard=2)
    index = run(tmp_path / "a", tmp_path / "out", tokenizer_json)
    before = len(os.listdir("/proc/self/fd"))
    index.read(np.arange(83))
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_adopted_index_is_not_opened_behind_a_url(
    documents: Documents, tokenizer_json: Path, tmp_path: Path
) -> None:
    from tests.data.sources.object_store import web_store

    write.write_raw(tmp_path / "a.bin", documents)
    index = run(tmp_path / "a.bin", tmp_path / "out", tokenizer_json)
    with web_store() as store:
        store.files |= {f"data/{path.name}": path.read_bytes() for path in Path(index.location).iterdir()}
        with pytest.raises(ValueError, match=r"/data: an adopted index refers to files of the machine"):
            PreparedIndex(f"{store.url}/data", cache_dir=tmp_path)


def test_an_existing_folder_that_is_no_index_is_kept(
    documents: Documents, tokenizer_json: Path, tmp_path: Path
) -> None:
    write.write_raw(tmp_path / "a.bin", documents)
    (tmp_path / "out" / "data").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"out/data exists and is not a prepared index\. Remove it, or set --name"):
        run(tmp_path / "a.bin", tmp_path / "out", tokenizer_json)
    run(tmp_path / "a.bin", tmp_path / "out", tokenizer_json, name="other")
    body = json.loads((tmp_path / "out" / "other" / reader.INDEX).read_text())
    assert body["adopted"]["root"] == str(tmp_path)


@pytest.mark.parametrize("name", ["bytes", "array", "uint32"])
def test_shards_that_mosaicml_itself_wrote_hold_their_documents(
    name: str, tokenizer_json: Path, tmp_path: Path
) -> None:
    """tests/golden/foreign/make_mds.py wrote them, with mosaicml-streaming 0.13.0."""
    documents = [[5 + (i * j) % 270 for j in range(i + 1)] + [END] for i in range(12)] + [[3] * 300]
    golden = Path(__file__).parents[2] / "golden" / "foreign" / f"mds_{name}"
    assert len(list(golden.glob("*.mds"))) > 1
    assert_holds(run(golden, tmp_path / "out", tokenizer_json), documents)
