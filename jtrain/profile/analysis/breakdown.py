"""Analysis of a trace window: trace, compiled program, clock samples and the plan's numbers -> `Breakdown`.

All input comes from the folder that `trace.Window` wrote, so the analysis can be repeated later without the
run.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jtrain.errors import UserError
from jtrain.hlo import dependencies, parser
from jtrain.hlo.parser import HloProgram
from jtrain.hlo.source_lines import source_lines
from jtrain.profile.analysis import clock_loss, memory_timeline, pipeline_trace, records, replay
from jtrain.profile.analysis.chopper import chopper_chain
from jtrain.profile.analysis.event_losses import EventLosses, comm_rows, event_losses, op_rows
from jtrain.profile.analysis.figures import PARTS
from jtrain.profile.analysis.hlo_ops import read_ops
from jtrain.profile.analysis.lanes import lane_track
from jtrain.profile.analysis.records import (
    Breakdown,
    HloOp,
    MemoryRow,
    Peaks,
    StepBreakdown,
    Trace,
)
from jtrain.profile.analysis.timeline import DeviceStep, Events, lay_out
from jtrain.profile.analysis.xplane import read
from jtrain.profile.clocks import samples
from jtrain.profile.clocks.samples import Anchor, Samples, energy_j
from jtrain.profile.trace_dir import read_facts


def analyse(folder: Path, traced: "Traced | None" = None) -> Breakdown:
    """Returns the breakdown of the window in `folder`.

    Args:
      traced: result of `load` for the folder, if it was read already.

    Raises:
      UserError: the folder, its trace, steps, facts or compiled program are missing, or the trace is
        truncated.
    """
    from jtrain.profile.analysis.advice import advise  # reads a Breakdown, so it comes after this module

    # Callers that need trace and ops as well read them once, since a trace is slow to read.
    trace, ops, step_program = traced or load(folder)
    facts = read_facts(folder)
    breakdown = break_down(
        trace, ops, facts, aligned_samples(folder, trace), dependencies.producers(step_program)
    )
    pipeline, pipeline_notes = pipeline_trace.find(trace, step_program, ops, facts["pipeline"])
    live_track = memory_timeline.track(trace, step_program, ops)
    return dataclasses.replace(
        breakdown,
        advice=advise(breakdown),
        live=live_track,
        pipeline=pipeline,
        notes=[*breakdown.notes, *pipeline_notes],
    )


class Traced(NamedTuple):
    """Trace of a window, the ops of its programs by the names that the trace uses, and the step's program."""

    trace: Trace
    ops: dict[str, HloOp]
    step: HloProgram


def load(folder: Path) -> Traced:
    """Reads a window.

    Raises:
      UserError: as `analyse`.
    """
    facts = read_facts(folder)
    module = facts["module"]
    trace = read(folder, module=module, platform=facts["platform"], device_kind=facts["device_kind"])
    files = sorted(folder.glob("*.hlo.txt"))
    texts = {file.name.removesuffix(".hlo.txt"): file.read_text() for file in files}
    programs = {name: parser.read(text) for name, text in texts.items()}
    if module not in programs:
        raise UserError(
            f"{folder} lacks {module}.hlo.txt, the compiled program that was traced. Trace again."
        )
    ops: dict[str, HloOp] = {}
    for program_module, program in programs.items():
        module_ops = read_ops(program, facts["mesh"], source_lines(texts[program_module]))
        # Ops of other programs may have the same names; the trace calls them <module>/<op>, too.
        ops |= (
            module_ops
            if program_module == module
            else {f"{program_module}/{name}": op for name, op in module_ops.items()}
        )
    return Traced(trace, ops, programs[module])


def aligned_samples(folder: Path, trace: Trace) -> dict[int, Samples]:
    """Reads the clock samples in a window's folder and moves their times to the trace's clock.

    Raises:
      UserError: a file of samples was cut short.
    """
    samples_by_device = samples.load(folder)
    # Without anchors the sampler's own wall clock stands, which is right unless it was set.
    if not trace.anchors:
        return samples_by_device
    first, last = (Anchor(*anchor) for anchor in trace.anchors)
    return {
        device: device_samples.aligned(first, last) for device, device_samples in samples_by_device.items()
    }


def break_down(
    trace: Trace,
    ops: Mapping[str, HloOp],
    facts: dict[str, Any],
    sampled: Mapping[int, Samples],
    producers: Mapping[str, frozenset[str]],
) -> Breakdown:
    """Computes the breakdown, without advice, memory over time and instructions of a pipeline.

    Args:
      facts: as for `trace.Window`.
      sampled: clock samples by device, on the trace's clock; {} if nothing was sampled.
      producers: ops whose results each op reads (`jtrain.hlo.dependencies`).
    """
    events, device_steps = lay_out(trace, ops)
    stored_peaks = Peaks(**facts["peaks"])
    losses = event_losses(events, stored_peaks, sampled)
    peaks = _at_least_reached(stored_peaks, events, losses, device_steps)
    steps = [
        _step(
            span,
            [row for row in device_steps if row.step == span.step],
            events,
            losses,
            facts,
            peaks,
            sampled,
        )
        for span in trace.steps
    ]
    start_ns, end_ns = trace.steps[0].start_ns, trace.steps[-1].end_ns
    return Breakdown(
        platform=trace.platform,
        device_kind=trace.device_kind,
        num_devices=trace.num_devices,
        all_devices=facts["num_devices"],
        process=facts["process"],
        num_processes=facts["num_processes"],
        tokens_per_step=facts["tokens_per_step"],
        steps=steps,
        ops=op_rows(events, losses, peaks),
        communication=comm_rows(events, facts, len(trace.steps) * trace.num_devices),
        clocks=clock_loss.sample_tracks(dict(sampled), start_ns, end_ns),
        memory=[MemoryRow(**row) for row in facts["memory"]],
        # What follows from the programs' text, or from this breakdown: `analyse` fills it in.
        live=None,
        pipeline=None,
        host=_host_activities(trace),
        lanes=lane_track(trace, events),
        path=replay.critical_path(trace, events, losses, peaks, producers, facts["partitions"]),
        coverage=_coverage(events),
        peaks=peaks,
        settings=facts["settings"],
        goodput=facts["goodput"],
        advice=[],
        notes=_notes(trace, events, facts, peaks, sampled, is_raised=peaks != stored_peaks)
        + _energy_notes(steps, sampled),
    )


def _host_activities(trace: Trace) -> dict[str, float]:
    """Seconds per step of each named host activity, longest first; what lies outside of the steps is cut off."""
    first_ns, last_ns = trace.steps[0].start_ns, trace.steps[-1].end_ns
    total_ns: collections.Counter[str] = collections.Counter()
    for span in trace.host:
        total_ns[span.name] += max(0, min(span.end_ns, last_ns) - max(span.start_ns, first_ns))
    return {name: spent_ns * 1e-9 / len(trace.steps) for name, spent_ns in total_ns.most_common()}


def _at_least_reached(
    peaks: Peaks, events: Events, losses: EventLosses, device_steps: list[DeviceStep]
) -> Peaks:
    """A measured peak, raised to what the devices reached in a step: the machine was busy when it was measured."""
    if peaks.flops is None or peaks.measured is None:
        return peaks
    flops = np.array([op.flops for op in events.ops], float)[events.op]
    reached = [peaks.flops]
    for step in {row.step for row in device_steps}:
        is_in_step = events.step == step
        compute_s = math.fsum(row.compute_s for row in device_steps if row.step == step)
        # As in `chopper_chain`: without what collectives and low clocks cost.
        alone_s = compute_s - float((losses.overlap_s + losses.clocks_s)[is_in_step].sum())
        if alone_s > 0:
            reached.append(float(flops[is_in_step].sum()) / alone_s)
    return dataclasses.replace(peaks, flops=max(reached))


def _step(
    span: records.StepSpan,
    devices: list[DeviceStep],
    events: Events,
    losses: EventLosses,
    facts: dict[str, Any],
    peaks: Peaks,
    sampled: Mapping[int, Samples],
) -> StepBreakdown:
    """Breakdown of one step of the trace: seconds are means over the devices, the energy is their sum.

    Args:
      span: the step, in ns of the trace's clock.
      devices: the step's seconds on each device.
      events, losses: all events of the trace, of which this step's are taken, and their clock figures.
      facts: what the run wrote beside the trace; `step_flops` are those of all devices.
      sampled: device -> its clock samples.
    """
    is_in_step = events.step == span.step
    num_devices = len(devices)
    duration_s = (span.end_ns - span.start_ns) * 1e-9

    def mean(name: str) -> float:
        return math.fsum(getattr(row, name) for row in devices) / num_devices

    step_flops = float(facts["step_flops"]) if facts["step_flops"] else None
    # Figures of an op, spread over the events that are its executions.
    flops = np.array([op.flops for op in events.ops], float)[events.op]
    # Sums over all devices, so divided by their number: the chain is that of the mean device.
    links, seconds = chopper_chain(
        mean("compute_s"),
        overlap_s=float(losses.overlap_s[is_in_step].sum()) / num_devices,
        clocks_s=float(losses.clocks_s[is_in_step].sum()) / num_devices,
        # Of all devices of the run, where the sums beside it are of those that this trace shows.
        model_flops=None if step_flops is None else step_flops / facts["num_devices"],
        program_flops=float(flops[is_in_step].sum()) / num_devices,
        peak_flops=peaks.flops,
    )
    parts = seconds | {
        "exposed_communication": mean("exposed_s"),
        "data_wait": mean("data_wait_s"),
        "host": mean("host_s"),
        "idle": mean("idle_s"),
    }
    reference = clock_loss.reference_mhz(peaks, sampled)
    # Each device has its own limits, so causes are split per device and then summed.
    lost = {"power": 0.0, "thermal": 0.0, "other": 0.0}
    energies = []
    for row in devices:
        device_samples = sampled.get(row.device)
        device_lost_s = float(losses.clocks_s[is_in_step & (events.device == row.device)].sum()) / num_devices
        for cause, lost_s in clock_loss.split_by_cause(
            device_lost_s, device_samples, span.start_ns, span.end_ns, reference
        ).items():
            lost[cause] += lost_s
        energies.append(
            None if device_samples is None else energy_j(device_samples, span.start_ns, span.end_ns)
        )
    known_j = [energy for energy in energies if energy is not None]
    # Weighted by time: the clock at which the step's work was done, not the mean over samples.
    computing = is_in_step & events.computes & np.isfinite(losses.mhz)
    weight = events.own_s[computing]
    mean_mhz = float(np.average(losses.mhz[computing], weights=weight)) if weight.sum() else None
    return StepBreakdown(
        step=span.step,
        duration_s=duration_s,
        parts={part.key: parts[part.key] for part in PARTS},
        chain=links,
        clocks_lost_s=lost,
        # A device without energy would make the sum too small, so then it is unknown.
        energy_j=math.fsum(known_j) if len(known_j) == num_devices else None,
        mfu=clock_loss.mfu(step_flops, duration_s, facts["num_devices"], peaks, mean_mhz),
        devices=[
            {
                "device": row.device,
                "busy_s": row.compute_s + row.exposed_s,
                "communication_s": row.communication_s,
                "exposed_communication_s": row.exposed_s,
            }
            for row in devices
        ],
    )


def _coverage(events: Events) -> float:
    """Share of device time spent in ops that have a layer and a phase other than "other"."""
    # `own_s` and not durations: time of several ops at once would count several times.
    has_scope = np.array([bool(op.layer) and op.phase != "other" for op in events.ops], bool)[events.op]
    total_s = events.own_s.sum()
    return float(events.own_s[has_scope].sum() / total_s) if total_s else 0.0


def _notes(
    trace: Trace,
    events: Events,
    facts: dict[str, Any],
    peaks: Peaks,
    sampled: Mapping[int, Samples],
    *,
    is_raised: bool,
) -> list[str]:
    """Facts that are unknown, with the reason.

    Args:
      is_raised: True if a step was faster than the measured peak.
    """
    notes = []
    if is_raised:
        notes.append(
            f"A step computed faster than the peak that this machine measured on {peaks.measured}, so the "
            "machine was busy then: the peak is what the step reached. Remove the folder peaks of the user's "
            "cache, ~/.cache/jtrain, and the next trace measures again."
        )
    if peaks.flops is None:
        notes.append(
            f"The peak of {trace.device_kind} is unknown: theoretical time and instructions are part of "
            "utilisation."
        )
    unnamed = sorted(op.name for op in events.ops if not op.opcode)
    # A program that ran between the steps, such as an evaluation, is no reason to doubt the scopes.
    other_programs = {
        name: name.partition("/")[0] for name in unnamed if name.startswith("jit_") and "/" in name
    }
    if len(events.op) > replay.MAX_EXECUTIONS:
        notes.append(
            f"The critical path is unknown: {len(events.op):,} executions of ops are more than the "
            f"{replay.MAX_EXECUTIONS:,} that are replayed. Trace fewer steps: profile.steps."
        )
    coverage = _coverage(events)
    if coverage < 0.99:
        cause = (
            "the program comes from a compile cache that an older version filled, or from code without "
            "named scopes"
        )
        if other_programs:
            cause = (
                f"other programs ran between the steps ({', '.join(sorted(set(other_programs.values())))})"
            )
        notes.append(f"{1 - coverage:.1%} of the ops' time has no layer or phase: {cause}.")
    notes += [note for device in sorted(sampled) for note in sampled[device].notes]
    if not sampled:
        notes.append("No clocks were sampled: time lost to low clocks is part of utilisation.")
    if trace.num_devices != (num_local := facts["num_devices"] // facts["num_processes"]):
        notes.append(f"The trace holds {trace.num_devices} of {num_local} devices.")
    kernels = sorted(op.name for op in events.ops if op.opcode == "custom-call" and not op.flops)
    if kernels:
        notes.append(
            f"FLOPs of these custom calls are unknown: {', '.join(kernels[:5])} ({len(kernels)} in all)."
        )
    if unnamed := [name for name in unnamed if name not in other_programs]:
        notes.append(f"Ops in the trace but in no program: {', '.join(unnamed[:5])} ({len(unnamed)} in all).")
    return notes


def _energy_notes(steps: list[StepBreakdown], sampled: Mapping[int, Samples]) -> list[str]:
    """Says why a step's energy is unknown, where clocks were sampled; without samples another note says it."""
    if not sampled or all(step.energy_j is not None for step in steps):
        return []
    sources = ", ".join(sorted({device_samples.source for device_samples in sampled.values()}))
    return [f"Power and energy are unknown: the source of the clocks ({sources}) reads none on this machine."]
