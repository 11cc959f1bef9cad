"""The C allocator, told not to hand large buffers back to the kernel between steps."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
"""From glibc's malloc.h."""


def keep_freed_memory() -> bool:
    """Lets XLA:CPU use the same pages for the temporaries of every step. Call it once, before JAX looks for devices.

    Later it is of no use: XLA's threads start with its devices, each takes an arena of its own from the allocator, and
    those are unmapped as they empty.

    XLA:CPU allocates a step's temporaries anew each time. glibc maps and unmaps buffers that large, so that each page
    is faulted in and zeroed again: 100,000 faults a step and 12 % of its CPU time for 400 MiB of temporaries. With this
    the process keeps its peak memory until it ends.

    Returns:
      False where the C library is not glibc; nothing changes there.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # One arena, because only the first grows beyond 64 MiB; no mmap; no trimming.
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1))
    accepted = [mallopt(name, value) for name, value in settings]
    return all(accepted)
