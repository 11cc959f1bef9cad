"""Clock counters in the xplane trace itself, for XProf: sampled clocks, and each op's clock loss.

Uses only names that XProf already reads. It draws a line called `_counters_` as counters. The stat `Time
Scale Multiplier` of an op is its time at the reference clock over its measured time; the op profile of a TPU
weighs ops by it (`aggDvfsTimeScaleMultiplier`). It sums the stat `vdd_energy_j` over a GPU's ops.

Messages have the fields of xplane.proto that are read or written here. Protobuf keeps all others as they are.
"""

import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from jtrain.errors import UserError
from jtrain.profile.analysis import clock_loss
from jtrain.profile.analysis.records import Peaks
from jtrain.profile.clocks.samples import Samples
from jtrain.runtime.atomic_io import write_whole

COUNTERS = "_counters_"
MULTIPLIER, ENERGY = "Time Scale Multiplier", "vdd_energy_j"
TRACKS = {"sm_mhz": "core clock (MHz)", "mem_mhz": "memory clock (MHz)", "power_w": "power (W)"} | {
    "temperature_c": "temperature (C)",
    "reasons": "throttle reasons",
}

_FIELDS = {
    "XSpace": "planes=1:XPlane*",
    "XPlane": (
        "id=1:int64 name=2:string lines=3:XLine* event_metadata=4:Entry* stat_metadata=5:Entry* "
        "stats=6:XStat*"
    ),
    "Entry": "key=1:int64 value=2:Metadata",
    "Metadata": "id=1:int64 name=2:string",
    "XLine": "id=1:int64 name=2:string timestamp_ns=3:int64 events=4:XEvent*",
    "XEvent": "metadata_id=1:int64 offset_ps=2:int64 duration_ps=3:int64 stats=4:XStat*",
    "XStat": (
        "metadata_id=1:int64 double_value=2:double uint64_value=3:uint64 int64_value=4:int64 "
        "str_value=5:bytes ref_value=7:uint64"
    ),
}
"""Messages of xplane.proto: each field as name=number:type, with * if it is repeated."""


def annotate(
    xplane: Path, samples: Mapping[int, Samples], peaks: Peaks, sensitivity: Mapping[str, float]
) -> None:
    """Adds counters to every device's plane, multiplier and energy to its ops; skips a file with counters.

    Args:
      xplane: *.xplane.pb of one process; replaced atomically.
      samples: clock samples by device, on the trace's clock.
      sensitivity: b of each op by its name in the trace (see `clock_loss`); 1 for an op that is not in it.

    Raises:
      UserError: the file is truncated, or its start time is missing.
    """
    try:
        space = _space().FromString(xplane.read_bytes())
    except message.DecodeError as error:
        raise UserError(f"{xplane} is truncated or not a trace. Trace again.") from error
    # Annotating twice would draw each counter twice.
    if not samples or any(line.name == COUNTERS for plane in space.planes for line in plane.lines):
        return
    extent = _extent(xplane, space)
    ref_mhz = clock_loss.reference_mhz(peaks, samples)
    remaining_samples = dict(samples)
    for plane in space.planes:
        device = re.fullmatch(r"/device:(?:GPU|TPU):(\d+)", plane.name)
        if device and int(device[1]) in remaining_samples:
            device_samples = remaining_samples.pop(int(device[1]))
            for line in plane.lines:
                # Only lines of ops that ran: derived lines repeat them for display.
                if line.name == "XLA Ops" or line.name.startswith("Stream"):
                    _add_costs(plane, line, device_samples, extent[0], ref_mhz, sensitivity)
            _add_counters(plane, device_samples, *extent)
    for device, device_samples in remaining_samples.items():  # CPU devices have no plane of their own
        _add_counters(
            # From 1000 on, far from the ids of the profiler's own planes.
            space.planes.add(id=1000 + device, name=f"/device:CUSTOM:clocks:{device}"),
            device_samples,
            *extent,
        )
    write_whole(xplane, space.SerializeToString())


@functools.cache
def _space() -> Any:
    """Class of the message XSpace."""
    # Built here instead of from a .proto: no generated code, and only the fields that are used.
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="xplane.proto", package="xplane")
    for name, fields in _FIELDS.items():
        descriptor = file.message_type.add(name=name)
        for field, number, kind, is_repeated in re.findall(r"(\w+)=(\d+):(\w+)(\*?)", fields):
            label = kinds.LABEL_REPEATED if is_repeated else kinds.LABEL_OPTIONAL
            field_descriptor = descriptor.field.add(name=field, number=int(number), label=label)
            if kind in _FIELDS:
                field_descriptor.type, field_descriptor.type_name = kinds.TYPE_MESSAGE, f".xplane.{kind}"
            else:
                field_descriptor.type = kinds.Type.Value(f"TYPE_{kind.upper()}")
    # A pool of its own, since other libraries may have an xplane.proto in the default one.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("xplane.XSpace"))


def _extent(xplane: Path, space: Any) -> tuple[int, int]:
    """Start and end of the trace, in nanoseconds since the epoch."""
    times: dict[str, int] = {}
    for plane in space.planes:
        if plane.name == "Task Environment":
            names = _names(plane.stat_metadata)
            times = {names[stat.metadata_id]: stat.uint64_value or stat.int64_value for stat in plane.stats}
    if "profile_start_time" not in times:
        raise UserError(f"{xplane} has no start time (profile_start_time): it is truncated. Trace again.")
    # Without a stop time all samples count as within the trace.
    return times["profile_start_time"], times.get("profile_stop_time", np.iinfo(np.int64).max)


def _names(metadata: Any) -> dict[int, str]:
    return {entry.key: entry.value.name for entry in metadata}


def _id_of(metadata: Any, name: str) -> int:
    """Id of a stat or event of a plane, which is added if the plane does not have it."""
    for entry in metadata:
        if entry.value.name == name:
            return entry.key
    new_id = max((entry.key for entry in metadata), default=0) + 1
    added = metadata.add(key=new_id)
    added.value.id, added.value.name = new_id, name
    return new_id


def _add_costs(
    plane: Any,
    line: Any,
    samples: Samples,
    trace_start_ns: int,
    ref_mhz: float | None,
    sensitivity: Mapping[str, float],
) -> None:
    """Adds multiplier and joules to each op of a line, where they are known."""
    multiplier, energy = (_id_of(plane.stat_metadata, name) for name in (MULTIPLIER, ENERGY))
    names, stat_names = _names(plane.event_metadata), _names(plane.stat_metadata)
    # Offsets are picoseconds from the line's own start, which counts from the trace's.
    start_ns = (
        trace_start_ns
        + line.timestamp_ns
        + np.array([round(e.offset_ps / 1000) for e in line.events], np.int64)
    )
    end_ns = start_ns + np.array([round(e.duration_ps / 1000) for e in line.events], np.int64)
    mhz = samples.mean_mhz(start_ns, end_ns)
    sensitivities: list[float] = []
    for event in line.events:
        name = names.get(event.metadata_id, "")
        for stat in event.stats:
            if stat_names.get(stat.metadata_id) == "hlo_op":
                name = stat.str_value.decode() or stat_names.get(stat.ref_value, "")
        # Names in the trace are whole instructions on TPUs: `%fusion.3 = bf16[...] ...`.
        sensitivities.append(sensitivity.get(name.split(" = ")[0].removeprefix("%"), 1.0))
    # nan, not 1, where the clock is unknown: such an op gets no stat.
    multipliers = np.where(
        np.isfinite(mhz), clock_loss.multipliers(mhz, np.array(sensitivities), ref_mhz), np.nan
    )
    joules = samples.mean("power_w", start_ns, end_ns) * (end_ns - start_ns) * 1e-9
    for event, *costs in zip(line.events, multipliers.tolist(), joules.tolist(), strict=True):
        # A TPU's own multiplier is exact, ours is sampled.
        present_ids = {stat.metadata_id for stat in event.stats}
        for identity, cost in zip((multiplier, energy), costs, strict=True):
            if not math.isnan(cost) and not (identity == multiplier and identity in present_ids):
                event.stats.add(metadata_id=identity, double_value=cost)


def _add_counters(plane: Any, samples: Samples, trace_start_ns: int, trace_end_ns: int) -> None:
    """Adds a line of counters with every sample within the trace."""
    value_id = _id_of(plane.stat_metadata, "counter_value")
    line = plane.lines.add(id=max((line.id for line in plane.lines), default=0) + 1, name=COUNTERS)
    points: list[tuple[int, int, float]] = []
    for field, title in TRACKS.items():
        times, values = samples.known(field)
        is_traced = (times >= trace_start_ns) & (times <= trace_end_ns)
        if is_traced.any():
            identity = _id_of(plane.event_metadata, title)
            offsets = (times[is_traced] - trace_start_ns).tolist()
            points += [
                (offset_ns, identity, value)
                for offset_ns, value in zip(offsets, values[is_traced].tolist(), strict=True)
            ]
    # Viewers expect the events of a line in order of time.
    for offset_ns, identity, value in sorted(points):
        event = line.events.add(metadata_id=identity, offset_ps=offset_ns * 1000)
        event.stats.add(metadata_id=value_id, double_value=float(value))
