"""A run as the files of its workdir tell it, kept up to date as they grow. No jax; nothing is written."""

import ast
import contextlib
import dataclasses
import datetime
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jtrain.checkpoint import files
from jtrain.config import tree
from jtrain.dashboard.growing_file import Columns, GrowingFile
from jtrain.errors import UserError
from jtrain.profile.analysis.figures import PARTS
from jtrain.profile.trace_dir import FOLDER as PROFILE
from jtrain.runtime.lease import Rival
from jtrain.runtime.lease_stores import FolderStore
from jtrain.runtime.stores import in_store, run_folder
from jtrain.runtime.workdir_lock import FOLDER as LOCK
from jtrain.telemetry import goodput, metrics

_SIGNS = (LOCK, "config.txt", metrics.FILE)
"""What a folder has as soon as a run has begun in it."""

DRAWN = ("loss_nats", "tokens_per_s", "step_time_ms", "clock_mhz", "power_w", "data_tokens", "data_planned")
"""Fields of a train step's line that the page draws; others are kept of the newest line alone."""


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happened to a run besides its steps; `time` is as its file has it, or empty."""

    step: int
    kind: str
    text: str
    time: str = ""


class MetricsFile(GrowingFile):
    """metrics.jsonl: the newest line of each kind, empty before the first, and columns of all."""

    def __init__(self, workdir: Path) -> None:
        super().__init__(workdir / metrics.FILE)

    def clear(self) -> None:
        self.newest: dict[str, Any] = {}
        self.newest_evaluation: dict[str, Any] = {}
        self.columns, self.evaluations = Columns(*DRAWN), Columns("eval_loss_nats", "set")

    def add(self, entry: dict[str, Any]) -> None:
        if not metrics.has_step(entry):
            return
        if "loss_nats" in entry:
            self.newest = entry
            self.columns.add(entry["step"], entry)
        elif "eval_sets" in entry:
            self.newest_evaluation = entry
            losses = {name: result["loss_nats"] for name, result in entry["eval_sets"].items()}
            self.evaluations.add(entry["step"], entry | {"set": losses})


class WallFile(GrowingFile):
    """goodput.jsonl: the attempts, and the seconds of each interval by category."""

    def __init__(self, workdir: Path) -> None:
        super().__init__(workdir / goodput.EVENTS)

    def clear(self) -> None:
        self.attempts: list[Event] = []
        self.columns = Columns(*goodput.CATEGORIES)
        self.last: dict[str, Any] = {}

    def add(self, entry: dict[str, Any]) -> None:
        if not goodput.is_event(entry):
            return
        seconds = entry.get("seconds", {})
        if entry["event"] == "start":
            # Nothing ran since the end of the attempt before.
            seconds = {"idle": entry["time_s"] - self.last.get("time_s", entry["time_s"])}
            text = f"attempt {len(self.attempts) + 1} goes on, {seconds['idle']:.0f} s after the one before"
            self.attempts.append(Event(entry["step"], "restart", text, utc_text(entry["time_s"])))
        self.columns.add(entry["step"], seconds)
        self.last = entry


class NotesFile(GrowingFile):
    """data.log, whose lines are `step 3: text`."""

    def parse(self, lines: Sequence[bytes]) -> list[dict[str, Any] | None]:
        matches = (re.fullmatch(r"step (\d+): (.*)", line.decode(errors="replace")) for line in lines)
        return [match and {"step": int(match[1]), "message": match[2]} for match in matches]


class RunFolder:
    """The run in a workdir.

    name: distinguishes it from others on the page.
    version: grows with whatever is shown.
    goodput: contents of goodput.json.
    checkpoints: manifest of each complete checkpoint, by step.
    windows: first step of each traced window -> seconds of the mean step by part.
    """

    def __init__(self, workdir: Path, name: str) -> None:
        self.workdir, self.name, self.version = workdir, name, 0
        self.config: dict[str, str] = {}
        self.goodput: dict[str, Any] = {}
        self.checkpoints: dict[int, files.Manifest] = {}
        self.windows: dict[int, dict[str, float]] = {}
        self.status = ""
        self.metrics, self.wall = MetricsFile(workdir), WallFile(workdir)
        self._samples = GrowingFile(workdir / metrics.GENERATIONS)
        self._bad_steps = GrowingFile(workdir / metrics.BAD_STEPS)
        self._notes = NotesFile(workdir / metrics.NOTES)
        self._alerts: GrowingFile | None = None
        self._lock = Rival(FolderStore(workdir / LOCK))
        self._versions: dict[Path, tuple[int, int]] = {}

    def refresh(self) -> bool:
        """Reads what the files have gained, some megabytes at most; True if there may be more."""
        if (text := self._read_new(self.workdir / "config.txt")) is not None:
            self.config = tree.parse(text)
            # A path outside the workdir is not the run's folder: its owner reads it there.
            name = ast.literal_eval(self.config.get("alerts.file", "None"))
            file = None if name is None or Path(name).is_absolute() else self.workdir / name
            self._alerts = None if file is None else GrowingFile(file)
        growing = (self.metrics, self.wall, self._samples, self._bad_steps, self._notes, self._alerts)
        num_grown = sum(file.refresh() for file in growing if file is not None)
        # JSON of another version, or half a copy, is left out.
        with contextlib.suppress(ValueError, KeyError, TypeError, LookupError, ZeroDivisionError):
            if (text := self._read_new(self.workdir / goodput.FILE)) is not None:
                self.goodput = json.loads(text)
            for file in (self.workdir / PROFILE).glob("*/breakdown.json"):
                if (text := self._read_new(file)) is not None:
                    self._add_window(json.loads(text)["steps"])
        checkpoints, status = self._read_checkpoints(), self._find_status()
        self.version += num_grown + (checkpoints.keys() != self.checkpoints.keys() or status != self.status)
        self.checkpoints, self.status = checkpoints, status
        return num_grown > 0

    @property
    def step(self) -> int:
        """Completed updates; 0 before the first logged one."""
        return self.metrics.newest.get("step", 0)

    @property
    def num_steps(self) -> int | None:
        """Updates of the whole run; None before config.txt is there."""
        return int(self.config["num_steps"]) if "num_steps" in self.config else None

    @property
    def events(self) -> list[Event]:
        """Restarts, bad steps, alerts and messages of the data plane."""
        events = self.wall.attempts[1:]
        for kind, file in (("bad step", self._bad_steps), ("alert", self._alerts), ("data", self._notes)):
            for entry in file.entries if file is not None else ():
                # Alerts and messages have a text; a decision has its facts.
                text = entry.get("message") or ", ".join(f"{k} {v}" for k, v in entry.items() if k != "step")
                events.append(
                    Event(int(entry.get("step", 0)), kind, str(text), str(entry.get("time", ""))[:19])
                )
        return events

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Texts of the newest evaluation that kept some."""
        samples = [
            entry for entry in self._samples.entries if {"step", "of", "prompt", "answer"} <= entry.keys()
        ]
        return [sample for sample in samples if sample["step"] == samples[-1]["step"]]

    def _read_new(self, file: Path) -> str | None:
        """Text of a file that is written as a whole, if it is another one than at the last look."""
        with contextlib.suppress(OSError):
            stat = file.stat()
            version = (stat.st_mtime_ns, stat.st_size)
            if self._versions.get(file) != version:
                self._versions[file] = version
                self.version += 1
                return file.read_text()
        return None

    def _read_checkpoints(self) -> dict[int, files.Manifest]:
        folder, manifests = self.workdir / "checkpoints", dict[int, files.Manifest]()
        for step in files.steps(folder) if folder.is_dir() else ():
            with contextlib.suppress(UserError, OSError):  # it was removed just now, or is damaged
                # A manifest never changes, and that of a large model has megabytes: each is read once.
                manifests[step] = self.checkpoints.get(step) or files.read_manifest(folder / str(step))
        return manifests

    def _add_window(self, steps: Sequence[dict[str, Any]]) -> None:
        self.windows[steps[0]["step"]] = {
            part.key: sum(step["parts"].get(part.key) or 0.0 for step in steps) / len(steps) for part in PARTS
        }

    def _find_status(self) -> str:
        try:
            is_alive = self._lock.is_alive()
        except OSError:
            is_alive = False
        if is_alive is not False:
            progress = "" if self.metrics.newest else ", before its first line"
            return f"running{progress}" + ", if its machine still lives" * (is_alive is None)
        if self.num_steps is not None and self.step >= self.num_steps:
            return "finished"
        if not self.wall.attempts:
            return "not begun"
        return f"{'stopped' if self.wall.last['event'] == 'end' else 'killed'} after step {self.step}"


def utc_text(seconds: float) -> str:
    """Seconds since the epoch as date and time, UTC."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()[:19]


def open_runs(workdirs: Sequence[str]) -> list[RunFolder]:
    """Opens the runs in some folders; nothing is read yet.

    Raises:
      UserError: a folder is not there, has no run, or is in an object store.
    """
    folders = list(dict.fromkeys(run_folder(text) for text in workdirs))
    for folder in folders:
        if in_store(folder):
            raise UserError(
                f"--workdir {folder} is in an object store, and a page that grows reads files of this "
                "machine. Copy its files to a folder, without checkpoints/, and give that folder."
            )
        if not any((folder / sign).exists() for sign in _SIGNS):
            raise UserError(
                f"--workdir {folder} holds no run: it has no config.txt. Give the folder of a run, or begin "
                f"one there: jtrain launch --config=tiny --workdir {folder}."
            )
    # The folder's own name, unless two runs share it.
    names = [folder.resolve().name for folder in folders]
    return [
        RunFolder(folder, str(folder) if names.count(name) > 1 else name)
        for folder, name in zip(folders, names, strict=True)
    ]
