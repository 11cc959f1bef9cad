"""Token files of other projects are adopted in place: their documents are records, their ids stay where they
lie.
"""

import io
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jtrain.data.pretokenized import adopt as adopting
from jtrain.data.pretokenized import index_format, scanned_parts
from jtrain.data.pretokenized.adopt import adopt
from jtrain.data.pretokenized.foreign import dense, foreign_file
from jtrain.data.pretokenized.reader import PreparedIndex
from jtrain.data.tokenizer import make_tokenizer
from jtrain.errors import FileError
from tests.data.descriptors import descriptors
from tests.data.pretokenized import foreign_writers as write
from tests.data.pretokenized.adopting import END, assert_holds, run
from tests.data.pretokenized.foreign_writers import Documents

LAYOUTS: dict[str, Callable[[Path, Documents], None]] = {
    "megatron": lambda folder, documents: write.write_megatron(folder / "a", documents),
    "megatron-int32": lambda folder, documents: write.write_megatron(folder / "a", documents, dtype="int32"),
    "megatron-int64": lambda folder, documents: write.write_megatron(folder / "a", documents, dtype="int64"),
    "megatron-sequences": lambda folder, documents: write.write_megatron(
        folder / "a", documents, sequences=3
    ),
    "megatron-multimodal": lambda folder, documents: write.write_megatron(
        folder / "a", documents, index="multimodal"
    ),
    "fairseq": lambda folder, documents: write.write_megatron(folder / "a", documents, index="fairseq"),
    "nanogpt": lambda folder, documents: write.write_raw(folder / "train.bin", documents),
    "llm.c": lambda folder, documents: write.write_llm_c(folder / "train.bin", documents),
    "llm.c-llama-3": lambda folder, documents: write.write_llm_c(
        folder / "train.bin", documents, model="llama-3"
    ),
    "olmo": lambda folder, documents: write.write_raw(folder / "part-0-00000.npy", documents),
    "numpy": lambda folder, documents: write.write_npy(folder / "a.npy", documents),
    "mds": lambda folder, documents: write.write_mds(folder, documents),
    "mds-bytes": lambda folder, documents: write.write_mds(folder, documents, encoding="bytes"),
    "mds-own-dtype": lambda folder, documents: write.write_mds(folder, documents, encoding="ndarray"),
    "mds-input_ids": lambda folder, documents: write.write_mds(folder, documents, column="input_ids"),
    "parquet": lambda folder, documents: write.write_parquet_ids(folder / "a.parquet", documents),
    "parquet-int64": lambda folder, documents: write.write_parquet_ids(
        folder / "a.parquet", documents, kind="int64"
    ),
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
    assert (index_format.IDS in ours) == name.startswith("parquet"), "only Parquet's ids are copied"
    assert index.made_of["tokenizer"] == make_tokenizer(str(tokenizer_json)).identity


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("kind", ["megatron", "raw", "mds", "parquet"])
def test_several_files_are_one_source_and_name_their_documents(
    kind: str, documents: Documents, tokenizer_json: Path, tmp_path: Path
) -> None:
    """The documents lie in three files, 30 in each but the last; MDS shards have 20."""
    theirs = tmp_path / "theirs"
    (theirs / "deep").mkdir(parents=True)
    parts = {
        theirs / "a": documents[:30],
        theirs / "b": documents[30:60],
        theirs / "deep" / "c": documents[60:],
    }
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
    """Documents of exactly one part, of many parts, of the end id alone, and one without an end id as the
    last.
    """
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


def test_a_change_in_the_middle_is_found_by_verify(
    documents: Documents, tokenizer_json: Path, tmp_path: Path
) -> None:
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
    with pytest.raises(
        FileError, match=r"old/a\.bin, which moved or changed.*moved files with the same contents"
    ):
        PreparedIndex(tmp_path / "out" / "data")

    def scan(self: dense.SplitFile, part: int) -> foreign_file.PartContent:
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
    monkeypatch.setattr(adopting, "SAVE_S", 0.0)
    monkeypatch.setattr(scanned_parts, "count_threads", lambda: 1)
    scan, scanned = dense.SplitFile.scan, []

    def failing(self: dense.SplitFile, part: int) -> foreign_file.PartContent:
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


def test_the_index_of_files_is_small(tokenizer_json: Path, tmp_path: Path) -> None:
    """4.5 bytes per document for files without gaps, whatever they hold."""
    write.write_raw(tmp_path / "a.bin", [[5] * 99 + [END]] * 1600)
    index = run(tmp_path / "a.bin", tmp_path / "out", tokenizer_json)
    sizes = {path.name: path.stat().st_size for path in Path(index.location).iterdir()}
    assert sizes[index_format.LENGTHS] == 1600 * 4 + 101 * 8
    assert sizes[index_format.PLACES] == 4 * 8
    assert sum(sizes.values()) < 1600 * 6


def test_reading_opens_no_file_for_longer_than_a_read(
    documents: Documents, tokenizer_json: Path, tmp_path: Path
) -> None:
    write.write_mds(tmp_path / "a", documents, per_shard=2)
    index = run(tmp_path / "a", tmp_path / "out", tokenizer_json)
    before = descriptors()
    index.read(np.arange(83))
    assert descriptors() <= before


@pytest.mark.parametrize("name", ["bytes", "array", "uint32"])
def test_shards_that_mosaicml_itself_wrote_hold_their_documents(
    name: str, tokenizer_json: Path, tmp_path: Path
) -> None:
    """tests/golden/foreign/make_mds.py wrote them, with mosaicml-streaming 0.13.0."""
    documents = [[5 + (i * j) % 270 for j in range(i + 1)] + [END] for i in range(12)] + [[3] * 300]
    golden = Path(__file__).parents[2] / "golden" / "foreign" / f"mds_{name}"
    assert len(list(golden.glob("*.mds"))) > 1
    assert_holds(run(golden, tmp_path / "out", tokenizer_json), documents)
