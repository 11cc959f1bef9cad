"""Goodput ledger: every second counts once, however the run ends."""

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from jtrain.telemetry import goodput
from jtrain.telemetry.goodput import (
    CATEGORIES,
    EVENTS,
    FILE,
    Ledger,
    line,
    newest_shares,
    process_start_s,
    read_events,
)
from tests.processes import program, run_together


class Clock:
    """Fake clock that a test advances."""

    def __init__(self, patch: pytest.MonkeyPatch, epoch_s: float = 1_000_000.0) -> None:
        self.epoch_s = epoch_s
        self.monotonic_s = 50.0
        patch.setattr(goodput.time, "time", lambda: self.epoch_s)
        patch.setattr(goodput.time, "monotonic", lambda: self.monotonic_s)

    def passes(self, seconds: float) -> None:
        self.epoch_s += seconds
        self.monotonic_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def written(workdir: Path) -> dict[str, Any]:
    return json.loads((workdir / FILE).read_text())


def spent(summary: dict[str, Any]) -> dict[str, Any]:
    assert list(summary["categories"]) == list(CATEGORIES)
    assert sum(summary["categories"].values()) == pytest.approx(summary["wall_s"], abs=1e-5)
    return {name: pytest.approx(seconds) for name, seconds in summary["categories"].items() if seconds}


def steps(ledger: Ledger, clock: Clock, first: int, last: int, *, log_every: int = 1) -> None:
    """Runs steps of 2 s."""
    ledger.training()
    for step in range(first, last + 1):
        clock.passes(2.0)
        ledger.step_done(step)
        if step % log_every == 0:
            ledger.write(step)


@pytest.mark.smoke
def test_every_second_is_in_one_category(tmp_path: Path, clock: Clock) -> None:
    """Start-up 5 s, compile 7 s (1 s of it before), four steps of 2 s, a save of 3 s, a batch 0.5 s late."""
    ledger = Ledger(tmp_path, start_step=0, started_s=clock.epoch_s - 5.0)
    ledger.move(1.0, "compile")
    with ledger.during("compile"):
        clock.passes(6.0)
    steps(ledger, clock, 1, 4)
    ledger.move(0.5, "data_wait")  # nothing was charged since the line of step 4, so nothing moves
    clock.passes(2.0)
    ledger.move(0.5, "data_wait")
    with ledger.during("checkpoint"):
        clock.passes(3.0)
    with ledger.during("evaluation"):
        clock.passes(1.0)
    so_far = ledger.so_far()
    summary = ledger.close()
    assert summary is not None
    assert so_far == summary["categories"]
    assert summary == written(tmp_path)
    want = {
        "startup": 4.0,
        "compile": 7.0,
        "compute": 9.5,
        "data_wait": 0.5,
        "checkpoint": 3.0,
        "evaluation": 1.0,
    }
    assert spent(summary) == want
    assert summary["wall_s"] == pytest.approx(25.0)
    assert summary["goodput"] == pytest.approx(9.5 / 25.0)
    assert ledger.close() is None
    text = (
        "goodput 38.0% of 25.0 s: compute 9.5 s, compile 7.0 s, startup 4.0 s, checkpoint 3.0 s, "
        "evaluation 1.0 s, "
    )
    assert line(summary) == text + "data wait 0.5 s"


def test_steps_done_again_and_the_time_between_attempts(tmp_path: Path, clock: Clock) -> None:
    """Killed 1 s after the line of step 7 and restarted 10 s later from step 4: steps 5 to 7 are redone, 8 is
    not.
    """
    killed = Ledger(tmp_path, start_step=0, started_s=clock.epoch_s)
    steps(killed, clock, 1, 7)
    clock.passes(1.0)  # nobody wrote this second down
    del killed
    clock.passes(10.0)
    ledger = Ledger(tmp_path, start_step=4, started_s=clock.epoch_s)
    clock.passes(3.0)
    steps(ledger, clock, 5, 9)
    summary = ledger.close()
    assert summary is not None
    want = {"startup": 3.0, "compute": 14.0 + 4.0, "redone": 6.0, "idle": 11.0}
    assert spent(summary) == want
    assert [attempt["end"] - attempt["start"] for attempt in summary["attempts"]] == [14.0, 13.0]
    assert summary["attempts"][1]["seconds"] == {"startup": 3.0, "compute": 4.0, "redone": 6.0}
    assert "in 2 attempts" in line(summary)


def test_no_category_ever_shrinks(tmp_path: Path, clock: Clock) -> None:
    """Categories never shrink over the lines of three killed attempts, so charts of them never fall."""
    draw = random.Random(0)
    before = dict.fromkeys(CATEGORIES, 0.0)
    for attempt in range(3):
        ledger = Ledger(tmp_path, start_step=10 * attempt, started_s=clock.epoch_s)
        ledger.training()
        for step in range(10 * attempt + 1, 10 * attempt + 16):
            clock.passes(draw.uniform(0.1, 3.0))
            with ledger.during(draw.choice(["checkpoint", "evaluation", "idle"])):
                clock.passes(draw.uniform(0.0, 1.0))
            ledger.step_done(step)
            now = ledger.write(step)
            spent(now)
            assert all(now["categories"][name] >= before[name] for name in CATEGORIES)
            before = now["categories"]
        clock.passes(5.0)
    assert before["redone"] > 0, "steps were done again, or monotony proves little"


def test_a_clock_that_was_set_back_makes_no_attempts_overlap(tmp_path: Path, clock: Clock) -> None:
    """A second attempt that seems to start an hour before the first ended is counted from that end."""
    first = Ledger(tmp_path, start_step=0, started_s=clock.epoch_s)
    steps(first, clock, 1, 3)
    first.close()
    clock.epoch_s -= 3600.0
    second = Ledger(tmp_path, start_step=3, started_s=clock.epoch_s - 2.0)
    steps(second, clock, 4, 5)
    summary = second.close()
    assert summary is not None
    assert spent(summary) == {"compute": 10.0}
    assert summary["attempts"][1]["start"] == summary["attempts"][0]["end"]


def test_a_trace_says_what_of_compute_was_communication_and_clocks(tmp_path: Path, clock: Clock) -> None:
    """Its shares hold for all steps: 8 s of compute, a quarter exposed, a tenth lost; a broken file is
    skipped.
    """
    ledger = Ledger(tmp_path, start_step=0, started_s=clock.epoch_s)
    steps(ledger, clock, 1, 4)
    assert "no trace yet" in written(tmp_path)["notes"][0]
    parts = {"theoretical": None, "data_wait": 0.5, "exposed_communication": 0.5, "clocks": 0.2, "idle": 1.3}
    for folder, text in (
        ("1", json.dumps({"steps": [{"duration_s": 2.5, "parts": parts}] * 2})),
        ("3", '{"steps": ['),
    ):
        (tmp_path / "profile" / folder).mkdir(parents=True)
        (tmp_path / "profile" / folder / "breakdown.json").write_text(text)
    assert newest_shares(tmp_path) == pytest.approx((0.25, 0.1))
    ledger.read_shares()
    summary = ledger.close()
    assert summary is not None
    assert spent(summary) == {"compute": 0.65 * 8.0, "exposed_communication": 2.0, "clock_loss": 0.8}
    assert summary["notes"] == []


def test_half_a_line_of_a_full_disk_is_dropped(tmp_path: Path, clock: Clock) -> None:
    """The next attempt removes the half line, and the file is valid again."""
    first = Ledger(tmp_path, start_step=0, started_s=clock.epoch_s)
    steps(first, clock, 1, 2)
    with open(tmp_path / EVENTS, "a") as file:
        file.write('{"event": "interv')
    second = Ledger(tmp_path, start_step=0, started_s=clock.epoch_s)
    steps(second, clock, 1, 2)
    second.close()
    events = [json.loads(text) for text in (tmp_path / EVENTS).read_text().splitlines()]
    assert [event["event"] for event in events] == ["start", "interval", "interval"] * 2 + ["end"]
    assert [attempt.last_step for attempt in read_events(tmp_path / EVENTS)] == [2, 2]


def test_other_processes_than_the_first_write_nothing(tmp_path: Path, clock: Clock) -> None:
    """Their ledgers count, but write no file."""
    ledger = Ledger(tmp_path, start_step=0, started_s=clock.epoch_s, writes=False)
    steps(ledger, clock, 1, 2)
    assert ledger.close() is not None
    assert list(tmp_path.iterdir()) == []


def test_sigkill_loses_at_most_one_log_interval(tmp_path: Path) -> None:
    """Whenever the kill comes, every written line is there and both files are valid."""
    process = subprocess.Popen(
        program(__file__, "keep_a_ledger", tmp_path), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for _ in range(20):
        process.stdout.readline()
    time.sleep(random.Random(0).uniform(0, 0.05))
    os.kill(process.pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=300)
    logged = max(int(text) for text in ["100", *output.split()])
    (attempt,) = read_events(tmp_path / EVENTS)
    assert attempt.last_step in (logged, logged + 5)
    summary = written(tmp_path)
    assert sum(summary["categories"].values()) == pytest.approx(summary["wall_s"], abs=1e-5)
    assert attempt.end_s - summary["attempts"][0]["end"] >= 0.0
    assert attempt.seconds["compute"] > 0.002 * attempt.last_step


def test_a_process_knows_when_it_began() -> None:
    """The start is exact to 0.01 s and before the interpreter's start, compared with the parent's clock."""
    before_s = time.time()
    [ended] = run_together([program(__file__, "print_start")], [{}])
    began_s = float(ended.output)
    assert before_s - 0.02 <= began_s <= time.time()
    assert process_start_s() < before_s
