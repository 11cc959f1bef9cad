"""Replay of made-up steps whose length without each cause is known, and of random ones as they ran."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jtrain.profile.analysis.event_losses import event_losses
from jtrain.profile.analysis.records import HloOp, HostSpan, OpEvent, OpTraffic, Peaks, StepSpan, Trace
from jtrain.profile.analysis.replay import critical_path, replay, step_graph
from jtrain.profile.analysis.step_tracks import CriticalPath
from jtrain.profile.analysis.timeline import lay_out

NOW, MS = 1_795_284_144_288_810_791, 1_000_000
PEAKS = Peaks(flops=1e12, hbm_bytes_per_s=1e12, ref_mhz=1000.0, max_mhz=None)


def computes(name: str, flops: int = 0, scope: str = "") -> HloOp:
    return HloOp(name, "fusion", "compute", "forward", "layers/mlp", scope, flops, 0, None)


def gathers(name: str, *, is_async: bool = True) -> HloOp:
    traffic = OpTraffic("all-gather", ("data",), 8, ((0, 1),))
    opcode = "all-gather-start" if is_async else "all-gather"
    return HloOp(name, opcode, "communication", "forward", "layers", "", 0, 0, traffic, is_async=is_async)


OPS = {op.name: op for op in (computes("a", 2 * 10**9), computes("b"), computes("c"), gathers("g"))}
OPS |= {
    "again": computes("again", 10**9, "checkpoint/rematted_computation/dot"),
    "r": gathers("r", is_async=False),
}


def step(*events: tuple[int, str, float, float], length: float, host: tuple[HostSpan, ...] = ()) -> Trace:
    """A step of `length` ms with (device, op, begin, end), in ms from its begin."""
    return Trace(
        platform="gpu",
        device_kind="made up",
        num_devices=1 + max(event[0] for event in events),
        steps=(StepSpan(7, NOW, NOW + round(length * MS)),),
        events=tuple(
            OpEvent(device, 7, name, NOW + round(begin * MS), round((end - begin) * MS))
            for device, name, begin, end in events
        ),
        host=host,
    )


def path_of(trace: Trace, producers: dict[str, frozenset[str]] | None = None, **changes: Any) -> CriticalPath:
    events, _ = lay_out(trace, OPS)
    losses = dataclasses.replace(event_losses(events, PEAKS, {}), **changes)
    path = critical_path(trace, events, losses, PEAKS, producers or {}, range(trace.num_devices))
    assert path is not None
    return path


def without(path: CriticalPath) -> dict[str, Any]:
    """Milliseconds of the step without each cause that has a gain."""
    return {cause.cause: pytest.approx(cause.without_s * 1e3, abs=1e-6) for cause in path.causes}


def spent(path: CriticalPath) -> dict[str, Any]:
    return {row.name: pytest.approx(row.seconds * 1e3, abs=1e-6) for row in path.rows}


def test_a_transfer_gains_what_no_computing_hides() -> None:
    """The example of the module: g takes 7 ms, of which b hides 4; c needs it."""
    trace = step((0, "a", 0, 4), (0, "b", 4, 8), (0, "g", 4, 11), (0, "c", 11, 15), length=15)
    path = path_of(trace, {"c": frozenset({"b", "g"})})
    assert spent(path) == {"layers/mlp, forward": 8.0, "all-gather over data": 7.0}
    assert without(path)["all communication"] == 12.0
    assert without(path)["transfers of all-gather over data"] == 12.0
    # Ops at the roofline: a needs 2 ms at 1 TFLOP/s; of b and c nothing is known, so they stay, as g does.
    assert without(path)["ops below the roofline"] == 13.0

    # Where c does not read g, the wait before c is of no known cause, and g gains nothing.
    path = path_of(trace)
    assert spent(path) == {"layers/mlp, forward": 12.0, "idle between ops": 3.0}
    assert "all communication" not in without(path)
    assert without(path)["idle between ops"] == 12.0


def test_a_collective_that_is_not_asynchronous_blocks_what_follows() -> None:
    """Its time is gained in full, though nothing reads its result."""
    path = path_of(step((0, "a", 0, 4), (0, "r", 4, 6), (0, "b", 6, 9), length=9))
    assert without(path)["all communication"] == 7.0


def test_a_late_device_costs_what_the_others_wait_for_it() -> None:
    """Device 1 begins the gather 3 ms late; the transfer itself takes 2 ms."""
    events = (
        (0, "a", 0, 2),
        (0, "r", 2, 7),
        (0, "b", 7, 10),
        (1, "a", 0, 5),
        (1, "r", 5, 7),
        (1, "b", 7, 8),
    )
    path = path_of(step(*events, length=10))
    # The path goes from device 0's b through the transfer to device 1's a.
    assert spent(path) == {"layers/mlp, forward": 8.0, "all-gather over data": 2.0}
    assert without(path)["devices that begin a collective late"] == 8.0  # device 1: 5 + 2 + 1
    assert without(path)["transfers of all-gather over data"] == 8.0  # device 0: waits until 5, then 3
    assert without(path)["all communication"] == 6.0  # device 1: 5 + 1

    # Two gathers with a group each wait for nobody.
    alone = dataclasses.replace(OPS["r"], collective=OpTraffic("all-gather", ("data",), 8, ((0,), (1,))))
    events_alone, _ = lay_out(step(*events, length=10), OPS | {"r": alone})
    graph = step_graph(step(*events, length=10), events_alone, StepSpan(7, NOW, NOW + 10 * MS), {}, range(2))
    assert set(graph.meeting) == {-1}


def test_waits_have_their_causes() -> None:
    """1 ms of dispatch, 2 of idling, 3 for data and 1 for a save at the end, each gained alone."""
    host = (
        HostSpan("data_wait", NOW + 8 * MS, NOW + 11 * MS),
        HostSpan("checkpoint", NOW + 11 * MS, NOW + 12 * MS),
    )
    path = path_of(step((0, "a", 1, 3), (0, "b", 5, 8), length=12, host=host))
    assert spent(path) == {"layers/mlp, forward": 5.0, "data wait": 3.0, "idle between ops": 2.0, "host": 2.0}
    found = without(path)
    assert (found["data wait"], found["idle between ops"], found["host"]) == (9.0, 10.0, 10.0)


def test_slow_clocks_overlap_and_recomputation_are_replayed() -> None:
    """Each shortens the executions that it made longer, and what another device's path hides is no gain."""
    trace = step((0, "a", 0, 4), (0, "again", 4, 6), (0, "b", 6, 10), length=10)
    found = without(
        path_of(trace, multiplier=np.array([0.5, 1.0, 1.0]), overlap_s=np.array([0.0, 0.0, 1e-3]))
    )
    assert (found["low clocks"], found["slowdown beside collectives"], found["recomputation"]) == (
        8.0,
        9.0,
        8.0,
    )
    # Beside a device that takes 9.5 ms, none of them gains more than half a millisecond.
    both = step((0, "a", 0, 4), (0, "again", 4, 6), (0, "b", 6, 10), (1, "c", 0, 9.5), length=10)
    assert without(path_of(both))["recomputation"] == 9.5


@st.composite
def random_steps(draw: st.DrawFn) -> tuple[Trace, dict[str, frozenset[str]]]:
    """Any executions on three devices, overlapping or not, with any dependencies between ops."""
    names = sorted(OPS)
    events: list[tuple[int, str, float, float]] = []
    for _ in range(draw(st.integers(1, 25))):
        begin, duration = draw(st.integers(0, 40)), draw(st.integers(0, 12))
        events.append((draw(st.integers(0, 2)), draw(st.sampled_from(names)), begin, begin + duration))
    spans = draw(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9), st.booleans()), max_size=3))
    host = tuple(
        HostSpan("data_wait" if is_data else "evaluate", NOW + begin * MS, NOW + (begin + long) * MS)
        for begin, long, is_data in spans
    )
    edges = draw(st.dictionaries(st.sampled_from(names), st.frozensets(st.sampled_from(names))))
    return step(*events, length=max(event[3] for event in events) + draw(st.integers(0, 5)), host=host), edges


@settings(max_examples=20)
@given(random_steps())
def test_any_step_replays_as_it_ran(drawn: tuple[Trace, dict[str, frozenset[str]]]) -> None:
    """To the nanosecond: each begin, each end and the step; its path adds up to it; no cause makes it longer."""
    trace, producers = drawn
    events, _ = lay_out(trace, OPS)
    (span,) = trace.steps
    graph = step_graph(trace, events, span, producers, range(trace.num_devices))
    length_ns, begins, ends = replay(graph, graph.busy_ns.astype(float), graph.wait_ns)
    assert length_ns == span.end_ns - span.start_ns
    assert begins == (events.start_ns[graph.event] - span.start_ns).tolist()
    assert ends == (events.end_ns[graph.event] - span.start_ns).tolist()
    assert (graph.wait_ns >= 0).all()
    path = critical_path(trace, events, event_losses(events, PEAKS, {}), PEAKS, producers, range(3))
    assert path is not None
    assert sum(row.seconds for row in path.rows) == pytest.approx(path.duration_s, rel=1e-9)
    assert all(cause.without_s < path.duration_s for cause in path.causes)
    assert all(first.without_s <= second.without_s for first, second in itertools.pairwise(path.causes))


def test_the_steps_of_a_window_are_averaged() -> None:
    """One step of three waits 30 ms for data: the median one does not, and the mean one for 10."""
    steps = tuple(
        StepSpan(number, NOW + begin * MS, NOW + end * MS)
        for number, begin, end in ((1, 0, 4), (2, 4, 38), (3, 38, 42))
    )
    events = tuple(
        OpEvent(0, number, "b", NOW + begin * MS, 4 * MS) for number, begin in ((1, 0), (2, 34), (3, 38))
    )
    waited = (HostSpan("data_wait", NOW + 4 * MS, NOW + 34 * MS),)
    path = path_of(Trace("gpu", "made up", 1, steps, events, waited))
    assert path.num_steps == 3
    assert path.duration_s == pytest.approx(0.014)
    assert spent(path) == {"data wait": 10.0, "layers/mlp, forward": 4.0}
    assert without(path)["data wait"] == 4.0
