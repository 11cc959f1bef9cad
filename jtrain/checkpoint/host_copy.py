"""Chunks of a state that a save writes: from the state's own memory while `save` waits, from copies
afterwards.

On the CPU backend the state is in host memory already. Threads that write begin at its first chunk, threads
that copy at its last one, and `save` returns where they meet: on a fast disk most was written by then and
never copied, on a slow one most was copied. A copy is memory of its own from the kernel, which gets it back
as soon as the copy was written; of a small state, as soon as all were. The C allocator would keep it:
`jtrain.runtime.platform` tells it to. From an accelerator jax copies all, and for a store `copy` does so
first: training would wait for the network.
"""

import collections
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import itertools
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import numpy as np

from jtrain.checkpoint import array_files, files
from jtrain.checkpoint.array_files import by_keys
from jtrain.checkpoint.hashed_io import PAGE_BYTES, pages

SMALL_BYTES = 64 << 20
"""A state on the CPU up to this size is copied as a whole: that takes less time than to create the first
files."""


@dataclasses.dataclass(frozen=True)
class StateChunk:
    """Contents of one file.

    name: path relative to the checkpoint's directory.
    data: bytes of the file.
    owner: object that keeps the memory of `data`.
    in_state: True if `data` is the state's own memory, which the next step overwrites.
    """

    name: str
    data: memoryview
    owner: Any
    in_state: bool


@dataclasses.dataclass(frozen=True)
class ShardPart:
    """Part of a shard, contiguous in memory.

    start_byte: place in the shard's memory; start: index of its first element in the leaf as it is stored.
    """

    start_byte: int
    start: tuple[int, ...]
    shape: tuple[int, ...]


type Splitter = Callable[[jax.Array, Any], list[ShardPart]]
"""Parts of a shard of an array."""


class StateChunks:
    """Chunks that this process writes, of replicas only the first one's; any thread may take the next one."""

    def __init__(self, state: Any, split: Splitter) -> None:
        """Waits for `state`, and fetches what lies on accelerators.

        Args:
          split: parts of a shard that are neighbours in the files too.
        """
        # Chunks point into the arrays' memory, which is filled only when the step has run.
        jax.block_until_ready(state)
        shards = [
            (".".join(keys), shard, split(array, shard))
            for keys, array in by_keys(state)
            for shard in array.addressable_shards
            # Every process filters alike, so each shard of the
            # state is written exactly once over all processes.
            if shard.replica_id == 0
        ]
        # All transfers start before the first is awaited: they overlap.
        for _, shard, _ in shards:
            if not _on_cpu(shard):
                shard.data.copy_to_host_async()
        chunks = [chunk for name, shard, parts in shards for chunk in _chunks(name, shard, parts)]
        self._changed = threading.Condition()
        self._in_state = collections.deque(chunk for chunk in chunks if chunk.in_state)
        self._copied = collections.deque(chunk for chunk in chunks if not chunk.in_state)
        self._reading = 0  # chunks in the state's memory that a thread writes or copies now
        if sum(len(chunk.data) for chunk in self._in_state) <= SMALL_BYTES:
            with contextlib.suppress(OSError):  # no memory for it: as a larger state
                self._copied += copy_chunks(self._in_state)
                self._in_state.clear()

    def take(self) -> StateChunk | None:
        """Returns a chunk to write, None if all were taken; `written` must follow."""
        with self._changed:
            # No chunk is left only once `_reading` is 0: a failed copy puts its chunk back.
            self._changed.wait_for(lambda: self._in_state or self._copied or not self._reading)
            # From the state first: `save` waits until these are gone, the copies can wait.
            if self._in_state:
                self._reading += 1
                return self._in_state.popleft()
            return self._copied.popleft() if self._copied else None

    def written(self, chunk: StateChunk) -> None:
        """Notes that a chunk's memory is not read any more."""
        if chunk.in_state:
            with self._changed:
                self._reading -= 1
                self._changed.notify_all()

    def copy(self, pool: concurrent.futures.ThreadPoolExecutor) -> None:
        """Copies chunks that were not taken yet, as far as there is memory."""
        # Copying starts at the far end (`pop`), writing at the near one (`popleft`).
        if self._in_state:
            list(pool.map(lambda _: self._copy(), range(pool._max_workers)))

    def release(self, pool: concurrent.futures.ThreadPoolExecutor) -> None:
        """Copies chunks that were not taken yet; returns when the state may be donated or deleted."""
        self.copy(pool)
        with self._changed:
            # Both: a chunk in flight is in neither queue, but its memory is still read.
            self._changed.wait_for(lambda: not self._in_state and not self._reading)

    def drop(self) -> None:
        """Removes all chunks that were not taken, after a failure or at the end."""
        with self._changed:
            self._in_state.clear()
            self._copied.clear()
            self._changed.notify_all()

    def _copy(self) -> None:
        while True:
            with self._changed:
                if not self._in_state:
                    return
                chunk = self._in_state.pop()
                # Counted before the lock is free: otherwise `release`
                # could return while the copy reads the state.
                self._reading += 1
            copied = None
            try:
                (copied,) = copy_chunks([chunk])
            except OSError:  # no memory for it: the threads that write take it from the state's memory
                return
            finally:
                with self._changed:
                    self._reading -= 1
                    # Without a copy, back to the end it came from, so that the writers meet it last.
                    (self._in_state if copied is None else self._copied).append(copied or chunk)
                    self._changed.notify_all()


def held_chunks(state: Any) -> Iterator[StateChunk]:
    """Yields the chunks of all shards that this process's devices hold, those of replicas too, each once.

    A shard is on its way from its device while the one before is read, and no more: a second copy of the
    state need not fit into the host's memory.
    """
    jax.block_until_ready(state)
    shards = [
        (".".join(keys), shard)
        for keys, array in by_keys(state)
        # One shard per index: replicas on devices of this process are equal. The last one wins.
        for shard in {first_element(shard.index): shard for shard in array.addressable_shards}.values()
    ]
    # The pair (shard, next shard), padded by one: the next transfer runs while this one is read.
    for (leaf, shard), (_, following) in zip(shards, [*shards[1:], (None, None)], strict=True):
        if following is not None and not _on_cpu(following):
            following.data.copy_to_host_async()
        yield from _chunks(leaf, shard, [ShardPart(0, first_element(shard.index), shard.data.shape)])


def first_element(index: tuple[slice, ...]) -> tuple[int, ...]:
    """Returns the index of a shard's first element in the whole array."""
    return tuple(part.start or 0 for part in index)


def _on_cpu(shard: Any) -> bool:
    return shard.device.platform == "cpu"


def _chunks(leaf: str, shard: Any, parts: list[ShardPart]) -> Iterator[StateChunk]:
    """Yields the chunks of one device's part of a leaf."""
    array = shard.data
    if not array.size:
        return
    if _on_cpu(shard):
        # A NumPy view would count as a second user, and XLA
        # would copy the array when the next step donates it.
        data = memoryview((ctypes.c_ubyte * array.nbytes).from_address(array.unsafe_buffer_pointer())).cast(
            "B"
        )
    else:
        array = np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8)
        data = memoryview(array)
    for part in parts:
        # The owner keeps the buffer alive: on the CPU, the view was made from an address and does not.
        for chunk in array_files.chunks(part.shape, part.start, shard.data.dtype.itemsize):
            begin = part.start_byte + chunk.start_byte
            name = f"{files.STATE}/{leaf}/{chunk.name}"
            yield StateChunk(name, data[begin : begin + chunk.num_bytes], array, in_state=_on_cpu(shard))


def copy_chunks(chunks: Collection[StateChunk]) -> list[StateChunk]:
    """Returns copies of the chunks in one new piece of memory, which is free once the last of them is."""
    if not chunks:
        return []
    # Each copy begins on a page, since O_DIRECT writes from whole pages only.
    ends = list(itertools.accumulate(-(-len(chunk.data) // PAGE_BYTES) * PAGE_BYTES for chunk in chunks))
    memory = pages(ends[-1])
    copies = []
    # `ends` shifted by one are the starts; the last end has no chunk, so the zip is not strict.
    for chunk, start in zip(chunks, [0, *ends], strict=False):
        copied = np.frombuffer(memory, np.uint8, len(chunk.data), start)
        np.copyto(copied, np.frombuffer(chunk.data, np.uint8))  # without the GIL
        copies.append(StateChunk(chunk.name, memoryview(copied), memory, in_state=False))
    return copies
