"""Report of a breakdown, as report.html and on a terminal.

The page embeds the whole breakdown.json; means over steps and devices are computed in `figures`.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from jtrain.pipeline.clocks import PipelineTimeline
from jtrain.pipeline.picture import svg, text_rows
from jtrain.profile.analysis import figures
from jtrain.profile.analysis.figures import comm_name, mean_step
from jtrain.profile.analysis.pipeline_trace import timeline_of
from jtrain.profile.analysis.records import Breakdown, PipelineTrack, StepBreakdown
from jtrain.profile.report.clock_chart import clock_charts
from jtrain.profile.report.lanes_section import lanes_section
from jtrain.profile.report.memory_section import live_chart, memory_table
from jtrain.profile.report.ops_section import layers_section, ops_blocks, roofline
from jtrain.profile.report.path_section import path_section
from jtrain.profile.trace_dir import part_of
from jtrain.report import charts
from jtrain.report.number_formats import number, rate, seconds, share, size
from jtrain.report.page import Items, Links, Page, PageBlock, Panels, Paragraph, Picture, Section, html
from jtrain.report.table import Bar, Bars, Cell, Facts, Table, bars, numbers, words
from jtrain.report.terminal import print_page
from jtrain.runtime.atomic_io import write_whole


def write(breakdown: Breakdown, file: Path) -> None:
    """Writes the page atomically."""
    write_whole(file, html(page_of(breakdown)))


def print_breakdown(breakdown: Breakdown, console: Console) -> None:
    """Prints the page: only the top ops by lost time, and only means of the clocks."""
    print_page(page_of(breakdown), console)


def page_of(breakdown: Breakdown) -> Page:
    """Describes the report."""
    title = f"{figures.steps_line(breakdown)} on {figures.machine_line(breakdown)}"
    # The page's numbers come from the JSON that it embeds, so that both agree to the last digit.
    facts = Facts(breakdown.to_dict())
    sections = [
        Section("waterfall", "Where a step's time went", [_waterfalls(breakdown, facts)]),
        Section(
            "advice", "What to try next", [Items(breakdown.advice, "No loss is large enough for advice.")]
        ),
        *([] if breakdown.path is None else [path_section(breakdown.path, facts)]),
        *([] if breakdown.lanes is None else [lanes_section(breakdown.lanes)]),
        *_pipeline(breakdown.pipeline, facts),
        Section("steps", "Step by step", _steps(breakdown, facts), "page"),
        Section("communication", "Communication, per step and device", _communication(breakdown, facts)),
        *layers_section(breakdown),
        Section(
            "ops", "Ops by lost time, per step and device", [*roofline(breakdown), *ops_blocks(breakdown)]
        ),
        Section("clocks", "Clocks, power and temperature over the steps", clock_charts(breakdown), "page"),
        Section("goodput", "Wall time of the whole run until this window", [_goodput(breakdown, facts)]),
        Section("devices", "Devices, mean over the steps", [_devices(breakdown)]),
        *_processes(breakdown),
        Section(
            "memory",
            "Memory of one device",
            [memory_table(breakdown, facts), *live_chart(breakdown.live, facts)],
        ),
        Section(
            "notes", "Unknown values, with the reason", [Items(breakdown.notes, "All values are known.")]
        ),
    ]
    return Page(
        title,
        sections,
        # Not capitalize(), which would write the device's name in small letters.
        heading=title[0].upper() + title[1:],
        introduction=list(filter(None, [figures.headline(breakdown), figures.peaks_line(breakdown)])),
        tiles=_tiles(breakdown, facts),
        kind="breakdown",
        content=facts.content,
        script="".join((Path(__file__).parent / name).read_text() for name in ("clock_chart.js", "lanes.js")),
    )


def processes_table(processes: Sequence[Breakdown]) -> Table:
    """Table that shows the slow process: the others spend their time waiting for it."""
    waits = ("exposed_communication", "data_wait", "host", "idle")
    names = (part.name for part in figures.PARTS if part.key in waits)
    table = Table("processes, mean over the steps", words("process") + numbers("step", "computing", *names))
    for breakdown in processes:
        step = mean_step(breakdown)
        # Computing is the remainder: a slow process shows in it, and its victims in their waits.
        waited = [step.parts.get(key) for key in waits]
        computing_s = step.duration_s - sum(part or 0.0 for part in waited)
        table.add(str(breakdown.process), *map(seconds, (step.duration_s, computing_s, *waited)))
    return table


def _tiles(breakdown: Breakdown, facts: Facts) -> list[tuple[str, str | Cell]]:
    """Key figures: step time, tokens per second, energy per token, MFU, coverage; notes say why one is missing."""
    step, joules = mean_step(breakdown), figures.joules_per_token(breakdown)
    return [
        ("step, mean", seconds(step.duration_s)),
        ("tokens per second", f"{figures.tokens_per_s(breakdown):,.0f}"),
        *([] if joules is None else [("energy per token", f"{joules:.4g} J")]),
        *((name, share(value)) for name, value in figures.mfu_shares(breakdown).items()),
        ("device time with layer and phase", facts.cell("coverage", share)),
    ]


def _waterfalls(breakdown: Breakdown, facts: Facts) -> Panels:
    """Waterfall charts of the mean step and of each step."""
    panels = {
        # The mean step is in no JSON, so its numbers have no path.
        f"mean of {len(breakdown.steps)}": _waterfall(mean_step(breakdown), lambda _, value: seconds(value))
    }
    for index, step in enumerate(breakdown.steps):
        panels[f"step {step.step}"] = _waterfall(
            # index=index for ruff (B023): a closure that was called later would see the last step.
            step,
            lambda path, _, index=index: facts.cell(f"steps.{index}.{path}", seconds),
        )
    return Panels("step", "Step:", panels)


def _waterfall(
    step: StepBreakdown, number_cell: Callable[[str, float | None], str | Cell]
) -> list[PageBlock]:
    """Waterfall chart of a step: one row per part, each bar starting where the previous one ends.

    Args:
      number_cell: makes the cell of a number at a path below the step.
    """
    columns = (
        words("part") + bars("of the step, from its start to its end", "both") + numbers("time", "share")
    )
    table = Table("parts of the step", columns, css="waterfall")
    start = 0.0
    for part in figures.parts_of(step):
        part_s = step.parts.get(part.key)
        # An unknown part has no bar, and the next one begins where it stands.
        length, of_step = (part_s or 0.0) / step.duration_s, share(part_s, step.duration_s)
        bar = Bars.single(start, length, part.key, f"{part.name}: {seconds(part_s)}, {of_step} of the step")
        table.add(
            Cell(part.name, key=part.key, note=part.meaning),
            bar,
            number_cell(f"parts.{part.key}", part_s),
            of_step,
        )
        start += length
    full_bar = Bars.single(0.0, 1.0, "whole", f"the step: {seconds(step.duration_s)}")
    table.add("step", full_bar, number_cell("duration_s", step.duration_s), "100.0%", bold=True)
    lost = ", ".join(f"{cause} {seconds(value)}" for cause, value in step.clocks_lost_s.items())
    return [
        table,
        Paragraph(f"Computing: {figures.chain_line(step)}.", "soft"),
        Paragraph(f"Lost to low clocks, by cause: {lost or 'unknown'}.", "soft"),
    ]


def _pipeline(track: PipelineTrack | None, facts: Facts) -> Iterator[Section]:
    """Section with the instructions of each worker as they ran and by the schedule; none without stages."""
    if track is None:
        return
    titles = (
        f"step {track.step} as it ran, in seconds",
        "by the schedule, in lockstep, a forward pass taking 1",
    )
    timelines = [timeline_of(rows) for rows in (track.measured, track.planned)]
    drawings = (
        svg(timeline, stages=track.stages, title=f"{track.schedule}: {title}", workers=track.workers)
        for timeline, title in zip(timelines, titles, strict=True)
    )
    frame = (
        f'<div class="frame gantt" role="region" tabindex="0" aria-label="pipeline">{"".join(drawings)}</div>'
    )

    def rows(timeline: PipelineTimeline, width: int) -> list[Text]:
        return text_rows(timeline, stages=track.stages, width=width, workers=track.workers)

    columns = words("step") + numbers("time of all ticks", "layers", "embedding and loss", "bubble")
    table = Table("pipeline by step", columns, css="few")
    for index in range(len(track.steps)):
        path = f"pipeline.steps.{index}"
        shares = (facts.cell(f"{path}.{name}", share) for name in ("instructions", "ends", "bubble"))
        table.add(facts.cell(f"{path}.step"), facts.cell(f"{path}.duration_s", seconds), *shares)
    blocks: list[PageBlock] = [
        f"{figures.pipeline_line(track)}.",
        Paragraph("In grey: chunks and microbatches in flight.", medium="page"),
        Paragraph(f"Step {track.step} as it ran, then the schedule in lockstep:", medium="terminal"),
        Picture(frame, lambda width: [line for timeline in timelines for line in rows(timeline, width)]),
        table,
    ]
    yield Section("pipeline", "Instructions of each worker", blocks)


def _processes(breakdown: Breakdown) -> Iterator[Section]:
    """Section with links to the pages of the other processes; none if the run has a single process."""
    if breakdown.num_processes > 1:
        # Process 0's page lies in the window's folder, the others in subfolders of it.
        window = Path("..") if breakdown.process else Path()
        other_processes = (i for i in range(breakdown.num_processes) if i != breakdown.process)
        links = {f"process {i}": (part_of(window, i) / "report.html").as_posix() for i in other_processes}
        yield Section("processes", "The other processes' devices", [Links(links)], "page")


def _steps(breakdown: Breakdown, facts: Facts) -> list[PageBlock]:
    """One stacked bar per step, all on the scale of the longest step."""
    longest = max(step.duration_s for step in breakdown.steps)
    has_energy = any(step.energy_j is not None for step in breakdown.steps)
    columns = words("step") + bars(f"0 to {seconds(longest)}") + numbers("time", *["energy"] * has_energy)
    table = Table("steps by part", columns, css="few")
    for i, step in enumerate(breakdown.steps):
        parts: list[Bar] = []
        start = 0.0
        for part in figures.parts_of(step):
            took = step.parts.get(part.key) or 0.0
            title = f"step {step.step}, {part.name}: {seconds(took)}, {share(took, step.duration_s)}"
            parts.append(Bar(start / longest, took / longest, part.key, title))
            start += took
        table.add(
            facts.cell(f"steps.{i}.step"),
            Bars(tuple(parts), f"step {step.step}: {seconds(step.duration_s)} by part"),
            facts.cell(f"steps.{i}.duration_s", seconds),
            *[facts.cell(f"steps.{i}.energy_j", lambda value: number(value, "J"))] * has_energy,
        )
    # Of the mean step: a part that is unknown in one step only keeps its name in the legend.
    names = {part.name: part.key for part in figures.parts_of(mean_step(breakdown))}
    return [Picture(charts.legend(names)), table]


def _communication(breakdown: Breakdown, facts: Facts) -> list[PageBlock]:
    if not breakdown.communication:
        return ["No collective ran in this window."]
    # 1.0 where every collective took no time: bars are divided by it.
    longest = max(comm.total_s for comm in breakdown.communication) or 1.0
    names = ("exposed", "total", "bytes sent", "planned", "sent/planned", "bandwidth")
    columns = words("collective") + bars(f"0 to {seconds(longest)}") + numbers(*names)
    table = Table("communication by collective and mesh axis", columns, css="many")
    for i, comm in enumerate(breakdown.communication):
        path, hidden = f"communication.{i}", comm.total_s - comm.exposed_s
        exposed_text, hidden_text = f"exposed {seconds(comm.exposed_s)}", f"hidden {seconds(hidden)}"
        parts = (
            Bar(0.0, comm.exposed_s / longest, "exposed_communication", exposed_text),
            Bar(comm.exposed_s / longest, hidden / longest, "hidden", hidden_text),
        )
        table.add(
            comm_name(comm),
            Bars(parts, f"{comm_name(comm)}: {exposed_text}, {hidden_text}"),
            facts.cell(f"{path}.exposed_s", seconds),
            facts.cell(f"{path}.total_s", seconds),
            facts.cell(f"{path}.wire_bytes", size),
            facts.cell(f"{path}.planned_bytes", size),
            f"{comm.wire_bytes / comm.planned_bytes:.2f}" if comm.planned_bytes else "unknown",
            facts.cell(f"{path}.bytes_per_s", rate),
        )
    legend = charts.legend({"exposed": "exposed_communication", "hidden behind compute": "hidden"})
    return [Picture(legend), table]


def _devices(breakdown: Breakdown) -> PageBlock:
    """Table of the devices' mean times and clocks: slow devices, and whether their clock is the cause."""
    device_means = figures.by_device(breakdown)
    if not device_means:
        return "The window has no times of devices."
    # 1.0 where no device computed: bars are divided by it.
    longest = max(device.compute_s for device in device_means) or 1.0
    names = ("computing", "communication", "exposed")
    # Quantities that no device tells have no column; the notes say why.
    sampled = {"core clock": ("mean_mhz", "MHz"), "power": ("mean_w", "W")}
    sampled = {
        name: (field, unit)
        for name, (field, unit) in sampled.items()
        if any(getattr(device, field) is not None for device in device_means)
    }
    columns = words("device") + bars(f"0 to {seconds(longest)}") + numbers(*names, *sampled)
    table = Table("devices", columns, css="many")
    for device in device_means:
        name, computing = f"device {device.device}", seconds(device.compute_s)
        table.add(
            name,
            Bars.single(0.0, device.compute_s / longest, "utilisation", f"{name}: {computing}"),
            computing,
            seconds(device.communication_s),
            seconds(device.exposed_communication_s),
            *(number(getattr(device, field), unit) for field, unit in sampled.values()),
        )
    return table


def _goodput(breakdown: Breakdown, facts: Facts) -> Table:
    """Table of the wall time of all attempts by goodput category."""
    wall_s = sum(breakdown.goodput.values())
    columns = words("category") + bars(f"0 to {seconds(wall_s)}") + numbers("time", "share")
    table = Table("goodput", columns, css="few")
    for key, name, spent in figures.by_category(breakdown):
        bar = Bars.single(0.0, spent / wall_s, "utilisation", f"{name}: {seconds(spent)}")
        table.add(name, bar, facts.cell(f"goodput.{key}", seconds), share(spent, wall_s))
    return table
