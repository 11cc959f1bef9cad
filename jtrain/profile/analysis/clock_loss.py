"""Cost of low clocks: multiplier m = (1 - b) + b f / f_ref per op, seconds lost by cause, MFU against three
peaks.

An op that takes t seconds at clock f would take t m at the reference clock and so loses t (1 - m). The
sensitivity b, between 0 and 1, is the share of the op's time that scales with the clock: 1 if the number of
cycles is constant (as in Chopper, arXiv:2512.08242, whose frequency factor is 1 / m), else the compute share
of the roofline. Chopper takes cycles and durations from different runs and so mixes overlap into the clock's
share; here both come from one run.
"""

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from jtrain.errors import UserError
from jtrain.profile.analysis.records import ClockTrack, Peaks
from jtrain.profile.clocks.samples import (
    POWER_REASONS,
    REASONS,
    SERIES,
    THERMAL_REASONS,
    Floats,
    Many,
    Samples,
)

MIN_SAMPLES = 3
"""Clock samples that an op needs, summed over its executions; with fewer, the mean is really its neighbours'
clock."""


def enough(num_samples: Many) -> npt.NDArray[np.bool_]:
    """True for ops with enough samples for a clock of their own.

    Args:
      num_samples: `Samples.num_in` of each op, summed over its executions in the window.
    """
    return np.asarray(np.asarray(num_samples) >= MIN_SAMPLES)


def sensitivity(flops: Many, bytes: Many, peaks: Peaks, mhz: Many) -> Floats:
    """Sensitivity b of each op: its compute share of the roofline, t_c / (t_c + t_m), at its measured clock.

    t_c = flops / (peak * f / f_ref), t_m = bytes / bandwidth. If the op's work or a peak is unknown, b = 1,
    Chopper's assumption.
    """
    num_flops, num_bytes, clock = (np.asarray(values, np.float64) for values in (flops, bytes, mhz))
    num_flops, num_bytes, clock = np.broadcast_arrays(num_flops, num_bytes, clock)
    known = (num_flops > 0) | (num_bytes > 0)
    if not peaks.flops or not peaks.hbm_bytes_per_s:
        return np.ones(num_flops.shape)
    at = clock / peaks.ref_mhz if peaks.ref_mhz else np.ones(num_flops.shape)
    compute_s = num_flops / (peaks.flops * np.where(np.isfinite(at), at, 1.0))
    memory_s = num_bytes / peaks.hbm_bytes_per_s
    total_s = compute_s + memory_s
    return np.where(known, compute_s / np.where(known, total_s, 1.0), 1.0)


def reference_mhz(peaks: Peaks, samples: Mapping[int, Samples]) -> float | None:
    """Clock that losses are relative to: that of the peaks, else the highest sampled one; None if neither is
    known.
    """
    if peaks.ref_mhz is not None:
        return peaks.ref_mhz
    best = [
        float(clock.max()) for _, clock in (one.known("sm_mhz") for one in samples.values()) if len(clock)
    ]
    return max(best, default=None)


def multipliers(mhz: Many, sensitivity: Many, ref_mhz: float | None) -> Floats:
    """Multiplier m of each op: its time at the reference clock over its measured time; 1 if a clock is
    unknown.

    Raises:
      UserError: the reference clock is not positive.
    """
    clock, paced = np.asarray(mhz, np.float64), np.asarray(sensitivity, np.float64)
    if ref_mhz is None:
        return np.ones(np.broadcast(clock, paced).shape)
    if not ref_mhz > 0:
        raise UserError(f"ref_mhz={ref_mhz} must be positive. Set it to null to go without clock losses.")
    return np.where(np.isfinite(clock), (1 - paced) + paced * clock / ref_mhz, 1.0)


def split(
    lost_s: float, samples: Samples | None, start_ns: int, end_ns: int, ref_mhz: float | None
) -> dict[str, float]:
    """Divides `lost_s`, the seconds lost to the clock within a span, by cause.

    The driver counts the nanoseconds in which the power or thermal limit held the clock down. Their share of
    the time below the reference clock goes to these causes, the rest (idle, ramp-up, locked clocks) to
    "other". If the driver has no counters, the throttle reasons of the samples replace them.
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
    """Share of a span in which the clock was below the reference; unknown clocks count as below."""
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
    """Model FLOPs utilisation of a step against three peaks; None where unknown.

    spec: the published peak, which holds at ref_mhz. clock: the peak at the measured clock f, so
    spec = clock * f / ref_mhz. reference: the peak at max_mhz, the device's highest clock.
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


def tracks(
    samples: dict[int, Samples], start_ns: int, end_ns: int, max_points: int = 2000
) -> list[ClockTrack]:
    """Each device's samples within a span, time_s counted from its start; thinned to at most `max_points`.

    Quantities that are sampled less often than the clock keep their last value in between.
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
    """Names of the throttle reasons, joined by commas; "" if there are none or they are unknown."""
    return ",".join(name for bit, name in REASONS.items() if bits > 0 and bits & bit)
