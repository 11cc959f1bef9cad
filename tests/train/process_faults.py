"""Callbacks of runs whose processes stand still, or compute wrongly and are killed."""

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jtrain.optim import Optimizer
from jtrain.train.callbacks import Callback, DispatchedStep


class StandstillAt22(Callback):
    """Stops this process after step 22, unless the file that STOOD_STILL names is there, and makes it."""

    def on_step(self, dispatched: DispatchedStep) -> None:
        mark = Path(os.environ["STOOD_STILL"])
        if dispatched.step == 22 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGSTOP)


class KilledAtARewind(Callback):
    """Kills this process when the run has gone back as often as KILL_AT says, if it says so."""

    rewinds = 0

    def on_rewind(self, step: int) -> None:
        self.rewinds += 1
        if str(self.rewinds) == os.environ.get("KILL_AT"):
            os.kill(os.getpid(), signal.SIGKILL)


def nan_at_step_6() -> KilledAtARewind:
    """Has the optimizer's learning rate be NaN at step 6."""
    begin = Optimizer.begin

    def begin_with_a_fault(self: Optimizer, *args: Any, **named: Any) -> Any:
        update = begin(self, *args, **named)
        bad = jnp.where(update.step + 1 == 6, jnp.nan, update.learning_rate)
        return dataclasses.replace(update, learning_rate=bad)

    Optimizer.begin = begin_with_a_fault
    return KilledAtARewind()
