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
    so that `latest` never stays at one of them.

    Args:
      write: writes the directory, whole or not at all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_PREFIX}{step:08}"
    for other in sorted(folder.glob(f"{_PREFIX}*")):
        # A name that is no number is of a write that was killed.
        if other.suffix or other.name >= path.name:
            shutil.rmtree(other)
    write(path)
    # Last: a reader that follows the name finds all files.
    write_whole(folder / LATEST, path.name + "\n")
    steps = sorted(folder.glob(f"{_PREFIX}*"))
    for old in steps[: max(0, len(steps) - keep_last)]:
        shutil.rmtree(old)
    return path
