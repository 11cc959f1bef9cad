"""Saves while steps overwrite the state: from its own memory, from copies, and from both."""

import itertools
import mmap
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jtrain.checkpoint import Checkpoints, CheckpointSpec, host_copy
from jtrain.checkpoint.hashed_io import BLOCK_BYTES, Checksum, HashedIO
from jtrain.checkpoint.host_copy import StateChunks

BitsOf = Callable[[Any], list[bytes]]
LEAVES = 6


def make_state(kinds: list[str]) -> dict[str, Any]:
    """Returns random arrays of 1 MiB, over 8 devices in turn sharded and replicated, in these memory kinds in
    turn.
    """
    mesh = jax.make_mesh((8,), ("data",))
    rng = np.random.default_rng(0)

    def leaf(index: int) -> jax.Array:
        spec = PartitionSpec("data") if index % 2 else PartitionSpec()
        sharding = NamedSharding(mesh, spec, memory_kind=kinds[index % len(kinds)])
        return jax.device_put(rng.normal(size=(64, 4096)).astype(np.float32), sharding)

    return {"params": {f"w{index}": leaf(index) for index in range(LEAVES)}}


def make_step(state: Any) -> Callable[[Any], Any]:
    """Returns a donating step that changes every element and leaves each array where it is."""
    shardings = jax.tree.map(lambda x: x.sharding, state)
    mesh = jax.tree.leaves(shardings)[0].mesh

    def update(x: jax.Array, sharding: NamedSharding) -> jax.Array:
        computed = jax.device_put(x, NamedSharding(mesh, sharding.spec, memory_kind="device")) + 1
        return jax.device_put(computed, sharding)

    return jax.jit(
        lambda tree: jax.tree.map(update, tree, shardings), donate_argnums=0, out_shardings=shardings
    )


def addresses(state: Any) -> list[int]:
    """Returns where each device's part of each array lies."""
    return [
        part.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(state)
        for part in leaf.addressable_shards
    ]


class Writers:
    """Holds back the threads that write: after `first` chunks they go on when `go` is set, and copies
    begin.
    """

    def __init__(self, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.from_state: list[bool] = []
        self.priorities: set[int] = set()
        self.go = threading.Event()
        numbers, taken = itertools.count(), threading.Event()
        take, release, write = StateChunks.take, StateChunks.release, HashedIO.write

        def held(chunks: StateChunks) -> Any:
            if next(numbers) >= first:
                assert self.go.wait(60)
            chunk = take(chunks)
            if chunk is not None:
                self.from_state.append(chunk.in_state)
            if len(self.from_state) == first or chunk is None:
                taken.set()
            return chunk

        def later(chunks: StateChunks, pool: Any) -> None:
            assert first == 0 or taken.wait(60)
            release(chunks, pool)

        def seen(disk: HashedIO, path: Path, data: memoryview) -> tuple[str, str]:
            self.priorities.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            return write(disk, path, data)

        monkeypatch.setattr(host_copy, "SMALL_BYTES", 0)
        monkeypatch.setattr(StateChunks, "take", held)
        monkeypatch.setattr(StateChunks, "release", later)
        monkeypatch.setattr(HashedIO, "write", seen)


@pytest.mark.parametrize(
    ("kinds", "first"), [(["device"], 0), (["pinned_host"], 5), (["device", "pinned_host"], 10)], ids=str
)
def test_steps_during_a_save_do_not_change_what_is_written(
    tmp_path: Path, bits_of: BitsOf, monkeypatch: pytest.MonkeyPatch, kinds: list[str], first: int
) -> None:
    """Chunks that are written after three donating steps hold the state of the call; the steps reuse its
    memory.
    """
    writers = Writers(first, monkeypatch)
    state = make_state(kinds)
    step = make_step(state)
    state = jax.block_until_ready(step(state))
    at, want = addresses(state), bits_of(jax.tree.map(lambda x: np.array(x), state))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    with Checkpoints(tmp_path, CheckpointSpec()) as checkpoints:
        checkpoints.save(1, state, {}, "")
        for _ in range(3):
            state = jax.block_until_ready(step(state))
        assert addresses(state) == at, (
            "the steps must overwrite the memory that was saved, or this proves nothing"
        )
        assert bits_of(state) != want
        assert not checkpoints.steps()
        writers.go.set()
        checkpoints.wait()
        got, _ = checkpoints.restore(1, like)
    assert bits_of(got) == want
    assert sum(writers.from_state) == first
    assert len(writers.from_state) == LEAVES // 2 * (1 + 8)


@pytest.mark.parametrize("small_bytes", [0, host_copy.SMALL_BYTES])
def test_without_memory_for_copies_all_is_written_before_the_next_step(
    tmp_path: Path, bits_of: BitsOf, monkeypatch: pytest.MonkeyPatch, small_bytes: int
) -> None:
    """The save then takes longer, and is as right as any other."""

    def refuse(chunks: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(host_copy, "copy_chunks", refuse)
    writers = Writers(1_000, monkeypatch)
    monkeypatch.setattr(host_copy, "SMALL_BYTES", small_bytes)
    state = make_state(["device"])
    step = make_step(state)
    want = bits_of(jax.tree.map(lambda x: np.array(x), state))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    with Checkpoints(tmp_path, CheckpointSpec()) as checkpoints:
        checkpoints.save(1, state, {}, "")
        state = jax.block_until_ready(step(state))
        checkpoints.wait()
        got, _ = checkpoints.restore(1, like)
    assert bits_of(got) == want
    assert all(writers.from_state)


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
def test_copies_are_written_with_low_priority_but_for_the_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps need the same cores; after the last step nothing does, and the time until the end counts."""
    writers = Writers(0, monkeypatch)
    state = make_state(["device"])
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    with Checkpoints(tmp_path, CheckpointSpec()) as checkpoints:
        checkpoints.save(1, state, {}, "")
        writers.go.set()
        checkpoints.wait()
        assert writers.priorities == {min(usual + 5, 19)}
        writers.priorities.clear()
        checkpoints.save(2, state, {}, "", last=True)
        checkpoints.wait()
        assert writers.priorities == {usual}
    assert os.getpriority(os.PRIO_PROCESS, 0) == usual


def changed(data: bytes, change: str) -> bytes:
    """Returns the bytes as a disk might give them back."""
    page = mmap.PAGESIZE
    return {
        "a bit": data[:5000] + bytes([data[5000] ^ 16]) + data[5001:],
        "a bit in the last, partial page": data[:-1] + bytes([data[-1] ^ 1]),
        "a page of zeros": data[:page] + bytes(page) + data[2 * page :],
        "two pages swapped": data[page : 2 * page] + data[:page] + data[2 * page :],
        "its end missing": data[:-3],
    }[change]


@pytest.mark.parametrize(
    "change",
    ["a bit", "a bit in the last, partial page", "a page of zeros", "two pages swapped", "its end missing"],
)
@pytest.mark.parametrize("size", [3 * 4096 + 17, BLOCK_BYTES + 4096 + 5])
def test_a_checksum_tells_what_a_disk_may_do_to_a_file(tmp_path: Path, size: int, change: str) -> None:
    """Of a small file and of one that is written directly, in two blocks; unchanged, it is what was
    written.
    """
    data = np.random.default_rng(0).bytes(size)
    path = tmp_path / "file"
    _, wanted = HashedIO().write(path, memoryview(data))
    assert HashedIO().read(path, Checksum()) == (size, wanted)
    odd = HashedIO().write(tmp_path / "odd", memoryview(b"x" + data)[1:])  # memory that O_DIRECT refuses
    assert (odd[1], (tmp_path / "odd").read_bytes()) == (wanted, data)
    path.write_bytes(changed(data, change))
    assert HashedIO().read(path, Checksum())[1] != wanted
