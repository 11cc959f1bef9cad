"""Resuming is the same run: real processes, real signals, losses and data compared bit by bit."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jtrain.telemetry import metrics

NUM_STEPS = 40
ENVIRON = os.environ | {"XLA_FLAGS": ""}
"""One device as a user has it."""


def command(workdir: Path, *more: str) -> list[str]:
    sets = (f"num_steps={NUM_STEPS}", "metrics.log_every_steps=1", "metrics.tensorboard=False")
    sets += ("checkpoint.every_steps=10", "eval.every_steps=20", "optimizer.warmup_steps=2")
    flags = [flag for text in sets for flag in ("--set", text)]
    return [
        sys.executable,
        "-m",
        "jtrain.launch",
        "--config=tiny",
        "--with",
        "debug",
        *flags,
        "--workdir",
        str(workdir),
        *more,
    ]


def start(workdir: Path, *more: str) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(command(workdir, *more), env=ENVIRON, **pipes)


def finish(workdir: Path, *more: str) -> str:
    process = start(workdir, *more)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return output


def train_lines(workdir: Path) -> dict[int, dict[str, Any]]:
    path = workdir / metrics.FILE
    lines = metrics.read(path) if path.exists() else []
    return {line["step"]: line for line in lines if "loss_nats" in line}


def wait_until(process: subprocess.Popen[str], condition: Any) -> None:
    end_s = time.monotonic() + 200
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end_s, "the run did not get there"
        time.sleep(0.005)


def assert_same_run(got: Path, want: Path) -> None:
    got_lines, want_lines = train_lines(got), train_lines(want)
    assert list(got_lines) == list(want_lines) == list(range(1, NUM_STEPS + 1))
    for step, line in want_lines.items():
        assert got_lines[step]["loss_nats"] == line["loss_nats"], step
        assert got_lines[step]["batch_hash"] == line["batch_hash"], step


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("unbroken")
    finish(workdir)
    lines = train_lines(workdir)
    assert lines[NUM_STEPS]["loss_nats"] < lines[1]["loss_nats"] - 0.1, (
        "the loss must move, or equality proves nothing"
    )
    assert len({line["batch_hash"] for line in lines.values()}) == NUM_STEPS, "every step has another batch"
    return workdir


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that SIGTERM ended after a few steps: it saved the last one and exited with 75."""
    workdir = tmp_path_factory.mktemp("stopped")
    process = start(workdir)
    wait_until(process, lambda: len(train_lines(workdir)) >= 3)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 75, output
    assert "good save" in output
    assert (workdir / "checkpoints" / str(max(train_lines(workdir)))).is_dir(), (
        "the last step logged was saved"
    )
    return workdir


def test_stopped_then_killed_the_same_command_goes_on(unbroken: Path, stopped: Path, tmp_path: Path) -> None:
    """After a stop the run goes on; SIGKILL after a save loses the steps since; losses to the last bit."""
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    process = start(tmp_path)
    wait_until(process, lambda: max(train_lines(tmp_path), default=0) > 22)
    process.kill()
    output, _ = process.communicate()
    assert "resumed from step" in output
    assert "resumed from step" in finish(tmp_path)
    assert_same_run(tmp_path, unbroken)


@pytest.mark.slow
def test_sigterm_saves_and_the_same_command_goes_on(unbroken: Path, tmp_path: Path) -> None:
    """SIGTERM at an arbitrary step, twice in a row: exit 75 after a good save, then the same losses to the
    last bit.
    """
    for stop_after in (3, 17):
        process = start(tmp_path)
        wait_until(process, lambda after=stop_after: len(train_lines(tmp_path)) >= after)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 75, output
        assert "good save" in output
        assert (tmp_path / "checkpoints" / str(max(train_lines(tmp_path)))).is_dir(), (
            "the last step logged was saved"
        )
    assert "resumed from step" in finish(tmp_path)
    assert_same_run(tmp_path, unbroken)


@pytest.mark.slow
def test_sigkill_after_a_save_loses_only_the_steps_since(unbroken: Path, tmp_path: Path) -> None:
    """SIGKILL after a completed save, twice in a row: the run goes on from that save with the same losses."""
    for saved in (10, 20):
        process = start(tmp_path)
        wait_until(process, lambda step=saved: max(train_lines(tmp_path), default=0) > step + 2)
        process.kill()
        process.communicate()
    finish(tmp_path)
    assert_same_run(tmp_path, unbroken)


def test_a_run_goes_on_over_another_layout(unbroken: Path, stopped: Path, tmp_path: Path) -> None:
    """Stopped on one device, resumed on four by the same command with ZeRO 3: the same data, and losses to
    rounding.
    """
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    sets = ("--set", "layout.zero_stage=3", "--set", "eval.every_steps=None")
    assert "mesh.data=auto: 4, on all 4 devices" in finish(tmp_path, *sets, "--emulate-devices", "4")
    assert [
        (folder / "config.txt").read_text().count("# asked: mesh.data") for folder in (stopped, tmp_path)
    ] == [1, 1]
    got, want = train_lines(tmp_path), train_lines(unbroken)
    assert [got[step]["batch_hash"] for step in got] == [want[step]["batch_hash"] for step in want]
    for step in want:
        # Bf16 sums in other orders.
        assert got[step]["loss_nats"] == pytest.approx(want[step]["loss_nats"], rel=2e-2), step


@pytest.mark.parametrize("goes_on", (False, pytest.param(True, marks=pytest.mark.slow)))
def test_two_processes_stop_together_and_go_on(unbroken: Path, tmp_path: Path, goes_on: bool) -> None:
    """One SIGTERM to launch/local.sh: both processes save the same step and exit 75; the rest is the same
    data.

    Both evaluate the same split, and a set that only this run has.
    """
    script = Path(__file__).parents[2] / "launch" / "local.sh"
    sets = ("mesh.data=2",)
    if goes_on:  # until an evaluation
        sets += (f"eval.sets={{'docs': {{'path': {str(script.parents[1] / 'docs' / '*.md')!r}}}}}",)
    flags = command(tmp_path, *(flag for text in sets for flag in ("--set", text)), "--emulate-devices", "1")[
        3:
    ]
    env = ENVIRON | {"PYTHON": sys.executable}

    def both() -> subprocess.Popen[str]:
        argv = ["bash", str(script), "-n", "2", *flags]
        return subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    process = both()
    wait_until(process, lambda: len(train_lines(tmp_path)) >= 4)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 75, output
    assert (tmp_path / "checkpoints" / str(max(train_lines(tmp_path)))).is_dir()
    if goes_on:
        process = both()
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
    got, want = train_lines(tmp_path), train_lines(unbroken)
    assert [got[step]["batch_hash"] for step in got] == [
        want[step]["batch_hash"] for step in want if step in got
    ]
    assert len(got) == (NUM_STEPS if goes_on else max(got))
    if goes_on:
        evaluated, wanted = (
            [line for line in metrics.read(folder / metrics.FILE) if "eval_tokens" in line]
            for folder in (tmp_path, unbroken)
        )
        assert [line["eval_tokens"] for line in evaluated] == [line["eval_tokens"] for line in wanted]
        assert evaluated[-1]["eval_loss_nats"] == pytest.approx(wanted[-1]["eval_loss_nats"], rel=2e-2)
        assert evaluated[-1]["eval_sets"]["docs"]["documents"] > 5
