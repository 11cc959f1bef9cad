"""Reader of `jax.profiler` traces (`*.xplane.pb`): steps, ops that each device ran, host activity.

| platform | plane | lines | identification of an event |
|---|---|---|---|
| CPU | `/host:CPU` | one per thread | `hlo_op`, `hlo_module`, `device_ordinal` |
| GPU | `/device:GPU:k` | `Stream #...` | `hlo_op`, `hlo_module`; else the kernel's name |
| TPU | `/device:TPU:k` | `XLA Ops`, `Async XLA Ops`, `XLA Modules` | name, `%fusion.3 = ...` or `fusion.3` |

Times in a file count from `profile_start_time` of its plane `Task Environment`, in nanoseconds since the
epoch. This aligns clock samples with ops (measured error below 50 us).
"""

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jtrain.errors import UserError
from jtrain.profile.analysis.records import HostSpan, OpEvent, StepSpan, Trace
from jtrain.profile.trace_dir import other_parts

HOST_SPAN = "jtrain:"
"""Prefix of the names of annotations that mark host activity."""


class _Event(NamedTuple):
    device: int
    name: str
    start_ns: int
    duration_ns: int


def trace_files(folder: Path) -> list[Path]:
    """Trace files below a folder, without those in the subfolders of other processes."""
    other_folders = set(other_parts(folder).values())
    return sorted(file for file in folder.rglob("*.xplane.pb") if not other_folders & set(file.parents))


def read(folder: Path, *, module: str, platform: str, device_kind: str) -> Trace:
    """Reads the trace in a folder: one file per process, with devices numbered consecutively over the files.

    A step lasts from the end of the previous step to the end of its own annotation, the first one from the
    start of its annotation. So host activity between two steps is part of a step. Ops outside of all steps
    are dropped.

    Args:
      folder: folder of one window; searched recursively.
      module: name of the step's HLO module; ops of other modules are named `<their module>/<op>`.
      platform, device_kind: as JAX reports them.

    Raises:
      UserError: the folder or a trace in it is missing, or the trace is truncated or has no steps.
    """
    if not folder.is_dir():
        raise UserError(
            f"{folder} is not a folder. Give the folder of a trace window: <workdir>/profile/<step>."
        )
    files = trace_files(folder)
    if not files:
        raise UserError(
            f"{folder} holds no trace (*.xplane.pb). Run with --with profile, or give another folder."
        )
    parts = [_read_file(file, module) for file in files]
    # Processes run the same steps, so the first file's marks serve for all files.
    steps, _, host, anchors = parts[0]
    offset, events = 0, []
    for _, file_events, *_ in parts:
        devices = sorted({event.device for event in file_events})
        device_numbers = {device: offset + index for index, device in enumerate(devices)}
        offset += len(devices)
        events += _in_steps(file_events, device_numbers, steps)
    return Trace(platform, device_kind, offset, steps, tuple(events), host, anchors)


def _in_steps(
    events: list[_Event], device_numbers: dict[int, int], steps: tuple[StepSpan, ...]
) -> Iterator[OpEvent]:
    # Steps follow each other without gaps, so the last step that began before an op is the op's.
    starts = np.array([step.start_ns for step in steps], np.int64)
    step_indices = (
        np.searchsorted(starts, np.array([event.start_ns for event in events], np.int64), side="right") - 1
    )
    for event, index in zip(events, step_indices.tolist(), strict=True):
        if index >= 0 and event.start_ns < steps[index].end_ns:
            device, name, start_ns, duration_ns = event
            yield OpEvent(device_numbers[device], steps[index].step, name, start_ns, duration_ns)


type _Anchors = tuple[tuple[int, int], ...]


def _read_file(
    file: Path, module: str
) -> tuple[tuple[StepSpan, ...], list[_Event], tuple[HostSpan, ...], _Anchors]:
    from jax.profiler import ProfileData

    cut_message = (
        f"{file} is truncated or not a trace: a run killed inside a window leaves such a file. Trace again."
    )
    try:
        profile = ProfileData.from_file(str(file))  # must outlive its planes, which only point into it
        planes = list(profile.planes)
    except Exception as error:  # the protobuf library raises many types on a truncated file
        raise UserError(cut_message) from error
    with warnings.catch_warnings():
        # ProfileData's iterator of stats has no module name, which raises one DeprecationWarning.
        warnings.simplefilter("ignore", DeprecationWarning)
        trace_start_ns = _start_time(planes)
        if trace_start_ns is None:
            raise UserError(cut_message)
        steps, host, events, anchors = [], [], [], []
        for plane in planes:
            if plane.name == "/host:CPU":
                for line in plane.lines:
                    _read_host_line(line, trace_start_ns, module, steps, host, events, anchors)
            elif device := re.fullmatch(r"/device:(GPU|TPU):(\d+)", plane.name):
                read_plane = _gpu_plane if device[1] == "GPU" else _tpu_plane
                events += read_plane(plane, int(device[2]), trace_start_ns, module)
    if not steps:
        raise UserError(f"{file} has no steps: nothing ran inside `Window.step`. Trace a window of steps.")
    # The lines of a plane are threads: steps of several threads come unsorted.
    steps.sort(key=lambda step: step.start_ns)
    # Each step begins where the one before it ended: host work between them belongs to the later one.
    ends = [steps[0].start_ns, *(step.end_ns for step in steps)]
    spans = tuple(StepSpan(step.step, ends[index], step.end_ns) for index, step in enumerate(steps))
    anchors.sort()
    outer_anchors = (anchors[0], anchors[-1]) if len(anchors) > 1 else ()
    return spans, events, tuple(sorted(host, key=lambda span: span.start_ns)), outer_anchors


def _start_time(planes: list[Any]) -> int | None:
    """Start of the trace in nanoseconds since the epoch; None if the file was cut before its last plane."""
    for plane in planes:
        if plane.name == "Task Environment":
            for name, value in plane.stats:
                if name == "profile_start_time":
                    return int(value)
    return None


def _read_host_line(
    line: Any,
    trace_start_ns: int,
    module: str,
    steps: list[StepSpan],
    host: list[HostSpan],
    events: list[_Event],
    anchors: list[tuple[int, int]],
) -> None:
    for event in line.events:
        stats = dict(event.stats)
        start_ns = trace_start_ns + round(event.start_ns)
        duration_ns = round(event.duration_ns)
        # On CPUs the ops themselves are events of host threads.
        if "hlo_op" in stats and "device_ordinal" in stats:
            name = _qualified_name(str(stats["hlo_op"]), str(stats.get("hlo_module", module)), module)
            events.append(_Event(int(stats["device_ordinal"]), name, start_ns, duration_ns))
        elif "step_num" in stats:
            steps.append(StepSpan(int(stats["step_num"]), start_ns, start_ns + duration_ns))
            if "monotonic_ns" in stats:
                anchors.append((start_ns, int(stats["monotonic_ns"])))
        elif event.name.startswith(HOST_SPAN):
            host.append(HostSpan(event.name.removeprefix(HOST_SPAN), start_ns, start_ns + duration_ns))


def _gpu_plane(plane: Any, device: int, trace_start_ns: int, module: str) -> Iterator[_Event]:
    for line in plane.lines:
        if not line.name.startswith("Stream"):
            continue  # other lines repeat the streams' events: reading them too would count everything twice
        for event in line.events:
            stats = dict(event.stats)
            # A library's kernel, such as NCCL's, may have no hlo_op: it keeps its own name.
            name = str(stats.get("hlo_op", event.name))
            event_module = str(stats.get("hlo_module", module))
            yield _Event(
                device,
                _qualified_name(name, event_module, module),
                trace_start_ns + round(event.start_ns),
                round(event.duration_ns),
            )


def _tpu_plane(plane: Any, device: int, trace_start_ns: int, module: str) -> Iterator[_Event]:
    """Ops of a TPU core, and asynchronous ops from start to done, without their start instruction."""
    lines = {line.name: list(line.events) for line in plane.lines}
    modules = sorted(
        (event.start_ns, event.end_ns, event.name.split("(")[0]) for event in lines.get("XLA Modules", [])
    )
    # The line of asynchronous ops has the whole flight; the start on the other line would count it twice.
    flights = {_tpu_name(event.name) for event in lines.get("Async XLA Ops", [])}
    for line in ("XLA Ops", "Async XLA Ops"):
        for event in lines.get(line, []):
            name = _tpu_name(event.name)
            if line == "XLA Ops" and name in flights:
                continue
            event_module = next(
                (event_module for start, end, event_module in modules if start <= event.start_ns < end),
                module,
            )
            yield _Event(
                device,
                _qualified_name(name, event_module, module),
                trace_start_ns + round(event.start_ns),
                round(event.duration_ns),
            )


def _tpu_name(text: str) -> str:
    return text.split(" = ")[0].removeprefix("%")


def _qualified_name(op: str, event_module: str, module: str) -> str:
    return op if event_module == module else f"{event_module}/{op}"
