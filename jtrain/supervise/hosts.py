"""Messages between the supervisors of several hosts, through files in the run's shared workdir.

Each supervisor holds a lease in `supervise/process-N/`, whose beats, every two seconds, carry what it knows
of its process. One text for all, `supervise/round-all`, counts the restarts: the supervisor that sees a fault
first announces the next round with its cause, and all others end their processes and join it. Nothing listens
on a port.
"""

import contextlib
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path

from jtrain.runtime.agreement import Agreement, FolderCarrier
from jtrain.runtime.lease import Lease, Watch
from jtrain.runtime.lease_stores import FolderStore
from jtrain.supervise.heart import Beat
from jtrain.supervise.verdict import Watched

FOLDER = "supervise"
TELL_S = 2.0
_POLL_S = 0.5


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
      process, processes: number of this supervisor's process, and of all processes of the run.
    """

    def __init__(self, workdir: Path, *, process: int, processes: int) -> None:
        self._folder = workdir / FOLDER
        self._process, self._processes = process, processes
        self._agreement = Agreement(
            "", FolderCarrier(self._folder, poll_s=_POLL_S), process=process, processes=processes
        )
        self._watched: Sequence[Watched] = ()
        # beat_s=0: no thread; `tell` beats, so that a supervisor that hangs falls silent.
        self._lease = Lease(self._store(process), beat_s=0.0, payload=self._payload)
        self._last_tell_s = 0.0
        # By this host's own clock: the others' may be wrong.
        self._watches = {number: Watch() for number in range(processes) if number != process}
        # A supervisor that starts late takes part in the round that is under way.
        self.round = self._read_round().number

    @property
    def replaced_by(self) -> str | None:
        """Supervisor that has taken this one's place; None while nobody has."""
        return self._lease.taken_by if self._lease.is_lost else None

    def newer_round(self) -> Round | None:
        """Returns the round that another supervisor began, or None; call `follow` once it is acted upon."""
        newest = self._read_round()
        return newest if newest.number > self.round else None

    def follow(self, newest: Round) -> None:
        """Takes part in a round that another supervisor began."""
        self.round = newest.number

    def announce(self, cause: str, *, final: int | None, save: bool) -> None:
        """Begins the next round, unless another supervisor did."""
        # Two supervisors may see one fault: who comes second joins the round of the first.
        if self.newer_round() is None:
            self.round += 1
            with contextlib.suppress(OSError):  # here and below: a full disk must not end a healthy run
                newest = Round(self.round, cause, final, save)
                self._agreement.announce("round", json.dumps(dataclasses.asdict(newest)))

    def tell(self, watched: Sequence[Watched]) -> None:
        """Tells the others what this supervisor knows of its process, at most every TELL_S seconds."""
        now_s = time.monotonic()
        if now_s - self._last_tell_s >= TELL_S:
            self._last_tell_s, self._watched = now_s, watched
            if not (self._lease.is_held or self._lease.is_lost):
                # The scheduler decides which supervisor a process has; an older one loses its lease.
                with contextlib.suppress(OSError):
                    self._lease.seize()
            self._lease.beat()

    def other_processes(self) -> list[Watched]:
        """Processes of other hosts, as their supervisors tell; a silent supervisor's beats grow older."""
        watched = []
        for process, watch in self._watches.items():
            with contextlib.suppress(OSError):
                entry = self._store(process).read()
                # A new version of the file is a sign of life; its contents may be the same.
                watch.saw((entry.number, entry.version))
                # One interval of silence is normal.
                silent_s = max(0.0, watch.silent_s - TELL_S)
                for values in () if entry.is_free else entry.payload or ():
                    beat = None if values["beat"] is None else Beat.of(values["beat"])
                    watched.append(
                        Watched(values["name"], values["stopped_s"], beat, values["beat_age_s"] + silent_s)
                    )
        return watched

    def wait_ended(self, *, timeout_s: float) -> None:
        """Tells that this host's process of the round before has ended, and waits for all other hosts'.

        A process that joins too early would find the coordinator of the round before.
        """
        with contextlib.suppress(OSError):
            self._agreement.tell("ended-before", str(self.round))
        self._agreement.collect(
            # At least: another host may be a round ahead.
            "ended-before",
            seconds=timeout_s,
            counts=lambda text: int(text) >= self.round,
        )

    def close(self) -> None:
        """Gives the lease back."""
        self._lease.release()

    def _payload(self) -> list[dict[str, object]]:
        return [dataclasses.asdict(process) for process in self._watched]

    def _store(self, process: int) -> FolderStore:
        return FolderStore(self._folder / f"process-{process}")

    def _read_round(self) -> Round:
        with contextlib.suppress(OSError, ValueError, TypeError):
            return Round(**json.loads(self._agreement.announced("round", seconds=0.0) or ""))
        # Nobody has announced a round yet, or its text cannot be read.
        return Round(0, "", None, save=False)
