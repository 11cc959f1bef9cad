"""Callback of a run that makes no step for ever."""

import os
import time
from pathlib import Path

from jtrain.train.callbacks import Callback, StepResults


class Blocks(Callback):
    """Waits for ever in step 8, on the first attempt, which the file of the variable MARK tells."""

    def on_results(self, results: StepResults) -> None:
        """Hangs."""
        mark = Path(os.environ["MARK"])
        if results.step == 8 and not mark.exists():
            mark.touch()
            waits_for_ever()


def waits_for_ever() -> None:
    """Hangs; the test looks for its name in the stack."""
    while True:
        time.sleep(0.1)
