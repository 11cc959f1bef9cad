"""Profiling of real runs: a window set by its steps, one by a signal, and the ledger after a kill."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jtrain.checkpoint import files
from jtrain.telemetry import goodput, metrics

ROOT = Path(__file__).parents[2]


def flags(workdir: Path, *sets: str) -> list[str]:
    shared = (
        "metrics.log_every_steps=1",
        "checkpoint.every_steps=10",
        "eval.every_steps=20",
        "profile.clocks=none",
    )
    asked = [flag for text in (*shared, *sets) for flag in ("--set", text)]
    return ["--config=tiny", "--with", "debug", *asked, "--workdir", str(workdir)]


def start(workdir: Path, *sets: str, devices: int = 1) -> subprocess.Popen[str]:
    mesh = [f"mesh.data={devices}", "layout.zero_stage=3"] if devices > 1 else []
    command = [sys.executable, "-m", "jtrain.launch", *flags(workdir, *mesh, *sets)]
    command += ["--emulate-devices", str(devices)]
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(command, env=os.environ | {"XLA_FLAGS": ""}, **pipes)


def ended(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return output


def train_lines(workdir: Path) -> list[dict[str, Any]]:
    path = workdir / metrics.FILE
    return [line for line in metrics.read(path) if "loss_nats" in line] if path.exists() else []


def wait_for_step(process: subprocess.Popen[str], workdir: Path, step: int) -> None:
    end_s = time.monotonic() + 200
    while len(train_lines(workdir)) < step:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end_s, "the run did not get there"
        time.sleep(0.005)


def ledger(workdir: Path, *, since_s: float) -> dict[str, Any]:
    """Reads goodput.json and checks that its categories sum to its wall time and to that of an outside
    clock.
    """
    file = workdir / goodput.FILE
    summary = json.loads(file.read_text())
    assert list(summary["categories"]) == list(goodput.CATEGORIES)
    assert min(summary["categories"].values()) >= 0
    total_s = sum(summary["categories"].values())
    assert total_s == pytest.approx(summary["wall_s"], abs=1e-4)
    assert total_s == pytest.approx(file.stat().st_mtime - since_s, rel=0.01)
    return summary


def assert_window(folder: Path, steps: list[int], *, num_devices: int) -> None:
    """Checks that a window has a trace of these steps and a report whose parts sum to the steps' times."""
    assert len(list(folder.rglob("*.xplane.pb"))) == 1
    assert "<svg" in (folder / "report.html").read_text()
    breakdown = json.loads((folder / "breakdown.json").read_text())
    assert [step["step"] for step in breakdown["steps"]] == steps
    assert breakdown["num_devices"] == num_devices
    for step in breakdown["steps"]:
        parts = [seconds for seconds in step["parts"].values() if seconds is not None]
        assert sum(parts) == pytest.approx(step["duration_s"], rel=0.01)
        assert len(step["devices"]) == num_devices


@pytest.mark.slow
def test_a_run_traces_its_window_and_accounts_for_its_time(tmp_path: Path) -> None:
    """Four traced steps on four devices have a report, and every second of the run has a category."""
    began_s = time.time()
    output = ended(start(tmp_path, "num_steps=30", "profile.steps=(10,14)", devices=4))
    assert_window(tmp_path / "profile" / "10", [11, 12, 13, 14], num_devices=4)
    assert f"profile after step 10: {tmp_path / 'profile' / '10' / 'report.html'}" in output
    assert "\ngoodput " in output

    # No maker publishes a CPU's peak: the machine's own is measured at the first window, or was before.
    breakdown = json.loads((tmp_path / "profile" / "10" / "breakdown.json").read_text())
    assert breakdown["peaks"]["flops"] > 1e6
    assert breakdown["peaks"]["measured"].endswith("UTC")
    assert None not in [part for step in breakdown["steps"] for part in step["parts"].values()]
    assert [note for note in breakdown["notes"] if "unknown" in note and "clocks" not in note] == []

    summary = ledger(tmp_path, since_s=began_s)
    spent = summary["categories"]
    assert summary["notes"] == []
    for name in (
        "startup",
        "compile",
        "compute",
        "exposed_communication",
        "checkpoint",
        "evaluation",
        "idle",
    ):
        assert spent[name] > 0, name
    assert spent["redone"] == 0
    assert summary["goodput"] == pytest.approx(spent["compute"] / summary["wall_s"])

    lines = train_lines(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 31))
    for line in lines:
        assert list(line) == [field.name for field in dataclasses.fields(metrics.TrainLine)]
        assert line["compile_count"] == 1
        assert line["mfu"] is None
        assert line["step"] <= 10 or 0 < line["measured_peak_share"] < 1
        assert line["straggler_score"] == {"host 0": 1.0}
        assert line["host_rss_mib"] > 100
        assert 0 < line["step_time_p50_ms"] <= line["step_time_p90_ms"] <= line["step_time_p99_ms"]


def ignores(pid: int, number: int) -> bool:
    """True if a process ignores a signal, according to /proc."""
    (mask,) = re.findall(r"^SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.slow
def test_a_signal_opens_a_window_in_a_running_job(tmp_path: Path) -> None:
    """SIGUSR1 traces the five steps that follow; the run goes on to its end."""
    process = start(tmp_path, "num_steps=100")
    # A signal before jax is imported must not end the run.
    while not ignores(process.pid, signal.SIGUSR1):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.001)
    process.send_signal(signal.SIGUSR1)
    wait_for_step(process, tmp_path, 5)
    process.send_signal(signal.SIGUSR1)
    output = ended(process)
    (folder,) = (path for path in (tmp_path / "profile").iterdir() if path.name.isdecimal())
    first = int(folder.name)
    assert 5 <= first < 95
    assert_window(folder, list(range(first + 1, first + 6)), num_devices=1)
    assert "report.html" in output
    assert len(train_lines(tmp_path)) == 100


@pytest.mark.slow
def test_a_killed_run_accounts_for_what_it_lost(tmp_path: Path) -> None:
    """After a SIGKILL some steps past a save, exactly the steps since that save are redone.

    The second between the attempts counts as idle, and so does the time that the kill left unwritten.
    """
    began_s = time.time()
    process = start(tmp_path, "num_steps=200")
    while not (saved := files.steps(tmp_path / "checkpoints")):
        wait_for_step(process, tmp_path, len(train_lines(tmp_path)))
        time.sleep(0.005)
    wait_for_step(process, tmp_path, saved[-1] + 5)
    process.kill()
    process.communicate()
    killed_s = time.time()
    (first,) = goodput.read_events(tmp_path / goodput.EVENTS)
    time.sleep(1.0)
    output = ended(start(tmp_path, "num_steps=200"))

    resumed = int(output.partition("resumed from step ")[2].split()[0])
    assert resumed < first.last_step, "steps must be done again, or this proves little"
    summary = ledger(tmp_path, since_s=began_s)
    assert summary["categories"]["redone"] > 0
    assert summary["categories"]["idle"] > 1.0
    assert summary["attempts"][0]["end"] <= killed_s
    assert summary["attempts"][0]["end"] == pytest.approx(first.end_s)

    events = [json.loads(line) for line in (tmp_path / goodput.EVENTS).read_text().splitlines()]
    second = events[[event["event"] for event in events].index("start", 1) :]
    assert second[0]["step"] == resumed
    again = {event["step"] for event in second[1:] if event["seconds"].get("redone")}
    assert again == set(range(resumed + 1, first.last_step + 1))
    for event in second[1:]:
        assert not (event["step"] in again and event["seconds"].get("compute")), event


@pytest.mark.slow
def test_a_pipelined_run_reports_its_bubble(tmp_path: Path) -> None:
    """The window's page and breakdown.json have every instruction of both workers, and the run prints the
    bubble.
    """
    sets = ("num_steps=8", "mesh.data=2", "mesh.stage=2", "layout.microbatches=4", "pipeline.schedule=zb-h1")
    output = ended(start(tmp_path, *sets, "profile.steps=(3,6)", devices=4))
    folder = tmp_path / "profile" / "3"
    found = json.loads((folder / "breakdown.json").read_text())["pipeline"]
    assert found["workers"] == [0, 1]
    assert [len(rows) for rows in found["measured"]] == [3 * 4, 3 * 4]
    assert [step["step"] for step in found["steps"]] == [4, 5, 6]
    mean = sum(step["bubble"] for step in found["steps"]) / 3
    assert f"profile after step 3: measured bubble {mean:.1%}, " in output
    assert "as it ran, in seconds" in (folder / "report.html").read_text()


@pytest.mark.slow
def test_each_process_shows_its_own_workers(tmp_path: Path) -> None:
    """One stage per process: its report has the instructions of that worker alone."""
    environment = os.environ | {"XLA_FLAGS": "", "PYTHON": sys.executable}
    sets = ("num_steps=8", "mesh.stage=2", "layout.microbatches=4", "profile.steps=(3,6)")
    command = [
        "bash",
        str(ROOT / "launch" / "local.sh"),
        "-n",
        "2",
        *flags(tmp_path, *sets),
        "--emulate-devices",
        "1",
    ]
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = ended(subprocess.Popen(command, env=environment, **pipes))
    for process, folder in enumerate((tmp_path / "profile" / "3", tmp_path / "profile" / "3" / "process-1")):
        found = json.loads((folder / "breakdown.json").read_text())["pipeline"]
        assert found["workers"] == [process]
        assert sorted(op for op, _, _ in found["measured"][0]) == sorted(
            f"{process}{kind}{m}" for kind in "FB" for m in range(4)
        )
        assert f'">worker {process}</text>' in (folder / "report.html").read_text()
    assert "measured bubble" in output


@pytest.mark.slow
def test_a_second_attempt_says_why_it_cannot_trace_a_window_of_the_past(tmp_path: Path) -> None:
    """A run stopped inside its window is resumed there; its next attempt would trace its own compilation."""
    sets = ("num_steps=2000", "profile.steps=(20,1900)")
    process = start(tmp_path, *sets)
    wait_for_step(process, tmp_path, 25)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=240)
    assert process.returncode == 75
    stopped = train_lines(tmp_path)[-1]["step"]
    assert_window(tmp_path / "profile" / "20", list(range(21, stopped + 1)), num_devices=1)
    (tmp_path / "profile" / "20" / "breakdown.json").unlink()

    process = start(tmp_path, *sets)
    wait_for_step(process, tmp_path, stopped + 1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=240)
    said = (
        f"profile.steps=(20, 1900) is not traced: this attempt starts at step {stopped}, and its first "
        "step compiles."
    )
    assert said in output


@pytest.mark.slow
def test_two_processes_open_one_window_together(tmp_path: Path) -> None:
    """Both processes trace their own devices; each host has a straggler score."""
    environment = os.environ | {"XLA_FLAGS": "", "PYTHON": sys.executable}
    sets = ("num_steps=20", "mesh.data=2", "profile.steps=(10,13)")
    command = [
        "bash",
        str(ROOT / "launch" / "local.sh"),
        "-n",
        "2",
        *flags(tmp_path, *sets),
        "--emulate-devices",
        "1",
    ]
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    began_s = time.time()
    ended(subprocess.Popen(command, env=environment, **pipes))
    window = tmp_path / "profile" / "10"
    breakdowns = []
    for folder in (window, window / "process-1"):
        (trace,) = (folder / "plugins").rglob("*.xplane.pb")
        assert trace.stat().st_size > 0
        assert (folder / "report.html").exists()
        breakdowns.append(json.loads((folder / "breakdown.json").read_text()))
    # Process 0 measures the machine that both share, and tells the other.
    assert breakdowns[0]["peaks"] == breakdowns[1]["peaks"]
    kept = Path(os.environ["XDG_CACHE_HOME"], "jtrain", "peaks").iterdir()
    machine = [json.loads(file.read_text())["peaks"]["flops_per_s"] for file in kept]
    assert pytest.approx(2 * breakdowns[0]["peaks"]["flops"]) in machine
    lines = train_lines(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 21))
    for line in lines:
        assert set(line["straggler_score"]) == {"host 0", "host 1"}
        assert max(line["straggler_score"].values()) == 1.0
        assert min(line["straggler_score"].values()) >= 0
    ledger(tmp_path, since_s=began_s)
