"""Instructions of pipelined steps, read from traces of real steps on emulated devices."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jtrain.errors import UserError
from jtrain.hlo.parser import read
from jtrain.pipeline.schedule import parse_op
from jtrain.pipeline.ticks import Ticks, make_ticks
from jtrain.profile.analysis import breakdown, pipeline_trace
from jtrain.profile.analysis.breakdown_json import read_breakdown, write_breakdown
from jtrain.profile.analysis.pipeline_trace import facts_of, tick_loop, track
from jtrain.profile.analysis.records import HloOp, OpEvent, PipelineTrack, Trace
from jtrain.profile.report.profile_page import page_of, print_breakdown
from jtrain.report.page import html
from jtrain.report.terminal import new_console
from tests.profile.traced import MODULE, STEPS, traced


@dataclasses.dataclass(frozen=True)
class Window:
    """What `track` reads of a window's folder."""

    trace: Trace
    ops: dict[str, HloOp]
    hlo: str
    facts: dict[str, Any]

    @property
    def ticks(self) -> Ticks:
        return pipeline_trace.ticks_of_facts(self.facts)

    def found(self, **changes: Any) -> PipelineTrack:
        changed = dataclasses.replace(self, **changes)
        return track(changed.trace, read(changed.hlo), changed.ops, changed.facts)

    def with_events(self, events: Iterator[OpEvent]) -> Trace:
        return dataclasses.replace(self.trace, events=tuple(events))


def window(folder: Path) -> Window:
    trace, ops, _ = breakdown.load(folder)
    facts = json.loads((folder / "facts.json").read_text())["pipeline"]
    return Window(trace, ops, (folder / f"{MODULE}.hlo.txt").read_text(), facts)


@pytest.fixture(scope="module")
def folder() -> Path:
    """Three steps of ZB-H1 over two stages, one operation per tick."""
    return traced(data=1, microbatches=4, stage=2, schedule="zb-h1", remat="none")


@pytest.fixture(scope="module")
def zb_h1(folder: Path) -> Window:
    return window(folder)


def assert_is_the_schedule(found: PipelineTrack, ticks: Ticks) -> None:
    """Every worker has the schedule's operations in their order; each begins after those that it needs have
    ended.
    """
    ends: dict[str, float] = {}
    for worker, rows in zip(found.workers, found.measured, strict=True):
        want = [str(op) for row in ticks.ops for op in row[worker] if op is not None]
        assert [op for op, _, _ in rows] == want
        assert len(rows) == len(ticks.schedule.streams[worker])
        edges = [edge for _, start, end in rows for edge in (start, end)]
        assert edges == sorted(edges), "a worker does one thing at a time"
        assert edges[0] >= 0
        assert edges[-1] <= {step.step: step.duration_s for step in found.steps}[found.step]
        ends |= {op: end for op, _, end in rows}
    for rows in found.measured:
        for op, start, _ in rows:
            for need in ticks.schedule.needs(parse_op(op)):
                assert ends[str(need)] <= start, (op, need)


def test_the_trace_has_every_instruction_where_the_schedule_has_it(zb_h1: Window) -> None:
    """Order, number and dependencies of all instructions; the bubble is what their times leave."""
    found = zb_h1.found()
    assert (found.schedule, found.packing, found.workers) == ("zb-h1", "single", [0, 1])
    assert_is_the_schedule(found, zb_h1.ticks)
    assert [step.step for step in found.steps] == list(STEPS)
    shown = next(step for step in found.steps if step.step == found.step)
    assert sorted(step.duration_s for step in found.steps)[1] == shown.duration_s, "the median step is drawn"
    computing = math.fsum(end - start for rows in found.measured for _, start, end in rows)
    assert shown.instructions == pytest.approx(computing / (2 * shown.duration_s), rel=1e-6)
    for step in found.steps:
        assert step.instructions + step.ends + step.bubble == pytest.approx(1.0)
        assert min(step.instructions, step.ends, step.bubble) > 0
    # Its closed form, (P - 1)(F + I - W), over M (F + I + W) more.
    assert found.planned_bubble == pytest.approx(1 / (3 * 4 + 1))


def test_a_trace_that_lacks_something_gives_no_picture(zb_h1: Window) -> None:
    """Missing events and other schedules end in a message with step, device and numbers."""
    loop, events = tick_loop(read(zb_h1.hlo)), zb_h1.trace.events
    last = STEPS[-1]

    def without(*, part: str | None, device: int) -> Trace:
        """The trace without a device's last event of each op of a part, in the last step."""
        ours = [
            event
            for event in events
            if (event.step, event.device) == (last, device)
            and (event.name in loop.once_per_tick if part is None else loop.parts.get(event.name) == part)
        ]
        ends = {event.name: event for event in ours}
        return zb_h1.with_events(event for event in events if event not in ends.values())

    ticks = zb_h1.ticks.num_ticks
    with pytest.raises(
        UserError, match=rf"step {last}, device 1: .* ran {ticks - 1} times in {ticks} ticks: .* cut"
    ):
        zb_h1.found(trace=without(part=None, device=1))
    done = zb_h1.with_events(e for e in events if (e.step, e.device) != (last, 1))
    with pytest.raises(UserError, match=f"step {last}, device 1: the trace has no op of the loop over ticks"):
        zb_h1.found(trace=done)
    gone = zb_h1.with_events(e for e in events if e.device or loop.parts.get(e.name) != "weight")
    with pytest.raises(
        UserError, match=f"step {STEPS[0]}, device 0: of 12 instructions 4 are not .*, first 0W0 in tick"
    ):
        zb_h1.found(trace=gone)
    with pytest.raises(UserError, match="the trace holds 2 of 3 devices"):
        zb_h1.found(facts=zb_h1.facts | {"workers": [0, 1, 1]})
    with pytest.raises(UserError, match=r"device 0: of 12 instructions .* are not in the trace"):
        zb_h1.found(facts=zb_h1.facts | {"workers": [1, 0]})
    other = facts_of(make_ticks(zb_h1.ticks.schedule, "fused"), (1.0, 1.0, 1.0), [0, 1])
    with pytest.raises(
        UserError, match=f"ran {ticks} times in {make_ticks(zb_h1.ticks.schedule).num_ticks} ticks"
    ):
        zb_h1.found(facts=other)
    with pytest.raises(UserError, match="has 0 loops over ticks instead of one"):
        zb_h1.found(hlo=zb_h1.hlo.replace("tick_", "other_"))


def test_instructions_outside_of_their_tick_are_refused(zb_h1: Window) -> None:
    """A pass in a tick where the schedule has none, and ticks that overlap."""
    loop, events = tick_loop(read(zb_h1.hlo)), zb_h1.trace.events
    whole_ns = zb_h1.trace.steps[0].end_ns - zb_h1.trace.steps[0].start_ns
    here = [event for event in events if (event.step, event.device) == (STEPS[0], 0)]
    late = {event: dataclasses.replace(event, start_ns=event.start_ns + whole_ns) for event in here}
    more = zb_h1.with_events(iter([*events, *(late[e] for e in here if loop.parts.get(e.name) == "forward")]))
    with pytest.raises(
        UserError, match=r"the trace has a forward pass, and worker 0 has none in the schedule"
    ):
        zb_h1.found(trace=more)
    fusions = [e for e in here if e.name in loop.once_per_tick and zb_h1.ops[e.name].opcode == "fusion"]
    firsts: dict[str, Any] = {}
    for event in sorted(fusions, key=lambda e: e.start_ns):
        firsts.setdefault(event.name, event)
    # The last of its tick: without it in the first tick, its later ones are beside the next tick's first ops.
    moved = max(firsts.values(), key=lambda e: e.start_ns)
    with pytest.raises(UserError, match="ticks of the trace overlap"):
        zb_h1.found(trace=zb_h1.with_events(late[e] if e is moved else e for e in events))


def test_reports_show_both_pictures_and_the_bubble(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """breakdown.json, the page and the terminal have the same numbers."""
    write_breakdown(breakdown.analyse(folder), folder / "breakdown.json")
    found = read_breakdown(folder / "breakdown.json")
    assert found.pipeline is not None
    mean = sum(step.bubble for step in found.pipeline.steps) / len(STEPS)
    said = f"zb-h1 over 2 stages with 4 microbatches has {1 / 13:.1%} in lockstep"
    page = html(page_of(found))
    assert page.count("<svg xmlns=") == 2
    assert f"measured bubble {mean:.1%}, " in page
    assert said in page
    assert f"zb-h1: step {found.pipeline.step} as it ran, in seconds" in page
    assert "zb-h1: by the schedule, in lockstep" in page
    assert page.count('">worker 1</text>') == 2
    print_breakdown(found, new_console())
    lines = capsys.readouterr().out.splitlines()
    assert [line[:8] for line in lines if line.startswith("worker ")] == ["worker 0", "worker 1"] * 2
    assert any(line.startswith(f"measured bubble {mean:.1%}, ") for line in lines)


def test_a_trace_that_does_not_show_the_schedule_is_noted(zb_h1: Window) -> None:
    """The report says among its unknown values why it has no picture; a run without stages has nothing to
    say.
    """
    given = zb_h1.trace, read(zb_h1.hlo), zb_h1.ops
    found, notes = pipeline_trace.find(*given, zb_h1.facts | {"workers": [1, 0]})
    assert found is None
    assert [
        note.startswith(f"{pipeline_trace.UNKNOWN}step {STEPS[0]}, device 0: of 12") for note in notes
    ] == [True]
    assert pipeline_trace.find(*given, None) == (None, [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "remat", "more"),
    (
        ("1f1b", "full", {}),
        ("gpipe", "none", {}),
        ("zb-h1", "none", {}),
        ("zb-h1", "full", {}),
        ("zbv", "none", {"num_layers": 4}),
        ("1f1b", "full", {"tensor": 2, "tensor_overlap": True}),
    ),
    ids=str,
)
def test_other_schedules_and_packings(schedule: str, remat: str, more: dict[str, Any]) -> None:
    """All packings with two devices per worker, two chunks, and layers that permute, which compute in every
    tick.
    """
    found = window(traced(data=2, microbatches=4, stage=2, schedule=schedule, remat=remat, **more))
    always = "tensor_overlap" in more
    assert tick_loop(read(found.hlo)).layers_always_run == always
    shown = found.found()
    assert found.facts["workers"] == sorted(found.facts["workers"])
    assert len(found.facts["workers"]) > 2
    assert_is_the_schedule(shown, found.ticks)
    if always:
        ticks = found.ticks
        assert shown.planned_bubble == pytest.approx(1 - 4 / ticks.num_ticks), "all ticks take as long"
