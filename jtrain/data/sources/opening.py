"""Progress of opening a source, which may list, copy and index many files: said in the log while it takes
long.
"""

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

from jtrain.data.sources.source import field_of

FIRST_LINE_AFTER_S, LINE_EVERY_S = 2.0, 10.0
"""Seconds after which the first line says what is being opened, and between two lines."""


class Opened(NamedTuple):
    """Files that are open of those that are being opened, and their bytes.

    of_files: 0 while files are looked for.
    of_bytes: 0 if a server does not tell.
    """

    files: int = 0
    of_files: int = 0
    size_bytes: int = 0
    of_bytes: int = 0

    def line(self, label: str, seconds: float) -> str:
        """Returns a line for the log.

        Args:
          label: who opens which source.
          seconds: how long that has taken.
        """
        if not self.of_files:
            return f"data: {label}: {seconds:.0f} s so far"
        total_mib = f" of {self.of_bytes / 2**20:,.1f}" if self.of_bytes else ""
        return (
            f"data: {label}: {self.files:,} of {self.of_files:,} files, "
            f"{self.size_bytes / 2**20:,.1f}{total_mib} MiB, {seconds:.0f} s so far"
        )


class Opening:
    """Context in which files are opened, by several threads at a time; a context within it is the same one.

    This class tells nobody; a subclass overrides `begin`, `changed` and `end`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._bytes_of_unopened: dict[int, int] = {}
        self._total = Opened()
        self.begun_s = 0.0

    def __enter__(self) -> "Opening":
        self._depth += 1
        # The outermost context alone resets the count: a corpus opens its files within that of its source.
        if self._depth == 1:
            self._total, self._bytes_of_unopened, self.begun_s = Opened(), {}, time.monotonic()
            self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self.end()

    def expect(self, files: int, size_bytes: int) -> None:
        """Notes that these files will be opened, in all."""
        self._total = Opened(0, files, 0, size_bytes)
        self.changed()

    def read(self, file: int, size_bytes: int) -> None:
        """Notes that so many bytes of a file were read."""
        with self._lock:
            # Reads may be reported late by another thread, and progress never goes back.
            self._bytes_of_unopened[file] = max(size_bytes, self._bytes_of_unopened.get(file, 0))
        self.changed()

    def opened(self, file: int, size_bytes: int) -> None:
        """Notes that a file of this size, 0 if a server did not tell, is open."""
        with self._lock:
            # A server that told no size: counts the bytes that came.
            size_bytes = size_bytes or self._bytes_of_unopened.get(file, 0)
            # Its bytes are in the total from now on.
            self._bytes_of_unopened.pop(file, None)
            total = self._total
            self._total = total._replace(files=total.files + 1, size_bytes=total.size_bytes + size_bytes)
        self.changed()

    @property
    def so_far(self) -> Opened:
        """Files and bytes that are open so far, with the bytes that were read of further files."""
        with self._lock:
            return self._total._replace(
                size_bytes=self._total.size_bytes + sum(self._bytes_of_unopened.values())
            )

    def begin(self) -> None:
        """Called when opening begins."""

    def changed(self) -> None:
        """Called when files or bytes were added, by any thread."""

    def end(self) -> None:
        """Called when all is open, or opening failed."""


class LoggedOpening(Opening):
    """Opening that says a line in the log from time to time while it takes long, also while no file makes
    progress.

    Args:
      say: called with each line, in a thread.
      label: see `Opened.line`.
    """

    def __init__(self, say: Callable[[str], None], label: str) -> None:
        super().__init__()
        self._say, self._label = say, label

    def begin(self) -> None:
        self._ended = threading.Event()
        # A daemon: a process that ends while it opens a source does not wait for the line.
        self._thread = threading.Thread(target=self._talk, name="data-opening", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _talk(self) -> None:
        wait_s = FIRST_LINE_AFTER_S
        while not self._ended.wait(wait_s):
            self._say(self.so_far.line(self._label, time.monotonic() - self.begun_s))
            wait_s = LINE_EVERY_S


def opening_of(name: str, say: Callable[[str], None] | None) -> Opening:
    """Returns the context in which a source is opened, by its name; without `say` it tells nobody."""
    return Opening() if say is None else LoggedOpening(say, f"opening {field_of(name)}")
