"""Goodput ledger: divides a run's wall time over all attempts into categories; goodput is the share of
training.

    with Ledger(workdir, start_step=step, started_s=time.time()) as ledger:
        with ledger.during("compile"): ...
        ledger.step_done(step)  # once per step, when its results are ready
        ledger.write(step)      # instead, at every logged line

Within an attempt exactly one category is current and gets the time since the last change, so the categories
sum to the attempt. At every logged line the new seconds are appended to `goodput.jsonl`. A SIGKILL loses the
seconds after the last line; they count as idle, like the time until the next attempt. `goodput.json` has the
sum of all attempts. The categories are those of ml-goodput-measurement, with clock loss added.
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
from jtrain.telemetry.append_file import AppendFile, WriteTrouble, aside_text, keep_lines, parsed

FILE = "goodput.json"
EVENTS = "goodput.jsonl"

type Category = Literal[
    "startup", "compile", "data_wait", "compute", "checkpoint", "evaluation", "redone", "idle"
]
"""Recorded category; `redone` is a step that an earlier attempt had already logged."""

CATEGORIES = (
    "startup", "compile", "data_wait", "compute", "exposed_communication", "clock_loss", "checkpoint", "evaluation",
    "redone", "idle",
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
        event = parsed(line) if line.endswith(b"\n") else None
        if event is None or not _is_event(event):
            continue
        if event["event"] == "start":
            attempts.append(AttemptTimes(event["time_s"], event["time_s"], {}, event["step"]))
            continue
        if not attempts:  # the line of the start was damaged
            attempts.append(
                AttemptTimes(event["time_s"] - sum(event["seconds"].values()), event["time_s"], {}, 0)
            )
        last = attempts[-1]
        seconds = {key: last.seconds.get(key, 0.0) + event["seconds"].get(key, 0.0) for key in CATEGORIES}
        attempts[-1] = AttemptTimes(
            last.start_s, event["time_s"], seconds, max(last.last_step, event["step"])
        )
    return attempts


def _is_event(line: dict[str, Any]) -> bool:
    """True if a line of goodput.jsonl is complete and its values have the right types."""

    def is_time(value: Any) -> bool:
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
    """Shares of exposed communication and clock loss in the step time without data wait, in the newest
    breakdown.

    None if there is no readable breakdown.
    """
    files: list[Path] = []
    with contextlib.suppress(OSError):  # the disk is away, or somebody deletes profiles
        files = sorted(
            (workdir / "profile").glob("*/breakdown.json"), key=lambda path: path.stat().st_mtime_ns
        )
    for path in reversed(files):
        with contextlib.suppress(ValueError, KeyError, TypeError, OSError):
            steps = [(step["duration_s"], step["parts"]) for step in json.loads(path.read_text())["steps"]]
            running_s = sum(duration_s - (parts["data_wait"] or 0.0) for duration_s, parts in steps)
            lost = [
                sum(parts[name] or 0.0 for _, parts in steps) for name in ("exposed_communication", "clocks")
            ]
            if running_s > 0:
                return lost[0] / running_s, lost[1] / running_s
    return None


def summarise(attempts: list[AttemptTimes], shares: tuple[float, float] | None) -> dict[str, Any]:
    """Contents of goodput.json; the categories sum to `wall_s`, the time from the first start to the last
    end.
    """
    gaps_s = sum(after.start_s - before.end_s for before, after in itertools.pairwise(attempts))
    total = {name: sum(attempt.seconds.get(name, 0.0) for attempt in attempts) for name in CATEGORIES}
    total["idle"] += gaps_s
    communication, clocks = shares or (0.0, 0.0)
    total["exposed_communication"] = communication * total["compute"]
    total["clock_loss"] = clocks * total["compute"]
    total["compute"] *= 1.0 - communication - clocks
    wall_s = attempts[-1].end_s - attempts[0].start_s
    notes = (
        []
        if shares
        else ["no trace yet: compute includes exposed communication and clock loss; SIGUSR1 traces"]
    )
    return {
        "wall_s": wall_s,
        "goodput": total["compute"] / wall_s if wall_s > 0 else 0.0,
        "categories": total,
        "attempts": [
            {
                "start": attempt.start_s,
                "end": attempt.end_s,
                "seconds": {k: v for k, v in attempt.seconds.items() if v},
            }
            for attempt in attempts
        ],
        "notes": notes,
    }


def line(summary: Mapping[str, Any]) -> str:
    """Summary line `goodput 81.2 % of 120 s in 2 attempts: compute 97.4 s, ...`, largest first, without
    zeros.
    """
    spent = sorted(summary["categories"].items(), key=lambda item: -item[1])
    shown = ", ".join(
        f"{name.replace('_', ' ')} {seconds:.1f} s" for name, seconds in spent if seconds >= 0.05
    )
    attempts = len(summary["attempts"])
    in_attempts = f" in {attempts} attempts" if attempts > 1 else ""
    return f"goodput {summary['goodput']:.1%} of {summary['wall_s']:.1f} s{in_attempts}: {shown}"


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
        bad = keep_lines(workdir / EVENTS, lambda event: True if _is_event(event) else None) if writes else 0
        if bad and say is not None:
            say(aside_text(workdir / EVENTS, bad))
        self._earlier = read_events(workdir / EVENTS)
        self._redone_until = max((attempt.last_step for attempt in self._earlier), default=0)
        self._current: Category = "startup"
        self._pending: dict[str, float] = {}
        # Attempts must not overlap even if the wall clock was set back.
        self._start_s = max(started_s, self._earlier[-1].end_s if self._earlier else started_s)
        self._mark_s = time.monotonic() - max(0.0, time.time() - self._start_s)
        self._attempt = AttemptTimes(self._start_s, self._start_s, {}, start_step)
        self._step = start_step
        self._shares = newest_shares(workdir)
        self._closed = False
        self._file = AppendFile(workdir / EVENTS, say=say) if writes else None
        self._sum_trouble = WriteTrouble(workdir / FILE, say)
        self._append({"event": "start", "time_s": self._start_s, "step": start_step})

    @property
    def current(self) -> Category:
        """Category that time is charged to now."""
        return self._current

    def enter(self, category: Category) -> None:
        """Charges time from now on to `category`."""
        self._charge()
        self._current = category

    def training(self) -> None:
        """Charges time from now on to steps: `redone` up to the last step of earlier attempts, then
        `compute`.
        """
        self.enter("redone" if self._step < self._redone_until else "compute")

    @contextlib.contextmanager
    def during(self, category: Category) -> Iterator[None]:
        """Charges the time of the `with` block to `category`, then returns to the category before."""
        before = self._current
        self.enter(category)
        try:
            yield
        finally:
            self.enter(before)

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
        before = self._attempt
        seconds = {name: before.seconds.get(name, 0.0) + self._pending.get(name, 0.0) for name in CATEGORIES}
        end_s = before.start_s + sum(seconds.values())
        return AttemptTimes(before.start_s, end_s, seconds, max(before.last_step, step))

    def write(self, step: int, *, last: bool = False) -> dict[str, Any]:
        """Records that `step` is done, appends the new seconds to goodput.jsonl, writes and returns
        goodput.json.
        """
        self.step_done(step)
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
                self._sum_trouble.worked()
            except OSError as error:
                self._sum_trouble.failed(error, "and it stays as it was before")
        return summary

    def close(self) -> dict[str, Any] | None:
        """Writes the last entry and returns the contents of goodput.json; returns None if already closed."""
        if self._closed:
            return None
        self._closed = True
        summary = self.write(self._step, last=True)
        if self._file is not None:
            self._sum_trouble.gave_up("the newest seconds are not in it")
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
