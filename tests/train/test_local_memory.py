"""Whole runs that are killed go on from local memory, with the losses of the unbroken run."""

import contextlib
import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from jtrain.checkpoint import Checkpoints, CheckpointSpec, files
from jtrain.errors import UserError
from jtrain.train import attempt
from jtrain.train.setup import Setup
from tests.ports import free_port
from tests.train.test_resume import (
    ENVIRON,
    NUM_STEPS,
    assert_same_run,
    command,
    finish,
    start,
    train_lines,
)


def flags(memory: Path, *, every: int = 3) -> list[str]:
    """Options of a run that keeps its state in local memory, and saves no checkpoint before its end."""
    sets = (f"checkpoint.local_every_steps={every}", f"checkpoint.local_dir={str(memory)!r}")
    return [flag for text in (*sets, "checkpoint.every_steps=1000") for flag in ("--set", text)]


def steps_kept(memory: Path) -> dict[str, int]:
    """Newest step that each process has kept."""
    found: dict[str, int] = {}
    for file in memory.glob("*/process-*/*/manifest.json"):
        process = file.parents[1].name
        try:
            found[process] = max(json.loads(file.read_bytes())["step"], found.get(process, 0))
        except (FileNotFoundError, ValueError):
            continue  # written over meanwhile
    return found


def wait_until(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    """Waits as long as the process runs; pytest's own limit ends a run that hangs."""
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)


@pytest.mark.slow
def test_a_killed_run_goes_on_from_local_memory(tmp_path: Path) -> None:
    """Three kills without any checkpoint: each restart goes on at most one interval back, and nothing is left
    behind.

    The unbroken run keeps nothing: what is kept in local memory does not change what is computed.
    """
    finish(tmp_path / "unbroken")
    memory, workdir = tmp_path / "memory", tmp_path / "run"
    memory.mkdir()
    for reached in (5, 14, 26):
        process = start(workdir, *flags(memory))
        wait_until(process, lambda reached=reached: max(train_lines(workdir), default=0) >= reached)
        process.send_signal(signal.SIGKILL)
        output = process.communicate()[0]
        kept = steps_kept(memory)["process-0"]
        assert max(train_lines(workdir)) - kept <= 2 * 3, (
            "two intervals, if the kill was in the midst of a copy"
        )
        assert ("was in local memory" in output) == (reached > 5), output
    output = finish(workdir, *flags(memory))
    assert f"the state of step {kept} was in local memory" in output
    assert f"resumed from step {kept}" in output
    assert_same_run(workdir, tmp_path / "unbroken")
    assert list(memory.iterdir()) == []


@pytest.mark.slow
def test_two_processes_go_on_from_local_memory(tmp_path: Path) -> None:
    """Both are killed, and the folder of one is lost: its copy serves, and the losses are those of an
    unbroken run.
    """
    options = ["--emulate-devices", "2", "--with", "zero3", "--set", "mesh.data=4"]

    def launch(workdir: Path, *more: str) -> list[subprocess.Popen[str]]:
        address = f"localhost:{free_port()}"
        common = ENVIRON | {"JTRAIN_COORDINATOR": address, "JTRAIN_NUM_PROCESSES": "2"}
        words = command(workdir, *more, *options)
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return [
            subprocess.Popen(words, env=common | {"JTRAIN_PROCESS_ID": str(index)}, text=True, **pipes)
            for index in range(2)
        ]

    def finished(processes: list[subprocess.Popen[str]]) -> str:
        outputs = [process.communicate(timeout=1200)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], outputs
        return outputs[0]

    memory, workdir = tmp_path / "memory", tmp_path / "run"
    memory.mkdir()
    finished(launch(tmp_path / "unbroken"))
    processes = launch(workdir, *flags(memory))
    wait_until(processes[0], lambda: min(steps_kept(memory).values(), default=0) >= 9)
    for process in processes:
        process.kill()
    for process in processes:
        process.communicate()
    [lost] = memory.glob("*/process-1")
    shutil.rmtree(lost)
    output = finished(launch(workdir, *flags(memory)))
    assert "was in local memory" in output, output
    assert_same_run(workdir, tmp_path / "unbroken")
    assert len(train_lines(workdir)) == NUM_STEPS
    assert list(memory.iterdir()) == []


def test_local_memory_asks_where_the_checkpoints_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not in the local folder of a run in a store, which holds none."""
    questions: list[Callable[[], int]] = []

    def opened(*_: object, newest_checkpoint: Callable[[], int], say: object) -> Any:
        questions.append(newest_checkpoint)
        return contextlib.nullcontext()

    monkeypatch.setattr(attempt, "LocalMemory", opened)
    monkeypatch.setattr(attempt, "abstract_state", lambda *_: None)
    monkeypatch.setattr(attempt, "without_base", lambda *_: None)
    setup: Any = mock.Mock(spec=Setup, job=mock.Mock(), optimizer=None, mesh=None)
    setup.run = mock.Mock(checkpoint=CheckpointSpec(local_every_steps=2))
    with Checkpoints(tmp_path / "home", CheckpointSpec()) as checkpoints:
        attempt.open_local_memory(setup, tmp_path / "cache", checkpoints, "")
        [newest] = questions
        assert newest() == 0
        (checkpoints.folder / "30").mkdir(parents=True)
        (checkpoints.folder / "30" / files.MANIFEST).touch()
        assert newest() == 30


def test_an_interval_below_one_is_refused() -> None:
    with pytest.raises(UserError, match=r"local_every_steps=0 must be at least 1 or None to keep no state"):
        CheckpointSpec(local_every_steps=0)
