"""Row groups are shared between loaders: each is decoded once, and the stream is that of a single loader."""

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jtrain.data import PackedText, Source, open_dataset
from jtrain.data.constructor.known_lengths import KnownLengths
from jtrain.data.loaders.forkserver import Forkserver
from jtrain.data.loaders.messages import ChunkRun, LoaderState, RequestPart
from jtrain.data.loaders.process_pool import ProcessPool
from jtrain.data.sources.formats.row_group_cache import shared_cache
from jtrain.data.stream.chunk_reader import Read
from jtrain.data.stream.chunk_stream import ChunkStream
from jtrain.data.stream.source_setup import SourceSetup
from jtrain.data.stream.windowed_order import WindowedChunks
from tests.data.four_sources import digest
from tests.data.writers import write_array_record, write_parquet

TEXTS = [f"{i} " + "x" * (i * i % 400) for i in range(700)]
GROUPS = 100
RUN = 64
CACHES = iter(range(1 << 20, 1 << 30))
"""Sizes of caches, one for each stream that is to decode by itself: streams of a process with equal ones
share it."""


def setup_of(path: Path, tmp_path: Path, **fields: Any) -> SourceSetup:
    spec = PackedText(
        path=str(path), seq_len=64, global_batch=2, eval_fraction=0.1, cache_dir=str(tmp_path / "cache")
    )
    [setup] = spec.setups(seed=0)
    cut = {"window_bytes": 1 << 12, "chunk_bytes": 64}
    return SourceSetup(**{**vars(setup), **cut, "decoded_cache_bytes": next(CACHES), **fields})


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    """One hundred row groups of seven rows, in windows of about four."""
    (tmp_path / "files").mkdir()
    return write_parquet(tmp_path / "files", TEXTS)


def by_number(numbers: np.ndarray, read: Read | ChunkRun) -> dict[int, list[int]]:
    ends = np.cumsum(read.lengths) if isinstance(read, Read) else read.starts[1:]
    pieces = np.split(read.ids, ends.tolist())[:-1]
    return {number: ids.tolist() for number, ids in zip(numbers.tolist(), pieces, strict=True)}


@pytest.mark.parametrize("write", [write_parquet, write_array_record])
def test_shares_answer_each_number_once(write: Callable[[Path, Sequence[str]], Path], tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    stream = ChunkStream(setup_of(write(tmp_path / "files", TEXTS), tmp_path))
    assert isinstance(stream.order, WindowedChunks)
    for start in range(0, 2 * len(stream), 500):
        numbers = np.arange(start, start + 500)  # through the end of an epoch, too
        skip = frozenset(numbers[::97].tolist())
        whole = stream.read(numbers, skip=skip)
        want, skipped = by_number(numbers, whole), dict(whole.skipped)
        assert len(skipped) == len(skip)
        for count in range(1, 6):
            found: dict[int, list[int]] = {}
            left_out: dict[int, str] = {}
            for part in RequestPart(0, numbers, skip=skip).split(count):
                read = stream.read(part.numbers, share=part.share, skip=part.skip)
                got = part.numbers if read.numbers is None else read.numbers
                assert (np.diff(got) > 0).all()
                assert not found.keys() & set(got.tolist())
                found |= by_number(got, read)
                left_out |= dict(read.skipped)
            assert found == want
            assert left_out == skipped


def test_a_share_is_split_further() -> None:
    """Host 1 of 3 splits its share over two loaders: 1 and 4 of 6."""
    part = RequestPart(0, np.arange(4), share=(1, 3))
    assert [one.share for one in part.split(2)] == [(1, 6), (4, 6)]
    assert [one.share for one in part.split(1)] == [(1, 3)]


def test_nothing_is_decoded_to_tell_the_share_of_a_number(parquet: Path, tmp_path: Path) -> None:
    setup = setup_of(parquet, tmp_path)
    stream = ChunkStream(setup)
    assert isinstance(stream.order, WindowedChunks)
    numbers = np.arange(len(stream))
    before = shared_cache(setup.decoded_cache_bytes).decoded
    share = stream.order.share_of(numbers, 4)
    assert shared_cache(setup.decoded_cache_bytes).decoded == before
    records = stream.locate(numbers).record
    group = records[records >= 0] // 7
    shares_of_group = {(g, s) for g, s in zip(group.tolist(), share[records >= 0].tolist(), strict=True)}
    assert len(shares_of_group) == GROUPS, "a group has one share"
    assert max(np.bincount([s for _, s in shares_of_group])) <= GROUPS // 4 + 1, "shares take turns"


@pytest.mark.parametrize("count", [1, 3])
def test_each_share_decodes_only_its_groups_and_each_once(count: int, parquet: Path, tmp_path: Path) -> None:
    """The cache of a loader is smaller than two windows, but the windows hold what they need."""
    decoded = 0
    for share in range(count):
        setup = setup_of(parquet, tmp_path, decoded_cache_bytes=(1 << 12) + share + 10 * count)
        stream = ChunkStream(setup)
        before = shared_cache(setup.decoded_cache_bytes).decoded
        for start in range(0, len(stream), RUN):
            stream.read(np.arange(start, min(start + RUN, len(stream))), share=(share, count))
        decoded += shared_cache(setup.decoded_cache_bytes).decoded - before
    assert decoded == GROUPS


def test_windows_hold_no_more_than_four_times_the_cache(parquet: Path, tmp_path: Path) -> None:
    """Then row groups are decoded again, to the same texts; what a window held is given back with it."""
    streams = [ChunkStream(setup_of(parquet, tmp_path, decoded_cache_bytes=size)) for size in (900, 1 << 20)]
    numbers = np.arange(4 * RUN)
    few, all_kept = (stream.read(numbers) for stream in streams)
    np.testing.assert_array_equal(few.ids, all_kept.ids)
    cache = shared_cache(900)
    assert 0 < cache.held_bytes <= 4 * 900
    again = cache.decoded
    streams[0].read(numbers)
    assert cache.decoded > again
    streams[0].close()
    assert cache.held_bytes == 0


@contextlib.contextmanager
def pool_of(setup: SourceSetup, loaders: int) -> Iterator[ProcessPool]:
    forkserver = Forkserver()
    pool = ProcessPool(
        (setup,),
        forkserver.client,
        placement={f"loader-{i}": (0,) for i in range(loaders)},
        standbys=1,
        read_timeout_s=60.0,
        say=lambda text: None,
    )
    try:
        yield pool
    finally:
        pool.close()
        forkserver.close()


def read_epoch(
    pool: ProcessPool, slots: int, *, each: Callable[[int], None] = lambda arrived: None
) -> tuple[dict[int, list[int]], list[LoaderState]]:
    """Reads an epoch in runs through a pool; returns the ids of each number, and the last states of the
    loaders.
    """
    for start in range(0, slots, RUN):
        pool.request([RequestPart(0, np.arange(start, min(start + RUN, slots)))])
    found: dict[int, list[int]] = {}
    deadline = time.monotonic() + 60
    while len(found) < slots:
        for run in pool.collect():
            assert not found.keys() & set(run.numbers.tolist())
            found |= by_number(run.numbers, run)
            pool.release(run)
            each(len(found))
        assert time.monotonic() < deadline, len(found)
        time.sleep(0.002)  # between two looks at real processes
    return found, pool.states()


@pytest.mark.parametrize("loaders", [1, 2, 4])
def test_loader_processes_decode_each_row_group_once(loaders: int, parquet: Path, tmp_path: Path) -> None:
    """Before groups were shared, four loaders decoded each group four times."""
    setup = setup_of(parquet, tmp_path, grouped=True)
    stream = ChunkStream(setup)
    numbers = np.arange(len(stream))
    with pool_of(setup, loaders) as pool:
        found, states = read_epoch(pool, len(stream))
    assert found == by_number(numbers, stream.read(numbers))
    assert sum(state.decoded for state in states) == GROUPS
    assert min(state.decoded for state in states) >= GROUPS // loaders - 2, "each loader decodes its share"


def test_killed_loaders_change_nothing_of_shared_groups(parquet: Path, tmp_path: Path) -> None:
    setup = setup_of(parquet, tmp_path, grouped=True)
    stream = ChunkStream(setup)
    numbers = np.arange(len(stream))
    random_kill, killed = random.Random(0), []
    with pool_of(setup, 3) as pool:

        def kill(arrived: int) -> None:
            if arrived > len(stream) * (len(killed) + 1) / 7:
                killed.append(random_kill.choice(list(pool.loaders)))
                pool.loaders[killed[-1]].child.kill()  # it may be one that the pool has not missed yet

        found, _ = read_epoch(pool, len(stream), each=kill)
    assert found == by_number(numbers, stream.read(numbers))
    assert len(killed) >= 4


def test_the_number_of_loaders_may_change_between_runs(parquet: Path, tmp_path: Path) -> None:
    setup = setup_of(parquet, tmp_path, grouped=True)
    stream = ChunkStream(setup)
    numbers = np.arange(len(stream))
    with pool_of(setup, 1) as pool:
        placed = [4, 2, 1, 3]

        def place(arrived: int) -> None:
            if placed and arrived > len(stream) * (5 - len(placed)) / 6:
                pool.place({f"loader-{i}": (0,) for i in range(placed.pop(0))})

        found, _ = read_epoch(pool, len(stream), each=place)
    assert found == by_number(numbers, stream.read(numbers))
    assert not placed


def test_batches_of_several_loaders_are_those_of_one_thread(parquet: Path, tmp_path: Path) -> None:
    spec = PackedText(
        path=str(parquet), seq_len=64, global_batch=8, shuffle_window_bytes=1 << 16, max_loaders=4,
        cache_dir=str(tmp_path / "cache"), epochs=1,
    )  # fmt: skip
    dataset = open_dataset(spec, seed=0)
    assert dataset.setups[0].grouped
    with dataset.train_batches(inline=True) as batches:
        want = digest(batches, 1000)
    with dataset.train_batches() as batches:
        assert digest(batches, 1000) == want


def test_lengths_may_arrive_in_any_order() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        known, want = KnownLengths.nothing(100), rng.integers(0, 9, 400).astype(np.int32)
        arrived = np.zeros(400, np.bool_)
        share = rng.integers(0, 3, 400)
        runs = [np.arange(a, a + 40)[share[a : a + 40] == s] for a in range(0, 400, 40) for s in range(3)]
        for numbers in [runs[i] for i in np.lexsort((rng.random(30), np.arange(30) // 6))]:
            known.add(100 + numbers, want[numbers])
            arrived[numbers] = True
            end = 400 if arrived.all() else int(np.argmin(arrived))
            assert known.end == 100 + end
            if known.first < known.end:
                assert known.at(known.first, 1000).tolist() == want[known.first - 100 : end].tolist()
            known.drop_before(min(known.end, int(rng.integers(100, 500))))


def test_a_window_smaller_than_a_row_group_is_said_with_the_number_that_helps(tmp_path: Path) -> None:
    sources = {}
    for name, rows in (("large", 1000), ("small", 10)):
        texts = [f"{i} " + "x" * 500 for i in range(2000)]
        pq.write_table(pa.table({"text": texts}), tmp_path / f"{name}.parquet", row_group_size=rows)
        sources[name] = Source(path=str(tmp_path / f"{name}.parquet"))
    spec = PackedText(
        sources=sources,
        seq_len=512,
        global_batch=2,
        shuffle_window_bytes=1 << 18,
        cache_dir=str(tmp_path / "cache"),
    )
    said = open_dataset(spec, seed=0).describe()
    [line] = [line for line in said.splitlines() if "shuffle_window_bytes" in line]
    assert line.startswith("data.shuffle_window_bytes=262144 is too small for 1 of 2 sources (large: ")
    enough = int(line.rpartition("data.shuffle_window_bytes=")[2].split()[0].rstrip(".,"))
    better = open_dataset(PackedText(**{**vars(spec), "shuffle_window_bytes": enough}), seed=0)
    assert "shuffle_window_bytes" not in better.describe()
    order = better.streams[0].order
    assert isinstance(order, WindowedChunks)
    groups = order.locate(0, np.arange(400)).record // 1000
    assert len(set(groups.tolist()) - {-1}) >= 2, "a window now mixes row groups"
