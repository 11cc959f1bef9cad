"""Advice on what to change next: rules that give the seconds at stake and the setting, largest first."""

import collections
import statistics
from collections.abc import Mapping

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


def advise(breakdown: Breakdown) -> list[str]:
    """One line per rule that applies: seconds lost per step and the setting to change."""
    step = mean_step(breakdown)
    advice: list[tuple[float, str]] = []
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
        if lost >= MIN_SHARES[key] * step.duration_s and (line := rule(breakdown, step)):
            part = next(part for part in figures.PARTS if part.key == key)
            cost = f"{part.name}: {seconds(lost)}, {share(lost, step.duration_s)} of the step"
            advice.append((lost, f"{cost[0].upper()}{cost[1:]}. {line}"))
    advice += _slow_device(breakdown) + _more_bytes(breakdown, step)
    # Largest loss first, whichever rule it comes from.
    return [line for _, line in sorted(advice, key=lambda pair: -pair[0])]


def _communication(breakdown: Breakdown, step: StepBreakdown) -> str | None:
    if not breakdown.communication:
        return None
    # Exposed time is what a change can win; a long but hidden collective costs nothing.
    row = max(breakdown.communication, key=lambda row: row.exposed_s)
    cause = (
        f"Most of it is {comm_name(row)}: {seconds(row.exposed_s)} of {seconds(row.total_s)} exposed, "
        f"{size(row.wire_bytes)} in {row.count:,.3g} calls"
    )
    return f"{cause}: {_less_communication(row, breakdown.settings)}."


def _less_communication(row: CommRow, settings: Mapping[str, str | int]) -> str:
    """Suggests a setting that reduces a collective of this kind over these axes and is not set yet."""
    if "tensor" in row.axes:
        return "every layer sends activations over this axis; try half of mesh.tensor and twice mesh.data"
    if "context" in row.axes and row.kind in ("collective-permute", "all-to-all"):  # ZeRO gathers over it too
        return "try half of mesh.context and twice mesh.data, if a sequence still fits on a device"
    microbatches = settings.get("layout.microbatches", 1)
    if row.kind == "all-gather" and settings.get("layout.zero_stage") == 3:
        microbatch_advice = f"fewer than layout.microbatches={microbatches}, or " if microbatches != 1 else ""
        return (
            f"each microbatch gathers the parameters again; try {microbatch_advice}layout.zero_stage=2, "
            "which "
            "keeps all parameters on each device"
        )
    if row.kind != "all-gather" and settings.get("precision.reduce_dtype") != "bfloat16":
        return "precision.reduce_dtype=bfloat16 halves the bytes of the gradient reduction"
    # No setting is left that sends fewer bytes.
    return "more tokens per device and step hide it: try a larger data.global_batch"


def _data_wait(breakdown: Breakdown, step: StepBreakdown) -> str:
    return (
        "Set data.prepared to a folder made by `python -m jtrain.data prepare`, so that nothing is tokenised "
        "during training; or raise data.max_loaders or data.lookahead_steps."
    )


def _clocks(breakdown: Breakdown, step: StepBreakdown) -> str:
    # Advice for the largest cause only; the page shows all three.
    cause = max(step.clocks_lost_s, key=lambda name: step.clocks_lost_s[name], default="other")
    lost = step.clocks_lost_s.get(cause, 0.0)
    watts = figures.mean(device.mean_w for device in figures.by_device(breakdown))
    if cause == "power":
        power_text = "" if watts is None else f" at {watts:,.0f} W"
        return (
            f"{seconds(lost)} of it due to the power limit{power_text}: `nvidia-smi --power-limit` sets it, "
            "within the board's range; a lower limit trades tokens/s for J per token."
        )
    if cause == "thermal":
        temperatures = [
            value for track in breakdown.clocks for value in track.temperature_c if value is not None
        ]
        heat_text = f", at up to {max(temperatures):.0f} °C" if temperatures else ""
        return (
            f"{seconds(lost)} of it due to heat{heat_text}: improve cooling, or lower `nvidia-smi "
            "--power-limit`."
        )
    return (
        f"{seconds(lost)} of it without a reason from the driver: `nvidia-smi --lock-gpu-clocks` holds a "
        "clock, if you have the permission; the throttle reasons over the steps show when it drops."
    )


def _utilisation(breakdown: Breakdown, step: StepBreakdown) -> str | None:
    if step.parts.get("theoretical") is None:
        return None  # the peak is unknown, so this part includes the math itself and need not be a loss
    lost_by_layer: dict[str, float] = collections.defaultdict(float)
    for op in breakdown.ops:
        lost_by_layer[figures.op_location(op)] += per_step(breakdown, op.lost.get("utilisation", 0.0))
    layer = max(lost_by_layer, key=lambda name: lost_by_layer[name], default="")
    largest = f"Most of it in {layer}, {seconds(lost_by_layer[layer])}. " if layer else ""
    microbatch_advice = (
        "half the layout.microbatches, which doubles the activations, or " if _accumulates(breakdown) else ""
    )
    return (
        f"{largest}Larger matrices use the device better; try {microbatch_advice}a larger "
        "model.loss_chunk_tokens if it is in the loss."
    )


def _instruction(breakdown: Breakdown, step: StepBreakdown) -> str | None:
    remat = breakdown.settings.get("layout.remat")
    # Nothing is recomputed then, and against padding there is no setting.
    if remat == "none":
        return None
    factor = step.chain.get("instruction")
    factor_text = "" if factor is None else f"The device computes {factor:.2f} times the model's FLOPs. "
    return (
        f"{factor_text}layout.remat={remat} recomputes the forward pass; layout.remat=named with more "
        "layout.remat_save, or layout.remat=none, recomputes less and needs more memory: `python -m "
        "jtrain.plan --search` shows what fits."
    )


def _host(breakdown: Breakdown, step: StepBreakdown) -> str:
    return "Try a larger metrics.log_every_steps, or a larger data.global_batch, which makes steps longer."


def _idle(breakdown: Breakdown, step: StepBreakdown) -> str:
    microbatch_advice = "fewer layout.microbatches or " if _accumulates(breakdown) else ""
    return (
        f"Devices idle between kernels: {microbatch_advice}a larger data.global_batch makes each kernel "
        "longer."
    )


def _accumulates(breakdown: Breakdown) -> bool:
    return breakdown.settings.get("layout.microbatches", 1) != 1


def _slow_device(breakdown: Breakdown) -> list[tuple[float, str]]:
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
        reason = (
            f"its clock is {slow.mean_mhz:,.0f} MHz against {median_mhz:,.0f}: look at its power limit and "
            "cooling"
        )
    else:
        reason = "its clock does not explain that: data.balance=True gives all ranks about the same work"
    return [(lost, f"{finding}, and all others wait for it; {reason}.")]


def _more_bytes(breakdown: Breakdown, step: StepBreakdown) -> list[tuple[float, str]]:
    advice = []
    for row in breakdown.communication:
        if row.planned_bytes and row.wire_bytes > (1 + EXCESS_BYTES) * row.planned_bytes and row.exposed_s:
            advice.append(
                (
                    # Seconds at stake: the exposed time of the bytes beyond the plan.
                    row.exposed_s * (1 - row.planned_bytes / row.wire_bytes),
                    f"{comm_name(row)} sends {size(row.wire_bytes)} where the plan has "
                    f"{size(row.planned_bytes)}, {row.wire_bytes / row.planned_bytes:.2f} times as much, and "
                    f"{seconds(row.exposed_s)} of it is exposed: the compiler uses a wider dtype or sends "
                    "arrays twice; see precision.reduce_dtype and layout.remat.",
                )
            )
    return advice
