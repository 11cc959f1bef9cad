"""One training process, as its supervisor sees it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TextIO

from jtrain.runtime.lease import Watch
from jtrain.supervise.heart import STACKS_SIGNAL, VARIABLE, Beat
from jtrain.supervise.verdict import Watched
from jtrain.telemetry.alerts import AlertsSpec

# One for all processes: a line of one does not break into a line of another.
_OUTPUT = threading.Lock()


class WatchedProcess:
    """A training process with a session of its own, so that its loaders and constructors end with it.

    Args:
      command: argument vector.
      environ: its environment.
      index: number of the process; None if only the process itself will know it.
      host: name of this host.
      prefix: put before each line that it prints, also by C++; "" leaves its output as it is.
      bar: leave its standard output as it is: a progress bar on a terminal.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        index: int | None,
        host: str,
        prefix: str,
        bar: bool,
    ) -> None:
        self._index, self._host = index, host
        self.beat: Beat | None = None
        self.alerts: AlertsSpec | None = None
        self.code: int | None = None
        self.ended_s: float | None = None
        self._watch = Watch()
        self._stopped_since_s: float | None = None
        # A file, not a pipe: faulthandler writes with nobody reading, and a full pipe would block it.
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        reading, writing = os.pipe()
        pipe = subprocess.PIPE if prefix else None
        try:
            self._process = subprocess.Popen(
                command,
                env={**environ, VARIABLE: f"{writing},{self._stacks.fileno()}"},
                stdin=subprocess.DEVNULL,
                stdout=None if bar else pipe,
                stderr=pipe,
                pass_fds=(writing, self._stacks.fileno()),
                start_new_session=True,
            )
        finally:
            # Only the child holds it now, so the end of the pipe means that the child has ended.
            os.close(writing)
        self.pid = self._process.pid
        self._threads = [
            threading.Thread(target=copy_lines, args=(stream, target, prefix), daemon=True)
            for stream, target in ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr))
            if stream is not None
        ]
        self._threads.append(threading.Thread(target=self._listen, args=(reading,), daemon=True))
        self._waiter = threading.Thread(target=self._wait, daemon=True)
        for thread in (*self._threads, self._waiter):
            thread.start()

    @property
    def index(self) -> int | None:
        """Number of the process among all of the run; None while nobody knows it."""
        return self.beat.process if self.beat is not None and self.beat.process is not None else self._index

    @property
    def name(self) -> str:
        number = "the process" if self.index is None else f"process {self.index}"
        return f"{number} on {self._host} (pid {self.pid})"

    def snapshot(self) -> Watched:
        """Returns what is known of the process at this moment."""
        now_s = time.monotonic()
        if state_of(self.pid) != "T":
            self._stopped_since_s = None
        elif self._stopped_since_s is None:
            self._stopped_since_s = now_s
        stopped_s = None if self._stopped_since_s is None else now_s - self._stopped_since_s
        return Watched(self.name, stopped_s, self.beat, self._watch.silent_s)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process itself, if it still runs."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                # Popen.send_signal may reap the process, and the waiting thread's waitid would then fail.
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends the process and everything it started, at once."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def join(self) -> None:
        """Waits until the process has ended and its last lines are printed."""
        self._waiter.join()
        for thread in self._threads:
            thread.join(timeout=5.0)  # a process that left the session may keep the pipe open

    def stacks(self) -> str:
        """Python stacks of all threads, by the process itself or by py-spy, or why there are none."""
        previous_size = os.fstat(self._stacks.fileno()).st_size
        # A stopped process runs no handler, and without a handler SIGUSR2 would kill it.
        if self.code is None and self._stopped_since_s is None and has_handler(self.pid, STACKS_SIGNAL):
            self.send(STACKS_SIGNAL)
            last_size, until_s = previous_size, time.monotonic() + 3.0
            while time.monotonic() < until_s:
                time.sleep(0.2)  # the process writes its stacks itself, and does not say when it is done
                current_size = os.fstat(self._stacks.fileno()).st_size
                # The size stood still for 0.2 s: all stacks are written.
                if current_size > previous_size and current_size == last_size:
                    break
                last_size = current_size
            if last_size > previous_size:
                return os.pread(self._stacks.fileno(), last_size - previous_size, previous_size).decode(
                    errors="replace"
                )
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            # --nonblocking: py-spy does not pause the process while it reads.
            spy = ["py-spy", "dump", "--nonblocking", "--pid", str(self.pid)]
            dump = subprocess.run(spy, capture_output=True, text=True, timeout=10.0, check=False)
            if dump.returncode == 0:
                return dump.stdout
        return "no stacks: it does not answer, and py-spy is not installed or may not read it"

    def _listen(self, reading: int) -> None:
        with open(reading, "rb") as beats:
            for line in beats:
                payload = json.loads(line)["payload"]
                if payload["alerts"] is not None:
                    self.alerts = AlertsSpec(**payload["alerts"])
                self.beat = Beat.of(payload["beat"])
                self._watch.saw(line)

    def _wait(self) -> None:
        # The group is swept before the process is reaped: until then no other process can have its number.
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self.ended_s = time.monotonic()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.code = self._process.wait()


def copy_lines(stream: IO[bytes], target: TextIO, prefix: str) -> None:
    """Copies a stream line by line to `target`, with `prefix`, also while nobody takes the lines.

    On a terminal a line replaces a progress bar, which draws itself again below.
    """
    out = target.buffer
    line_start = (b"\r\x1b[K" if target.isatty() else b"") + prefix.encode()
    for line in stream:
        with contextlib.suppress(OSError, ValueError), _OUTPUT:
            # The last line of a process that was killed may have no end.
            out.write(line_start + line.rstrip(b"\n") + b"\n")
            out.flush()


def state_of(pid: int) -> str:
    """State letter of a process in /proc (T: stopped by a signal); "" if there is none."""
    with contextlib.suppress(OSError):
        # The name in parentheses may hold spaces and parentheses, so the last ")" counts.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def has_handler(pid: int, number: signal.Signals) -> bool:
    """True if a process has a handler for a signal; without one SIGUSR2 would end it."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        mask = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
        # Bit number - 1 of the mask of caught signals.
        return bool(int(mask, 16) >> (number - 1) & 1)
    return False
