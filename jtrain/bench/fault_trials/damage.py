"""Damaged, missing and misplaced checkpoint files; the run goes on from the newest whole one and says so."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from jtrain.bench.fault_trials.kinds import fault
from jtrain.bench.fault_trials.recipe import EVERY_STEPS
from jtrain.bench.fault_trials.trial import Trial
from jtrain.checkpoint import files

LEAVES = r"^checkpoints/N\.(damaged|doubtful)"
"""A damaged checkpoint is set aside, for whoever wants to know what happened to it."""


def _truncate(file: Path, trial: Trial) -> None:
    # At least one byte is cut off, and all of them may be.
    os.truncate(file, trial.rng.randrange(file.stat().st_size))


def _flip(file: Path, trial: Trial) -> None:
    data = bytearray(file.read_bytes())
    # One bit: the smallest damage that a checksum has to find.
    data[trial.rng.randrange(len(data))] ^= 1 << trial.rng.randrange(8)
    file.write_bytes(data)


def _garbage(file: Path, trial: Trial) -> None:
    file.write_bytes(trial.rng.randbytes(file.stat().st_size))


DAMAGES: dict[str, Callable[[Path, Trial], object]] = {
    "missing": lambda file, trial: file.unlink(),
    "truncated": _truncate,
    "flipped": _flip,
    "emptied": lambda file, trial: file.write_bytes(b""),
    "garbage": _garbage,
}


def file_types(checkpoint: Path) -> dict[str, list[Path]]:
    """Returns type -> its files: names without numbers and hashes, such as `state/ocdbt.process_/d/`."""
    files_by_type: dict[str, list[Path]] = {}
    for file in sorted(checkpoint.rglob("*")):
        # An empty file cannot be truncated or flipped.
        if file.is_file() and file.stat().st_size:
            # Hashes first, as they contain digits too.
            name = re.sub(r"[0-9a-f]{16,}", "", str(file.relative_to(checkpoint)))
            files_by_type.setdefault(re.sub(r"\d+", "", name), []).append(file)
    return files_by_type


def _damages(damage_name: str) -> None:
    @fault(
        f"damage-{damage_name}",
        f"a file of the newest checkpoint is {damage_name}; its type is drawn",
        lost_steps=EVERY_STEPS,
        leaves=LEAVES,
        chains=True,
        on_disk=True,
    )
    def damage(trial: Trial) -> None:
        newest = _newest_of_several(trial)
        if newest is None:
            return
        files_by_type = file_types(newest)
        # The type is drawn before the file, as most files are array data.
        file_type = trial.rng.choice(sorted(files_by_type))
        file = trial.rng.choice(files_by_type[file_type])
        trial.result.notes.append(f"{damage_name}: {file.relative_to(trial.workdir.path)}")
        # Noted first: a trial that fails here still says which file it was.
        DAMAGES[damage_name](file, trial)


for _damage_name in DAMAGES:
    _damages(_damage_name)


@fault(
    "no-manifest",
    "the newest checkpoint has no manifest",
    lost_steps=EVERY_STEPS,
    leaves=LEAVES,
    chains=True,
    on_disk=True,
)
def no_manifest(trial: Trial) -> None:
    """A run that falls back has to say so."""
    newest = _newest_of_several(trial)
    if newest is not None:
        (newest / files.MANIFEST).unlink()


def _newest_of_several(trial: Trial) -> Path | None:
    """Returns the newest checkpoint; None if there is no older one that the run could go on from."""
    trial.from_half()
    committed_steps = trial.workdir.committed()
    if len(committed_steps) < 2:
        trial.result.notes.append(f"nothing damaged: the checkpoints are {committed_steps}")
        return None
    return trial.workdir.checkpoints / str(committed_steps[-1])


def _bring_back(trial: Trial) -> None:
    shutil.rmtree(trial.workdir.checkpoints, ignore_errors=True)
    # From the untouched copy that all trials share.
    shutil.copytree(trial.lab.half(trial.recipe) / "checkpoints", trial.workdir.checkpoints)


LOST = dict(refused=r"(?s)checkpoints.*--from-scratch", must_refuse=True, mend=_bring_back)


@fault("no-manifests", "no checkpoint has a manifest", **LOST)
def no_manifests(trial: Trial) -> None:
    """A history without a whole checkpoint is never continued from step 0 unasked."""
    trial.from_half()
    for step in trial.workdir.committed():
        (trial.workdir.checkpoints / str(step) / files.MANIFEST).unlink()


@fault("no-checkpoints", "the folder checkpoints/ is missing, as of a disk that is not mounted", **LOST)
def no_checkpoints(trial: Trial) -> None:
    """The same without the folder."""
    trial.from_half()
    shutil.rmtree(trial.workdir.checkpoints)


@fault(
    "renumbered",
    "a checkpoint was copied to the number of a later step",
    lost_steps=EVERY_STEPS,
    leaves=LEAVES,
)
def renumbered(trial: Trial) -> None:
    """Manifest of another step than the folder's name."""
    trial.from_half()
    # Step 12 would be the third checkpoint, which the half-done run has not reached.
    shutil.copytree(trial.workdir.checkpoints / str(2 * EVERY_STEPS), trial.workdir.checkpoints / "12")


@fault(
    "all-damaged",
    "every checkpoint is damaged",
    refused=r"(?s)checkpoints.*--from-scratch",
    must_refuse=True,
    mend=_bring_back,
)
def all_damaged(trial: Trial) -> None:
    """None is whole: exit 2."""
    trial.from_half()
    for step in trial.workdir.committed():
        files_by_type = file_types(trial.workdir.checkpoints / str(step))
        # The manifest: without a valid one nothing of the checkpoint is trusted.
        _flip(files_by_type[files.MANIFEST][0], trial)
