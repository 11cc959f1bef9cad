"""Advice on what to change next: rules that name the setting and the expected gain, the largest gain first.

A gain is read off the numbers of the page: the seconds per step that the change can remove at most. No rule
names a tool or a cause of another platform.
"""

import collections
import math
import statistics
from collections.abc import Mapping
from typing import Literal, NamedTuple

from jtrain.profile.analysis import figures
from jtrain.profile.analysis.figures import comm_name, mean_step, per_step
from jtrain.profile.analysis.records import Breakdown, CommRow, StepBreakdown
from jtrain.report.number_formats import seconds, share, size

MIN_SHARES = {
    "exposed_communication": 0.05,
    "data_wait": 0.02,
    "clocks": 0.03,
    "utilisation": 0.15,
    "instruction": 0.10,
    "host": 0.03,
    "idle": 0.05,
}
"""Smallest share of a step for which a part gets advice; smaller gains are within the noise between runs."""

SLOW_DEVICE = 0.05
"""Excess of a device's compute time over the median from which it counts as slow: all others wait for it."""

SLOW_CLOCK = 0.02
"""Deficit of a device's clock to the median from which the clock explains a slow device."""

EXCESS_BYTES = 0.10
"""Excess of sent over planned bytes from which a collective is not the one that was planned."""


type Hardware = Literal["cpu", "nvidia", "amd", "tpu", "other"]
"""Platform that advice is for."""


class Advice(NamedTuple):
    """What to change, and the seconds per step that it can win at most."""

    text: str
    gain_s: float


def advise(breakdown: Breakdown) -> list[str]:
    """One line per rule that applies: seconds lost per step, the setting to change, and the expected gain."""
    step = mean_step(breakdown)
    advice: list[Advice] = []
    rules = {
        "exposed_communication": _communication,
        "data_wait": _data_wait,
        "clocks": _clocks,
        "utilisation": _utilisation,
        "instruction": _instruction,
        "host": _host,
        "idle": _idle,
    }
    for key, rule in rules.items():
        lost = step.parts.get(key) or 0.0
        # A rule may know nothing to do about its part: then it gives no line.
        if lost >= MIN_SHARES[key] * step.duration_s and (part_advice := rule(breakdown, step)):
            part = next(part for part in figures.PARTS if part.key == key)
            cost = f"{part.name}: {seconds(lost)}, {share(lost, step.duration_s)} of the step"
            advice.append(Advice(f"{cost[0].upper()}{cost[1:]}. {part_advice.text}", part_advice.gain_s))
    advice += _slow_device(breakdown) + _more_bytes(breakdown)
    # Largest gain first, whichever rule it comes from.
    return [
        f"{text} {_gain_text(gain_s, step.duration_s)}"
        for text, gain_s in sorted(advice, key=lambda one: -one.gain_s)
    ]


def _gain_text(gain_s: float, step_s: float) -> str:
    faster = step_s / max(step_s - gain_s, 1e-9) - 1.0
    return f"Expected gain: at most {seconds(gain_s)} of a step, {faster:.1%} more tokens per second."


def hardware(breakdown: Breakdown) -> Hardware:
    """The kind of device, as far as advice differs: by platform, and of a GPU by its maker."""
    if breakdown.platform in ("cpu", "tpu"):
        return "cpu" if breakdown.platform == "cpu" else "tpu"
    kind = breakdown.device_kind
    if breakdown.platform == "cuda" or kind.startswith("NVIDIA"):
        return "nvidia"
    return "amd" if breakdown.platform == "rocm" or kind.startswith(("AMD", "gfx", "MI")) else "other"


def _communication(breakdown: Breakdown, step: StepBreakdown) -> Advice | None:
    if not breakdown.communication:
        return None
    # Exposed time is what a change can win; a long but hidden collective costs nothing.
    row = max(breakdown.communication, key=lambda row: row.exposed_s)
    cause = (
        f"Most of it is {comm_name(row)}: {seconds(row.exposed_s)} of {seconds(row.total_s)} exposed, "
        f"{size(row.wire_bytes)} in {row.count:,.3g} calls"
    )
    if hardware(breakdown) == "cpu" and breakdown.num_processes == 1:
        # All of it: one device sends nothing.
        text = f"{cause}: emulated devices share the cores of one machine; a single device sends nothing."
        return Advice(text, step.parts["exposed_communication"] or 0.0)
    text, part = _less_communication(row, breakdown.settings)
    return Advice(f"{cause}: {text}.", part * row.exposed_s)


def _less_communication(row: CommRow, settings: Mapping[str, str | int]) -> tuple[str, float]:
    """Suggests a setting that reduces a collective of this kind over these axes and is not set yet, and the
    largest part of it that can go.
    """
    if "tensor" in row.axes:
        text = "every layer sends activations over this axis; try half of mesh.tensor and twice mesh.data"
        return text, 1.0
    if "context" in row.axes and row.kind in ("collective-permute", "all-to-all"):  # ZeRO gathers over it too
        return "try half of mesh.context and twice mesh.data, if a sequence still fits on a device", 1.0
    microbatches = settings.get("layout.microbatches", 1)
    if row.kind == "all-gather" and settings.get("layout.zero_stage") == 3:
        microbatch_advice = f"fewer than layout.microbatches={microbatches}, or " if microbatches != 1 else ""
        text = (
            f"each microbatch gathers the parameters again; try {microbatch_advice}layout.zero_stage=2, "
            "which keeps all parameters on each device"
        )
        return text, 1.0
    if row.kind != "all-gather" and settings.get("precision.reduce_dtype") != "bfloat16":
        return "precision.reduce_dtype=bfloat16 halves the bytes of the gradient reduction", 0.5
    # No setting is left that sends fewer bytes.
    return "more tokens per device and step hide it: try a larger data.global_batch", 1.0


def _data_wait(breakdown: Breakdown, step: StepBreakdown) -> Advice:
    text = (
        "Set data.prepared to a folder made by `jtrain data prepare`, so that nothing is tokenised during "
        "training; or raise data.max_loaders or data.lookahead_steps."
    )
    return Advice(text, step.parts["data_wait"] or 0.0)


_POWER = {
    "nvidia": "`nvidia-smi --power-limit` sets it, within the board's range; a lower limit trades tokens/s for "
    "J per token.",
    "amd": "`amd-smi set --power-cap` sets it, within the board's range; a lower limit trades tokens/s for "
    "J per token.",
}
_HEAT = {
    "nvidia": "improve cooling, or lower `nvidia-smi --power-limit`.",
    "amd": "improve cooling, or lower `amd-smi set --power-cap`.",
    "cpu": "improve cooling.",
    "tpu": "ask the provider for another host.",
}
_OTHER_CLOCK = {
    "nvidia": "`nvidia-smi --lock-gpu-clocks` holds a clock, if you have the permission; the throttle reasons "
    "over the steps show when it drops.",
    "amd": "`amd-smi set --perf-level` holds a clock, if you have the permission; the throttle reasons over the "
    "steps show when it drops.",
    "cpu": "other programs on these cores, or other guests of a shared host, look like a lower clock. End them, "
    "or give the run cores of its own.",
    "tpu": "the throttle score over the steps shows when it drops; no setting of a program changes it. Where one "
    "host stays slower than the others, ask the provider for another one.",
}
"""What to do about a low clock by its cause, for each kind of device that has a tool."""


def _clocks(breakdown: Breakdown, step: StepBreakdown) -> Advice:
    # Advice for the largest cause only; the page shows all three.
    cause = max(step.clocks_lost_s, key=lambda name: step.clocks_lost_s[name], default="other")
    lost = step.clocks_lost_s.get(cause, 0.0)
    kind, lost_text = hardware(breakdown), seconds(lost)
    if cause == "power":
        watts = figures.mean(device.mean_w for device in figures.by_device(breakdown))
        power_text = "" if watts is None else f" at {watts:,.0f} W"
        action = _POWER.get(kind, "raise it where the board or the host allows that.")
        return Advice(f"{lost_text} of it due to the power limit{power_text}: {action}", lost)
    if cause == "thermal":
        temperatures = [
            value for track in breakdown.clocks for value in track.temperature_c if value is not None
        ]
        heat_text = f", at up to {max(temperatures):.0f} °C" if temperatures else ""
        return Advice(
            f"{lost_text} of it due to heat{heat_text}: {_HEAT.get(kind, 'improve cooling.')}", lost
        )
    action = _OTHER_CLOCK.get(kind, "the throttle reasons over the steps show when it drops.")
    return Advice(f"{lost_text} of it without a reason from the driver: {action}", lost)


def _utilisation(breakdown: Breakdown, step: StepBreakdown) -> Advice | None:
    if step.parts.get("theoretical") is None:
        return None  # the peak is unknown, so this part includes the math itself and need not be a loss
    lost_by_layer: dict[str, float] = collections.defaultdict(float)
    for op in breakdown.ops:
        lost_by_layer[figures.op_location(op)] += per_step(breakdown, op.lost.get("utilisation", 0.0))
    layer = max(lost_by_layer, key=lambda name: lost_by_layer[name], default="")
    if not layer or lost_by_layer[layer] <= 0:
        return None
    if layer.startswith("loss"):
        action = "a larger model.loss_chunk_tokens"
    elif _accumulates(breakdown):
        action = "half the layout.microbatches, which doubles the activations"
    else:
        action = "a larger data.global_batch"
    text = (
        f"Most of it in {layer}, {seconds(lost_by_layer[layer])}. Larger matrices use the device better; try "
        f"{action}."
    )
    return Advice(text, lost_by_layer[layer])


def _instruction(breakdown: Breakdown, step: StepBreakdown) -> Advice | None:
    remat = breakdown.settings.get("layout.remat")
    # Nothing is recomputed then, and against padding there is no setting.
    if remat == "none":
        return None
    factor = step.chain.get("instruction")
    factor_text = "" if factor is None else f"The device computes {factor:.2f} times the model's FLOPs. "
    # A CPU is none of the devices that a plan can be for.
    what_fits = "" if hardware(breakdown) == "cpu" else ": `jtrain plan --search` shows what fits"
    text = (
        f"{factor_text}layout.remat={remat} recomputes the forward pass; layout.remat=named with more "
        f"layout.remat_save, or layout.remat=none, recomputes less and needs more memory{what_fits}."
    )
    # Recomputed ops take as long as they take, which is longer than their FLOPs at the peak.
    recomputed_s = math.fsum(
        op.total_s for op in breakdown.ops if op.theoretical_s == 0 and op.lost["instruction"] > 0
    )
    return Advice(text, max(step.parts["instruction"] or 0.0, per_step(breakdown, recomputed_s)))


def _host(breakdown: Breakdown, step: StepBreakdown) -> Advice:
    host_s = step.parts["host"] or 0.0
    # Activities in the order of their seconds; waiting for data is a part of its own.
    name, spent_s = next(((n, s) for n, s in breakdown.host.items() if n != "data_wait"), ("", 0.0))
    if spent_s > 0.5 * host_s:
        text = f"`{name}` takes {seconds(spent_s)} of it: make it faster, or let it work in a thread or less often."
        return Advice(text, min(spent_s, host_s))
    text = "Try a larger metrics.log_every_steps, or a larger data.global_batch, which makes steps longer."
    return Advice(text, host_s)


def _idle(breakdown: Breakdown, step: StepBreakdown) -> Advice:
    microbatch_advice = "fewer layout.microbatches or " if _accumulates(breakdown) else ""
    text = f"Devices idle between ops: {microbatch_advice}a larger data.global_batch makes each op longer."
    return Advice(text, step.parts["idle"] or 0.0)


def _accumulates(breakdown: Breakdown) -> bool:
    return breakdown.settings.get("layout.microbatches", 1) != 1


def _slow_device(breakdown: Breakdown) -> list[Advice]:
    devices = figures.by_device(breakdown)
    if len(devices) < 2:
        return []
    # compute_s, not busy_s: the others are busy waiting for the slow one in collectives.
    slow = max(devices, key=lambda device: device.compute_s)
    median_s = statistics.median(device.compute_s for device in devices)
    lost = slow.compute_s - median_s
    if median_s <= 0 or lost < SLOW_DEVICE * median_s:
        return []
    finding = (
        f"Device {slow.device} computes {seconds(lost)} longer per step than the median one "
        f"({lost / median_s:.1%})"
    )
    # A slow clock explains a slow device; without one the work must differ.
    clocks = [device.mean_mhz for device in devices if device.mean_mhz is not None]
    median_mhz = statistics.median(clocks) if clocks else None
    if median_mhz and slow.mean_mhz is not None and slow.mean_mhz < (1 - SLOW_CLOCK) * median_mhz:
        is_tpu = hardware(breakdown) == "tpu"
        action = "ask the provider for another chip" if is_tpu else "look at its power limit and cooling"
        reason = f"its clock is {slow.mean_mhz:,.0f} MHz against {median_mhz:,.0f}: {action}"
    else:
        reason = "its clock does not explain that: data.balance=True gives all ranks about the same work"
    return [Advice(f"{finding}, and all others wait for it; {reason}.", lost)]


def _more_bytes(breakdown: Breakdown) -> list[Advice]:
    advice = []
    for row in breakdown.communication:
        if row.planned_bytes and row.wire_bytes > (1 + EXCESS_BYTES) * row.planned_bytes and row.exposed_s:
            text = (
                f"{comm_name(row)} sends {size(row.wire_bytes)} where the plan has "
                f"{size(row.planned_bytes)}, {row.wire_bytes / row.planned_bytes:.2f} times as much, and "
                f"{seconds(row.exposed_s)} of it is exposed: the compiler uses a wider dtype or sends arrays "
                "twice; see precision.reduce_dtype and layout.remat."
            )
            # The exposed time of the bytes beyond the plan.
            advice.append(Advice(text, row.exposed_s * (1 - row.planned_bytes / row.wire_bytes)))
    return advice
