"""HTML report of a breakdown: report.html, one self-contained file that loads nothing over the network.

The file embeds the whole breakdown.json. Every displayed number of breakdown.json is a `<data>` element with its path
and all its digits; means over steps and devices are computed in `figures`.
"""

import json
from pathlib import Path

from jtrain.pipeline import picture
from jtrain.profile.analysis import figures
from jtrain.profile.analysis.figures import comm_name, mean_step, per_step, rate, seconds, share, size
from jtrain.profile.analysis.pipeline_trace import timeline_of
from jtrain.profile.analysis.records import Breakdown, OpRow, PipelineTrack, StepBreakdown
from jtrain.profile.report.page.clock_chart import timeline
from jtrain.profile.report.page.markup import (
    cell,
    data,
    document,
    embedded,
    options,
    rect,
    row,
    section,
    svg,
    table,
    text,
)
from jtrain.profile.report.page.memory_chart import live_chart
from jtrain.profile.trace_dir import part_of
from jtrain.runtime.atomic_io import write_whole

MOST_OPS = 400
"""Maximum rows of the table of ops: those that lose most; breakdown.json has all."""

FIRST_OPS = 25
"""Rows of the table of ops that are shown at first."""

_FILES = Path(__file__).parent / "page"


def write(breakdown: Breakdown, file: Path) -> None:
    """Writes the page atomically."""
    write_whole(file, page(breakdown))


def page(breakdown: Breakdown) -> str:
    """Returns the page as HTML."""
    kind = figures.machine_line(breakdown)
    steps = figures.steps_line(breakdown)
    sections = (
        section("waterfall", "Where a step's time went", *_waterfalls(breakdown)),
        section("advice", "What to try next", _listed(breakdown.advice, "No loss is large enough for advice.")),
        *_pipeline(breakdown.pipeline),
        section("steps", "Step by step", *_steps(breakdown)),
        section("communication", "Communication", _communication(breakdown)),
        _ops(breakdown),
        section("clocks", "Clocks, power and temperature over the steps", timeline(breakdown)),
        section("goodput", "Wall time of the whole run until this window", _goodput(breakdown)),
        section("devices", "Devices, mean over the steps", _devices(breakdown)),
        *_processes(breakdown),
        section("memory", "Memory of one device", _memory(breakdown), live_chart(breakdown.live)),
        section("notes", "Unknown values, with the reason", _listed(breakdown.notes, "All values are known.")),
    )
    return document(
        f"{steps} on {kind}",
        f"<main>\n<h1>{text(steps[0].upper() + steps[1:])} on {text(kind)}</h1>\n"
        f'<p id="headline">{text(figures.headline(breakdown))}</p>\n{_figures(breakdown)}\n{"".join(sections)}'
        f"</main>\n{embedded('breakdown', json.dumps(breakdown.to_dict()))}\n"
        f"<script>{(_FILES / 'page.js').read_text()}</script>",
    )


def _pipeline(track: PipelineTrack | None) -> list[str]:
    """Section with the instructions of each worker as they ran and by the schedule; none without stages."""
    if track is None:
        return []
    steps: list[str] = []
    for i, step in enumerate(track.steps):
        at = f"pipeline.steps.{i}"
        shares = [(name, getattr(step, name)) for name in ("instructions", "ends", "bubble")]
        cells = [cell(data(f"{at}.{name}", value, share(value, 1.0)), css="number") for name, value in shares]
        took = cell(data(f"{at}.duration_s", step.duration_s, seconds(step.duration_s)), css="number")
        steps.append(row(cell(data(f"{at}.step", step.step, str(step.step)), header=True), took, *cells))
    titles = f"step {track.step} as it ran, in seconds", "by the schedule, in lockstep, a forward pass taking 1"
    drawn = (
        picture.svg(timeline_of(rows), stages=track.stages, title=f"{track.schedule}: {title}", workers=track.workers)
        for rows, title in zip((track.measured, track.planned), titles, strict=True)
    )
    names = ("time of all ticks", "layers", "embedding and loss", "bubble")
    said = f"<p>{text(figures.pipeline_line(track))}. In grey: chunks and microbatches in flight.</p>"
    gantts = f'<div class="frame gantt" role="region" tabindex="0" aria-label="pipeline">{"".join(drawn)}</div>'
    columns = (("step", ""), *((name, "number") for name in names))
    listed = table(columns, steps, "pipeline by step", css="few")
    return [section("pipeline", "Instructions of each worker", said, gantts, listed)]


def _processes(breakdown: Breakdown) -> list[str]:
    """Section with links to the pages of the other processes; none if the run has a single process."""
    if breakdown.num_processes == 1:
        return []
    window = Path("..") if breakdown.process else Path()
    others = (i for i in range(breakdown.num_processes) if i != breakdown.process)
    links = (f'<a href="{(part_of(window, i) / "report.html").as_posix()}">process {i}</a>' for i in others)
    return [section("processes", "The other processes' devices", f"<p>{', '.join(links)}</p>")]


def _listed(lines: list[str], nothing: str) -> str:
    if not lines:
        return f"<p>{text(nothing)}</p>"
    return f"<ul>{''.join(f'<li>{text(line)}</li>' for line in lines)}</ul>"


def _figures(breakdown: Breakdown) -> str:
    """Key figures: step time, tokens per second, energy per token, MFU, coverage."""
    step = mean_step(breakdown)
    joules = figures.joules_per_token(breakdown)
    found = [
        ("step, mean", seconds(step.duration_s)),
        ("tokens per second", f"{figures.tokens_per_s(breakdown):,.0f}"),
        ("energy per token", "unknown" if joules is None else f"{joules:.4g} J"),
    ]
    found += [(f"MFU, {what}", share(step.mfu.get(key), 1.0)) for key, what in figures.MFU.items()]
    covered = data("coverage", breakdown.coverage, share(breakdown.coverage, 1.0))
    cells = [f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in found]
    cells.append(f"<div><dt>device time with layer and phase</dt><dd>{covered}</dd></div>")
    return f'<dl id="figures">{"".join(cells)}</dl>'


def _waterfalls(breakdown: Breakdown) -> list[str]:
    """Waterfall charts of the mean step and of each step; the page shows one at a time."""
    names = [f"mean of {len(breakdown.steps)}", *(f"step {step.step}" for step in breakdown.steps)]
    shown = [_waterfall(mean_step(breakdown), "mean", 0)]
    shown += [_waterfall(step, f"steps.{i}", i + 1) for i, step in enumerate(breakdown.steps)]
    return [f'<p class="choose">{options("step", "Step:", names)}</p>', *shown]


def _waterfall(step: StepBreakdown, path: str, index: int) -> str:
    """Waterfall chart of a step: one row per part, each bar starting where the previous one ends.

    Args:
      path: path of the step in breakdown.json; "mean" for the mean step, which is not in there.
    """

    def exact(where: str, value: int | float | None) -> str:
        shown = seconds(value)
        return text(shown) if path == "mean" else data(f"{path}.{where}", value, shown)

    rows, at = [], 0.0
    for part in figures.parts_of(step):
        took = step.parts.get(part.key)
        length = (took or 0.0) / step.duration_s
        of_step = share(took, step.duration_s)
        name = f'<i class="key {part.key}"></i>{part.name}<br><small>{part.meaning}</small>'
        bar = svg(rect(at, length, part.key), f"{part.name}: {seconds(took)}, {of_step} of the step")
        rows.append(
            row(
                cell(name, header=True),
                cell(bar, css="bar"),
                cell(exact(f"parts.{part.key}", took), css="number"),
                cell(of_step, css="number"),
            )
        )
        at += length
    whole = svg(rect(0.0, 1.0, "whole"), f"the step: {seconds(step.duration_s)}")
    ends = cell(exact("duration_s", step.duration_s), css="number"), cell("100.0%", css="number")
    rows.append(row(cell("step", header=True), cell(whole, css="bar"), *ends, css="whole"))
    lost = ", ".join(
        f"{text(cause)} {exact(f'clocks_lost_s.{cause}', value)}" for cause, value in step.clocks_lost_s.items()
    )
    columns = (("part", ""), ("of the step, from its start to its end", ""), ("time", "number"), ("share", "number"))
    hidden = " hidden" if index else ""
    return (
        f'<div data-waterfall="{index}"{hidden}>{table(columns, rows, "parts of the step", css="waterfall")}'
        f'<p class="soft">Computing: {text(figures.chain_line(step))}.</p>'
        f'<p class="soft">Lost to low clocks, by cause: {lost or "unknown"}.</p></div>'
    )


def _steps(breakdown: Breakdown) -> list[str]:
    """One stacked bar per step, all on the scale of the longest step."""
    longest, parts = max(step.duration_s for step in breakdown.steps), figures.parts_of(mean_step(breakdown))
    rows = []
    for i, step in enumerate(breakdown.steps):
        bars, at = [], 0.0
        for part in figures.parts_of(step):
            took = step.parts.get(part.key) or 0.0
            words = f"step {step.step}, {part.name}: {seconds(took)}, {share(took, step.duration_s)}"
            bars.append(rect(at / longest, took / longest, part.key, title=words))
            at += took
        bar = svg("".join(bars), f"step {step.step}: {seconds(step.duration_s)} by part")
        joules = data(f"steps.{i}.energy_j", step.energy_j, figures.number(step.energy_j, "J"))
        rows.append(
            row(
                cell(data(f"steps.{i}.step", step.step, str(step.step)), header=True),
                cell(bar, css="bar"),
                cell(data(f"steps.{i}.duration_s", step.duration_s, seconds(step.duration_s)), css="number"),
                cell(joules, css="number"),
            )
        )
    legend = "".join(f'<li><i class="key {part.key}"></i>{part.name}</li>' for part in parts)
    columns = (("step", ""), (f"0 to {seconds(longest)}", ""), ("time", "number"), ("energy", "number"))
    return [f'<ul class="legend">{legend}</ul>', table(columns, rows, "steps by part", css="few")]


def _communication(breakdown: Breakdown) -> str:
    if not breakdown.communication:
        return "<p>No collective ran in this window.</p>"
    longest = max(comm.total_s for comm in breakdown.communication) or 1.0
    rows = []
    for i, comm in enumerate(breakdown.communication):
        at, hidden = f"communication.{i}", comm.total_s - comm.exposed_s
        words = f"{comm_name(comm)}: exposed {seconds(comm.exposed_s)}, hidden {seconds(hidden)}"
        bars = rect(0.0, comm.exposed_s / longest, "exposed_communication", title=f"exposed {seconds(comm.exposed_s)}")
        bars += rect(comm.exposed_s / longest, hidden / longest, "hidden", title=f"hidden {seconds(hidden)}")
        ratio = f"{comm.wire_bytes / comm.planned_bytes:.2f}" if comm.planned_bytes else "unknown"
        rows.append(
            row(
                cell(text(comm_name(comm)), header=True),
                cell(svg(bars, words), css="bar"),
                cell(data(f"{at}.exposed_s", comm.exposed_s, seconds(comm.exposed_s)), css="number"),
                cell(data(f"{at}.total_s", comm.total_s, seconds(comm.total_s)), css="number"),
                cell(data(f"{at}.wire_bytes", comm.wire_bytes, size(comm.wire_bytes)), css="number"),
                cell(data(f"{at}.planned_bytes", comm.planned_bytes, size(comm.planned_bytes)), css="number"),
                cell(ratio, css="number"),
                cell(data(f"{at}.bytes_per_s", comm.bytes_per_s, rate(comm.bytes_per_s)), css="number"),
            )
        )
    names = ("exposed", "total", "bytes sent", "planned", "sent/planned", "bandwidth")
    columns = (("collective", ""), (f"0 to {seconds(longest)}", ""), *((name, "number") for name in names))
    return (
        '<ul class="legend"><li><i class="key exposed_communication"></i>exposed</li>'
        '<li><i class="key hidden"></i>hidden behind compute</li><li>per step and device</li></ul>'
        + table(columns, rows, "communication by collective and mesh axis", css="many")
    )


def _ops(breakdown: Breakdown) -> str:
    """Table of ops, in seconds per step and device."""
    if not breakdown.ops:
        return section("ops", "Ops by lost time", "<p>No op was traced in this window.</p>")
    duration_s = mean_step(breakdown).duration_s
    kept = sorted(breakdown.ops, key=lambda op: -op.lost_s)[:MOST_OPS]
    numbers = ("lost", "of step", "total", "at peak", "clock", "count")
    columns = [(name, "sortable") for name in ("op", "main cause", "layer", "phase")]
    columns[1:1] = [(name, "sortable number") for name in numbers[:2]]
    columns += [(name, "sortable number") for name in numbers[2:]]
    body = table(columns, (_op_row(breakdown, op, duration_s) for op in kept), "ops", css="ops", id="ops-table")
    lost = sum(op.lost_s for op in breakdown.ops)
    said = f"Per step and device. {len(breakdown.ops):,} ops lose {seconds(per_step(breakdown, lost))}."
    if len(kept) < len(breakdown.ops):
        of_it = share(sum(op.lost_s for op in kept), lost)
        said += f" The table has the {len(kept)} that lose most, {of_it} of the lost time; breakdown.json has all."
    more = f'<p><button type="button" id="more-ops">show all {len(kept)}</button></p>'
    inside = f'<p class="soft">{said}</p>{body}{more}</section>\n'
    return f'<section id="ops" aria-labelledby="ops-title" data-limit="{FIRST_OPS}"><h2 id="ops-title">' + (
        f"Ops by lost time</h2>{inside}"
    )


def _op_row(breakdown: Breakdown, op: OpRow, duration_s: float) -> str:
    def took(value: float | None) -> str:
        each = None if value is None else per_step(breakdown, value)
        return cell(seconds(each), css="number", sort=-1.0 if each is None else each)

    lost = per_step(breakdown, op.lost_s)
    count = op.count / (len(breakdown.steps) * breakdown.num_devices)
    return row(
        cell(f'<span title="{text(op.opcode)}">{text(op.name)}</span>', header=True, sort=op.name),
        took(op.lost_s),
        cell(share(lost, duration_s), css="number", sort=lost),
        cell(text(figures.main_cause(op) or "nothing"), sort=figures.main_cause(op)),
        cell(text(op.layer or "unknown"), sort=op.layer),
        cell(text(op.phase), sort=op.phase),
        took(op.total_s),
        took(op.theoretical_s),
        cell(figures.number(op.mean_mhz, "MHz"), css="number", sort=op.mean_mhz or -1.0),
        cell(f"{count:,.3g}", css="number", sort=count),
    )


def _devices(breakdown: Breakdown) -> str:
    """Table of the devices' mean times and clocks, which shows slow devices and whether their clock is the cause."""
    found = figures.by_device(breakdown)
    if not found:
        return "<p>The window has no times of devices.</p>"
    longest = max(device.compute_s for device in found) or 1.0
    rows = [
        row(
            cell(f"device {device.device}", header=True),
            cell(
                svg(rect(0.0, device.compute_s / longest, "utilisation"), f"device {device.device} computing"),
                css="bar",
            ),
            *(
                cell(words, css="number")
                for words in (
                    seconds(device.compute_s),
                    seconds(device.communication_s),
                    seconds(device.exposed_communication_s),
                    figures.number(device.mean_mhz, "MHz"),
                    figures.number(device.mean_w, "W"),
                )
            ),
        )
        for device in found
    ]
    names = ("computing", "communication", "exposed", "SM clock", "power")
    columns = (("device", ""), (f"0 to {seconds(longest)}", ""), *((name, "number") for name in names))
    return table(columns, rows, "devices", css="many")


def _goodput(breakdown: Breakdown) -> str:
    """Table of the wall time of all attempts by goodput category."""
    wall_s = sum(breakdown.goodput.values())
    rows = [
        row(
            cell(text(name), header=True),
            cell(svg(rect(0.0, spent / wall_s, "utilisation"), f"{name}: {seconds(spent)}"), css="bar"),
            cell(data(f"goodput.{key}", spent, seconds(spent)), css="number"),
            cell(share(spent, wall_s), css="number"),
        )
        for key, name, spent in figures.by_category(breakdown)
    ]
    columns = (("category", ""), (f"0 to {seconds(wall_s)}", ""), ("time", "number"), ("share", "number"))
    return table(columns, rows, "goodput", css="few")


def _memory(breakdown: Breakdown) -> str:
    if not breakdown.memory:
        return "<p>Unknown: neither the plan nor the allocator reports memory.</p>"
    planned = sum(memory.bytes for memory in breakdown.memory if memory.source == "plan")
    most = max(planned, *(memory.bytes for memory in breakdown.memory)) or 1
    rows, at = [], 0
    for i, memory in enumerate(breakdown.memory):
        start = at if memory.source == "plan" else 0
        bar = rect(start / most, memory.bytes / most, "memory")
        rows.append(
            row(
                cell(text(memory.name), header=True),
                cell(svg(bar, f"{memory.name}: {size(memory.bytes)}"), css="bar"),
                cell(data(f"memory.{i}.bytes", memory.bytes, size(memory.bytes)), css="number"),
                cell("planned" if memory.source == "plan" else "allocator"),
            )
        )
        at += memory.bytes if memory.source == "plan" else 0
    columns = (("class", ""), (f"0 to {size(most)}", ""), ("bytes", "number"), ("source", ""))
    return table(columns, rows, "memory by class")
