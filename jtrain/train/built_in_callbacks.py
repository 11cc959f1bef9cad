"""Callbacks of every run."""

from pathlib import Path

from jtrain.config.run import Run
from jtrain.runtime.workdir_lock import WorkdirLock
from jtrain.telemetry.step_timer import StepTimes
from jtrain.train.alert_watch import AlertWatch
from jtrain.train.callbacks import Callback
from jtrain.train.goodput_ledger import GoodputLedger
from jtrain.train.lock_watch import LockWatch
from jtrain.train.step_metrics import RecompileWatch, StepLog
from jtrain.train.trace_windows import TraceWindows


def built_in_callbacks(run: Run, workdir: Path, lock: WorkdirLock) -> list[Callback]:
    """Creates the callbacks of every run; a step's metrics line comes before its line of the ledger."""
    times = StepTimes()
    goodput = GoodputLedger(run, times)
    recompiles = RecompileWatch()
    windows = TraceWindows(run, workdir, goodput)
    log = StepLog(run, times, windows.sampler, recompiles)
    return [LockWatch(lock), recompiles, windows, log, goodput, AlertWatch(run, goodput)]
