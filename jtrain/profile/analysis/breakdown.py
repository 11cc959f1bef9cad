"""Analysis of a trace window: trace, compiled program, clock samples and the plan's numbers -> `Breakdown`.

All input comes from the folder that `trace.Window` wrote, so the analysis can be repeated later without the
run.
"""

import collections
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
from jtrain.profile.analysis.figures import PARTS
from jtrain.profile.analysis.hlo_ops import is_recomputed, read_ops
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
from jtrain.profile.analysis.timeline import DeviceStep, Events, lay_out, overlap_factors
from jtrain.profile.analysis.xplane import read
from jtrain.profile.clocks import samples
from jtrain.profile.clocks.samples import Anchor, Samples, energy_j
from jtrain.profile.trace_dir import read_facts
from jtrain.runtime.atomic_io import write_whole


@dataclasses.dataclass(frozen=True)
class _Clocked:
    """Clock figures per event.

    num_samples, mhz: clock samples taken during the event, and their mean (nan if unknown).
    multiplier: time that the event would have taken at the reference clock, as a share of its time.
    clocks_s, overlap_s: seconds lost to low clocks and to concurrent communication.
    """

    num_samples: np.ndarray
    mhz: np.ndarray
    multiplier: np.ndarray
    clocks_s: np.ndarray
    overlap_s: np.ndarray


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
    clocked = _clocked(events, peaks, sampled)
    steps = [
        _step(
            span,
            [row for row in device_steps if row.step == span.step],
            events,
            clocked,
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
        ops=_op_rows(events, clocked, peaks),
        communication=_comm_rows(events, facts, len(trace.steps) * trace.num_devices),
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


def _clocked(events: Events, peaks: Peaks, sampled: Mapping[int, Samples]) -> _Clocked:
    """Clock and overlap losses of each event."""
    mhz, num_samples = np.full(len(events.op), np.nan), np.zeros(len(events.op), np.int64)
    for device, of_device in sampled.items():
        here = np.flatnonzero(events.device == device)
        mhz[here] = of_device.mean_mhz(events.start_ns[here], events.end_ns[here])
        num_samples[here] = of_device.num_in(events.start_ns[here], events.end_ns[here])
    flops, size = (
        np.array([getattr(op, name) for op in events.ops], float)[events.op] for name in ("flops", "bytes")
    )
    reference = clock_loss.reference_mhz(peaks, sampled)
    sensitivity = clock_loss.sensitivity(flops, size, peaks, mhz)
    multiplier = clock_loss.multipliers(mhz, sensitivity, reference)
    factors = overlap_factors(events, multiplier)
    clocks_s = np.where(events.computes, events.own_s * (1.0 - multiplier), 0.0)
    overlap_s = np.where(events.computes, events.own_s * multiplier * (1.0 - 1.0 / factors), 0.0)
    return _Clocked(num_samples, mhz, multiplier, clocks_s, overlap_s)


def _step(
    span: records.StepSpan,
    devices: list[DeviceStep],
    events: Events,
    clocked: _Clocked,
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
        overlap_s=float(clocked.overlap_s[here].sum()) / num,
        clocks_s=float(clocked.clocks_s[here].sum()) / num,
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
        own = float(clocked.clocks_s[here & (events.device == row.device)].sum()) / num
        for cause, lost_s in clock_loss.split(own, of_device, span.start_ns, span.end_ns, reference).items():
            lost[cause] += lost_s
        energies.append(None if of_device is None else energy_j(of_device, span.start_ns, span.end_ns))
    known = [energy for energy in energies if energy is not None]
    computing = here & events.computes & np.isfinite(clocked.mhz)
    weight = events.own_s[computing]
    mean_mhz = float(np.average(clocked.mhz[computing], weights=weight)) if weight.sum() else None
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


def _op_rows(events: Events, clocked: _Clocked, peaks: Peaks) -> list[OpRow]:
    """One row per op that ran, sorted by lost seconds, largest first."""
    num = len(events.ops)

    def per_op(values: np.ndarray) -> np.ndarray:
        return np.bincount(events.op, values, minlength=num)

    count = np.bincount(events.op, minlength=num)
    total = per_op(events.own_s)
    exposed = per_op(events.exposed_s)
    clocks, overlap = per_op(clocked.clocks_s), per_op(clocked.overlap_s)
    sampled_enough = clock_loss.enough(per_op(clocked.num_samples).astype(np.int64))
    known = np.isfinite(clocked.mhz)
    clocked_s = per_op(np.where(known, events.own_s, 0.0))
    mhz = per_op(np.where(known, events.own_s * clocked.mhz, 0.0))
    at_reference = per_op(np.where(known, events.own_s * clocked.multiplier, 0.0))
    rows = []
    for index, op in enumerate(events.ops):
        if not count[index]:
            continue
        theoretical_s: float | None = None
        lost: dict[str, float] = dict.fromkeys(
            ("instruction", "utilisation", "overlap", "clocks", "exposed"), 0.0
        )
        if op.kind == "communication":
            lost["exposed"] = float(exposed[index])
        else:
            lost |= {"overlap": float(overlap[index]), "clocks": float(clocks[index])}
            needed_s = 0.0
            if peaks.flops is not None:
                needed_s = int(count[index]) * op.flops / peaks.flops
                theoretical_s = 0.0 if is_recomputed(op) else needed_s
                lost["instruction"] = needed_s - theoretical_s
            lost["utilisation"] = float(total[index]) - needed_s - lost["overlap"] - lost["clocks"]
        has_clock = op.kind != "communication" and clocked_s[index] > 0 and bool(sampled_enough[index])
        rows.append(
            OpRow(
                name=op.name,
                opcode=op.opcode,
                kind=op.kind,
                phase=op.phase,
                layer=op.layer,
                count=int(count[index]),
                total_s=float(total[index]),
                theoretical_s=theoretical_s,
                lost_s=math.fsum(lost.values()),
                lost=lost,
                mean_mhz=float(mhz[index] / clocked_s[index]) if has_clock else None,
                multiplier=float(at_reference[index] / clocked_s[index]) if has_clock else None,
            )
        )
    return sorted(rows, key=lambda row: -row.lost_s)


def _comm_rows(events: Events, facts: dict[str, Any], device_steps: int) -> list[CommRow]:
    """One row per collective kind and axes, per device and step; includes planned collectives that did not
    run.
    """
    order = list(facts["mesh"])
    planned: collections.Counter[tuple[str, tuple[str, ...]]] = collections.Counter()
    for row in facts["planned"]:
        planned[row["kind"], tuple(sorted(row["axes"], key=order.index))] += row["wire_bytes"]
    kinds = np.array([op.kind for op in events.ops])
    of_op = [
        (op.collective.kind, op.collective.axes) if op.collective is not None else (op.opcode or op.name, ())
        for op in events.ops
    ]
    found = {of_op[index] for index in np.flatnonzero(kinds == "communication")}
    rows = []
    for kind, axes in sorted(found | set(planned)):
        these = np.flatnonzero(
            np.array([of == (kind, axes) for of in of_op], bool)[events.op] & ~events.computes
        )
        ran = collections.Counter(events.op[these].tolist())
        sent = sum(ran[i] * c.wire_bytes for i in ran if (c := events.ops[i].collective) is not None)
        starts = sum(ran[i] for i in ran if not events.ops[i].opcode.endswith(("-done", "-update")))
        total_s = float(events.own_s[these].sum()) / device_steps
        wire_bytes = round(sent / device_steps)
        rows.append(
            CommRow(
                kind=kind,
                axes=axes,
                count=starts / device_steps,
                wire_bytes=wire_bytes,
                planned_bytes=planned[kind, axes] if facts["planned"] else None,
                total_s=total_s,
                exposed_s=float(events.exposed_s[these].sum()) / device_steps,
                bytes_per_s=wire_bytes / total_s if total_s and wire_bytes else None,
            )
        )
    return sorted(rows, key=lambda row: -row.exposed_s)


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
