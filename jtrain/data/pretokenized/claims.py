"""Processes, on one host or many, that write into one shared folder: which of them live, and who does what.

Made for network file systems where locks may not work: a claim is a file that only one process can create, and a
process is alive as long as it counts in a file of its own. Clocks of different hosts are never compared. A process that
was thought dead, because it stood still for a minute, may go on beside the one that took over: claims save double work,
and whatever is written under one must come out the same when two processes write it.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

BEAT_S = 5.0
"""Time between two counts of a living process."""

STALE_S = 60.0
"""A process of another host that has not counted for so long is dead; one of this host is looked up."""

_POLL_S = 0.05
_HOSTS = ".hosts"


class BuildProcess:
    """This process, as the other ones that write to `out` see it. Close it to give back its claims.

    Attributes:
      name: name of the process, unique over hosts, containers and time; usable in file names.
    """

    def __init__(self, out: Path) -> None:
        self._hosts = out / _HOSTS
        self._here = _machine()
        pid = os.getpid()
        self.name = f"{self._here}-{pid}-{_started(pid)}"
        self._claims: set[Path] = set()
        self._seen: dict[str, tuple[str, float]] = {}
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "BuildProcess":
        self._write_count(0)
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Gives back all claims and removes what dead processes of this folder left."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        for path in list(self._claims):
            self.release(path)
        with contextlib.suppress(OSError):  # other processes are still there, or have removed the folder
            for path in self._hosts.iterdir():
                owner = path.name.removesuffix(".tmp")
                if owner == self.name or self.is_alive(owner) is False:
                    path.unlink(missing_ok=True)
            self._hosts.rmdir()

    def claim(self, path: Path) -> bool:
        """Creates the claim `path` for this process; returns False if a living process, or an unknown one, holds it.

        Raises:
          FileNotFoundError: the folder of `path` is gone.
        """
        for _ in range(2):
            try:
                handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
            except FileExistsError:
                holder = self.holder(path)
                if holder == self.name:
                    return True
                if holder is not None and self.is_alive(holder or f"{path}: empty") is not False:
                    return False
                self._remove(path)
                continue
            try:
                os.write(handle, self.name.encode())
            finally:
                os.close(handle)
            self._claims.add(path)
            return True
        return False

    def release(self, path: Path) -> None:
        """Gives a claim back; does nothing if it is not this process's own."""
        self._claims.discard(path)
        if self.holder(path) == self.name:
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def claiming(self, path: Path) -> Iterator[None]:
        """Waits for the claim `path`, and holds it during the block."""
        while not self.claim(path):
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            self.release(path)

    def holder(self, path: Path) -> str | None:
        """Returns the name of the process that holds a claim; empty if it has just begun to, None if there is none."""
        try:
            return path.read_text()
        except OSError:
            return None

    def is_alive(self, name: str) -> bool | None:
        """True or False if it is known whether a process lives; None until it was watched for long enough."""
        machine, _, rest = name.rpartition("-")[0].rpartition("-")
        if machine == self._here and rest.isdecimal():
            return _started(int(rest)) == name.rpartition("-")[2]
        try:
            count = (self._hosts / name).read_text() if "/" not in name else ""
        except OSError:
            return False
        now = time.monotonic()
        seen, since = self._seen.setdefault(name, (count, now))
        if seen != count:
            self._seen[name] = count, now
            return True
        return None if now - since < STALE_S else False

    def write_whole(self, path: Path, content: str) -> None:
        """Writes a file atomically and durably, also while other processes write the same one."""
        new = self._hosts / f"{self.name}.tmp"
        with os.fdopen(self._open(new), "w", encoding="utf-8") as file:
            file.truncate()
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.rename(path)

    def _remove(self, path: Path) -> None:
        """Removes the claim of a dead process; of several that try, one succeeds."""
        mine = path.with_name(f"{path.name}.{self.name}.dead")
        with contextlib.suppress(FileNotFoundError):
            path.rename(mine)
            mine.unlink()

    def _beat(self) -> None:
        count = 0
        while not self._closed.wait(BEAT_S):
            count += 1
            with contextlib.suppress(OSError):  # a full disk or a network that is away must not end the process
                self._write_count(count)

    def _write_count(self, count: int) -> None:
        # In place: on NFS an open file is looked up anew, the entry of a replaced one may be an old one for a minute.
        handle = self._open(self._hosts / self.name)
        try:
            os.pwrite(handle, f"{count:020}".encode(), 0)
            os.fsync(handle)
        finally:
            os.close(handle)

    def _open(self, path: Path) -> int:
        """Opens a file in the folder of hosts, which the last other process may just be removing."""
        while True:
            self._hosts.mkdir(exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                return os.open(path, os.O_CREAT | os.O_WRONLY, 0o666)


def _machine() -> str:
    """Returns a name for the processes that can see each other: one boot of one machine, or one container on it."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"


def _started(pid: int) -> str:
    """Returns when a process of this machine started, in ticks since boot; empty if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]
