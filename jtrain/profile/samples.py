"""What a sampler saw of one device's clocks and power, as a function of time.

A sample holds from when it was taken to the next one that knows the same quantity. It stops holding after
`MIN_HOLD_NS`, or five of its own periods if that is longer: from there on the quantity is unknown (nan), as before the
first sample and where every call was refused. Times are integers of nanoseconds: a float holds the time since the epoch
to 256 ns only.
"""

import dataclasses
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

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
    0x10000: "throttled",  # TPU: it says how much, not why
    0x20000: "stolen time",  # CPU: the hypervisor ran somebody else, which looks like a lower clock
}
"""Why a clock is low: NVML's bits (nvmlClocksEventReason*), then ours."""

POWER_REASONS = 0x4 | 0x80 | 0x200
THERMAL_REASONS = 0x20 | 0x40
HARDWARE_SLOWDOWN = 0x8
STOLEN, THROTTLED = 0x20000, 0x10000

RECORD = np.dtype(
    [
        (name, "<i8")
        for name in (
            "sequence",
            "device",
            "epoch_ns",
            "monotonic_ns",
            "reasons",
            "power_violation_ns",
            "thermal_violation_ns",
        )
    ]
    + [(name, "<f8") for name in ("sm_mhz", "mem_mhz", "power_w", "temperature_c", "energy_j")]
)
"""One reading of one device in the sampler's file, 96 bytes. `sequence` counts from 1; device -1 is all devices."""

SERIES = tuple(name for name in RECORD.names or () if name not in ("sequence", "device"))

MIN_HOLD_NS = 1_000_000_000
"""A sampler on a busy machine is late by tens of milliseconds, so a shorter hold would tear holes."""


@dataclasses.dataclass(frozen=True)
class Anchor:
    """One moment on two clocks: the trace's (epoch ns) and the machine's monotonic one."""

    trace_ns: int
    monotonic_ns: int


@dataclasses.dataclass(frozen=True)
class Samples:
    """Samples of one device in order of time; arrays of one length.

    reasons: bits of `REASONS`, -1 unknown.
    energy_j: cumulative; power_violation_ns, thermal_violation_ns: cumulative ns in which that held the clock down, -1
      unknown. All other values are nan where unknown.
    notes: what could not be sampled, and why.
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
        """Times and values of the samples that know the quantity `name`."""
        values = getattr(self, name)
        good = values >= 0 if values.dtype == np.int64 else np.isfinite(values)
        return self.epoch_ns[good], values[good]

    def mean(self, name: str, start_ns: Many, end_ns: Many) -> Floats:
        """Time-weighted mean of `name` over each span; nan where any of the span is unknown.

        Of a span without length it is the value then.
        """
        times, values = self.known(name)
        return _step_mean(times, values.astype(np.float64), start_ns, end_ns)

    def mean_mhz(self, start_ns: Many, end_ns: Many) -> Floats:
        """Time-weighted mean of the compute clock over each span [start_ns, end_ns); nan where unknown."""
        return self.mean("sm_mhz", start_ns, end_ns)

    def num_in(self, start_ns: Many, end_ns: Many) -> Ints:
        """How many samples of the compute clock were taken within each span."""
        times, _ = self.known("sm_mhz")
        return np.asarray(np.searchsorted(times, end_ns) - np.searchsorted(times, start_ns), np.int64)

    def increase(self, name: str, start_ns: int, end_ns: int) -> float:
        """By how much a cumulative quantity grew over a span, linear between samples; nan where unknown."""
        times, values = self.known(name)
        if len(times) < 2 or start_ns < times[0] - _hold_ns(times) or end_ns > times[-1] + _hold_ns(times):
            return float("nan")
        since = (times - times[0]).astype(np.float64)
        gained = (values - values[0]).astype(np.float64)
        low, high = np.interp([start_ns - int(times[0]), end_ns - int(times[0])], since, gained)
        return float(high - low)

    def share(self, mask: int, start_ns: int, end_ns: int) -> float:
        """Share of a span in which any of the reasons in `mask` held the clock down; nan where unknown."""
        times, reasons = self.known("reasons")
        on = (reasons.astype(np.int64) & mask) != 0
        return float(_step_mean(times, on.astype(np.float64), start_ns, end_ns))

    def aligned(self, first: Anchor, last: Anchor) -> "Samples":
        """With epoch_ns on the trace's clock: offset(m) = o0 + (o1 - o0) (m - m0) / (m1 - m0), in integers.

        Two anchors undo a wall clock that was set or that drifts while the trace ran.

        Raises:
          ValueError: the anchors are one moment.
        """
        span = last.monotonic_ns - first.monotonic_ns
        if span <= 0:
            raise ValueError(
                f"Two anchors at {first.monotonic_ns} and {last.monotonic_ns} ns do not give a clock's rate. Trace at "
                "least two steps, first anchor first."
            )
        offset = first.trace_ns - first.monotonic_ns
        drift = last.trace_ns - last.monotonic_ns - offset
        times = [m + offset + drift * (m - first.monotonic_ns) // span for m in self.monotonic_ns.tolist()]
        return dataclasses.replace(self, epoch_ns=np.array(times, np.int64))


def make(device: int, source: str, notes: tuple[str, ...] = (), **series: Many) -> Samples:
    """Samples out of the series that are known, `epoch_ns` at least; clocks of zero are unknown, with a note.

    A lone reading of hardware slowdown is dropped: it flashes when a GPU changes its performance state.
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
                f"clocks: device {device}: {int(zero.sum())} of {length} samples say 0 MHz for the {what} clock: "
                "taken as unknown.",
            )
    reasons = columns["reasons"]
    slow = (reasons >= 0) & (reasons & HARDWARE_SLOWDOWN != 0)
    lone = slow & ~np.append(slow[1:], False) & ~np.append(False, slow[:-1])
    reasons[lone] &= ~HARDWARE_SLOWDOWN
    return Samples(device=device, source=source, notes=notes, **columns)


def from_records(records: np.ndarray, device: int, source: str, notes: tuple[str, ...] = ()) -> Samples:
    """The samples of `device` among a sampler's records, by time."""
    mine = records[(records["device"] == device) | (records["device"] == -1)]
    mine = mine[np.argsort(mine["monotonic_ns"], kind="stable")]
    return make(device, source, notes, **{name: mine[name] for name in SERIES})


def write(path: Path, samples: Samples) -> None:
    """One device's samples as .npz, whole or not at all."""
    away = path.with_name(path.name + ".tmp")
    with open(away, "wb") as file:
        np.savez(
            file,
            device=samples.device,
            source=samples.source,
            notes=np.array(samples.notes, np.str_),
            **{name: getattr(samples, name) for name in SERIES},
        )
    away.rename(path)


def read(path: Path) -> Samples:
    """What `write` wrote.

    Raises:
      ValueError: the file is not one of ours, or was cut short.
    """
    try:
        # Opened here, because np.load leaves a file open that it cannot read.
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as held:
            return Samples(
                device=int(held["device"]),
                source=str(held["source"]),
                notes=tuple(str(note) for note in held["notes"]),
                **{name: held[name] for name in SERIES},
            )
    except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} does not hold samples of a device ({error}). Delete it to go on without.") from error


def load(folder: Path) -> dict[int, Samples]:
    """Samples of every device in a window's folder, by device; empty if nobody sampled."""
    return {one.device: one for one in map(read, sorted(folder.glob("samples-*.npz")))}


def _hold_ns(times: Ints) -> int:
    period = int(np.median(np.diff(times))) if len(times) > 1 else 0
    return max(MIN_HOLD_NS, 5 * period)


def _step_mean(times: Ints, values: Floats, start_ns: Many, end_ns: Many) -> Floats:
    """Mean of the step function over each span, exact while MHz * ns stays below 2**53; nan where not all is known."""
    start, end = np.broadcast_arrays(np.asarray(start_ns, np.int64), np.asarray(end_ns, np.int64))
    if not len(times):
        return np.full(start.shape, np.nan)
    since = times - times[0]
    lasts = np.minimum(np.append(np.diff(times), np.iinfo(np.int64).max), _hold_ns(times))
    area = np.append(0.0, np.cumsum(values * lasts))
    covered = np.append(0, np.cumsum(lasts))

    def until(moment: Ints) -> tuple[Floats, Ints]:
        """The step function's integral up to a moment, and how much of that time it is known."""
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
