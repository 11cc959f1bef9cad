"""A folder that gains files goes on: each chunk of old and new files once in the running epoch, whoever reads
what.
"""

import itertools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jtrain.data import PackedText, open_dataset
from jtrain.data.stream.chunk_order import SizedChunks
from jtrain.data.stream.chunk_stream import ChunkStream
from jtrain.data.stream.growing_order import GrowingChunks
from jtrain.data.stream.saved_sources import Resumed, resume_source, running_setup, source_to_json
from jtrain.data.stream.windowed_order import WindowedChunks
from jtrain.errors import UserError
from tests.data.test_chunk_order import TEXTS, stream
from tests.data.test_elastic import hosts_batches
from tests.data.test_growing import documents, epoch_slots

FILE_TEXTS = 12


def texts_of(file: int) -> list[str]:
    """Twelve documents of all lengths, different in each file."""
    return [f"{file}.{i} {TEXTS[(7 * file + 11 * i) % len(TEXTS)][:2000]}" for i in range(FILE_TEXTS)]


def write_lines(folder: Path, file: int) -> None:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"text": text}) for text in texts_of(file)]
    (folder / f"{file:02}.jsonl").write_text("\n".join(lines))


def write_groups(folder: Path, file: int) -> None:
    folder.mkdir(exist_ok=True)
    table = pa.table({"text": texts_of(file)})
    pq.write_table(table, folder / f"{file:02}.parquet", row_group_size=5, use_dictionary=False)


Kind = tuple[type, Callable[[Path, int], None], dict[str, Any]]
KINDS: dict[str, Kind] = {
    "one shuffle": (SizedChunks, write_lines, {}),
    "one window": (WindowedChunks, write_groups, {}),
    "several windows": (WindowedChunks, write_groups, {"window_bytes": 1 << 12}),
    "windows that are filled up": (WindowedChunks, write_groups, {"window_bytes": 40_000}),
    "opened as it is read": (GrowingChunks, write_lines, {"window_bytes": 1 << 12, "eager_bytes": 1000}),
}


def saved(source: ChunkStream) -> dict[str, Any]:
    return json.loads(json.dumps(source_to_json(running_setup(source), source.names[-1])))


def gain(source: ChunkStream, tmp_path: Path, cursor: int, **fields: Any) -> ChunkStream:
    """Returns the source as a run goes on with it that had drawn the chunks before `cursor`."""
    anchor = source.order.anchor(cursor) if isinstance(source.order, GrowingChunks) else None
    again = stream(tmp_path / "files", tmp_path, **fields)
    found = resume_source(again, saved(source), cursor=cursor, anchor=anchor, step=7, epochs=None)
    assert isinstance(found, Resumed), found
    return found.stream


def first_of(source: ChunkStream, epoch: int) -> int:
    """Returns the first number of an epoch."""
    order = source.order
    if not isinstance(order, GrowingChunks):
        return order.numbers.first_of(epoch)
    return next(order.anchor(n).first for n in itertools.count(0, 10) if order.anchor(n).epoch == epoch)


def contents(source: ChunkStream, end: int) -> list[tuple[str, int, int]]:
    """Returns the document, the first chunk and the number of chunks of each number below `end`."""
    chunks = source.locate(np.arange(end))
    names = [source.identity_of(record) if record >= 0 else "" for record in chunks.record.tolist()]
    return list(zip(names, chunks.first.tolist(), chunks.num.tolist(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", (0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))))
def test_each_chunk_is_read_once_in_the_epoch_in_which_files_join(
    kind: str, seed: int, tmp_path: Path
) -> None:
    """Several gains, at any place: in one epoch, at the same place again, in a later epoch, at the end of
    one.
    """
    order, write, fields = KINDS[kind]
    rng = np.random.default_rng(seed)
    files = int(rng.integers(2, 8))
    for file in range(files):
        write(tmp_path / "files", file)
    source = stream(tmp_path / "files", tmp_path, seed=seed, **fields)
    assert isinstance(source.order, order)
    cursor, joined_in = 0, [0] * files
    for where in ("somewhere", "somewhere", "there again", "a later epoch", "its end", "somewhere"):
        epoch = joined_in[-1]
        begin, end = first_of(source, epoch), first_of(source, epoch + 1)
        if where == "a later epoch":
            epoch, begin, end = epoch + 2, first_of(source, epoch + 2), first_of(source, epoch + 3)
        if where == "its end":
            epoch, cursor = epoch + 1, end
        elif where != "there again":
            cursor = int(rng.integers(max(begin, cursor), end))
        before = contents(source, cursor)
        more = int(rng.integers(1, 4))
        for file in range(files, files + more):
            write(tmp_path / "files", file)
        source = gain(source, tmp_path, cursor, seed=seed, **fields)
        assert contents(source, cursor) == before, "what was drawn stands for what it stood for"
        files, joined_in = files + more, [*joined_in, *[epoch] * more]
    assert len({generation.files for generation in source.generations}) == 7
    for epoch in range(joined_in[-1] + 3):
        found = documents(source, np.arange(first_of(source, epoch), first_of(source, epoch + 1)))
        want = [text for file, joined in enumerate(joined_in) if joined <= epoch for text in texts_of(file)]
        assert found == {b"\0" + text.encode() + b"\0": 1 for text in want}, epoch
    orders = [
        contents(source, first_of(source, epoch + 1))[first_of(source, epoch) :]
        for epoch in range(epoch - 1, epoch + 1)
    ]
    assert orders[0] != orders[1]


@pytest.mark.parametrize("kind", KINDS)
def test_new_files_are_read_from_the_resume_on_and_mixed_with_the_others(kind: str, tmp_path: Path) -> None:
    _, write, fields = KINDS[kind]
    for file in range(20):
        write(tmp_path / "files", file)
    source = stream(tmp_path / "files", tmp_path, **fields)
    cursor = (epoch_slots(source) if isinstance(source.order, GrowingChunks) else len(source)) // 2
    for file in range(20, 40):
        write(tmp_path / "files", file)
    source = gain(source, tmp_path, cursor, **fields)
    is_new = [name[:2] >= "20" for name, *_ in contents(source, first_of(source, 1)) if name]
    assert not any(is_new[: cursor // 2])
    rest = is_new[len(is_new) - 3 * cursor // 2 :]  # half a window of a sixteenth of the corpus is left out
    thirds = [np.mean(part) for part in np.array_split(rest, 3)]
    assert min(thirds) > 0.3, thirds
    assert max(thirds) < 0.95, thirds


def test_files_join_a_source_that_is_too_large_for_tables(tmp_path: Path) -> None:
    """Above 4,096 slots nothing is kept in memory: every place is computed when it is read."""
    for file in range(35):
        write_lines(tmp_path / "files", file)
    source = stream(tmp_path / "files", tmp_path, chunk_tokens=16)
    assert len(source) > 4096
    for file in range(35, 45):
        write_lines(tmp_path / "files", file)
    source = gain(source, tmp_path, len(source) // 3, chunk_tokens=16)
    want = {b"\0" + text.encode() + b"\0": 1 for file in range(45) for text in texts_of(file)}
    for epoch in range(2):
        assert documents(source, np.arange(epoch * len(source), (epoch + 1) * len(source))) == want


RUNS: dict[str, tuple[Callable[[Path, int], None], int]] = {
    "opened whole": (write_lines, 1 << 26),
    "in windows of row groups": (write_groups, 1 << 16),
    "opened as it is read": (write_lines, 1 << 16),
}
"""How files are written, and `data.shuffle_window_bytes`."""


def spec(folder: Path, window: int = 1 << 26, **fields: Any) -> PackedText:
    fields = {"seq_len": 64, "global_batch": 8, "eval_fraction": 0.05, "max_loaders": 2, **fields}
    cache = str(folder.parent / "cache")
    return PackedText(path=str(folder), cache_dir=cache, shuffle_window_bytes=window, **fields)


def refused(folder: Path, state: Any, **fields: Any) -> str:
    """Returns why a run cannot go on; `misfit` must say the same as `train_batches`."""
    dataset = open_dataset(spec(folder, **fields), seed=0)
    with pytest.raises(UserError, match=r"start in a new --workdir, or add --allow-change data: ") as found:
        dataset.train_batches(state, inline=True)
    assert dataset.resume_refusal(state) == str(found.value)
    return str(found.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", (pytest.param("opened whole", marks=pytest.mark.slow), *[*RUNS][1:]))
def test_a_run_that_has_gained_files_is_the_same_on_any_hosts_and_processes_resumed_and_killed(
    kind: str, tmp_path: Path, same_batch: Any
) -> None:
    """A state of a run is enough to go on: the files that were there when it was saved are the first by
    name.
    """
    write, window = RUNS[kind]
    folder = tmp_path / "files"
    for file in range(60):
        write(folder, file)
    _, state = hosts_batches(open_dataset(spec(folder, window), seed=3), None, 1, 100)
    for file in range(60, 70):
        write(folder, file)
    dataset = open_dataset(spec(folder, window, engine="inline"), seed=3)
    with dataset.train_batches(state) as batches:
        want = list(itertools.islice(batches, 120))
        [said] = [line for line in batches.take_messages() if "gained" in line]
    assert "step 100: data has gained 10 files (" in said
    assert ("120 documents, " in said) == (kind != "opened as it is read")
    assert "first: 60." in said

    found, half = hosts_batches(open_dataset(spec(folder, window), seed=3), state, 4, 40)
    more, _ = hosts_batches(open_dataset(spec(folder, window), seed=3), half, 2, 20)
    for batch, expected in zip(found + more, want[:60], strict=True):
        same_batch(batch, expected)
    assert [len(saved["generations"]) for saved in (state["sources"]["data"], half["sources"]["data"])] == [
        1,
        2,
    ]

    again = open_dataset(spec(folder, window), seed=3)
    with again.train_batches(half) as batches:
        for step, (batch, expected) in enumerate(zip(batches, want[40:], strict=False)):
            same_batch(batch, expected)
            if step == 5:  # files that come while the run goes on are for the next start
                write(folder, 70)
            if (victim := {10: "loader", 20: "constr", 40: "loader"}.get(step)) is not None:
                pids = batches.plane.pids()  # pyright: ignore[reportAttributeAccessIssue]
                os.kill(
                    next(pid for pid in pids if victim in Path(f"/proc/{pid}/comm").read_text()),
                    signal.SIGKILL,
                )
            if step == 79:
                break
        assert not [line for line in batches.take_messages() if "gained" in line], "they had joined before"


def test_a_source_that_has_become_large_is_opened_as_at_its_first_start(
    tmp_path: Path, same_batch: Any
) -> None:
    """From below the limit of what is opened whole to above it, and with the limit lowered; its order must go
    on.
    """
    for file in range(50):
        write_lines(tmp_path / "files", file)
    first = open_dataset(spec(tmp_path / "files", 1 << 17), seed=0)
    assert first.streams[0].num_documents == 600
    _, state = hosts_batches(first, None, 1, 3)
    with open_dataset(spec(tmp_path / "files"), seed=0).train_batches(state, inline=True) as batches:
        want = list(itertools.islice(batches, 20))
    found, _ = hosts_batches(open_dataset(spec(tmp_path / "files", 1 << 16), seed=0), state, 1, 20)
    for batch, expected in zip(found, want, strict=True):
        same_batch(batch, expected)

    for file in range(50, 99):
        write_lines(tmp_path / "files", file)
    second = open_dataset(spec(tmp_path / "files", 1 << 17), seed=0)
    assert second.streams[0].num_documents is None
    with second.train_batches(state, inline=True) as batches:
        next(batches)
        assert "data has gained 49 files (588 documents" in batches.take_messages()[0]
    assert second.streams[0].num_documents == 99 * 12
    (tmp_path / "files" / "03.jsonl").unlink()
    assert "(1 of its 50 files are gone): " in refused(tmp_path / "files", state, window=1 << 17)


def test_a_source_at_its_end_reads_what_it_has_gained_and_no_more(tmp_path: Path) -> None:
    """With data.epochs=2 the old files are read twice, and new ones as often as there are epochs after they
    came.
    """
    for file in range(4):
        write_lines(tmp_path / "files", file)
    fields = {"epochs": 2, "eval_fraction": 0.0, "engine": "inline"}

    def tokens(state: Any, steps: int | None = None) -> tuple[int, Any]:
        with open_dataset(spec(tmp_path / "files", **fields), seed=0).train_batches(state) as batches:
            read = sum(int((batch.segment_BL > 0).sum()) for batch in itertools.islice(batches, steps))
            return read, json.loads(json.dumps(batches.state()))

    def size(*files: int) -> int:
        return sum(len(text) + 2 for file in files for text in texts_of(file))

    assert tokens(None)[0] == 2 * size(0, 1, 2, 3)
    _, ended = tokens(None)
    early, running = tokens(None, 5)
    write_lines(tmp_path / "files", 4)
    assert tokens(ended)[0] == size(4)
    assert early + tokens(running)[0] == 2 * size(0, 1, 2, 3, 4)


def test_evaluations_go_on_with_the_same_documents(tmp_path: Path) -> None:
    """New documents are held out by the same hash, and neither trained on nor evaluated by this run."""
    for file in range(60):
        write_lines(tmp_path / "files", file)
    fields = {"eval_fraction": 0.2, "engine": "inline", "eval_batches": 2}
    for window in (1 << 26, 1 << 16):
        dataset = open_dataset(spec(tmp_path / "files", window, **fields), seed=0)
        assert (dataset.streams[0].num_documents is None) == (window == 1 << 16)
        want = [batch.batch.token_BL for batch in dataset.held_out().batches()]
        _, state = hosts_batches(dataset, None, 1, 3)
        for file in range(60, 80) if window == 1 << 26 else range(80, 99):
            write_lines(tmp_path / "files", file)
        again = open_dataset(spec(tmp_path / "files", window, **fields), seed=0)
        held_out = again.held_out()
        with again.train_batches(state) as batches:
            next(batches)
            assert (
                "evaluations go on with held-out documents of the files that the run began with"
                in batches.take_messages()[0]
            )
        np.testing.assert_array_equal(
            np.stack([b.batch.token_BL for b in held_out.batches()]), np.stack(want)
        )
        fresh = open_dataset(spec(tmp_path / "files", window, **fields), seed=0).held_out()
        assert not np.array_equal(np.stack([b.batch.token_BL for b in fresh.batches()]), np.stack(want))
