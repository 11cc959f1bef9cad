"""This process among those that build indexes in one folder, on one host or many, and its share of shards.

Each process holds a lease in OUT/.leases/process-*/, whose payload names the sources that it works on. The
living processes of a source are numbered by their start: number i of n makes shards i, i + n, ..., and number
0 appends them. When one starts or dies, the others count anew. A process that was thought dead, because it
stood still for a minute, may go on beside the others, and for a moment two may think that a shard is theirs:
whatever is written comes out the same when two processes write it.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jtrain.data.pretokenized.index_format import digest
from jtrain.errors import FileError
from jtrain.runtime.lease import Lease, Rival, this_holder
from jtrain.runtime.lease_stores import FolderStore

_LEASES = ".leases"
_PROCESS, _FOLDER = "process-", "folder-"
LOOK_S = 1.0
"""Time for which a process relies on the number of processes that it has counted."""
_POLL_S = 0.05


class BuildProcess:
    """This process, as the other ones that write to `out` see it, inside its `with` block.

    Attributes:
      name: name of the process, unique over hosts, containers and time; usable in file names.
    """

    def __init__(self, out: Path) -> None:
        holder = this_holder()
        # Begins with the time, so that sorting names sorts processes by their start.
        self.name = f"{holder.since.replace(':', '')}-{holder.pid}-{holder.token}"
        self._leases = out / _LEASES
        self._folder = self._leases / (_PROCESS + self.name)
        self._plans: dict[str, str] = {}
        self._lease = Lease(FolderStore(self._folder), payload=lambda: self._plans)
        self._rivals: dict[str, Rival] = {}
        self._is_alive_of: dict[str, bool | None] = {}
        self._last_look_s = 0.0

    def __enter__(self) -> "BuildProcess":
        self._lease.seize()
        return self

    def __exit__(self, *_: object) -> None:
        """Gives the lease back; removes its folder and those of the dead; the last process removes all."""
        # Before the look: of two processes that end at a time, one then sees that it is the last.
        self._lease.release()
        with contextlib.suppress(OSError):
            self._find_living()
        shutil.rmtree(self._folder, ignore_errors=True)
        for name, is_alive in self._is_alive_of.items():
            if is_alive is False and self._rivals[name].entry.number:  # 0: it is just starting
                shutil.rmtree(self._leases / (_PROCESS + name), ignore_errors=True)
        if not any(is_alive is not False for is_alive in self._is_alive_of.values()):
            for folder in self._leases.glob(f"{_FOLDER}*"):
                shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # other processes are still there, or have removed the folder
            self._leases.rmdir()

    def begin(self, source: str, plan: dict[str, Any]) -> None:
        """Tells the others that this process works on a source.

        Raises:
          FileError: another process is building the index of this source from other data.
        """
        # A new dict, and not an update: the lease's thread may be writing the old one.
        self._plans = {**self._plans, source: _plan_identity(plan)}
        # At once, so that a process that begins at the same moment sees this plan.
        self._lease.beat()
        while True:
            self._find_living()
            plans = {name: self._plan(rival, source) for name, rival in self._rivals.items()}
            are_alive = [
                self._is_alive_of[name]
                for name, plan in plans.items()
                if plan not in (None, self._plans[source])
            ]
            # None, not known yet, counts as False here and is waited for below.
            if any(are_alive):
                partial = self._leases.parent / f".{source}.partial"
                raise FileError(
                    f"{partial}: another process is writing an index of other data there. Wait until it "
                    "ends, or choose another --out."
                )
            if None not in are_alive:
                return
            time.sleep(_POLL_S)  # until it is known whether that process lives

    def end(self, source: str) -> None:
        """Tells the others that the source is complete."""
        self._plans = {name: plan for name, plan in self._plans.items() if name != source}

    def share(self, source: str) -> tuple[int, int]:
        """Returns the rank of this process by start among those that work on a source, and their count."""
        # Listing the folder and reading each lease takes a round trip on a network file system.
        if time.monotonic() - self._last_look_s > LOOK_S:
            self._find_living()
        names = [self.name]
        for name, rival in self._rivals.items():
            # None, not known yet, counts as alive; a later look corrects the count.
            if self._is_alive_of[name] is not False and self._plan(rival, source) == self._plans.get(source):
                names.append(name)
        # Names begin with the time of the start, so all processes sort them alike.
        return sorted(names).index(self.name), len(names)

    def is_alive(self, name: str) -> bool | None:
        """True or False if it is known whether a process lives; None until it was watched for long enough."""
        if name == self.name:
            return True
        self._is_alive_of[name] = self._rival(name).is_alive()
        return self._is_alive_of[name]

    @contextlib.contextmanager
    def changing_folders(self, source: str) -> Iterator[None]:
        """Context in which only this process renames the folders of a source; waits for the others."""
        lease = Lease(FolderStore(self._leases / (_FOLDER + source)))
        lease.wait()
        try:
            yield
        finally:
            lease.release()

    def write_whole(self, path: Path, content: str) -> None:
        """Writes a file atomically and durably, also while other processes write the same one."""
        new = self._folder / "content.tmp"
        with open(new, "w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            # Before the rename: a power cut could otherwise leave the name with an empty file.
            os.fsync(file.fileno())
        new.rename(path)

    def _find_living(self) -> None:
        """Finds out which processes live."""
        self._last_look_s = time.monotonic()
        names = set(self._rivals)
        with contextlib.suppress(FileNotFoundError):
            folders = (name for name in os.listdir(self._leases) if name.startswith(_PROCESS))
            # Processes seen earlier stay: their folders may be gone, and they count as dead then.
            names |= {folder.removeprefix(_PROCESS) for folder in folders} - {self.name}
        for name in names:
            self.is_alive(name)

    def _rival(self, name: str) -> Rival:
        if name not in self._rivals:
            self._rivals[name] = Rival(FolderStore(self._leases / (_PROCESS + name)))
        return self._rivals[name]

    @staticmethod
    def _plan(rival: Rival, source: str) -> str | None:
        """Returns the identity of a process's plan for a source; None if it does not build that source."""
        return (rival.entry.payload or {}).get(source)


def _plan_identity(plan: dict[str, Any]) -> str:
    return digest(json.dumps(plan, sort_keys=True).encode())
