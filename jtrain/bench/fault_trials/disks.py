"""Full and read-only disks: a small tmpfs that the harness mounts as the workdir, with the rights of root."""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jtrain.bench.fault_trials.kinds import fault
from jtrain.bench.fault_trials.processes import TrialAttempt
from jtrain.bench.fault_trials.recipe import NUM_STEPS
from jtrain.bench.fault_trials.trial import Trial
from jtrain.runtime.exit_codes import AWAY, DONE

# Room for the checkpoints of the small model, and filled in an instant.
SIZE = "64m"
FILLER = "filler"


@contextlib.contextmanager
def _mounted(folder: Path) -> Iterator[None]:
    """Mounts a disk of its own at `folder`."""
    # tmpfs, because a file system of its own can be full without filling the machine's.
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    try:
        yield
    finally:
        # Lazy: a process that is still ending may have files open there.
        subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)


def cannot_mount() -> str | None:
    """Returns why this process cannot mount a disk of its own, None if it can."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return "a small disk can be mounted by root only"
    folder = Path(tempfile.mkdtemp(prefix="jtrain-faults-mount-"))
    # Tried, not deduced: containers give root without the right to mount.
    try:
        with _mounted(folder):
            return None
    except subprocess.CalledProcessError as error:
        return f"this machine mounts no disk: {error.stderr.strip()}"
    finally:
        folder.rmdir()


def _small_disk(trial: Trial) -> None:
    """Mounts a disk of its own as the workdir of the trial, with what is there already."""
    if os.path.ismount(trial.workdir.path):  # by an earlier fault of a sequence
        return
    # A mount hides what is in the folder, so that is moved away first and copied onto the disk.
    aside = trial.folder / "before-the-mount"
    if trial.workdir.path.exists():
        trial.workdir.path.rename(aside)
    trial.workdir.path.mkdir()
    trial.cleanups.enter_context(_mounted(trial.workdir.path))
    if aside.exists():
        shutil.copytree(aside, trial.workdir.path, symlinks=True, dirs_exist_ok=True)
        shutil.rmtree(aside)


def _filled_at_a_drawn_step(trial: Trial) -> TrialAttempt:
    """Starts a training on a small disk, and fills the disk after a drawn step."""
    _small_disk(trial)
    attempt = trial.start()
    # Early enough that further saves come after it.
    fill_step = trial.draw_step(8)
    attempt.until(lambda: trial.workdir.last_step() >= fill_step)
    _fill(trial.workdir.path)
    return attempt


def _ends_well(trial: Trial, attempt: TrialAttempt, full: str) -> None:
    """Waits for the end of a training whose disk has room again, which must be a good one."""
    _free(trial.workdir.path)
    if not trial.let_train(attempt):
        return
    codes = set(attempt.codes.values())
    # On a busy machine the training may have tried all its saves before the harness has made room.
    if codes == {AWAY} and re.search(r"3 saves in a row failed|tried 3 times", attempt.text()):
        trial.result.notes.append("the disk was full for three saves")
    elif codes != {DONE}:
        trial.wrong(f"a disk that was full {full} ended the run with {attempt.codes}")


def _fill(folder: Path) -> None:
    """Writes until no byte is left."""
    with open(folder / FILLER, "ab", buffering=0) as file:
        # Ever smaller pieces, until not even one byte fits.
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while file.write(b"\0" * size):
                    pass


def _free(folder: Path) -> None:
    (folder / FILLER).unlink(missing_ok=True)


@fault(
    "disk-full-briefly",
    "the disk is full for some steps, a save among them",
    needs=cannot_mount,
    lines_lost=True,
    lost_steps=NUM_STEPS,
    processes=(1, 2),
    chains=True,
    on_disk=True,
)
def disk_full_briefly(trial: Trial) -> None:
    """The training goes on to its end by itself: saves are tried again, notes are lost with a warning."""
    attempt = _filled_at_a_drawn_step(trial)
    # The first failed save is logged; only then the disk gets room again.
    attempt.until(lambda: re.search(r"this was failure 1|1 of 3 failed", attempt.text()), poll_s=0.01)
    _ends_well(trial, attempt, "for some steps")


@fault(
    "disk-full-save",
    "the disk is full during one save only",
    needs=cannot_mount,
    lines_lost=True,
    lost_steps=NUM_STEPS,
    processes=(1, 2),
    chains=True,
    on_disk=True,
)
def disk_full_save(trial: Trial) -> None:
    """The save is tried again, or the next one takes its place."""
    _small_disk(trial)
    attempt = trial.start()
    attempt.until(trial.workdir.saving)
    _fill_while(trial, attempt, trial.workdir.saving)
    _ends_well(trial, attempt, "during one save")


@fault(
    "disk-full-purge",
    "the disk is full while an old checkpoint is being deleted",
    needs=cannot_mount,
    lines_lost=True,
    lost_steps=NUM_STEPS,
    processes=(1, 2),
    chains=True,
    on_disk=True,
)
def disk_full_purge(trial: Trial) -> None:
    """The deletion makes room by itself, and the training goes on."""
    _small_disk(trial)
    attempt = trial.start()
    attempt.until(trial.workdir.deleting)
    _fill_while(trial, attempt, trial.workdir.deleting)
    _ends_well(trial, attempt, "during a deletion")


def _fill_while(trial: Trial, attempt: TrialAttempt, condition: Callable[[], Any]) -> None:
    """Fills the disk until `condition` has ended, in either way."""
    committed_steps = trial.workdir.committed()
    _fill(trial.workdir.path)
    attempt.until(lambda: not condition() or trial.workdir.committed() != committed_steps)


@fault(
    "disk-full",
    "the disk is full and stays so",
    needs=cannot_mount,
    lines_lost=True,
    lost_steps=NUM_STEPS,
    processes=(1, 2),
    chains=True,
    on_disk=True,
)
def disk_full(trial: Trial) -> None:
    """The run ends with 77 and a message that names the disk; with room again the same command goes on."""
    attempt = _filled_at_a_drawn_step(trial)
    attempt.wait()
    trial.record_end(attempt)
    text = attempt.text()
    if set(attempt.codes.values()) == {DONE} and "No space left" not in text:
        # No save was due any more when the disk became full.
        trial.result.notes.append("the run ended before a save could fail")
        _free(trial.workdir.path)
        return
    # A message for the user, not a traceback, and with the path of the full disk.
    if set(attempt.codes.values()) != {AWAY} or "Traceback" in text or str(trial.workdir.path) not in text:
        trial.wrong(
            f"on a full disk the run ended with {attempt.codes}; expected 77 and a message that names the "
            "disk"
        )
    _free(trial.workdir.path)


def _writable(trial: Trial) -> None:
    subprocess.run(["mount", "-o", "remount,rw", str(trial.workdir.path)], check=True, capture_output=True)


@fault(
    "disk-read-only",
    "the workdir's disk is mounted read-only",
    needs=cannot_mount,
    must_refuse=True,
    # The system writes Read-only, a message may begin otherwise.
    refused="(?s)(cannot be written|ead-only).*--workdir",
    mend=_writable,
)
def disk_read_only(trial: Trial) -> None:
    """Refused before step 1; mounted for writing again, the same command goes on."""
    _small_disk(trial)
    trial.from_half()
    subprocess.run(["mount", "-o", "remount,ro", str(trial.workdir.path)], check=True, capture_output=True)
