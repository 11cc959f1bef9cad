"""Records of leases and the places that keep them: a folder that hosts share, and messages to one watcher.

Standard library only.
"""

import contextlib
import dataclasses
import json
import os
import secrets
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

_RELEASED = ".released"


@dataclasses.dataclass(frozen=True)
class Holder:
    """Identity of a process that holds a lease.

    machine: name for all processes that can see each other by their ids: one boot of one machine, or one
      container.
    started: start of the process in ticks since boot, so that a process id that is used again is another
      holder.
    token: random; two leases of one process are two holders.
    """

    host: str
    pid: int
    since: str
    machine: str
    started: str
    token: str

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}, since {self.since}"


@dataclasses.dataclass(frozen=True)
class Entry:
    """State of a lease in its store.

    number: fencing number of the newest holder; 0 if there was none.
    content: its record; None if it has released the lease.
    version: changes whenever the record is written.
    """

    number: int
    content: bytes | None
    version: Hashable = None

    @property
    def holder(self) -> Holder | None:
        """Holder that the record names; None if it names nobody."""
        # A record that was cut short by a full disk names nobody; the watch then judges by its age alone.
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return Holder(**json.loads(self.content or b"")["holder"])
        return None

    @property
    def payload(self) -> Any:
        """Payload of the last beat; None if there is none."""
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return json.loads(self.content or b"")["payload"]
        return None


@runtime_checkable
class LeaseStore(Protocol):
    """Place of one lease's record. Each method raises OSError while the store is away."""

    def read(self) -> Entry:
        """Returns the newest state."""
        ...

    def create(self, old: Entry, content: bytes) -> Entry | None:
        """Writes the record of the next holder if `old` is still the newest state; else returns None.

        Of several processes that try, one succeeds.
        """
        ...

    def swap(self, own: Entry, content: bytes) -> Entry | None:
        """Writes the record of the same holder again; returns None if there is a newer holder."""
        ...

    def delete(self, own: Entry) -> None:
        """Releases the lease; its number is remembered."""
        ...

    def age_s(self, entry: Entry) -> float:
        """Seconds since the record was written, by the store's clock."""
        ...


class FolderStore:
    """Lease in a folder that processes of one or many hosts share, also on network file systems without
    locks.

    The folder holds numbered files; the highest number is the newest holder's record. The next holder creates
    the next number, which only one process can do, and then removes lower ones. A beat without news touches
    the file, and the release renames it to `<number>.released`: both need no room on a full disk.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self) -> Entry:
        while True:
            # Names first, then the file of the highest: between the two
            # it may be renamed or removed, so both are read again.
            names = self._names()
            number = max(names, default=0)
            if not number or names[number].endswith(_RELEASED):
                return Entry(number, None)
            # Gone: its process has just released it, or a newer record has replaced it.
            with contextlib.suppress(FileNotFoundError), open(self.folder / names[number], "rb") as file:
                # Opened, because network file systems then ask the server for the time of the last touch.
                return Entry(number, file.read(), os.fstat(file.fileno()).st_mtime_ns)

    def create(self, old: Entry, content: bytes) -> Entry | None:
        number = old.number + 1
        path = self.folder / str(number)
        handle = None
        while handle is None:
            try:
                with contextlib.suppress(FileNotFoundError):  # somebody removes the folder, as it is empty
                    self.folder.mkdir(parents=True, exist_ok=True)
                    # O_EXCL is the one step that the server decides: of two
                    # processes one gets FileExistsError, also on NFS.
                    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
            except FileExistsError:
                return None
        try:
            try:
                os.write(handle, content)
                # Before anything is removed: after a power cut there must be a newest record.
                os.fsync(handle)
                written_ns = os.fstat(handle).st_mtime_ns
            finally:
                os.close(handle)
        except OSError:
            # A full disk: without its content the file would name nobody and hold the lease for STALE_S.
            path.unlink(missing_ok=True)
            raise
        # The number may be free because its holder was replaced, or released it, since this process looked.
        if max(self._names(), default=0) > number or path.with_name(path.name + _RELEASED).exists():
            path.unlink(missing_ok=True)
            return None
        for older, name in self._names().items():
            if older < number:
                (self.folder / name).unlink(missing_ok=True)
        return Entry(number, content, written_ns)

    def swap(self, own: Entry, content: bytes) -> Entry | None:
        # A higher number is a newer holder, whether or not our file still exists.
        if max(self._names(), default=0) > own.number:
            return None
        path = self.folder / str(own.number)
        if content == own.content:
            # A file that somebody removed is written again below: the number is still this holder's.
            with contextlib.suppress(FileNotFoundError):
                os.utime(path)
                return own
        # Replaced in one step, so that nobody reads a part of it.
        new = path.with_name(f"{path.name}.tmp")
        try:
            new.write_bytes(content)
            new.rename(path)
        except OSError:
            new.unlink(missing_ok=True)
            raise
        return dataclasses.replace(own, content=content)

    def delete(self, own: Entry) -> None:
        path = self.folder / str(own.number)
        path.rename(path.with_name(path.name + _RELEASED))

    def age_s(self, entry: Entry) -> float:
        # A file made now has the store's time: clocks of the hosts may differ.
        clock_file = self.folder / f"now.{os.getpid()}.{secrets.token_hex(4)}"
        try:
            clock_file.touch()
            assert isinstance(entry.version, int)
            return 1e-9 * (clock_file.stat().st_mtime_ns - entry.version)
        finally:
            clock_file.unlink(missing_ok=True)

    def _names(self) -> dict[int, str]:
        """Records in the folder: number -> file name."""
        try:
            names = {name: name.removesuffix(_RELEASED) for name in os.listdir(self.folder)}
        except FileNotFoundError:
            return {}
        return {int(number): name for name, number in names.items() if number.isdecimal()}


class MessageStore:
    """Lease that its holder tells to one watcher by messages, such as over a pipe: nobody else can take it.

    The lease is lost when nobody listens any more.

    Args:
      send: sends a record. BlockingIOError: the watcher does not read now; any other OSError: it is gone.
    """

    def __init__(self, send: Callable[[bytes], object]) -> None:
        self._send = send

    def read(self) -> Entry:
        return Entry(0, None)

    def create(self, old: Entry, content: bytes) -> Entry | None:
        return self.swap(dataclasses.replace(old, number=old.number + 1), content)

    def swap(self, own: Entry, content: bytes) -> Entry | None:
        try:
            self._send(content)
        except BlockingIOError:
            # The watcher is alive and only slow: a lost beat is no loss of the lease.
            pass
        except OSError:
            return None
        return own

    def delete(self, own: Entry) -> None:
        """Does nothing: the end of the messages tells it."""

    def age_s(self, entry: Entry) -> float:
        return 0.0
