"""TPUs say how much they throttle, not how fast they run: libtpu.sdk's `tpu_throttle_score`, 0 to 10.

0 is full speed, n is n * 10 % less. The clock is given per mille of the full one. The exact multiplier of each op is
in the trace itself, where libtpu writes it.
"""

import importlib
from collections.abc import Sequence
from typing import Any

from jtrain.profile.clocks import Notes, Reading
from jtrain.profile.samples import THROTTLED


class Tpu:
    """The TPUs of this host, in libtpu's order."""

    name = "tpu"
    period_s = fast_period_s = slow_period_s = 1.0
    ref_mhz = 1000.0
    max_mhz = None

    def __init__(self, devices: Sequence[int]) -> None:
        tpumonitoring: Any = importlib.import_module("libtpu.sdk").tpumonitoring
        self.notes = Notes()
        self.notes.add("clocks: a TPU tells its throttling only, in steps of 10 %; the clock is per mille of the full.")
        self.devices = tuple(range(len(devices)))
        self._numbers = tuple(devices)
        self._metric = lambda: tpumonitoring.get_metric("tpu_throttle_score").data()

    def read(self, device: int, slow: bool) -> Reading:
        """The score of one TPU; unknown while no program has it."""
        # libtpu's errors have no type of their own.
        data = self.notes.ask("tpu_throttle_score", self._metric, Exception)
        score = parse(data or ()).get(self._numbers[device])
        if score is None:
            if data is not None:
                self.notes.add(f"clocks: tpu_throttle_score does not name TPU {self._numbers[device]}.")
            return Reading()
        return Reading(sm_mhz=self.ref_mhz * (1 - score / 10), reasons=THROTTLED if score else 0)

    def close(self) -> None:
        """Nothing is held."""


def parse(data: Sequence[str]) -> dict[int, int]:
    """["0-0", "1-3"]: TPU 0 at full speed, TPU 1 throttled by 30 %."""
    scores = {}
    for item in data:
        number, _, score = str(item).partition("-")
        if number.isdigit() and score.isdigit():
            scores[int(number)] = int(score)
    return scores
