"""Callbacks of every run."""

import contextlib
from pathlib import Path
from typing import Any

from jtrain.config.run import Run
from jtrain.runtime.workdir_lock import WorkdirLock
from jtrain.telemetry.step_timer import StepTimes
from jtrain.train.alert_watch import AlertWatch
from jtrain.train.callbacks import Callback, DispatchedStep, LoopPhase, StepResults
from jtrain.train.goodput_ledger import GoodputLedger
from jtrain.train.step_metrics import RecompileWatch, StepLog
from jtrain.train.trace_windows import TraceWindows


class LockWatch(Callback):
    """Checks the lock before anything is written: at the results of a step, and before each save.

    It comes first of the built-in callbacks. Only a run that stood still for long can have lost its lock.
    """

    def __init__(self, lock: WorkdirLock) -> None:
        self._lock = lock

    def during(
        self, phase: LoopPhase, step: int, arguments: tuple[Any, ...]
    ) -> contextlib.AbstractContextManager[None]:
        # An evaluation writes a line of metrics.jsonl.
        if phase in ("checkpoint", "evaluation"):
            self._lock.check()
        return contextlib.nullcontext()

    def on_results(self, results: StepResults) -> None:
        self._lock.check()

    def on_step(self, dispatched: DispatchedStep) -> None:
        self._lock.check()

    def on_error(self, error: Exception) -> None:
        """Names the loss instead of its consequences, such as a save whose files the other run has
        removed.
        """
        self._lock.check()


def built_in_callbacks(run: Run, workdir: Path, lock: WorkdirLock, cache: Path | None) -> list[Callback]:
    """Creates the callbacks of every run; a step's metrics line comes before its line of the ledger.

    Args:
      cache: the user's cache, which keeps measured peaks; None measures none.
    """
    times = StepTimes()
    goodput = GoodputLedger(run, times)
    recompiles = RecompileWatch()
    windows = TraceWindows(run, workdir, goodput, cache)
    log = StepLog(run, times, windows, recompiles)
    # The lock before what writes; the log before the ledger, which reads its step times; alerts read both.
    return [LockWatch(lock), recompiles, windows, log, goodput, AlertWatch(run, goodput)]
