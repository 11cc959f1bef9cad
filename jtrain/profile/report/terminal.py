"""Terminal report of a breakdown: the tables and sentences of the HTML page, with bars of block characters."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jtrain.pipeline.picture import text_rows
from jtrain.profile.analysis import figures
from jtrain.profile.analysis.figures import comm_name, mean_step, per_step, rate, seconds, share, size
from jtrain.profile.analysis.pipeline_trace import timeline_of
from jtrain.profile.analysis.records import Breakdown, PipelineTrack

BAR = 30
"""Width of the bar of a whole step, in characters."""

TOP_OPS = 15


def new_console() -> Console:
    """Console as wide as the terminal, or 110 columns if the output is not a terminal."""
    return Console(width=None if Console().is_terminal else 110)


def new_table(left: Sequence[str], right: Sequence[str]) -> Table:
    """Plain table with the columns `left` for text and `right` for numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0, collapse_padding=True)
    for name in left:
        table.add_column(Text(name), overflow="fold")
    for name in right:
        table.add_column(Text(name), justify="right", no_wrap=True)
    return table


def bar(start: float, length: float, width: int = BAR) -> str:
    """Bar of a waterfall chart in text; start and length are shares of `width`, the smallest bar is a thin line."""
    first, last = round(start * width), round((start + length) * width)
    return " " * first + ("█" * (last - first) or "▏" * (length > 0))


def print_breakdown(breakdown: Breakdown, console: Console) -> None:
    """Prints what the HTML page shows: only the top ops by lost time, and only means of the clocks."""
    steps = figures.steps_line(breakdown)
    _title(console, f"{steps[0].upper() + steps[1:]} on {figures.machine_line(breakdown)}")
    _say(console, figures.headline(breakdown))
    _say(console, _known_by(breakdown))
    _print_pipeline(breakdown.pipeline, console)
    for title, table in (
        ("where a step's time went", _parts(breakdown)),
        ("communication, per step and device", _communication(breakdown)),
        (f"ops by lost time, per step and device: {_top(breakdown)}", _ops(breakdown)),
        ("wall time of the whole run until this window", _goodput(breakdown)),
        ("devices, mean over the steps", _devices(breakdown)),
        ("memory of one device", _memory(breakdown)),
    ):
        if table.row_count:
            _title(console, title)
            console.print(table)
    for title, lines in (
        ("what to try next", breakdown.advice),
        ("unknown values, with the reason", breakdown.notes),
    ):
        if lines:
            _title(console, title)
            for line in lines:
                _say(console, f"- {line}")


def _print_pipeline(track: PipelineTrack | None, console: Console) -> None:
    """Prints the instructions of each worker as they ran, and below them the schedule's."""
    if track is None:
        return
    _title(console, f"instructions of each worker: step {track.step} as it ran, then the schedule in lockstep")
    for rows in (track.measured, track.planned):
        drawn = text_rows(timeline_of(rows), stages=track.stages, width=console.width, workers=track.workers)
        for line in drawn:
            console.print(line, no_wrap=True, crop=True)
    _say(console, f"{figures.pipeline_line(track)}.")


def print_processes(processes: Sequence[Breakdown], console: Console) -> None:
    """Prints a table that shows the slow process: the others spend their time waiting for it."""
    waits = ("exposed_communication", "data_wait", "host", "idle")
    table = new_table(("process",), ("step", "computing", *(part.name for part in figures.PARTS if part.key in waits)))
    for breakdown in processes:
        step = mean_step(breakdown)
        waited = [step.parts.get(key) for key in waits]
        computing_s = step.duration_s - sum(part or 0.0 for part in waited)
        table.add_row(str(breakdown.process), *map(seconds, (step.duration_s, computing_s, *waited)))
    _title(console, "processes, mean over the steps")
    console.print(table)


def _title(console: Console, words: str) -> None:
    console.print(Text(words, style="bold"))


def _say(console: Console, words: str) -> None:
    console.print(Text(words))


def _known_by(breakdown: Breakdown) -> str:
    step = mean_step(breakdown)
    joules = figures.joules_per_token(breakdown)
    energy = "J per token unknown" if joules is None else f"{joules:.4g} J per token"
    known = {what: step.mfu.get(key) for key, what in figures.MFU.items()}
    mfu = ", ".join(f"{share(value, 1.0)} {what}" for what, value in known.items() if value is not None) or "unknown"
    lost = ", ".join(f"{cause} {seconds(value)}" for cause, value in step.clocks_lost_s.items()) or "unknown"
    return (
        f"{figures.tokens_per_s(breakdown):,.0f} tokens/s, {energy}; MFU {mfu}\n"
        f"computing: {figures.chain_line(step)}\n"
        f"lost to low clocks, by cause: {lost}\n"
        f"{share(breakdown.coverage, 1.0)} of device time has a layer and a phase"
    )


def _parts(breakdown: Breakdown) -> Table:
    step = mean_step(breakdown)
    table = new_table(("part", "from the step's start to its end"), ("time", "share"))
    at = 0.0
    for part in figures.parts_of(step):
        took = step.parts.get(part.key)
        length = (took or 0.0) / step.duration_s
        table.add_row(part.name, bar(at, length), seconds(took), share(took, step.duration_s))
        at += length
    table.add_row(
        "step", bar(0.0, 1.0), seconds(step.duration_s), share(step.duration_s, step.duration_s), style="bold"
    )
    return table


def _communication(breakdown: Breakdown) -> Table:
    table = new_table(("collective",), ("exposed", "total", "sent", "planned", "sent/planned", "bandwidth"))
    for row in breakdown.communication:
        ratio = f"{row.wire_bytes / row.planned_bytes:.2f}" if row.planned_bytes else "unknown"
        sizes = size(row.wire_bytes), size(row.planned_bytes), ratio, rate(row.bytes_per_s)
        table.add_row(comm_name(row), seconds(row.exposed_s), seconds(row.total_s), *sizes)
    return table


def _top(breakdown: Breakdown) -> str:
    return f"the first {min(TOP_OPS, len(breakdown.ops))} of {len(breakdown.ops)}"


def _ops(breakdown: Breakdown) -> Table:
    duration_s = mean_step(breakdown).duration_s
    table = new_table(("op", "where", "main cause"), ("lost", "of step", "total", "clock"))
    for op in sorted(breakdown.ops, key=lambda op: -op.lost_s)[:TOP_OPS]:
        lost = per_step(breakdown, op.lost_s)
        words = op.name, figures.where(op), figures.main_cause(op) or "nothing"
        clock = figures.number(op.mean_mhz, "MHz")
        table.add_row(*words, seconds(lost), share(lost, duration_s), seconds(per_step(breakdown, op.total_s)), clock)
    return table


def _goodput(breakdown: Breakdown) -> Table:
    table = new_table(("category",), ("time", "share"))
    wall_s = sum(breakdown.goodput.values())
    for _, name, spent in figures.by_category(breakdown):
        table.add_row(name, seconds(spent), share(spent, wall_s))
    return table


def _devices(breakdown: Breakdown) -> Table:
    table = new_table(("device",), ("computing", "communication", "exposed", "SM clock", "power"))
    for device in figures.by_device(breakdown):
        times = device.compute_s, device.communication_s, device.exposed_communication_s
        clock = figures.number(device.mean_mhz, "MHz"), figures.number(device.mean_w, "W")
        table.add_row(str(device.device), *map(seconds, times), *clock)
    return table


def _memory(breakdown: Breakdown) -> Table:
    table = new_table(("class", "source"), ("bytes",))
    for row in breakdown.memory:
        table.add_row(row.name, "planned" if row.source == "plan" else "allocator", size(row.bytes))
    return table
