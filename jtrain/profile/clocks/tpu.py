"""Clock source of TPUs: libtpu.sdk's `tpu_throttle_score`, 0 to 10, since TPUs do not report their clock.

A score of n means n * 10 % below full speed. The clock is given in per mille of the full clock. The exact
multiplier of each op is in the trace, where libtpu writes it.
"""

import importlib
from collections.abc import Sequence
from typing import Any

from jtrain.profile.clocks.reading import ClockSource, Reading
from jtrain.profile.clocks.samples import THROTTLED

FULL_MHZ = 1000.0
"""Clock at full speed, in per mille."""


class Tpu(ClockSource):
    """Clock source for the TPUs of this host, in libtpu's order."""

    name = "tpu"
    period_s = fast_period_s = slow_period_s = 1.0
    ref_mhz = FULL_MHZ

    def __init__(self, devices: Sequence[int]) -> None:
        super().__init__()
        tpumonitoring: Any = importlib.import_module("libtpu.sdk").tpumonitoring
        self.notes.add(
            "clocks: TPUs report throttling in steps of 10 % only; the clock is in per mille of full speed."
        )
        self.devices = tuple(range(len(devices)))
        self._numbers = tuple(devices)
        self._metric = lambda: tpumonitoring.get_metric("tpu_throttle_score").data()

    def read(self, device: int, slow: bool) -> Reading:
        """Clock of one TPU from its score; unknown while no program uses the TPU."""
        # libtpu's errors have no type of their own.
        data = self.notes.ask("tpu_throttle_score", self._metric, Exception)
        score = parse(data or ()).get(self._numbers[device])
        if score is None:
            if data is not None:
                self.notes.add(f"clocks: tpu_throttle_score has no entry for TPU {self._numbers[device]}.")
            return Reading()
        # Each point of the score is 10 % below full speed.
        return Reading(sm_mhz=FULL_MHZ * (1 - score / 10), reasons=THROTTLED if score else 0)


def parse(data: Sequence[str]) -> dict[int, int]:
    """Score by TPU: ["0-0", "1-3"] means TPU 0 at full speed and TPU 1 throttled by 30 %."""
    # Entries that are not two numbers are skipped: the format is libtpu's and may grow.
    scores = {}
    for item in data:
        number, _, score = str(item).partition("-")
        if number.isdigit() and score.isdigit():
            scores[int(number)] = int(score)
    return scores
