"""ArrayRecord, WebDataset, Arrow, and grain.MapDataset made by the user."""

import io
import json
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from jtrain.data.sources.data_files import saved_dataset_files
from jtrain.data.sources.formats import BadRecord
from jtrain.data.sources.formats import arrayrecord as arrayrecord_format
from jtrain.data.sources.formats.arrayrecord import ArrayRecordFile
from jtrain.data.sources.formats.arrow import ArrowFile
from jtrain.data.sources.formats.graindataset import GrainDataset
from jtrain.data.sources.formats.masked_text import TextFields
from jtrain.data.sources.formats.webdataset import TarFile
from jtrain.data.sources.storage import StoredFile, find_files
from jtrain.errors import FileError

FIELD = "data.sources.web"


def stored(path: Path) -> StoredFile:
    return find_files(str(path), field=f"{FIELD}.path")[0]


def write_array_record(path: Path, records: Iterable[bytes]) -> Path:
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return path


def array_record(path: Path, text_field: str = "text") -> ArrayRecordFile:
    return ArrayRecordFile(stored(path), TextFields(text_field, FIELD))


def write_tar(path: Path, members: Sequence[tuple[str, bytes]], format: int = tarfile.GNU_FORMAT) -> Path:
    with tarfile.open(path, "w", format=format) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def tar_file(path: Path, text_field: str = "txt") -> TarFile:
    return TarFile(stored(path), TextFields(text_field, FIELD), cache_dir=path.parent / "cache")


def write_arrow(path: Path, table: pa.Table, *, rows: int = 7, **options: Any) -> Path:
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, table.schema, **options) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def arrow(path: Path, text_field: str = "text") -> ArrowFile:
    return ArrowFile(stored(path), TextFields(text_field, FIELD))


def test_an_array_record_is_its_text_or_a_field_of_it_where_it_is_json(tmp_path: Path) -> None:
    records = ["plain", '{"text": "from json", "id": 3}', "{ not json", ""]
    path = write_array_record(tmp_path / "a.array_record", [record.encode() for record in records])
    file = array_record(path)
    assert file.read([3, 1, 0, 2]) == ["", "from json", "plain", "{ not json"]
    assert array_record(path, text_field="").read([1]) == [records[1]]


def test_a_bad_array_record_names_file_and_record(tmp_path: Path) -> None:
    path = write_array_record(tmp_path / "a.array_record", [b"\xff\xfe", b'{"body": "x"}', b"good"])
    file = array_record(path)
    with pytest.raises(
        BadRecord, match=r"a\.array_record, record 0: not UTF-8 at byte 0.*data\.on_bad_record='skip'"
    ):
        file[0]
    with pytest.raises(BadRecord, match=r"record 1: no field 'text'; its fields: 'body'.*web\.text_field=''"):
        file[1]
    assert file[2] == "good"


def test_a_corrupt_array_record_is_named_and_its_neighbours_are_read(tmp_path: Path) -> None:
    """The library's reader cannot be used after such an error: without a new one, one record would lose the
    rest.
    """
    rng = np.random.default_rng(0)
    texts = [rng.bytes(300).hex() for _ in range(300)]
    path = write_array_record(tmp_path / "a.array_record", [text.encode() for text in texts])
    content = bytearray(path.read_bytes())
    content[len(content) // 4 : len(content) // 4 + 20] = bytes(20)
    path.write_bytes(content)
    found = array_record(path).read(list(range(300)))
    bad = [i for i, text in enumerate(found) if isinstance(text, BadRecord)]
    assert 1 <= len(bad) <= 2
    assert f"a.array_record, record {bad[0]}: corrupt (" in str(found[bad[0]])
    assert [text for i, text in enumerate(found) if i not in bad] == [
        t for i, t in enumerate(texts) if i not in bad
    ]


@pytest.mark.parametrize("content", [b"hello", b"hello" * 50_000], ids=["short", "long"])
def test_a_file_that_is_no_array_record_or_cut_short_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.array_record"
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"a\.array_record: not a whole ArrayRecord file .*data\.sources\.web\.path"
    ):
        array_record(path)
    write_array_record(path, [bytes(100)] * 5000)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"a\.array_record: not a whole ArrayRecord file"):
        array_record(path)


def test_large_array_records_stay_open_a_bounded_number_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrayrecord_format, "MANY_RECORDS", 2)
    monkeypatch.setattr(arrayrecord_format, "OPEN_READERS", 3)
    files = []
    for i in range(10):
        records = [f"{i} {j}".encode() for j in range(2 + i % 2)]
        files.append(array_record(write_array_record(tmp_path / f"{i}.array_record", records)))
    open_readers = arrayrecord_format.open_readers
    assert not open_readers or len(open_readers) == 3
    for _ in range(2):
        assert [file[1] for file in files] == [f"{i} 1" for i in range(10)]
        assert list(open_readers) == [files[i]._file.key for i in (5, 7, 9)]
    for file in files:
        file.close()
    assert not open_readers


@pytest.mark.parametrize(
    "format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT], ids=["gnu", "pax", "ustar"]
)
def test_neighbouring_members_of_a_tar_are_one_sample(format: int, tmp_path: Path) -> None:
    folder = "shard/" + "long" * 30
    samples = [(f"{folder}/{i:04}", f"text {i} ü" * i) for i in range(20)]
    members = [("shard/README", b"not a sample"), ("__meta__.txt", b"nor this")]
    for name, text in samples:
        members += [(f"{name}.json", b"{}"), (f"{name}.txt", text.encode()), (f"{name}.seg.png", b"\x89PNG")]
    file = tar_file(write_tar(tmp_path / "a.tar", members, format))
    assert file.read(list(range(len(file)))) == [text for _, text in samples]


def test_a_large_tar_is_indexed_once(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [(f"{i:05}.txt", f"text {i}".encode()) for i in range(1500)])
    assert tar_file(path).read([0, 1499]) == ["text 0", "text 1499"]
    [index] = [file for file in (tmp_path / "cache" / "index").iterdir() if file.suffix == ".samples"]
    made = index.stat().st_mtime_ns
    assert tar_file(path).read([700]) == ["text 700"]
    assert index.stat().st_mtime_ns == made


def test_a_bad_sample_names_file_and_sample(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("0.txt", b"good"), ("1.jpg", b"x"), ("2.txt", b"a\xff")])
    file = tar_file(path)
    assert file[0] == "good"
    with pytest.raises(
        BadRecord, match=r"a\.tar, sample 1: 1\.jpg and what follows hold no member \.txt.*'skip'"
    ):
        file[1]
    with pytest.raises(BadRecord, match=r"a\.tar, sample 2: 2\.txt is not UTF-8 at byte 1"):
        file[2]


def test_a_tar_without_the_suffix_says_which_there_are(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("0.txt", b"x"), ("0.json", b"{}")])
    with pytest.raises(ValueError, match=r"a\.tar: no member ends in \.text; suffixes: \.json, \.txt\. Set "):
        tar_file(path, text_field="text")


def test_a_tar_that_is_cut_short_or_corrupt_is_refused(tmp_path: Path) -> None:
    """Python's own tarfile takes either as the end of the archive and silently loses the rest."""
    path = write_tar(tmp_path / "a.tar", [(f"{i}.txt", b"x" * 600) for i in range(10)])
    whole = path.read_bytes()
    path.write_bytes(whole[: 5 * 1536])
    with pytest.raises(ValueError, match=r"a\.tar: the tar file ends without its end mark: cut short"):
        tar_file(path)
    path.write_bytes(whole[: 5 * 1536 - 500])
    with pytest.raises(
        ValueError, match=r"a\.tar: not a whole tar file: at byte 6,144, its 600 bytes go beyond the end"
    ):
        tar_file(path)
    path.write_bytes(whole[: 3 * 1536] + b"\x07" * 512 + whole[3 * 1536 + 512 :])
    with pytest.raises(ValueError, match=r"a\.tar: not a whole tar file: at byte 4,608, "):
        tar_file(path)
    path.write_bytes(whole[: 3 * 1536] + b"4" + whole[3 * 1536 + 1 :])
    with pytest.raises(
        ValueError, match=r"a\.tar: not a whole tar file: at byte 4,608, the header's checksum is wrong"
    ):
        tar_file(path)
    path.write_bytes(b"hello, I am no tar file at all. " * 100)
    with pytest.raises(ValueError, match=r"a\.tar: not a whole tar file: at byte 0, "):
        tar_file(path)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_arrow_rows_are_read_in_any_order(kind: pa.DataType, tmp_path: Path) -> None:
    texts = [f"text {i} ü" * (i % 9) for i in range(40)]
    path = write_arrow(tmp_path / "a.arrow", pa.table({"id": list(range(40)), "text": pa.array(texts, kind)}))
    order = [39, 0, 7, 6, 7, 20]
    assert arrow(path).read(order) == [texts[i] for i in order]
    assert len(arrow(path)) == 40


def test_arrow_and_array_record_texts_may_lie_in_a_field_of_another(tmp_path: Path) -> None:
    rows = [{"text": f"text {i}"} if i % 3 else None for i in range(20)]
    path = write_arrow(tmp_path / "a.arrow", pa.table({"id": list(range(20)), "meta": rows}))
    assert arrow(path, "meta.text").read([19, 7, 1]) == ["text 19", "text 7", "text 1"]
    with pytest.raises(BadRecord, match=r"a\.arrow, row 3: column 'meta\.text' is null"):
        arrow(path, "meta.text")[3]
    path = write_array_record(tmp_path / "a.array_record", [b'{"meta": {"text": "nested"}}'])
    assert array_record(path, "meta.text")[0] == "nested"


def test_arrows_file_format_is_read_as_well(tmp_path: Path) -> None:
    table = pa.table({"text": ["one", "two", "three"]})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    assert arrow(tmp_path / "a.arrow").read([2, 0, 1]) == ["three", "one", "two"]


def test_arrow_that_cannot_be_read_row_by_row_says_why(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    write_arrow(path, pa.table({"body": ["x", None], "n": [1, 2]}))
    with pytest.raises(ValueError, match=r"a\.arrow: no column 'text'; its columns: body, n"):
        arrow(path)
    with pytest.raises(BadRecord, match=r"a\.arrow, row 1: column 'body' is null"):
        arrow(path, "body")[1]
    write_arrow(path, pa.table({"text": ["x" * 1000] * 9}), options=pa.ipc.IpcWriteOptions(compression="lz4"))
    with pytest.raises(ValueError, match=r"a\.arrow: its batches are compressed"):
        arrow(path)
    words = pa.array(["a", "b", "a"]).dictionary_encode()
    write_arrow(path, pa.table({"text": ["x"] * 3, "word": words}))
    with pytest.raises(ValueError, match=r"a\.arrow: holds a dictionary"):
        arrow(path)


def test_arrow_that_is_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    path = write_arrow(tmp_path / "a.arrow", pa.table({"text": [f"{i} " * 30 for i in range(40)]}))
    whole = path.read_bytes()
    assert len(arrow(path)) == 40
    for cut in (8, 9, 100, len(whole) // 2, len(whole) - 100, len(whole) - 4):
        path.write_bytes(whole[:-cut])
        with pytest.raises(
            ValueError, match=r"a\.arrow: not a whole Arrow stream .*cut short, or of another format"
        ):
            arrow(path)
    path.write_bytes(b"hello, I am no Arrow file at all")
    with pytest.raises(ValueError, match=r"a\.arrow: not a whole Arrow stream"):
        arrow(path)


def test_arrow_that_is_damaged_during_a_run_is_named(tmp_path: Path) -> None:
    path = write_arrow(tmp_path / "a.arrow", pa.table({"text": [f"{i} " * 30 for i in range(40)]}))
    file = arrow(path)
    whole = bytearray(path.read_bytes())
    start = int(file._batch_start[2])
    whole[start : start + 40] = b"\x01" * 40
    path.write_bytes(whole)
    assert file[0] == "0 " * 30
    with pytest.raises(OSError, match=r"a\.arrow: cannot be read \(.*\)\. Save the dataset again"):
        file[15]
    whole[:40] = b"\x01" * 40  # the schema as well
    path.write_bytes(whole)
    with pytest.raises(OSError, match=r"a\.arrow: cannot be read \(.*\)\. Save the dataset again"):
        file[0]


def write_saved_dataset(folder: Path, texts: Sequence[str], *, shards: int) -> Path:
    """Writes the files of `datasets.Dataset.save_to_disk(folder, num_shards=shards)` and the cache file of a
    map.
    """
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{shards:05}.arrow" for i in range(shards)]
    for i, name in enumerate(names):
        write_arrow(folder / name, pa.table({"text": list(texts[i::shards])}))
    write_arrow(folder / "cache-0123456789abcdef.arrow", pa.table({"text": ["transformed"]}))
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(
        json.dumps({"features": {"text": {"dtype": "string", "_type": "Value"}}})
    )
    return folder


def test_a_saved_dataset_is_its_shards_and_not_what_lies_beside_them(tmp_path: Path) -> None:
    folder = write_saved_dataset(tmp_path / "saved", ["a", "b", "c", "d"], shards=2)
    files = find_files(str(folder), field=f"{FIELD}.path")
    assert len(files) == 5
    shards = saved_dataset_files(files, field=f"{FIELD}.path")
    assert shards is not None
    assert [file.name for file in shards] == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    assert saved_dataset_files(shards, field=f"{FIELD}.path") is None, "any other folder"
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(FileError, match=r"web\.path: data-00001-of-00002\.arrow is named by state\.json"):
        saved_dataset_files(find_files(str(folder), field=f"{FIELD}.path"), field=f"{FIELD}.path")


def test_a_saved_dataset_of_several_splits_is_refused(tmp_path: Path) -> None:
    write_saved_dataset(tmp_path / "train", ["a"], shards=1)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(
        ValueError, match=r"web\.path: a dataset of several splits \(train, test\).*such as 'train'"
    ):
        saved_dataset_files(find_files(str(tmp_path), field=f"{FIELD}.path"), field=f"{FIELD}.path")


MADE = "tests.data.grain_sources"


def test_a_grain_dataset_is_read_by_number_and_what_it_filters_out_is_empty() -> None:
    assert GrainDataset(f"{MADE}:good", field=FIELD).read([9, 0]) == ["9", "0"]
    assert GrainDataset(f"{MADE}:filtered", field=FIELD).read([2, 3]) == ["2", ""]


def test_a_bad_element_of_a_grain_dataset_is_named() -> None:
    broken = GrainDataset(f"{MADE}:broken", field=FIELD)
    assert broken[1] == "1"
    with pytest.raises(BadRecord, match=r":broken, element 2: ZeroDivisionError.*data\.on_bad_record='skip'"):
        broken[2]
    with pytest.raises(BadRecord, match=r":numbers, element 4: it is int\d*, not text"):
        GrainDataset(f"{MADE}:numbers", field=FIELD)[4]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("endless", r"the dataset has no end\. Leave out `repeat\(\)`"),
        ("iterated", r"returned a \w*IterDataset, not a grain\.MapDataset"),
        ("nowhere", r"tests\.data\.grain_sources has no function 'nowhere'\. "),
    ],
)
def test_what_is_no_grain_dataset_is_refused(function: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"data\.sources\.web\.path='{MADE}:{function}': {message}"):
        GrainDataset(f"{MADE}:{function}", field=FIELD)


def test_a_grain_dataset_without_a_function_is_refused() -> None:
    with pytest.raises(ValueError, match=rf"data\.sources\.web\.path='{MADE}' must be 'module:name'"):
        GrainDataset(MADE, field=FIELD)
