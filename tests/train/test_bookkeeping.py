"""Whole runs whose disk fills up, whose files are damaged, whose output nobody reads and whose workdir is
contested.
"""

import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jtrain.config import tree
from jtrain.config.load import load_config
from jtrain.config.run import build_run
from jtrain.errors import UserError
from jtrain.runtime.workdir_lock import WorkdirLock
from jtrain.telemetry import goodput, metrics
from jtrain.train import attempt
from tests.ports import free_port
from tests.processes import program
from tests.small_disk import small_disk
from tests.telemetry.screens import screen
from tests.telemetry.test_metrics import Terminal


def train(workdir: Path, *sets: str) -> int:
    sets = ("mesh.data=8", "metrics.log_every_steps=1", "num_steps=9", *sets)
    config = load_config("tiny", ["debug"], sets)
    return attempt.train(build_run(config), workdir=workdir, config_text=tree.flat(config))


def steps(workdir: Path) -> list[int]:
    return [line["step"] for line in metrics.read(workdir / metrics.FILE) if "loss_nats" in line]


@pytest.mark.slow
def test_a_terminal_shows_a_text_by_the_model_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On eight devices, after the loss and before the files."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    assert train(tmp_path / "run") == 0
    rows = screen(terminal.getvalue(), 80)
    (header,) = (i for i, row in enumerate(rows) if row.startswith("a text by the model, in "))
    assert rows[header - 1].startswith("loss ")
    assert rows[header + 1].startswith("  ")
    assert any(row.startswith("in ") for row in rows[header + 2 :])


@pytest.mark.slow
def test_a_disk_full_between_saves_costs_nothing_once_it_has_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every line is there, with one warning per file; under umask 077 no file is readable by others; the
    alert came.
    """
    before = os.umask(0o077)
    try:
        with small_disk(tmp_path / "disk", 32 << 10) as disk:
            workdir = disk / "run"
            alerts = f"alerts.file={tmp_path / 'alerts.jsonl'}"
            between = ("eval.every_steps=3", "checkpoint.every_steps=None")
            full = "callbacks=('tests.train.disk_faults:full_from_2_to_8',)"
            assert train(workdir, full, alerts, "alerts.disk_free_gib=0.001", *between) == 0
            assert steps(workdir) == list(range(1, 10))
            (attempt,) = goodput.read_events(workdir / goodput.EVENTS)
            assert attempt.last_step == 9
            wide = [path for path in workdir.rglob("*") if stat.S_IMODE(path.stat().st_mode) & 0o077]
            assert wide == []
    finally:
        os.umask(before)
    said = capsys.readouterr().out
    warned = re.findall(r"warning: \S*/run/(\S+) cannot be written \(No space left", said)
    assert {metrics.FILE, goodput.FILE} <= set(warned), "small lines may fit into the last page of a file"
    assert len(set(warned)) == len(warned), "one warning per file, not per step"
    again = re.findall(r"/run/(\S+) is written again: (?:all records are in it|nothing is lost)", said)
    assert sorted(again) == sorted(warned)
    (alert,) = [json.loads(line) for line in (tmp_path / "alerts.jsonl").read_text().splitlines()]
    assert (alert["kind"], alert["step"]) == ("disk", 3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Orbax's threads
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_disk_full_at_a_save_resumes_with_its_whole_history(tmp_path: Path) -> None:
    """The run ends or goes on as saves decide; after room is made the same command gives an unbroken run's
    lines.
    """
    saves = "checkpoint.every_steps=2"
    assert train(tmp_path / "whole", saves) == 0
    with small_disk(tmp_path / "disk", 32 << 10) as disk:
        workdir = disk / "run"
        try:
            train(workdir, saves, "callbacks=('tests.train.disk_faults:full_from_3',)")
        except (UserError, OSError) as error:
            assert "No space left" in str(error) or "free on this disk" in str(error)  # noqa: PT017
        (disk / "filler").unlink()
        assert train(workdir, saves) == 0

        def history(folder: Path) -> list[tuple[int, float, str]]:
            lines = [line for line in metrics.read(folder / metrics.FILE) if "loss_nats" in line]
            return [(line["step"], line["loss_nats"], line["batch_hash"]) for line in lines]

        assert history(workdir) == history(tmp_path / "whole")
        assert len(history(workdir)) == 9


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[list["subprocess.Popen[str]"]]:
    """Processes that end with the test."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def launch(workdir: Path, num_steps: int, machine: str = "", **environment: str) -> "subprocess.Popen[str]":
    sets = (
        f"num_steps={num_steps}",
        "metrics.log_every_steps=1",
        "checkpoint.every_steps=20",
        "eval.every_steps=None",
    )
    sets += (f"mesh.data={environment.get('JTRAIN_NUM_PROCESSES', 1)}",)
    if "STOOD_STILL" in environment:
        sets += ("callbacks=('tests.train.process_faults:StandstillAt22',)",)
    arguments = [text for one in sets for text in ("--set", one)]
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": ""}
    return subprocess.Popen(
        program(
            __file__,
            "launch_on",
            machine,
            "--config=tiny",
            "--with=debug",
            "--workdir",
            workdir,
            *arguments,
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | paths | environment,
    )


def read_until(process: "subprocess.Popen[str]", text: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"ended without {text!r}: {process.communicate()[1]}")


@pytest.mark.slow
def test_a_contested_killed_and_damaged_workdir_whose_output_nobody_reads(
    tmp_path: Path, launched: list["subprocess.Popen[str]"]
) -> None:
    """A second run is refused; after a SIGKILL and garbage in two files the third one is complete, without a
    reader.
    """
    workdir = tmp_path / "run"
    first = launch(workdir, 200)
    launched.append(first)
    read_until(first, "step 25/200")
    first.send_signal(signal.SIGSTOP)
    second = launch(workdir, 200)
    launched.append(second)
    _, error = second.communicate(timeout=600)
    assert second.returncode == 2, error
    assert f"is in use by another run: process {first.pid} on host" in error
    assert "Traceback" not in error
    first.kill()
    first.wait()
    for name in (metrics.FILE, goodput.EVENTS):
        lines = (workdir / name).read_bytes().splitlines(keepends=True)
        garbage = [lines[0], b"\x00\xff garbage\n", *lines[1:], b'{"step": 12, "lo']
        (workdir / name).write_bytes(b"".join(garbage))
    third = launch(workdir, 200)
    launched.append(third)
    assert f"from process {first.pid} on host" in read_until(third, "took over the lock")
    read_until(
        third, f"2 lines of {workdir / metrics.FILE} could not be read; moved to metrics.jsonl.damaged"
    )
    assert third.stdout is not None
    third.stdout.close()
    assert third.stderr is not None
    error = third.stderr.read()
    assert third.wait(timeout=600) == 0, error
    assert "stdout cannot be written (Broken pipe): going on without it" in error
    assert steps(workdir) == list(range(1, 201))
    assert (workdir / "checkpoints" / "200").is_dir()
    assert (workdir / "goodput.jsonl.damaged").exists()


@pytest.mark.slow
def test_a_run_that_lost_its_workdir_ends_without_a_trace_in_it(
    tmp_path: Path, launched: list["subprocess.Popen[str]"]
) -> None:
    """It stood still for longer than the bound, and a run on another host went on; it exits 2 and writes
    nothing.
    """
    workdir = tmp_path / "run"
    # From within, between two writes and not in the midst of one.
    once = str(tmp_path / "stood_still")
    first = launch(workdir, 60, machine="host one", STOOD_STILL=once)
    launched.append(first)
    _, status = os.waitpid(first.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    second = launch(workdir, 60, machine="host two", STOOD_STILL=once)
    launched.append(second)
    output, error = second.communicate(timeout=600)
    assert second.returncode == 0, error
    assert "which has not touched it for" in output
    before = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    first.send_signal(signal.SIGCONT)
    _, error = first.communicate(timeout=600)
    assert first.returncode == 2, error
    assert f"taken over by process {second.pid} on host" in error
    assert "Traceback" not in error
    after = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert changed <= {path for path in changed if "samples" in path.parts or "checkpoints" in path.parts}
    assert steps(workdir) == list(range(1, 61))


@pytest.mark.slow
def test_all_processes_end_together_where_the_workdir_is_in_use(
    tmp_path: Path, launched: list["subprocess.Popen[str]"]
) -> None:
    """Process 0 says by whom; the other one, which does not look, ends with it and not in a collective."""
    coordinator = f"127.0.0.1:{free_port()}"
    with WorkdirLock(tmp_path / "run", say=print):
        for process in range(2):
            variables = {"JTRAIN_COORDINATOR": coordinator, "JTRAIN_NUM_PROCESSES": "2"}
            launched.append(launch(tmp_path / "run", 5, **variables, JTRAIN_PROCESS_ID=str(process)))
        errors = [process.communicate(timeout=600)[1] for process in launched]
    assert [process.returncode for process in launched] == [2, 2], errors
    assert f"is in use by another run: process {os.getpid()} on host" in errors[0]
    assert "error: process 0 could not lock --workdir" in errors[1]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"], "nothing else was written"
