"""What a lower clock costs: m = (1 - b) + b f / f_ref, by op; seconds lost, by cause; MFU three ways; energy.

An op that runs t seconds at clock f would run t m at the reference clock, where b, between 0 and 1, is how much of it
the clock paces: 1 if its cycles are constant (Chopper's chain, arXiv 2512.08242: its frequency term is 1 / m), else the
compute share of the roofline. It loses t (1 - m) to the clock. Chopper takes cycles and durations from different runs
and so mixes overlap into the clock's share; here clock and trace are of one run.
"""

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from jtrain.profile.records import ClockTrack, Peaks
from jtrain.profile.samples import (
    POWER_REASONS,
    REASONS,
    SERIES,
    THERMAL_REASONS,
    Floats,
    Many,
    Samples,
)

MIN_SAMPLES = 3
"""With fewer of them in an op, its clock is its neighbours': only many executions together have one."""

MIN_COUNTER_PERIODS = 20
"""An energy counter moves every 10 to 100 ms: over 20 of its periods, its last one is 5 % at most."""


def enough(num_samples: Many) -> npt.NDArray[np.bool_]:
    """Whether an op has a clock of its own: sum `Samples.num_in` over all its executions in the window."""
    return np.asarray(np.asarray(num_samples) >= MIN_SAMPLES)


def sensitivity(flops: Many, bytes: Many, peaks: Peaks, mhz: Many) -> Floats:
    """b of each op: its compute share of the roofline, t_c / (t_c + t_m), at the clock that it had.

    t_c = flops / (peak * f / f_ref), t_m = bytes / bandwidth. 1, Chopper's, where the op or a peak is unknown.
    """
    work, moved, clock = (np.asarray(values, np.float64) for values in (flops, bytes, mhz))
    work, moved, clock = np.broadcast_arrays(work, moved, clock)
    known = (work > 0) | (moved > 0)
    if not peaks.flops or not peaks.hbm_bytes_per_s:
        return np.ones(work.shape)
    at = clock / peaks.ref_mhz if peaks.ref_mhz else np.ones(work.shape)
    compute_s = work / (peaks.flops * np.where(np.isfinite(at), at, 1.0))
    memory_s = moved / peaks.hbm_bytes_per_s
    total_s = compute_s + memory_s
    return np.where(known, compute_s / np.where(known, total_s, 1.0), 1.0)


def reference_mhz(peaks: Peaks, samples: Mapping[int, Samples]) -> float | None:
    """The clock that losses count from: the one of the peaks, else the best that was seen; None without either."""
    if peaks.ref_mhz is not None:
        return peaks.ref_mhz
    best = [float(clock.max()) for _, clock in (one.known("sm_mhz") for one in samples.values()) if len(clock)]
    return max(best, default=None)


def multipliers(mhz: Many, sensitivity: Many, ref_mhz: float | None) -> Floats:
    """m of each op: the share of its time that it would have taken at the reference clock; 1 where either is unknown.

    Raises:
      ValueError: the reference clock is not positive.
    """
    clock, paced = np.asarray(mhz, np.float64), np.asarray(sensitivity, np.float64)
    if ref_mhz is None:
        return np.ones(np.broadcast(clock, paced).shape)
    if not ref_mhz > 0:
        raise ValueError(f"ref_mhz={ref_mhz} is no clock to compare with. Leave it null to go without attribution.")
    return np.where(np.isfinite(clock), (1 - paced) + paced * clock / ref_mhz, 1.0)


def split(
    lost_s: float, samples: Samples | None, start_ns: int, end_ns: int, ref_mhz: float | None
) -> dict[str, float]:
    """Seconds lost to the clock within a span, by cause; they sum to lost_s.

    The driver counts the nanoseconds in which power or heat held the clock down; of the time below the reference
    clock, they explain their share, and nobody explains the rest (idle, ramp up, a clock that was set): "other". Where
    nobody counts, the reasons that each sample gave take the counters' place.
    """
    if samples is None or ref_mhz is None:
        return {"power": 0.0, "thermal": 0.0, "other": lost_s}
    below_ns = (end_ns - start_ns) * _share_below(samples, ref_mhz, start_ns, end_ns)
    power_ns = samples.increase("power_violation_ns", start_ns, end_ns)
    thermal_ns = samples.increase("thermal_violation_ns", start_ns, end_ns)
    if math.isnan(power_ns) and math.isnan(thermal_ns):
        power_ns = (end_ns - start_ns) * samples.share(POWER_REASONS, start_ns, end_ns)
        thermal_ns = (end_ns - start_ns) * samples.share(THERMAL_REASONS, start_ns, end_ns)
    power_ns, thermal_ns = (0.0 if math.isnan(ns) else ns for ns in (power_ns, thermal_ns))
    whole_ns = max(below_ns, power_ns + thermal_ns)
    power_s = lost_s * power_ns / whole_ns if whole_ns else 0.0
    thermal_s = lost_s * thermal_ns / whole_ns if whole_ns else 0.0
    return {"power": power_s, "thermal": thermal_s, "other": lost_s - power_s - thermal_s}


def _share_below(samples: Samples, ref_mhz: float, start_ns: int, end_ns: int) -> float:
    """Share of a span in which the clock was below the reference; all of it where unknown."""
    times, clock = samples.known("sm_mhz")
    inner = times[(times > start_ns) & (times < end_ns)]
    edges = np.concatenate([[start_ns], inner, [end_ns]])
    held = np.searchsorted(times, edges[:-1], side="right") - 1
    if not len(times):
        return 1.0
    below = np.where(held < 0, True, clock[np.maximum(held, 0)] < ref_mhz)
    return float((np.diff(edges) * below).sum() / max(end_ns - start_ns, 1))


def mfu(
    step_flops: float | int | None, duration_s: float, num_devices: int, peaks: Peaks, mean_mhz: float | None
) -> dict[str, float | None]:
    """Model FLOPs utilisation of a step; None where unknown.

    spec: against the published peak, which holds at ref_mhz. clock: against the peak at the clock that it had, so
    spec = clock * f / ref_mhz. reference: against the peak at max_mhz, the highest clock of the device.
    """
    if not step_flops or not peaks.flops or not duration_s > 0:
        return {"spec": None, "clock": None, "reference": None}
    spec = step_flops / (duration_s * num_devices * peaks.flops)
    known = peaks.ref_mhz and mean_mhz and math.isfinite(mean_mhz)
    return {
        "spec": spec,
        "clock": spec * peaks.ref_mhz / mean_mhz if known and peaks.ref_mhz and mean_mhz else None,
        "reference": spec * peaks.ref_mhz / peaks.max_mhz if peaks.ref_mhz and peaks.max_mhz else None,
    }


def energy_j(samples: Samples, start_ns: int, end_ns: int) -> float | None:
    """Energy of one device over a span; None where unknown.

    By its counter over 20 of the counter's periods or more, else power by time, else the counter's coarse answer.
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


def tracks(samples: dict[int, Samples], start_ns: int, end_ns: int, max_points: int = 2000) -> list[ClockTrack]:
    """What each device's sampler saw within a span, time_s from its start; every n-th point where there are too many.

    What is looked at less often than the clock holds its value in between.
    """
    found = []
    for device, one in sorted(samples.items()):
        within = np.flatnonzero((one.epoch_ns >= start_ns) & (one.epoch_ns <= end_ns))
        within = within[:: max(1, math.ceil(len(within) / max_points))]
        times = one.epoch_ns[within]
        values = {
            name: [None if math.isnan(value) else value for value in one.mean(name, times, times).tolist()]
            for name in SERIES
            if name in ("sm_mhz", "mem_mhz", "power_w", "temperature_c")
        }
        found.append(
            ClockTrack(
                device=device,
                source=one.source,
                time_s=((times - start_ns) * 1e-9).tolist(),
                reasons=[reason_names(bits) for bits in one.reasons[within].tolist()],
                **values,
            )
        )
    return found


def reason_names(bits: int) -> str:
    """Names of the reasons, joined by commas; "" for none and for unknown."""
    return ",".join(name for bit, name in REASONS.items() if bits > 0 and bits & bit)
