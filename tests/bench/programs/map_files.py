"""Maps a file; after a line on stdin maps another one and holds 32 MiB of its own; ends after another line.

python map_files.py FIRST SECOND
"""

import mmap
import sys


def mapped(path: str) -> mmap.mmap:
    """The whole file, mapped."""
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def touch(view: mmap.mmap) -> None:
    """Reads a byte of each page."""
    sum(view[position] for position in range(0, len(view), mmap.PAGESIZE))


first = mapped(sys.argv[1])
print(flush=True)
input()
second, allocated = mapped(sys.argv[2]), b"x" * (32 << 20)
touch(first)
touch(second)
print(flush=True)
input()
