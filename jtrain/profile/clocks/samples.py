"""Sampled clocks and power of one device as step functions of time.

A sample holds from its time to the next sample that has the same quantity, for at most `MIN_HOLD_NS` or five
sampling periods, whichever is longer. After that, before the first sample and where every call was refused,
the quantity is unknown (nan). Times are integer nanoseconds: a float64 resolves the time since the epoch to
256 ns only.

Example: samples at 0 s (1500 MHz, energy counter 0 J), 1 s (1000 MHz, 300 J) and 3 s (clock refused, 650 J).
The clock was read 1 s apart, so a sample holds for 5 s. The mean clock over 0.5 s to 2 s is
(0.5 * 1500 + 1.0 * 1000) / 1.5 = 1166.7 MHz; over 8 s to 10 s it is nan. The counter rises by 150 J in the
second half of the first interval and by 175 J in the first half of the next one: 325 J from 0.5 s to 2 s.
"""

import dataclasses
import math
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from jtrain.errors import UserError
from jtrain.runtime.atomic_io import replacing

type Ints = npt.NDArray[np.int64]
"""Array of times or counts, int64."""

type Floats = npt.NDArray[np.float64]
"""Array of measured values, float64; NaN where one is unknown."""

type Many = np.ndarray | Sequence[float | int] | float | int
"""One number, or several."""

REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
    0x100: "display",
    0x200: "board limit",
    0x400: "reliability",
    0x10000: "throttled",  # TPU: reports how much, not why
    0x20000: "stolen time",  # CPU: the hypervisor ran another guest, which looks like a lower clock
}
"""Bit -> reason for a low clock: NVML's bits (nvmlClocksEventReason*), then ours."""

POWER_REASONS = 0x4 | 0x80 | 0x200
THERMAL_REASONS = 0x20 | 0x40
HARDWARE_SLOWDOWN = 0x8
STOLEN, THROTTLED = 0x20000, 0x10000

# Times and counters are integers: a float64 would round nanoseconds since the epoch to 256.
_INT_FIELDS = (
    "sequence",
    "device",
    "epoch_ns",
    "monotonic_ns",
    "reasons",
    "power_violation_ns",
    "thermal_violation_ns",
)
_FLOAT_FIELDS = ("sm_mhz", "mem_mhz", "power_w", "temperature_c", "energy_j")
RECORD = np.dtype([(name, "<i8") for name in _INT_FIELDS] + [(name, "<f8") for name in _FLOAT_FIELDS])
"""Layout of one reading in the sampler's file, 96 bytes. `sequence` counts from 1; device -1 stands for all
devices."""

SERIES = tuple(name for name in RECORD.names or () if name not in ("sequence", "device"))

MIN_HOLD_NS = 1_000_000_000
"""Shortest time that a sample holds: on a busy machine the sampler is late by tens of ms, which must not
leave gaps."""


@dataclasses.dataclass(frozen=True)
class Anchor:
    """One moment on two clocks: the trace's (ns since the epoch) and the machine's monotonic clock (ns)."""

    trace_ns: int
    monotonic_ns: int


@dataclasses.dataclass(frozen=True)
class Samples:
    """Samples of one device by time, in arrays of one length; unknown is nan, or -1 for integers.

    reasons: bits of `REASONS`.
    energy_j: cumulative energy.
    power_violation_ns, thermal_violation_ns: cumulative ns in which the power or thermal limit held the clock
      down.
    notes: quantities that could not be sampled, with the reason.
    """

    device: int
    source: str
    epoch_ns: Ints
    monotonic_ns: Ints
    sm_mhz: Floats
    mem_mhz: Floats
    power_w: Floats
    temperature_c: Floats
    energy_j: Floats
    reasons: Ints
    power_violation_ns: Ints
    thermal_violation_ns: Ints
    notes: tuple[str, ...] = ()

    def known(self, name: str) -> tuple[Ints, np.ndarray]:
        """Times and values of the samples in which the quantity `name` is known."""
        values = getattr(self, name)
        # Integers have no nan, so -1 marks an unknown one.
        is_known = values >= 0 if values.dtype == np.int64 else np.isfinite(values)
        return self.epoch_ns[is_known], values[is_known]

    def mean(self, name: str, start_ns: Many, end_ns: Many) -> Floats:
        """Time-weighted mean of `name` over each span; nan if it is unknown in any part of the span.

        For a span of length 0 it is the value at that time.
        """
        times, values = self.known(name)
        return _step_mean(times, values.astype(np.float64), start_ns, end_ns)

    def mean_mhz(self, start_ns: Many, end_ns: Many) -> Floats:
        """Time-weighted mean of the compute clock over each span [start_ns, end_ns); nan where unknown."""
        return self.mean("sm_mhz", start_ns, end_ns)

    def num_in(self, start_ns: Many, end_ns: Many) -> Ints:
        """Number of samples of the compute clock within each span."""
        times, _ = self.known("sm_mhz")
        return np.asarray(np.searchsorted(times, end_ns) - np.searchsorted(times, start_ns), np.int64)

    def increase(self, name: str, start_ns: int, end_ns: int) -> float:
        """Increase of a cumulative quantity over a span, linear between samples; nan if unknown."""
        times, values = self.known(name)
        # One reading gives no increase, and beyond the hold time nobody knows if the counter went on.
        if len(times) < 2 or start_ns < times[0] - _hold_ns(times) or end_ns > times[-1] + _hold_ns(times):
            return float("nan")
        # Counted from the first sample, where a float64 is still exact to the nanosecond.
        elapsed_ns = (times - times[0]).astype(np.float64)
        # Also relative: a counter of nanoseconds exceeds 2**53 after 104 days.
        increases = (values - values[0]).astype(np.float64)
        low, high = np.interp([start_ns - int(times[0]), end_ns - int(times[0])], elapsed_ns, increases)
        return float(high - low)

    def share(self, mask: int, start_ns: int, end_ns: int) -> float:
        """Share of a span in which any of the reasons in `mask` held the clock down; nan if unknown."""
        # A sample's reasons hold until the next sample, like its clock.
        times, reasons = self.known("reasons")
        is_held = (reasons.astype(np.int64) & mask) != 0
        return float(_step_mean(times, is_held.astype(np.float64), start_ns, end_ns))

    def aligned(self, first: Anchor, last: Anchor) -> "Samples":
        """Copy with epoch_ns on the trace's clock, in integers: a straight line through two anchors.

        offset(m) = o0 + (o1 - o0) (m - m0) / (m1 - m0) at the monotonic time m. The two anchors correct a
        wall clock that was set, or drifted, while the trace ran. With anchors (trace 5000, monotonic 1000)
        and (5202, 1200) the offset grows from 4000 to 4002 ns, and samples at 1000, 1100 and 1200 move to
        5000, 5101 and 5202.

        Raises:
          UserError: `last` is not later than `first`.
        """
        span = last.monotonic_ns - first.monotonic_ns
        if span <= 0:
            raise UserError(
                f"Anchors at {first.monotonic_ns} and {last.monotonic_ns} ns do not give a clock's rate: the "
                "second must be later. Trace at least two steps."
            )
        # Python integers: drift * elapsed ns overflows an int64 where the wall clock was set by hours.
        offset = first.trace_ns - first.monotonic_ns
        drift = last.trace_ns - last.monotonic_ns - offset
        times = [
            monotonic_ns + offset + drift * (monotonic_ns - first.monotonic_ns) // span
            for monotonic_ns in self.monotonic_ns.tolist()
        ]
        return dataclasses.replace(self, epoch_ns=np.array(times, np.int64))


def make(device: int, source: str, notes: tuple[str, ...] = (), **series: Many) -> Samples:
    """Builds samples from the known series, at least `epoch_ns`; 0 MHz becomes unknown, with a note.

    A single reading of hardware slowdown is dropped: GPUs report it briefly when they change their
    performance state.
    """
    length = len(np.asarray(series["epoch_ns"]))
    columns: dict[str, np.ndarray] = {}
    for name in SERIES:
        # A source that does not know a quantity leaves it out; its column is all unknown.
        is_int = RECORD[name].kind == "i"
        unknown = np.full(length, -1 if is_int else np.nan)
        columns[name] = np.array(series.get(name, unknown), np.int64 if is_int else np.float64)
    for name, clock_name in (("sm_mhz", "compute"), ("mem_mhz", "memory")):
        is_zero = columns[name] <= 0
        if is_zero.any():
            columns[name][is_zero] = np.nan
            notes += (
                f"clocks: device {device}: {int(is_zero.sum())} of {length} samples give 0 MHz for the "
                f"{clock_name} clock: treated as unknown.",
            )
    reasons = columns["reasons"]
    # -1, unknown, has all bits set.
    is_slow = (reasons >= 0) & (reasons & HARDWARE_SLOWDOWN != 0)
    # A reading is alone if neither its successor nor its predecessor has the bit; both ends count as without.
    is_lone = is_slow & ~np.append(is_slow[1:], False) & ~np.append(False, is_slow[:-1])
    reasons[is_lone] &= ~HARDWARE_SLOWDOWN
    return Samples(device=device, source=source, notes=notes, **columns)


def from_records(records: np.ndarray, device: int, source: str, notes: tuple[str, ...] = ()) -> Samples:
    """Selects the samples of `device` from a sampler's records, sorted by time."""
    # Device -1 stands for all: a CPU's clock is every emulated device's clock.
    device_records = records[(records["device"] == device) | (records["device"] == -1)]
    # Stable, because the ring buffer wraps and readings of one moment must keep their order.
    device_records = device_records[np.argsort(device_records["monotonic_ns"], kind="stable")]
    return make(device, source, notes, **{name: device_records[name] for name in SERIES})


def write(path: Path, samples: Samples) -> None:
    """Writes one device's samples atomically as .npz."""
    with replacing(path) as new, open(new, "wb") as file:
        np.savez(
            file,
            device=samples.device,
            source=samples.source,
            notes=np.array(samples.notes, np.str_),
            **{name: getattr(samples, name) for name in SERIES},
        )


def read(path: Path) -> Samples:
    """Reads samples that `write` wrote.

    Raises:
      UserError: the file was not written by `write`, or is truncated.
    """
    try:
        # Opened here because np.load does not close a file that it cannot read.
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            return Samples(
                device=int(arrays["device"]),
                source=str(arrays["source"]),
                notes=tuple(str(note) for note in arrays["notes"]),
                **{name: arrays[name] for name in SERIES},
            )
    except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{path} does not hold clock samples ({error}). Delete it to go on without them."
        ) from error


def load(folder: Path) -> dict[int, Samples]:
    """Reads the samples in a window's folder, by device; empty if none were taken."""
    return {
        device_samples.device: device_samples
        for device_samples in map(read, sorted(folder.glob("samples-*.npz")))
    }


def _hold_ns(times: Ints) -> int:
    period = int(np.median(np.diff(times))) if len(times) > 1 else 0
    return max(MIN_HOLD_NS, 5 * period)


def _step_mean(times: Ints, values: Floats, start_ns: Many, end_ns: Many) -> Floats:
    """Mean of a step function over each span, exact while MHz * ns is below 2**53; nan if partly unknown."""
    # One span per op of a trace: prefix sums and a binary search instead of a loop over samples.
    start, end = np.broadcast_arrays(np.asarray(start_ns, np.int64), np.asarray(end_ns, np.int64))
    if not len(times):
        return np.full(start.shape, np.nan)
    elapsed_ns = times - times[0]
    # A sample holds until the next one, or for the hold time where the next one is late.
    hold_ns = np.minimum(np.append(np.diff(times), np.iinfo(np.int64).max), _hold_ns(times))
    # Prefix sums: area in MHz * ns and known ns before each sample.
    area = np.append(0.0, np.cumsum(values * hold_ns))
    covered = np.append(0, np.cumsum(hold_ns))

    def integrate(moment: Ints) -> tuple[Floats, Ints]:
        """Integral of the step function up to a moment, and the length of time in which it is known."""
        # side="right": at the very moment of a sample its value holds already.
        index = np.searchsorted(elapsed_ns, moment, side="right") - 1
        is_before_first = index < 0
        # Before the first sample nothing is known; index 0 only keeps the lookups valid.
        index = np.maximum(index, 0)
        held_ns = np.where(is_before_first, 0, np.minimum(moment - elapsed_ns[index], hold_ns[index]))
        return area[index] + values[index] * held_ns, covered[index] + held_ns

    # A span of length 0 is widened to 1 ns, which gives the value at that moment.
    moments = np.stack([start.ravel(), np.maximum(end, start + 1).ravel()]) - times[0]
    (area_start, area_end), (covered_start, covered_end) = integrate(moments)
    spans = moments[1] - moments[0]
    # A gap anywhere in the span makes its mean unknown, since the clock in the gap may have been any.
    is_covered = covered_end - covered_start == spans
    return np.where(is_covered, (area_end - area_start) / spans, np.nan).reshape(start.shape)


MIN_COUNTER_PERIODS = 20
"""Updates of an energy counter that make its increase exact to 5 %; counters are updated every 10 to 100
ms."""


def energy_j(samples: Samples, start_ns: int, end_ns: int) -> float | None:
    """Energy of one device over a span; None if unknown.

    From the energy counter if it was updated `MIN_COUNTER_PERIODS` times, else mean power times duration,
    else the counter's coarse increase.
    """
    times, counter = samples.known("energy_j")
    readings = counter[(times >= start_ns) & (times <= end_ns)]
    counter_increase = samples.increase("energy_j", start_ns, end_ns)
    # The first choice is exact over long spans, but over a few updates it is off by one update's energy.
    if np.count_nonzero(np.diff(readings)) >= MIN_COUNTER_PERIODS and not math.isnan(counter_increase):
        return counter_increase
    power_w = float(samples.mean("power_w", start_ns, end_ns))
    if not math.isnan(power_w):
        return power_w * (end_ns - start_ns) * 1e-9
    return None if math.isnan(counter_increase) else counter_increase
