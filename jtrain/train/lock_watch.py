"""Callback that ends a run whose workdir another run has taken over."""

import contextlib
from typing import Any

from jtrain.runtime.workdir_lock import WorkdirLock
from jtrain.train.callbacks import Callback, LoopPhase, StepResults


class LockWatch(Callback):
    """Checks the lock before anything is written: at the results of a step, and before each save.

    It comes first of the callbacks. Only a run that stood still for long can have lost its lock.
    """

    def __init__(self, lock: WorkdirLock) -> None:
        self._lock = lock

    def during(
        self, phase: LoopPhase, step: int, arguments: tuple[Any, ...]
    ) -> contextlib.AbstractContextManager[None]:
        if phase in ("checkpoint", "evaluation"):
            self._lock.check()
        return contextlib.nullcontext()

    def on_results(self, results: StepResults) -> None:
        self._lock.check()
