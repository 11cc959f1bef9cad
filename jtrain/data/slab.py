"""Shared memory without a name: one growable block, written by one process and read by another.

It lives in a file descriptor alone, so when the last process that holds it is gone, however it went, the memory is
too: nothing can be left behind in /dev/shm.
"""

import bisect
import mmap
import os
import tempfile

import numpy as np
from jaxtyping import Int, UInt8

HEADER_BYTES = 4096
_ALIGN_BYTES = 64


class Slab:
    """A block of shared bytes; its first page is a header of int64 words, the rest is handed out by `allocate`.

    Only the writer allocates and frees. A reader that was told of a larger size maps it anew; views into the old
    mapping stay valid.

    Args:
      descriptor: of the memory; the slab owns it.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._free: list[tuple[int, int]] = []  # (start, end), ascending, never adjacent
        self._allocated: dict[int, int] = {}
        self._map(os.fstat(descriptor).st_size)
        self._free_span(HEADER_BYTES, self.size_bytes)

    @classmethod
    def create(cls, size_bytes: int) -> "Slab":
        """A new one, zero everywhere."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("jtrain-slab", os.MFD_CLOEXEC)
        else:  # macOS: a file that has lost its name at once
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, HEADER_BYTES + _aligned(size_bytes))
        return cls(descriptor)

    @property
    def header(self) -> Int[np.ndarray, " words"]:
        """The words of the first page; each is written and read whole."""
        return np.frombuffer(self._mapped, np.int64, HEADER_BYTES // 8)

    def view(self, start: int, size_bytes: int) -> UInt8[np.ndarray, " bytes"]:
        """The bytes from `start` on; mapped anew first if the writer has grown the slab."""
        if start + size_bytes > self.size_bytes:
            self._map(os.fstat(self.descriptor).st_size)
        return np.frombuffer(self._mapped, np.uint8, size_bytes, start)

    def allocate(self, size_bytes: int) -> int:
        """Start of `size_bytes` bytes that nobody else uses, the lowest there are; grows the slab if none are."""
        size = _aligned(max(size_bytes, 1))
        for at, (start, end) in enumerate(self._free):
            if end - start >= size:
                if end - start == size:
                    del self._free[at]
                else:
                    self._free[at] = (start + size, end)
                self._allocated[start] = size
                return start
        old = self.size_bytes
        os.ftruncate(self.descriptor, old + max(size, (old - HEADER_BYTES) // 2))
        self._map(os.fstat(self.descriptor).st_size)
        self._free_span(old, self.size_bytes)
        return self.allocate(size_bytes)

    def free(self, start: int) -> None:
        """Gives back what `allocate` returned."""
        self._free_span(start, start + self._allocated.pop(start))

    def close(self) -> None:
        """Closes the descriptor; views stay valid until they are dropped. May be called twice."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _map(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._mapped = mmap.mmap(self.descriptor, size_bytes)

    def _free_span(self, start: int, end: int) -> None:
        if start == end:
            return
        at = bisect.bisect_left(self._free, (start, end))
        if at < len(self._free) and self._free[at][0] == end:
            end = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == start:
            at -= 1
            start = self._free.pop(at)[0]
        self._free.insert(at, (start, end))


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
