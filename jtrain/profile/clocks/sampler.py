"""Sampling of clocks and power during the whole run, in a child process, so that no step waits for a driver.

    python -m jtrain.profile.clocks.sampler '{"source": "nvml", "devices": [0], "path": "samples.bin",
    "parent": 4711}'

A thread would be late: with both cores busy, a thread that should run every millisecond came up to 28 ms late
(p99 7 ms). The child writes fixed-size records to a file used as a ring buffer, so that a run of a week
leaves 48 MB. Written records survive a SIGKILL of either process. The child ends when its stdin ends, and the
kernel kills it when its parent's thread dies, even if a forked sibling keeps the pipe open: start it on the
main thread.
"""

import contextlib
import ctypes
import dataclasses
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.profile.clocks import samples
from jtrain.profile.clocks.reading import ClockSource
from jtrain.profile.clocks.samples import MIN_HOLD_NS, RECORD, energy_j
from jtrain.profile.clocks.select import choose, open_source
from jtrain.runtime.atomic_io import write_whole

CAPACITY = 500_000
"""Records in the ring buffer, 48 MB: 2.7 hours of one device at 20 ms, 20 minutes of eight."""

FAST, SLOW = b"f", b"s"


@dataclasses.dataclass(frozen=True)
class Means:
    """Mean clock, mean power and energy over a span, per device of this process; None where unknown."""

    sm_mhz: tuple[float | None, ...]
    power_w: tuple[float | None, ...]
    energy_j: tuple[float | None, ...]


class Sampler:
    """Starts the child process that samples, and reads its file; never waits for the child.

    Args:
      folder: folder for the child's file; every process of a run has its own file in it.
      source: `ProfileSpec.clocks`.
      platform: cpu, gpu or tpu, as JAX names them; selects the source for "auto".
      devices: for each device of this process, its number among the devices that the driver shows.

    Raises:
      UserError: the source was asked for by name and cannot be read here.
    """

    def __init__(self, folder: Path, *, source: str, platform: str, devices: Sequence[int]) -> None:
        self._num_devices = len(devices)
        self._chosen, self._note = choose(source, platform)
        self._child: subprocess.Popen[bytes] | None = None
        self._file = -1
        self._read = 0
        self._recent = np.zeros(0, RECORD)
        if self._chosen == "none":
            return
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stale_files(folder)
        self._path = folder / f"{socket.gethostname()}-{os.getpid()}.bin"
        self._path.with_suffix(".json").unlink(missing_ok=True)
        # Opened before the child starts: the child writes to the same file, and must find it.
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        options = {
            "source": self._chosen,
            "devices": list(devices),
            "path": str(self._path.absolute()),
            "parent": os.getpid(),
        }
        # The child finds jtrain where this process found it, installed or not.
        root = str(Path(__file__).parents[3])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        with open(self._path.with_suffix(".log"), "wb") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "jtrain.profile.clocks.sampler", json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                # More threads for numpy would only cost memory.
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1"},
            )
        assert self._child.stdin is not None
        # A child that is stuck in the driver does not empty its pipe; the run must not wait for it.
        os.set_blocking(self._child.stdin.fileno(), False)

    def __enter__(self) -> "Sampler":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Process id of the child; None if nothing is sampled."""
        return None if self._child is None else self._child.pid

    @property
    def note(self) -> str:
        """Quantities that are not sampled, with the reason, one per line; empty if there are none so far."""
        return "\n".join(self._notes())

    def facts(self) -> dict[str, float | None]:
        """ref_mhz and max_mhz of the source; {} until the child has opened it."""
        header = self._header()
        values = {name: header[name] for name in ("ref_mhz", "max_mhz") if name in header}
        return {name: None if value is None else float(value) for name, value in values.items()}

    def fast(self, on: bool) -> None:
        """Samples more often, for a trace window, or at the normal rate again; never blocks."""
        if self._child is not None and self._child.stdin is not None:
            # A stuck child leaves its pipe full, a dead one broken; `note` reports the dead one.
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self._child.stdin.fileno(), FAST if on else SLOW)

    def means(self, start_epoch_ns: int, end_epoch_ns: int) -> Means:
        """Means over a span. Call it in order of time: it drops samples a second older than the span."""
        self._refresh()
        # Keeps one hold time before the span, since an older sample may still hold at its start.
        self._recent = self._recent[self._recent["epoch_ns"] >= start_epoch_ns - MIN_HOLD_NS]
        rows = [self._mean(device, start_epoch_ns, end_epoch_ns) for device in range(self._num_devices)]
        return Means(*(tuple(column) for column in zip(*rows, strict=True))) if rows else Means((), (), ())

    def _mean(
        self, device: int, start_ns: int, end_ns: int
    ) -> tuple[float | None, float | None, float | None]:
        # Device -1 stands for all devices.
        device_records = self._recent[(self._recent["device"] == device) | (self._recent["device"] == -1)]
        span_records = device_records[
            (device_records["epoch_ns"] >= start_ns) & (device_records["epoch_ns"] < end_ns)
        ]
        if not len(span_records):
            return None, None, None

        def mean(values: np.ndarray) -> float | None:
            known_values = values[values > 0]  # drops nan, and the 0 that some drivers report for unknown
            return float(known_values.mean()) if len(known_values) else None

        # Energy may come from a counter or from power; without both, samples need not be built.
        energy = None
        if np.isfinite(device_records["energy_j"]).any() or np.isfinite(device_records["power_w"]).any():
            device_samples = samples.from_records(device_records, device, self._chosen)
            energy = energy_j(device_samples, start_ns, end_ns)
        return mean(span_records["sm_mhz"]), mean(span_records["power_w"]), energy

    def save(self, folder: Path, start_epoch_ns: int, end_epoch_ns: int) -> None:
        """Writes a span's samples, with a second on either side, to samples-<device>.npz in `folder`."""
        if self._file < 0:
            return
        records = records_in(self._path)
        # The clock must be known at the edges of the span, too.
        is_near = (records["epoch_ns"] >= start_epoch_ns - MIN_HOLD_NS) & (
            records["epoch_ns"] <= end_epoch_ns + MIN_HOLD_NS
        )
        for device in range(self._num_devices):
            device_samples = samples.from_records(
                records[is_near], device, self._chosen, tuple(self._notes())
            )
            samples.write(folder / f"samples-{device}.npz", device_samples)

    def close(self) -> None:
        """Ends the child; its file stays."""
        if self._child is not None:
            assert self._child.stdin is not None
            # The end of its input is the child's signal to end.
            self._child.stdin.close()
            try:
                self._child.wait(timeout=1)
            except subprocess.TimeoutExpired:  # the child is stuck in the driver
                self._child.kill()
                self._child.wait()
            self._child = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _header(self) -> dict[str, Any]:
        if self._chosen == "none":
            return {}
        try:
            return json.loads(self._path.with_suffix(".json").read_text())
        except OSError:  # the child has not opened its source yet
            return {}

    def _notes(self) -> list[str]:
        # A refused source has said why in its header; any other end is an error worth a line.
        lines = [*filter(None, [self._note]), *self._header().get("notes", [])]
        if self._child is not None and self._child.poll() is not None and not self._header().get("refused"):
            log_lines = self._path.with_suffix(".log").read_text(errors="replace").strip().splitlines()
            reason = log_lines[-1] if log_lines else "without a message"
            lines.append(f"clocks: the sampler ended (exit code {self._child.returncode}): {reason}.")
        return lines

    def _refresh(self) -> None:
        """Reads the records that were written since the last call."""
        while self._file >= 0:
            # Reads up to the end of the ring; the loop goes round once more if that was reached.
            slot = self._read % CAPACITY
            try:
                records = _complete_records(
                    os.pread(self._file, (CAPACITY - slot) * RECORD.itemsize, slot * RECORD.itemsize)
                )
            except OSError:  # the disk is away
                return
            # Records that the ring buffer has overwritten unread are skipped.
            if len(records) and records["sequence"][0] > self._read + 1:
                self._read = int(records["sequence"][0]) - 1
            # A slot that still has a record of the round before, or half a new one, breaks the sequence.
            is_next = records["sequence"] == np.arange(self._read + 1, self._read + 1 + len(records))
            count = len(records) if is_next.all() else int(is_next.argmin())
            self._recent = np.concatenate([self._recent, records[:count]])
            self._read += count
            if self._read % CAPACITY or not count:
                return


def records_in(path: Path) -> np.ndarray:
    """All complete records of a sampler's file, oldest first; works if the sampler was killed."""
    records = _complete_records(path.read_bytes())
    # A slot that was never written is zero; sequence numbers count from 1.
    records = records[records["sequence"] > 0]
    return records[np.argsort(records["sequence"], kind="stable")]


def _complete_records(data: bytes) -> np.ndarray:
    return np.frombuffer(data[: len(data) - len(data) % RECORD.itemsize], RECORD)


def _remove_stale_files(folder: Path) -> None:
    """Removes files of processes of this host that no longer exist."""
    for path in folder.glob(f"{socket.gethostname()}-*"):
        pid = path.stem.rpartition("-")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            path.unlink(missing_ok=True)


def _end_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent dies; another child may keep stdin open."""
    # Meant for the run, which still needs samples: a terminal sends Ctrl-C to the whole process group.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        # prctl acts on later deaths only; a parent that died before it would leave this process behind.
        if os.getppid() != parent:
            os._exit(0)


def _write_header(path: Path, header: dict[str, Any]) -> None:
    # Not forced to the disk: after a crash of the machine nobody needs it.
    write_whole(path.with_suffix(".json"), json.dumps(header), durable=False)


def sample(source: ClockSource, path: Path, commands: int) -> None:
    """Reads every device until `commands` ends.

    Args:
      path: ring buffer of records.
      commands: file descriptor on which `FAST` and `SLOW` set the rate.
    """
    num_noted = -1
    sequence, period_s, due_s, slow_due_s = 0, source.period_s, time.monotonic(), 0.0
    with open(path, "r+b", buffering=0) as file:
        while True:
            slow = time.monotonic() >= slow_due_s
            if slow:
                # 1 ms of slack, or a slow reading that is due just after this turn comes a period late.
                slow_due_s = time.monotonic() + source.slow_period_s - 1e-3
            for device in source.devices:
                # A call of the driver takes up to milliseconds; the reading is dated to the middle of it.
                before_ns = time.monotonic_ns()
                reading = source.read(device, slow)
                epoch_ns, after_ns = time.time_ns(), time.monotonic_ns()
                reading_ns = (before_ns + after_ns) // 2
                sequence += 1
                record = np.zeros((), RECORD)
                for name, value in dataclasses.asdict(reading).items():
                    record[name] = value
                # Both clocks of one moment: `aligned` needs the monotonic one if the wall clock is set.
                record["sequence"], record["device"] = sequence, device
                record["monotonic_ns"], record["epoch_ns"] = reading_ns, epoch_ns - (after_ns - reading_ns)
                try:
                    # One call for all 96 bytes: a kill between two calls would leave half a record.
                    os.pwrite(file.fileno(), record.tobytes(), ((sequence - 1) % CAPACITY) * RECORD.itemsize)
                # A full disk: readers need records without a gap, so the next one takes this number.
                except OSError:
                    sequence -= 1
            # The header is written when a note is added, which is rare; once at the start, too.
            if len(source.notes.lines) != num_noted:
                num_noted = len(source.notes.lines)
                facts = {"source": source.name, "ref_mhz": source.ref_mhz, "max_mhz": source.max_mhz}
                with contextlib.suppress(OSError):
                    _write_header(path, facts | {"notes": source.notes.lines})
            due_s = max(due_s + period_s, time.monotonic())  # late readings are not made up for
            # Waits for the next reading and for commands at once; the end of input also wakes it.
            readable, _, _ = select.select([commands], [], [], max(due_s - time.monotonic(), 0))
            if readable:
                command = os.read(commands, 64)
                if not command:
                    return
                # Commands may pile up; the last one counts.
                period_s = source.fast_period_s if command.endswith(FAST) else source.period_s
                due_s = time.monotonic()


def main(argv: Sequence[str]) -> int:
    """Runs the child process; returns the exit code."""
    options = json.loads(argv[0])
    _end_with_parent(options["parent"])
    path = Path(options["path"])
    try:
        source = open_source(options["source"], options["devices"])
    except ValueError as error:
        # The run takes the reason from the header; `refused` tells this end from a crash.
        notes = [f"clocks: not sampled: {error}"]
        _write_header(path, {"source": options["source"], "notes": notes, "refused": True})
        return 2
    try:
        sample(source, path, sys.stdin.fileno())
    finally:
        source.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
