"""Records of leases and the places that keep them: a folder that hosts share, an object in a store, and
messages to one watcher.

Standard library only, but for an object in a store.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import time
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jtrain.errors import UserError
from jtrain.runtime import stores

_RELEASED = ".released"
_ANSWER_S = 10.0
"""How long an object store may take for a record: a beat that waits longer counts for nothing."""


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
    content: its record; None if there was none.
    version: changes whenever the record is written.
    is_released: the holder has given the lease back; its record still tells who it was.
    """

    number: int
    content: bytes | None
    version: Hashable = None
    is_released: bool = False

    @property
    def is_free(self) -> bool:
        """True if nobody holds the lease."""
        return self.content is None or self.is_released

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
            if not number:
                return Entry(0, None)
            # Gone: its process has just released it, or a newer record has replaced it.
            with contextlib.suppress(FileNotFoundError), open(self.folder / names[number], "rb") as file:
                # Opened, because network file systems then ask the server for the time of the last touch.
                written_ns = os.fstat(file.fileno()).st_mtime_ns
                return Entry(number, file.read(), written_ns, names[number].endswith(_RELEASED))

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


class ObjectStore:
    """Lease in an object store: one object, which is only written in the place of a version that was read.

    The object holds the number, a count of the writes, the record, and whether it was released. The store
    decides between writers, by the generation of an object (Google) or by the hash of its content (S3, where
    the count keeps two contents apart).

    Stores and hosts may count time differently, so the age of a record is the time for which this process
    has seen it unchanged.

    Args:
      path: the object, such as `gs://bucket/run/lock/lease.json`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._writes = 0
        self._seen: tuple[Hashable, float] = (None, 0.0)

    def read(self) -> Entry:
        with _store_errors():
            data, version = stores.read_version(self.path, answer_s=_ANSWER_S)
        if version != self._seen[0]:
            self._seen = (version, time.monotonic())
        if data is None:
            return Entry(0, None, version)
        try:
            state = json.loads(data)
            self._writes = int(state["writes"])
            return Entry(int(state["number"]), state["record"].encode(), version, state["released"] is True)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise UserError(
                f"{self.path} is no record of a lease: something else wrote {len(data)} bytes there. Make "
                "sure that no run uses this workdir, delete the object, and run the same command again."
            ) from None

    def create(self, old: Entry, content: bytes) -> Entry | None:
        new = Entry(old.number + 1, content)
        entry = self._replace(old, new)
        # Written, but the answer was lost, and the repeated request met the record itself: it has our token.
        if entry is None and (newest := self.read()).number == new.number and newest.content == content:
            return newest
        return entry

    def swap(self, own: Entry, content: bytes) -> Entry | None:
        return self._rewrite(own, dataclasses.replace(own, content=content))

    def delete(self, own: Entry) -> None:
        self._rewrite(own, dataclasses.replace(own, is_released=True))

    def age_s(self, entry: Entry) -> float:
        return time.monotonic() - self._seen[1] if entry.version == self._seen[0] else 0.0

    def _rewrite(self, own: Entry, new: Entry) -> Entry | None:
        entry = self._replace(own, new)
        # Our write lost its answer, or somebody removed the object. By the holder, not the number:
        # numbers begin anew in an object that was removed.
        if entry is None and ((newest := self.read()).content is None or newest.holder == own.holder):
            entry = self._replace(newest, new)
        return entry

    def _replace(self, old: Entry, new: Entry) -> Entry | None:
        """Writes `new` in place of `old`; returns it with its version, None if `old` is not the newest."""
        assert isinstance(old.version, bytes)
        assert new.content is not None
        self._writes += 1
        state = {
            "number": new.number,
            "writes": self._writes,
            "released": new.is_released,
            "record": new.content.decode(),
        }
        data = json.dumps(state, indent=1).encode()
        with _store_errors():
            version = stores.replace_version(self.path, data, old.version, answer_s=_ANSWER_S)
        return None if version is None else dataclasses.replace(new, version=version)


@contextlib.contextmanager
def _store_errors() -> Iterator[None]:
    """Converts the errors of TensorStore into OSError, as of a disk that is away."""
    try:
        yield
    except (ValueError, RuntimeError) as error:  # RuntimeError: a service without conditional writes (501)
        raise OSError(" ".join(str(error).split())) from error


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
