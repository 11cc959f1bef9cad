"""Real small disks for tests: a tmpfs that fills up, or that is read-only."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

NO_ROOT = "only root can mount a small disk"


@contextlib.contextmanager
def small_disk(folder: Path, size_kib: int) -> Iterator[Path]:
    """Mounts an empty tmpfs at `folder`, of `size_kib` KiB in pages of 4 KiB."""
    if os.geteuid() != 0:
        pytest.skip(NO_ROOT)
    folder.mkdir(exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "none", str(folder)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(NO_ROOT)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(folder: Path, option: str) -> None:
    """Makes the disk read-only (`ro`) or writable again (`rw`)."""
    subprocess.run(["mount", "-o", f"remount,{option}", str(folder)], check=True)


def fill(folder: Path, *, leave_bytes: int = 0) -> Path:
    """Fills the disk with one file, which leaves whole pages of about `leave_bytes` free; returns the
    file.
    """
    path = folder / "filler"
    with open(path, "wb", buffering=0) as file:
        free = os.statvfs(folder)
        left = free.f_bavail * free.f_frsize - leave_bytes
        with contextlib.suppress(OSError):
            while left > 0:
                left -= file.write(bytes(min(left, 4096)))
    return path
