"""Output that never ends a run: prints go on, without effect, when nobody reads them or their disk is
full.
"""

import contextlib
import errno
import io
import os
import select
import sys
from typing import TextIO, cast


def keep_going_without_readers() -> None:
    """Replaces sys.stdout and sys.stderr by streams that never raise OSError, if they are the process's own.

    After `... | head` every print would raise BrokenPipeError, and the interpreter would end with exit code
    120. Call it first of all. Streams that tests or notebooks have put there stay.
    """
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        sys.stdout = _make_tolerant(sys.stdout)
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        sys.stderr = _make_tolerant(sys.stderr)


def _make_tolerant(stream: TextIO) -> TextIO:
    assert isinstance(stream, io.TextIOWrapper)
    # What the old buffer holds comes first.
    with contextlib.suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(cast(io.RawIOBase, _Tolerant(stream.fileno()))),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Tolerant(io.FileIO):
    """File descriptor 1 or 2, whose errors are counted and named on the other one, or once it can be written
    again.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self._lost_bytes = 0
        self._why = ""

    def write(self, data: bytes | memoryview, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]: any buffer
        try:
            # First tells about the gap, so that a log with holes says where they are.
            if self._lost_bytes:
                note = f"\n[{self._lost_bytes} bytes of output were lost here: {self._why}]\n".encode()
                self._write(note)
                self._lost_bytes = 0
            return self._write(data)
        except OSError as error:
            if not self._lost_bytes:
                self._warn(error)
            # Nobody will ever read it: the reader or the terminal is gone.
            if error.errno in (errno.EPIPE, errno.EIO):
                # The descriptor itself points to /dev/null: child processes and C code print to it, too.
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.fileno())
                os.close(nowhere)
            else:
                self._lost_bytes += len(data)
            return len(data)

    def _write(self, data: bytes | memoryview) -> int:
        while (
            written := super().write(data)
        ) is None:  # somebody has made the pipe non-blocking, and it is full
            # Waits until the reader has made room, as a blocking pipe would.
            select.select([], [self.fileno()], [])
        return written

    def _warn(self, error: OSError) -> None:
        self._why = error.strerror or str(error)
        name = {1: "stdout", 2: "stderr"}.get(self.fileno(), "output")
        with contextlib.suppress(OSError):
            os.write(
                # 3 - 1 = 2 and 3 - 2 = 1: the other stream.
                3 - self.fileno(),
                f"warning: {name} cannot be written ({self._why}): going on without it\n".encode(),
            )
