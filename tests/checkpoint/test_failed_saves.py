"""A save that fails does not end the run: it is said, and tried again; nothing older is deleted meanwhile."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from jtrain.checkpoint import CheckpointError, Checkpoints, CheckpointSpec, files, saving
from jtrain.errors import AwayError
from jtrain.runtime import atomic_io


class Disk:
    """Fills up while `full`: the commit of a save then fails."""

    full, error = False, errno.ENOSPC

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seal = files.seal

        def until_full(path: Path, **kw: Any) -> None:
            if self.full:
                raise OSError(self.error, os.strerror(self.error), str(path))
            seal(path, **kw)

        monkeypatch.setattr(files, "seal", until_full)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """The disk of every save in a test."""
    return Disk(monkeypatch)


@pytest.fixture
def said() -> list[str]:
    """Lines for the user."""
    return []


@pytest.fixture
def checkpoints(tmp_path: Path, said: list[str]) -> Iterator[Checkpoints]:
    """Saves every 64 steps, keeps one checkpoint, and gives up after three failures."""
    made = Checkpoints(tmp_path, CheckpointSpec(every_steps=64, keep_last=1))
    made.say = said.append
    made.prepare()
    yield made
    made.close()


def state(step: int) -> dict[str, Any]:
    return {"w": jax.numpy.full((4, 256), step, "float32")}


def train(checkpoints: Checkpoints, steps: range) -> list[int]:
    """Does what the loop does; returns the steps at which it saved."""
    saved = []
    for step in steps:
        if checkpoints.should_save(step):
            checkpoints.save(step, state(step), {"next": step}, "")
            saved.append(step)
            assert checkpoints.task is not None
            checkpoints.task.join()
        checkpoints.check(step)
    return saved


def test_training_goes_on_and_the_pause_doubles(
    checkpoints: Checkpoints, disk: Disk, said: list[str]
) -> None:
    """After 1/16 of the interval, then 2/16: then the disk has room again, and all is as before."""
    checkpoints.save(64, state(64), {"next": 64}, "")
    assert checkpoints.step_in_flight == 64
    checkpoints.wait_for_save()
    disk.full = True
    assert train(checkpoints, range(70, 133)) == [128, 132]
    assert checkpoints.step_in_flight is None
    disk.full = False
    assert train(checkpoints, range(133, 257)) == [140, 192, 256]
    assert checkpoints.steps() == (256,)
    assert len(said) == 2
    assert "cannot take the checkpoint of step 128 (OSError: [Errno 28] No space left" in said[0]
    assert "GiB are free on this disk" in said[0]
    assert (
        "Earlier checkpoints are untouched: steps 64. Training goes on, and the next try is after step 132"
        in said[0]
    )
    assert "the next try is after step 140: this was failure 2, and checkpoint.max_failures=3" in said[1]
    disk.full = True
    assert train(checkpoints, range(257, 325)) == [320, 324], "failures are counted in a row"


def test_a_failure_found_by_the_next_save_puts_that_one_off(
    checkpoints: Checkpoints, disk: Disk, said: list[str]
) -> None:
    """Two saves one after the other would count one full disk twice."""
    disk.full = True
    assert checkpoints.save(64, state(64), {"next": 64}, "")
    assert not checkpoints.save(128, state(128), {"next": 128}, "")
    assert "the next try is after step 132: this was failure 1" in said[0]
    assert not checkpoints.should_save(128)
    disk.full = False
    assert train(checkpoints, range(129, 193)) == [132, 192]
    assert len(said) == 1


def test_the_last_of_max_failures_ends_the_run(checkpoints: Checkpoints, disk: Disk, said: list[str]) -> None:
    """The message says from where the same command goes on; a full disk is the world's, exit code 77."""
    train(checkpoints, range(64, 65))
    disk.full = True
    with pytest.raises(
        AwayError,
        match=(
            r"step 140 .*untouched: steps 64\. 3 saves in a row failed \(checkpoint\.max_failures=3\)\. "
            r"The same command goes on from step 64\."
        ),
    ):
        train(checkpoints, range(65, 1000))
    assert len(said) == 2
    assert [path.name for path in checkpoints.folder.iterdir()] == ["64"]


def test_a_save_that_fails_for_another_reason_is_the_users(checkpoints: Checkpoints, disk: Disk) -> None:
    """Exit code 2: a folder without permission stays so, however often the command is tried."""
    disk.full, disk.error = True, errno.EACCES
    with pytest.raises(CheckpointError, match="3 saves in a row failed") as failed:
        train(checkpoints, range(64, 1000))
    assert not isinstance(failed.value, AwayError)


def test_the_save_at_the_end_is_tried_again(
    checkpoints: Checkpoints, disk: Disk, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step follows, so the same state is saved after a pause; here the disk has room after the second
    one.
    """
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        disk.full = len(pauses) < 2

    monkeypatch.setattr(saving.time, "sleep", pause)
    disk.full = True
    checkpoints.save(10, state(10), {"next": 10}, "", last=True)
    checkpoints.check(10)
    checkpoints.wait()
    assert pauses == [2, 4]
    assert checkpoints.steps() == (10,)
    assert checkpoints.data_state(10) == {"next": 10}
    assert "step 10 (OSError" in said[0]
    assert "The next try is in 2 s, 1 of 3 failed" in said[0]

    monkeypatch.setattr(saving.time, "sleep", pauses.append)
    disk.full = True
    checkpoints.save(20, state(20), {}, "", last=True)
    with pytest.raises(
        CheckpointError, match=r"step 20 .*It was tried 3 times\. The same command goes on from step 10\."
    ):
        checkpoints.wait()
    assert pauses == [2, 4, 2, 4]


def test_nothing_is_deleted_before_the_newer_one_was_read_back(
    checkpoints: Checkpoints, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit that changes between the commit and the read-back costs the new checkpoint, not the old one."""
    train(checkpoints, range(64, 65))
    sync = atomic_io.sync_directory

    def flip(path: Path) -> None:
        sync(path)
        if path == checkpoints.folder:  # the last act of the commit
            file = path / "128" / "state" / "w" / "c.0.0"
            data = bytearray(file.read_bytes())
            data[100] ^= 1
            file.write_bytes(data)

    monkeypatch.setattr(atomic_io, "sync_directory", flip)
    train(checkpoints, range(128, 129))
    assert checkpoints.steps() == (64,)
    assert files.last_commit(checkpoints.folder) == 64, "no note of a step that is not there"
    assert "read back, and state/w/c.0.0 does not have the contents that were written" in said[0]
    monkeypatch.setattr(atomic_io, "sync_directory", sync)
    assert train(checkpoints, range(129, 140)) == [132]
    assert checkpoints.steps() == (132,)
    assert [path.name for path in checkpoints.folder.iterdir()] == ["132"]


def test_nothing_is_deleted_while_numbers_are_suspicious(checkpoints: Checkpoints) -> None:
    """What was kept meanwhile goes with the first save afterwards."""
    checkpoints.hold = True
    train(checkpoints, range(64, 257))
    assert checkpoints.steps() == (64, 128, 192, 256)
    checkpoints.hold = False
    train(checkpoints, range(257, 321))
    assert checkpoints.steps() == (320,)


def test_a_file_that_process_zero_cannot_see_is_no_checkpoint(
    checkpoints: Checkpoints, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a process writes to a folder of its own: nothing is committed, and the message says what to
    set.
    """
    from jtrain.checkpoint import array_writer

    write = array_writer.write_arrays

    def elsewhere(path: Path, *args: Any, **kw: Any) -> array_writer.Hashes:
        hashes = write(path, *args, **kw)
        (path / "state" / "w" / "c.0.0").unlink()
        return hashes

    monkeypatch.setattr(array_writer, "write_arrays", elsewhere)
    train(checkpoints, range(64, 65))
    assert checkpoints.steps() == ()
    assert "state/w/c.0.0 was written by one process and cannot be seen by process 0" in said[0]
    assert "Set --workdir to one that all hosts share" in said[0]
