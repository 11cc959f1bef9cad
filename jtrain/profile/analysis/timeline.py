"""Timeline of a trace as arrays: compute and communication per device and step, and each op's share.

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
    """Executed ops without control ops, sorted by start: one array entry per event, `ops` one per op.

    op: index into `ops`.
    computes: True for compute and copies, False for communication.
    own_s: the event's share of the time in which anything computes (or communicates) on its device.
    overlap_share: share of the event's time that the other of the two overlaps.
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
    overlap_share: np.ndarray
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


def median_step(trace: Trace) -> StepSpan:
    """The step of median duration: an outlier may wait for data or for a save."""
    return sorted(trace.steps, key=lambda step: step.end_ns - step.start_ns)[len(trace.steps) // 2]


def lay_out(trace: Trace, ops: Mapping[str, HloOp]) -> tuple[Events, list[DeviceStep]]:
    """Computes every op's own time, and every device's time in every step."""
    events, table = _event_table(trace, ops)
    # Columns as `_event_table` makes them.
    step, device, op, start, end = (table[:, column] for column in range(5))
    computes = np.array([events_op.kind != "communication" for events_op in events], bool)[op]
    # Filled step by step below: each event is in exactly one step and device.
    own_s, overlap_share, exposed_s = (np.zeros(len(table)) for _ in range(3))
    rows = []
    for span in trace.steps:
        data_waits, host_work = host_sets(trace.host, span)
        for index in range(trace.num_devices):
            is_device_step = (step == span.step) & (device == index)
            sets = []
            # Compute and communication are divided apart: at one moment a device may be busy with both.
            for is_kind in (computes, ~computes):
                rows_of_kind = np.flatnonzero(is_device_step & is_kind)
                sets.append(intervals.union(start[rows_of_kind], end[rows_of_kind]))
                own_s[rows_of_kind] = intervals.shares(start[rows_of_kind], end[rows_of_kind])
            # Needs both sets, so it is a second loop.
            for is_kind, other_set in ((computes, sets[1]), (~computes, sets[0])):
                rows_of_kind = np.flatnonzero(is_device_step & is_kind)
                overlapped_ns = intervals.covered(start[rows_of_kind], end[rows_of_kind], other_set)
                overlap_share[rows_of_kind] = overlapped_ns / np.maximum(
                    end[rows_of_kind] - start[rows_of_kind], 1
                )
            exposed = intervals.subtract(sets[1], sets[0])
            # Only communication can be exposed: its share of the time in which nothing computes.
            rows_of_kind = np.flatnonzero(is_device_step & ~computes)
            exposed_s[rows_of_kind] = intervals.shares(start[rows_of_kind], end[rows_of_kind], exposed)
            rows.append(_device_step(span, index, sets[0], sets[1], exposed, data_waits, host_work))
    return Events(
        tuple(events), op, step, device, start, end, computes, own_s, overlap_share, exposed_s
    ), rows


def _event_table(trace: Trace, ops: Mapping[str, HloOp]) -> tuple[list[HloOp], np.ndarray]:
    """Ops but control ops, and an array [E, 5] of (step, device, op, start, end), cut at the step's end."""
    # Several names in a trace may be one op: an HLO name, and a GPU kernel's with underscores.
    kernels = kernel_names(ops)
    by_name = {name: find_op(ops, kernels, name) for name in sorted({event.name for event in trace.events})}
    traced_ops = {op.name: op for op in by_name.values() if op.kind != "control"}
    op_index = {name: index for index, name in enumerate(traced_ops)}
    number = {name: op_index[op.name] for name, op in by_name.items() if op.name in op_index}
    ends = {span.step: span.end_ns for span in trace.steps}

    def row(event: OpEvent) -> tuple[int, ...]:
        # An asynchronous op may end in the next step; a step's ops must not sum to more than the step.
        end = min(event.start_ns + event.duration_ns, ends[event.step])
        return event.step, event.device, number[event.name], event.start_ns, end

    rows = [row(event) for event in trace.events if event.name in number]
    table = np.array(rows, np.int64).reshape(-1, 5)
    return list(traced_ops.values()), table[np.argsort(table[:, 3], kind="stable")]


def host_sets(host: tuple[HostSpan, ...], span: StepSpan) -> tuple[intervals.Set, intervals.Set]:
    """Times in a step at which the host waited for data, and at which it did other annotated work."""
    sets = []
    for is_data_wait in (True, False):
        spans = [host_span for host_span in host if (host_span.name == "data_wait") is is_data_wait]
        # Spans of several threads may overlap; union merges them.
        starts, ends = (
            np.array([getattr(host_span, name) for host_span in spans], np.int64)
            for name in ("start_ns", "end_ns")
        )
        sets.append(intervals.clip(intervals.union(starts, ends), span.start_ns, span.end_ns))
    return sets[0], sets[1]


def _device_step(
    span: StepSpan,
    device: int,
    compute: intervals.Set,
    communication: intervals.Set,
    exposed: intervals.Set,
    data_waits: intervals.Set,
    host_work: intervals.Set,
) -> DeviceStep:
    # Busy first, then waiting for data, then the host, then idle: each moment counts once.
    busy = intervals.join(compute, communication)
    free = intervals.complement(busy, span.start_ns, span.end_ns)
    data_wait = intervals.intersect(free, data_waits)
    remaining = intervals.subtract(free, data_waits)
    # Before the first and after the last op the device waits for the host; in between it is idle.
    inside = intervals.clip(remaining, int(busy[0, 0]), int(busy[-1, 1])) if len(busy) else intervals.EMPTY
    idle = intervals.subtract(inside, host_work)
    total = [
        intervals.total(times) for times in (compute, communication, exposed, data_wait, remaining, idle)
    ]
    seconds = [nanoseconds * 1e-9 for nanoseconds in total]
    return DeviceStep(span.step, device, *seconds[:4], host_s=seconds[4] - seconds[5], idle_s=seconds[5])


def overlap_factors(events: Events, multiplier: np.ndarray) -> np.ndarray:
    """Slowdown of each computing event by concurrent communication, at least 1.

    Per op: its mean time with communication over its mean time alone, both at the reference clock. An op that
    always or never runs alone gets 1, since there is nothing to compare with; its loss counts as utilisation.
    """
    factors = np.ones(len(events.op))
    # At the reference clock, since a low clock may coincide with communication.
    length = (events.end_ns - events.start_ns) * multiplier
    num_ops = len(events.ops)

    def mean(is_counted: np.ndarray) -> np.ndarray:
        count = np.bincount(events.op[is_counted], minlength=num_ops)
        return np.bincount(events.op[is_counted], length[is_counted], minlength=num_ops) / np.where(
            count, count, np.nan
        )

    with_other = events.computes & (events.overlap_share >= ALONE)
    # A mean over no event is nan, and that of ops too short for the trace's clock 0; a ratio below 1 is noise.
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = mean(with_other) / mean(events.computes & (events.overlap_share < ALONE))
    ratio = np.where(np.isfinite(ratio), np.maximum(ratio, 1.0), 1.0)
    factors[with_other] = ratio[events.op[with_other]]
    return factors
