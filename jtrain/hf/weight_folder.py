"""Weights of a run that trains, in a folder: a model directory for each step, and the name of the newest."""

import shutil
from collections.abc import Callable
from pathlib import Path

from jtrain.runtime.atomic_io import write_whole

LATEST = "latest"
"""File with the name of the newest directory, replaced when all of that is there."""

_PREFIX = "step-"


def write_step(folder: Path, step: int, write: Callable[[Path], object], *, keep_last: int) -> Path:
    """Writes the directory of a step, points `latest` at it, and removes all but the newest `keep_last`.

    Directories of later steps are of a run that went back, and of an earlier attempt that was killed; they go first,
    and so does a `latest` that names one of them.

    Args:
      write: writes the directory, whole or not at all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_PREFIX}{step:08}"
    latest = folder / LATEST
    if latest.exists() and latest.read_text().strip() >= path.name:
        latest.unlink()
    for directory in sorted(folder.glob(f"{_PREFIX}*")):
        # A name with a suffix is of a write that was killed.
        if directory.suffix or directory.name >= path.name:
            shutil.rmtree(directory)
    write(path)
    # Last: a reader that follows the name finds all files.
    write_whole(latest, path.name + "\n")
    steps = sorted(folder.glob(f"{_PREFIX}*"))
    for directory in steps[: max(0, len(steps) - keep_last)]:
        shutil.rmtree(directory)
    return path
