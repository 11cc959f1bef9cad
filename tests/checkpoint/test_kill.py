"""After a SIGKILL at any instant, every durable checkpoint exists, and every existing one is intact."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.checkpoint import Checkpoints, CheckpointSpec, removal
from tests.processes import program

LIKE = {
    "step": jax.ShapeDtypeStruct((), jnp.int32),
    "params": {f"w{i}": jax.ShapeDtypeStruct((256, 256), jnp.float32) for i in range(8)},
}


def check(workdir: Path, durable: int) -> int:
    """Restores every checkpoint of `workdir` and compares it with what its step must hold."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), LIKE)
    checkpoints = Checkpoints(workdir, CheckpointSpec(keep_last=2))
    latest = checkpoints.latest_step()
    assert latest is not None
    assert latest >= durable, "a step that was reported durable is gone"
    for step in checkpoints.steps():
        got, data_state = checkpoints.restore(step, like)
        rng = np.random.default_rng(step)
        for i in range(8):
            want = rng.standard_normal((256, 256), np.float32)
            assert np.asarray(got["params"][f"w{i}"]).tobytes() == want.tobytes()
        assert int(got["step"]) == step
        assert data_state == {"next": step}
        assert checkpoints.config_text(step) == f"config {step}"
    return latest


def stop_within_a_write(pid: int, workdir: Path) -> None:
    """Stops the saver `pid` at a moment when a checkpoint of `workdir` is half written."""
    while True:
        os.kill(pid, signal.SIGSTOP)
        while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
            pass  # the signal takes effect within microseconds, and what is on the disk counts only after that
        if removal.unread_names(workdir / "checkpoints"):
            return
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.001)  # a half-written checkpoint shows for milliseconds, and nobody is told of it


class Savers:
    """Runs savers one after another."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            program(__file__, "save_for_ever"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run_one(
        self,
        workdir: Path,
        instant: str = "at-random",
        *,
        kill_after_s: float | None = None,
        within_a_write: bool = False,
    ) -> int:
        """Runs a saver until it dies or is killed after its third save began; returns the last durable step.

        `within_a_write` puts the kill off until a checkpoint of `workdir` is half written.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{workdir} {instant}\n")
        self.process.stdin.flush()
        durable = saves = pid = 0
        for line in self.process.stdout:
            word, number = line.split()
            if word == "pid":
                pid = int(number)
            elif word == "durable":
                durable = int(number)
            elif word == "died":
                assert int(number) == -signal.SIGKILL
                return durable
            elif word == "saving" and kill_after_s is not None:
                saves += 1
                if saves == 3:
                    time.sleep(kill_after_s)
                    if within_a_write:
                        stop_within_a_write(pid, workdir)
                    os.kill(pid, signal.SIGKILL)
        raise AssertionError("the savers ended")

    def close(self) -> None:
        """Ends the process that forks."""
        self.process.communicate(timeout=300)


@pytest.fixture(scope="module")
def savers() -> Iterator[Savers]:
    """One saver for all tests here, because it takes seconds to start."""
    made = Savers()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("instant", "newest", "remains"),
    [
        ("before-hashing", 2, ("3.2.orbax-checkpoint-tmp",)),
        pytest.param("after-the-manifest", 2, ("3.2.orbax-checkpoint-tmp",), marks=pytest.mark.slow),
        pytest.param("after-the-rename", 3, (), marks=pytest.mark.slow),
        ("within-a-deletion", 3, ("1.deleted",)),
    ],
)
def test_a_kill_at_this_instant_loses_nothing(
    savers: Savers, tmp_path: Path, instant: str, newest: int, remains: tuple[str, ...]
) -> None:
    """Kills at each of the four points where the order of writes matters; then a run continues from there."""
    durable = savers.run_one(tmp_path, instant)
    assert check(tmp_path, durable) == newest
    assert removal.unread_names(tmp_path / "checkpoints") == remains
    durable = savers.run_one(tmp_path, kill_after_s=0.1)
    assert check(tmp_path, durable) > newest
    assert not set(remains) & set(removal.unread_names(tmp_path / "checkpoints"))


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_random_kills_one_after_another_lose_nothing(savers: Savers, tmp_path: Path, kills: int) -> None:
    """Each run continues in the directory that the last one left."""
    rng = random.Random(kills)
    for kill in range(kills):
        within_a_write = kill % 2 == 0
        durable = savers.run_one(tmp_path, kill_after_s=rng.uniform(0, 0.1), within_a_write=within_a_write)
        assert removal.unread_names(tmp_path / "checkpoints") or not within_a_write
        check(tmp_path, durable)
