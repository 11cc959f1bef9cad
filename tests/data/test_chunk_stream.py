import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jtrain.data.sources.formats import BadRecord
from jtrain.data.sources.source import Source
from jtrain.data.stream.chunk_stream import ChunkStream
from jtrain.data.stream.source_setup import SourceSetup

TEXTS = [f"{i}:" + "ab ü\n" * (i % 23 + 5) for i in range(120)]


def _parquet_with_a_corrupt_row_group(folder: Path) -> Callable[[], None]:
    """Damages records 30 to 59 of the first of two files."""
    for i in range(2):
        pq.write_table(
            pa.table({"text": TEXTS[60 * i :][:60]}),
            folder / f"{i}.parquet",
            row_group_size=15,
            use_dictionary=False,
        )
    content = bytearray((folder / "0.parquet").read_bytes())
    for group in (2, 3):
        at = pq.read_metadata(folder / "0.parquet").row_group(group).column(0).data_page_offset
        content[at : at + 60] = bytes(60)
    (folder / "0.parquet").write_bytes(content)
    return lambda: None


def _one_parquet_file_with_a_corrupt_row_group(folder: Path) -> Callable[[], None]:
    damage = _parquet_with_a_corrupt_row_group(folder)
    (folder / "1.parquet").unlink()
    return damage


def _files_of_which_two_vanish(folder: Path) -> Callable[[], None]:
    for i in range(4):
        (folder / f"{i}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[30 * i :][:30])
        )
    (folder / "a.txt").write_text("one more")

    def damage() -> None:
        (folder / "1.jsonl").unlink()
        (folder / "a.txt").unlink()

    return damage


def _arrow_with_a_damaged_batch(folder: Path) -> Callable[[], None]:
    """Damages batch 1 of 4 in such a way that only reading it finds the damage."""
    table = pa.table({"text": TEXTS})
    with pa.OSFile(str(folder / "a.arrow"), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=30)

    def damage() -> None:
        content = bytearray((folder / "a.arrow").read_bytes())
        mark = b"\xff\xff\xff\xff"  # at the beginning of each message; the first is the schema's
        at = content.index(mark, content.index(mark, 4) + 4)
        content[at : at + 40] = b"\x01" * 40
        (folder / "a.arrow").write_bytes(content)

    return damage


DAMAGES = {
    _parquet_with_a_corrupt_row_group: (
        range(30, 60),
        r"0\.parquet: row group [23] cannot be read .*Replace the file",
    ),
    _one_parquet_file_with_a_corrupt_row_group: (range(30, 60), r"0\.parquet: row group [23] cannot be read"),
    _files_of_which_two_vanish: ([*range(30, 60), 120], r"(1\.jsonl|a\.txt): it is gone .*Put it back"),
    _arrow_with_a_damaged_batch: (range(30, 60), r"a\.arrow: cannot be read .*Save the dataset again"),
}


@pytest.fixture(params=DAMAGES, ids=lambda write: write.__name__[1:])
def damaged(
    request: pytest.FixtureRequest, tmp_path: Path
) -> tuple[Callable[..., ChunkStream], list[int], str]:
    """Function that opens a source with unreadable records, the numbers of these records, and the error of
    the file.
    """
    (tmp_path / "files").mkdir()
    damage = request.param(tmp_path / "files")

    def open_source(**fields: Any) -> ChunkStream:
        setup = {"name": "web", "tokenizer": "bytes", "end_token": None, "seed": 0, "eval_fraction": 0.0}
        setup |= {
            "on_bad_record": "skip",
            "window_bytes": 1 << 11,
            "chunk_tokens": 4096,
            "chunk_bytes": None,
            "eager_bytes": None,
            "decoded_cache_bytes": 1 << 20,
            "prepared": None,
        }
        source = Source(path=str(tmp_path / "files"))
        return ChunkStream(
            SourceSetup(source=source, cache_dir=str(tmp_path / "cache"), **{**setup, **fields})
        )

    opened = {policy: open_source(on_bad_record=policy) for policy in ("skip", "fail")}
    damage()
    bad, message = DAMAGES[request.param]
    return lambda on_bad_record="skip": opened[on_bad_record], list(bad), message


def test_what_cannot_be_read_is_skipped_and_nothing_else_however_a_run_is_cut(
    damaged: tuple[Callable[..., ChunkStream], list[int], str],
) -> None:
    """The stream must not depend on which documents are requested together."""
    documents, bad, _ = damaged[0](), damaged[1], damaged[2]
    numbers = np.arange(2 * len(documents), dtype=np.int64)
    alone = [documents.read(numbers[i : i + 1]) for i in range(len(numbers))]
    lengths = np.concatenate([one.lengths for one in alone])
    ids = np.concatenate([one.ids for one in alone])
    skipped = [pair for one in alone for pair in one.skipped]
    records = documents.locate(numbers).record
    assert sorted(records[records >= 0].tolist()) == sorted([*range(documents.num_documents or 0)] * 2)
    assert [number for number, _ in skipped] == np.flatnonzero(np.isin(records, bad)).tolist()
    for number, reason in skipped:
        assert reason.startswith(f"document {documents.identity_of(int(records[number]))}: "), (
            "what hosts agree on"
        )
    fatal = int(np.flatnonzero(records >= 0)[0])
    [(number, reason)] = documents.read(np.asarray([fatal]), skip={fatal}).skipped
    identity = documents.identity_of(int(records[fatal]))
    assert (number, reason) == (fatal, f"document {identity}: its loader did not survive it")
    assert (
        np.flatnonzero(lengths == 0).tolist()
        == np.flatnonzero((records < 0) | np.isin(records, bad)).tolist()
    )
    rng = np.random.default_rng(0)
    for parts in (1, 2, 7, 40):
        cuts = np.sort(rng.choice(np.arange(1, len(numbers)), parts - 1, replace=False))
        found = [documents.read(run) for run in np.split(numbers, cuts)]
        assert np.concatenate([one.lengths for one in found]).tolist() == lengths.tolist()
        assert np.concatenate([one.ids for one in found]).tolist() == ids.tolist()
        assert [pair for one in found for pair in one.skipped] == skipped


def test_what_cannot_be_read_is_no_text_in_evaluation_either(
    damaged: tuple[Callable[..., ChunkStream], list[int], str],
) -> None:
    documents, bad, message = damaged[0](), damaged[1], damaged[2]
    chunks = documents.chunks_of(np.arange(documents.num_documents or 0))
    assert np.flatnonzero(documents.read_chunks(chunks).lengths == 0).tolist() == bad
    with pytest.raises(BadRecord, match=message):
        damaged[0]("fail").read_chunks(chunks)


def test_what_cannot_be_read_stops_the_run_with_what_its_file_says_where_that_is_the_policy(
    damaged: tuple[Callable[..., ChunkStream], list[int], str],
) -> None:
    """The error comes at its document, not before: hangs and deaths are located by the number last
    watched.
    """
    documents, bad, message = damaged[0]("fail"), damaged[1], damaged[2]
    numbers = np.arange(len(documents), dtype=np.int64)
    records = documents.locate(numbers).record
    records = records[records >= 0]
    watched: list[int] = []
    with pytest.raises(BadRecord, match=message):
        documents.read(numbers, watch=lambda number, record: watched.append(record))
    assert watched == records[: len(watched)].tolist()
    assert [record for record in watched if record in bad] == watched[-1:]
