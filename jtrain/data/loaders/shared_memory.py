"""Anonymous shared memory: one growable block, written by one process and read by another.

The block exists through file descriptors alone, so it is freed when the last process that holds one ends,
even if it is killed: nothing is left behind in /dev/shm.
"""

import bisect
import mmap
import os
import tempfile

import numpy as np
from jaxtyping import Int, UInt8

HEADER_BYTES = 4096
_ALIGN_BYTES = 64


class SharedMemory:
    """Block of shared bytes: a header of int64 words in the first page, then bytes handed out by `allocate`.

    Only the writer allocates and frees. A reader maps the block again when an address lies beyond its
    mapping; views into the old mapping stay valid.

    Args:
      descriptor: file descriptor of the memory; the object owns it.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._free: list[tuple[int, int]] = []  # (start, end), ascending, never adjacent
        self._allocated: dict[int, int] = {}
        self._map(os.fstat(descriptor).st_size)
        self._free_span(HEADER_BYTES, self.size_bytes)

    @classmethod
    def create(cls, size_bytes: int) -> "SharedMemory":
        """Creates a block of zeros."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("jtrain-shared", os.MFD_CLOEXEC)
        else:  # macOS: an unlinked temporary file
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, HEADER_BYTES + _align(size_bytes))
        return cls(descriptor)

    @property
    def header(self) -> Int[np.ndarray, " words"]:
        """Returns the words of the first page; each word is written and read atomically."""
        return np.frombuffer(self._mapped, np.int64, HEADER_BYTES // 8)

    def view(self, start: int, size_bytes: int) -> UInt8[np.ndarray, " bytes"]:
        """Returns the bytes from `start` on; maps the block again first if the writer has grown it."""
        if start + size_bytes > self.size_bytes:
            self._map(os.fstat(self.descriptor).st_size)
        return np.frombuffer(self._mapped, np.uint8, size_bytes, start)

    def allocate(self, size_bytes: int) -> int:
        """Allocates bytes at the lowest free address and returns it; grows the block if none is free."""
        # At least one byte, so that no two spans begin at one address.
        size = _align(max(size_bytes, 1))
        for index, (start, end) in enumerate(self._free):
            if end - start >= size:
                if end - start == size:
                    del self._free[index]
                else:
                    self._free[index] = (start + size, end)
                self._allocated[start] = size
                return start
        old_size = self.size_bytes
        # By half of itself at least, so that many small requests need few new maps.
        os.ftruncate(self.descriptor, old_size + max(size, (old_size - HEADER_BYTES) // 2))
        self._map(os.fstat(self.descriptor).st_size)
        self._free_span(old_size, self.size_bytes)
        # There is room now: the block has grown by at least as much.
        return self.allocate(size_bytes)

    def free(self, start: int) -> None:
        """Frees the bytes that `allocate` returned at `start`."""
        self._free_span(start, start + self._allocated.pop(start))

    def close(self) -> None:
        """Closes the descriptor; views stay valid until they are dropped. May be called twice."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _map(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        # The old map is not closed: numpy views hold it until they are dropped.
        self._mapped = mmap.mmap(self.descriptor, size_bytes)

    def _free_span(self, start: int, end: int) -> None:
        if start == end:
            return
        index = bisect.bisect_left(self._free, (start, end))
        # Merges with the free span behind it, then with the one before it.
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, end))


def _align(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
