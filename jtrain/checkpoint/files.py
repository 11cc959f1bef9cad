"""What a checkpoint is on disk, and whether it is whole. Standard library only: no jax, no orbax.

    checkpoints/<step>/state/          the arrays, in Orbax's format
    checkpoints/<step>/data.json       where the data stream goes on
    checkpoints/<step>/config.txt      the run's flat config
    checkpoints/<step>/manifest.json   every leaf, and the size and hash of every file above

A step's directory appears under its final name in one rename, after its manifest was written; so a directory with a
manifest is complete, and any other is the remains of a save that was killed.
"""

import concurrent.futures
import dataclasses
import datetime
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from jtrain import durable

STATE = "state"
DATA = "data.json"
CONFIG = "config.txt"
MANIFEST = "manifest.json"

_FORMAT = 1
_HASH_THREADS = 8
_READ_BYTES = 1 << 20
_DELETED = ".deleted"
_PARTIAL = ".orbax-checkpoint-tmp"  # how Orbax ends the name of a directory that it still writes
_ORBAX_COMMITS = ("_CHECKPOINT_METADATA", "commit_success.txt")  # written after the manifest, read by nobody here


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read; the message names it and says the way out."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a saved state; dtype by name, bytes of one whole copy."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    saved_at: UTC, ISO 8601.
    leaves: path joined by dots -> shape and dtype, in the order of the tree.
    files: path relative to the step's directory -> (bytes, blake2b-128 in hex).
    """

    step: int
    saved_at: str
    leaves: dict[str, Leaf]
    files: dict[str, tuple[int, str]]

    @property
    def file_bytes(self) -> int:
        return sum(size for size, _ in self.files.values())

    @property
    def state_bytes(self) -> int:
        return sum(leaf.bytes for leaf in self.leaves.values())


def steps(folder: Path) -> tuple[int, ...]:
    """Steps of the complete checkpoints in `folder`, ascending: a listing, and one look-up for each."""
    try:
        names = [entry.name for entry in os.scandir(folder)]
    except (FileNotFoundError, NotADirectoryError):
        return ()
    found = [int(name) for name in names if name.isdecimal() and str(int(name)) == name]
    return tuple(sorted(step for step in found if (folder / str(step) / MANIFEST).is_file()))


def partial(folder: Path) -> tuple[str, ...]:
    """Names in `folder` that a killed save, deletion or copy left: never read, never counted."""
    if not folder.is_dir():
        return ()
    whole = {str(step) for step in steps(folder)}
    names = (entry.name for entry in os.scandir(folder) if entry.is_dir())
    return tuple(sorted(name for name in names if name not in whole and (_is_remains(name) or name.isdecimal())))


def surplus(found: tuple[int, ...], *, keep_last: int, keep_every_steps: int | None) -> tuple[int, ...]:
    """Which of the steps `found` to delete: all but the newest `keep_last` and the multiples of `keep_every_steps`."""
    older = sorted(found)[:-keep_last]
    return tuple(step for step in older if keep_every_steps is None or step % keep_every_steps)


def delete(folder: Path, step: int) -> None:
    """Deletes one checkpoint: first renamed, so that a kill leaves no half of one under a step's name."""
    away = folder / f"{step}{_DELETED}"
    if away.exists():
        shutil.rmtree(away)
    (folder / str(step)).rename(away)
    shutil.rmtree(away, ignore_errors=True)  # what stays is swept by the next run


def sweep(folder: Path) -> None:
    """Removes what killed saves and deletions left behind, except under a step's own name, where a user put it."""
    for name in partial(folder):
        if _is_remains(name):
            shutil.rmtree(folder / name, ignore_errors=True)


def seal(path: Path, *, step: int, leaves: dict[str, Leaf], data: str, config: str) -> None:
    """Makes the directory at `path`, which holds the arrays, ready to commit: side files, hashes, manifest.

    Everything is on the disk itself, not only in its cache, when this returns. Process 0 reads all files back, also
    those that other processes wrote: about 1 s per GB and thread, 8 threads.
    """
    (path / DATA).write_text(data)
    (path / CONFIG).write_text(config)
    names = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    names = [name for name in names if name not in _ORBAX_COMMITS]
    with concurrent.futures.ThreadPoolExecutor(_HASH_THREADS) as pool:
        hashes = pool.map(lambda name: _hash(path / name, sync=True), names)
        files = {name: ((path / name).stat().st_size, digest) for name, digest in zip(names, hashes, strict=True)}
    saved_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    body = dataclasses.asdict(Manifest(step, saved_at, leaves, files)) | {"format": _FORMAT}
    durable.write_whole(path / MANIFEST, json.dumps(body | {"digest": _digest(body)}, indent=1))
    for inner in (path, *(entry for entry in path.rglob("*") if entry.is_dir())):
        durable.sync_directory(inner)


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`, checked against its own digest.

    Raises:
      CheckpointError: it cannot be read, or is damaged.
    """
    try:
        body: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        digest = body.pop("digest")
        version = body.pop("format")
        if digest != _digest(body | {"format": version}):
            raise CheckpointError(f"{path / MANIFEST} does not match its own digest")
        leaves = {name: Leaf(**leaf | {"shape": tuple(leaf["shape"])}) for name, leaf in body.pop("leaves").items()}
        files = {name: (size, digest) for name, (size, digest) in body.pop("files").items()}
        if version != _FORMAT:
            raise CheckpointError(f"{path / MANIFEST} has format {version}; this jtrain reads format {_FORMAT}")
        return Manifest(leaves=leaves, files=files, **body)
    except (OSError, KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read ({type(error).__name__}: {error})") from error


def damage(path: Path, manifest: Manifest, *, hashes: bool = True, share: tuple[int, int] = (0, 1)) -> list[str]:
    """What is wrong with the checkpoint at `path`, one line for each file; empty if it is whole.

    hashes: read the files and compare their hashes, too; without, a look at each one's size.
    share: (i, n) hashes only every n-th file, beginning with the i-th largest, so that n processes divide the work.
      Sizes are compared for all.
    """
    found: list[str] = []
    intact: list[str] = []
    for name, (size, _) in manifest.files.items():
        try:
            here = (path / name).stat().st_size
        except OSError:
            found.append(f"{name} is missing")
            continue
        if here != size:
            found.append(f"{name} has {here} bytes, {size} were saved")
        else:
            intact.append(name)
    if found or not hashes:
        return found
    mine = sorted(intact, key=lambda name: (-manifest.files[name][0], name))[share[0] :: share[1]]
    with concurrent.futures.ThreadPoolExecutor(_HASH_THREADS) as pool:
        for name, digest in zip(mine, pool.map(lambda name: _hash(path / name), mine), strict=True):
            if digest != manifest.files[name][1]:
                found.append(f"{name} has other contents than were saved")
    return found


def _is_remains(name: str) -> bool:
    return _PARTIAL in name or name.endswith(_DELETED)


def _hash(path: Path, *, sync: bool = False) -> str:
    """blake2b of 128 bits: 1.3 GB/s and core, whatever the CPU; hashlib lets other threads run meanwhile."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
        if sync:
            os.fsync(file.fileno())
    return digest.hexdigest()


def _digest(body: dict[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True).encode()
    return hashlib.blake2b(canonical, digest_size=16).hexdigest()
