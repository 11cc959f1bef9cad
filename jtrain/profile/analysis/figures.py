"""Figures derived from a breakdown, shared by the report, the comparison and the advice."""

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

from jtrain.profile.analysis.records import (
    Breakdown,
    CommRow,
    HloOp,
    LiveBuffer,
    OpRow,
    OpTraffic,
    PipelineTrack,
    StepBreakdown,
)
from jtrain.report.number_formats import rate, seconds, share


@dataclasses.dataclass(frozen=True)
class StepPart:
    """One part of a step's time: its key in `StepBreakdown.parts`, its name in reports, and its meaning."""

    key: str
    name: str
    meaning: str


# Ordered as time is peeled off: compute first, then what the device waits for.
PARTS = (
    StepPart("theoretical", "math at peak speed", "the model's own FLOPs and bytes at the device's peak"),
    StepPart("instruction", "extra instructions", "FLOPs beyond the model's own: recomputation, padding"),
    StepPart("utilisation", "low utilisation", "computing, but below the peak of compute or memory"),
    StepPart(
        "overlap", "overlap", "computing slower because a collective takes its share of memory and cores"
    ),
    StepPart("clocks", "clock loss", "computing below the reference clock: power, temperature"),
    StepPart("exposed_communication", "exposed communication", "collectives that no compute hides"),
    StepPart("data_wait", "data wait", "the step waits for its batch"),
    StepPart("host", "host", "Python and dispatch: devices wait for the host"),
    StepPart("idle", "idle", "devices wait for each other, or for a reason that the trace does not record"),
)
"""Parts of a step in the order in which reports stack them; they sum to the step."""

CATEGORIES = {"compute": "computing", "redone": "steps done again", "startup": "start-up"}
"""Displayed names of goodput categories, where they differ from the key."""

CHAIN = ("instruction", "utilisation", "overlap", "frequency")
"""Factors between the theoretical time and the time in which a device computes (`chopper.py`)."""

MFU = {
    "spec": "MFU, of the {kind} peak",
    "clock": "MFU, of the {kind} peak at the clock while it computed",
    "reference": "MFU, of the {kind} peak at the highest clock",
}
"""Displayed name of each key of `StepBreakdown.mfu`; `kind` is specified, or measured on this machine."""


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of the known values; None if all are unknown."""
    known_values = [value for value in values if value is not None]
    return statistics.fmean(known_values) if known_values else None


def mean_step(breakdown: Breakdown) -> StepBreakdown:
    """Mean over the steps of the window, as a step with the number of the first."""
    steps = breakdown.steps

    def dicts(field: str) -> dict[str, float | None]:
        step_values: list[dict[str, float | None]] = [getattr(step, field) for step in steps]
        return {key: mean(values.get(key) for values in step_values) for key in step_values[0]}

    return StepBreakdown(
        step=steps[0].step,
        duration_s=statistics.fmean(step.duration_s for step in steps),
        # Unknown in some steps, a part counts as 0 there; otherwise the parts would not sum to the step.
        parts={part.key: part_mean([step.parts.get(part.key) for step in steps]) for part in PARTS},
        chain=dicts("chain"),
        clocks_lost_s={cause: value or 0.0 for cause, value in dicts("clocks_lost_s").items()},
        energy_j=mean(step.energy_j for step in steps),
        mfu={key: _weighted_mean(steps, key) for key in steps[0].mfu},
        # Devices have means of their own: `by_device`.
        devices=[],
    )


def _weighted_mean(steps: Sequence[StepBreakdown], key: str) -> float | None:
    """MFU of all steps together: all FLOPs over all seconds, not the mean of what each step reached."""
    shares = [(step.mfu.get(key), step.duration_s) for step in steps]
    known_shares = [(value, duration_s) for value, duration_s in shares if value is not None]
    if not known_shares:
        return None
    return sum(value * duration_s for value, duration_s in known_shares) / sum(
        took_s for _, took_s in known_shares
    )


def part_mean(values: Sequence[float | None]) -> float | None:
    """Mean over all values, with unknown ones counted as 0; None if all are unknown."""
    known_values = [value for value in values if value is not None]
    return sum(known_values) / len(values) if known_values else None


def peaks_line(breakdown: Breakdown) -> str | None:
    """The peaks that times are compared with, where this machine measured them; None where one is published."""
    peaks = breakdown.peaks
    if peaks.flops is None or peaks.measured is None:
        return None
    copies = "" if peaks.hbm_bytes_per_s is None else f" and {rate(peaks.hbm_bytes_per_s)} of memory"
    return (
        f"The peak of a device is {peaks.flops / 1e9:,.1f} GFLOP/s{copies}, measured on this machine on "
        f"{peaks.measured}: the best of its own matrix products and copies, because its maker publishes none."
    )


def mfu_shares(breakdown: Breakdown) -> dict[str, float]:
    """Known model FLOPs utilisations of the mean step, by their displayed names."""
    kind = "specified" if breakdown.peaks.measured is None else "measured"
    shares = mean_step(breakdown).mfu
    return {
        name.format(kind=kind): value for key, name in MFU.items() if (value := shares.get(key)) is not None
    }


def joules_per_token(breakdown: Breakdown) -> float | None:
    """Energy of all devices per token of the window; None if the energy of any step is unknown.

    With several processes, devices of other processes are assumed to use as much as this process's devices.
    """
    energies = [step.energy_j for step in breakdown.steps]
    known_j = [energy for energy in energies if energy is not None]
    tokens = breakdown.tokens_per_step * len(energies)
    # A process sees its own devices only.
    all_j = sum(known_j) * breakdown.all_devices / breakdown.num_devices
    return all_j / tokens if tokens and len(known_j) == len(energies) else None


def tokens_per_s(breakdown: Breakdown) -> float:
    """Tokens per second of all devices together."""
    return breakdown.tokens_per_step * len(breakdown.steps) / sum(step.duration_s for step in breakdown.steps)


def per_step(breakdown: Breakdown, total: int | float) -> float:
    """Converts a sum over all devices and steps of the window to what it is per device and step."""
    return total / (len(breakdown.steps) * breakdown.num_devices)


def parts_of(step: StepBreakdown) -> list[StepPart]:
    """PARTS for this step; if the device's peak is unknown, the third part stands for all computing."""
    if step.parts.get("theoretical") is not None:
        return list(PARTS)
    # The key stays, so that the bar keeps its colour and its place.
    undivided = StepPart(
        "utilisation", "computing", "math and losses in one: no peak of this device is known"
    )
    return [undivided if part.key == "utilisation" else part for part in PARTS]


def largest_loss(step: StepBreakdown) -> tuple[StepPart, float] | None:
    """The largest part other than the math itself; computing that could not be divided is left out."""
    # The first part is the math itself, which is no loss.
    lost = {part: step.parts.get(part.key) or 0.0 for part in PARTS[1:]}
    if step.parts.get("theoretical") is None:
        lost = {part: value for part, value in lost.items() if part.key != "utilisation"}
    largest_part = max(lost, key=lambda part: lost[part])
    return (largest_part, lost[largest_part]) if lost[largest_part] > 0 else None


@dataclasses.dataclass(frozen=True)
class DeviceMean:
    """Means of one device over the window: seconds per step, sampled clock and power.

    compute_s: shows a slow device. busy_s does not: the other devices wait for it in collectives, so that all
      are busy equally long.
    """

    device: int
    compute_s: float
    communication_s: float
    exposed_communication_s: float
    mean_mhz: float | None
    mean_w: float | None


def by_device(breakdown: Breakdown) -> list[DeviceMean]:
    """Each device's means over the window, in order."""
    rows_by_device: dict[int, list[dict[str, int | float]]] = {}
    for step in breakdown.steps:
        for device_row in step.devices:
            rows_by_device.setdefault(int(device_row["device"]), []).append(device_row)

    def sampled(device: int, field: str) -> float | None:
        # One track per device: a CPU's samples, of device -1, were saved once for each device.
        means = (mean(getattr(track, field)) for track in breakdown.clocks if track.device == device)
        return next((value for value in means if value is not None), None)

    def per_step_s(device: int, key: str) -> float:
        return statistics.fmean(device_row[key] for device_row in rows_by_device[device])

    return [
        DeviceMean(
            device,
            # Busy is computing or in a collective; what is exposed of the latter is beside no computation.
            compute_s=per_step_s(device, "busy_s") - per_step_s(device, "exposed_communication_s"),
            communication_s=per_step_s(device, "communication_s"),
            exposed_communication_s=per_step_s(device, "exposed_communication_s"),
            mean_mhz=sampled(device, "sm_mhz"),
            mean_w=sampled(device, "power_w"),
        )
        for device in sorted(rows_by_device)
    ]


def steps_line(breakdown: Breakdown) -> str:
    """`steps 20 to 24`."""
    first, last = breakdown.steps[0].step, breakdown.steps[-1].step
    return f"step {first}" if first == last else f"steps {first} to {last}"


def machine_line(breakdown: Breakdown) -> str:
    """`8 × cpu (cpu)`; with several processes also the number of this process and of its devices."""
    kind = f"{breakdown.all_devices} × {breakdown.device_kind} ({breakdown.platform})"
    if breakdown.num_processes == 1:
        return kind
    return f"{kind}, the {breakdown.num_devices} of process {breakdown.process}"


def headline(breakdown: Breakdown) -> str:
    """One-sentence summary: duration of a step, share of the model's math, largest loss."""
    step = mean_step(breakdown)
    math_s, part_and_seconds = step.parts.get("theoretical"), largest_loss(step)
    text = f"Of a step of {seconds(step.duration_s)}, "
    text += (
        "the math's share is unknown"
        if math_s is None
        else f"{share(math_s, step.duration_s)} is math at peak speed"
    )
    if part_and_seconds is None:
        return f"{text}."
    part, lost_s = part_and_seconds
    return f"{text}; the largest loss is {part.name}: {seconds(lost_s)}, {share(lost_s, step.duration_s)}."


def chain_line(step: StepBreakdown) -> str:
    """The product of `chopper.py` as text; unknown factors are marked as such."""
    theoretical, compute = step.chain.get("theoretical_s"), seconds(step.chain.get("compute_s"))
    if theoretical is None:
        return f"{compute} computing; how much of it is math at peak speed is unknown"
    factors = (step.chain.get(name) for name in CHAIN)
    words = (
        f"{name} {'unknown' if factor is None else f'{factor:.3f}'}"
        for name, factor in zip(CHAIN, factors, strict=True)
    )
    return f"{seconds(theoretical)} at peak speed × {' × '.join(words)} = {compute} computing"


def pipeline_line(track: PipelineTrack) -> str:
    """Measured bubble of a window beside the schedule's, in one sentence."""
    bubbles = [step.bubble for step in track.steps]
    mean_shares = {
        name: statistics.fmean(getattr(step, name) for step in track.steps)
        for name in ("instructions", "ends")
    }
    # A process sees its own workers only.
    worker_range = (
        "" if len(track.workers) == track.stages else f", workers {track.workers[0]} to {track.workers[-1]}"
    )
    spread = (
        f", {min(bubbles):.1%} to {max(bubbles):.1%} over {len(bubbles)} steps" if len(bubbles) > 1 else ""
    )
    return (
        f"measured bubble {statistics.fmean(bubbles):.1%}{spread}; {track.schedule} over {track.stages} "
        f"stages with {track.microbatches} microbatches has {track.planned_bubble:.1%} in "
        f"lockstep{worker_range}. "
        f"Workers compute layers for {mean_shares['instructions']:.1%} of the ticks' time, embedding and "
        "loss "
        f"for {mean_shares['ends']:.1%}"
    )


def comm_name(row: CommRow | OpTraffic) -> str:
    """`all-gather over data`; axes as the mesh names them."""
    return f"{row.kind} over {' × '.join(row.axes) or 'unknown axes'}"


def op_location(row: OpRow | HloOp | LiveBuffer) -> str:
    """`layers/mlp, backward`."""
    # The optimizer is a layer and a phase of the same name, which is said once.
    return ", ".join(dict.fromkeys(word for word in (row.layer, row.phase) if word)) or "unknown"


def main_cause(row: OpRow) -> str:
    """The factor through which an op loses most; "" if it loses nothing."""
    # Losses may be negative: an op may beat the time that its FLOPs should take at the peak.
    cause = max(row.lost, key=lambda name: row.lost[name], default="")
    if not cause or row.lost[cause] <= 0:
        return ""
    # If the peak is unknown, utilisation holds all of the op's own time, which need not be lost.
    return "computing" if cause == "utilisation" and row.theoretical_s is None else cause


def by_category(breakdown: Breakdown) -> list[tuple[str, str, float]]:
    """(key, name, seconds) of each goodput category that has any time, largest first."""
    spent = [
        (key, CATEGORIES.get(key, key.replace("_", " ")), value) for key, value in breakdown.goodput.items()
    ]
    return sorted((category for category in spent if category[2] > 0), key=lambda category: -category[2])
