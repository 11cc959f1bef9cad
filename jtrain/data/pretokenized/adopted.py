"""Ids of an adopted index: token ids that stay in the files of another project, read by offset."""

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, Int64, UInt

from jtrain.data.sources.retry import retried
from jtrain.errors import FileError

_EDGE_BYTES = 4096
_CHECKED_AT_OPEN = 64


class AdoptedIds:
    """Ids of an adopted index, by token number.

    places.bin lists runs of tokens that lie one after another in a file: int64 first token of each run and
    the number of tokens at the end, then int64 byte offset and int64 file number of each run. Files with
    nothing between their documents are one run each; MDS shards have one run per sample.

    Args:
      location: folder of the index, for messages.
      adopted: entry `adopted` of index.json: `root`, the folder of the files; `dtype` of the ids in them;
        `command`.
      files: files.json: `names` relative to the root, `sizes` in bytes, and `edges`, see `edges_of`.
      places: places.bin as int64.
      dtype: dtype of the ids returned.

    Raises:
      FileError: a file moved or changed since it was adopted. The first and last file and up to 62 between
        them are checked here, every other one before its first read.
    """

    def __init__(
        self,
        location: str,
        adopted: dict[str, str],
        files: dict[str, Any],
        places: Int64[np.ndarray, " entries"],
        dtype: np.dtype[Any],
    ) -> None:
        self.command = adopted["command"]
        self.root = adopted["root"]
        self._location = location
        self._files = files
        self._dtype = dtype
        self._stored_dtype = np.dtype(adopted["dtype"])
        # Three columns one after another, the first with one entry more: 3 runs + 1 entries.
        runs = len(places) // 3
        self._first_token, self._offset, self._file_of_run = (
            places[: runs + 1],
            places[runs + 1 : 2 * runs + 1],
            places[-runs:],
        )
        self._identity_of: dict[int, tuple[int, ...]] = {}
        count = len(files["names"])
        # Opening all of 100,000 files would take seconds; each is checked before its first read anyway.
        for file in np.linspace(0, count - 1, min(count, _CHECKED_AT_OPEN), dtype=np.int64).tolist():
            retried(self._path(file), lambda file=file: os.close(self._open(file)))

    def read(
        self, start: Int[np.ndarray, " n"], length: Int[np.ndarray, " n"]
    ) -> UInt[np.ndarray, " tokens"]:
        """Returns the ids of spans of tokens, one after another; each span lies within one run.

        Raises:
          FileError: a file moved or changed.
          GaveUp: an error that may pass did not pass.
        """
        return retried(self.root, lambda: self._read(start, length))

    def _read(
        self, start: Int[np.ndarray, " n"], length: Int[np.ndarray, " n"]
    ) -> UInt[np.ndarray, " tokens"]:
        size = self._stored_dtype.itemsize
        # An empty span at the very end would lie behind the last run.
        runs = np.minimum(
            np.searchsorted(self._first_token, start, side="right") - 1, len(self._file_of_run) - 1
        )
        files = self._file_of_run[runs]
        file_offsets = (self._offset[runs] + (start - self._first_token[runs]) * size).tolist()
        ends = (np.cumsum(length) * size).tolist()
        ids = np.empty(int(length.sum()), self._stored_dtype)
        # Each span has a place of its own in `ids`, so they may be read in any order.
        view, open_file, descriptor = memoryview(ids.view(np.uint8)), None, -1
        try:
            for i in np.argsort(files, kind="stable").tolist():  # each file is opened once
                position = ends[i] - int(length[i]) * size
                # An empty span needs no file, which may even be gone.
                if position < ends[i] and open_file != files[i]:
                    if open_file is not None:
                        open_file = os.close(descriptor)
                    descriptor = self._open(int(files[i]))
                    open_file = files[i]
                while position < ends[i]:
                    read = os.preadv(descriptor, (view[position : ends[i]],), file_offsets[i])
                    if not read:
                        raise self._change_error(int(files[i]), "it was cut short")
                    position, file_offsets[i] = position + read, file_offsets[i] + read
        finally:
            if open_file is not None:
                os.close(descriptor)
        # Ids of 8 bytes are narrowed to 4; signed ones of the same size are read as unsigned.
        return ids.view(self._dtype) if self._dtype.itemsize == size else ids.astype(self._dtype)

    def read_range(self, start: int, end: int) -> UInt[np.ndarray, " tokens"]:
        """Returns the ids of tokens start to end - 1, which may lie in several runs."""
        first, last = np.searchsorted(self._first_token, [start, max(start, end - 1)], side="right") - 1
        # Cut at the first token of each run within, since a span of `read` lies in one run.
        cuts = np.concatenate([[start], self._first_token[first + 1 : last + 1], [end]])
        return self.read(cuts[:-1], np.diff(cuts))

    def name_at(self, token: int) -> str:
        """Returns the path of the file that holds a token."""
        run = min(
            int(np.searchsorted(self._first_token, token, side="right")) - 1, len(self._file_of_run) - 1
        )
        return self._path(int(self._file_of_run[run]))

    def _path(self, file: int) -> str:
        return os.path.join(self.root, self._files["names"][file])

    def _open(self, file: int) -> int:
        """Opens a file; raises FileError if it is not the one that was adopted."""
        try:
            handle = os.open(self._path(file), os.O_RDONLY)
        except OSError as error:
            raise self._change_error(file, f"it cannot be opened ({error.strerror})") from error
        try:
            status = os.fstat(handle)
            identity = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
            # With inode, size and time stamp as at its last check, a file is not read for its edges again.
            if self._identity_of.get(file) != identity:
                expected_bytes = self._files["sizes"][file]
                if status.st_size != expected_bytes:
                    raise self._change_error(
                        file, f"it had {expected_bytes:,} bytes and has {status.st_size:,} now"
                    )
                if edges_of(handle, expected_bytes) != self._files["edges"][file]:
                    raise self._change_error(file, "its first or last bytes are others")
                self._identity_of[file] = identity
        except BaseException:
            os.close(handle)
            raise
        return handle

    def _change_error(self, file: int, change: str) -> FileError:
        return FileError(
            f"{self._location} reads its ids from {self._path(file)}, which moved or changed since it was "
            f"adopted: {change}. Put the file back, or adopt it again: {self.command} (moved files with the "
            "same contents are not read again)."
        )


def edges_of(handle: int, size_bytes: int) -> str:
    """Returns a hash of the first and last 4 KiB of an open file, to tell apart files too large to read."""
    edges = os.pread(handle, _EDGE_BYTES, 0) + os.pread(handle, _EDGE_BYTES, max(0, size_bytes - _EDGE_BYTES))
    return hashlib.blake2b(edges, digest_size=16).hexdigest()


def edges_of_path(path: Path) -> tuple[int, str]:
    """Returns the size of a file in bytes and the hash of its edges."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        return size, edges_of(file.fileno(), size)
