"""Removes checkpoints and remains: retention, deletion, setting damaged ones aside, and what a kill left.

A name in the folder `checkpoints` tells the state of its folder:

    12                            a step: a checkpoint, if it holds a manifest
    12.0.orbax-checkpoint-tmp     a save of step 12 that has not committed
    12.deleted                    a deletion that has not finished
    12.damaged, 12.damaged-2      set aside by a start that found it damaged: never read, never removed
"""

from pathlib import Path

from jtrain.checkpoint import files, folders
from jtrain.checkpoint.files import MANIFEST
from jtrain.runtime.stores import in_store

PARTIAL = ".orbax-checkpoint-tmp"
"""Part of the name of a directory that is still being written."""

DELETED = ".deleted"
_DAMAGED = ".damaged"


def unread_names(folder: Path) -> tuple[str, ...]:
    """Returns the names in `folder` that are never read: remains of interrupted saves and deletions, damaged
    ones.
    """
    complete_names = {str(step) for step in files.steps(folder)}
    folder_names = (name for name in folders.folder_names(folder) if name not in complete_names)
    return tuple(name for name in folder_names if _is_remains(name) or is_set_aside(name) or name.isdecimal())


def is_set_aside(name: str) -> bool:
    """True if the name is that of a checkpoint which was found damaged."""
    step, dot, suffix = name.partition(_DAMAGED)
    return bool(dot) and step.isdecimal() and (not suffix or suffix.removeprefix("-").isdecimal())


def set_aside(folder: Path, step: int) -> str:
    """Renames the folder of a damaged checkpoint to `<step>.damaged`, or `<step>.damaged-2` ...; returns the
    name.
    """
    taken_names = folders.names(folder)
    # One candidate more than there are names: at least one is free.
    names = (
        f"{step}{_DAMAGED}" + (f"-{number}" if number > 1 else "")
        for number in range(1, len(taken_names) + 2)
    )
    name = next(name for name in names if name not in taken_names)
    # In a store the old manifest goes before the rest: a kill leaves no partial checkpoint under the step.
    folders.move(folder / str(step), folder / name, first=MANIFEST)
    return name


def surplus_steps(steps: tuple[int, ...], *, keep_last: int, keep_every_steps: int | None) -> tuple[int, ...]:
    """Returns the steps to delete: all but the newest `keep_last` and the multiples of `keep_every_steps`."""
    # keep_last is at least 1: with 0 the slice would be empty, and nothing would be deleted.
    older = sorted(steps)[:-keep_last]
    return tuple(step for step in older if keep_every_steps is None or step % keep_every_steps)


def delete(folder: Path, step: int) -> None:
    """Deletes a checkpoint. Renames it first, so that a kill leaves no partial checkpoint under a step's
    name.

    In a store, where nothing can be renamed, its manifest goes first, and an empty file `.deleted` says why.
    """
    if in_store(folder):
        # The mark comes before the manifest goes: it tells `sweep` that a deletion left the rest.
        (folder / str(step) / DELETED).write_text("")
        folders.remove(folder / str(step), first=MANIFEST, last=DELETED)
        return
    away = folder / f"{step}{DELETED}"
    # Remains of an earlier deletion of the same step: the rename needs the name.
    if away.exists():
        folders.remove(away, first=MANIFEST)
    (folder / str(step)).rename(away)
    # After the rename nothing reads the folder, so the order of the files no longer matters on a disk.
    folders.remove(away, first=MANIFEST)  # the next run removes the rest (`sweep`)


def sweep(folder: Path) -> None:
    """Removes what interrupted saves and deletions left. Keeps directories named as a step: a user put them
    there.

    In a store, interrupted saves and deletions leave directories named as a step: those after the last
    commit, and those that were being deleted. They go too.
    """
    for name in unread_names(folder):
        if _is_remains(name) or (
            in_store(folder) and name.isdecimal() and _is_interrupted(folder, int(name))
        ):
            folders.remove(folder / name, first=MANIFEST, last=DELETED)


def _is_interrupted(folder: Path, step: int) -> bool:
    last = files.last_commit(folder)
    # A step after the last commit was never committed. Without the note no run began here.
    unfinished = files.has_note(folder) and (last is None or step > last)
    return unfinished or folders.has_file(folder / str(step), DELETED)


def lost_manifests(folder: Path) -> tuple[int, ...]:
    """Returns the steps of `steps_without_manifest` that no interrupted save or deletion explains."""
    return tuple(
        step
        for step in files.steps_without_manifest(folder)
        if not (in_store(folder) and _is_interrupted(folder, step))
    )


def _is_remains(name: str) -> bool:
    return PARTIAL in name or name.endswith(DELETED)
