"""Checkpoint folders in memory that are written over again and again, without taking and clearing memory
anew.

    a/state/params.layers.q/c.0.3    one chunk of a shard, as in every checkpoint (`array_files`)
    a/data.json, config.txt          as in every checkpoint
    a/manifest.json                  with a `ProcessPart`: removed before the first byte changes, written last
    b/...

New files for every copy would take 40 times as long as writing over the maps of old ones: 3.6 s per GiB, not
0.09 s.
"""

import contextlib
import ctypes
import math
import mmap
import os
import shutil
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jtrain.checkpoint import array_files, files, folders
from jtrain.checkpoint.array_files import by_keys
from jtrain.checkpoint.files import CheckpointError, Manifest, ManifestLeaf, ProcessPart, gib
from jtrain.checkpoint.host_copy import first_element

# Two: one is whole while the other one is written over.
SLOTS = ("a", "b")

# `mmap` returns a pointer and takes a 64-bit offset: ctypes assumes int for both unless told.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_ssize_t]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def whole_slots(folder: Path) -> Iterator[tuple[Path, Manifest]]:
    """Yields the slots of a process's folder that hold a state, with their manifests."""
    for slot in (folder / name for name in SLOTS):
        with contextlib.suppress(CheckpointError, OSError):
            yield slot, files.read_manifest(slot)


def parts_of(folder: Path, process: int) -> list[tuple[Path, Manifest, ProcessPart]]:
    """Returns the slots in a run's folder on this host that hold a process's part: its own, or a neighbour's
    copy.
    """
    return [
        (slot, manifest, manifest.part)
        for kind in ("process", "copy")
        for slot, manifest in whole_slots(folder / f"{kind}-{process}")
        if manifest.part is not None and manifest.part.process == process
    ]


def mark_empty(slot: Path) -> None:
    """Marks a slot as one that holds no state."""
    (slot / files.MANIFEST).unlink(missing_ok=True)


def missing_room(folder: Path, needed_bytes: int) -> str:
    """Reason why slots of so many bytes in all have no room in a folder; empty if they have."""
    # An earlier attempt's files are written over, so their room
    # counts as free; st_blocks has units of 512 bytes.
    used_bytes = sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())
    free_bytes = shutil.disk_usage(folder).free + used_bytes
    if needed_bytes <= free_bytes:
        return ""
    return (
        "checkpoint.local_every_steps keeps two generations of the state, and two of another host's where "
        f"there are several: {gib(needed_bytes)} in {folder.parent}, which has {gib(free_bytes)} free. Make "
        "it larger (`mount -o remount,size=... /dev/shm`, `docker run --shm-size`), set "
        "checkpoint.local_dir to another folder in memory, or checkpoint.local_every_steps=None."
    )


def held_leaves(tree: Any) -> dict[str, ManifestLeaf]:
    """Returns the manifest's leaves of the part of a state that this process's devices hold, each shard
    once.
    """

    def describe_held(leaf: Any) -> ManifestLeaf:
        shape, dtype = leaf.sharding.shard_shape(leaf.shape), np.dtype(leaf.dtype)
        return ManifestLeaf(tuple(shape), dtype.name, len(_starts(leaf)) * math.prod(shape) * dtype.itemsize)

    return {".".join(keys): describe_held(leaf) for keys, leaf in by_keys(tree)}


def chunk_sizes(tree: Any) -> dict[str, int]:
    """Returns name and bytes of each file of this process's shards of a state."""
    return {
        f"{files.STATE}/{'.'.join(keys)}/{chunk.name}": chunk.num_bytes
        for keys, leaf in by_keys(tree)
        for start in _starts(leaf)
        for chunk in _chunks(leaf, start)
    }


def reserve(slot: Path, sizes: Mapping[str, int]) -> None:
    """Makes files of these sizes, where there are none, takes their memory, and removes those of other
    arrays.

    A file keeps its contents. A map of a file without its memory would end the process when the folder is
    full.
    """
    for name in folders.sizes(slot):
        if name.startswith(f"{files.STATE}/") and name not in sizes:
            (slot / name).unlink()
    for folder in {(slot / name).parent for name in sizes}:
        # For the run's own user: other users of the host must not read a model.
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, size in sizes.items():
        handle = os.open(slot / name, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if os.fstat(handle).st_size != size:
                os.ftruncate(handle, size)
            # tmpfs takes memory at the first write; a map of a page that it cannot get ends in SIGBUS.
            if size:
                os.posix_fallocate(handle, 0, size)
        finally:
            os.close(handle)


def shared_map(path: Path) -> np.ndarray:
    """Returns a file's bytes: what is written to them is in the file. Python's own maps each keep a
    descriptor open.
    """
    handle = os.open(path, os.O_RDWR)
    try:
        size = os.fstat(handle).st_size
        address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, handle, 0)
    finally:
        os.close(handle)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    memory = (ctypes.c_ubyte * size).from_address(address)
    # Not at exit: the kernel takes the memory back anyway.
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False
    return np.frombuffer(memory, np.uint8)


def read(slot: Path, manifest: Manifest, like: Any) -> Any:
    """Returns the arrays of which a slot holds this process's part.

    Args:
      like: shapes, dtypes and shardings of the state.

    Raises:
      CheckpointError: the slot is of another state, or damaged.
    """
    sizes = {name: size for name, (size, _) in manifest.files.items() if name.startswith(f"{files.STATE}/")}
    # Before hashing: a state of other shapes is not damaged, but of another model or layout.
    if manifest.leaves != held_leaves(like) or sizes != chunk_sizes(like):
        raise CheckpointError("it is of another model, optimizer or layout")
    if damage := files.find_damage(slot, manifest):
        raise CheckpointError("; ".join(damage[:3]))

    def array(keys: tuple[str, ...], leaf: Any) -> jax.Array:
        def shard(index: Any) -> np.ndarray:
            block = np.empty(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
            content = block.reshape(-1).view(np.uint8)
            for chunk in _chunks(leaf, first_element(index)):
                with open(slot / files.STATE / ".".join(keys) / chunk.name, "rb") as file:
                    file.readinto(content[chunk.start_byte : chunk.start_byte + chunk.num_bytes])
            return block

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, shard)

    arrays = [array(keys, leaf) for keys, leaf in by_keys(like)]
    return jax.block_until_ready(jax.tree.unflatten(jax.tree.structure(like), arrays))


def _starts(leaf: Any) -> set[tuple[int, ...]]:
    indices = leaf.sharding.addressable_devices_indices_map(leaf.shape)
    # A set: replicas on several devices have one start, and are held once.
    return {first_element(index) for index in indices.values()}


def _chunks(leaf: Any, start: tuple[int, ...]) -> Iterator[array_files.StoredChunk]:
    return array_files.chunks(leaf.sharding.shard_shape(leaf.shape), start, np.dtype(leaf.dtype).itemsize)
