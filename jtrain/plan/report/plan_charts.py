"""Charts of the plan's page as SVG: stacked bars, the fabric, and a line over the number of devices."""

import math
from collections.abc import Mapping, Sequence

from jtrain.plan.estimate.machine import Machine
from jtrain.plan.report.fabric_loads import Load
from jtrain.profile.analysis.figures import rate, seconds
from jtrain.profile.report.page.markup import WIDTH, rect, svg, text

_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8822ee", "#8a7a00")

STYLE = "".join(f".c{index} {{ fill: {colour}; background: {colour}; }}\n" for index, colour in enumerate(_COLOURS)) + (
    ".fabric { display: block; min-width: 36rem; max-width: 50rem; width: 100%; }\n"
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
    """The devices that links join, the memory of their hosts above and the network below, with their loads.

    Args:
      levels: loads of the links, the network and the links to the host.
    """
    links, network, to_host = levels
    linked = min(machine.device.linked, machine.count)
    groups = -(-machine.count // linked)
    devices = linked if linked > 1 else machine.count
    shown = min(devices, _MOST_BOXES)
    parts = [_box(20.0, 10, 560.0, f"host memory; {_said(to_host, step_s)}")]
    if linked > 1:
        parts.append(_box(20.0, 140, 560.0, f"links between {linked:,} devices; {_said(links, step_s)}"))
    beyond = f"network to {groups - 1:,} more such groups" if linked > 1 else "network between devices"
    words = f"{beyond}; {_said(network, step_s)}" if groups > 1 else "no network: all devices are linked"
    parts.append(_box(20.0, 200, 560.0, words))
    gap = 560 / shown
    for index in range(shown):
        middle = 20 + gap * (index + 0.5)
        name = machine.device.name if index < shown - 1 or shown == devices else f"... {devices:,}"
        parts.append(_box(middle - gap / 2 + 4, 75, gap - 8, name))
        parts.append(_line(middle, 40, 75, to_host, step_s))
        if linked > 1:
            parts.append(_line(middle, 105, 140, links, step_s))
        if groups > 1:
            parts.append(_line(middle, 170 if linked > 1 else 105, 200, network, step_s))
    label = f"fabric of {machine} with the loads of a step"
    return f'<svg class="fabric" viewBox="0 0 600 240" role="img" aria-label="{text(label)}">{"".join(parts)}</svg>'


def _said(load: Load, step_s: float) -> str:
    if not load.busy_s:
        return "unused"
    peak = "" if load.bytes_per_s is None else f" at up to {rate(load.bytes_per_s)}"
    return f"busy {seconds(load.busy_s)}, {load.busy_s / step_s:.0%} of the step{peak}"


def _box(x: float, y: int, width: float, words: str) -> str:
    return (
        f'<rect class="box" x="{x:.1f}" y="{y}" width="{width:.1f}" height="30" rx="4"/>'
        f'<text x="{x + width / 2:.1f}" y="{y + 20}" text-anchor="middle">{text(words)}</text>'
    )


def _line(x: float, top: int, bottom: int, load: Load, step_s: float) -> str:
    """Vertical line as wide as the load's part of the step."""
    busy = min(1.0, load.busy_s / step_s)
    css = f'stroke-width="{1.5 + 10 * busy:.2f}"' if busy else 'class="unused"'
    return f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" data-level="{load.level}" {css}/>'


def short(value: int | float) -> str:
    """Three or four digits, with k, M, B or T: `1.06M`, `423k`, `71.6`."""
    for factor, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * factor:
            return f"{value / factor:.4g}{suffix}" if value < 1000 * factor else f"{value / factor:,.0f}{suffix}"
    return f"{value:.3g}"


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
    side = f'<span class="side"><span>{short(high)}</span><b>{text(name)}</b><span>{short(low)}</span></span>'
    ends = f'<span class="ends"><span>{first:,}</span><span>{last:,}</span></span>'
    return f'<div class="lane">{side}{chart}</div><div class="lane"><span class="side">devices</span>{ends}</div>'
