"""Bad numbers in real runs: real NaNs in the step's program, put there by a callback into this process."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

from jtrain.checkpoint import files
from jtrain.config import tree
from jtrain.config.load import load_config
from jtrain.config.run import build_run
from jtrain.errors import HardwareFault
from jtrain.optim import Optimizer
from jtrain.telemetry import metrics
from jtrain.telemetry.recompiles import count_programs
from jtrain.train import attempt
from jtrain.train.bad_steps.bad_steps import BadNumbers, BadSteps
from tests.small_disk import small_disk

ROOT = Path(__file__).parents[2]
NUM_STEPS = 8
SETS = (
    f"num_steps={NUM_STEPS}",
    "model.num_layers=1",
    "model.d_model=32",
    "model.d_ff=32",
    "data.engine=inline",
    "metrics.log_every_steps=1",
    "metrics.tensorboard=False",
    "optimizer.warmup_steps=0",
    "checkpoint.every_steps=3",
    "eval.every_steps=None",
    "data.eval_fraction=0",
    "profile.clocks=none",
)


class Faults:
    """Numbers that the step's program adds: {(kind, step): value}; steps count from 1.

    Kinds are `norm`, the gradient norm, and `update`, the learning rate and with it every new parameter.

    transient: they are there only until the run goes back.
    """

    def __init__(self) -> None:
        self.planted: dict[tuple[str, int], float] = {}
        self.transient = self.went_back = False

    def traced(self, kind: str, step: jax.Array) -> jax.Array:
        def value(at: Any) -> np.float32:
            gone = self.transient and self.went_back
            return np.float32(0.0 if gone else self.planted.get((kind, int(at) + 1), 0.0))

        return jax.pure_callback(value, jax.ShapeDtypeStruct((), np.float32), step)


@pytest.fixture(scope="module")
def faults() -> Iterator[Faults]:
    """Plants faults in the update. One compiled step serves every run of this file."""
    planted = Faults()
    begin, go_back, make = Optimizer.begin, BadSteps.go_back, attempt.make_train_step
    steps: dict[float | None, Any] = {}

    def begin_with_faults(self: Optimizer, grads: Any, step: Any, **named: Any) -> Any:
        update = begin(self, grads, step, **named)
        norm, rate = (planted.traced(kind, update.step) for kind in ("norm", "update"))
        return dataclasses.replace(
            update, grad_norm=update.grad_norm + norm, learning_rate=update.learning_rate + rate
        )

    def go_back_noted(self: BadSteps, *args: Any, **kwargs: Any) -> None:
        planted.went_back = True
        go_back(self, *args, **kwargs)

    def made_once(*args: Any, sigmas: float | None, **named: Any) -> Any:
        if sigmas not in steps:
            steps[sigmas] = make(*args, sigmas=sigmas, **named)
        return steps[sigmas]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Optimizer, "begin", begin_with_faults)
        patch.setattr(BadSteps, "go_back", go_back_noted)
        patch.setattr(attempt, "make_train_step", made_once)
        yield planted
    assert [count_programs(step) for step in steps.values()] == [1] * len(steps), (
        "one trace, whatever the guard does"
    )


def train(
    workdir: Path, faults: Faults, planted: dict[tuple[str, int], float], *sets: str, transient: bool = False
) -> int:
    faults.planted, faults.transient, faults.went_back = planted, transient, False
    run_config = load_config("tiny", ["debug"], (*SETS, "mesh.data=8", "layout.zero_stage=1", *sets))
    return attempt.train(build_run(run_config), workdir=workdir, config_text=tree.flat(run_config))


def events(workdir: Path) -> list[dict[str, Any]]:
    path = workdir / metrics.BAD_STEPS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def actions(workdir: Path) -> list[tuple[str, int]]:
    return [(event["action"], event["step"]) for event in events(workdir)]


def leave_out(workdir: Path, *steps: int) -> Path:
    """A workdir whose run does not apply the updates of these steps."""
    workdir.mkdir()
    line = {"step": max(steps), "action": "repeats", "since": 0, "left_out": list(steps)}
    (workdir / metrics.BAD_STEPS).write_text(json.dumps(line) + "\n")
    return workdir


def arrays(workdir: Path, step: int = NUM_STEPS) -> dict[str, bytes]:
    """Bits of every array of a checkpoint but the guard's own, by path."""
    path = workdir / "checkpoints" / str(step) / files.STATE
    handler = ocp.PyTreeCheckpointHandler(use_zarr3=True)
    with ocp.Checkpointer(handler) as reader:
        metadata: Any = handler.metadata(epath.Path(path))
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), metadata.tree)
        found = reader.restore(path, restore_args=as_numpy)
    found.pop("guard")
    flat, _ = jax.tree_util.tree_flatten_with_path(found)
    return {jax.tree_util.keystr(path): np.asarray(value).tobytes() for path, value in flat}


def lines(workdir: Path) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in metrics.read(workdir / metrics.FILE) if "loss_nats" in line}


@pytest.fixture(scope="module")
def unbroken(faults: Faults, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("unbroken")
    assert train(workdir, faults, {}) == 0
    assert not events(workdir)
    assert lines(workdir)[NUM_STEPS]["skipped_updates"] == 0
    return workdir


def test_bad_updates_leave_no_trace(faults: Faults, unbroken: Path, tmp_path: Path) -> None:
    """A NaN in step 2's norm, and one that the update of step 6 writes, which saves: as if both had been left
    out.
    """
    reference = leave_out(tmp_path / "reference", 2, 6)
    assert train(reference, faults, {}) == 0
    bad = tmp_path / "bad"
    assert train(bad, faults, {("norm", 2): math.nan, ("update", 6): math.nan}) == 0
    assert actions(bad) == [("found", 2), ("found", 6), ("went back", 6), ("repeats", 6)]
    assert events(bad)[2]["to"] == 3, "the newest checkpoint before it"
    assert all(name.rpartition(":")[2].isdecimal() for name in events(bad)[1]["documents"]["data"])
    assert arrays(bad) == arrays(reference)
    assert arrays(bad) != arrays(unbroken), "the two updates mattered"
    assert [line["step"] for line in metrics.read(bad / metrics.FILE)] == list(range(1, NUM_STEPS + 1))
    assert lines(bad)[NUM_STEPS]["skipped_updates"] == 2
    for step, line in lines(bad).items():
        assert line["loss_nats"] == lines(reference)[step]["loss_nats"]
        assert line["batch_hash"] == lines(unbroken)[step]["batch_hash"], "batches are consumed all the same"


def test_other_bits_the_second_time_are_a_hardware_fault(
    faults: Faults, unbroken: Path, tmp_path: Path
) -> None:
    """A NaN that the same step does not write again: nothing of it is saved, the same command is the unbroken
    run.
    """
    with pytest.raises(
        HardwareFault,
        match=r"step 6, run twice from .* step 3 .*gave two results.*host.*Nothing of it was saved",
    ):
        train(tmp_path, faults, {("update", 6): math.nan}, transient=True)
    assert actions(tmp_path)[-1] == ("differs", 6)
    assert files.steps(tmp_path / "checkpoints") == (3,)
    assert train(tmp_path, faults, {}) == 0
    assert arrays(tmp_path) == arrays(unbroken)


@pytest.mark.slow
def test_checkpoints_of_a_faulty_pass_are_set_aside(faults: Faults, tmp_path: Path) -> None:
    """A spike of step 6 that is not there again: the state before it, saved in the same pass, may be as
    wrong.
    """
    sets = ("guard.on_bad=rollback", "checkpoint.every_steps=1")
    with pytest.raises(
        HardwareFault, match=r"\. What its first pass saved \(step 5\) was set aside as damaged\."
    ):
        train(tmp_path, faults, {("norm", 6): math.nan}, *sets, transient=True)
    assert (tmp_path / "checkpoints" / "5.damaged").is_dir()
    assert max(files.steps(tmp_path / "checkpoints")) == 4


@pytest.mark.slow
def test_a_disk_that_takes_nothing_hides_no_hardware_fault(faults: Faults, tmp_path: Path) -> None:
    """The same where the checkpoints have become read-only: the fault is said, and what is left to do."""
    sets = (
        "guard.on_bad=rollback",
        "checkpoint.every_steps=1",
        "callbacks=('tests.train.disk_faults:ReadOnlyAtARewind',)",
    )
    with small_disk(tmp_path / "disk", 64 << 10) as disk:
        with pytest.raises(
            HardwareFault, match=r"\(step 5\) cannot be set aside \(Read-only.*: move it away"
        ):
            train(disk / "run", faults, {("norm", 6): math.nan}, *sets, transient=True)
        assert 5 in files.steps(disk / "run" / "checkpoints")


@pytest.mark.slow
def test_stop_ends_the_run_with_ways_on_that_work(faults: Faults, tmp_path: Path) -> None:
    """The message is true: the checkpoint is from before the bad step; `skip` goes on in the same workdir."""
    with pytest.raises(
        BadNumbers, match=r"grad_norm bad at step 5.*of step 3, is from before it.*guard.on_bad=skip"
    ):
        train(tmp_path, faults, {("norm", 5): math.inf}, "guard.on_bad=stop")
    assert files.steps(tmp_path / "checkpoints") == (3,)
    assert train(tmp_path, faults, {("norm", 5): math.inf}, "guard.on_bad=skip") == 0
    assert lines(tmp_path)[NUM_STEPS]["skipped_updates"] == 1


@pytest.mark.slow
def test_a_full_disk_ends_no_run_that_has_a_bad_step_to_note(
    faults: Faults, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One warning; the entry is in the file once there is room."""
    full = ("callbacks=('tests.train.disk_faults:full_from_1_to_7',)", "checkpoint.every_steps=None")
    with small_disk(tmp_path / "disk", 32 << 10) as disk:
        assert train(disk / "run", faults, {("norm", 3): math.nan}, *full) == 0
        assert actions(disk / "run") == [("found", 3)]
    said = capsys.readouterr().out
    assert (
        said.count(f"{metrics.BAD_STEPS} cannot be written (No space left on device): training goes on") == 1
    )
    assert f"{metrics.BAD_STEPS} is written again: all records are in it" in said


@pytest.mark.slow
def test_two_processes_decide_alike_and_a_kill_in_between_changes_nothing(tmp_path: Path) -> None:
    """Real processes: an update that writes NaN is left out by both, also if all are killed after the
    verdict.
    """
    sets = (
        *SETS,
        "mesh.data=2",
        "layout.zero_stage=3",
        "callbacks=('tests.train.process_faults:nan_at_step_6',)",
    )
    flags = [part for text in sets for part in ("--set", text)]

    def launched(workdir: Path, **more: str) -> subprocess.CompletedProcess[str]:
        argv = [
            "bash",
            str(ROOT / "launch" / "local.sh"),
            "-n",
            "2",
            "--config=tiny",
            "--with",
            "debug",
            *flags,
        ]
        argv += ["--workdir", str(workdir), "--emulate-devices", "1"]
        env = os.environ | {"XLA_FLAGS": "", "PYTHON": sys.executable} | more
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = launched(whole)
    assert done.returncode == 0, done.stdout + done.stderr
    assert actions(whole) == [("found", 6), ("went back", 6), ("repeats", 6)]
    assert lines(whole)[NUM_STEPS]["skipped_updates"] == 1
    done = launched(killed, KILL_AT="2")
    assert "restart 1 of" in done.stderr, "the supervisor of the launcher starts the same command again"
    assert done.returncode == 0, done.stdout + done.stderr
    assert actions(killed) == actions(whole), "the batch was left out without another replay"
    assert arrays(killed) == arrays(whole)
