"""Critical path of a step, and what the step would take without each cause of lost time.

The executions of ops in one step are a graph. An execution begins after those before it on its device, except
after an asynchronous collective whose result it does not read; an asynchronous collective begins after the
computing that was issued before it. A collective ends on no device before it has begun on all devices of its
group. What is left between the last predecessor and an execution's begin is a wait: for data, for the host,
or for a reason that the trace does not record.

Replayed with the measured times, each execution begins and ends when it did, to the nanosecond. Replayed with
some of them shorter, the step is as long as the chain that is longest then: a collective that lasts 3 ms beside
2 ms of computing saves 1 ms where it takes no time, not 3.

    computing      |aaaa|bbbb|      |cccc|      a 4, b 4, then 3 of waiting for g, c 4: 15 ms
    communication       |ggggggg|               without g's transfer: 12 ms; the path is a, g, c

Method: as simulators that replay a trace's graph (Daydream, USENIX ATC 2020).
"""

import bisect
import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from jtrain.profile.analysis import intervals
from jtrain.profile.analysis.event_losses import EventLosses
from jtrain.profile.analysis.figures import comm_name, op_location
from jtrain.profile.analysis.hlo_ops import is_recomputed
from jtrain.profile.analysis.records import HloOp, Peaks, StepSpan, Trace
from jtrain.profile.analysis.step_tracks import CriticalPath, PathRow, WhatIf
from jtrain.profile.analysis.timeline import Events, host_sets

WAITS = ("data wait", "host", "idle between ops")
"""Causes of waits: the columns of `StepGraph.wait_ns`."""

MAX_EXECUTIONS = 1_000_000
"""Executions of a window beyond which it is not replayed, which takes 25 µs of each: half a minute."""

type _RowKind = Literal["computing", "communication", "wait"]

_LEAST_GAIN = 0.0005  # of the step: smaller gains are noise of the trace's clock


@dataclasses.dataclass(frozen=True)
class StepGraph:
    """Executions of ops in one step, in order of their begin: one entry per execution, `event` its `Events` index.

    predecessors: executions that end before it begins; all are earlier entries.
    wait_ns: [executions + 1, causes] from its last predecessor's end, else the step's begin, to its begin;
      the last row is from the last end to the step's end.
    busy_ns: from its begin to its end; of a collective that meets others, from the last begin in its group.
    meeting: number of the group with which it waits for the last begin; -1 if it waits for none.
    """

    step: StepSpan
    event: np.ndarray
    predecessors: list[list[int]]
    wait_ns: np.ndarray
    busy_ns: np.ndarray
    meeting: list[int]


def critical_path(
    trace: Trace,
    events: Events,
    losses: EventLosses,
    peaks: Peaks,
    producers: Mapping[str, frozenset[str]],
    partitions: Sequence[int],
) -> CriticalPath | None:
    """The critical path of the mean step, and its length without each cause; None if no op ran.

    Every step is replayed: one that waits for data is seldom the median one.

    Args:
      producers: ops whose results each op reads (`jtrain.hlo.dependencies`); {} if no program is known.
      partitions: position in the mesh of each device of the trace.
    """
    steps = [step for step in trace.steps if (events.step == step.step).any()]
    if not steps or len(events.op) > MAX_EXECUTIONS:
        return None
    path_s: dict[tuple[str, _RowKind], float] = collections.defaultdict(float)
    gained_s: dict[str, float] = collections.defaultdict(float)
    for step in steps:
        graph = step_graph(trace, events, step, producers, partitions)
        for key, spent_s in _path_seconds(graph, events).items():
            path_s[key] += spent_s
        for cause, busy_ns, wait_ns, meets in _scenarios(graph, events, losses, peaks):
            length_ns, _, _ = replay(graph, busy_ns, wait_ns, meets=meets)
            gained_s[cause] += (step.end_ns - step.start_ns - length_ns) * 1e-9
    num_steps = len(steps)
    duration_s = math.fsum((step.end_ns - step.start_ns) * 1e-9 for step in steps) / num_steps
    return CriticalPath(
        num_steps=num_steps,
        duration_s=duration_s,
        rows=[
            PathRow(name, kind, total_s / num_steps)
            for (name, kind), total_s in sorted(path_s.items(), key=lambda item: -item[1])
            if total_s > 0
        ],
        causes=[
            WhatIf(cause, duration_s - total_s / num_steps)
            for cause, total_s in sorted(gained_s.items(), key=lambda item: -item[1])
            if total_s / num_steps > _LEAST_GAIN * duration_s
        ],
    )


def step_graph(
    trace: Trace,
    events: Events,
    step: StepSpan,
    producers: Mapping[str, frozenset[str]],
    partitions: Sequence[int],
) -> StepGraph:
    """Graph of one step; arguments as of `critical_path`."""
    event = np.flatnonzero(events.step == step.step)
    start_ns, end_ns = (values[event] - step.start_ns for values in (events.start_ns, events.end_ns))
    ops = [events.ops[index] for index in events.op[event].tolist()]
    devices = events.device[event].tolist()
    predecessors = _predecessors(ops, devices, start_ns.tolist(), end_ns.tolist(), producers)
    meeting, last_begin_ns = _meetings(ops, devices, start_ns, end_ns, partitions)
    # The step's begin, where nothing runs before.
    free_ns = np.array([max((end_ns[i] for i in indices), default=0) for indices in predecessors], np.int64)
    length_ns = step.end_ns - step.start_ns
    last_end_ns = int(end_ns.max())
    is_first = [not indices for indices in predecessors]
    wait_ns = _waits(
        trace,
        step,
        np.append(free_ns, last_end_ns),
        np.append(start_ns, length_ns),
        np.array([*is_first, True]),
    )
    return StepGraph(step, event, predecessors, wait_ns, end_ns - last_begin_ns, meeting)


def replay(
    graph: StepGraph, busy_ns: np.ndarray, wait_ns: np.ndarray, *, meets: bool = True
) -> tuple[int, list[int], list[int]]:
    """Length of the step with other times, and each execution's begin and end, in nanoseconds.

    Args:
      busy_ns, wait_ns: in the shape of the graph's.
      meets: False if no device waits for another's begin.
    """
    waits, busy = (
        np.rint(wait_ns.sum(axis=1)).astype(np.int64).tolist(),
        np.rint(busy_ns).astype(int).tolist(),
    )
    begins, ends = [0] * len(busy), [0] * len(busy)
    members = _members(graph.meeting)
    num_begun = dict.fromkeys(members, 0)
    for index, indices in enumerate(graph.predecessors):
        begins[index] = max((ends[i] for i in indices), default=0) + waits[index]
        group = graph.meeting[index]
        if not meets or group < 0:
            ends[index] = begins[index] + busy[index]
            continue
        num_begun[group] += 1
        # All have begun: what follows any of them stands later in the order.
        if num_begun[group] == len(members[group]):
            last_begin = max(begins[i] for i in members[group])
            for i in members[group]:
                ends[i] = last_begin + busy[i]
    return max(ends) + waits[-1], begins, ends


def _predecessors(
    ops: Sequence[HloOp],
    devices: Sequence[int],
    starts: Sequence[int],
    ends: Sequence[int],
    producers: Mapping[str, frozenset[str]],
) -> list[list[int]]:
    # Of each device: (end, execution) of all that block it, of its collectives, and of each op's executions.
    blocking: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
    in_flight: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
    by_op: dict[tuple[int, str], list[tuple[int, int]]] = collections.defaultdict(list)

    def last_ended(executions: list[tuple[int, int]], begin: int) -> list[int]:
        # (begin, inf): an execution that ends at this very moment counts.
        position = bisect.bisect_right(executions, (begin, float("inf")))
        return [executions[position - 1][1]] if position else []

    predecessors = []
    for index, (op, device, begin, end) in enumerate(zip(ops, devices, starts, ends, strict=True)):
        before = last_ended(blocking[device], begin)
        if op.is_async:
            before += last_ended(in_flight[device], begin)
        for producer in producers.get(op.name, ()):
            before += last_ended(by_op[device, producer], begin)
        predecessors.append(sorted(set(before)))
        bisect.insort((in_flight if op.is_async else blocking)[device], (end, index))
        bisect.insort(by_op[device, op.name], (end, index))
    return predecessors


def _meetings(
    ops: Sequence[HloOp],
    devices: Sequence[int],
    start_ns: np.ndarray,
    end_ns: np.ndarray,
    partitions: Sequence[int],
) -> tuple[list[int], np.ndarray]:
    """The meeting of each execution, and the last begin in it: its own begin if it meets none."""
    by_meeting: dict[tuple[str, int, tuple[int, ...]], list[int]] = collections.defaultdict(list)
    num_runs: collections.Counter[tuple[int, str]] = collections.Counter()
    for index, (op, device) in enumerate(zip(ops, devices, strict=True)):
        # A permute's sender and receiver wait in a chain, not in a group.
        if op.collective is None or op.collective.kind == "collective-permute" or "-done" in op.opcode:
            continue
        run = num_runs[device, op.name]
        num_runs[device, op.name] += 1
        group = next((g for g in op.collective.groups if partitions[device] in g), ())
        if len(group) > 1:
            by_meeting[op.name, run, group].append(index)
    meeting, last_begin_ns = [-1] * len(ops), start_ns.copy()
    for number, indices in enumerate(by_meeting.values()):
        last = start_ns[indices].max()
        # Clocks of devices may differ by more than a transfer takes: such executions did not wait.
        if len(indices) > 1 and (end_ns[indices] > last).all():
            last_begin_ns[indices] = last
            for index in indices:
                meeting[index] = number
    return meeting, last_begin_ns


def _waits(
    trace: Trace, step: StepSpan, free_ns: np.ndarray, start_ns: np.ndarray, is_at_end: np.ndarray
) -> np.ndarray:
    """[executions, causes] of the times from `free_ns` to `start_ns`.

    Args:
      is_at_end: True where nothing ran before, or runs after: then a device waits for the host.
    """
    data_waits, host_work = host_sets(trace.host, step)
    begin_ns, end_ns = free_ns + step.start_ns, start_ns + step.start_ns
    data_ns = intervals.covered(begin_ns, end_ns, data_waits)
    host_ns = intervals.covered(begin_ns, end_ns, intervals.subtract(host_work, data_waits))
    other_ns = start_ns - free_ns - data_ns - host_ns
    return np.stack(
        [data_ns, host_ns + np.where(is_at_end, other_ns, 0), np.where(is_at_end, 0, other_ns)], axis=1
    ).astype(float)


def _scenarios(
    graph: StepGraph, events: Events, losses: EventLosses, peaks: Peaks
) -> Iterator[tuple[str, np.ndarray, np.ndarray, bool]]:
    """(cause, busy_ns, wait_ns, meets) of the step without each cause."""
    busy_ns, wait_ns = graph.busy_ns.astype(float), graph.wait_ns
    ops = [events.ops[index] for index in events.op[graph.event].tolist()]
    for column, cause in enumerate(WAITS):
        without = wait_ns.copy()
        without[:, column] = 0.0
        yield cause, busy_ns, without, True
    names = np.array([_transfer_name(op) if op.kind == "communication" else "" for op in ops])
    for name in sorted(set(names.tolist()) - {""}):
        yield f"transfers of {name}", np.where(names == name, 0.0, busy_ns), wait_ns, True
    yield "all communication", np.where(names != "", 0.0, busy_ns), wait_ns, False
    yield "devices that begin a collective late", busy_ns, wait_ns, False
    computes = events.computes[graph.event]
    yield "low clocks", np.where(computes, busy_ns * losses.multiplier[graph.event], busy_ns), wait_ns, True
    own_s = np.maximum(events.own_s[graph.event], 1e-12)
    beside = np.where(computes, losses.overlap_s[graph.event] / own_s, 0.0)
    yield "slowdown beside collectives", busy_ns * (1.0 - beside), wait_ns, True
    again = np.array([is_recomputed(op) for op in ops])
    yield "recomputation", np.where(again, 0.0, busy_ns), wait_ns, True
    if peaks.flops is not None:
        least_ns = np.array([_roofline_s(op, peaks) for op in ops]) * 1e9
        yield (
            "ops below the roofline",
            np.where(computes, np.minimum(busy_ns, least_ns), busy_ns),
            wait_ns,
            True,
        )


def _roofline_s(op: HloOp, peaks: Peaks) -> float:
    """Seconds of one execution at the peak of arithmetic or of memory, whichever takes longer; inf if unknown."""
    assert peaks.flops is not None
    # A kernel whose FLOPs nobody counted would take no time at the peak.
    if not op.flops and (op.opcode == "custom-call" or not op.bytes):
        return math.inf
    memory_s = op.bytes / peaks.hbm_bytes_per_s if peaks.hbm_bytes_per_s else 0.0
    return max(op.flops / peaks.flops, memory_s)


def _transfer_name(op: HloOp) -> str:
    """`all-gather over data`; the op's own name if it is in no program."""
    return (op.opcode or op.name) if op.collective is None else comm_name(op.collective)


def _path_seconds(graph: StepGraph, events: Events) -> dict[tuple[str, _RowKind], float]:
    """Walks from the step's end back to its begin, each time to what was waited for longest."""
    length_ns, begins, ends = replay(graph, graph.busy_ns.astype(float), graph.wait_ns)
    seconds: dict[tuple[str, _RowKind], float] = collections.defaultdict(float)

    def add_waits(row: int) -> None:
        for cause, wait_ns in zip(WAITS, graph.wait_ns[row].tolist(), strict=True):
            seconds[cause, "wait"] += wait_ns * 1e-9

    members = _members(graph.meeting)
    add_waits(-1)
    index: int | None = max(range(len(ends)), key=lambda i: ends[i])
    assert ends[index] + round(graph.wait_ns[-1].sum()) == length_ns
    while index is not None:
        op = events.ops[int(events.op[graph.event[index]])]
        is_communication = op.kind == "communication"
        name = _transfer_name(op) if is_communication else op_location(op)
        seconds[name, "communication" if is_communication else "computing"] += (
            float(graph.busy_ns[index]) * 1e-9
        )
        if graph.meeting[index] >= 0:
            # The transfer began when the last device had come: its path goes on there.
            index = max(members[graph.meeting[index]], key=lambda i: begins[i])
        add_waits(index)
        index = max(graph.predecessors[index], key=lambda i: ends[i], default=None)
    return seconds


def _members(meeting: Sequence[int]) -> dict[int, list[int]]:
    members: dict[int, list[int]] = collections.defaultdict(list)
    for index, number in enumerate(meeting):
        if number >= 0:
            members[number].append(index)
    return members
