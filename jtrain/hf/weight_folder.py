"""Weights of a run that trains, in a folder: a model directory for each step, and the name of the newest.

The folder is of one run, whose workdir its file `owner` names: a run removes older directories, and two runs
would remove each other's.
"""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from jtrain.errors import FileError, UserError
from jtrain.runtime.atomic_io import sync_all, write_whole
from jtrain.runtime.stores import in_store

LATEST = "latest"
"""File with the name of the newest directory, replaced when all of that is there."""

OWNER = "owner"
"""File with the workdir of the run that the folder belongs to."""

_WRITTEN = re.compile(r"step-\d{8}(\.tmp)?")
"""Names of the directories of a run; one with the suffix is of a write that was killed."""


def check_owner(folder: Path, workdir: Path) -> None:
    """Refuses a folder with weights of another run.

    Raises:
      UserError: it is of another run.
      FileError: its file `owner` cannot be read.
    """
    # Resolved: the workdir of a run that begins may not be there yet, and `to` may lead up from it.
    folder = folder.resolve()
    owner = folder / OWNER
    try:
        name = owner.read_text(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise FileError(
            f"weight_stream.to={folder}: {owner}, which tells whose weights these are, cannot be read "
            f"({error.strerror}). Set weight_stream.to=weights, a folder in the workdir."
        ) from error
    if name != _owner_name(folder, workdir):
        other_workdir = name if "://" in name else (folder / name).resolve()
        raise UserError(
            f"weight_stream.to={folder} holds the weights of another run, --workdir {other_workdir}, and "
            "each run removes all but its newest. Set weight_stream.to=weights, a folder in the workdir. "
            f"Delete {owner} where that run is this one and was moved."
        )


def write_step(
    folder: Path, step: int, write: Callable[[Path], object], *, keep_last: int, workdir: Path
) -> Path:
    """Writes the directory of a step, points `latest` at it, and removes all but the newest `keep_last`.

    During the write the disk holds `keep_last` + 1 sets. Directories of later steps are of a run that went
    back, and of an earlier attempt that was killed; they go first. What the run has not written stays.

    Args:
      write: writes the directory, whole or not at all.
      workdir: of the run.

    Raises:
      UserError: the folder is of another run.
    """
    check_owner(folder, workdir)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / OWNER, _owner_name(folder, workdir) + "\n")
    path = folder / f"step-{step:08}"
    latest = folder / LATEST
    written = _written(folder)
    earlier = [directory for directory in written if not directory.suffix and directory.name < path.name]
    # Before any directory is removed: a reader that follows the name finds all files, also if the write
    # fails.
    if latest.exists() and latest.read_text().strip() not in {directory.name for directory in earlier}:
        if earlier:
            write_whole(latest, earlier[-1].name + "\n")
        else:
            latest.unlink()
    for directory in sorted({*written} - {*earlier[-keep_last:]}):
        shutil.rmtree(directory)
    write(path)
    # Before `latest` names it: after a power cut the name must not stand for files without content.
    sync_all([file for file in path.rglob("*") if file.is_file()], [path, folder])
    write_whole(latest, path.name + "\n")
    # Last: the oldest one was still there for its readers.
    for directory in _written(folder)[:-keep_last]:
        shutil.rmtree(directory)
    return path


def _written(folder: Path) -> list[Path]:
    """Directories that a run has written, by their steps; no link and no directory of a user."""
    return sorted(
        path
        for path in folder.iterdir()
        if _WRITTEN.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    )


def _owner_name(folder: Path, workdir: Path) -> str:
    # From the folder, so that both can be moved together.
    return str(workdir) if in_store(workdir) else os.path.relpath(workdir.resolve(), folder.resolve())
