"""Clock source of CPUs without counters: times a chain of instructions of a fixed number of cycles.

Virtual machines have no APERF, no cpufreq and no hardware counters. The chain is PBKDF2 with SHA-256: each
round depends on the previous one, none touches memory, and the standard library implements it in C. Its best
CPU time over its current one (not wall time, which other processes lengthen) gives a relative clock without a
table of latencies, which is scaled to the MHz of /proc/cpuinfo. A busy sibling thread of the core looks like
a lower clock. One reading costs about 0.3 ms of one core: 0.03 % at one reading per second.
"""

import hashlib
import platform
import time
from pathlib import Path

from jtrain.profile.clocks.reading import NAN, ClockSource, Reading
from jtrain.profile.clocks.samples import STOLEN

# 300 rounds take about 0.1 ms; three chains per reading make its 0.3 ms.
ROUNDS = 300
CALIBRATIONS = 60
RAPL = Path("/sys/class/powercap/intel-rapl:0/energy_uj")
THROTTLED_MS = Path("/sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_total_time_ms")
STOLEN_SHARE = 0.02
"""Share of CPU time stolen since the last reading from which the reading gets the reason "stolen time"."""


def chain_ns() -> int:
    """CPU time of one chain, the best of three, because interrupts only lengthen it."""

    def time_chain() -> int:
        start = time.thread_time_ns()
        hashlib.pbkdf2_hmac("sha256", b"clock", b"chain", ROUNDS)
        return time.thread_time_ns() - start

    return max(1, min(time_chain() for _ in range(3)))


def nominal_mhz() -> float:
    """Clock of the first CPU in /proc/cpuinfo; 1000 if it has none, so that clocks are in per mille."""
    return float(_cpuinfo("cpu MHz") or 1000.0)


def cpu_model() -> str:
    """Name of the first CPU in /proc/cpuinfo; its architecture if it has none, as on Arm."""
    return _cpuinfo("model name") or platform.machine()


def _cpuinfo(field: str) -> str | None:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(field):
            return line.partition(":")[2].strip()
    return None


class Cpu(ClockSource):
    """Clock source for the CPU; one reading is for all devices, since emulated devices share the machine."""

    name = "cpu"
    devices = (-1,)
    period_s = slow_period_s = 1.0
    fast_period_s = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.notes.add(
            "clocks: the CPU clock is relative to its own best, timed by a chain of instructions (0.3 ms)."
        )
        self.ref_mhz = self._nominal_mhz = nominal_mhz()
        # In the sampler's own process: 60 readings of 0.3 ms, some 20 ms.
        self._best_ns = min(chain_ns() for _ in range(CALIBRATIONS))
        self._stat = _cpu_ticks()
        self._energy_range_uj = _number(RAPL.with_name("max_energy_range_uj"))
        self._counter_uj = self._energy_uj = 0.0

    def read(self, device: int, slow: bool) -> Reading:
        """Reads the relative clock, and energy and thermal throttling where the kernel shows them."""
        stolen, total = _cpu_ticks()
        stolen_before, total_before = self._stat
        share = (stolen - stolen_before) / max(total - total_before, 1)
        # /proc/stat counts in ticks of 10 ms; two readings within one tick keep the older base.
        if total > total_before:
            self._stat = stolen, total
        duration_ns = chain_ns()
        self._best_ns = min(self._best_ns, duration_ns)
        throttled_ms = _number(THROTTLED_MS)
        return Reading(
            sm_mhz=self._nominal_mhz * self._best_ns / duration_ns,
            energy_j=self._read_energy_j(),
            reasons=STOLEN if share > STOLEN_SHARE else 0,
            thermal_violation_ns=int(throttled_ms * 1e6) if throttled_ms is not None else -1,
        )

    def _read_energy_j(self) -> float:
        """Energy counter of the package in joules, which goes on where the kernel's starts again."""
        counter_uj = _number(RAPL)
        if counter_uj is None or self._energy_range_uj is None:
            return NAN
        # At 200 W a range of 262 kJ lasts 22 minutes: at one reading per second no round is missed.
        self._energy_uj += (counter_uj - self._counter_uj) % self._energy_range_uj
        self._counter_uj = counter_uj
        return self._energy_uj * 1e-6


def _cpu_ticks() -> tuple[int, int]:
    """Ticks of all CPUs since boot: stolen by the hypervisor, and in total."""
    # user, nice, system, idle, iowait, irq, softirq, steal; guest time after them is in user already.
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (ticks[7] if len(ticks) > 7 else 0), sum(ticks)


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):  # missing, or readable by root only
        return None
