"""Goodput ledger: a run's wall time over all attempts by category; goodput is the share of training.

    with Ledger(workdir, start_step=step, started_s=time.time()) as ledger:
        with ledger.during("compile"): ...
        ledger.step_done(step)  # once per step, when its results are ready
        ledger.write(step)      # instead, at every logged line

Within an attempt exactly one category is current and gets the time since the last change, so the categories
sum to the attempt. At every logged line the new seconds are appended to `goodput.jsonl`. A SIGKILL loses the
seconds after the last line; they count as idle, like the time until the next attempt. `goodput.json` has the
sum of all attempts. The categories are those of ml-goodput-measurement, with clock loss added.

Example: an attempt of 100 s (20 s start-up, 80 s computing) is killed; 30 s later a second one runs for 70 s
(10 s start-up, 10 s steps done again, 50 s computing). The newest trace says 10 % exposed communication and
5 % clock loss. Of 200 s, 30 s are idle, 13 s and 6.5 s of the 130 s of computing are lost, and 110.5 s
remain: goodput 55.2 %.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from jtrain.runtime.atomic_io import write_whole
from jtrain.runtime.lease import process_started
from jtrain.telemetry.append_file import AppendFile, WriteTrouble, damaged_text, keep_lines, parse_line

FILE = "goodput.json"
EVENTS = "goodput.jsonl"

type Category = Literal[
    "startup", "compile", "data_wait", "compute", "checkpoint", "evaluation", "redone", "idle"
]
"""Recorded category; `redone` is a step that an earlier attempt had already logged."""

CATEGORIES = (
    "startup", "compile", "data_wait", "compute", "exposed_communication", "clock_loss", "checkpoint",
    "evaluation", "redone", "idle",
)  # fmt: skip
"""Reported categories; the newest trace gives the shares of recorded `compute` for communication and clock
loss."""


@dataclasses.dataclass(frozen=True)
class AttemptTimes:
    """One attempt of a run, as far as it was recorded.

    start_s, end_s: seconds since the epoch.
    seconds: seconds by recorded category.
    """

    start_s: float
    end_s: float
    seconds: dict[str, float]
    last_step: int


def process_start_s() -> float:
    """Start of this process, in seconds since the epoch; without /proc the current time."""
    # Ticks since boot, of which /proc tells; the age is subtracted from the current time.
    ticks = process_started(os.getpid())
    if not ticks.isdecimal():
        return time.time()
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK"))


def read_events(path: Path) -> list[AttemptTimes]:
    """Reads the attempts in `goodput.jsonl`, without the lines that cannot be read."""
    if not path.exists():
        return []
    attempts: list[AttemptTimes] = []
    for line in path.read_bytes().splitlines(keepends=True):
        # A last line without a line end is still being written, or was cut by a kill.
        event = parse_line(line) if line.endswith(b"\n") else None
        if event is None or not is_event(event):
            continue
        if event["event"] == "start":
            attempts.append(AttemptTimes(event["time_s"], event["time_s"], {}, event["step"]))
            continue
        if not attempts:  # the line of the start was damaged
            attempts.append(
                AttemptTimes(event["time_s"] - sum(event["seconds"].values()), event["time_s"], {}, 0)
            )
        last = attempts[-1]
        # Each line has the seconds since the line before it, so they add up.
        seconds = {key: last.seconds.get(key, 0.0) + event["seconds"].get(key, 0.0) for key in CATEGORIES}
        attempts[-1] = AttemptTimes(
            last.start_s, event["time_s"], seconds, max(last.last_step, event["step"])
        )
    return attempts


def is_event(line: dict[str, Any]) -> bool:
    """True if a line of goodput.jsonl is complete and its values have the right types."""

    def is_time(value: Any) -> bool:
        # Not isinstance: True is an int in Python.
        return type(value) in (int, float) and math.isfinite(value)

    seconds = line.get("seconds", {})
    return (
        line.get("event") in ("start", "interval", "end")
        and ("seconds" in line or line["event"] == "start")
        and is_time(line.get("time_s"))
        and type(line.get("step")) is int
        and isinstance(seconds, dict)
        and all(map(is_time, seconds.values()))
    )


def newest_shares(workdir: Path) -> tuple[float, float] | None:
    """Shares of exposed communication and clock loss in the newest breakdown's time without data wait.

    None if there is no readable breakdown.
    """
    files: list[Path] = []
    with contextlib.suppress(OSError):  # the disk is away, or somebody deletes profiles
        files = sorted(
            (workdir / "profile").glob("*/breakdown.json"), key=lambda path: path.stat().st_mtime_ns
        )
    # Newest first; an unreadable one, or one of another version, gives way to the next.
    for path in reversed(files):
        with contextlib.suppress(ValueError, KeyError, TypeError, OSError):
            steps = [(step["duration_s"], step["parts"]) for step in json.loads(path.read_text())["steps"]]
            # Without data wait, because the ledger charges waits to a category of their own.
            running_s = sum(duration_s - (parts["data_wait"] or 0.0) for duration_s, parts in steps)
            lost_s = [
                sum(parts[name] or 0.0 for _, parts in steps) for name in ("exposed_communication", "clocks")
            ]
            if running_s > 0:
                return lost_s[0] / running_s, lost_s[1] / running_s
    return None


def summarise(attempts: list[AttemptTimes], shares: tuple[float, float] | None) -> dict[str, Any]:
    """Contents of goodput.json; the categories sum to `wall_s`, from the first start to the last end."""
    # From the end of an attempt to the start of the next one nothing ran.
    gaps_s = sum(later.start_s - earlier.end_s for earlier, later in itertools.pairwise(attempts))
    seconds_by_category = {
        name: sum(attempt.seconds.get(name, 0.0) for attempt in attempts) for name in CATEGORIES
    }
    seconds_by_category["idle"] += gaps_s
    communication_share, clocks_share = shares or (0.0, 0.0)
    seconds_by_category["exposed_communication"] = communication_share * seconds_by_category["compute"]
    seconds_by_category["clock_loss"] = clocks_share * seconds_by_category["compute"]
    # Last, since the two lines above take their shares of the undivided compute time.
    seconds_by_category["compute"] *= 1.0 - communication_share - clocks_share
    wall_s = attempts[-1].end_s - attempts[0].start_s
    notes = (
        []
        if shares
        else ["no trace yet: compute includes exposed communication and clock loss; SIGUSR1 traces"]
    )
    return {
        "wall_s": wall_s,
        "goodput": seconds_by_category["compute"] / wall_s if wall_s > 0 else 0.0,
        "categories": seconds_by_category,
        "attempts": [
            {
                "start": attempt.start_s,
                "end": attempt.end_s,
                "seconds": {name: seconds for name, seconds in attempt.seconds.items() if seconds},
            }
            for attempt in attempts
        ],
        "notes": notes,
    }


def line(summary: Mapping[str, Any]) -> str:
    """Summary line `goodput 81.2% of 120.0 s in 2 attempts: compute 97.4 s, ...`, largest first."""
    categories = sorted(summary["categories"].items(), key=lambda item: -item[1])
    category_texts = ", ".join(
        f"{name.replace('_', ' ')} {seconds:.1f} s" for name, seconds in categories if seconds >= 0.05
    )
    attempts = len(summary["attempts"])
    attempts_text = f" in {attempts} attempts" if attempts > 1 else ""
    return f"goodput {summary['goodput']:.1%} of {summary['wall_s']:.1f} s{attempts_text}: {category_texts}"


class Ledger:
    """Ledger of one attempt.

    Args:
      workdir: existing folder for goodput.jsonl and goodput.json.
      start_step: the restored step, 0 for a new run.
      started_s: start of the attempt, in seconds since the epoch; the time until now counts as start-up.
      writes: write the files; False in all processes but one.
      say: prints a warning; None for stderr.
    """

    def __init__(
        self,
        workdir: Path,
        *,
        start_step: int,
        started_s: float,
        writes: bool = True,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._workdir = workdir
        num_bad = (
            keep_lines(workdir / EVENTS, lambda event: True if is_event(event) else None) if writes else 0
        )
        if num_bad and say is not None:
            say(damaged_text(workdir / EVENTS, num_bad))
        self._earlier = read_events(workdir / EVENTS)
        # Steps up to here were logged by an earlier attempt: training them again is no progress.
        self._redone_until = max((attempt.last_step for attempt in self._earlier), default=0)
        self._current: Category = "startup"
        self._pending: dict[str, float] = {}
        # Attempts must not overlap even if the wall clock was set back.
        self._start_s = max(started_s, self._earlier[-1].end_s if self._earlier else started_s)
        # Durations are monotonic; only the start of the attempt is wall time.
        self._mark_s = time.monotonic() - max(0.0, time.time() - self._start_s)
        self._attempt = AttemptTimes(self._start_s, self._start_s, {}, start_step)
        self._step = start_step
        self._shares = newest_shares(workdir)
        self._closed = False
        self._file = AppendFile(workdir / EVENTS, say=say) if writes else None
        self._sum_trouble = WriteTrouble(workdir / FILE, say)
        # At once, so that an attempt that is killed before its first line still counts.
        self._append({"event": "start", "time_s": self._start_s, "step": start_step})

    @property
    def current(self) -> Category:
        """Category that time is charged to now."""
        return self._current

    def enter(self, category: Category) -> None:
        """Charges time from now on to `category`."""
        self._charge()
        # After the charge: the time until now belongs to the category that ends.
        self._current = category

    def training(self) -> None:
        """Charges time from now on to steps: `redone` up to earlier attempts' last step, then `compute`."""
        self.enter("redone" if self._step < self._redone_until else "compute")

    @contextlib.contextmanager
    def during(self, category: Category) -> Iterator[None]:
        """Charges the time of the `with` block to `category`, then returns to the category before."""
        previous = self._current
        self.enter(category)
        try:
            yield
        finally:
            self.enter(previous)

    def move(self, seconds: float, category: Category) -> None:
        """Moves `seconds` charged to the current category since the last write to `category`."""
        self._charge()
        moved_s = min(seconds, self._pending.get(self._current, 0.0))
        if moved_s > 0 and self._current != "redone":  # waits within a step done again are part of `redone`
            self._pending[self._current] -= moved_s
            self._pending[category] = self._pending.get(category, 0.0) + moved_s

    def step_done(self, step: int) -> None:
        """Records that the results of `step` are ready; later time belongs to the next step."""
        self._step = step
        if self._current in ("compute", "redone"):
            self.training()
        else:
            self._charge()

    def go_back(self, step: int) -> None:
        """Records that the run goes on from the state after `step`; the steps until here are done again."""
        # Before the step is set back: the steps in between are done again.
        self._redone_until = max(self._redone_until, self._step)
        self._step = step
        self.training()

    def read_shares(self) -> None:
        """Reads the shares of communication and clock loss from the newest breakdown."""
        self._shares = newest_shares(self._workdir)

    def so_far(self) -> dict[str, float]:
        """Seconds of the whole run until now, by category as in goodput.json; writes nothing."""
        self._charge()
        return summarise([*self._earlier, self._until_now(self._step)], self._shares)["categories"]

    def _until_now(self, step: int) -> AttemptTimes:
        """This attempt including the seconds charged since the last write."""
        recorded = self._attempt
        seconds = {
            name: recorded.seconds.get(name, 0.0) + self._pending.get(name, 0.0) for name in CATEGORIES
        }
        # From the categories and not from the wall clock, so that they sum to the attempt exactly.
        end_s = recorded.start_s + sum(seconds.values())
        return AttemptTimes(recorded.start_s, end_s, seconds, max(recorded.last_step, step))

    def write(self, step: int, *, last: bool = False) -> dict[str, Any]:
        """Records that `step` is done, appends its seconds, and writes and returns goodput.json."""
        self.step_done(step)
        # Zeros are left out: most categories have none between two lines.
        pending = {name: seconds for name, seconds in self._pending.items() if seconds}
        self._attempt, self._pending = self._until_now(step), {}
        summary = summarise([*self._earlier, self._attempt], self._shares)
        self._append(
            {
                "event": "end" if last else "interval",
                "time_s": self._attempt.end_s,
                "step": step,
                "seconds": pending,
            }
        )
        if self._file is not None:
            try:
                # durable=False saves 10 ms at every logged line; the file can be computed again from
                # goodput.jsonl.
                write_whole(self._workdir / FILE, json.dumps(summary, indent=1) + "\n", durable=False)
                self._sum_trouble.report_recovery()
            except OSError as error:
                self._sum_trouble.report_failure(error, "and it stays as it was before")
        return summary

    def close(self) -> dict[str, Any] | None:
        """Writes the last entry and returns the contents of goodput.json; returns None if already closed."""
        # Closed twice where a `with` block ends after an explicit close.
        if self._closed:
            return None
        self._closed = True
        summary = self.write(self._step, last=True)
        if self._file is not None:
            self._sum_trouble.report_loss("the newest seconds are not in it")
            self._file.close()
        self._file = None
        return summary

    def abandon(self) -> None:
        """Ends the ledger without writing: the workdir is another run's by now."""
        self._closed, self._file = True, None

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _charge(self) -> None:
        now_s = time.monotonic()
        self._pending[self._current] = self._pending.get(self._current, 0.0) + now_s - self._mark_s
        self._mark_s = now_s

    def _append(self, event: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.append((json.dumps(event) + "\n").encode())
