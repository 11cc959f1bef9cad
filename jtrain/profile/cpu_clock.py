"""The CPU's clock without counters: a chain of dependent instructions takes time in proportion to it.

A guest sees no APERF, no cpufreq and no hardware counters. The chain is PBKDF2 of SHA-256: each round waits for the one
before, none touches memory, and the standard library has it in C. Its time on the CPU (not the wall's, which other
processes lengthen) against its own best gives a relative clock, so no table of latencies per CPU is needed; it is
scaled to what /proc/cpuinfo says. A busy sibling thread of the core slows it as a lower clock would. One look costs
about 0.3 ms of one core: once a second is 0.03 %.
"""

import hashlib
import time
from pathlib import Path

from jtrain.profile.clocks import NAN, Notes, Reading
from jtrain.profile.samples import STOLEN

ROUNDS = 300
CALIBRATIONS = 60
RAPL = Path("/sys/class/powercap/intel-rapl:0/energy_uj")
THROTTLED_MS = Path("/sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_total_time_ms")
STOLEN_SHARE = 0.02
"""Of all CPU time since the last look: more makes the reading "clock or stolen time"."""


def chain_ns() -> int:
    """CPU time of one chain, the best of three: an interrupt lengthens one, nothing shortens any."""

    def once() -> int:
        start = time.thread_time_ns()
        hashlib.pbkdf2_hmac("sha256", b"clock", b"chain", ROUNDS)
        return time.thread_time_ns() - start

    return max(1, min(once() for _ in range(3)))


def nominal_mhz() -> float:
    """What /proc/cpuinfo says of the first CPU; 1000 where it says nothing (then read "per mille")."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("cpu MHz"):
            return float(line.split(":")[1])
    return 1000.0


class Cpu:
    """One reading for all devices: emulated ones share the machine."""

    name = "cpu"
    devices = (-1,)
    period_s = slow_period_s = 1.0
    fast_period_s = 0.1

    def __init__(self) -> None:
        self.notes = Notes()
        self.notes.add("clocks: the CPU's is relative to its own best, by a chain of instructions; 0.3 ms a look.")
        self.ref_mhz = nominal_mhz()
        self.max_mhz = None
        self._best_ns = min(chain_ns() for _ in range(CALIBRATIONS))
        self._stat = _cpu_ticks()

    def read(self, device: int, slow: bool) -> Reading:
        """The relative clock; energy and thermal throttling where the kernel shows them."""
        stolen, total = _cpu_ticks()
        stolen_before, total_before = self._stat
        share = (stolen - stolen_before) / max(total - total_before, 1)
        if total > total_before:
            self._stat = stolen, total
        took_ns = chain_ns()
        self._best_ns = min(self._best_ns, took_ns)
        energy_uj, throttled_ms = _number(RAPL), _number(THROTTLED_MS)
        return Reading(
            sm_mhz=self.ref_mhz * self._best_ns / took_ns,
            energy_j=energy_uj * 1e-6 if energy_uj is not None else NAN,
            reasons=STOLEN if share > STOLEN_SHARE else 0,
            thermal_violation_ns=int(throttled_ms * 1e6) if throttled_ms is not None else -1,
        )

    def close(self) -> None:
        """Nothing is held."""


def _cpu_ticks() -> tuple[int, int]:
    """Ticks stolen by the hypervisor, and all of them, of all CPUs since boot."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (ticks[7] if len(ticks) > 7 else 0), sum(ticks)


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):  # not there, or for root only
        return None
