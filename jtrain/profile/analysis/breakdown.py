"""Analysis of a trace window: trace, compiled program, clock samples and the plan's numbers -> `Breakdown`.

All input comes from the folder that `trace.Window` wrote, so the analysis can be repeated later without the
run.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jtrain.errors import UserError
from jtrain.hlo import parser
from jtrain.hlo.parser import HloProgram
from jtrain.profile.analysis import clock_loss, memory_timeline, pipeline_trace, records
from jtrain.profile.analysis.chopper import chopper_chain
from jtrain.profile.analysis.event_losses import EventLosses, comm_rows, event_losses, op_rows
from jtrain.profile.analysis.figures import PARTS
from jtrain.profile.analysis.hlo_ops import read_ops
from jtrain.profile.analysis.records import (
    Breakdown,
    CommRow,
    HloOp,
    MemoryRow,
    OpRow,
    Peaks,
    StepBreakdown,
    Trace,
)
from jtrain.profile.analysis.timeline import DeviceStep, Events, lay_out
from jtrain.profile.analysis.xplane import read
from jtrain.profile.clocks import samples
from jtrain.profile.clocks.samples import Anchor, Samples, energy_j
from jtrain.profile.trace_dir import read_facts
from jtrain.runtime.atomic_io import write_whole


def analyse(folder: Path, loaded: "Traced | None" = None) -> Breakdown:
    """Returns the breakdown of the window in `folder`.

    Args:
      loaded: what `load` returned for the folder, if it was read already.

    Raises:
      UserError: the folder, its trace, steps, facts or compiled program are missing, or the trace is
        truncated.
    """
    from jtrain.profile.analysis.advice import advise  # reads a Breakdown, so it comes after this module

    trace, ops, step = loaded or load(folder)
    facts = read_facts(folder)
    found = break_down(trace, ops, facts, aligned_samples(folder, trace))
    pipeline, unknown = pipeline_trace.find(trace, step, ops, facts["pipeline"])
    alive = memory_timeline.track(trace, step, ops)
    return dataclasses.replace(
        found, advice=advise(found), live=alive, pipeline=pipeline, notes=[*found.notes, *unknown]
    )


class Traced(NamedTuple):
    """Trace of a window, the ops of its compiled programs by the names that the trace uses, and the step's
    program.
    """

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
    programs = {file.name.removesuffix(".hlo.txt"): parser.read(file.read_text()) for file in files}
    if module not in programs:
        raise UserError(
            f"{folder} lacks {module}.hlo.txt, the compiled program that was traced. Trace again."
        )
    ops: dict[str, HloOp] = {}
    for of, program in programs.items():
        found = read_ops(program, facts["mesh"])
        ops |= found if of == module else {f"{of}/{name}": op for name, op in found.items()}
    return Traced(trace, ops, programs[module])


def aligned_samples(folder: Path, trace: Trace) -> dict[int, Samples]:
    """Reads the clock samples in a window's folder and moves their times to the trace's clock.

    Raises:
      UserError: a file of samples was cut short.
    """
    found = samples.load(folder)
    if not trace.anchors:
        return found
    first, last = (Anchor(*anchor) for anchor in trace.anchors)
    return {device: of_device.aligned(first, last) for device, of_device in found.items()}


def break_down(
    trace: Trace, ops: Mapping[str, HloOp], facts: dict[str, Any], sampled: Mapping[int, Samples]
) -> Breakdown:
    """Computes the breakdown, without advice, memory over time and instructions of a pipeline.

    Args:
      facts: as for `trace.Window`.
      sampled: clock samples by device, on the trace's clock; {} if nothing was sampled.
    """
    peaks = Peaks(**facts["peaks"])
    events, device_steps = lay_out(trace, ops)
    losses = event_losses(events, peaks, sampled)
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
        clocks=clock_loss.tracks(dict(sampled), start_ns, end_ns),
        memory=[MemoryRow(**row) for row in facts["memory"]],
        live=None,
        pipeline=None,
        coverage=_coverage(events),
        settings=facts["settings"],
        goodput=facts["goodput"],
        advice=[],
        notes=_notes(trace, events, facts, peaks, sampled),
    )


def _step(
    span: records.StepSpan,
    devices: list[DeviceStep],
    events: Events,
    losses: EventLosses,
    facts: dict[str, Any],
    peaks: Peaks,
    sampled: Mapping[int, Samples],
) -> StepBreakdown:
    here = events.step == span.step
    num = len(devices)
    duration_s = (span.end_ns - span.start_ns) * 1e-9

    def mean(name: str) -> float:
        return math.fsum(getattr(row, name) for row in devices) / num

    step_flops = float(facts["step_flops"]) if facts["step_flops"] else None
    flops = np.array([op.flops for op in events.ops], float)[events.op]
    links, seconds = chopper_chain(
        mean("compute_s"),
        overlap_s=float(losses.overlap_s[here].sum()) / num,
        clocks_s=float(losses.clocks_s[here].sum()) / num,
        model_flops=None if step_flops is None else step_flops / facts["num_devices"],
        program_flops=float(flops[here].sum()) / num,
        peak_flops=peaks.flops,
    )
    parts = seconds | {
        "exposed_communication": mean("exposed_s"),
        "data_wait": mean("data_wait_s"),
        "host": mean("host_s"),
        "idle": mean("idle_s"),
    }
    reference = clock_loss.reference_mhz(peaks, sampled)
    lost = {"power": 0.0, "thermal": 0.0, "other": 0.0}
    energies = []
    for row in devices:
        of_device = sampled.get(row.device)
        own = float(losses.clocks_s[here & (events.device == row.device)].sum()) / num
        for cause, lost_s in clock_loss.split(own, of_device, span.start_ns, span.end_ns, reference).items():
            lost[cause] += lost_s
        energies.append(None if of_device is None else energy_j(of_device, span.start_ns, span.end_ns))
    known = [energy for energy in energies if energy is not None]
    computing = here & events.computes & np.isfinite(losses.mhz)
    weight = events.own_s[computing]
    mean_mhz = float(np.average(losses.mhz[computing], weights=weight)) if weight.sum() else None
    return StepBreakdown(
        step=span.step,
        duration_s=duration_s,
        parts={part.key: parts[part.key] for part in PARTS},
        chain=links,
        clocks_lost_s=lost,
        energy_j=math.fsum(known) if len(known) == num else None,
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
    known = np.array([bool(op.layer) and op.phase != "other" for op in events.ops], bool)[events.op]
    total_s = events.own_s.sum()
    return float(events.own_s[known].sum() / total_s) if total_s else 0.0


def _notes(
    trace: Trace, events: Events, facts: dict[str, Any], peaks: Peaks, sampled: Mapping[int, Samples]
) -> list[str]:
    """Facts that are unknown, with the reason."""
    notes = []
    if peaks.flops is None:
        notes.append(
            f"The peak of {trace.device_kind} is unknown: theoretical time and instructions are part of "
            "utilisation."
        )
    unnamed = sorted(op.name for op in events.ops if not op.opcode)
    beside = {name: name.partition("/")[0] for name in unnamed if name.startswith("jit_") and "/" in name}
    coverage = _coverage(events)
    if coverage < 0.99:
        cause = (
            "the program comes from a compile cache that an older version filled, or from code without "
            "named scopes"
        )
        if beside:
            cause = f"other programs ran between the steps ({', '.join(sorted(set(beside.values())))})"
        notes.append(f"{1 - coverage:.1%} of the ops' time has no layer or phase: {cause}.")
    notes += [note for device in sorted(sampled) for note in sampled[device].notes]
    if not sampled:
        notes.append("No clocks were sampled: time lost to low clocks is part of utilisation.")
    if trace.num_devices != (own := facts["num_devices"] // facts["num_processes"]):
        notes.append(f"The trace holds {trace.num_devices} of {own} devices.")
    kernels = sorted(op.name for op in events.ops if op.opcode == "custom-call" and not op.flops)
    if kernels:
        notes.append(
            f"FLOPs of these custom calls are unknown: {', '.join(kernels[:5])} ({len(kernels)} in all)."
        )
    if unnamed := [name for name in unnamed if name not in beside]:
        notes.append(f"Ops in the trace but in no program: {', '.join(unnamed[:5])} ({len(unnamed)} in all).")
    return notes


def write_json(breakdown: Breakdown, file: Path) -> None:
    """Writes breakdown.json atomically; raises ValueError if it would hold `nan` or an infinity."""
    write_whole(file, json.dumps(breakdown.to_dict(), indent=1, allow_nan=False) + "\n")


def read_json(file: Path) -> Breakdown:
    """Reads a breakdown that `write_json` wrote.

    Raises:
      UserError: the file is missing, truncated or written by another version.
    """
    again = f"Write it again: python -m jtrain.profile.postprocess {file.parent}."
    try:
        values = json.loads(file.read_text())
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}. {again}") from error
    except ValueError as error:
        raise UserError(f"{file} is truncated or not JSON ({error}). {again}") from error
    version = values.get("version") if isinstance(values, dict) else None
    if version != 1:
        raise UserError(f"{file} has version={version}, but this jtrain reads version=1. {again}")
    rows = {"steps": StepBreakdown, "ops": OpRow, "clocks": records.ClockTrack, "memory": MemoryRow}
    try:
        for name, row in rows.items():
            values[name] = [row(**of) for of in values[name]]
        values["communication"] = [
            CommRow(**(of | {"axes": tuple(of["axes"])})) for of in values["communication"]
        ]
        if values["live"] is not None:
            values["live"] = records.LiveTrack(**values["live"])
        if (of := values["pipeline"]) is not None:
            steps = [records.PipelineShares(**step) for step in of["steps"]]
            spans = {
                name: [[tuple(span) for span in row] for row in of[name]] for name in ("measured", "planned")
            }
            values["pipeline"] = records.PipelineTrack(**{**of, **spans, "steps": steps})
        return Breakdown(**values)
    except (KeyError, TypeError) as error:
        raise UserError(f"{file} has a missing or an unknown field ({error}). {again}") from error
