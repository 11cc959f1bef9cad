"""Memory of this process, as the kernel counts it. Standard library only."""

import os


def resident_bytes() -> int | None:
    """Bytes of this process that are in RAM, shared pages included; None where there is no /proc to tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None
