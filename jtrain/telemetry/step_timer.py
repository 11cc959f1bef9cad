"""Step timer: percentiles of step times, and straggler scores of hosts and devices."""

from collections.abc import Sequence

import numpy as np

PERCENTILES = (50, 90, 99)
RECENT_STEPS = 1000
"""Steps that percentiles are taken over: enough for the 99th, and few enough to follow changes within
hours."""


class StepTimes:
    """The times of the last `RECENT_STEPS` steps."""

    def __init__(self) -> None:
        self._seconds = np.zeros(RECENT_STEPS)
        self._count = 0

    def add(self, seconds: float) -> None:
        """Adds the time of a step."""
        # A ring: the newest step replaces the oldest.
        self._seconds[self._count % RECENT_STEPS] = seconds
        self._count += 1

    def percentiles(self) -> tuple[float, ...] | None:
        """Seconds at `PERCENTILES`; None before the first step."""
        if not self._count:
            return None
        return tuple(
            float(x) for x in np.percentile(self._seconds[: min(self._count, RECENT_STEPS)], PERCENTILES)
        )


def host_scores(own_s: Sequence[float], step_s: float) -> dict[str, float]:
    """Straggler score per host, 1.0 = fastest, lower = straggler.

    The score is the fraction of the step time that would remain if this host were as fast as the fastest.
    Steps take equally long on all hosts, since each waits for the slowest; so hosts are compared by their own
    time. With steps of 1 s and own times of 0.2, 0.3 and 0.25 s the scores are 1.0, 0.9 and 0.95.

    Args:
      own_s: for each host, seconds per step in which it does not wait for its devices.
      step_s: seconds per step.
    """
    fastest_s = min(own_s)
    # Clipped at 0, because own time may exceed the mean step time.
    return {
        f"host {index}": max(0.0, 1.0 - (host_s - fastest_s) / step_s) for index, host_s in enumerate(own_s)
    }


def device_scores(mhz: Sequence[float | None]) -> dict[str, float]:
    """Straggler score per device: its clock over the highest clock; unknown clocks are left out."""
    known_mhz = {index: value for index, value in enumerate(mhz) if value is not None}
    # Devices are alike, so the highest clock is what each could have.
    highest_mhz = max(known_mhz.values(), default=0.0)
    return {f"device {index}": value / highest_mhz for index, value in known_mhz.items() if highest_mhz > 0}
