"""Writes the arrays of one process into a checkpoint, with the hash of each file, and reads files back to compare."""

import collections
import concurrent.futures
import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jtrain.checkpoint import array_files, files, folders, object_stores
from jtrain.checkpoint.hashed_io import HashedIO, sync
from jtrain.checkpoint.host_copy import HostShard
from jtrain.checkpoint.orbax_io import by_keys, sharding_text
from jtrain.runtime.store_paths import in_store, said

type Hashes = dict[str, tuple[int, str]]
"""Path relative to the checkpoint's directory -> (bytes, hash) of a file."""

_THREADS = 8


@dataclasses.dataclass(frozen=True)
class DescribedLeaf:
    """Holds what the files of a leaf depend on, beside its contents; `keys`: its path in the state."""

    keys: tuple[str, ...]
    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    dtype: np.dtype
    sharding: str


def describe(state: Any) -> list[DescribedLeaf]:
    """Returns one description for each leaf of a pytree of jax.Arrays."""
    return [
        DescribedLeaf(
            keys,
            array.shape,
            array.sharding.shard_shape(array.shape),
            np.dtype(array.dtype),
            sharding_text(array.sharding),
        )
        for keys, array in by_keys(state)
    ]


def threads() -> concurrent.futures.ThreadPoolExecutor:
    """Returns threads for copies and writes: not more than there are cores, since each also hashes."""
    return concurrent.futures.ThreadPoolExecutor(min(_THREADS, len(os.sched_getaffinity(0))), "checkpoint")


def write_arrays(path: Path, shards: list[HostShard], leaves: list[DescribedLeaf]) -> Hashes:
    """Writes shards into the checkpoint at `path`, and the files that describe `leaves`; all are then on the disk.

    The memory of each shard is free once it was written: `shards` is empty when this returns.

    Args:
      leaves: all leaves in process 0, none in the others.
    """
    jobs: collections.deque[tuple[str, memoryview]] = collections.deque()
    for leaf in leaves:
        chunk = array_files.chunk_shape(leaf.shard_shape, leaf.dtype.itemsize)
        zarr = array_files.leaf_metadata(leaf.shape, chunk, leaf.dtype)
        jobs.append((f"{files.STATE}/{'.'.join(leaf.keys)}/{array_files.SHAPE}", memoryview(zarr)))
    if leaves:
        for name, text in array_files.lists({leaf.keys: leaf.sharding for leaf in leaves}).items():
            jobs.append((f"{files.STATE}/{name}", memoryview(text)))
    while shards:
        shard = shards.pop(0)
        for chunk in array_files.chunks(shard.shape, shard.start, shard.dtype.itemsize):
            data = shard.data[chunk.start_byte : chunk.start_byte + chunk.num_bytes]
            jobs.append((f"{files.STATE}/{shard.leaf}/{chunk.name}", data))
        del shard  # the jobs alone keep its memory now
    stored = in_store(path)
    for parent in () if stored else {(path / name).parent for name, _ in jobs}:
        parent.mkdir(parents=True, exist_ok=True)

    def work() -> Hashes:
        written: Hashes = {}
        write = object_stores.write if stored else HashedIO().write
        while jobs:
            try:
                name, data = jobs.popleft()
            except IndexError:  # another thread took the last one
                break
            try:
                written[name] = (len(data), write(path / name, data))
            except BaseException:
                jobs.clear()  # for the other threads
                raise
        return written

    with threads() as pool:
        hashes: Hashes = {}
        # Not earlier: the first file that is forced to the disk takes the names of the others along.
        for done in [pool.submit(work) for _ in range(pool._max_workers)]:
            hashes |= done.result()
        list(pool.map(lambda name: sync(path / name), () if stored else hashes))
    return hashes


def differing(path: Path, hashes: Hashes) -> list[str]:
    """Reads files back from the disk; returns one line for each that is not what was written."""

    def compare(name: str) -> str | None:
        try:
            found = folders.read(path / name) if in_store(path) else HashedIO().read(path / name)
        except OSError as error:
            return f"{name}: {error.strerror or said(error)}"
        size, digest = hashes[name]
        if found[0] != size:
            return f"{name} has {found[0]} bytes, but {size} were written"
        return None if found[1] == digest else f"{name} does not have the contents that were written"

    with threads() as pool:
        return [line for line in pool.map(compare, sorted(hashes)) if line]


def incomplete(path: Path, hashes: Hashes, leaves: dict[str, files.ManifestLeaf]) -> list[str]:
    """Returns one line for each file that cannot be seen from here, and for each leaf whose files are too few.

    hashes: of the files of all processes.
    """
    lines: list[str] = []
    sizes = folders.sizes(path)
    stored = dict.fromkeys(leaves, 0)
    for name, (size, _) in hashes.items():
        if sizes.get(name) != size:
            lines.append(f"{name} was written by one process and cannot be seen by process {jax.process_index()}")
        _, leaf, file = name.split("/") if name.count("/") == 2 else ("", "", "")
        if file.startswith(array_files.CHUNK):
            stored[leaf] += size
    lines += [
        f"{name} has {stored[name]} bytes in all its files, not {leaf.bytes}"
        for name, leaf in leaves.items()
        if stored[name] != leaf.bytes
    ]
    return lines
