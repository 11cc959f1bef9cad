"""Sections of a profile's page on ops: seconds, FLOPs and bytes by layer and phase, a roofline, a table."""

import collections
import math
from collections.abc import Iterator
from typing import NamedTuple

from jtrain.profile.analysis import figures
from jtrain.profile.analysis.records import Breakdown, OpRow
from jtrain.report import charts
from jtrain.report.number_formats import number, rate, seconds, share, short, size
from jtrain.report.page import PageBlock, Paragraph, Picture, Section
from jtrain.report.table import Bars, Cell, Table, bars, numbers, words

MAX_OPS = 400
"""Maximum rows of the table of ops: those that lose most; breakdown.json has all."""

FIRST_OPS, TERMINAL_OPS = 25, 15
"""Rows of the table of ops that a page shows at first, and those that a terminal shows."""


_ROOFLINE_OPS, _ROOFLINE_HEIGHT = 40, 220


def layers_section(breakdown: Breakdown) -> Iterator[Section]:
    """Section with seconds, FLOPs and bytes of each layer and phase, per step and device; none without ops."""
    rows: dict[tuple[str, str], list[OpRow]] = collections.defaultdict(list)
    for op in breakdown.ops:
        rows[op.layer or "unknown", op.phase].append(op)
    if not rows:
        return
    total_s = {
        key: figures.per_step(breakdown, math.fsum(op.total_s for op in ops)) for key, ops in rows.items()
    }
    longest_s = max(total_s.values()) or 1.0
    duration_s = figures.mean_step(breakdown).duration_s
    columns = words("layer", "phase") + bars(f"0 to {seconds(longest_s)}") + numbers("time", "of step")
    columns += numbers("FLOPs", "FLOP/s", "bytes", "bytes/s")
    table = Table("layers and phases", columns, css="many")
    for (layer, phase), busy_s in sorted(total_s.items(), key=lambda item: -item[1]):
        ops = rows[layer, phase]
        flops, traffic = (
            figures.per_step(breakdown, sum(op.count * getattr(op, name) for op in ops))
            for name in ("flops", "bytes")
        )
        # Collectives beside the computing are no work at this rate.
        computing_s = figures.per_step(
            breakdown, math.fsum(op.total_s for op in ops if op.kind != "communication")
        )
        table.add(
            layer,
            phase,
            Bars.single(0.0, busy_s / longest_s, "utilisation", f"{layer}, {phase}: {seconds(busy_s)}"),
            seconds(busy_s),
            share(busy_s, duration_s),
            short(flops) if flops else "–",
            short(flops / computing_s) if flops and computing_s else "–",
            size(traffic) if traffic else "–",
            rate(traffic / computing_s) if traffic and computing_s else "–",
        )
    summary = (
        "Per step and device. The time includes collectives; bytes are what the program's ops read and write."
    )
    yield Section("layers", "Layers and phases", [Paragraph(summary, "soft"), table])


class _PlacedOp(NamedTuple):
    """An op's FLOPs per byte, and its FLOP/s while it ran."""

    op: OpRow
    intensity: float
    speed: float


def roofline(breakdown: Breakdown) -> list[PageBlock]:
    """Chart of the ops that compute longest: FLOP/s over FLOPs per byte, below the peaks of the device."""
    peaks = breakdown.peaks
    placed_ops = [
        _PlacedOp(op, op.flops / op.bytes, op.count * op.flops / op.total_s)
        for op in sorted(breakdown.ops, key=lambda op: -op.total_s)
        if op.flops and op.bytes and op.total_s and op.kind != "communication"
    ][:_ROOFLINE_OPS]
    if peaks.flops is None or peaks.hbm_bytes_per_s is None or not placed_ops:
        return []
    ridge = peaks.flops / peaks.hbm_bytes_per_s
    # Powers of ten around all that is drawn: the ops, and the corner of the roof.
    intensities = [ridge, *(placed.intensity for placed in placed_ops)]
    left = 10.0 ** math.floor(math.log10(min(intensities)))
    right = 10.0 ** math.ceil(math.log10(max(intensities) * 1.01))
    speeds = [placed.speed for placed in placed_ops]
    low, high = 10.0 ** math.floor(math.log10(min(speeds))), 2.0 * max(*speeds, peaks.flops)

    def place(intensity: float, speed: float) -> tuple[float, float]:
        x = math.log(intensity / left) / math.log(right / left)
        # Downwards in SVG.
        return x * charts.WIDTH, (1 - math.log(speed / low) / math.log(high / low)) * _ROOFLINE_HEIGHT

    # The roof begins where it leaves the chart, at its lower or its left edge.
    first_intensity = max(left, low / peaks.hbm_bytes_per_s)
    corners = (
        place(first_intensity, first_intensity * peaks.hbm_bytes_per_s),
        place(ridge, peaks.flops),
        place(right, peaks.flops),
    )
    line = "L".join(f"{x:.1f} {y:.1f}" for x, y in corners)
    dots: list[str] = []
    for op, intensity, speed in placed_ops:
        x, y = place(intensity, speed)
        roof = min(peaks.flops, intensity * peaks.hbm_bytes_per_s)
        title = f"{op.name}, {figures.op_location(op)}: {speed / roof:.0%} of the roof, {short(speed)}FLOP/s"
        # A line of no length with round ends is a dot of the same size at any width of the chart.
        dots.append(f'<path class="dot" d="M{x:.1f} {y:.1f}h0"><title>{charts.text(title)}</title></path>')
    chart = charts.plot(
        f'<path class="line front" d="M{line}"/>{"".join(dots)}',
        "FLOP/s",
        short(low),
        short(high),
        f"roofline of {len(placed_ops)} ops: FLOP/s over FLOPs per byte",
        css="roofline",
        height=_ROOFLINE_HEIGHT,
    )
    bound_ops = sum(placed.intensity < ridge for placed in placed_ops)
    summary = (
        f"The {len(placed_ops)} ops that compute longest, {bound_ops} of them left of the corner, where memory bounds "
        f"them: it is at {short(ridge)} FLOPs per byte."
    )
    return [
        Paragraph(summary, "soft", "page"),
        Picture(chart + charts.ends("FLOPs per byte", short(left), short(right))),
    ]


def ops_blocks(breakdown: Breakdown) -> list[PageBlock]:
    """Table of ops, in seconds per step and device; FLOPs and bytes are those of one execution."""
    if not breakdown.ops:
        return ["No op was traced in this window."]
    duration_s = figures.mean_step(breakdown).duration_s
    listed_ops = sorted(breakdown.ops, key=lambda op: -op.lost_s)[:MAX_OPS]
    # A source that reads once in a while knows the clock of few ops: a column of "unknown" tells nothing.
    has_clocks = 2 * sum(op.mean_mhz is not None for op in listed_ops) >= len(listed_ops)
    columns = (
        *words("op"),
        *words("where", medium="terminal"),
        *words("main cause"),
        *numbers("lost", "of step"),
        *numbers("FLOPs", "bytes", medium="page"),
        *numbers("total"),
        *numbers("at peak", medium="page"),
        *numbers(*["clock"] * has_clocks),
        *numbers("count", medium="page"),
    )
    table = Table("ops", columns, id="ops-table", css="ops", first_rows=FIRST_OPS, terminal_rows=TERMINAL_OPS)
    for op in listed_ops:
        table.add(*_op_cells(breakdown, op, duration_s, has_clocks=has_clocks))
    lost = sum(op.lost_s for op in breakdown.ops)
    summary = f"{len(breakdown.ops):,} ops lose {seconds(figures.per_step(breakdown, lost))}."
    # A table of thousands of rows makes the page slow; what is cut is said, with its share.
    if len(listed_ops) < len(breakdown.ops):
        listed_share = share(sum(op.lost_s for op in listed_ops), lost)
        summary += (
            f" The table has the {len(listed_ops)} that lose most, {listed_share} of the lost time; "
            "breakdown.json has "
            "all."
        )
    first = f"The first {min(TERMINAL_OPS, len(listed_ops))} of {len(breakdown.ops)}:"
    return [Paragraph(summary, "soft"), Paragraph(first, medium="terminal"), table]


def _op_cells(
    breakdown: Breakdown, op: OpRow, duration_s: float, *, has_clocks: bool
) -> Iterator[str | Cell]:
    def took(value: float | None) -> Cell:
        per_step_s = None if value is None else figures.per_step(breakdown, value)
        # Unknown times sort below all others.
        return Cell(seconds(per_step_s), sort=-1.0 if per_step_s is None else per_step_s)

    lost, cause = figures.per_step(breakdown, op.lost_s), figures.main_cause(op)
    count = op.count / (len(breakdown.steps) * breakdown.num_devices)
    location = figures.op_location(op)
    # In the order of the columns in `ops_blocks`.
    yield Cell(
        op.name,
        sort=op.name,
        title=op.opcode,
        note=" · ".join(filter(None, (location, op.kernel, op.shape, op.source))),
    )
    yield location
    yield Cell(cause or "nothing", sort=cause)
    yield took(op.lost_s)
    yield Cell(share(lost, duration_s), sort=lost)
    # Of one execution, as are its shape and its bytes.
    yield Cell(short(op.flops) if op.flops else "–", sort=op.flops)
    yield Cell(size(op.bytes) if op.bytes else "–", sort=op.bytes)
    yield took(op.total_s)
    # A collective's wait has no peak of its own.
    yield Cell("–", sort=-1.0) if op.kind == "communication" else took(op.theoretical_s)
    if has_clocks:
        yield Cell(number(op.mean_mhz, "MHz"), sort=op.mean_mhz or -1.0)
    yield Cell(f"{count:,.3g}", sort=count)
