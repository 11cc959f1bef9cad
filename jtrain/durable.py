"""A file is there whole or not at all, and once it is there, on the disk itself. Standard library only."""

import errno
import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """The file has its old contents or these, whenever one looks."""
    away = path.with_name(path.name + ".tmp")
    with open(away, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    away.rename(path)


def sync_directory(path: Path) -> None:
    """Puts the names in a directory on the disk itself."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot
            raise
    finally:
        os.close(handle)
