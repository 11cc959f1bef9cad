"""Places of leases: a folder that hosts share, and messages to one watcher. Standard library only."""

import contextlib
import dataclasses
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from jtrain.runtime.lease import Entry

_RELEASED = ".released"


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
                    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
            except FileExistsError:
                return None
        try:
            try:
                os.write(handle, content)
                os.fsync(handle)
                written_ns = os.fstat(handle).st_mtime_ns
            finally:
                os.close(handle)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        # This number was free because its holder had been replaced, or had released it, since this process
        # looked.
        if max(self._names(), default=0) > number or path.with_name(path.name + _RELEASED).exists():
            path.unlink(missing_ok=True)
            return None
        for older, name in self._names().items():
            if older < number:
                (self.folder / name).unlink(missing_ok=True)
        return Entry(number, content, written_ns)

    def swap(self, own: Entry, content: bytes) -> Entry | None:
        if max(self._names(), default=0) > own.number:
            return None
        path = self.folder / str(own.number)
        if content == own.content:
            with contextlib.suppress(
                FileNotFoundError
            ):  # somebody removed the file; the number is still this holder's
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
        now = self.folder / f"now.{os.getpid()}.{secrets.token_hex(4)}"
        try:
            now.touch()
            assert isinstance(entry.version, int)
            return 1e-9 * (now.stat().st_mtime_ns - entry.version)
        finally:
            now.unlink(missing_ok=True)

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
            pass
        except OSError:
            return None
        return own

    def delete(self, own: Entry) -> None:
        """Does nothing: the end of the messages tells it."""

    def age_s(self, entry: Entry) -> float:
        return 0.0
