"""Files of a checkpoint: layout in the workdir, manifest with hashes, verification. No jax, no orbax.

    checkpoints/<step>/state/          the arrays, in Orbax's format
    checkpoints/<step>/data.json       the data state: the position in the data stream
    checkpoints/<step>/config.txt      the run's flat config
    checkpoints/<step>/manifest.json   every leaf, and the size and hash of every file above
    checkpoints/<step>.damaged/        a checkpoint that was found damaged at a start: kept, never read
    last_checkpoint.json               the newest step that was committed: tells if `checkpoints` is missing

On a disk, a step's folder gets its final name in one rename, after its manifest was written. In an object
store, which has no renames, the manifest is written last. A folder with a manifest is therefore complete; one
without was left by an interrupted save.
"""

import concurrent.futures
import dataclasses
import datetime
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jtrain.checkpoint import folders
from jtrain.errors import AwayError, UserError
from jtrain.runtime import atomic_io
from jtrain.runtime.stores import in_store

STATE = "state"
DATA = "data.json"
CONFIG = "config.txt"
MANIFEST = "manifest.json"
LAST = "last_checkpoint.json"

_FORMAT = 2
# Threads are enough: reading and hashing release the interpreter's lock.
_HASH_THREADS = 8


def gib(size_bytes: int) -> str:
    """Returns a size as messages name it."""
    return f"{size_bytes / 2**30:.2f} GiB"


class CheckpointError(UserError):
    """Raised if a checkpoint cannot be written or read; the message names it and the way out."""


class CheckpointAwayError(CheckpointError, AwayError):
    """Raised if a checkpoint cannot be written: the disk is full, or a disk or store does not answer."""


class OtherVersionError(CheckpointError):
    """Raised for a checkpoint that another version of jtrain wrote; it is not damaged."""


@dataclasses.dataclass(frozen=True)
class ManifestLeaf:
    """One array of a saved state: shape, dtype by name, bytes of one full copy; 0 for zeros without files.

    In a `ProcessPart`, the shape is that of one shard, and the bytes are those of all shards that it has.
    """

    shape: tuple[int, ...]
    dtype: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    def fits(self, expected: "ManifestLeaf") -> bool:
        """True if it can be restored as `expected`: floats of one precision are read as another's."""
        floating = all(leaf.dtype.startswith(("float", "bfloat")) for leaf in (self, expected))
        return self.shape == expected.shape and (self.dtype == expected.dtype or floating)


@dataclasses.dataclass(frozen=True)
class ProcessPart:
    """Part of a checkpoint that one process keeps in local memory: the shards that its devices hold.

    process: number of the process, of `Manifest.processes`.
    run: identity of the run.
    config: hash of the settings that change the state.
    checkpoint: step of the run's newest checkpoint when the part was kept; 0 if there was none, or not in
      process 0.
    """

    process: int
    run: str
    config: str
    checkpoint: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint.

    saved_at: UTC, ISO 8601.
    leaves: path in the state, joined by dots -> shape and dtype, in the order of the tree.
    files: path relative to the step's directory -> (bytes, blake2b-128 in hex).
    processes: number of processes that wrote it.
    part: None for a whole checkpoint.
    lease: fencing number of the run's hold of its workdir; None where nothing else could write.
    """

    step: int
    saved_at: str
    leaves: dict[str, ManifestLeaf]
    files: dict[str, tuple[int, str]]
    processes: int
    part: ProcessPart | None = None
    lease: int | None = None

    @property
    def file_bytes(self) -> int:
        return sum(size for size, _ in self.files.values())

    @property
    def state_bytes(self) -> int:
        return sum(leaf.bytes for leaf in self.leaves.values())

    def missing_arrays(self) -> list[str]:
        """Returns one line for each leaf whose files are too few for its array, none if all are here.

        Arrays are stored uncompressed, so that their files have at least as many bytes.
        """
        stored: dict[str, int] = {}
        for name, (size, _) in self.files.items():
            top, _, leaf_path = name.partition("/")
            leaf_name, _, file = leaf_path.partition("/")
            # The chunks of an array; its zarr.json does not count.
            if top == STATE and file.startswith("c"):
                stored[leaf_name] = stored.get(leaf_name, 0) + size
        return [
            f"{STATE}/{name} has {stored.get(name, 0)} bytes, but the array has {leaf.bytes}"
            for name, leaf in self.leaves.items()
            if stored.get(name, 0) < leaf.bytes
        ]


def steps(folder: Path) -> tuple[int, ...]:
    """Returns the steps of the complete checkpoints in `folder`, ascending: one listing, and one look-up for
    each.
    """
    return tuple(step for step in _step_folders(folder) if folders.has_file(folder / str(step), MANIFEST))


def steps_without_manifest(folder: Path) -> tuple[int, ...]:
    """Returns the steps whose folders hold arrays but no manifest, ascending: checkpoints that lost it, or
    copies.
    """
    unsealed_steps = (
        step for step in _step_folders(folder) if not folders.has_file(folder / str(step), MANIFEST)
    )
    return tuple(step for step in unsealed_steps if STATE in folders.folder_names(folder / str(step)))


def _step_folders(folder: Path) -> list[int]:
    # Only a name that a save would write: not `007`, nor digits of other scripts.
    candidates = (int(name) for name in folders.names(folder) if name.isdecimal() and str(int(name)) == name)
    return sorted(candidates)


def seal(
    path: Path,
    *,
    step: int,
    leaves: dict[str, ManifestLeaf],
    data: str,
    config: str,
    hashes: dict[str, str],
    processes: int = 1,
    part: ProcessPart | None = None,
    lease: int | None = None,
) -> None:
    """Completes the directory at `path`, which holds the arrays, for its commit: writes side files and
    manifest.

    What it writes is on the disk when this returns.

    Args:
      hashes: path relative to `path` -> hash, of the files that hold the arrays, which are on the disk.
      processes: number of processes that wrote them.
      lease: fencing number of the run's hold of its workdir.

    Raises:
      CheckpointError: the files are too few for the arrays, because some process wrote elsewhere.
    """
    # Side files before the manifest: it holds their hashes too.
    for name, text in ((DATA, data), (CONFIG, config)):
        if in_store(path):
            (path / name).write_bytes(text.encode())
        else:
            # For the owner alone, as the workdir's: the config may hold a secret that nothing marks as one.
            atomic_io.write_whole(path / name, text, durable=False, mode=0o600 if name == CONFIG else 0o666)
    digests = hashes | {name: folders.hash_of(path / name) for name in (DATA, CONFIG)}
    sizes = folders.sizes(path)
    files = {name: (sizes[name], digests[name]) for name in sorted(digests)}
    saved_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    manifest = Manifest(step, saved_at, leaves, files, processes, part, lease)
    # Before the manifest is written: without one, nobody takes the folder for a checkpoint.
    if missing := manifest.missing_arrays():
        raise CheckpointError(
            f"the checkpoint of step {step} is not whole in {path}: {'; '.join(missing)}. All processes must "
            "write to one folder: set --workdir to a folder that all hosts share, or to gs:// or s3://."
        )
    body = dataclasses.asdict(manifest) | {"format": _FORMAT}
    # A whole checkpoint has no key `part`: `read_manifest` tells the two kinds apart by it.
    if part is None:
        del body["part"]
    body = json.loads(json.dumps(body))  # tuples become lists, as they will be read
    text = json.dumps(body | {"digest": manifest_digest(body)}, indent=1)
    # The manifest is the last file. In a store its presence is the commit.
    (path / MANIFEST).write_bytes(text.encode())
    if not in_store(path):
        # On the disk before the caller renames the folder: a
        # rename may survive a power cut that its files do not.
        atomic_io.sync_all((path / name for name in (DATA, CONFIG, MANIFEST)), (path, path / STATE))


def note_commit(folder: Path, step: int | None) -> None:
    """Notes in the workdir that the checkpoint of `step` was committed; None at the start of a run without
    any.
    """
    if not in_store(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    write_text(folder.parent / LAST, json.dumps({"step": step}) + "\n")


def has_note(folder: Path) -> bool:
    """True if a run began in the workdir."""
    return folders.has_file(folder.parent, LAST)


def last_commit(folder: Path) -> int | None:
    """Returns the newest step that was committed in this workdir; None if there was none, or that is not
    known.
    """
    try:
        step = json.loads((folder.parent / LAST).read_text())["step"]
    except (FileNotFoundError, NotADirectoryError, KeyError, TypeError, ValueError):
        return None
    return step if isinstance(step, int) else None


def read_manifest(path: Path) -> Manifest:
    """Reads the manifest of the checkpoint at `path`, and checks it against its own digest and the folder's
    name.

    Raises:
      CheckpointError: the manifest is missing, damaged, or of another step.
      OtherVersionError: it has another format.
      OSError: the disk or store cannot be read.
    """
    try:
        text = (path / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise CheckpointError(
            f"{path / MANIFEST} cannot be read ({type(error).__name__}: {error})"
        ) from error
    try:
        body: dict[str, Any] = json.loads(text)
        digest = body.pop("digest")
        # Before the format: a damaged manifest must not pass for one of another version.
        if digest != manifest_digest(body):
            raise CheckpointError(f"{path / MANIFEST} does not match its own digest")
        if (version := body.pop("format")) != _FORMAT:
            raise OtherVersionError(
                f"{path / MANIFEST} has format {version}: another version of jtrain wrote it, and this one "
                f"reads format {_FORMAT}. Go on with that version, whose commit is in run.json, or set "
                "--workdir to a new folder."
            )
        leaves = {
            name: ManifestLeaf(**leaf | {"shape": tuple(leaf["shape"])})
            for name, leaf in body.pop("leaves").items()
        }
        files = {name: (size, digest) for name, (size, digest) in body.pop("files").items()}
        part = ProcessPart(**body.pop("part")) if "part" in body else None
        manifest = Manifest(leaves=leaves, files=files, part=part, **body)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        # CheckpointError is a ValueError through UserError; the messages above must not be wrapped again.
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{path / MANIFEST} cannot be read ({type(error).__name__}: {error})"
        ) from error
    # A folder of a damaged step is not named as a number and is not compared.
    if path.name.isdecimal() and int(path.name) != manifest.step:
        raise CheckpointError(
            f"{path} holds the checkpoint of step {manifest.step}: its folder was copied or renamed from "
            f"{manifest.step} to {path.name}. Give it back the name {manifest.step}, or move it away"
        )
    return manifest


def find_damage(
    path: Path, manifest: Manifest, *, hashes: bool = True, share: tuple[int, int] = (0, 1)
) -> list[str]:
    """Checks the checkpoint at `path`; returns one line for each damaged file, none if it is intact.

    hashes: reads the files and compares their hashes too; otherwise only sizes are compared.
    share: (i, n) hashes every n-th file, starting with the i-th largest, so that n processes divide the work.
      Sizes are compared for all files.

    Raises:
      OSError: the disk or store cannot be read.
    """
    file_sizes = folders.sizes(path)
    problems: list[str] = manifest.missing_arrays()
    for name, (size, _) in manifest.files.items():
        if name not in file_sizes:
            problems.append(f"{name} is missing")
        elif file_sizes[name] != size:
            problems.append(f"{name} has {file_sizes[name]} bytes, but {size} were saved")
    # Sizes cost one listing, hashes read everything: one missing file is reason enough.
    if problems or not hashes:
        return problems
    # Largest first, and by name among equals: all processes compute the same order, and their shares balance.
    mine = sorted(manifest.files, key=lambda name: (-manifest.files[name][0], name))[share[0] :: share[1]]
    for name, digest in hashes_of(path, mine).items():
        if digest != manifest.files[name][1]:
            problems.append(f"{name} does not have the contents that were saved")
    return problems


def hashes_of(path: Path, names: Iterable[str]) -> dict[str, str]:
    """Returns the hash of each of these files in the checkpoint at `path`."""
    names = list(names)
    with concurrent.futures.ThreadPoolExecutor(_HASH_THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: folders.hash_of(path / name), names), strict=True))


def write_text(path: Path, text: str) -> None:
    """Writes a file as a whole or not at all; a store does nothing else."""
    if in_store(path):
        path.write_text(text)
    else:
        atomic_io.write_whole(path, text)


def manifest_digest(body: dict[str, Any]) -> str:
    """Returns the hash that a manifest has of its own fields."""
    # Sorted keys: the digest must not depend on the order in which a dict was filled or parsed.
    canonical = json.dumps(body, sort_keys=True).encode()
    return hashlib.blake2b(canonical, digest_size=16).hexdigest()
