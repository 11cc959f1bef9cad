"""A checkpoint that is written chunk by chunk, by one process or several, and goes on after a kill.

Leaves without chunks are zeros: in zarr, a chunk without a file holds the fill value. So the first state of
an optimizer takes no memory and no disk.
"""

import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.checkpoint import array_files, array_writer, files
from jtrain.checkpoint.hashed_io import HashedIO, pages
from jtrain.runtime import atomic_io


@dataclasses.dataclass(frozen=True)
class StreamedChunk:
    """One file of a leaf.

    name: path relative to the checkpoint's folder.
    start: index of its first element in the leaf.
    """

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def empty(self) -> np.ndarray:
        """Memory for its contents, as files are written from it without a copy."""
        size = int(np.prod(self.shape, dtype=np.int64))
        return np.frombuffer(pages(size * self.dtype.itemsize), self.dtype, size).reshape(self.shape)


def chunks_of(leaf: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Iterator[StreamedChunk]:
    """Yields the files of a leaf, in the order of its memory."""
    chunk = array_files.chunk_shape(shape, dtype.itemsize)
    for stored in array_files.chunks(shape, (0,) * len(shape), dtype.itemsize):
        # A chunk is named `c.0.2`: its number along each dimension.
        index = [int(number) for number in stored.name.split(".")[1:]]
        start = tuple(number * size for number, size in zip(index, chunk, strict=True))
        yield StreamedChunk(f"{files.STATE}/{leaf}/{stored.name}", start, chunk, dtype)


class StreamedCheckpoint:
    """The checkpoint of step 0 in a workdir that is not whole yet.

    notes: what `write` was told about each chunk that any process has written.
    """

    def __init__(self, workdir: Path, *, share: tuple[int, int] = (0, 1)) -> None:
        """Finds what earlier attempts and other processes wrote.

        Args:
          share: number of this process, and of all.
        """
        self.folder = workdir / "checkpoints"
        self._path = self.folder / "0"
        self._workdir = workdir
        self._journal = workdir / f"written.{share[0]}-of-{share[1]}.jsonl"
        self._lock = threading.Lock()
        self._local = threading.local()
        self._written: dict[str, tuple[int, str]] = {}
        self.notes: dict[str, Any] = {}
        self._path.mkdir(parents=True, exist_ok=True)
        self.read_journals()

    def read_journals(self) -> None:
        """Takes in what all processes have written so far."""
        for journal in sorted(self._workdir.glob("written.*.jsonl")):
            for line in journal.read_text().splitlines():
                # The last line of a process that was killed may be cut short.
                with contextlib.suppress(ValueError):
                    name, size, digest, note = json.loads(line)
                    file = self._path / name
                    # A later attempt may have been killed while it wrote the file anew.
                    if file.is_file() and file.stat().st_size == size:
                        self._written[name], self.notes[name] = (size, digest), note

    def missing(self, chunks: Iterable[StreamedChunk]) -> list[StreamedChunk]:
        """Chunks that no process has written."""
        return [chunk for chunk in chunks if chunk.name not in self._written]

    def write(self, chunk: StreamedChunk, content: np.ndarray, note: Any = None) -> None:
        """Writes one file; it is on the disk when this returns. Threads may call it at once."""
        path = self._path / chunk.name
        path.parent.mkdir(parents=True, exist_ok=True)
        # What a kill has left of it.
        path.unlink(missing_ok=True)
        if not hasattr(self._local, "disk"):
            # One for each thread: it has one block of memory for copies.
            self._local.disk = HashedIO()
        data = memoryview(content.reshape(-1).view(np.uint8))
        digest, _ = self._local.disk.write(path, data)
        # Any descriptor will do: fsync writes what the kernel holds of the file, whoever wrote it.
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        with self._lock, open(self._journal, "a") as journal:
            # After the file: a line in the journal stands for a whole one.
            journal.write(json.dumps([chunk.name, len(data), digest, note]) + "\n")
            self._written[chunk.name], self.notes[chunk.name] = (len(data), digest), note

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds off the other processes: one of them commits, after which the folder is not there."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(FileNotFoundError):
                # Without a folder another process has committed: there is nothing left to hold off.
                fcntl.flock(stack.enter_context(open(self._workdir / "lock", "w")), fcntl.LOCK_EX)
            yield

    def commit(
        self, state: Any, arrays: Mapping[str, np.ndarray], *, data_state: dict[str, Any], config_text: str
    ) -> None:
        """Completes the checkpoint. What no process wrote and `arrays` has not is zeros.

        Args:
          state: shapes, dtypes and shardings of the whole state.
          arrays: small leaves by their names, which are written now.
        """
        for leaf, array in arrays.items():
            for chunk in chunks_of(leaf, array.shape, array.dtype):
                part = tuple(slice(a, a + b) for a, b in zip(chunk.start, chunk.shape, strict=True))
                self.write(chunk, np.ascontiguousarray(array[part]))
        leaves = array_files.leaves(state)
        # `state/LEAF/CHUNK`: a leaf without any chunk is zeros, and takes no bytes.
        stored = {name.split("/")[1] for name in self._written}
        leaves = {
            name: leaf if name in stored else dataclasses.replace(leaf, bytes=0)
            for name, leaf in leaves.items()
        }
        hashes = {name: digest for name, (_, digest) in self._written.items()}
        disk = HashedIO()
        small = list(array_writer.descriptions(array_writer.describe(state), has_zeros=True))
        for name, content in small:
            path = self._path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            hashes[name], _ = disk.write(path, content)
        # Before `seal`, whose file says that everything else is on the disk.
        atomic_io.sync_all([self._path / name for name, _ in small], [])
        files.seal(
            self._path,
            step=0,
            leaves=leaves,
            data=json.dumps(data_state, allow_nan=False),
            config=config_text,
            hashes=hashes,
        )
        files.note_commit(self.folder, 0)
        for file in itertools.chain(self._workdir.glob("written.*.jsonl"), [self._workdir / "lock"]):
            file.unlink(missing_ok=True)
