"""Clock counters in the xplane trace itself, where XProf shows them: sampled clocks, and each op's clock loss.

Uses only names that XProf already reads. It draws a line called `_counters_` as counters. The stat `Time Scale
Multiplier` of an op is its time at the reference clock over its measured time; the op profile of a TPU weighs ops by it
(`aggDvfsTimeScaleMultiplier`). It sums the stat `vdd_energy_j` over a GPU's ops.

In protobuf's encoding, two serialised messages one after the other are the merge of both. So new lines and names are
appended to a plane's bytes and new stats to an event's, and only lengths change: this needs neither TensorFlow nor a
compiled schema. The field numbers are those of xplane.proto.
"""

import math
import re
import struct
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.errors import UserError
from jtrain.profile.analysis import clock_loss
from jtrain.profile.analysis.records import Peaks
from jtrain.profile.clocks.samples import Samples
from jtrain.runtime.atomic_io import write_whole

COUNTERS = "_counters_"
MULTIPLIER, ENERGY = "Time Scale Multiplier", "vdd_energy_j"
TRACKS = {"sm_mhz": "SM clock (MHz)", "mem_mhz": "memory clock (MHz)", "power_w": "power (W)"} | {
    "temperature_c": "temperature (C)",
    "reasons": "throttle reasons",
}

# xplane.proto: XSpace.planes; XPlane's name, lines, event_metadata and stat_metadata; XLine.events; XEvent.stats
PLANES, NAME, LINES, EVENT_METADATA, STAT_METADATA, EVENTS, STATS = 1, 2, 3, 4, 5, 4, 4
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5


def annotate(xplane: Path, samples: Mapping[int, Samples], peaks: Peaks, sensitivity: Mapping[str, float]) -> None:
    """Adds counters to every device's plane, and multiplier and energy to its ops; skips a file that has counters.

    Args:
      xplane: *.xplane.pb of one process; replaced atomically.
      samples: clock samples by device, on the trace's clock.
      sensitivity: b of each op by its name in the trace (see `clock_loss`); 1 for an op that is not in it.

    Raises:
      UserError: the file is truncated, or its start time is missing.
    """
    data = xplane.read_bytes()
    profile = _read(xplane, data)  # must outlive its planes, which only point into it
    planes = list(profile.planes)
    if not samples or any(line.name == COUNTERS for plane in planes for line in plane.lines):
        return
    began_ns, ended_ns = _extent(xplane, planes)
    ref_mhz = clock_loss.reference_mhz(peaks, samples)
    todo = dict(samples)
    parts = []
    of_planes = iter(planes)
    for number, kind, payload in _fields(data):
        if number != PLANES:  # errors, warnings, the host's name
            parts.append(_field(number, payload, kind))
            continue
        plane = next(of_planes)
        device = re.fullmatch(r"/device:(?:GPU|TPU):(\d+)", plane.name)
        if device and int(device[1]) in todo:
            one = todo.pop(int(device[1]))
            ids = _Ids(payload)
            multiplier, energy = ids.stat(MULTIPLIER), ids.stat(ENERGY)
            costs = [_costs(line, one, began_ns, ref_mhz, sensitivity) for line in plane.lines]
            payload = _with_costs(payload, costs, multiplier, energy)
            payload += ids.text() + _counters(one, ids, began_ns, ended_ns)
        parts.append(_field(PLANES, payload))
    for device, one in todo.items():  # CPU devices have no plane of their own
        ids = _Ids(b"")
        name = f'id: {1000 + device} name: "/device:CUSTOM:clocks:{device}"'
        parts.append(_field(PLANES, _plane(name) + _counters(one, ids, began_ns, ended_ns)))
    write_whole(xplane, b"".join(parts))


def _read(xplane: Path, data: bytes) -> Any:
    from jax.profiler import ProfileData

    try:
        return ProfileData.from_serialized_xspace(data)
    except Exception as error:  # the protobuf library raises many types on a truncated file
        raise UserError(f"{xplane} is truncated or not a trace. Trace again.") from error


def _extent(xplane: Path, planes: list[Any]) -> tuple[int, int]:
    """Start and end of the trace, in nanoseconds since the epoch."""
    times: dict[str, Any] = {}
    for plane in planes:
        if plane.name == "Task Environment":
            times = _stats(plane)
    if "profile_start_time" not in times:
        raise UserError(f"{xplane} has no start time (profile_start_time): it is truncated. Trace again.")
    return int(times["profile_start_time"]), int(times.get("profile_stop_time", np.iinfo(np.int64).max))


def _stats(of: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        # ProfileData's iterator of stats has no module name, which raises one DeprecationWarning.
        warnings.simplefilter("ignore", DeprecationWarning)
        return {name: value for name, value in of.stats if name is not None}


def _costs(
    line: Any, samples: Samples, began_ns: int, ref_mhz: float | None, sensitivity: Mapping[str, float]
) -> list[tuple[float, float]]:
    """(multiplier, joules) of each event of a line; nan for values that are not written; [] for lines without ops."""
    if not (line.name == "XLA Ops" or line.name.startswith("Stream")):
        return []
    events = list(line.events)
    stats = [_stats(event) for event in events]
    names = [
        str(of.get("hlo_op", event.name)).split(" = ")[0].removeprefix("%")
        for event, of in zip(events, stats, strict=True)
    ]
    start_ns = began_ns + np.array([round(event.start_ns) for event in events], np.int64)
    end_ns = start_ns + np.array([round(event.duration_ns) for event in events], np.int64)
    mhz = samples.mean_mhz(start_ns, end_ns)
    paced = np.array([sensitivity.get(name, 1.0) for name in names])
    found = np.where(np.isfinite(mhz), clock_loss.multipliers(mhz, paced, ref_mhz), np.nan)
    measured = np.array([MULTIPLIER in of for of in stats], bool)  # a TPU's own value is exact, ours is sampled
    joules = samples.mean("power_w", start_ns, end_ns) * (end_ns - start_ns) * 1e-9
    return list(zip(np.where(measured, np.nan, found).tolist(), joules.tolist(), strict=True))


def _with_costs(plane: bytes, costs: list[list[tuple[float, float]]], multiplier: int, energy: int) -> bytes:
    """The plane's bytes, with the new stats appended to each event."""
    parts, lines = [], iter(costs)
    for number, kind, payload in _fields(plane):
        if number != LINES:
            parts.append(_field(number, payload, kind))
            continue
        of_line = iter(next(lines) or [])
        inner = []
        for number_in_line, kind_in_line, value in _fields(payload):
            if number_in_line == EVENTS:
                for identity, cost in zip((multiplier, energy), next(of_line, ()), strict=False):
                    if not math.isnan(cost):
                        # XStat: metadata_id = 1, double_value = 2
                        stat = _field(1, _varint(identity), VARINT) + _field(2, struct.pack("<d", cost), FIXED64)
                        value += _field(STATS, stat)
            inner.append(_field(number_in_line, value, kind_in_line))
        parts.append(_field(LINES, b"".join(inner)))
    return b"".join(parts)


class _Ids:
    """Ids of a plane's stats, events and lines: the existing ones, and new ones for added names."""

    def __init__(self, plane: bytes) -> None:
        self._stats: dict[str, int] = {}
        self._next_event = self._next_line = 1
        for number, _, payload in _fields(plane):
            if number == STAT_METADATA:
                entry = {key: value for key, _, value in _fields(payload)}  # key = 1, value = 2
                inner = {key: value for key, _, value in _fields(entry.get(2, b""))}  # id = 1, name = 2
                self._stats[inner.get(2, b"").decode()] = _number(entry.get(1, b"\0"))
            elif number == EVENT_METADATA:
                key = next((_number(value) for key, _, value in _fields(payload) if key == 1), 0)
                self._next_event = max(self._next_event, key + 1)
            elif number == LINES:
                key = next((_number(value) for key, _, value in _fields(payload) if key == 1), 0)
                self._next_line = max(self._next_line, key + 1)
        self._new: list[tuple[str, int]] = []

    def stat(self, name: str) -> int:
        """Id of a stat."""
        if name not in self._stats:
            self._stats[name] = max(self._stats.values(), default=0) + 1
            self._new.append((name, self._stats[name]))
        return self._stats[name]

    def event(self) -> int:
        """Unused id for an event."""
        self._next_event += 1
        return self._next_event - 1

    def line(self) -> int:
        """Unused id for a line."""
        return self._next_line

    def text(self) -> bytes:
        """Names of the new stats, as bytes to append to the plane."""
        text = " ".join(f'stat_metadata {{ key: {n} value {{ id: {n} name: "{name}" }} }}' for name, n in self._new)
        self._new = []
        return _plane(text)


def _counters(samples: Samples, ids: _Ids, began_ns: int, ended_ns: int) -> bytes:
    """Line of counters, as bytes to append to a plane."""
    value_id = ids.stat("counter_value")
    names, events = [], []
    for field, title in TRACKS.items():
        times, values = samples.known(field)
        within = (times >= began_ns) & (times <= ended_ns)
        if not within.any():
            continue
        identity = ids.event()
        names.append(f'event_metadata {{ key: {identity} value {{ id: {identity} name: "{title}" }} }}')
        for at_ns, value in zip((times[within] - began_ns).tolist(), values[within].tolist(), strict=True):
            stat = f"metadata_id: {value_id} double_value: {float(value)!r}"
            events.append((at_ns, f"events {{ metadata_id: {identity} offset_ps: {at_ns * 1000} stats {{ {stat} }} }}"))
    inner = " ".join(text for _, text in sorted(events))
    line = f'lines {{ id: {ids.line()} name: "{COUNTERS}" timestamp_ns: 0 {inner} }}'
    return ids.text() + _plane(" ".join([line, *names]))


def _plane(text: str) -> bytes:
    """Serialises an XPlane given in protobuf's text format."""
    from jax.profiler import ProfileData

    space = ProfileData.text_proto_to_serialized_xspace(f"planes {{ {text} }}")
    ((_, _, payload),) = _fields(space)
    return payload


def _fields(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """(number, wire type, value) of each field of a message, in order; the value of a varint is its encoded bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint_at(data, at)
        kind = tag & 7
        if kind == LENGTH:
            size, at = _varint_at(data, at)
            end = at + size
        elif kind == VARINT:
            _, end = _varint_at(data, at)
        else:
            end = at + {FIXED64: 8, FIXED32: 4}[kind]
        yield tag >> 3, kind, data[at:end]
        at = end


def _varint_at(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _number(value: bytes) -> int:
    return _varint_at(value, 0)[0]


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _field(number: int, value: bytes, kind: int = LENGTH) -> bytes:
    return _varint(number << 3 | kind) + (_varint(len(value)) if kind == LENGTH else b"") + value
