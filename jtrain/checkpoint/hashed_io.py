"""Writes files and hashes them in one pass, past the page cache where the file system allows it (O_DIRECT).

Through the page cache, the kernel copies every byte into memory that it must find first: on a virtual machine
that cost 2.6 s of CPU time per GiB, beside 0.03 s without it, and the steps of training ran slower by that
much. A hash that is read back past the cache also proves what the disk holds.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import mmap
import os
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

BLOCK_BYTES = 4 << 20
DIRECT_BYTES = 1 << 20
"""Smallest file that is written directly: a direct write waits for the disk, and small files wait together
later."""

PAGE_BYTES = 4096
_HUGE_PAGE_BYTES = 2 << 20
_REFUSES_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


@runtime_checkable
class Digest(Protocol):
    """Hash or checksum of bytes that come block by block."""

    def update(self, data: memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


def file_hash() -> Digest:
    """Returns a new hash as manifests hold it: 128-bit blake2b, 1 GB/s per core."""
    return hashlib.blake2b(digest_size=16)


class Checksum:
    """Hash of the sums of all pages of a file, 20 GB/s per core: it tells if a disk has what it was given
    just before.

    It sees pages that were lost, are stale, lie elsewhere or differ in a bit. Manifests hold real hashes,
    since these sums would not see words that swap places within a page.
    """

    def __init__(self) -> None:
        self._sums = file_hash()

    def update(self, data: memoryview, /) -> None:
        """Adds a block; all but the last one consist of whole pages."""
        page_bytes = len(data) - len(data) % PAGE_BYTES
        # Each page is one row of 512 words; their sum wraps at 2**64, which still tells one flipped bit.
        words = np.frombuffer(data[:page_bytes], np.uint64).reshape(-1, PAGE_BYTES // 8)
        self._sums.update(np.add.reduce(words, axis=1).tobytes())
        # A tail that is no whole page, only at the end of a file, is hashed itself.
        self._sums.update(data[page_bytes:])

    def hexdigest(self) -> str:
        return self._sums.hexdigest()


class HashedIO:
    """Reads and writes files block by block; one thread at a time. Its memory is one block, once it needs
    one.
    """

    # Made at the first copy or read: data that begins on a page is written without it.
    @functools.cached_property
    def _bytes(self) -> np.ndarray:
        return np.frombuffer(pages(BLOCK_BYTES), np.uint8)

    def write(self, path: Path, data: memoryview) -> tuple[str, str]:
        """Writes a new file of these bytes and returns hash and checksum; an fsync makes the file durable.

        O_DIRECT takes whole pages of memory only: `data` that begins elsewhere is copied block by block.

        Raises:
          OSError: the file exists, or cannot be written.
        """
        digest, checksum = file_hash(), Checksum()
        source = np.frombuffer(data, np.uint8)
        # O_EXCL: a save writes into a new folder, so a file that exists belongs to somebody else.
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        try:
            direct = len(data) >= DIRECT_BYTES and _set_direct(handle, True)
            copies = direct and source.ctypes.data % PAGE_BYTES != 0
            # Block by block: the checksum finds in the CPU's cache what the hash has just read.
            for start in range(0, len(data), BLOCK_BYTES):
                part = source[start : start + BLOCK_BYTES]
                if copies:
                    np.copyto(self._bytes[: len(part)], part)  # without the GIL
                    part = self._bytes[: len(part)]
                block = memoryview(part)
                digest.update(block)
                checksum.update(block)
                # O_DIRECT takes multiples of a page only, so the last block goes through the cache.
                if direct and len(part) % PAGE_BYTES:  # the end of the file
                    direct = _set_direct(handle, False)
                direct = _write_block(handle, block, direct=direct)
        finally:
            os.close(handle)
        return digest.hexdigest(), checksum.hexdigest()

    def read(self, path: Path, digest: Digest) -> tuple[int, str]:
        """Returns size and digest of a file, as the disk has them."""
        handle = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(handle).st_size
            direct = size >= DIRECT_BYTES and _set_direct(handle, True)
            for start in range(0, size, BLOCK_BYTES):
                block_bytes, filled = min(BLOCK_BYTES, size - start), 0
                # Up to a whole page, as O_DIRECT asks: the file may end within it.
                aligned_bytes = -(-block_bytes // PAGE_BYTES) * PAGE_BYTES
                # One read may return less: after a signal, or from a network file system.
                while filled < block_bytes:
                    try:
                        count = os.readv(handle, [memoryview(self._bytes[filled:aligned_bytes])])
                    except OSError as error:
                        if not direct or error.errno not in _REFUSES_DIRECT:
                            raise
                        # The file system accepted the flag and refuses
                        # the read: some network file systems do.
                        direct = _set_direct(handle, False)
                        continue
                    if not count:  # it has become shorter
                        return start + filled, digest.hexdigest()
                    filled += count
                digest.update(memoryview(self._bytes[:block_bytes]))
            return size, digest.hexdigest()
        finally:
            os.close(handle)


def pages(size_bytes: int) -> mmap.mmap:
    """Returns new memory of whole pages from the kernel, which gets it back once nobody holds it.

    Raises:
      OSError: there is not so much memory.
    """
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size_bytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)  # 512 times fewer page faults: they take longer than a copy
    return memory


def _write_block(handle: int, block: memoryview, *, direct: bool) -> bool:
    """Writes a block; returns False if the file system turned out to refuse direct writes."""
    written_bytes = 0
    while written_bytes < len(block):
        try:
            written_bytes += os.write(handle, block[written_bytes:])
        except OSError as error:
            if not direct or error.errno not in _REFUSES_DIRECT:
                raise
            # The same bytes again, through the cache.
            direct = _set_direct(handle, False)
    return direct


def _set_direct(handle: int, direct: bool) -> bool:
    """Switches O_DIRECT on or off; returns True if it is on, which the kernel or the file system may
    refuse.
    """
    if not hasattr(os, "O_DIRECT"):
        return False
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    try:
        # A switch on the open file: opening with O_DIRECT would fail where it is refused.
        fcntl.fcntl(handle, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return direct
