"""Lock of a workdir: one run at a time writes to it, on one host or many, also on network file systems.

The folder `lock/` holds numbered files; the highest number is the lock. To take it over, a process creates the next
number, which only one can do, and then removes lower ones; numbers never repeat, so a process that judged an old file
can never take a newer one by mistake. A file names its process, which touches it every `BEAT_S`, and renames it to
`<number>.released` at its end (renaming needs no room on a full disk).
"""

import contextlib
import datetime
import errno
import json
import os
import socket
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jtrain.errors import UserError
from jtrain.runtime import multihost
from jtrain.runtime.atomic_io import cannot_write

FOLDER = "lock"
_RELEASED = ".released"

BEAT_S = 3.0
"""Time between two touches of the lock by the process that holds it."""

STALE_S = 60.0
"""A holder on another host that has not touched its lock for so long is gone; one of this host is looked up."""

_WATCH_S = 10.0
"""Time over which a lock of another host is watched, however old it is: file servers may count time differently."""

_POLL_S = 0.2


class LockLost(UserError):
    """Another run has taken over the workdir, while this one stood still. Nothing more may be written."""


class WorkdirLock:
    """Holds a workdir for this run inside the `with` block. All processes enter together; process 0 holds the lock.

        with WorkdirLock(workdir, say=print) as lock:
            ...
            lock.check()  # at every step

    After a SIGKILL the next run on the same host takes the lock over at once; on another host it waits until the lock
    has not been touched for `STALE_S`.

    Args:
      workdir: created if missing.
      say: gets a line if a stale lock is taken over.
      machine: name for all processes that can see each other by their ids.

    Raises:
      UserError: another run holds the workdir; names host, process and time.
      FileError: the workdir cannot be written to.
    """

    def __init__(self, workdir: Path, *, say: Callable[[str], None], machine: str | None = None) -> None:
        self._workdir = workdir
        self._folder = workdir / FOLDER
        self._say = say
        self._machine = machine or this_machine()
        self._held: Path | None = None
        self._lost: str | None = None
        self._checked_s = 0.0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "WorkdirLock":
        refused: UserError | None = None
        joined = multihost.is_joined()
        if not (joined and multihost.process_index()):
            try:
                self._take()
            except OSError as error:
                refused = error if isinstance(error, UserError) else cannot_write(self._workdir, error)
            except UserError as error:
                refused = error
        if refused is not None:
            if joined:
                multihost.agree(True)
            raise refused
        if joined and multihost.agree(False)[0]:
            raise UserError(f"process 0 could not lock --workdir {self._workdir}: see its message.")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        """Ends the touching, and marks the lock as released."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        if self._held is not None and self._lost is None:
            with contextlib.suppress(OSError):  # then the next run finds that this process is gone
                self._held.rename(self._held.with_name(self._held.name + _RELEASED))
        self._held = None

    def check(self) -> None:
        """Raises LockLost if another run has taken the lock over; call it before anything is written.

        Reads the folder only if the last touch is long ago, because this process was stopped or its disk was away.
        """
        if self._held is not None and self._lost is None and time.monotonic() - self._checked_s > STALE_S / 4:
            self._beat()
        if self._lost is not None:
            raise LockLost(self._lost)

    def _take(self) -> None:
        self._workdir.mkdir(parents=True, exist_ok=True)
        self._folder.mkdir(exist_ok=True)
        said: str | None = None
        while True:
            there = self._there()
            number = max(there, default=0)
            if number and not there[number].endswith(_RELEASED):
                try:
                    said = self._judge(self._folder / there[number])
                except FileNotFoundError:  # its process has just released it, or a newer lock has replaced it
                    continue
            if self._create(number + 1):
                break
        if said:
            self._say(said)
        for older, name in self._there().items():
            if older <= number:
                (self._folder / name).unlink(missing_ok=True)
        self._thread = threading.Thread(target=self._keep_touching, name="workdir lock", daemon=True)
        self._thread.start()

    def _create(self, number: int) -> bool:
        """Creates the lock of this number; False if another process was faster."""
        path = self._folder / str(number)
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            return False
        try:
            try:
                os.write(handle, json.dumps(self._owner()).encode())
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        # This number was free because its holder had been replaced, or had released it, since this process looked.
        if max(self._there()) > number or path.with_name(path.name + _RELEASED).exists():
            path.unlink(missing_ok=True)
            return False
        self._held = path
        self._checked_s = time.monotonic()
        return True

    def _judge(self, path: Path) -> str:
        """Returns a line about a stale lock; refuses one that a living run holds.

        Raises:
          UserError: a living run holds it.
          FileNotFoundError: the lock is gone.
        """
        owner = _read(path)
        for _ in range(5):
            if owner is None:  # its process may be just about to write its name
                time.sleep(_POLL_S)
                owner = _read(path)
        if owner is not None and owner["machine"] == self._machine:
            if process_started(owner["pid"]) == owner["started"]:
                raise UserError(self._refusal(owner))
            return f"took over the lock of {self._workdir} from {_named(owner)}, which is gone"
        before = _touched_ns(path)
        self._say(
            f"{self._workdir} is locked by {_named(owner)}: watching for at most {STALE_S:.0f} s whether it lives"
        )
        began_s = time.monotonic()
        while True:
            time.sleep(_POLL_S)
            if _touched_ns(path) != before:
                raise UserError(self._refusal(_read(path)))
            age_s = self._age_s(before)
            if time.monotonic() - began_s >= _WATCH_S and age_s >= STALE_S:
                return (
                    f"took over the lock of {self._workdir} from {_named(owner)}, which has not touched it for "
                    f"{age_s:.0f} s"
                )

    def _age_s(self, touched_ns: int) -> float:
        """Seconds since a touch, both by the clock of the file server."""
        now = self._folder / f"now.{self._machine}.{os.getpid()}"
        try:
            now.touch()
            return 1e-9 * (now.stat().st_mtime_ns - touched_ns)
        finally:
            now.unlink(missing_ok=True)

    def _refusal(self, owner: dict[str, Any] | None) -> str:
        how = "" if owner is None else f" (`kill {owner['pid']}` on {owner['host']}: it saves first)"
        return (
            f"--workdir {self._workdir} is in use by another run: {_named(owner)}. Wait for it, stop it{how}, or set "
            "--workdir to another folder."
        )

    def _keep_touching(self) -> None:
        while not self._closed.wait(BEAT_S) and self._lost is None:
            self._beat()

    def _beat(self) -> None:
        """Touches the lock if it is still the newest; notes its loss if it is not."""
        held = self._held
        if held is None:
            return
        try:
            there = self._there()
            newest = max(there, default=0)
            if newest > int(held.name):
                by = _named(_read(self._folder / there[newest]))
                self._lost = (
                    f"the lock of --workdir {self._workdir} was taken over by {by}, "
                    f"because this process (pid {os.getpid()} on {socket.gethostname()}) had not touched it for more "
                    f"than {STALE_S:.0f} s: it was stopped, or its disk was away. Nothing more is written here. The "
                    "other run goes on from the last checkpoint; end it first if this one shall go on."
                )
                return
            os.utime(held)
        except FileNotFoundError:  # somebody removed the file; the number is still this run's
            with contextlib.suppress(OSError):
                held.write_text(json.dumps(self._owner()))
        except OSError:  # the file server is away: what happened meanwhile is seen when it is back
            return
        self._checked_s = time.monotonic()

    def _there(self) -> dict[int, str]:
        """Locks in the folder: number -> file name."""
        names = {name: name.removesuffix(_RELEASED) for name in os.listdir(self._folder)}
        return {int(number): name for name, number in names.items() if number.isdecimal()}

    def _owner(self) -> dict[str, Any]:
        pid = os.getpid()
        return {
            "host": socket.gethostname(),
            "pid": pid,
            "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": self._machine,
            "started": process_started(pid),
        }


def this_machine() -> str:
    """Name for the processes that see each other by their ids: one boot of one machine, or one container on it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:  # not Linux: process ids count for the host's name
        return socket.gethostname()


def process_started(pid: int) -> str:
    """Start of a process of this machine, in ticks since boot; empty if there is no such process."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        fields = stat.read_text().rpartition(")")[2].split()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESRCH) and Path("/proc/self/stat").exists():
            return ""
        return _signalled(pid)
    return "" if fields[0] in "ZX" else fields[19]


def _signalled(pid: int) -> str:
    """The same where there is no /proc: only whether the process exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except OSError:
        pass
    return "unknown"


def _read(path: Path) -> dict[str, Any] | None:
    """Returns who holds a lock; None if its process was killed, or is, between creating and writing the file."""
    try:
        owner = json.loads(path.read_bytes())
        return owner if {"host", "pid", "since", "machine", "started"} <= owner.keys() else None
    except FileNotFoundError:
        raise
    except (OSError, ValueError, AttributeError):
        return None


def _touched_ns(path: Path) -> int:
    """Time of the last touch; opening the file makes network file systems ask the server for it."""
    with open(path, "rb") as file:
        return os.fstat(file.fileno()).st_mtime_ns


def _named(owner: dict[str, Any] | None) -> str:
    if owner is None:
        return "a process that has not written its name"
    return f"process {owner['pid']} on host {owner['host']}, since {owner['since']}"
