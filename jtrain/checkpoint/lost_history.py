"""Notices a workdir whose run has a history but no checkpoints, such as one on a disk that is not mounted.

Such a run does not begin at step 0 in silence: it is refused, unless `--from-scratch` says that this is
meant. A run that was killed before its first checkpoint has a history too, and begins at step 0 by the same
command; the file `last_checkpoint.json` tells the two apart.
"""

import os
from pathlib import Path

from jtrain.checkpoint import files
from jtrain.checkpoint.files import CheckpointError
from jtrain.checkpoint.restoring import Restored, in_process_zero

_HISTORY = (
    "metrics.jsonl",
    "goodput.jsonl",
    "goodput.json",
    "tensorboard",
    "data.log",
    "profile",
    "config.txt",
    "run.json",
)


def check_history(workdir: Path, folder: Path, *, from_scratch: bool) -> list[str]:
    """Refuses a workdir whose run made checkpoints that are not there; all processes call it.

    Args:
      workdir: the run's folder on this host's disk.
      folder: the folder of its checkpoints.
      from_scratch: moves the history away instead, so that the run begins at step 0.

    Returns:
      A line for the user that says what was moved; none if nothing was.

    Raises:
      CheckpointError: there is a history without checkpoints, or another version of jtrain wrote the newest
        one.
    """

    def check() -> str:
        # With a checkpoint the run can go on; only one of another
        # version is refused here, before anything is moved.
        if steps := files.steps(folder):
            return _of_another_version(folder / str(steps[-1]))
        # Arrays without a manifest are `restoring`'s to judge: it names them or sets them aside.
        if files.steps_without_manifest(folder):
            return ""
        # No note: the run was killed before its first commit, or never began. Step 0 is right.
        if (last := files.last_commit(folder)) is None:
            return ""
        if not from_scratch:
            return f"refused {last}"
        # In a store the old note stands until it is replaced here: a kill before that leaves the refusal.
        moved = move_history(workdir)
        files.note_commit(folder, None)
        return f"moved {moved}"

    # One word and a text: `in_process_zero` carries strings only.
    verdict, _, text = in_process_zero(check, folder).partition(" ")
    if verdict == "version":
        raise CheckpointError(text)
    if verdict == "refused":
        raise CheckpointError(
            f"{folder} holds no checkpoint, although {folder.parent / files.LAST} says that the one of step "
            f"{text} was committed. A disk may not be mounted, or the checkpoints were moved. Bring them "
            "back and run the same command again, or add --from-scratch to begin at step 0; what is in "
            f"{workdir} is then moved to a folder in it."
        )
    return (
        [f"WARNING: beginning at step 0, as --from-scratch says; the earlier history is in {text}"]
        if text
        else []
    )


def begin(workdir: Path, folder: Path, restored: Restored) -> None:
    """Notes the step that the run begins from, and moves its history away if it gave up all checkpoints.

    Raises:
      CheckpointError: the disk or store cannot be written to.
    """

    def note() -> str:
        # Lines without a state: every checkpoint was set aside, so step 0 starts a new history.
        if restored.state is None and restored.messages:
            move_history(workdir)
        files.note_commit(folder, None if restored.state is None else restored.step)
        return ""

    in_process_zero(note, folder)


def move_history(workdir: Path) -> Path:
    """Moves what earlier attempts left in `workdir`, checkpoints aside, to a new folder in it; returns the
    folder.
    """
    numbers = (int(name.removeprefix("history-")) for name in os.listdir(workdir) if _is_history(name))
    folder = workdir / f"history-{max(numbers, default=0) + 1}"
    # Fails if the folder exists: two attempts never mix their files.
    folder.mkdir()
    for name in (*_HISTORY, files.LAST):
        # The note of the last commit moves last: a kill before that leaves the refusal.
        if (workdir / name).exists():
            (workdir / name).rename(folder / name)
    return folder


def _is_history(name: str) -> bool:
    return name.startswith("history-") and name.removeprefix("history-").isdecimal()


def _of_another_version(checkpoint: Path) -> str:
    """Returns `version` and a message if another version of jtrain wrote a checkpoint; otherwise an empty
    string.
    """
    try:
        files.read_manifest(checkpoint)
    except files.OtherVersionError as error:
        return f"version {error}"
    except CheckpointError:
        pass  # damaged: an older one may be whole
    return ""
