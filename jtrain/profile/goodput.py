"""Every second of a run's wall time, over all its attempts, in one category; what is left for training is its goodput.

    with Ledger(workdir, start_step=step, started_s=time.time()) as ledger:
        with ledger.during("compile"): ...
        ledger.step_done(step)  # once per step, when its results are there
        ledger.write(step)      # instead, at every logged line

Within an attempt one category is always current, and the time since the last change belongs to it, so the categories
tile the attempt by construction. What an attempt has done is appended to `goodput.jsonl` at every logged line: a
SIGKILL loses what came after the last one, which then counts as idle, like the time until the next attempt.
`goodput.json` is the sum. The taxonomy is ml-goodput-measurement's, with clocks added.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import time
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

FILE = "goodput.json"
EVENTS = "goodput.jsonl"

type Category = Literal["startup", "compile", "data_wait", "compute", "checkpoint", "evaluation", "redone", "idle"]
"""What is recorded: `redone` is a step that an earlier attempt had logged already."""

CATEGORIES = (
    "startup", "compile", "data_wait", "compute", "exposed_communication", "clock_loss", "checkpoint", "evaluation",
    "redone", "idle",
)  # fmt: skip
"""What is reported: of the recorded `compute`, the newest trace says how much was communication and lost to clocks."""


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One process's life, or what is known of it. start_s, end_s: since the epoch; seconds: by recorded category."""

    start_s: float
    end_s: float
    seconds: dict[str, float]
    last_step: int


def process_start_s() -> float:
    """When this process began, in seconds since the epoch; where the system does not say, now."""
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return time.time()
    ticks = int(stat.read_text().rpartition(")")[2].split()[19])  # field 22: since boot
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def read_events(path: Path) -> list[Attempt]:
    """The attempts in `goodput.jsonl`; a last line cut short is left out."""
    if not path.exists():
        return []
    complete, _, _ = path.read_bytes().rpartition(b"\n")
    attempts: list[Attempt] = []
    for line in complete.splitlines():
        event = json.loads(line)
        if event["event"] == "start":
            attempts.append(Attempt(event["time_s"], event["time_s"], {}, event["step"]))
            continue
        last = attempts[-1]
        seconds = {key: last.seconds.get(key, 0.0) + event["seconds"].get(key, 0.0) for key in CATEGORIES}
        attempts[-1] = Attempt(last.start_s, event["time_s"], seconds, max(last.last_step, event["step"]))
    return attempts


def newest_shares(workdir: Path) -> tuple[float, float] | None:
    """Of the seconds in which steps run: exposed communication's share, and the clocks', in the newest breakdown.

    None where there is no breakdown, or none that can be read.
    """
    files = sorted((workdir / "profile").glob("*/breakdown.json"), key=lambda path: path.stat().st_mtime_ns)
    for path in reversed(files):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            steps = [(step["duration_s"], step["parts"]) for step in json.loads(path.read_text())["steps"]]
            running_s = sum(duration_s - (parts["data_wait"] or 0.0) for duration_s, parts in steps)
            lost = [sum(parts[name] or 0.0 for _, parts in steps) for name in ("exposed_communication", "clocks")]
            if running_s > 0:
                return lost[0] / running_s, lost[1] / running_s
    return None


def summarise(attempts: list[Attempt], shares: tuple[float, float] | None) -> dict[str, Any]:
    """What goodput.json holds; its categories sum to `wall_s`, the time from the first start to the last end."""
    gaps_s = sum(after.start_s - before.end_s for before, after in itertools.pairwise(attempts))
    total = {name: sum(attempt.seconds.get(name, 0.0) for attempt in attempts) for name in CATEGORIES}
    total["idle"] += gaps_s
    communication, clocks = shares or (0.0, 0.0)
    total["exposed_communication"] = communication * total["compute"]
    total["clock_loss"] = clocks * total["compute"]
    total["compute"] *= 1.0 - communication - clocks
    wall_s = attempts[-1].end_s - attempts[0].start_s
    notes = [] if shares else ["no trace yet: exposed communication and clock loss are still in compute; SIGUSR1 asks"]
    return {
        "wall_s": wall_s,
        "goodput": total["compute"] / wall_s if wall_s > 0 else 0.0,
        "categories": total,
        "attempts": [
            {"start": attempt.start_s, "end": attempt.end_s, "seconds": {k: v for k, v in attempt.seconds.items() if v}}
            for attempt in attempts
        ],
        "notes": notes,
    }


def line(summary: Mapping[str, Any]) -> str:
    """`goodput 81.2 % of 120 s in 2 attempts: compute 97.4 s, compile 10.1 s, ...`: the largest first, no zeros."""
    spent = sorted(summary["categories"].items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name.replace('_', ' ')} {seconds:.1f} s" for name, seconds in spent if seconds >= 0.05)
    attempts = len(summary["attempts"])
    in_attempts = f" in {attempts} attempts" if attempts > 1 else ""
    return f"goodput {summary['goodput']:.1%} of {summary['wall_s']:.1f} s{in_attempts}: {shown}"


class Ledger:
    """One attempt's entries. Only the process with `writes` leaves files; in the others every method only counts.

    Args:
      workdir: there; gets goodput.jsonl and goodput.json.
      start_step: the step restored from, 0 for a new run.
      started_s: when the attempt began, in seconds since the epoch; the time until now counts as start-up.
    """

    def __init__(self, workdir: Path, *, start_step: int, started_s: float, writes: bool = True) -> None:
        self._workdir = workdir
        self._earlier = read_events(workdir / EVENTS)
        self._redone_until = max((attempt.last_step for attempt in self._earlier), default=0)
        self._current: Category = "startup"
        self._pending: dict[str, float] = {}
        # A clock that was set back must not make attempts overlap.
        self._start_s = max(started_s, self._earlier[-1].end_s if self._earlier else started_s)
        self._mark_s = time.monotonic() - max(0.0, time.time() - self._start_s)
        self._attempt = Attempt(self._start_s, self._start_s, {}, start_step)
        self._step = start_step
        self._shares = newest_shares(workdir)
        self._closed = False
        self._file: int | None = None
        if writes:
            self._file = os.open(workdir / EVENTS, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":  # a kill or a full disk cut the last line short
                complete, _, _ = (workdir / EVENTS).read_bytes().rpartition(b"\n")
                os.ftruncate(self._file, len(complete) + 1 if complete else 0)
            self._append({"event": "start", "time_s": self._start_s, "step": start_step})

    @property
    def current(self) -> Category:
        """The category that time counts for now."""
        return self._current

    def enter(self, category: Category) -> None:
        """From here on time counts as `category`."""
        self._charge()
        self._current = category

    def training(self) -> None:
        """From here on time counts as steps: `redone` while an earlier attempt had come further, else `compute`."""
        self.enter("redone" if self._step < self._redone_until else "compute")

    @contextlib.contextmanager
    def during(self, category: Category) -> Iterator[None]:
        """Around what is `category`; after it, what was current before is again."""
        before = self._current
        self.enter(category)
        try:
            yield
        finally:
            self.enter(before)

    def move(self, seconds: float, category: Category) -> None:
        """Of the time that was charged to the current category since the last write, `seconds` were `category`."""
        self._charge()
        moved = min(seconds, self._pending.get(self._current, 0.0))
        if moved > 0 and self._current != "redone":  # what a step waits for is done again with it
            self._pending[self._current] -= moved
            self._pending[category] = self._pending.get(category, 0.0) + moved

    def step_done(self, step: int) -> None:
        """The results of `step` are there: what follows is the next one."""
        self._step = step
        if self._current in ("compute", "redone"):
            self.training()
        else:
            self._charge()

    def read_shares(self) -> None:
        """Looks for a new breakdown."""
        self._shares = newest_shares(self._workdir)

    def so_far(self) -> dict[str, float]:
        """Seconds of the whole run by category until now, as goodput.json would hold them; writes nothing."""
        self._charge()
        return summarise([*self._earlier, self._until_now(self._step)], self._shares)["categories"]

    def _until_now(self, step: int) -> Attempt:
        """This attempt with what was charged since the last write."""
        before = self._attempt
        seconds = {name: before.seconds.get(name, 0.0) + self._pending.get(name, 0.0) for name in CATEGORIES}
        return Attempt(before.start_s, before.start_s + sum(seconds.values()), seconds, max(before.last_step, step))

    def write(self, step: int, *, last: bool = False) -> dict[str, Any]:
        """`step` is done: appends what was charged since the last time, writes goodput.json, returns what it holds."""
        self.step_done(step)
        pending = {name: seconds for name, seconds in self._pending.items() if seconds}
        self._attempt, self._pending = self._until_now(step), {}
        summary = summarise([*self._earlier, self._attempt], self._shares)
        self._append(
            {"event": "end" if last else "interval", "time_s": self._attempt.end_s, "step": step, "seconds": pending}
        )
        if self._file is not None:
            # Renamed when whole, but not forced to the disk: 10 ms, at every logged line, for a file that is a sum.
            new = self._workdir / f"{FILE}.new"
            new.write_text(json.dumps(summary, indent=1) + "\n")
            new.replace(self._workdir / FILE)
        return summary

    def close(self) -> dict[str, Any] | None:
        """The last entry; returns the sum. Once closed, None."""
        if self._closed:
            return None
        self._closed = True
        summary = self.write(self._step, last=True)
        if self._file is not None:
            os.close(self._file)
        self._file = None
        return summary

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self.close()

    def _charge(self) -> None:
        now_s = time.monotonic()
        self._pending[self._current] = self._pending.get(self._current, 0.0) + now_s - self._mark_s
        self._mark_s = now_s

    def _append(self, event: dict[str, Any]) -> None:
        """One call, so that a kill leaves the line whole or absent."""
        if self._file is not None:
            os.write(self._file, (json.dumps(event) + "\n").encode())
