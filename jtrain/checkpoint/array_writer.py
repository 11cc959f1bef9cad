"""Writes the arrays of one process into a checkpoint, with the hash of each file, and reads files back to
compare.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jtrain.checkpoint import array_files, files, folders
from jtrain.checkpoint.array_files import by_keys
from jtrain.checkpoint.hashed_io import Checksum, HashedIO, file_hash
from jtrain.checkpoint.host_copy import StateChunks
from jtrain.runtime import atomic_io, stores
from jtrain.runtime.stores import error_line, in_store

type Hashes = dict[str, tuple[int, str]]
"""Path relative to the checkpoint's directory -> (bytes, hash) of a file."""

type Checksums = dict[str, str]
"""Path relative to the checkpoint's directory -> `hashed_io.Checksum` of a file."""

_THREADS = 8
_NICE = 5  # a quarter of a core at least, where steps leave none


@dataclasses.dataclass(frozen=True)
class DescribedLeaf:
    """Description that Orbax reads for one leaf.

    keys: path in the state.
    metadata: contents of its zarr.json.
    """

    keys: tuple[str, ...]
    metadata: bytes
    sharding: str


def describe(state: Any, group_sizes: Mapping[tuple[str, ...], int] | None = None) -> list[DescribedLeaf]:
    """Returns one description for each leaf of a pytree of jax.Arrays.

    Args:
      group_sizes: length of the first dimension of the parts in which a leaf is written, where that is not a
        shard's.
    """

    def describe_leaf(keys: tuple[str, ...], array: Any) -> DescribedLeaf:
        part = array.sharding.shard_shape(array.shape)
        if group_sizes and keys in group_sizes:
            part = (group_sizes[keys], *part[1:])
        return DescribedLeaf(
            keys,
            _metadata(array.shape, part, np.dtype(array.dtype)),
            array_files.sharding_text(array.sharding),
        )

    return [describe_leaf(keys, array) for keys, array in by_keys(state)]


@functools.lru_cache(maxsize=1024)  # opens a store in memory each time, for many leaves of the same shape
def _metadata(shape: tuple[int, ...], shard_shape: tuple[int, ...], dtype: np.dtype) -> bytes:
    return array_files.leaf_metadata(shape, array_files.chunk_shape(shard_shape, dtype.itemsize), dtype)


def open_pool(*, low: bool = False) -> concurrent.futures.ThreadPoolExecutor:
    """Returns threads for copies and writes: not more than there are cores, since each also hashes.

    low: they have a low priority.
    """
    count = min(_THREADS, len(os.sched_getaffinity(0)))
    return concurrent.futures.ThreadPoolExecutor(
        count, "checkpoint", initializer=yield_to_steps if low else None
    )


def yield_to_steps() -> None:
    """Lowers the priority of the calling thread and of those that it starts: steps need the same cores."""
    # Linux gives each thread its own nice value.
    if sys.platform == "linux":  # elsewhere it would change the whole process
        os.nice(_NICE)


def write_arrays(
    path: Path,
    chunks: StateChunks,
    leaves: list[DescribedLeaf],
    checksums: Checksums,
    *,
    background: bool = False,
) -> Hashes:
    """Writes chunks and the files of `leaves` into the checkpoint at `path`; returns when all are on disk.

    The memory of each copy is free once it was written.

    Args:
      leaves: all leaves in process 0, none in the others.
      checksums: gets those of the files that are written here, if `path` is on a disk.
      background: True if steps run beside it: copies are then written with low priority.
    """
    stored = in_store(path)
    made: set[str] = set()
    # Files of a few hundred bytes come last: the state's memory has to be free first.
    small = collections.deque(descriptions(leaves))

    def write(disk: HashedIO, name: str, data: memoryview, hashes: Hashes) -> None:
        if stored:
            digest = stores.write(path / name, data)
        else:
            # All threads share `made`: two may create one folder at once, which `exist_ok` allows.
            parent = os.path.dirname(name)
            if parent not in made:
                os.makedirs(path / parent, exist_ok=True)
                made.add(parent)
            digest, checksums[name] = disk.write(path / name, data)
        hashes[name] = (len(data), digest)

    def work() -> Hashes:
        hashes: Hashes = {}
        disk = HashedIO()
        # A store waits for the network, and threads that its client starts here would keep the low priority.
        low = not background or stored
        try:
            # Chunks in the state's memory go at full priority,
            # because `save` waits for them; copies may take longer.
            while (chunk := chunks.take()) is not None:
                if not low and not chunk.in_state:
                    yield_to_steps()
                    low = True
                try:
                    write(disk, chunk.name, chunk.data, hashes)
                # Also after a failed write: `release` waits for the count that `written` lowers.
                finally:
                    chunks.written(chunk)
            # Nothing waits for the small files, even if no copy came to this thread.
            if not low:
                yield_to_steps()
            with contextlib.suppress(IndexError):  # another thread took the last one
                while True:
                    write(disk, *small.popleft(), hashes)
        except BaseException:
            chunks.drop()  # for the other threads
            small.clear()
            raise
        return hashes

    with open_pool() as pool:
        hashes: Hashes = {}
        for future in [pool.submit(work) for _ in range(pool._max_workers)]:
            # `result` raises the first failure of a thread; the pool
            # then waits for the others, which find no chunks.
            hashes |= future.result()
    # Not earlier: the first file that is forced to the disk takes the names of the others along.
    if not stored:
        atomic_io.sync_all([path / name for name in hashes], [path / name for name in made])
    return hashes


def descriptions(leaves: list[DescribedLeaf], *, has_zeros: bool = False) -> Iterator[tuple[str, memoryview]]:
    """Yields path and contents of files beside the chunks; `has_zeros` as in `array_files.orbax_lists`."""
    for leaf in leaves:
        yield f"{files.STATE}/{'.'.join(leaf.keys)}/{array_files.SHAPE}", memoryview(leaf.metadata)
    if leaves:
        shardings = {leaf.keys: leaf.sharding for leaf in leaves}
        for name, text in array_files.orbax_lists(shardings, has_zeros=has_zeros).items():
            yield f"{files.STATE}/{name}", memoryview(text)


def find_differences(path: Path, hashes: Hashes, checksums: Checksums) -> list[str]:
    """Reads files back from the disk; returns one line for each that is not what was written.

    checksums: of the files that this process wrote; those of others are compared by their hashes, which takes
      longer.
    """
    names = collections.deque(sorted(hashes))

    def compare(disk: HashedIO, name: str) -> str | None:
        expected_digest = hashes[name][1]
        try:
            if in_store(path):
                # A client of a store has no cache to bypass: one read gives size and manifest hash.
                size, digest = folders.read(path / name)
            elif name in checksums:
                # This process wrote the file and has its checksum: 20 GB/s instead of 1 GB/s for the hash.
                size, digest = disk.read(path / name, Checksum())
                expected_digest = checksums[name]
            else:
                size, digest = disk.read(path / name, file_hash())
        except OSError as error:
            return f"{name}: {error.strerror or error_line(error)}"
        # A shorter or longer file says more than a digest that differs.
        if size != hashes[name][0]:
            return f"{name} has {size} bytes, but {hashes[name][0]} were written"
        return None if digest == expected_digest else f"{name} does not have the contents that were written"

    def work() -> list[str]:
        disk = HashedIO()
        lines: list[str] = []
        while True:
            try:
                name = names.popleft()
            except IndexError:  # another thread took the last one
                return lines
            if line := compare(disk, name):
                lines.append(line)

    with open_pool() as pool:
        futures = [pool.submit(work) for _ in range(pool._max_workers)]
        return sorted(itertools.chain(*(future.result() for future in futures)))


def find_missing_parts(path: Path, hashes: Hashes, leaves: dict[str, files.ManifestLeaf]) -> list[str]:
    """Returns one line for each file that cannot be seen from here, and for each leaf whose files are too
    few.

    hashes: of the files of all processes.
    """
    lines: list[str] = []
    # One listing for all files: in a store a look-up for each would be a request for each.
    sizes = folders.sizes(path)
    stored = dict.fromkeys(leaves, 0)
    for name, (size, _) in hashes.items():
        if sizes.get(name) != size:
            lines.append(
                f"{name} was written by one process and cannot be seen by process {jax.process_index()}"
            )
        # A chunk is `state/<leaf>/c...`; beside it lies only the leaf's zarr.json.
        _, leaf, file = name.split("/") if name.count("/") == 2 else ("", "", "")
        if file.startswith(array_files.CHUNK):
            stored[leaf] += size
    # Every file that was told can be there, and no process may have written some shard of a leaf.
    lines += [
        f"{name} has {stored[name]} bytes in all its files, not {leaf.bytes}"
        for name, leaf in leaves.items()
        if stored[name] != leaf.bytes
    ]
    return lines
