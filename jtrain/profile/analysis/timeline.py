"""Timeline of a trace as arrays: each device's compute and communication per step, and each op's share of
them.

Time in which several ops of a device run is divided among them, so the ops sum to the device's busy time.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jtrain.profile.analysis import intervals
from jtrain.profile.analysis.hlo_ops import unknown_op
from jtrain.profile.analysis.records import HloOp, HostSpan, OpEvent, StepSpan, Trace

ALONE = 0.1
"""An op counts as running alone if communication overlaps less than this share of its time."""


@dataclasses.dataclass(frozen=True)
class Events:
    """Executed ops without control ops, sorted by start. Arrays have one entry per event; `ops` has one per
    op.

    op: index into `ops`.
    computes: True for compute and copies, False for communication.
    own_s: the event's share of the time in which anything computes (or communicates) on its device.
    beside: share of the event's time that the other of the two overlaps.
    exposed_s: part of own_s that no compute hides; 0 for events that compute.
    """

    ops: tuple[HloOp, ...]
    op: np.ndarray
    step: np.ndarray
    device: np.ndarray
    start_ns: np.ndarray
    end_ns: np.ndarray
    computes: np.ndarray
    own_s: np.ndarray
    beside: np.ndarray
    exposed_s: np.ndarray


@dataclasses.dataclass(frozen=True)
class DeviceStep:
    """Seconds of one device in one step.

    compute_s, exposed_s, data_wait_s, host_s (before the first and after the last op, or while the host saves
    or evaluates) and idle_s (between ops) sum to the step.
    """

    step: int
    device: int
    compute_s: float
    communication_s: float
    exposed_s: float
    data_wait_s: float
    host_s: float
    idle_s: float


def find_op(ops: Mapping[str, HloOp], kernels: Mapping[str, str], name: str) -> HloOp:
    """The op of a name in the trace; GPU kernels are named after their fusion, with underscores."""
    return ops.get(name) or ops.get(kernels.get(name, "")) or unknown_op(name)


def kernel_names(ops: Mapping[str, HloOp]) -> dict[str, str]:
    """GPU kernel name -> op name."""
    return {name.replace(".", "_").replace("-", "_"): name for name in ops}


def lay_out(trace: Trace, ops: Mapping[str, HloOp]) -> tuple[Events, list[DeviceStep]]:
    """Computes every op's own time, and every device's time in every step."""
    events, table = _own_events(trace, ops)
    step, device, op, start, end = (table[:, column] for column in range(5))
    computes = np.array([events_op.kind != "communication" for events_op in events], bool)[op]
    own_s, beside, exposed_s = (np.zeros(len(table)) for _ in range(3))
    rows = []
    for span in trace.steps:
        waits, work = _host_sets(trace.host, span)
        for index in range(trace.num_devices):
            here = (step == span.step) & (device == index)
            sets = []
            for which in (computes, ~computes):
                these = np.flatnonzero(here & which)
                sets.append(intervals.union(start[these], end[these]))
                own_s[these] = intervals.shares(start[these], end[these])
            for which, other in ((computes, sets[1]), (~computes, sets[0])):
                these = np.flatnonzero(here & which)
                with_other = intervals.covered(start[these], end[these], other)
                beside[these] = with_other / np.maximum(end[these] - start[these], 1)
            alone = intervals.subtract(sets[1], sets[0])
            these = np.flatnonzero(here & ~computes)
            exposed_s[these] = intervals.shares(start[these], end[these], alone)
            rows.append(_device_step(span, index, sets[0], sets[1], alone, waits, work))
    return Events(tuple(events), op, step, device, start, end, computes, own_s, beside, exposed_s), rows


def _own_events(trace: Trace, ops: Mapping[str, HloOp]) -> tuple[list[HloOp], np.ndarray]:
    """Ops, and an array [E, 5] of (step, device, op, start, end); control ops are left out, ends cut at the
    step's.
    """
    kernels = kernel_names(ops)
    by_name = {name: find_op(ops, kernels, name) for name in sorted({event.name for event in trace.events})}
    own = {op.name: op for op in by_name.values() if op.kind != "control"}
    place = {name: index for index, name in enumerate(own)}
    number = {name: place[op.name] for name, op in by_name.items() if op.name in place}
    ends = {span.step: span.end_ns for span in trace.steps}

    def row(event: OpEvent) -> tuple[int, ...]:
        end = min(event.start_ns + event.duration_ns, ends[event.step])
        return event.step, event.device, number[event.name], event.start_ns, end

    rows = [row(event) for event in trace.events if event.name in number]
    table = np.array(rows, np.int64).reshape(-1, 5)
    return list(own.values()), table[np.argsort(table[:, 3], kind="stable")]


def _host_sets(host: tuple[HostSpan, ...], span: StepSpan) -> tuple[intervals.Set, intervals.Set]:
    """Times in a step at which the host waited for data, and at which it did something else that is
    annotated.
    """
    sets = []
    for waits in (True, False):
        spans = [s for s in host if (s.name == "data_wait") is waits]
        starts, ends = (
            np.array([getattr(s, name) for s in spans], np.int64) for name in ("start_ns", "end_ns")
        )
        sets.append(intervals.clip(intervals.union(starts, ends), span.start_ns, span.end_ns))
    return sets[0], sets[1]


def _device_step(
    span: StepSpan,
    device: int,
    compute: intervals.Set,
    communication: intervals.Set,
    alone: intervals.Set,
    waits: intervals.Set,
    work: intervals.Set,
) -> DeviceStep:
    busy = intervals.join(compute, communication)
    free = intervals.complement(busy, span.start_ns, span.end_ns)
    waiting = intervals.intersect(free, waits)
    rest = intervals.subtract(free, waits)
    inside = intervals.clip(rest, int(busy[0, 0]), int(busy[-1, 1])) if len(busy) else intervals.EMPTY
    idle = intervals.subtract(inside, work)
    total = [intervals.total(s) for s in (compute, communication, alone, waiting, rest, idle)]
    seconds = [nanoseconds * 1e-9 for nanoseconds in total]
    return DeviceStep(span.step, device, *seconds[:4], host_s=seconds[4] - seconds[5], idle_s=seconds[5])


def overlap_factors(events: Events, multiplier: np.ndarray) -> np.ndarray:
    """Slowdown of each computing event by concurrent communication, at least 1.

    Per op: its mean time with communication over its mean time alone, both at the reference clock. An op that
    always or never runs alone gets 1, since there is nothing to compare with; its loss counts as utilisation.
    """
    factors = np.ones(len(events.op))
    length = (events.end_ns - events.start_ns) * multiplier
    num_ops = len(events.ops)

    def mean(which: np.ndarray) -> np.ndarray:
        count = np.bincount(events.op[which], minlength=num_ops)
        return np.bincount(events.op[which], length[which], minlength=num_ops) / np.where(
            count, count, np.nan
        )

    with_other = events.computes & (events.beside >= ALONE)
    ratio = mean(with_other) / mean(events.computes & (events.beside < ALONE))
    ratio = np.where(np.isfinite(ratio), np.maximum(ratio, 1.0), 1.0)
    factors[with_other] = ratio[events.op[with_other]]
    return factors
