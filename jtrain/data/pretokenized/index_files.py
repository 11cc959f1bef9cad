"""Files of one prepared index in a local folder, memory-mapped. `remote_files` has the same for a URL."""

import contextlib
import functools
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Int, UInt8

from jtrain.data.sources.retry import retried
from jtrain.errors import FileError, UserError

if TYPE_CHECKING:
    from jtrain.data.pretokenized.remote_files import RemoteFiles


class LocalFiles:
    """Files of a prepared index in a local folder; opened for each read: only maps hold descriptors.

    Attributes:
      location: folder or URL, without a slash at the end.
    """

    def __init__(self, folder: Path) -> None:
        self.location = str(folder)
        self._folder = folder
        self._inode_of: dict[str, tuple[int, int]] = {}
        self._maps: dict[str, mmap.mmap] = {}

    def content(self, name: str) -> bytes:
        """Returns a whole small file; raises FileNotFoundError if it is missing."""
        return self._retried(name, (self._folder / name).read_bytes)

    def sizes_bytes(self, names: list[str]) -> list[int | None]:
        """Returns the size of each file; None if it is missing."""
        return [self._retried(name, functools.partial(self._size, name)) for name in names]

    def _size(self, name: str) -> int | None:
        try:
            status = os.stat(f"{self.location}/{name}")
        except FileNotFoundError:
            return None
        # Later reads must find the file whose size was checked.
        self._inode_of[name] = status.st_dev, status.st_ino
        return status.st_size

    def table(
        self, name: str, dtype: Any, shape: tuple[int, ...], *, offset: int, size_bytes: int
    ) -> np.ndarray:
        """Returns rows of a file of `size_bytes` bytes that start at byte `offset`.

        They are an array in a memory map, which all processes share; the map holds one descriptor.

        Raises:
          FileError: the file was replaced since the index was opened.
        """
        # An empty file cannot be mapped.
        if not size_bytes:
            return np.empty(shape, dtype)
        if name not in self._maps:
            self._maps[name] = self._retried(name, functools.partial(self._map, name))
        return np.ndarray(shape, dtype, self._maps[name], offset)

    def _map(self, name: str) -> mmap.mmap:
        with open(self._folder / name, "rb") as file:
            self._check_same(name, file.fileno())
            # The map keeps the inode alive, so it stays readable when the index is replaced.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def read(
        self, name: str, starts: Int[np.ndarray, " n"], sizes: Int[np.ndarray, " n"]
    ) -> UInt8[np.ndarray, " b"]:
        """Returns `sizes[i]` bytes from byte `starts[i]`, one span after another.

        Reads span by span: faster than gathering from a memory map, 0.7 M spans/s of 600 tokens each.

        Raises:
          EOFError: a span reaches beyond the end of the file.
          FileError: the file was replaced since the index was opened.
          GaveUp: an error that may pass did not pass.
        """
        return self._retried(name, lambda: self._read(name, starts, sizes))

    def _read(
        self, name: str, starts: Int[np.ndarray, " n"], sizes: Int[np.ndarray, " n"]
    ) -> UInt8[np.ndarray, " b"]:
        file = os.open(f"{self.location}/{name}", os.O_RDONLY)
        try:
            self._check_same(name, file)
            return read_spans(file, starts, sizes)
        finally:
            os.close(file)

    def _check_same(self, name: str, file: int) -> None:
        status = os.fstat(file)
        # Device and inode: a build replaces the folder, and old lengths with new ids would give wrong text.
        if self._inode_of.setdefault(name, (status.st_dev, status.st_ino)) != (status.st_dev, status.st_ino):
            raise FileError(
                f"{self.location} was made again while it was in use. Start the run again: it resumes."
            )

    def _retried[T](self, name: str, read: Callable[[], T]) -> T:
        return retried(f"{self.location}/{name}", read)


def open_files(location: str, cache_dir: Path | None) -> "LocalFiles | RemoteFiles":
    """Returns the files of a folder, or of a URL; file:// is a folder."""
    location = location.removeprefix("file://")
    if "://" not in location:
        return LocalFiles(Path(location))
    # A URL needs fsspec, whose import local files need not pay.
    from jtrain.data.pretokenized.remote_files import RemoteFiles

    return RemoteFiles(location, cache_dir)


@contextlib.contextmanager
def refuse_misfit(make_error: Callable[[str], UserError], name: str = "index.json") -> Iterator[None]:
    """Raises `make_error(reason)` where the block fails because file `name` does not fit the others, or lacks
    an entry.
    """
    try:
        yield
    # It names a cause already, such as another format version.
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise make_error(f"its {name} does not fit its files ({type(error).__name__}: {error})") from error


def read_spans(
    file: int, starts: Int[np.ndarray, " n"], sizes: Int[np.ndarray, " n"]
) -> UInt8[np.ndarray, " bytes"]:
    """Returns `sizes[i]` bytes from byte `starts[i]` of an open file, one after another; raises EOFError at
    its end.
    """
    file_bytes = os.fstat(file).st_size
    # Compared before memory is taken: a damaged index may ask for any size.
    if len(starts) and (starts.min() < 0 or sizes.min() < 0 or int((starts + sizes).max()) > file_bytes):
        raise EOFError(f"ends at byte {file_bytes}, too soon")
    content = np.empty(int(sizes.sum()), np.uint8)
    view, position = memoryview(content), 0
    for start, end in zip(starts.tolist(), np.cumsum(sizes).tolist(), strict=True):
        while position < end:
            # `preadv` may return fewer bytes than asked for.
            read = os.preadv(file, (view[position:end],), start)
            if not read:
                raise EOFError(f"ends at byte {os.fstat(file).st_size}, too soon")
            position, start = position + read, start + read
    return content
