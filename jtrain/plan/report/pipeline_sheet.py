"""A pipeline schedule as figures, as JSON and on the terminal; several schedules as a table."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from jtrain.pipeline.checker import check, needed_capacity
from jtrain.pipeline.clocks import Costs, PipelineTimeline, dataflow, equal_costs, messages
from jtrain.pipeline.instructions import PipelineProgram
from jtrain.pipeline.picture import MEANINGS, memory_rows, text_rows
from jtrain.pipeline.schedule import PipelineSchedule
from jtrain.pipeline.tick_counts import count_ticks, shortest
from jtrain.pipeline.tick_grid import pack
from jtrain.pipeline.ticks import Ticks, make_ticks
from jtrain.report.number_formats import gib
from jtrain.report.page import Folded, Page, Picture, Section, Title
from jtrain.report.table import Table, numbers, words
from jtrain.report.terminal import print_blocks

if TYPE_CHECKING:
    from jtrain.plan.pipeline_choice import PipelinePlan  # it imports jax, which takes seconds
    from jtrain.plan.search_task import Point


@dataclasses.dataclass(frozen=True)
class ScheduleView:
    """A schedule with everything that is shown of it.

    costs: times of a chunk's operations. flow: its timeline under the dataflow clock.
    ticks: its packing in one SPMD program; bubble: the fraction of the time in which a worker then waits.
    point: the plan of a run with this schedule; None without a config.
    """

    schedule: PipelineSchedule
    program: PipelineProgram
    costs: Costs
    flow: PipelineTimeline
    ticks: Ticks
    bubble: float
    point: "Point | None" = None


def show(schedule: PipelineSchedule, times: tuple[float, float, float]) -> ScheduleView:
    """Checks and simulates a schedule, in its best packing.

    Args:
      times: F, I and W of a chunk.

    Raises:
      UserError: the schedule is invalid.
    """
    program = check(schedule)
    costs = equal_costs(schedule, *times)
    # Only counts ticks: building them for every packing takes longer.
    counts = shortest(lambda packing: count_ticks(pack(schedule, packing)), *times)
    ticks = make_ticks(schedule, counts.packing)
    return ScheduleView(schedule, program, costs, dataflow(schedule, costs), ticks, counts.bubble(*times))


def show_planned(schedule: PipelineSchedule, planned: "PipelinePlan") -> ScheduleView:
    """Checks a schedule and simulates it with the costs of a plan, in the packing that the run would have.

    Raises:
      UserError: the schedule is invalid, or the config cannot run under it.
    """
    from jtrain.step.pipeline_ticks import ticks_of  # imported here because it imports jax

    # Checked before the plan, whose errors are about the config.
    program, point = check(schedule), planned.point(schedule)
    assert point.timed is not None
    costs, ticks = point.timed.costs, ticks_of(point.job.layout)
    assert costs is not None
    # Of one worker: every chunk runs each microbatch once.
    busy_s = (
        schedule.microbatches * schedule.chunks * (costs.forward[0] + costs.by_input[0] + costs.by_weight[0])
    )
    # A fraction of the pipeline's time, without the network's waits.
    bubble = point.timed.bubble_s / (point.timed.bubble_s + busy_s)
    return ScheduleView(schedule, program, costs, dataflow(schedule, costs), ticks, bubble, point)


def to_json(view: ScheduleView) -> dict[str, Any]:
    """The object that `--json` writes: bubble of stages on their own, peak and instructions per worker.

    A peak is the most chunks and microbatches in flight: past F and before their last backward pass.
    """
    return {
        "bubble": view.flow.bubble,
        "peak_buffers": list(view.flow.peaks),
        "instructions": [[str(instruction) for instruction in program] for program in view.program.workers],
    }


def print_one(view: ScheduleView, console: Console) -> None:
    """Prints the picture, memory over time, bubbles, buffers and messages of one schedule."""
    schedule = view.schedule
    legend = ", ".join(f"{kind} {meaning}" for kind, meaning in MEANINGS.items())
    title = (
        f"{schedule.name}: {schedule.stages} stages, {schedule.microbatches} microbatches, {schedule.chunks} "
        f"chunks per worker. {legend}; lower case: later chunks"
    )
    picture = Picture("", lambda width: text_rows(view.flow, stages=schedule.stages, width=width))
    in_flight = Picture("", lambda width: memory_rows(view.flow, width=width))
    # The same figures as on the page.
    lines = (f"{name}: {value}" for name, value in figures(view))
    print_blocks([Title(title), picture, Title("in flight over time"), in_flight, *lines], console)


def page_of(view: ScheduleView, title: str, picture: str) -> Page:
    """Describes the page of one schedule: the picture, figures by name, and each worker's instructions."""
    table = Table("figures", words("figure", "value"))
    for name, value in figures(view):
        table.add(name, value)
    programs = to_json(view)["instructions"]
    # Folded, because a large schedule has thousands of instructions.
    lists = [
        Folded(f"worker {worker}: {len(program)} instructions", " ".join(program))
        for worker, program in enumerate(programs)
    ]
    frame = f'<div class="frame gantt" role="region" tabindex="0" aria-label="schedule">{picture}</div>'
    sections = [Section("figures", "Figures", [table]), Section("instructions", "Instructions", lists)]
    return Page(title, sections, introduction=[Picture(frame)], kind="schedule", content=to_json(view))


def figures(view: ScheduleView) -> list[tuple[str, str]]:
    """Names and values of what is known of a schedule."""
    # Messages by pair of workers.
    program, ticks, sent = view.program, view.ticks, messages(view.schedule)
    per_step = f"{max(sent.values(), default=0)} messages between two workers, {sum(sent.values())} in all"
    rows = [
        ("bubble, stages on their own", f"{view.flow.bubble:.4g}"),
        (
            "bubble, one SPMD program",
            f"{view.bubble:.4g}, in {ticks.num_ticks} ticks packed as `{ticks.packing}`",
        ),
        ("in flight, per worker", _listed(view.flow.peaks)),
        ("input slots", f"{_listed(program.inputs)}; in lockstep {_listed(ticks.inputs)}"),
        ("cotangent slots", f"{_listed(program.cotangents)}; in lockstep {_listed(ticks.cotangents)}"),
        ("slots for W", f"{_listed(program.stashes)}; in lockstep {_listed(ticks.stashes)}"),
        ("messages that a channel must hold", str(needed_capacity(view.schedule))),
        ("messages per step", per_step),
    ]
    if view.point is not None:
        from jtrain.plan.pipeline_choice import sent_bytes  # imported here because it imports jax

        costs, (message, permuted) = view.costs, sent_bytes(view.point)
        passes = (costs.forward[0], costs.by_input[0], costs.by_weight[0])
        pass_times = " / ".join(f"{seconds * view.schedule.chunks * 1e3:,.3g}" for seconds in passes)
        # A pair of workers sends a chunk's activations in each message.
        max_sent_bytes = max(sent.values(), default=0) * message
        rows += [
            (
                "F / I / W of a stage",
                f"{pass_times} ms per microbatch; a message {costs.message * 1e3:,.3g} ms",
            ),
            (
                "bytes between stages",
                f"{gib(max_sent_bytes)} GiB per step and device, at most, each way; permutes after every "
                f"tick send {gib(permuted)} GiB in all",
            ),
            ("memory", f"{gib(view.point.plan.total_bytes)} GiB per device, on all stages"),
            ("step", f"{view.point.step_s:,.4g} s, predicted, not measured"),
        ]
    return rows


def _listed(counts: Sequence[int]) -> str:
    return " ".join(map(str, counts))


def print_comparison(views: Sequence[ScheduleView], planned: "PipelinePlan | None", console: Console) -> None:
    """Prints a row per schedule, the best first, and says which to take."""
    ranked = sorted(views, key=lambda view: _rank(view, planned))
    schedule = ranked[0].schedule
    size_text = f"{schedule.stages} stages, {schedule.microbatches} microbatches"
    names = [
        "chunks",
        "bubble alone",
        "bubble SPMD",
        "packing",
        "ticks",
        "in flight",
        "inputs",
        "for W",
        "messages",
    ]
    names += [] if planned is None else ["step s", "GiB"]
    table = Table(
        size_text if planned is None else f"{planned.title}: {size_text}", words("schedule") + numbers(*names)
    )
    for view in ranked:
        ticks = view.ticks
        cells = [str(view.schedule.chunks), f"{view.flow.bubble:.3f}", f"{view.bubble:.3f}", ticks.packing]
        cells += [str(ticks.num_ticks), str(max(view.flow.peaks)), str(ticks.num_inputs)]
        cells += [str(ticks.num_stashes), str(sum(messages(view.schedule).values()))]
        if view.point is not None:
            cells += [f"{view.point.step_s:,.4g}", gib(view.point.plan.total_bytes)]
        table.add(view.schedule.name, *cells)
    meanings = (
        "bubble alone: every stage runs on its own; bubble SPMD: one program in lockstep, as jtrain runs it, "
        "in the best packing. In flight, inputs and slots for W: chunks on the fullest worker, the last two "
        "in lockstep."
    )
    print_blocks([table, meanings, _advice(ranked, planned)], console)


def _rank(view: ScheduleView, planned: "PipelinePlan | None") -> tuple[Any, ...]:
    """Sorts by the bubble or the plan's seconds, then by slots; schedules that do not fit come last."""
    # A slot is of one chunk, which has 1 / chunks of a stage's layers.
    slots = (view.ticks.num_inputs + view.ticks.num_stashes) / view.schedule.chunks
    # Without a plan there are no seconds, so the bubble decides.
    if planned is None or view.point is None:
        return view.bubble, slots
    return not planned.fits(view.point), view.point.step_s, slots


def _advice(ranked: Sequence[ScheduleView], planned: "PipelinePlan | None") -> str:
    """Says which schedule to take, and whether a pipeline is better than ZeRO-3 alone."""
    best = ranked[0]
    name = best.schedule.name
    if planned is None or best.point is None:
        return (
            f"take {name}: the smallest bubble in lockstep, {best.bubble:.3f}. Give CONFIG and --device for "
            "seconds, memory, and a comparison with ZeRO-3 alone, which wins where its gathers hide behind "
            "the layers."
        )
    # Schedules that fit come first, so if the best does not fit, none does.
    if not planned.fits(best.point):
        return (
            f"no schedule fits: {name} needs {gib(best.point.plan.total_bytes)} GiB per device of "
            f"{gib(planned.task.budget_bytes)} that a plan may take. Raise --stages or --count, or set "
            f"layout.remat=full. {planned.alone_line(None)}"
        )
    return f"take {name} of the pipelines. {planned.alone_line(best.point)}"
