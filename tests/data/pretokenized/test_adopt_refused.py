"""Token files that cannot be adopted, or have changed since, are refused with the way out."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jtrain.data.pretokenized import index_format
from jtrain.data.pretokenized.reader import PreparedIndex
from jtrain.data.sources.formats.masked_text import MaskFields
from jtrain.data.tokenizer import make_tokenizer
from jtrain.errors import FileError, UserError
from tests.data.pretokenized import foreign_writers as write
from tests.data.pretokenized.adopting import assert_holds, run
from tests.data.pretokenized.foreign_writers import Documents


def test_an_adopted_index_is_refused_where_a_loss_mask_is_wanted(
    documents: Documents, tokenizer_json: Path, tmp_path: Path
) -> None:
    write.write_raw(tmp_path / "train.bin", documents)
    index = run(tmp_path / "train.bin", tmp_path / "out", tokenizer_json)
    index.check_mask(None)
    with pytest.raises(
        UserError, match=r"holds ids without a loss mask, but mask_field='m' is set.*remove mask_field"
    ):
        index.check_mask(MaskFields("m", "mask_field", mask_prompt=True))


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
    with pytest.raises(
        ValueError, match=r"none of the 120 ids is 1, the end id of --tokenizer .* Set --end-token"
    ):
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
    with pytest.raises(
        ValueError, match=r"is stale: it was made with tokenizer='.*', now 'bytes'\. .*: adopt!$"
    ):
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
        r"out/data reads its ids from .*000\.bin, which moved or changed .*: it had [\d,]+ bytes and "
        r"has .* adopt!"
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


def test_compressed_shards_are_refused_with_the_way_out(
    documents: Documents, tokenizer_json: Path, tmp_path: Path
) -> None:
    write.write_mds(tmp_path / "a", documents, compression="zstd:3")
    with pytest.raises(
        FileError, match=r"shard\.00000\.mds\.zstd is compressed \(zstd:3\).*compression=None"
    ):
        run(tmp_path / "a", tmp_path / "out", tokenizer_json)


def test_an_mds_column_is_named_where_it_is_not_known(
    documents: Documents, tokenizer_json: Path, tmp_path: Path
) -> None:
    write.write_mds(tmp_path / "a", documents, column="ids")
    with pytest.raises(ValueError, match=r"which column holds the ids\? Set --column to one of ids\."):
        run(tmp_path / "a", tmp_path / "out", tokenizer_json)
    with pytest.raises(ValueError, match=r"no column 'nothing'\. Set --column to one of ids\."):
        run(tmp_path / "a", tmp_path / "out", tokenizer_json, column="nothing")
    with pytest.raises(ValueError, match=r"column 'id' is of encoding 'str', and ids are bytes or ndarray"):
        run(tmp_path / "a", tmp_path / "out", tokenizer_json, column="id")
    assert_holds(run(tmp_path / "a", tmp_path / "out", tokenizer_json, column="ids"), documents)


def test_parquet_without_lists_of_ids_is_refused(
    documents: Documents, tokenizer_json: Path, tmp_path: Path
) -> None:
    write.write_parquet_ids(tmp_path / "a.parquet", documents, column="ids", kind="float")
    with pytest.raises(
        ValueError, match=r"no column 'input_ids'\. Set --column to one of 'attention_mask'\."
    ):
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
    refused(
        tmp_path / "m",
        r"m\.idx: version 1 with dtype code 7; version 1 with codes 1, 2, 3, 4, 5, 8 can be read",
    )
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


def test_a_folder_of_several_layouts_is_refused(
    documents: Documents, tokenizer_json: Path, tmp_path: Path
) -> None:
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


def test_an_adopted_index_is_not_opened_behind_a_url(
    documents: Documents, tokenizer_json: Path, tmp_path: Path
) -> None:
    from tests.data.sources.object_store import web_store

    write.write_raw(tmp_path / "a.bin", documents)
    index = run(tmp_path / "a.bin", tmp_path / "out", tokenizer_json)
    with web_store() as store:
        store.files.update(
            {f"data/{path.name}": path.read_bytes() for path in Path(index.location).iterdir()}
        )
        with pytest.raises(ValueError, match=r"/data: an adopted index refers to files of the machine"):
            PreparedIndex(f"{store.url}/data", cache_dir=tmp_path)


def test_an_existing_folder_that_is_no_index_is_kept(
    documents: Documents, tokenizer_json: Path, tmp_path: Path
) -> None:
    write.write_raw(tmp_path / "a.bin", documents)
    (tmp_path / "out" / "data").mkdir(parents=True)
    with pytest.raises(
        ValueError, match=r"out/data exists and is not a prepared index\. Remove it, or set --name"
    ):
        run(tmp_path / "a.bin", tmp_path / "out", tokenizer_json)
    run(tmp_path / "a.bin", tmp_path / "out", tokenizer_json, name="other")
    body = json.loads((tmp_path / "out" / "other" / index_format.INDEX).read_text())
    assert body["adopted"]["root"] == str(tmp_path)


def test_a_path_at_which_nothing_is_names_what_can_be_adopted(tokenizer_json: Path, tmp_path: Path) -> None:
    with pytest.raises(
        FileError, match=r"^--from .*nowhere: nothing there; .*Set --from to a file, a folder"
    ):
        run(tmp_path / "nowhere", tmp_path / "out", tokenizer_json)


def test_a_negative_id_of_raw_signed_ids_is_refused(
    documents: Documents, tokenizer_json: Path, tmp_path: Path
) -> None:
    """As in files whose header says int32: -100 is no id, and would be one of 4 billion as an unsigned number."""
    documents[3][0] = -100
    write.write_raw(tmp_path / "a.npy", documents, dtype="int32")
    with pytest.raises(ValueError, match=r"id 4,294,967,196 \(-100 as a signed number\), token"):
        run(tmp_path / "a.npy", tmp_path / "out", tokenizer_json, dtype="int32")
