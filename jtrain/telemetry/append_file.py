"""Files to which a run appends records, and whose trouble never ends it; unreadable lines set aside."""

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jtrain.errors import FileError
from jtrain.runtime.atomic_io import write_whole

KEPT_BYTES = 16 << 20
"""Bytes of records that are kept in memory while they cannot be written: days of metrics lines."""


class WriteTrouble:
    """Says once that a file cannot be written, and once how that ended. Not once per record."""

    def __init__(self, path: Path, say: Callable[[str], None] | None = None) -> None:
        self._path = path
        self._say = say or _to_stderr
        self._reason: str | None = None

    def report_failure(self, error: OSError, meanwhile: str) -> None:
        """Says why the file cannot be written, and what happens meanwhile; once until it ended."""
        if self._reason is None:
            self._reason = error.strerror or str(error)
            self._say(
                f"warning: {self._path} cannot be written ({self._reason}): training goes on, {meanwhile}"
            )

    def report_recovery(self, lost: str = "nothing is lost") -> None:
        """Says that the file is written again, if it was not before."""
        if self._reason is not None:
            self._reason = None
            self._say(f"{self._path} is written again: {lost}")

    def report_loss(self, lost: str) -> None:
        """Says what is lost for good, if the file could not be written until the end."""
        if self._reason is not None:
            self._say(f"warning: {self._path}: {lost}, because it could not be written ({self._reason})")
            self._reason = None


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
        self._unwritten: list[bytes] = []
        self._unwritten_bytes = 0
        self._lost = 0
        self._lock = threading.Lock()

    def append(self, record: bytes) -> None:
        """Writes a record, and those kept before it; never raises OSError."""
        with self._lock:
            # No room: this record is dropped and counted, and those before it stay in order.
            if self._unwritten_bytes + len(record) > KEPT_BYTES:
                self._lost += 1
            else:
                # Every record goes through the list, so that the order holds when a disk comes back.
                self._unwritten.append(record)
                self._unwritten_bytes += len(record)
            self._write_pending()

    def close(self) -> None:
        """Tries once more to write what was kept, says what is lost, and closes the file."""
        with self._lock:
            if self._unwritten:
                self._write_pending()
            num_lost = self._lost + len(self._unwritten)
            if num_lost:
                self._trouble.report_loss(_lost_text(num_lost))
            self._unwritten, self._unwritten_bytes, self._lost = [], 0, 0
            self._close()

    def _write_pending(self) -> None:
        num_written = 0
        try:
            if self._file is None:
                # Only the file's own folder is made: where the workdir is gone too, records stay in memory.
                self._path.parent.mkdir(exist_ok=True)
                self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, self._mode)
            for record in self._unwritten:
                _write_record(self._file, record)
                num_written += 1
            if self._durable:
                # Once for all records of this turn, as one fsync costs milliseconds.
                os.fsync(self._file)
        except OSError as error:
            self._close()  # opened anew next time: the disk may have been mounted again
            self._trouble.report_failure(error, "its records are kept in memory")
        self._unwritten_bytes -= sum(len(record) for record in self._unwritten[:num_written])
        # Records before the error are in the file; writing them again would double them.
        del self._unwritten[:num_written]
        if not self._unwritten:
            self._trouble.report_recovery(_lost_text(self._lost) if self._lost else "all records are in it")
            self._lost = 0

    def _close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # the network's disk may report here what it lost
                os.close(self._file)
            self._file = None


def _lost_text(records: int) -> str:
    return "1 record is lost" if records == 1 else f"{records} records are lost"


def _write_record(file: int, record: bytes) -> None:
    """Appends a record in one system call; a part of it that a full disk accepted is cut off again."""
    written = os.write(file, record)
    if written == len(record):
        return
    # O_APPEND wrote at the end, so the record began at the size minus what was written.
    previous_size = os.fstat(file).st_size - written
    try:
        while written < len(record):
            written += os.write(file, record[written:])  # raises the error of a full disk
    except OSError:
        os.ftruncate(file, previous_size)
        raise


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Returns the JSON object in a line; None for garbage, half a line, or two halves run together."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def check_is_file(path: Path) -> None:
    """Refuses what a run would read or append to if it is a folder or a pipe, which would block for ever.

    Raises:
      FileError: it is no regular file; says what it is.
    """
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe" if path.is_fifo() else "no regular file"
        raise FileError(
            f"{path} is {kind}, but a run keeps its records in a file of that name. Move it away; the same "
            "command then makes a new one."
        )


def keep_lines(path: Path, judge_line: Callable[[dict[str, Any]], bool | None]) -> int:
    """Rewrites a file of JSON lines; returns the number of bad ones, now in `<name>.damaged` beside it.

    Atomic: a kill leaves the old or the new file. A file without anything to remove is left alone.

    Args:
      judge_line: True for a line that stays, False for one to drop, None for one that is bad.
    """
    if not path.exists():
        return 0
    check_is_file(path)
    content = path.read_bytes()
    kept_lines, bad_lines = [], []
    for line in content.splitlines(keepends=True):
        value = parse_line(line)
        verdict = None if value is None else judge_line(value)
        if verdict is None:
            bad_lines.append(line)
        elif verdict:
            kept_lines.append(line)
    # A last line without a line end would swallow the next record.
    if kept_lines and not kept_lines[-1].endswith(b"\n"):
        kept_lines[-1] += b"\n"
    if bad_lines:
        damaged_path = path.with_name(path.name + ".damaged")
        previous_bytes = damaged_path.read_bytes() if damaged_path.exists() else b""
        # Set aside before the file is rewritten: a kill in between leaves a line twice, not lost.
        write_whole(damaged_path, previous_bytes + b"".join(line.rstrip(b"\n") + b"\n" for line in bad_lines))
    if (new_content := b"".join(kept_lines)) != content:
        write_whole(path, new_content)
    return len(bad_lines)


def damaged_text(path: Path, count: int) -> str:
    """Line that says where bad lines are."""
    return (
        f"warning: {count} line{'s' if count > 1 else ''} of {path} could not be read; moved to "
        f"{path.name}.damaged"
    )


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
