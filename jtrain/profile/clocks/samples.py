"""Sampled clocks and power of one device as step functions of time.

A sample holds from its time to the next sample that has the same quantity, for at most `MIN_HOLD_NS` or five
sampling periods, whichever is longer. After that, before the first sample and where every call was refused,
the quantity is unknown (nan). Times are integer nanoseconds: a float64 resolves the time since the epoch to
256 ns only.
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
type Floats = npt.NDArray[np.float64]
type Many = np.ndarray | Sequence[float | int] | float | int

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

_WHOLE = (
    "sequence",
    "device",
    "epoch_ns",
    "monotonic_ns",
    "reasons",
    "power_violation_ns",
    "thermal_violation_ns",
)
_REAL = ("sm_mhz", "mem_mhz", "power_w", "temperature_c", "energy_j")
RECORD = np.dtype([(name, "<i8") for name in _WHOLE] + [(name, "<f8") for name in _REAL])
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
    """Samples of one device in order of time, in arrays of one length. Unknown values are nan, or -1
    (integers).

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
        good = values >= 0 if values.dtype == np.int64 else np.isfinite(values)
        return self.epoch_ns[good], values[good]

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
        if len(times) < 2 or start_ns < times[0] - _hold_ns(times) or end_ns > times[-1] + _hold_ns(times):
            return float("nan")
        since = (times - times[0]).astype(np.float64)
        gained = (values - values[0]).astype(np.float64)
        low, high = np.interp([start_ns - int(times[0]), end_ns - int(times[0])], since, gained)
        return float(high - low)

    def share(self, mask: int, start_ns: int, end_ns: int) -> float:
        """Share of a span in which any of the reasons in `mask` held the clock down; nan if unknown."""
        times, reasons = self.known("reasons")
        on = (reasons.astype(np.int64) & mask) != 0
        return float(_step_mean(times, on.astype(np.float64), start_ns, end_ns))

    def aligned(self, first: Anchor, last: Anchor) -> "Samples":
        """Copy with epoch_ns on the trace's clock: offset(m) = o0 + (o1 - o0) (m - m0) / (m1 - m0), in
        integers.

        The two anchors correct a wall clock that was set, or drifted, while the trace ran.

        Raises:
          UserError: `last` is not later than `first`.
        """
        span = last.monotonic_ns - first.monotonic_ns
        if span <= 0:
            raise UserError(
                f"Anchors at {first.monotonic_ns} and {last.monotonic_ns} ns do not give a clock's rate: the "
                "second must be later. Trace at least two steps."
            )
        offset = first.trace_ns - first.monotonic_ns
        drift = last.trace_ns - last.monotonic_ns - offset
        times = [m + offset + drift * (m - first.monotonic_ns) // span for m in self.monotonic_ns.tolist()]
        return dataclasses.replace(self, epoch_ns=np.array(times, np.int64))


def make(device: int, source: str, notes: tuple[str, ...] = (), **series: Many) -> Samples:
    """Builds samples from the known series, at least `epoch_ns`; a clock of 0 MHz becomes unknown, with a
    note.

    A single reading of hardware slowdown is dropped: GPUs report it briefly when they change their
    performance state.
    """
    length = len(np.asarray(series["epoch_ns"]))
    columns: dict[str, np.ndarray] = {}
    for name in SERIES:
        is_int = RECORD[name].kind == "i"
        unknown = np.full(length, -1 if is_int else np.nan)
        columns[name] = np.array(series.get(name, unknown), np.int64 if is_int else np.float64)
    for name, what in (("sm_mhz", "compute"), ("mem_mhz", "memory")):
        zero = columns[name] <= 0
        if zero.any():
            columns[name][zero] = np.nan
            notes += (
                f"clocks: device {device}: {int(zero.sum())} of {length} samples give 0 MHz for the {what} "
                "clock: treated as unknown.",
            )
    reasons = columns["reasons"]
    slow = (reasons >= 0) & (reasons & HARDWARE_SLOWDOWN != 0)
    lone = slow & ~np.append(slow[1:], False) & ~np.append(False, slow[:-1])
    reasons[lone] &= ~HARDWARE_SLOWDOWN
    return Samples(device=device, source=source, notes=notes, **columns)


def from_records(records: np.ndarray, device: int, source: str, notes: tuple[str, ...] = ()) -> Samples:
    """Selects the samples of `device` from a sampler's records, sorted by time."""
    mine = records[(records["device"] == device) | (records["device"] == -1)]
    mine = mine[np.argsort(mine["monotonic_ns"], kind="stable")]
    return make(device, source, notes, **{name: mine[name] for name in SERIES})


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
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as held:
            return Samples(
                device=int(held["device"]),
                source=str(held["source"]),
                notes=tuple(str(note) for note in held["notes"]),
                **{name: held[name] for name in SERIES},
            )
    except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{path} does not hold clock samples ({error}). Delete it to go on without them."
        ) from error


def load(folder: Path) -> dict[int, Samples]:
    """Reads the samples in a window's folder, by device; empty if none were taken."""
    return {one.device: one for one in map(read, sorted(folder.glob("samples-*.npz")))}


def _hold_ns(times: Ints) -> int:
    period = int(np.median(np.diff(times))) if len(times) > 1 else 0
    return max(MIN_HOLD_NS, 5 * period)


def _step_mean(times: Ints, values: Floats, start_ns: Many, end_ns: Many) -> Floats:
    """Mean of a step function over each span, exact while MHz * ns stays below 2**53; nan if not known
    throughout.
    """
    start, end = np.broadcast_arrays(np.asarray(start_ns, np.int64), np.asarray(end_ns, np.int64))
    if not len(times):
        return np.full(start.shape, np.nan)
    since = times - times[0]
    lasts = np.minimum(np.append(np.diff(times), np.iinfo(np.int64).max), _hold_ns(times))
    area = np.append(0.0, np.cumsum(values * lasts))
    covered = np.append(0, np.cumsum(lasts))

    def until(moment: Ints) -> tuple[Floats, Ints]:
        """Integral of the step function up to a moment, and the length of time in which it is known."""
        index = np.searchsorted(since, moment, side="right") - 1
        before = index < 0
        index = np.maximum(index, 0)
        within = np.where(before, 0, np.minimum(moment - since[index], lasts[index]))
        return area[index] + values[index] * within, covered[index] + within

    moments = np.stack([start.ravel(), np.maximum(end, start + 1).ravel()]) - times[0]
    (area_start, area_end), (covered_start, covered_end) = until(moments)
    spans = moments[1] - moments[0]
    whole = covered_end - covered_start == spans
    return np.where(whole, (area_end - area_start) / spans, np.nan).reshape(start.shape)


MIN_COUNTER_PERIODS = 20
"""Updates of an energy counter that make its increase exact to 5 %; counters are updated every 10 to 100
ms."""


def energy_j(samples: Samples, start_ns: int, end_ns: int) -> float | None:
    """Energy of one device over a span; None if unknown.

    From the energy counter if it was updated `MIN_COUNTER_PERIODS` times, else mean power times duration,
    else the counter's coarse increase.
    """
    times, counter = samples.known("energy_j")
    inside = counter[(times >= start_ns) & (times <= end_ns)]
    counted = samples.increase("energy_j", start_ns, end_ns)
    if np.count_nonzero(np.diff(inside)) >= MIN_COUNTER_PERIODS and not math.isnan(counted):
        return counted
    power_w = float(samples.mean("power_w", start_ns, end_ns))
    if not math.isnan(power_w):
        return power_w * (end_ns - start_ns) * 1e-9
    return None if math.isnan(counted) else counted
