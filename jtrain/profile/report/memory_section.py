"""Section of a profile's page on memory: planned classes of arrays, and temporaries over a step."""

from jtrain.profile.analysis.figures import op_location
from jtrain.profile.analysis.records import Breakdown, LiveTrack
from jtrain.report import charts
from jtrain.report.number_formats import seconds, size
from jtrain.report.page import PageBlock, Paragraph, Picture
from jtrain.report.table import Bars, Cell, Facts, Table, bars, numbers, words


def memory_table(breakdown: Breakdown, facts: Facts) -> PageBlock:
    """Table of a device's memory: classes of arrays by the plan, and the bytes that the allocator reports."""
    if not breakdown.memory:
        return "Unknown: neither the plan nor the allocator reports memory."
    planned = sum(memory.bytes for memory in breakdown.memory if memory.source == "plan")
    # Planned classes are stacked, as they are in memory together; the allocator's rows stand alone.
    largest_bytes = max(planned, *(memory.bytes for memory in breakdown.memory)) or 1
    table = Table(
        "memory by class",
        words("class") + bars(f"0 to {size(largest_bytes)}") + numbers("bytes") + words("source"),
    )
    start = 0
    for i, memory in enumerate(breakdown.memory):
        is_planned = memory.source == "plan"
        name = f"{memory.name}: {size(memory.bytes)}"
        bar = Bars.single(
            start / largest_bytes if is_planned else 0.0, memory.bytes / largest_bytes, "memory", name
        )
        source = "planned" if is_planned else "allocator"
        table.add(memory.name, bar, facts.cell(f"memory.{i}.bytes", size), source)
        # The next planned class begins where this one ends.
        start += memory.bytes if is_planned else 0
    return table


def _largest_table(live: LiveTrack, facts: Facts) -> Table:
    """The largest temporaries at the peak: what to recompute, shard or move to the host."""
    columns = words("at the peak", "made in") + numbers("bytes")
    table = Table("largest temporaries at the peak", columns, css="few")
    for index, buffer in enumerate(live.largest):
        where = Cell(op_location(buffer), note=buffer.source)
        table.add(Cell(buffer.op, note=buffer.shape), where, facts.cell(f"live.largest.{index}.bytes", size))
    return table


def live_chart(live: LiveTrack | None, facts: Facts) -> list[PageBlock]:
    """Stacked areas of one device's temporaries over the seconds of a step, by the phase that made them."""
    if live is None:
        return [
            Paragraph(
                "Temporaries over time are unknown: no op of the program ran in this window.", "soft", "page"
            )
        ]
    totals = [sum(values) for values in zip(*live.bytes.values(), strict=True)]
    peak_bytes = max(totals)
    if not peak_bytes:
        return [Paragraph("The step has no temporaries.", "soft", "page")]
    # One op only: its time is 0, and the chart still needs a width.
    end_s = live.time_s[-1] or 1.0
    x_positions = [time_s / end_s * charts.WIDTH for time_s in live.time_s]
    areas: list[str] = []
    # Stacked from below: the top of one class is the bottom of the next. 100 is the chart's lower edge.
    tops, low = [0] * len(totals), [100.0] * len(totals)
    for index, values in enumerate(live.bytes.values()):
        tops = [lower_top + value for lower_top, value in zip(tops, values, strict=True)]
        high = [100 * (1 - top / peak_bytes) for top in tops]
        areas.append(
            f'<path class="area made{index}" d="{charts.step_area(x_positions, low, high, charts.WIDTH)}"/>'
        )
        low = high
    summary = (
        f"At most {size(peak_bytes)} of temporaries at once, "
        f"{seconds(live.time_s[totals.index(peak_bytes)])} into step "
        f"{live.step}; parameters, optimizer state and the batch come on top. Computed from the program's "
        "schedule, not measured by the allocator."
    )
    chart = f"temporaries over step {live.step}, up to {size(peak_bytes)}"
    return [
        summary,
        Picture(
            charts.legend({name: f"made{i}" for i, name in enumerate(live.bytes)})
            + charts.plot("".join(areas), "temporaries", "0", size(peak_bytes), chart)
            + charts.ends("seconds", "0 s", seconds(end_s))
        ),
        _largest_table(live, facts),
    ]
