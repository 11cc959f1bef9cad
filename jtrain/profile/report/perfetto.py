"""Export of a window for Perfetto (ui.perfetto.dev) and chrome://tracing: steps, phases, layers, ops, clocks.

The file has the Trace Event Format: JSON with times in microseconds, here counted from the first step's
start. Each device is a process with one thread per level. A slice of a phase or layer spans consecutive ops
of that phase or layer.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jtrain.profile.analysis.records import ClockTrack, HloOp, OpEvent, Trace

COUNTERS = {"sm_mhz": "core clock, MHz", "mem_mhz": "memory clock, MHz", "power_w": "power, W"}
COUNTERS |= {"temperature_c": "temperature, °C"}

_LEVELS = ("phase", "layer", "compute", "communication", "copy")
"""Threads of a device, top to bottom; `control` ops are left out, since they would cover the ops that they
contain."""


def perfetto(trace: Trace, ops: Mapping[str, HloOp], clocks: Sequence[ClockTrack]) -> dict[str, Any]:
    """Returns the trace in the Trace Event Format: host and steps first, then each device.

    Args:
      ops: ops by name; an event without an op counts as compute of an unknown layer.
    """
    start_ns = trace.steps[0].start_ns
    host = 0  # devices are processes 1, 2, ...
    events = [_name_event("process_name", host, 0, "host"), _name_event("thread_name", host, 0, "step")]
    events.append(_name_event("thread_name", host, 1, "host"))
    for step in trace.steps:
        args = {"step": step.step}
        events.append(_slice_event(host, 0, f"step {step.step}", step.start_ns, step.end_ns, start_ns, args))
    for span in trace.host:
        events.append(_slice_event(host, 1, span.name, span.start_ns, span.end_ns, start_ns, {}))
    by_device: dict[int, list[OpEvent]] = collections.defaultdict(list)
    for event in trace.events:
        by_device[event.device].append(event)
    for device in sorted(by_device.keys() | {track.device for track in clocks}):
        events.append(_name_event("process_name", device + 1, 0, f"device {device}: {trace.device_kind}"))
        for thread, level in enumerate(_LEVELS):
            events.append(_name_event("thread_name", device + 1, thread, level))
        events += _device(device, by_device[device], ops, start_ns)
    for track in clocks:
        events += _counters(track)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _device(
    device: int, device_events: list[OpEvent], ops: Mapping[str, HloOp], start_ns: int
) -> Iterator[dict[str, Any]]:
    drawn_events = [
        event for event in device_events if event.name not in ops or ops[event.name].kind != "control"
    ]
    # `_runs` needs order of time, and the trace has the events of a thread or stream together.
    drawn_events.sort(key=lambda event: event.start_ns)
    for event in drawn_events:
        op = ops.get(event.name)
        kind = "compute" if op is None else op.kind
        args: dict[str, Any] = {"step": event.step}
        if op is not None:
            args |= {"opcode": op.opcode, "phase": op.phase, "layer": op.layer, "scope": op.scope}
            args |= {"flops": op.flops, "bytes": op.bytes}
            if op.collective is not None:
                args |= {"axes": ", ".join(op.collective.axes), "wire_bytes": op.collective.wire_bytes}
        end_ns = event.start_ns + event.duration_ns
        yield _slice_event(
            device + 1, _LEVELS.index(kind), event.name, event.start_ns, end_ns, start_ns, args
        )
    # Collectives and copies run beside compute and would cut its phases into pieces.
    compute_events = [
        event for event in drawn_events if event.name in ops and ops[event.name].kind == "compute"
    ]
    # Thread 0 has the phases, thread 1 the layers: the order of _LEVELS.
    for thread, group_names in ((0, lambda op: (op.phase,)), (1, lambda op: (op.layer, op.phase))):
        for names, step, first_ns, end_ns in _runs(compute_events, ops, group_names):
            # The phase is the last name of both groups.
            name, args = names[0] or "unknown", {"step": step, "phase": names[-1]}
            yield _slice_event(device + 1, thread, name, first_ns, end_ns, start_ns, args)


def _runs(
    events: Iterable[OpEvent], ops: Mapping[str, HloOp], group_names: Callable[[HloOp], tuple[str, ...]]
) -> Iterator[tuple[tuple[str, ...], int, int, int]]:
    """(names, step, start, end) of each run of consecutive ops of a step with the same group names.

    Ops of one device may overlap (several streams). A run ends where the next one starts, so that slices
    never cross.
    """
    current: tuple[tuple[str, ...], int, int, int] | None = None
    for event in events:
        names, end_ns = group_names(ops[event.name]), event.start_ns + event.duration_ns
        # A step's end breaks a run: a slice over two steps could not say which one it is of.
        if current is not None and (names, event.step) == current[:2]:
            current = *current[:3], max(current[3], end_ns)
            continue
        if current is not None:
            yield *current[:3], min(current[3], event.start_ns)
        current = names, event.step, event.start_ns, end_ns
    if current is not None:
        yield current


def _counters(track: ClockTrack) -> Iterator[dict[str, Any]]:
    for field, name in COUNTERS.items():
        for time_s, value in zip(track.time_s, getattr(track, field), strict=True):
            if value is not None:
                yield _counter_event(track.device, name, time_s, value)
    for time_s, reasons in zip(track.time_s, track.reasons, strict=True):
        # The number of reasons that hold, since a counter has no text.
        num_reasons = len([reason for reason in reasons.split(",") if reason])
        yield _counter_event(track.device, "throttle reasons", time_s, num_reasons)


def _counter_event(device: int, name: str, time_s: float, value: int | float) -> dict[str, Any]:
    return {"ph": "C", "pid": device + 1, "name": name, "ts": time_s * 1e6, "args": {"value": value}}


def _slice_event(
    process: int, thread: int, name: str, first_ns: int, end_ns: int, start_ns: int, args: dict[str, Any]
) -> dict[str, Any]:
    """Complete event ("X"); subtracts the start in integers before it divides, which keeps nanoseconds."""
    event: dict[str, Any] = {"ph": "X", "pid": process, "tid": thread, "name": name, "args": args}
    return event | {"ts": (first_ns - start_ns) / 1e3, "dur": (end_ns - first_ns) / 1e3}


def _name_event(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}
