"""What this process has open, to find what a test leaves open."""

import contextlib
import os


def descriptors() -> set[tuple[int, str]]:
    """Returns number and target of each open descriptor.

    A test compares what is new, not how many there are: what an earlier test of the same process left behind
    may be closed at any time, by the garbage collector or a thread.
    """
    found: set[tuple[int, str]] = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return found
