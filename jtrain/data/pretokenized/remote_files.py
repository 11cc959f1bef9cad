"""Files of a prepared index behind a URL: ids by byte ranges, lengths by pages cached on the local disk."""

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

GAP_BYTES = 1 << 16
"""Spans closer than this are fetched by one request: 64 KiB take less time than a round trip."""

REQUEST_BYTES = 1 << 23
_REQUESTS = 32
"""Requests under way at a time, for each call."""

# Errors of the disk that receives the copy, where the user can make room or choose another folder.
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
    """Files of a prepared index below a URL, with the methods of `LocalFiles`; opening copies nothing.

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
        # The tables hold the pages: a strong reference here would be a cycle that keeps descriptors open.
        self._pages = weakref.WeakValueDictionary[str, _Pages]()

    def content(self, name: str) -> bytes:
        """Returns a whole file; index.json must be the first, since cached pages belong to it."""

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
            raise self._no_ranges_error(names[sizes.index(None)], "the server does not tell its size")
        return sizes

    def table(
        self, name: str, dtype: Any, shape: tuple[int, ...], *, offset: int, size_bytes: int
    ) -> "RemoteTable":
        pages = self._pages.get(name)
        if pages is None:
            # An index made again at the same URL has another key, and its pages another folder.
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
        content = np.empty(int(sizes.sum()), np.uint8)
        order = np.argsort(starts, kind="stable")
        # Empty spans need no request, and may lie behind the end of the file.
        order = order[sizes[order] > 0]
        if not len(order):
            return content
        first, end = starts[order], starts[order] + sizes[order]
        # Spans may overlap: an earlier one may end behind a later one.
        max_end = np.maximum.accumulate(end)
        # A span further than the gap from all before it begins a new range.
        is_new_range = np.append(True, first[1:] > max_end[:-1] + GAP_BYTES)
        begins, ends = (
            first[is_new_range],
            max_end[np.append(np.flatnonzero(is_new_range)[1:] - 1, len(order) - 1)],
        )
        range_of_span = np.cumsum(is_new_range) - 1
        contents = self._fetch(name, begins.tolist(), ends.tolist())
        output_ends = np.cumsum(sizes)
        # Back into the caller's order: span i ends at `output_ends[i]`.
        for i, range_number, start in zip(
            order.tolist(), range_of_span.tolist(), (first - begins[range_of_span]).tolist(), strict=True
        ):
            size = int(sizes[i])
            content[output_ends[i] - size : output_ends[i]] = contents[range_number][start : start + size]
        return content

    def _fetch(self, name: str, begins: list[int], ends: list[int]) -> list[UInt8[np.ndarray, " bytes"]]:
        """Returns the bytes of each range, fetched in parts of at most 8 MiB; failed parts are repeated."""
        parts = [
            (range_number, start, min(start + REQUEST_BYTES, end))
            for range_number, (begin, end) in enumerate(zip(begins, ends, strict=True))
            for start in range(begin, end, REQUEST_BYTES)
        ]
        contents = [np.empty(end - begin, np.uint8) for begin, end in zip(begins, ends, strict=True)]
        label = f"{self.location}/{name}"
        # File systems without an event loop fetch ranges one by one and take no batch size.
        options = {"batch_size": _REQUESTS} if getattr(self._fs, "async_impl", False) else {}

        def fetch() -> None:
            nonlocal parts
            ranges = [start for _, start, _ in parts], [end for _, _, end in parts]
            with translate_errors(label):
                contents_of_parts = self._fs.cat_ranges(
                    [f"{self._root}/{name}"] * len(parts), *ranges, on_error="return", **options
                )
            failure, remaining_parts = None, []
            for (range_number, start, end), content in zip(parts, contents_of_parts, strict=True):
                if isinstance(content, Exception) or len(content) < end - start:
                    failure = content if failure is None else failure
                    remaining_parts.append((range_number, start, end))
                    continue
                if len(content) > end - start:
                    raise self._no_ranges_error(
                        name, f"asked for {end - start:,} bytes, the server sent {len(content):,}"
                    )
                contents[range_number][start - begins[range_number] : end - begins[range_number]] = (
                    np.frombuffer(content, np.uint8)
                )
            # The next try asks for the failed parts alone; the others are in `contents` by now.
            parts = remaining_parts
            if isinstance(failure, Exception):
                raise translate_error(label, failure) from failure
            if failure is not None:
                _, start, end = remaining_parts[0]
                raise TransientError(
                    f"{label}: {len(failure):,} of {end - start:,} bytes from byte {start:,} arrived."
                )

        retried(label, fetch)
        return contents

    def _no_ranges_error(self, name: str, reason: str) -> FileError:
        return FileError(
            f"{self.location}/{name}: {reason}, so it cannot send parts of a file. Copy the index to a local "
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
        # A set, since np.unique imports numpy.ma.
        pages = set(((self._offset + rows * self._row_bytes) // PAGE_BYTES).tolist())
        content = self._pages.load(np.asarray(sorted(pages), np.int64))
        return np.ndarray(self._shape, self._dtype, content, self._offset)[rows]


class _Pages:
    """Copy of a remote file on the local disk, filled page by page; the processes of a host share it.

    The copy is sparse: it takes the room of the pages that were read. A file beside it has a CRC-32 per page,
    written after the page; a page whose sum does not match, because a machine lost power, is fetched again.
    """

    def __init__(self, files: RemoteFiles, name: str, size_bytes: int, folder: Path) -> None:
        self._files = files
        self._name = name
        self._size_bytes = size_bytes
        self._folder = folder
        # Of this process: a page is summed up once and trusted from then on.
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
        # Pages that another process, or an earlier run, has filled: their sums match.
        present_pages = [
            page
            for page in pages
            if self._sum(page) == int.from_bytes(self._sums[4 * page : 4 * page + 4], "little")
        ]
        self._checked[present_pages] = True
        missing = np.asarray([page for page in pages if not self._checked[page]], np.int64)
        if not len(missing):
            return
        starts = missing * PAGE_BYTES
        sizes = np.minimum(PAGE_BYTES, self._size_bytes - starts)
        content = self._files.read(self._name, starts, sizes)
        # Written, not assigned to the map: on a full disk that would be a signal, not an error.
        with open(path, "r+b", 0) as copy, open(path.with_suffix(".sums"), "r+b", 0) as sums:
            position = 0
            for page, size in zip(missing.tolist(), sizes.tolist(), strict=True):
                os.pwrite(copy.fileno(), content[position : position + size], page * PAGE_BYTES)
                # After the page: a kill in between leaves a sum that does not match.
                os.pwrite(sums.fileno(), self._sum(page).to_bytes(4, "little"), 4 * page)
                position += size
        self._checked[missing] = True

    def _sum(self, page: int) -> int:
        assert self._copy is not None
        start = page * PAGE_BYTES
        # 0 marks pages that are not there, as in a sparse file.
        return zlib.crc32(memoryview(self._copy)[start : start + PAGE_BYTES]) or 1


def _sparse(path: Path, size_bytes: int) -> mmap.mmap:
    """Returns a map of a file of this size, made without contents if it is not there."""
    with open(path, "a+b") as file:
        if os.fstat(file.fileno()).st_size != size_bytes:
            file.truncate(size_bytes)
        return mmap.mmap(file.fileno(), size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
