"""Stacked area chart of one device's temporaries over a step, by the phase that made them."""

from jtrain.profile.analysis.figures import seconds, size
from jtrain.profile.analysis.records import LiveTrack
from jtrain.profile.report.page.markup import WIDTH, svg, text

_HEIGHT = 100


def live_chart(live: LiveTrack | None) -> str:
    """Chart with one stacked area per class of temporaries, over the seconds of a step."""
    if live is None:
        return '<p class="soft">Temporaries over time are unknown: no op of the program ran in this window.</p>'
    totals = [sum(values) for values in zip(*live.bytes.values(), strict=True)]
    most = max(totals)
    if not most:
        return '<p class="soft">The step has no temporaries.</p>'
    end_s = live.time_s[-1] or 1.0
    areas, below = [], [0] * len(totals)
    for index, values in enumerate(live.bytes.values()):
        above = [low + value for low, value in zip(below, values, strict=True)]
        areas.append(f'<path class="area made{index}" d="{_area(live.time_s, below, above, end_s, most)}"/>')
        below = above
    peak_s = live.time_s[totals.index(most)]
    said = (
        f"At most {size(most)} of temporaries at once, {seconds(peak_s)} into step {live.step}; parameters, optimizer "
        "state and the batch come on top. Computed from the program's schedule, not measured by the allocator."
    )
    legend = "".join(f'<li><i class="key made{i}"></i>{text(name)}</li>' for i, name in enumerate(live.bytes))
    chart = svg("".join(areas), f"temporaries over step {live.step}, up to {size(most)}", css="plot", height=_HEIGHT)
    return (
        f'<div id="live"><p>{text(said)}</p><ul class="legend">{legend}</ul>'
        f'<div class="lane"><span class="side"><span>{size(most)}</span><b>temporaries</b><span>0</span></span>'
        f'{chart}</div><div class="lane"><span class="side">seconds</span>'
        f'<span class="ends"><span>0 s</span><span>{seconds(end_s)}</span></span></div></div>'
    )


def _area(time_s: list[float], low: list[int], high: list[int], end_s: float, most: int) -> str:
    """SVG path of an area: along the top from left to right, back along the bottom; values hold until the next op."""

    def steps(values: list[int], order: list[int], *, back: bool) -> str:
        words = []
        for index in order:
            right = time_s[index + 1] if index + 1 < len(time_s) else end_s
            first, second = (right, time_s[index]) if back else (time_s[index], right)
            y = (1 - values[index] / most) * _HEIGHT
            words.append(f"L{first / end_s * WIDTH:.1f} {y:.1f}L{second / end_s * WIDTH:.1f} {y:.1f}")
        return "".join(words)

    order = list(range(len(time_s)))
    return "M" + (steps(high, order, back=False) + steps(low, order[::-1], back=True))[1:] + "Z"
