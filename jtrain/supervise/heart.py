"""Heartbeat of a training process: once a second it tells its supervisor its phase and step, over a pipe.

The beats are those of a lease, which the process holds for its supervisor to see: a thread of its own writes
them, so a process that is stopped (no beats) differs from one whose main thread waits in a collective (beats,
but no progress). Standard library only, because the heart starts before jax is imported.
"""

import atexit
import collections
import contextlib
import ctypes
import dataclasses
import faulthandler
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Literal

from jtrain.runtime.lease import Lease
from jtrain.runtime.lease_stores import MessageStore
from jtrain.supervise.spec import SuperviseSpec
from jtrain.telemetry.alerts import AlertsSpec

VARIABLE = "JTRAIN_SUPERVISED"
"""Environment variable with the file numbers of the pipe for beats and of the file for stacks."""

STACKS_SIGNAL = signal.SIGUSR2
"""Signal at which a process writes the Python stacks of all its threads."""

END_S = 30.0
"""How long the end of a process waits for the heart's thread, which may be reading a compiled program."""
BEAT_S = 1.0
_PR_SET_PDEATHSIG = 1

type HeartPhase = Literal[
    "start-up", "joining", "setup", "restore", "compile", "step", "dispatch", "device_wait", "data_wait",
    "evaluation", "checkpoint", "profile", "ending",
]  # fmt: skip
"""What a process does: the phases of the training loop, and those before and after it."""

STEPPING: tuple[HeartPhase, ...] = ("step", "dispatch", "device_wait")
"""Phases that pass within a step; their limit is that of the step as a whole."""

_STEPS = 64
"""Number of step times of which the median is taken."""


@dataclasses.dataclass(frozen=True)
class Beat:
    """One heartbeat.

    process, processes: number of this process and of all, as jax says; None before they have joined.
    start_step: step that this attempt resumed from; None before the state is there.
    step: step that the process works on.
    quiet_s: time in this phase, or in the phases of STEPPING time since the step began.
    step_s: median step time; None before the third step.
    collectives: collectives of the compiled step in words; "" if there are none or they are not known.
    limits: settings of the run's supervisor, once the config is read.
    """

    process: int | None
    processes: int | None
    start_step: int | None
    step: int
    phase: HeartPhase
    quiet_s: float
    step_s: float | None
    collectives: str
    limits: SuperviseSpec | None

    @staticmethod
    def of(values: Mapping[str, Any]) -> "Beat":
        """Returns the beat of which `values` are the fields, as JSON gives them."""
        limits = values["limits"]
        return Beat(**{**values, "limits": None if limits is None else SuperviseSpec(**limits)})


class Heart:
    """Writer of a process's heartbeats. The main thread only sets fields, which costs it about a microsecond.

    Args:
      beats: file number of the pipe to the supervisor.
      stacks: file number to which the stacks of all threads are written at STACKS_SIGNAL.
    """

    def __init__(self, beats: int, stacks: int) -> None:
        os.set_blocking(beats, False)  # a supervisor that is stopped must not stop its processes
        faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
        self._main = threading.get_ident()
        # One tuple, replaced as a whole: the heart's thread never reads a phase with another one's step.
        self._position: tuple[HeartPhase, int, float] = ("start-up", 0, time.monotonic())
        self._process: int | None = None
        self._processes: int | None = None
        self._start_step: int | None = None
        self._limits: SuperviseSpec | None = None
        self._alerts: AlertsSpec | None = None
        self._collectives = ""
        self._describe: Callable[[], str] | None = None
        self._has_dispatched = False
        self._step_began_s = 0.0
        self._times: collections.deque[float] = collections.deque(maxlen=_STEPS)
        # A record has less than 4 KiB, so it arrives whole.
        store = MessageStore(lambda record: os.write(beats, record))
        self._lease = Lease(store, beat_s=BEAT_S, payload=self._payload, on_lost=_stop_alone)
        self._lease.seize()
        # Lets the thread finish: Python aborts a process that it closes while a thread is in C++ code.
        atexit.register(self._lease.release, END_S)

    def enter(self, phase: HeartPhase) -> None:
        """Announces a phase outside of the loop."""
        self._position = (phase, self._position[1], time.monotonic())

    def configure(self, limits: SuperviseSpec, alerts: AlertsSpec | None = None) -> None:
        """Tells the supervisor the run's settings, and who gets a hang's alert; `alerts.file` is absolute."""
        self._limits, self._alerts = limits, alerts
        self._lease.beat_soon()

    def joined(self, process: int, processes: int) -> None:
        """Tells the supervisor which process of how many this one is."""
        self._process, self._processes = process, processes
        self._lease.beat_soon()

    def started(self, step: int) -> None:
        """Tells the supervisor that the state of `step` is there: 0, or a restored checkpoint's step."""
        self._start_step = step
        self._position = ("setup", step, time.monotonic())
        self._lease.beat_soon()

    def describe(self, collectives: Callable[[], str]) -> None:
        """Has the heart's thread call `collectives` once, for the text that a hang is reported with."""
        self._describe = collectives

    @contextlib.contextmanager
    def during(self, phase: HeartPhase, step: int) -> Iterator[None]:
        """Context of a phase of the loop; phases may be nested."""
        outer_position, now_s = self._position, time.monotonic()
        if phase == "dispatch" and not self._has_dispatched:
            phase = "compile"  # the first call traces and compiles
            self._has_dispatched = True
        is_within_step = phase in STEPPING
        # Phases within a step keep its begin, so that the limit of a step holds for all together.
        self._position = (phase, step, outer_position[2] if is_within_step and phase != "step" else now_s)
        if phase == "step":
            self._step_began_s = now_s
        try:
            yield
        finally:
            end_s = time.monotonic()
            if phase == "step":
                self._times.append(end_s - self._step_began_s)
            elif not is_within_step:
                self._step_began_s += end_s - now_s  # evaluations and saves are no part of a step's time
            # After a step, and after a phase with a limit of its own, the time of a step begins anew.
            if phase == "step":
                self._position = ("step", step, end_s)
            else:
                self._position = (outer_position[0], step, outer_position[2] if is_within_step else end_s)

    def beat(self) -> Beat:
        """Returns the heartbeat of this moment."""
        phase, step, since_s = self._position
        if self._is_compiling():
            phase = "compile"
        # A copy: the main thread may append meanwhile.
        times = list(self._times)
        return Beat(
            self._process,
            self._processes,
            self._start_step,
            step,
            phase,
            time.monotonic() - since_s,
            statistics.median(times) if len(times) >= 2 else None,
            self._collectives,
            self._limits,
        )

    def _is_compiling(self) -> bool:
        """True if the main thread is in jax's compiler; any phase may compile, and that takes minutes."""
        # Another thread's stack, without its help: it is in C++ and cannot answer.
        frame = sys._current_frames().get(self._main)
        while frame is not None:
            if frame.f_code.co_filename.endswith("jax/_src/compiler.py"):
                return True
            frame = frame.f_back
        return False

    def _payload(self) -> dict[str, Any]:
        """Returns the beat, and apart from it, because others may read beats, who gets alerts."""
        if (describe := self._describe) is not None:
            self._describe = None
            # A beat must fit into one write of 4 KiB to a pipe.
            self._collectives = describe()[:1000]
        alerts = None if self._alerts is None else dataclasses.asdict(self._alerts)
        return {"beat": dataclasses.asdict(self.beat()), "alerts": alerts}


def _stop_alone() -> None:
    """Asks this process to save and end: nobody reads its beats any more."""
    with contextlib.suppress(OSError):
        os.write(2, b"\nThe supervisor is gone: stopping, with a checkpoint.\n")
    # As if the scheduler had asked: the loop saves and ends.
    os.kill(os.getpid(), signal.SIGTERM)


def start_heart(environ: MutableMapping[str, str]) -> Heart | None:
    """Starts the heartbeat if a supervisor started this process; takes its variable out of `environ`."""
    # Taken out, or a child of this process would beat for it.
    numbers = environ.pop(VARIABLE, None)
    if numbers is None:
        return None
    beats, stacks = (int(number) for number in numbers.split(","))
    for number in (beats, stacks):
        os.set_inheritable(number, False)  # the beats' end of file must mean that this process has ended
    # If the supervisor dies, the kernel continues this process: stopped, it would not notice the closed pipe.
    with contextlib.suppress(OSError, AttributeError):  # another system than Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
    return Heart(beats, stacks)
