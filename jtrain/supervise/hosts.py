"""Lets the supervisors of several hosts tell each other what happened, through files in the run's shared workdir.

Each supervisor writes `supervise/process-N.json` every two seconds: what it knows of its processes. One file for all,
`supervise/round.json`, counts the restarts: the supervisor that sees a fault first writes the next round with its
cause, and all others end their processes and join it. Nothing listens on a port.
"""

import contextlib
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from jtrain.runtime.atomic_io import write_whole
from jtrain.supervise.heart import Beat
from jtrain.supervise.verdict import Watched

FOLDER = "supervise"
TELL_S = 2.0


@dataclasses.dataclass(frozen=True)
class Round:
    """One attempt of all hosts.

    number: counts the attempts of all supervisors of this workdir.
    cause: why the round before ended, naming host and process.
    final: exit code of a run that is not started again; None for the next attempt.
    save: the processes are asked to save before they end.
    """

    number: int
    cause: str
    final: int | None
    save: bool


class Hosts:
    """View of one supervisor on the others.

    Args:
      workdir: folder that all hosts share.
    """

    def __init__(self, workdir: Path) -> None:
        self._folder = workdir / FOLDER
        self._told_s = 0.0
        self._count = 0
        self._seen: dict[str, tuple[int, float]] = {}
        self.round = self._read_round().number

    def news(self) -> Round | None:
        """Returns the round that another supervisor began, or None; call `follow` with it once it is acted upon."""
        newest = self._read_round()
        return newest if newest.number > self.round else None

    def follow(self, newest: Round) -> None:
        """Takes part in a round that another supervisor began."""
        self.round = newest.number

    def announce(self, cause: str, *, final: int | None, save: bool) -> None:
        """Begins the next round, unless another supervisor did."""
        if self.news() is None:
            self.round += 1
            self._write("round.json", dataclasses.asdict(Round(self.round, cause, final, save)))

    def tell(self, mine: set[int], processes: list[Watched], *, ended: bool = False) -> None:
        """Writes what this supervisor knows, at most every TELL_S seconds.

        Args:
          mine: numbers of its processes.
          ended: its processes of the round before have ended.
        """
        now_s = time.monotonic()
        if not ended and now_s - self._told_s < TELL_S:
            return
        self._told_s, self._count = now_s, self._count + 1
        values = [dataclasses.asdict(one) for one in processes]
        self._write(
            f"process-{min(mine)}.json",
            {"count": self._count, "round": self.round, "numbers": sorted(mine), "processes": values},
        )

    def others(self, mine: set[int], processes: int) -> list[Watched]:
        """Processes of other hosts, as their supervisors tell; the age of a beat grows while a supervisor is silent."""
        found = []
        for name, told in self._told(processes):
            count, since_s = self._seen.get(name, (None, 0.0))
            if count != told["count"]:
                count, since_s = self._seen[name] = told["count"], time.monotonic()
            silent_s = max(0.0, time.monotonic() - since_s - TELL_S)
            for values in told["processes"] if not mine & set(told["numbers"]) else ():
                beat = None if values["beat"] is None else Beat.decode(json.dumps(values["beat"]))
                found.append(Watched(values["name"], values["stopped_s"], beat, values["beat_age_s"] + silent_s))
        return found

    def wait_ended(self, processes: int, *, mine: set[int], timeout_s: float) -> None:
        """Waits until the supervisors of all other processes have ended those of the round before, or for a timeout.

        A process that joins too early would find the coordinator of the round before.
        """
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            ended = [told["numbers"] for _, told in self._told(processes) if told["round"] >= self.round]
            if mine.union(*ended) >= set(range(processes)):
                return
            time.sleep(0.5)

    def _told(self, processes: int) -> list[tuple[str, dict[str, Any]]]:
        found = []
        for number in range(processes):
            name = f"process-{number}.json"
            with contextlib.suppress(OSError, ValueError):
                found.append((name, json.loads((self._folder / name).read_bytes())))
        return found

    def _read_round(self) -> Round:
        with contextlib.suppress(OSError, ValueError, TypeError):
            return Round(**json.loads((self._folder / "round.json").read_bytes()))
        return Round(0, "", None, save=False)

    def _write(self, name: str, values: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end a healthy run
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._folder / name, json.dumps(values) + "\n", durable=False)
