"""A clock source, and one reading of a device by it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

NAN = float("nan")


@dataclasses.dataclass(frozen=True)
class Reading:
    """One reading of one device; -1 (integers) or nan if unknown or not due, as in `samples.Samples`."""

    sm_mhz: float = NAN
    mem_mhz: float = NAN
    power_w: float = NAN
    temperature_c: float = NAN
    energy_j: float = NAN
    reasons: int = -1
    power_violation_ns: int = -1
    thermal_violation_ns: int = -1


class Notes:
    """Messages about calls that the driver refused, each once; a refused call does not stop the others."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        """Adds a line unless it is already there."""
        if line not in self.lines:
            self.lines.append(line)

    def ask[T](
        self, quantity: str, call: Callable[[], T], refusal: type[Exception] | tuple[type[Exception], ...]
    ) -> Any:
        """Returns the answer of `call`, or None and a note if the driver refuses this time."""
        try:
            return call()
        except refusal as error:
            # One line, because drivers' messages have line breaks; the type stands for an empty message.
            self.add(f"clocks: {quantity} refused: {' '.join(str(error).split()) or type(error).__name__}.")
            return None


class ClockSource:
    """Source of clock readings. Only the sampler's process opens one.

    devices: numbers of the devices that it reads, as the run counts them; (-1,) if one reading is for all
      devices.
    period_s, fast_period_s: seconds between readings of the clocks, normally and during a trace window.
    slow_period_s: seconds between readings of power, energy, temperature and violations, which cost more and
      change more slowly.
    ref_mhz, max_mhz: clock at full speed on the source's own scale, and highest clock of a device; None if
      unknown.
    """

    name: str
    devices: Sequence[int]
    period_s: float = 0.02
    fast_period_s: float = 0.02
    slow_period_s: float = 0.1
    ref_mhz: float | None = None
    max_mhz: float | None = None

    def __init__(self) -> None:
        self.notes = Notes()

    def read(self, device: int, slow: bool) -> Reading:
        """Reads one device; with `slow` also the quantities of the slow period."""
        raise NotImplementedError  # every source reads in its own way

    def close(self) -> None:
        """Closes the driver, if one is open."""
