"""Files that a source cannot gain: the refusals name the file and a way that works."""

import json
from pathlib import Path

import pytest

from jtrain.data import open_dataset
from jtrain.data.pretokenized.build import prepare_command
from tests.data.test_elastic import hosts_batches
from tests.data.test_gained_files import refused, spec, write_groups, write_lines


def test_stripes_are_named_by_their_files(tmp_path: Path) -> None:
    """A file of more than 256 KiB has stripes, which nobody can rename."""
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": "x" * 1000}) + "\n" for _ in range(600)))
    dataset = open_dataset(spec(folder), seed=0)
    assert " in 1 files, " in dataset.describe()
    _, state = hosts_batches(dataset, None, 1, 3)
    (folder / "a.jsonl").write_bytes((folder / "b.jsonl").read_bytes())
    assert "(a.jsonl sorts before b.jsonl, which the run has read" in refused(folder, state)


def test_refusals_say_which_file_and_a_way_that_works(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    for file in range(1, 9):
        write_lines(folder, file)
    _, state = hosts_batches(open_dataset(spec(folder), seed=0), None, 1, 3)
    write_lines(folder, 0)
    said = refused(folder, state)
    assert "(00.jsonl sorts before 08.jsonl, which the run has read: new files can only join if their" in said
    assert "Rename it so that it sorts after 08.jsonl, start" in said
    (folder / "00.jsonl").rename(folder / "09.jsonl")
    assert open_dataset(spec(folder), seed=0).resume_refusal(state) is None, "the way out works"

    for name in ("05a", "05b", "05c", "20"):
        (folder / f"{name}.jsonl").write_bytes((folder / "05.jsonl").read_bytes())
    said = refused(folder, state)
    assert "(3 files from 05a.jsonl on sort before 08.jsonl" in said
    assert "Rename them so that they sort after 08.jsonl" in said
    (folder / "01a.jsonl").write_bytes((folder / "05.jsonl").read_bytes())
    assert (
        "(4 more files than then sort before its last one of then, 08.jsonl, or others changed)"
        in refused(folder, state)
    )
    for name in ("01a", "05a", "05b", "05c"):
        (folder / f"{name}.jsonl").unlink()

    content = (folder / "03.jsonl").read_bytes()
    (folder / "03.jsonl").write_bytes(content[:-3] + b'x"}')
    assert open_dataset(spec(folder), seed=0).resume_refusal(state) is None, (
        "names, sizes and counts are what is compared"
    )
    (folder / "03.jsonl").write_bytes(content + b"\n" + content)
    assert "(its files, or what reads them, changed): the next batches would differ" in refused(folder, state)
    (folder / "03.jsonl").unlink()
    assert "(1 of its 8 files are gone): " in refused(folder, state)
    (folder / "03.jsonl").write_bytes(content)
    (folder / "08.jsonl").unlink()
    assert "(its last file of then, 08.jsonl, is gone): " in refused(folder, state)


@pytest.mark.parametrize("window", [1 << 26, 1 << 16], ids=["opened whole", "opened as it is read"])
def test_files_of_another_kind_cannot_join(window: int, tmp_path: Path) -> None:
    """Row groups have no sizes by which their chunks could be shuffled with those of JSON lines."""
    folder = tmp_path / "files"
    for file in range(60):
        write_lines(folder, file)
    _, state = hosts_batches(open_dataset(spec(folder, window), seed=0), None, 1, 3)
    assert state["sources"]["data"]["opened_whole"] == (window == 1 << 26)
    write_groups(folder, 60)
    said = refused(folder, state, window=window)
    assert "data has gained 60.parquet, whose texts have sizes that are only known by reading them" in said
    (folder / "60.parquet").rename(folder / "00.parquet")
    why = (
        "(00.parquet sorts before 59.jsonl"
        if window == 1 << 26
        else "data has gained 00.parquet, whose texts"
    )
    assert why in refused(folder, state, window=window)
    (folder / "00.parquet").rename(tmp_path / "00.parquet")
    assert open_dataset(spec(folder, window), seed=0).resume_refusal(state) is None, "the way out works"


def test_a_prepared_folder_with_more_files_is_another_index(tmp_path: Path) -> None:
    folder = tmp_path / "files"

    def prepare(out: str) -> str:
        data = spec(folder)
        options = {
            "tokenizer": "bytes",
            "end_token": None,
            "on_bad_record": "fail",
            "cache_dir": tmp_path / "cache",
        }
        prepare_command(data.named_sources, tmp_path / out, **options, workers=1, command="prepare")
        return str(tmp_path / out)

    for file in range(10):
        write_lines(folder, file)
    before = prepare("before")
    _, state = hosts_batches(open_dataset(spec(folder, prepared=before), seed=0), None, 1, 3)
    write_lines(folder, 10)
    said = refused(folder, state, prepared=prepare("after"))
    assert (
        "(what is prepared anew, or with more files, has another order: an index is cut and shuffled as a"
        in said
    )
    assert "Restore the folder that data.prepared named" in said
    assert open_dataset(spec(folder, prepared=before), seed=0).resume_refusal(state) is None, (
        "the way out works"
    )
