import itertools
import json
from typing import Any

import pytest

from jtrain.profile.analysis.records import HloOp, HostSpan, OpEvent, OpTraffic, StepSpan, Trace
from jtrain.profile.report.perfetto import perfetto
from tests.profile import example

EPOCH = 1_763_000_000_000_000_123
"""Nanoseconds since the epoch: more digits than a float holds."""


def op(name: str, kind: Any, phase: Any, layer: str, collective: OpTraffic | None = None) -> HloOp:
    return HloOp(name, "fusion", kind, phase, layer, f"jit(step)/{layer}", 10, 20, collective)


OPS = {
    found.name: found
    for found in (
        op("while.1", "control", "forward", ""),
        op("embed.1", "compute", "forward", "embed"),
        op("mlp.1", "compute", "forward", "layers/mlp"),
        op("mlp.2", "compute", "forward", "layers/mlp"),
        op("mlp_bwd.1", "compute", "backward", "layers/mlp"),
        op("adam.1", "compute", "optimizer", "optimizer"),
        op(
            "all-gather.1", "communication", "forward", "layers/mlp", OpTraffic("all-gather", ("data",), 4096)
        ),
    )
}

TIMES = {"while.1": (0, 900), "embed.1": (0, 100), "mlp.1": (100, 200), "all-gather.1": (250, 300)}
TIMES |= {"mlp.2": (300, 101), "mlp_bwd.1": (500, 300), "adam.1": (820, 80)}
"""Start and duration within a step, in nanoseconds."""


def traced() -> Trace:
    """Two steps of 1 µs on two devices."""
    events = [
        OpEvent(device, step, name, EPOCH + 1000 * step + start, length)
        for step in range(2)
        for device in range(2)
        for name, (start, length) in TIMES.items()
    ]
    steps = tuple(StepSpan(7 + i, EPOCH + 1000 * i, EPOCH + 1000 * (i + 1)) for i in range(2))
    return Trace(
        "cuda", "NVIDIA H200", 2, steps, tuple(events), (HostSpan("data_wait", EPOCH + 5, EPOCH + 45),)
    )


@pytest.fixture
def exported() -> list[dict[str, Any]]:
    found = perfetto(traced(), OPS, [example.track(0, points=10)])
    return json.loads(json.dumps(found))["traceEvents"]


def slices(events: list[dict[str, Any]], process: int, thread: int) -> list[tuple[str, float, float]]:
    """(name, start, duration) in nanoseconds."""
    found = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (process, thread)]
    return [(e["name"], round(e["ts"] * 1e3, 6), round(e["dur"] * 1e3, 6)) for e in found]


def test_steps_and_the_host_stand_first(exported: list[dict[str, Any]]) -> None:
    """The times count from the first step, so that no nanosecond is lost to a float."""
    assert slices(exported, 0, 0) == [("step 7", 0, 1000), ("step 8", 1000, 1000)]
    assert slices(exported, 0, 1) == [("data_wait", 5, 40)]


def test_every_op_is_on_its_devices_track_of_its_kind(exported: list[dict[str, Any]]) -> None:
    """Loops, which hold other ops, are left out; a collective says its axes and bytes."""
    for device in range(2):
        computed = slices(exported, device + 1, 2)
        assert [name for name, *_ in computed] == ["embed.1", "mlp.1", "mlp.2", "mlp_bwd.1", "adam.1"] * 2
        assert computed[1] == ("mlp.1", 100, 200)
        assert slices(exported, device + 1, 3) == [("all-gather.1", 250, 300), ("all-gather.1", 1250, 300)]
    gather = next(e for e in exported if e["name"] == "all-gather.1")
    assert (gather["args"]["axes"], gather["args"]["wire_bytes"]) == ("data", 4096)
    assert not any(e["name"] == "while.1" for e in exported)


def test_phases_and_layers_span_their_ops_and_never_cross(exported: list[dict[str, Any]]) -> None:
    """A slice runs from its first op to its last one; the next one of the track starts after it."""
    assert slices(exported, 1, 0)[:3] == [("forward", 0, 401), ("backward", 500, 300), ("optimizer", 820, 80)]
    layers = slices(exported, 1, 1)
    assert layers[:4] == [
        ("embed", 0, 100),
        ("layers/mlp", 100, 301),
        ("layers/mlp", 500, 300),
        ("optimizer", 820, 80),
    ]
    for thread, count in ((0, 6), (1, 8)):
        found = slices(exported, 1, thread)
        assert len(found) == count
        for (_, start, length), (_, following, _) in itertools.pairwise(found):
            assert following >= start + length


def test_clocks_power_and_heat_are_counter_tracks(exported: list[dict[str, Any]]) -> None:
    """One per quantity, a point per known sample, on the device that was sampled."""
    track = example.track(0, points=10)
    counters = [e for e in exported if e["ph"] == "C"]
    assert {e["name"] for e in counters} == {
        *("core clock, MHz", "memory clock, MHz", "power, W", "temperature, °C", "throttle reasons"),
    }
    assert {e["pid"] for e in counters} == {1}
    points = {e["ts"]: e["args"]["value"] for e in counters if e["name"] == "core clock, MHz"}
    known = {t * 1e6: f for t, f in zip(track.time_s, track.sm_mhz, strict=True) if f is not None}
    assert len(known) == 9
    assert points == known


def test_overlapping_streams_do_not_make_crossing_phases() -> None:
    """Two streams of one device: a backward op starts inside a forward op; the forward phase ends there."""
    events = (OpEvent(0, 0, "mlp.1", EPOCH, 500), OpEvent(0, 0, "mlp_bwd.1", EPOCH + 300, 400))
    trace = Trace("cuda", "NVIDIA H200", 1, (StepSpan(0, EPOCH, EPOCH + 1000),), events, ())
    found = perfetto(trace, OPS, [])["traceEvents"]
    assert slices(found, 1, 0) == [("forward", 0, 300), ("backward", 300, 400)]
