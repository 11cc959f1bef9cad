"""Notices a workdir whose run has a history but no checkpoints, such as one on a disk that is not mounted.

Such a run does not begin at step 0 in silence: it is refused, unless `--from-scratch` says that this is meant. A run
that was killed before its first checkpoint has a history too, and begins at step 0 by the same command; the file
`last_checkpoint.json` tells the two apart.
"""

import json
import os
from pathlib import Path

from jtrain.checkpoint import files
from jtrain.checkpoint.files import CheckpointError
from jtrain.checkpoint.restoring import Restored, in_process_zero

_METRICS = "metrics.jsonl"
_CONFIG = "config.txt"
_HISTORY = (
    _METRICS,
    "goodput.jsonl",
    "goodput.json",
    "tensorboard",
    "data.log",
    "profile",
    _CONFIG,
    "run.json",
)
_END_BYTES = 1 << 16


def check_history(workdir: Path, folder: Path, *, from_scratch: bool) -> list[str]:
    """Refuses a workdir whose run made checkpoints that are not there; all processes call it.

    Args:
      workdir: the run's folder on this host's disk.
      folder: the folder of its checkpoints.
      from_scratch: moves the history away instead, so that the run begins at step 0.

    Returns:
      A line for the user that says what was moved; none if nothing was.

    Raises:
      CheckpointError: there is a history without checkpoints.
    """

    def check() -> str:
        if files.steps(folder) or files.without_manifest(folder):
            return ""
        done = _done(workdir, folder)
        if not done:
            return ""
        if not from_scratch:
            return f"refused {done}"
        moved = move_history(workdir)
        files.note_commit(folder, None)
        return f"moved {moved}"

    verdict, _, text = in_process_zero(check, folder).partition(" ")
    if verdict == "refused":
        raise CheckpointError(
            f"{folder} holds no checkpoint, although {text}. A disk may not be mounted, or the checkpoints were moved. "
            "Bring them back and run the same command again, or add --from-scratch to begin at step 0; what is in "
            f"{workdir} is then moved to a folder in it."
        )
    return [f"WARNING: beginning at step 0, as --from-scratch says; the earlier history is in {text}"] if text else []


def begin(workdir: Path, folder: Path, found: Restored) -> None:
    """Notes the step that the run begins from, and moves its history away if it gave up all checkpoints.

    Raises:
      CheckpointError: the disk or store cannot be written to.
    """

    def note() -> str:
        if found.state is None and found.said:
            move_history(workdir)
        files.note_commit(folder, None if found.state is None else found.step)
        return ""

    in_process_zero(note, folder)


def move_history(workdir: Path) -> Path:
    """Moves what earlier attempts left in `workdir`, checkpoints aside, to a new folder in it; returns the folder."""
    numbers = (int(name.removeprefix("history-")) for name in os.listdir(workdir) if _is_history(name))
    folder = workdir / f"history-{max(numbers, default=0) + 1}"
    folder.mkdir()
    for name in (*_HISTORY, files.LAST):
        if (workdir / name).exists():
            (workdir / name).rename(folder / name)
    return folder


def _is_history(name: str) -> bool:
    return name.startswith("history-") and name.removeprefix("history-").isdecimal()


def _done(workdir: Path, folder: Path) -> str:
    """Returns what says that this run made checkpoints; an empty string if nothing does."""
    last = files.last_commit(folder)
    if last is not None:
        return f"{folder.parent / files.LAST} says that the one of step {last} was committed"
    if files.has_note(folder):
        return ""
    # A run of an older version of jtrain, which left no note.
    step, every = _last_step(workdir / _METRICS), _every_steps(workdir / _CONFIG)
    if step is None or every is None or step < every:
        return ""
    return f"{workdir / _METRICS} has steps up to {step}, and checkpoint.every_steps was {every}"


def _last_step(metrics: Path) -> int | None:
    """Returns the newest step in the last 64 KiB of a metrics file; None if there is none."""
    try:
        with open(metrics, "rb") as file:
            file.seek(max(0, metrics.stat().st_size - _END_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return None


def _every_steps(config: Path) -> int | None:
    """Returns the steps between two saves by a run's config, `num_steps` if only its end is saved; None if unknown."""
    try:
        lines = config.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    fields = {line.partition(":")[0]: line.rpartition("=")[2].strip() for line in lines}
    found = next(
        (fields[name] for name in ("checkpoint.every_steps", "num_steps") if fields.get(name, "").isdecimal()), ""
    )
    return int(found) if found else None
