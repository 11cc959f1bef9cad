"""Charts of the plan's page as SVG: stacked bars, the fabric, and a line over the number of devices."""

import math
from collections.abc import Mapping, Sequence

from jtrain.plan.estimate.machine import Machine
from jtrain.plan.report.fabric_loads import Load
from jtrain.profile.analysis.figures import rate, seconds
from jtrain.profile.report.page.markup import WIDTH, rect, svg, text

_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8822ee", "#8a7a00")

STYLE = "".join(f".c{index} {{ fill: {colour}; background: {colour}; }}\n" for index, colour in enumerate(_COLOURS)) + (
    ".fabric { display: block; min-width: 36rem; width: 100%; }\n"
    ".fabric text { fill: var(--ink); font: 13px system-ui, sans-serif; }\n"
    ".fabric .box { fill: var(--shade); stroke: var(--soft); }\n"
    ".fabric line { stroke: var(--line); } .fabric line.unused { stroke: var(--rule); stroke-dasharray: 4 3; }\n"
    "circle { fill: var(--line); }\n"
)
"""Style sheet of the charts, beside that of the profile's pages."""

_MOST_BOXES = 8
_PLOT = 120


def stacked(shares: Mapping[str, float], name: str) -> str:
    """One bar with a part per name; shares are of its whole width."""
    bars, at = [], 0.0
    for index, (part, length) in enumerate(shares.items()):
        bars.append(rect(at, length, f"c{index % len(_COLOURS)}", title=f"{part}: {length:.1%}"))
        at += length
    return svg("".join(bars), f"{name}, by part")


def legend(names: Sequence[str]) -> str:
    """Names with the colours of `stacked`."""
    each = (f'<li><i class="key c{index % len(_COLOURS)}"></i>{text(name)}</li>' for index, name in enumerate(names))
    return f'<ul class="legend">{"".join(each)}</ul>'


def fabric_picture(machine: Machine, levels: Sequence[Load], step_s: float) -> str:
    """One host's devices on their links, its memory above and the network below, with their loads.

    Args:
      levels: loads of the links, the network and the links to the host.
    """
    links, network, to_host = levels
    devices = min(machine.devices_per_host, machine.count)
    shown = min(devices, _MOST_BOXES)
    hosts = -(-machine.count // machine.device.host.devices)
    parts = [
        _box(20, 10, 560, f"memory of the host; {_said(to_host, step_s)}"),
        _box(20, 200, 560, f"network to {hosts - 1:,} other hosts; {_said(network, step_s)}")
        if hosts > 1
        else '<text x="20" y="220">no other host</text>',
    ]
    gap = 560 / shown
    for index in range(shown):
        middle = 20 + gap * (index + 0.5)
        parts.append(_line(middle, 40, middle, 80, to_host, step_s))
        name = f"{machine.device.name}" if index < shown - 1 or shown == devices else f"... {devices}"
        parts.append(_box(middle - gap / 2 + 4, 80, gap - 8, name))
        if shown > 1:
            parts.append(_line(middle, 110, middle, 140, links, step_s))
        if hosts > 1:
            parts.append(_line(middle, 140 if shown > 1 else 110, middle, 200, network, step_s))
    if shown > 1:
        parts.append(_line(20 + gap / 2, 140, 580 - gap / 2, 140, links, step_s))
        parts.append(f'<text x="24" y="165">links between devices; {text(_said(links, step_s))}</text>')
    label = f"fabric of {machine} with the loads of a step"
    return f'<svg class="fabric" viewBox="0 0 600 240" role="img" aria-label="{text(label)}">{"".join(parts)}</svg>'


def _said(load: Load, step_s: float) -> str:
    if not load.busy_s:
        return "unused"
    peak = "" if load.bytes_per_s is None else f" at up to {rate(load.bytes_per_s)}"
    return f"busy {seconds(load.busy_s)}, {load.busy_s / step_s:.0%} of the step{peak}"


def _box(x: float, y: float, width: float, words: str) -> str:
    return (
        f'<rect class="box" x="{x:.1f}" y="{y}" width="{width:.1f}" height="30" rx="4"/>'
        f'<text x="{x + width / 2:.1f}" y="{y + 20}" text-anchor="middle">{text(words)}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, load: Load, step_s: float) -> str:
    """Line as wide as the load's part of the step."""
    busy = min(1.0, load.busy_s / step_s)
    css = f'stroke-width="{1.5 + 10 * busy:.2f}"' if busy else 'class="unused"'
    return f'<line x1="{x1:.1f}" y1="{y1}" x2="{x2:.1f}" y2="{y2}" data-level="{load.level}" {css}/>'


def line_chart(points: Sequence[tuple[int, float]], name: str) -> str:
    """A line through (devices, value), both axes logarithmic, the values from the smallest to the largest."""
    low, high = min(value for _, value in points), max(value for _, value in points)
    first, last = points[0][0], points[-1][0]
    across, up = math.log(last / first) or 1.0, math.log(high / low) or 1.0
    at = [
        (WIDTH * (0.01 + 0.98 * math.log(n / first) / across), _PLOT * (0.93 - 0.86 * math.log(value / low) / up))
        for n, value in points
    ]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
    marks = "".join(f'<path class="border" d="M{x:.1f} 0V{_PLOT}"/>' for x, _ in at)
    chart = svg(
        f'{marks}<path class="line front" d="{path}"/>', f"{name} over the number of devices", css="plot", height=_PLOT
    )
    side = f'<span class="side"><span>{high:,.4g}</span><b>{text(name)}</b><span>{low:,.4g}</span></span>'
    ends = f'<span class="ends"><span>{first:,}</span><span>{last:,}</span></span>'
    return (
        f'<div class="lane">{side}{chart}</div><div class="lane"><span class="side">devices</span>{ends}</div>'
    )
