"""Charts as SVG, stretched over their column, with labels in HTML beside them, which keep their size."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence

from jtrain.report.number_formats import Number, short
from jtrain.report.table import Bar, Bars

WIDTH = 1000
"""Width of every chart in SVG units."""

COLOURS = 8
"""Number of colours for the parts of a chart: the classes c0, c1 ... of page.css."""

_PLOT = 120  # height of line_chart, in SVG units


def text(words: object) -> str:
    """Escapes text for HTML."""
    # Quotes are escaped too, since texts also stand in attributes.
    return html.escape(str(words))


def svg(inside: str, name: str, *, css: str = "bar", height: int = 10) -> str:
    """A chart with a name for those who do not see it."""
    return (
        f'<svg class="{css}" viewBox="0 0 {WIDTH} {height}" preserveAspectRatio="none" role="img" '
        f'aria-label="{text(name)}">{inside}</svg>'
    )


def bars_svg(bars: Bars) -> str:
    """A bar of one or more parts."""
    return svg("".join(map(_rect, bars.parts)), bars.name)


def _rect(bar: Bar) -> str:
    tooltip = f"<title>{text(bar.title)}</title>" if bar.title else ""
    # A negative share, where an estimate was beaten, is drawn with no width.
    x, width = bar.start * WIDTH, max(0.0, bar.length) * WIDTH
    return f'<rect x="{x:.2f}" y="0" width="{width:.2f}" height="10" class="{bar.css}">{tooltip}</rect>'


def coloured(shares: Mapping[str, Number]) -> dict[str, Bar]:
    """Parts of a bar by name, each in its colour and starting where the one before ends."""
    parts: dict[str, Bar] = {}
    start = 0.0
    for index, (name, length) in enumerate(shares.items()):
        # page.css has COLOURS classes; further parts begin again with the first.
        parts[name] = Bar(start, length, f"c{index % COLOURS}", f"{name}: {length:.1%}")
        start += length
    return parts


def legend(names: Mapping[str, str | Bar]) -> str:
    """Names with their colours.

    Args:
      names: name -> class of its colour, or a bar of it.
    """
    colours = ((name, bar.css if isinstance(bar, Bar) else bar) for name, bar in names.items())
    items = (f'<li><i class="key {css}"></i>{text(name)}</li>' for name, css in colours)
    return f'<ul class="legend">{"".join(items)}</ul>'


def lane(side: str, inside: str) -> str:
    """A chart with its label to the left."""
    return f'<div class="lane"><span class="side">{side}</span>{inside}</div>'


def plot(inside: str, name: str, low: str, high: str, chart: str, *, css: str = "", height: int = 100) -> str:
    """A lane with a chart of a quantity, and its range beside it.

    Args:
      name: of the quantity; low and high are the ends of its range.
      chart: the chart's name for those who do not see it.
    """
    # From top to bottom, as the chart beside it: the highest value, the name, the lowest.
    side = f"<span>{text(high)}</span><b>{text(name)}</b><span>{text(low)}</span>"
    return lane(side, svg(inside, chart, css=f"plot {css}".rstrip(), height=height))


def ends(name: str, first: str, last: str) -> str:
    """The axis below a chart, with its two ends."""
    return lane(text(name), f'<span class="ends"><span>{text(first)}</span><span>{text(last)}</span></span>')


def step_line(x: Sequence[Number], y: Sequence[Number | None], end: Number) -> str:
    """SVG path of a step function: each value holds until the next one, and unknown values leave a gap."""
    path: list[str] = []
    last: Number | None = None
    for position, value in zip(x, y, strict=True):
        # Equal neighbours make one line: a path of thousands of points would make the page large.
        if value == last:
            continue
        if last is not None:
            path.append(f"H{position:.1f}")
        # After a gap the pen is set down anew (M); within a line it goes up or down (V).
        if value is not None:
            path.append(f"M{position:.1f} {value:.1f}" if last is None else f"V{value:.1f}")
        last = value
    # The last value holds until the end of the chart, unless it is unknown.
    return "".join(path) + ("" if last is None else f"H{end:.1f}")


def step_area(x: Sequence[Number], low: Sequence[Number], high: Sequence[Number], end: Number) -> str:
    """SVG path of the area between two step functions: along the top, and back along the bottom."""
    # The bottom is drawn backwards, so each change there goes vertically first and then left.
    changes = [i for i in range(len(x)) if i == 0 or low[i] != low[i - 1]]
    back = "".join(f"V{low[i]:.1f}H{x[i]:.1f}" for i in reversed(changes))
    return f"{step_line(x, high, end)}{back}Z"


def borders(x: Iterable[Number], height: int) -> str:
    """Vertical lines over the height of a chart."""
    return f'<path class="border" d="{"".join(f"M{position:.1f} 0V{height}" for position in x)}"/>'


def line_chart(points: Sequence[tuple[int, Number]], name: str, *, counted: str) -> str:
    """A line through (count, value), both axes logarithmic, the values from the smallest to the largest.

    Args:
      counted: name of what the first axis counts.
    """
    low, high = min(value for _, value in points), max(value for _, value in points)
    # Points come in order of their count.
    first, last = points[0][0], points[-1][0]
    # One point, or equal values, have a range of 0: any positive number avoids the division.
    log_range_x, log_range_y = math.log(last / first) or 1.0, math.log(high / low) or 1.0
    # 1 % and 7 % of margin, so that the line's ends are not cut in half; y grows downwards in SVG.
    x = [WIDTH * (0.01 + 0.98 * math.log(count / first) / log_range_x) for count, _ in points]
    y = [_PLOT * (0.93 - 0.86 * math.log(value / low) / log_range_y) for _, value in points]
    line = "L".join(f"{point_x:.1f} {point_y:.1f}" for point_x, point_y in zip(x, y, strict=True))
    chart = plot(
        "".join(borders([position], _PLOT) for position in x) + f'<path class="line front" d="M{line}"/>',
        name,
        short(low),
        short(high),
        f"{name} over the number of {counted}",
        height=_PLOT,
    )
    return chart + ends(counted, f"{first:,}", f"{last:,}")
