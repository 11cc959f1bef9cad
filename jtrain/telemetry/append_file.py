"""Files to which a run appends records, and whose trouble never ends it; and lines that are none, set
aside.
"""

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jtrain.runtime.atomic_io import write_whole

KEPT_BYTES = 16 << 20
"""Bytes of records that are kept in memory while they cannot be written: days of metrics lines."""


class WriteTrouble:
    """Says once that a file cannot be written, and once how that ended. Not once per record."""

    def __init__(self, path: Path, say: Callable[[str], None] | None = None) -> None:
        self._path = path
        self._say = say or _to_stderr
        self._why: str | None = None

    def failed(self, error: OSError, meanwhile: str) -> None:
        """Says why the file cannot be written, and what happens meanwhile; silent until `worked` or
        `gave_up`.
        """
        if self._why is None:
            self._why = error.strerror or str(error)
            self._say(f"warning: {self._path} cannot be written ({self._why}): training goes on, {meanwhile}")

    def worked(self, lost: str = "nothing is lost") -> None:
        """Says that the file is written again, if it was not before."""
        if self._why is not None:
            self._why = None
            self._say(f"{self._path} is written again: {lost}")

    def gave_up(self, lost: str) -> None:
        """Says what is lost for good, if the file could not be written until the end."""
        if self._why is not None:
            self._say(f"warning: {self._path}: {lost}, because it could not be written ({self._why})")
            self._why = None


class AppendFile:
    """File of records, such as lines, that several threads append to.

    A record is written in one system call, so that after a kill it is complete or absent. While the disk is
    full, away or read-only, records are kept in memory, up to `KEPT_BYTES`, and written in order as soon as
    that works again.

    Args:
      path: the file; it is opened, and its folder made, at the first record.
      say: prints a warning; None for stderr.
      mode: permissions of a new file; the umask takes its share away.
      durable: forces each record to the disk.
    """

    def __init__(
        self,
        path: Path,
        *,
        say: Callable[[str], None] | None = None,
        mode: int = 0o666,
        durable: bool = False,
    ) -> None:
        self._path = path
        self._mode = mode
        self._durable = durable
        self._trouble = WriteTrouble(path, say)
        self._file: int | None = None
        self._kept: list[bytes] = []
        self._kept_bytes = 0
        self._lost = 0
        self._lock = threading.Lock()

    def append(self, record: bytes) -> None:
        """Writes a record, and those kept before it; never raises OSError."""
        with self._lock:
            if self._kept_bytes + len(record) > KEPT_BYTES:
                self._lost += 1
            else:
                self._kept.append(record)
                self._kept_bytes += len(record)
            self._write_kept()

    def close(self) -> None:
        """Tries once more to write what was kept, says what is lost, and closes the file."""
        with self._lock:
            if self._kept:
                self._write_kept()
            lost = self._lost + len(self._kept)
            if lost:
                self._trouble.gave_up(_lost(lost))
            self._kept, self._kept_bytes, self._lost = [], 0, 0
            self._close()

    def _write_kept(self) -> None:
        done = 0
        try:
            if self._file is None:
                self._path.parent.mkdir(exist_ok=True)
                self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, self._mode)
            for record in self._kept:
                _write_record(self._file, record)
                done += 1
            if self._durable:
                os.fsync(self._file)
        except OSError as error:
            self._close()  # opened anew next time: the disk may have been mounted again
            self._trouble.failed(error, "its records are kept in memory")
        self._kept_bytes -= sum(len(record) for record in self._kept[:done])
        del self._kept[:done]
        if not self._kept:
            self._trouble.worked(_lost(self._lost) if self._lost else "all records are in it")
            self._lost = 0

    def _close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # the network's disk may report here what it lost
                os.close(self._file)
            self._file = None


def _lost(records: int) -> str:
    return "1 record is lost" if records == 1 else f"{records} records are lost"


def _write_record(file: int, record: bytes) -> None:
    """Appends a record in one system call; a part of it that a full disk accepted is cut off again."""
    written = os.write(file, record)
    if written == len(record):
        return
    before = os.fstat(file).st_size - written
    try:
        while written < len(record):
            written += os.write(file, record[written:])  # raises the error of a full disk
    except OSError:
        os.ftruncate(file, before)
        raise


def parsed(line: bytes) -> dict[str, Any] | None:
    """Returns the JSON object in a line; None if there is none: garbage, half a line, or two halves run
    together.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def keep_lines(path: Path, keep: Callable[[dict[str, Any]], bool | None]) -> int:
    """Rewrites a file of JSON lines; returns how many lines were bad and are now in `<name>.damaged` beside
    it.

    Atomic: a kill leaves the old or the new file. A file without anything to remove is left alone.

    Args:
      keep: True for a line that stays, False for one to drop, None for one that is bad.
    """
    if not path.exists():
        return 0
    content = path.read_bytes()
    kept, bad = [], []
    for line in content.splitlines(keepends=True):
        value = parsed(line)
        verdict = None if value is None else keep(value)
        if verdict is None:
            bad.append(line)
        elif verdict:
            kept.append(line)
    if kept and not kept[-1].endswith(b"\n"):
        kept[-1] += b"\n"
    if bad:
        aside = path.with_name(path.name + ".damaged")
        before = aside.read_bytes() if aside.exists() else b""
        write_whole(aside, before + b"".join(line.rstrip(b"\n") + b"\n" for line in bad))
    if (new := b"".join(kept)) != content:
        write_whole(path, new)
    return len(bad)


def aside_text(path: Path, count: int) -> str:
    """Line that says where bad lines are."""
    return (
        f"warning: {count} line{'s' if count > 1 else ''} of {path} could not be read; moved to "
        f"{path.name}.damaged"
    )


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
