"""Cost of low clocks: multiplier m = (1 - b) + b f / f_ref per op, seconds lost by cause, three MFUs.

An op that takes t seconds at clock f would take t m at the reference clock and so loses t (1 - m). The
sensitivity b, between 0 and 1, is the share of the op's time that scales with the clock: 1 if the number of
cycles is constant (as in Chopper, arXiv:2512.08242, whose frequency factor is 1 / m), else the compute share
of the roofline. Chopper takes cycles and durations from different runs and so mixes overlap into the clock's
share; here both come from one run.

Example: peaks of 1000 TFLOP/s and 3 TB/s at f_ref = 1800 MHz, and an op of 1 TFLOP and 1 GB that ran at
1500 MHz. Compute takes 1.2 ms at that clock, memory 0.333 ms, so b = 1.2 / 1.533 = 0.783 and
m = 0.217 + 0.783 * 1500 / 1800 = 0.870: 13 % of the op's time is lost to the clock, not the 17 % by which the
clock is lower.
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


def has_enough_samples(num_samples: Many) -> npt.NDArray[np.bool_]:
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
    has_work = (num_flops > 0) | (num_bytes > 0)
    if not peaks.flops or not peaks.hbm_bytes_per_s:
        return np.ones(num_flops.shape)
    # Only compute slows with the clock; memory bandwidth keeps its own.
    clock_share = clock / peaks.ref_mhz if peaks.ref_mhz else np.ones(num_flops.shape)
    compute_s = num_flops / (peaks.flops * np.where(np.isfinite(clock_share), clock_share, 1.0))
    memory_s = num_bytes / peaks.hbm_bytes_per_s
    total_s = compute_s + memory_s
    # The inner where avoids 0 / 0 for ops without work, which get 1 anyway.
    return np.where(has_work, compute_s / np.where(has_work, total_s, 1.0), 1.0)


def reference_mhz(peaks: Peaks, samples: Mapping[int, Samples]) -> float | None:
    """Clock that losses are relative to: the peaks', else the highest sampled one; None if unknown."""
    if peaks.ref_mhz is not None:
        return peaks.ref_mhz
    highest_mhz = [
        float(clock.max())
        for _, clock in (device_samples.known("sm_mhz") for device_samples in samples.values())
        if len(clock)
    ]
    return max(highest_mhz, default=None)


def multipliers(mhz: Many, sensitivity: Many, ref_mhz: float | None) -> Floats:
    """Multiplier m of each op: its time at the reference clock over its measured time; 1 if unknown.

    Raises:
      UserError: the reference clock is not positive.
    """
    clock, sensitivities = np.asarray(mhz, np.float64), np.asarray(sensitivity, np.float64)
    if ref_mhz is None:
        return np.ones(np.broadcast(clock, sensitivities).shape)
    if not ref_mhz > 0:
        raise UserError(f"ref_mhz={ref_mhz} must be positive. Set it to null to go without clock losses.")
    return np.where(np.isfinite(clock), (1 - sensitivities) + sensitivities * clock / ref_mhz, 1.0)


def split_by_cause(
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
    # One counter alone is used as it is; the samples' reasons replace them only if both are missing.
    if math.isnan(power_ns) and math.isnan(thermal_ns):
        power_ns = (end_ns - start_ns) * samples.share(POWER_REASONS, start_ns, end_ns)
        thermal_ns = (end_ns - start_ns) * samples.share(THERMAL_REASONS, start_ns, end_ns)
    power_ns, thermal_ns = (0.0 if math.isnan(ns) else ns for ns in (power_ns, thermal_ns))
    # Counters are exact and samples coarse: the counted time may exceed the sampled time below the reference.
    attributed_ns = max(below_ns, power_ns + thermal_ns)
    power_s = lost_s * power_ns / attributed_ns if attributed_ns else 0.0
    thermal_s = lost_s * thermal_ns / attributed_ns if attributed_ns else 0.0
    return {"power": power_s, "thermal": thermal_s, "other": lost_s - power_s - thermal_s}


def _share_below(samples: Samples, ref_mhz: float, start_ns: int, end_ns: int) -> float:
    """Share of a span in which the clock was below the reference; unknown clocks count as below."""
    times, clock = samples.known("sm_mhz")
    inner = times[(times > start_ns) & (times < end_ns)]
    edges = np.concatenate([[start_ns], inner, [end_ns]])
    # Index of the sample that holds at the begin of each interval; -1 before the first.
    held = np.searchsorted(times, edges[:-1], side="right") - 1
    # No sample: all of the span counts as below, so the loss goes to "other".
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
    has_clocks = peaks.ref_mhz and mean_mhz and math.isfinite(mean_mhz)
    return {
        "spec": spec,
        "clock": spec * peaks.ref_mhz / mean_mhz if has_clocks and peaks.ref_mhz and mean_mhz else None,
        "reference": spec * peaks.ref_mhz / peaks.max_mhz if peaks.ref_mhz and peaks.max_mhz else None,
    }


def sample_tracks(
    samples: dict[int, Samples], start_ns: int, end_ns: int, max_points: int = 2000
) -> list[ClockTrack]:
    """Each device's samples within a span, time_s counted from its start; thinned to at most `max_points`.

    Quantities that are sampled less often than the clock keep their last value in between.
    """
    clock_tracks = []
    for device, device_samples in sorted(samples.items()):
        indices = np.flatnonzero((device_samples.epoch_ns >= start_ns) & (device_samples.epoch_ns <= end_ns))
        indices = indices[:: max(1, math.ceil(len(indices) / max_points))]
        # A span of length 0 asks for the value that holds at that time.
        times = device_samples.epoch_ns[indices]
        values = {
            name: [
                # More digits than a sensor has would only make the report larger.
                None if math.isnan(value) else round(value, 2)
                for value in device_samples.mean(name, times, times).tolist()
            ]
            for name in SERIES
            if name in ("sm_mhz", "mem_mhz", "power_w", "temperature_c")
        }
        clock_tracks.append(
            ClockTrack(
                device=device,
                source=device_samples.source,
                time_s=np.round((times - start_ns) * 1e-9, 6).tolist(),
                reasons=[reason_names(bits) for bits in device_samples.reasons[indices].tolist()],
                **values,
            )
        )
    return clock_tracks


def reason_names(bits: int) -> str:
    """Names of the throttle reasons, joined by commas; "" if there are none or they are unknown."""
    return ",".join(name for bit, name in REASONS.items() if bits > 0 and bits & bit)
