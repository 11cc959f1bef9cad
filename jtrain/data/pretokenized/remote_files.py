"""Files of a prepared index behind a URL: ids by byte ranges, lengths by pages that are kept on the local
disk.
"""

import errno
import hashlib
import math
import mmap
import os
import weakref
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8

from jtrain.data.sources.remote import filesystem, translate_error, translate_errors
from jtrain.data.sources.retry import TransientError, retried
from jtrain.errors import FileError

CACHE_DIR = "~/.cache/jtrain"
PAGE_BYTES = 1 << 18
"""Bytes per page of a table: 65,536 lengths. A request of this size takes hardly longer than one of a few
bytes."""

_GAP_BYTES = 1 << 16
"""Spans closer than this are fetched by one request: 64 KiB take less time than a round trip."""

_REQUEST_BYTES = 1 << 23
_REQUESTS = 32
"""Requests under way at a time, for each call."""

_CACHE_ERRORS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.EFBIG,
}


class RemoteFiles:
    """Files of a prepared index below a URL, with the methods of `LocalFiles`. Nothing is copied when it is
    opened.

    Args:
      url: folder of the index.
      cache_dir: folder that receives pages of the tables; None: ~/.cache/jtrain.
    """

    def __init__(self, url: str, cache_dir: Path | None) -> None:
        self.location = url.rstrip("/")
        self._fs, self._root = filesystem(self.location, self.location)
        self._root = self._root.rstrip("/")
        self._cache_dir = Path(os.path.expanduser(cache_dir or CACHE_DIR))
        self._identity = self.location
        self._pages = weakref.WeakValueDictionary[
            str, _Pages
        ]()  # the tables hold them; no circle keeps descriptors

    def content(self, name: str) -> bytes:
        """Returns a whole file. index.json is the first one to read: the cached pages are those of its
        contents.
        """

        def fetch() -> bytes:
            with translate_errors(f"{self.location}/{name}"):
                return self._fs.cat_file(f"{self._root}/{name}")

        content = retried(f"{self.location}/{name}", fetch)
        if name == "index.json":
            self._identity = f"{self.location}\0{hashlib.blake2b(content).hexdigest()}"
        return content

    def sizes_bytes(self, names: list[str]) -> list[int | None]:

        def fetch() -> list[int | None]:
            with translate_errors(self.location):
                return self._fs.sizes([f"{self._root}/{name}" for name in names])

        sizes = retried(self.location, fetch)
        if None in sizes:
            raise self._no_ranges(names[sizes.index(None)], "the server does not tell its size")
        return sizes

    def table(
        self, name: str, dtype: Any, shape: tuple[int, ...], *, offset: int, size_bytes: int
    ) -> "RemoteTable":
        pages = self._pages.get(name)
        if pages is None:
            key = hashlib.blake2b(self._identity.encode(), digest_size=12).hexdigest()
            pages = self._pages[name] = _Pages(self, name, size_bytes, self._cache_dir / "prepared" / key)
        return RemoteTable(pages, np.dtype(dtype), shape, offset)

    def read(
        self, name: str, starts: Int[np.ndarray, " n"], sizes: Int[np.ndarray, " n"]
    ) -> UInt8[np.ndarray, " b"]:
        """Returns spans of bytes; spans near each other share a request, and several requests run at a time.

        Raises:
          FileError: the store cannot be read, or cannot send parts of a file.
        """
        found = np.empty(int(sizes.sum()), np.uint8)
        order = np.argsort(starts, kind="stable")
        order = order[sizes[order] > 0]
        if not len(order):
            return found
        first, end = starts[order], starts[order] + sizes[order]
        reach = np.maximum.accumulate(end)
        new = np.append(True, first[1:] > reach[:-1] + _GAP_BYTES)
        begins, ends = first[new], reach[np.append(np.flatnonzero(new)[1:] - 1, len(order) - 1)]
        group = np.cumsum(new) - 1
        contents = self._fetch(name, begins.tolist(), ends.tolist())
        to = np.cumsum(sizes)
        for i, g, start in zip(order.tolist(), group.tolist(), (first - begins[group]).tolist(), strict=True):
            size = int(sizes[i])
            found[to[i] - size : to[i]] = contents[g][start : start + size]
        return found

    def _fetch(self, name: str, begins: list[int], ends: list[int]) -> list[UInt8[np.ndarray, " bytes"]]:
        """Returns the bytes of each range. Ranges of more than 8 MiB are fetched in parts, failed ones once
        more.
        """
        parts = [
            (g, start, min(start + _REQUEST_BYTES, end))
            for g, (begin, end) in enumerate(zip(begins, ends, strict=True))
            for start in range(begin, end, _REQUEST_BYTES)
        ]
        contents = [np.empty(end - begin, np.uint8) for begin, end in zip(begins, ends, strict=True)]
        label = f"{self.location}/{name}"
        options = {"batch_size": _REQUESTS} if getattr(self._fs, "async_impl", False) else {}

        def fetch() -> None:
            nonlocal parts
            ranges = [start for _, start, _ in parts], [end for _, _, end in parts]
            with translate_errors(label):
                got = self._fs.cat_ranges(
                    [f"{self._root}/{name}"] * len(parts), *ranges, on_error="return", **options
                )
            failed, left = None, []
            for (g, start, end), content in zip(parts, got, strict=True):
                if isinstance(content, Exception) or len(content) < end - start:
                    failed = content if failed is None else failed
                    left.append((g, start, end))
                    continue
                if len(content) > end - start:
                    raise self._no_ranges(
                        name, f"asked for {end - start:,} bytes, the server sent {len(content):,}"
                    )
                contents[g][start - begins[g] : end - begins[g]] = np.frombuffer(content, np.uint8)
            parts = left
            if isinstance(failed, Exception):
                raise translate_error(label, failed) from failed
            if failed is not None:
                _, start, end = left[0]
                raise TransientError(
                    f"{label}: {len(failed):,} of {end - start:,} bytes from byte {start:,} arrived."
                )

        retried(label, fetch)
        return contents

    def _no_ranges(self, name: str, why: str) -> FileError:
        return FileError(
            f"{self.location}/{name}: {why}, so it cannot send parts of a file. Copy the index to a local "
            "folder or to a store that can, and set data.prepared to it."
        )


class RemoteTable:
    """Rows of a remote file, read by number through the pages that hold them."""

    def __init__(self, pages: "_Pages", dtype: np.dtype[Any], shape: tuple[int, ...], offset: int) -> None:
        self._pages = pages
        self._dtype = dtype
        self._shape = shape
        self._offset = offset
        self._row_bytes = dtype.itemsize * math.prod(shape[1:])

    def __getitem__(self, rows: Int[np.ndarray, " n"]) -> np.ndarray:
        rows = np.asarray(rows, np.int64)
        if len(rows) and not (rows.min() >= 0 and rows.max() < self._shape[0]):
            raise IndexError(f"rows {rows.min()} to {rows.max()} asked for, of {self._shape[0]}")
        if not len(rows):
            return np.empty((0, *self._shape[1:]), self._dtype)
        # No row lies in two pages: rows are powers of two long, and `offset` is a multiple of their length.
        pages = set(
            ((self._offset + rows * self._row_bytes) // PAGE_BYTES).tolist()
        )  # np.unique imports numpy.ma
        content = self._pages.load(np.asarray(sorted(pages), np.int64))
        return np.ndarray(self._shape, self._dtype, content, self._offset)[rows]


class _Pages:
    """Copy of a remote file on the local disk, filled page by page as rows are read; the processes of a host
    share it.

    The copy is sparse: it takes the room of the pages that were read. A file beside it has a CRC-32 per page,
    written after the page; a page whose sum does not match, because a machine lost power, is fetched again.
    """

    def __init__(self, files: RemoteFiles, name: str, size_bytes: int, folder: Path) -> None:
        self._files = files
        self._name = name
        self._size_bytes = size_bytes
        self._folder = folder
        self._checked = np.zeros(-(-size_bytes // PAGE_BYTES), np.bool_)
        self._copy: mmap.mmap | None = None
        self._sums: mmap.mmap | None = None

    def load(self, pages: Int[np.ndarray, " n"]) -> mmap.mmap:
        """Returns the copy, in which these pages have been filled.

        Raises:
          FileError: the store cannot be read, or data.cache_dir cannot be written to.
        """
        missing = pages[~self._checked[pages]]
        if len(missing) or self._copy is None:
            try:
                self._fill(missing.tolist())
            except OSError as error:
                if error.errno not in _CACHE_ERRORS:
                    raise
                raise FileError(
                    f"{self._files.location}: the copy of {self._name}, up to "
                    f"{self._size_bytes / 2**20:,.0f} MiB, cannot be written to {self._folder} "
                    f"({error.strerror}). Make room there, or set data.cache_dir to another folder."
                ) from error
        assert self._copy is not None
        return self._copy

    def _fill(self, pages: list[int]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / self._name
        if self._copy is None:
            self._sums = _sparse(path.with_suffix(".sums"), len(self._checked) * 4)
            self._copy = _sparse(path, self._size_bytes)
        assert self._sums is not None
        here = [
            page
            for page in pages
            if self._sum(page) == int.from_bytes(self._sums[4 * page : 4 * page + 4], "little")
        ]
        self._checked[here] = True
        missing = np.asarray([page for page in pages if not self._checked[page]], np.int64)
        if not len(missing):
            return
        starts = missing * PAGE_BYTES
        sizes = np.minimum(PAGE_BYTES, self._size_bytes - starts)
        content = self._files.read(self._name, starts, sizes)
        # Written, not assigned to the map: on a full disk that would be a signal, not an error.
        with open(path, "r+b", 0) as copy, open(path.with_suffix(".sums"), "r+b", 0) as sums:
            at = 0
            for page, size in zip(missing.tolist(), sizes.tolist(), strict=True):
                os.pwrite(copy.fileno(), content[at : at + size], page * PAGE_BYTES)
                os.pwrite(sums.fileno(), self._sum(page).to_bytes(4, "little"), 4 * page)
                at += size
        self._checked[missing] = True

    def _sum(self, page: int) -> int:
        assert self._copy is not None
        start = page * PAGE_BYTES
        return (
            zlib.crc32(memoryview(self._copy)[start : start + PAGE_BYTES]) or 1
        )  # 0 marks pages that are not there


def _sparse(path: Path, size_bytes: int) -> mmap.mmap:
    """Returns a map of a file of this size, made without contents if it is not there."""
    with open(path, "a+b") as file:
        if os.fstat(file.fileno()).st_size != size_bytes:
            file.truncate(size_bytes)
        return mmap.mmap(file.fileno(), size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
