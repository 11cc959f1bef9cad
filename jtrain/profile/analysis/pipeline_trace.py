"""Instructions of a pipelined step as they ran: begin and end of each worker's F, I, W and B.

A compiled step is one loop over ticks (`jtrain.step.pipelined`). The trace has the ops that ran and when, but
not the number of the tick; the schedule says what each tick holds. So:

| fact | source |
|---|---|
| part of the step that an op belongs to | conditional around it in the program, by its scope (`SCOPES`) |
| begin of tick t on a device | t-th execution of the ops directly in the loop, which run once per tick |
| virtual stage and microbatch | the schedule's tick t, for the worker of that device |

An instruction lasts from the first to the last op of its conditional, collectives among them. Where layers
permute they are in no conditional and compute in every tick; the ticks in which the schedule has nothing for
them count as waiting. F and B of one tick then mix, and B counts from the end of F. What was found must be
what the schedule has, tick by tick; otherwise there is a message and no picture.
"""

import collections
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jtrain.errors import UserError
from jtrain.hlo.parser import HloProgram, Instruction
from jtrain.pipeline.clocks import PipelineTimeline, Span, equal_costs, lockstep
from jtrain.pipeline.schedule import PipelineSchedule, StageOp, parse_op
from jtrain.pipeline.ticks import SCOPES, Ticks, make_ticks
from jtrain.profile.analysis import intervals
from jtrain.profile.analysis.records import HloOp, OpEvent, PipelineShares, PipelineTrack, Trace
from jtrain.profile.analysis.timeline import find_op, kernel_names

type TracedPart = Literal["forward", "backward", "weight", "ends"]
"""Instructions by their place in `TickOps`, and `ends`: embedding, loss and the embedding's gradient."""

_PARTS: tuple[TracedPart, TracedPart, TracedPart] = ("forward", "backward", "weight")

UNKNOWN = "The instructions of the pipeline are unknown: "
"""Begin of the note in a breakdown whose trace does not show the schedule."""

_TRACE_AGAIN = "Trace again: profile.steps=(20,25), or kill -USR1 of the job."


@dataclasses.dataclass(frozen=True)
class TickLoop:
    """The loop over ticks of a compiled step.

    parts: op -> part of the step; other ops of the loop (permutes, slots) have none.
    once_per_tick: ops that run once in every tick.
    layers_always_run: True if layers compute in every tick of every worker.
    """

    parts: dict[str, TracedPart]
    once_per_tick: frozenset[str]
    layers_always_run: bool


def facts_of(ticks: Ticks, costs: tuple[float, float, float], workers: Sequence[int]) -> dict[str, Any]:
    """Facts of a pipelined run that a trace lacks, as JSON.

    Args:
      costs: times of F, I and W that the packing was chosen for.
      workers: worker of each device of this process, in the order of the devices' numbers.
    """
    schedule = dataclasses.asdict(ticks.schedule)
    return {"schedule": schedule, "packing": ticks.packing, "costs": costs, "workers": list(workers)}


def find(
    trace: Trace, program: HloProgram, ops: Mapping[str, HloOp], facts: Mapping[str, Any] | None
) -> tuple[PipelineTrack | None, list[str]]:
    """`track`, or a note on why it is unknown; neither without stages."""
    if facts is None:
        return None, []
    try:
        return track(trace, program, ops, facts), []
    except UserError as error:
        return None, [f"{UNKNOWN}{error}"]


def track(
    trace: Trace, program: HloProgram, ops: Mapping[str, HloOp], facts: Mapping[str, Any]
) -> PipelineTrack:
    """Finds the instructions of the window's median step, and the shares of every step.

    Args:
      program: the compiled step.
      facts: `facts_of`.

    Raises:
      UserError: the trace does not show exactly the schedule's instructions.
    """
    ticks, workers = ticks_of_facts(facts), facts["workers"]
    if trace.num_devices != len(workers):
        raise UserError(f"the trace holds {trace.num_devices} of {len(workers)} devices. {_TRACE_AGAIN}")
    loop, kernels = tick_loop(program), kernel_names(ops)
    events_by_device: dict[tuple[int, int], list[tuple[HloOp, OpEvent]]] = collections.defaultdict(list)
    # Looked up once per name: a trace has thousands of events and few names.
    names = {name: find_op(ops, kernels, name) for name in {event.name for event in trace.events}}
    for event in trace.events:
        op = names[event.name]
        # Events outside of the loop over ticks belong to no tick.
        if op.kind != "control" and (op.name in loop.parts or op.name in loop.once_per_tick):
            events_by_device[event.step, event.device].append((op, event))
    steps: dict[int, list[_DeviceTicks]] = {}
    for span in trace.steps:
        prefix = f"step {span.step}, device"
        steps[span.step] = [
            _device_ticks(events_by_device[span.step, device], loop, ticks, worker, f"{prefix} {device}")
            for device, worker in enumerate(workers)
        ]
    duration_ns = {step: _end_ns(devices) - _begin_ns(devices) for step, devices in steps.items()}
    # The lower median, so that it is a step of the window and not a mean of two.
    median_step = sorted(duration_ns, key=lambda step: duration_ns[step])[(len(duration_ns) - 1) // 2]
    # Several devices may share a stage, as data-parallel replicas of one worker.
    local_workers = sorted(set(workers))
    schedule = ticks.schedule
    plan = lockstep(ticks, equal_costs(schedule, *facts["costs"]))
    # Layers that compute in every tick make all ticks equally long, busy or not.
    makespan = ticks.num_ticks * sum(facts["costs"]) if loop.layers_always_run else plan.makespan
    return PipelineTrack(
        schedule=schedule.name,
        stages=schedule.stages,
        microbatches=schedule.microbatches,
        chunks=schedule.chunks,
        placement=schedule.placement,
        packing=ticks.packing,
        workers=local_workers,
        step=median_step,
        measured=[_worker_row(steps[median_step], worker, workers) for worker in local_workers],
        planned=[
            [(str(op), start, end) for op, start, end in plan.workers[worker]] for worker in local_workers
        ],
        planned_bubble=1 - sum(plan.busy) / (schedule.stages * makespan),
        steps=[_shares(step, steps[step], duration_ns[step]) for step in steps],
    )


def timeline_of(rows: Sequence[Sequence[Sequence[Any]]]) -> PipelineTimeline:
    """`PipelineTrack.measured` or `.planned` as a timeline that can be drawn."""
    return PipelineTimeline(
        tuple(tuple(Span(parse_op(op), start, end) for op, start, end in row) for row in rows)
    )


def tick_loop(program: HloProgram) -> TickLoop:
    """Finds the loop over ticks of a compiled step.

    Raises:
      UserError: there is none, or several: the compiler has unrolled it.
    """
    computations, tick_bodies = program.computations, list[str]()
    pending, seen_names = [program.entry], set[str]()
    # Every computation that can run is searched, but not the inside of a loop over ticks.
    while pending:
        for instruction in computations[pending.pop()]:
            if not instruction.is_control_flow:
                continue
            body = re.search(r"\bbody=%([\w.-]+)", instruction.line)
            if body and any(_part(nested) for nested in computations[body[1]]):
                tick_bodies.append(body[1])
            else:
                new_names = [name for name in instruction.called_with_condition if name not in seen_names]
                # A computation may be called from several places; once is enough to find the loop.
                seen_names.update(new_names)
                pending += new_names
    if len(tick_bodies) != 1:
        raise UserError(
            f"the compiled step has {len(tick_bodies)} loops over ticks instead of one: the compiler changed "
            "it."
        )
    body = computations[tick_bodies[0]]
    layers_always_run = not any(
        _part(instruction) for instruction in body if instruction.opcode == "conditional"
    )
    parts: dict[str, TracedPart] = {}
    for instruction in body:
        part = _part(instruction)
        if instruction.opcode == "conditional":
            # Only the branch with work counts; the other one makes zeros, and stands first.
            _assign_part(parts, computations, computations[_branches(instruction)[-1]], part or "ends")
        elif layers_always_run and part is not None:
            _assign_part(parts, computations, [instruction], part)
    return TickLoop(parts, frozenset(instruction.name for instruction in body), layers_always_run)


def _part(instruction: Instruction) -> TracedPart | None:
    """The part whose scope an instruction was traced in."""
    scope = instruction.op_name
    # _PARTS is in the order of SCOPES.
    return next((part for part, name in zip(_PARTS, SCOPES, strict=True) if f"/{name}/" in scope), None)


def _branches(conditional: Instruction) -> list[str]:
    """Computations of a conditional, the one for true last."""
    true = re.search(r"\btrue_computation=%([\w.-]+)", conditional.line)
    return [true[1]] if true else conditional.called


def _assign_part(
    parts: dict[str, TracedPart],
    computations: Mapping[str, list[Instruction]],
    instructions: list[Instruction],
    part: TracedPart,
) -> None:
    """Gives instructions, and all that the computations which they run hold, to a part."""
    for instruction in instructions:
        parts[instruction.name] = part
        if instruction.is_control_flow:
            for name in instruction.called_with_condition:
                _assign_part(parts, computations, computations[name], part)


@dataclasses.dataclass(frozen=True)
class _DeviceTicks:
    """One device in one step, in nanoseconds since the epoch.

    instructions: (begin, end) of every instruction of its worker.
    ends: times at which it computes embedding and loss.
    """

    begin_ns: int
    end_ns: int
    instructions: dict[StageOp, tuple[int, int]]
    ends: intervals.Set


def _device_ticks(
    events: Sequence[tuple[HloOp, OpEvent]], loop: TickLoop, ticks: Ticks, worker: int, location: str
) -> _DeviceTicks:
    begins = _tick_begins(events, loop, ticks.num_ticks, location)
    traced_times: dict[tuple[int, TracedPart], tuple[int, int]] = {}
    ends: list[tuple[int, int]] = []
    for op, event in events:
        part, start, end = loop.parts.get(op.name), event.start_ns, event.start_ns + event.duration_ns
        if part == "ends" and op.kind != "communication":
            ends.append((start, end))
        elif part is not None and part != "ends":
            # The last tick that began at or before the op.
            tick = int(np.searchsorted(begins, start, side="right")) - 1
            # An instruction lasts from the first to the last of its ops, hence minimum and maximum.
            earlier = traced_times.get((tick, part), (start, end))
            traced_times[tick, part] = min(earlier[0], start), max(earlier[1], end)
    scheduled_ops: dict[tuple[int, TracedPart], StageOp] = {
        (tick, part): op
        for tick, row in enumerate(ticks.ops)
        for part, op in zip(_PARTS, row[worker], strict=True)
        if op is not None
    }
    # Checked before any figure is made: a picture with a missing instruction would show a wrong bubble.
    if missing := sorted(scheduled_ops.keys() - traced_times.keys()):
        tick, part = missing[0]
        raise UserError(
            f"{location}: of {len(scheduled_ops)} instructions {len(missing)} are not in the trace, first "
            f"{scheduled_ops[tick, part]} in tick {tick}. {_TRACE_AGAIN}"
        )
    # Where layers run in every tick the trace has more than the schedule, by design.
    if not loop.layers_always_run and (extra := sorted(traced_times.keys() - scheduled_ops.keys())):
        raise UserError(
            f"{location}: in tick {extra[0][0]} the trace has a {extra[0][1]} pass, and worker {worker} has "
            "none in "
            f"the schedule. {_TRACE_AGAIN}"
        )
    # In order of ticks, and within a tick F, B, W: `_without_overlap` relies on it.
    instructions = {op: traced_times[tick_and_part] for tick_and_part, op in scheduled_ops.items()}
    # reshape, because an empty list would have one dimension.
    edges = np.array(ends, np.int64).reshape(-1, 2)
    return _DeviceTicks(
        int(begins[0]),
        max(event.start_ns + event.duration_ns for _, event in events),
        _without_overlap(instructions) if loop.layers_always_run else instructions,
        intervals.union(edges[:, 0], edges[:, 1]),
    )


def _without_overlap(instructions: Mapping[StageOp, tuple[int, int]]) -> dict[StageOp, tuple[int, int]]:
    """Instructions whose begin waits for the end of the one before; given in order of ticks, F, B, W."""
    times: dict[StageOp, tuple[int, int]] = {}
    busy_until_ns = 0
    for op, (start, end) in instructions.items():
        start, busy_until_ns = max(start, busy_until_ns), max(end, busy_until_ns)
        times[op] = start, busy_until_ns
    return times


def _tick_begins(
    events: Sequence[tuple[HloOp, OpEvent]], loop: TickLoop, num_ticks: int, location: str
) -> np.ndarray:
    """Begin of every tick: the first op that runs once in it, without collectives, which may run on."""
    starts: dict[str, list[int]] = collections.defaultdict(list)
    for op, event in events:
        if op.name in loop.once_per_tick and op.kind != "communication":
            starts[op.name].append(event.start_ns)
    if not starts:
        raise UserError(f"{location}: the trace has no op of the loop over ticks. {_TRACE_AGAIN}")
    for name, times in starts.items():
        if len(times) % num_ticks:
            raise UserError(
                f"{location}: {name} ran {len(times)} times in {num_ticks} ticks: the trace is cut. "
                f"{_TRACE_AGAIN}"
            )
    # An op may be several kernels, as many in each tick.
    table = np.array([sorted(times)[:: len(times) // num_ticks] for times in starts.values()], np.int64)
    # Row: op; column: tick.
    begins, last = table.min(axis=0), table.max(axis=0)
    # If an op of one tick starts after one of the next, begins do not say which tick an op is of.
    if (last[:-1] >= begins[1:]).any():
        raise UserError(f"{location}: ticks of the trace overlap, so an op's tick is unknown.")
    return begins


def _begin_ns(devices: Sequence[_DeviceTicks]) -> int:
    return min(device.begin_ns for device in devices)


def _end_ns(devices: Sequence[_DeviceTicks]) -> int:
    return max(device.end_ns for device in devices)


def _worker_row(
    devices: Sequence[_DeviceTicks], worker: int, workers: Sequence[int]
) -> list[tuple[str, float, float]]:
    """A worker's instructions in order, in seconds from the step's first tick; means over its devices."""
    device_instructions = [
        device.instructions
        for device, device_worker in zip(devices, workers, strict=True)
        if device_worker == worker
    ]
    begin_ns = _begin_ns(devices)

    def mean_s(op: StageOp, edge: int) -> float:
        return float(np.mean([device[op][edge] - begin_ns for device in device_instructions])) * 1e-9

    rows = [(str(op), mean_s(op, 0), mean_s(op, 1)) for op in device_instructions[0]]
    return sorted(rows, key=lambda row: row[1])


def _shares(step: int, devices: Sequence[_DeviceTicks], duration_ns: int) -> PipelineShares:
    """Shares of the devices' time between the first tick's begin and the last one's end."""
    all_ns = duration_ns * len(devices)
    busy = [np.array(sorted(device.instructions.values()), np.int64) for device in devices]
    computing = sum(intervals.total(times) for times in busy)
    # The compiler may interleave embedding and loss with instructions; that time counts once.
    ends = sum(
        intervals.total(intervals.subtract(device.ends, intervals.union(times[:, 0], times[:, 1])))
        for device, times in zip(devices, busy, strict=True)
    )
    return PipelineShares(
        step=step,
        duration_s=duration_ns * 1e-9,
        instructions=computing / all_ns,
        ends=ends / all_ns,
        bubble=1 - (computing + ends) / all_ns,
    )


def ticks_of_facts(facts: Mapping[str, Any]) -> Ticks:
    """The ticks of a run from `facts_of`, also after they were JSON."""
    schedule_facts = facts["schedule"]
    # JSON made lists of the tuples that StageOp and the schedule have.
    streams = tuple(tuple(StageOp(*op) for op in stream) for stream in schedule_facts["streams"])
    return make_ticks(PipelineSchedule(**{**schedule_facts, "streams": streams}), facts["packing"])
