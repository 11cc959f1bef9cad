"""Copies the arrays of a state to host memory, so that training may go on while they are written.

On the CPU backend a copy is memory of its own from the kernel, which gets it back as soon as the copy was written. The
C allocator would keep it: `jtrain_kernels.host_memory` tells it to. From an accelerator jax makes the copy.
"""

import concurrent.futures
import ctypes
import dataclasses
import mmap
from typing import Any

import jax
import numpy as np

from jtrain.checkpoint.orbax_io import by_keys

_PIECE_BYTES = 16 << 20
_HUGE_PAGE_BYTES = 2 << 20


@dataclasses.dataclass(frozen=True)
class HostShard:
    """Bytes of one device's part of a leaf, in C order.

    leaf: path of the leaf in the state, joined by dots.
    start: index of the first element in the whole leaf.
    """

    leaf: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    data: memoryview


def copy_to_host(state: Any, pool: concurrent.futures.Executor) -> list[HostShard]:
    """Returns copies of the shards that this process writes: of replicas only the first one's.

    Returns when `state` may be donated or deleted.
    """
    jax.block_until_ready(state)
    shards = [
        (".".join(keys), shard)
        for keys, array in by_keys(state)
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]
    on_cpu = [shard.device.platform == "cpu" for _, shard in shards]
    for here, (_, shard) in zip(on_cpu, shards, strict=True):
        if not here:
            shard.data.copy_to_host_async()
    pieces: list[tuple[int, int, int]] = []
    copies = [
        _own_memory(shard.data, pieces) if here else _fetched(shard.data)
        for here, (_, shard) in zip(on_cpu, shards, strict=True)
    ]
    list(pool.map(lambda piece: ctypes.memmove(*piece), pieces))
    return [
        HostShard(
            leaf=name,
            start=tuple(part.start or 0 for part in shard.index),
            shape=shard.data.shape,
            dtype=np.dtype(shard.data.dtype),
            data=memoryview(copied),
        )
        for copied, (name, shard) in zip(copies, shards, strict=True)
    ]


def _own_memory(array: jax.Array, pieces: list[tuple[int, int, int]]) -> np.ndarray:
    """Returns memory for a copy of an array on the CPU, and adds what is to be copied: target, source, bytes.

    The source is the address of the array's own memory. A NumPy view of it would count as a second user, and XLA would
    then copy the array once more when the next step donates it.
    """
    memory = mmap.mmap(-1, max(array.nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if array.nbytes >= _HUGE_PAGE_BYTES:
        memory.madvise(mmap.MADV_HUGEPAGE)  # 512 times fewer page faults: they take longer than the copy
    copied = np.frombuffer(memory, np.uint8, count=array.nbytes)
    source, target = array.unsafe_buffer_pointer(), copied.ctypes.data
    for start in range(0, array.nbytes, _PIECE_BYTES):
        pieces.append((target + start, source + start, min(_PIECE_BYTES, array.nbytes - start)))
    return copied


def _fetched(array: jax.Array) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8)
