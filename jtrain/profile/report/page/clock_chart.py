"""Charts of clocks, power, temperature and throttle reasons over a window, with one device highlighted at a time."""

from collections.abc import Sequence

from jtrain.profile.analysis import figures
from jtrain.profile.analysis.records import Breakdown, ClockTrack
from jtrain.profile.report.page.markup import WIDTH, options, svg, text

QUANTITIES = (
    ("sm_mhz", "SM clock", "MHz"),
    ("mem_mhz", "memory clock", "MHz"),
    ("power_w", "power", "W"),
    ("temperature_c", "temperature", "°C"),
)

_HEIGHT = 100
_BUCKETS = 400
"""Time buckets of a line; of each its first, lowest, highest and last sample are drawn."""


def timeline(breakdown: Breakdown) -> str:
    """Charts of all sampled quantities, on one axis of seconds from the window's start."""
    tracks = [track for track in breakdown.clocks if track.time_s]
    if not tracks:
        return "<p>No clock was sampled in this window; the reason is under unknown values below.</p>"
    end_s = max(max(track.time_s[-1] for track in tracks), sum(step.duration_s for step in breakdown.steps))
    borders = _borders(breakdown, end_s)
    charts = [_chart(tracks, *quantity, end_s, borders) for quantity in QUANTITIES]
    names = [f"device {track.device} ({track.source})" for track in tracks]
    return (
        f'<p class="choose">{options("track", "Highlight:", names)}</p>'
        f'<div id="timeline" data-end-s="{end_s!r}">{"".join(charts)}{_reasons(tracks, end_s)}'
        f'{_axis(breakdown, end_s)}<div class="lane"><span class="side">cursor</span>'
        '<input id="moment" type="range" min="0" max="1000" value="0" step="1" '
        'aria-label="time in the window at which values are shown"></div></div>'
        '<p id="readout" role="status" aria-live="polite"></p>'
    )


def thin(times: Sequence[float], values: Sequence[float | None], end_s: float) -> list[int]:
    """Indices of the samples to draw: all, or the first, lowest, highest and last of each time bucket."""
    if len(times) <= 4 * _BUCKETS:
        return list(range(len(times)))
    spans: dict[int, list[int]] = {}
    for index, time in enumerate(times):
        spans.setdefault(int(time / end_s * _BUCKETS), []).append(index)
    kept: set[int] = set()
    for indices in spans.values():
        known = [(value, index) for index in indices if (value := values[index]) is not None]
        extremes = [min(known)[1], max(known)[1]] if known else []
        kept.update((indices[0], indices[-1], *extremes))
    return sorted(kept)


def line(track: ClockTrack, values: Sequence[float | None], end_s: float, low: float, high: float) -> str:
    """SVG path of a step function: each sample holds until the next one, and unknown samples leave a gap."""
    words: list[str] = []
    drawn = False
    for index in thin(track.time_s, values, end_s):
        x, value = f"{track.time_s[index] / end_s * WIDTH:.1f}", values[index]
        if drawn:
            words.append(f"H{x}")
        if value is not None:
            y = f"{(high - value) / (high - low) * _HEIGHT:.1f}"
            words.append(f"V{y}" if drawn else f"M{x} {y}")
        drawn = value is not None
    if drawn:
        words.append(f"H{WIDTH}")
    return "".join(words)


def _borders(breakdown: Breakdown, end_s: float) -> str:
    """Vertical lines at the end of each step."""
    found, at = [], 0.0
    for step in breakdown.steps:
        at += step.duration_s
        found.append(f"M{at / end_s * WIDTH:.1f} 0V{_HEIGHT}")
    return f'<path class="border" d="{"".join(found)}"/>'


def _chart(tracks: Sequence[ClockTrack], field: str, name: str, unit: str, end_s: float, borders: str) -> str:
    known = [value for track in tracks for value in getattr(track, field) if value is not None]
    if not known:
        return f'<p class="lane"><span class="side">{name}</span><span>unknown</span></p>'
    margin = 0.05 * (max(known) - min(known)) or 0.01 * abs(max(known)) or 1.0
    low, high = min(known) - margin, max(known) + margin
    lines = "".join(
        f'<path class="line{" front" if index == 0 else ""}" data-track="{index}" '
        f'd="{line(track, getattr(track, field), end_s, low, high)}"/>'
        for index, track in enumerate(tracks)
    )
    label = f"{name} in {unit} over {figures.seconds(end_s)}: from {min(known):,.0f} to {max(known):,.0f} {unit}"
    return (
        f'<div class="lane"><span class="side"><span>{high:,.0f} {unit}</span><b>{name}</b>'
        f"<span>{low:,.0f} {unit}</span></span>"
        f"{svg(borders + lines, label, css=f'plot {field}', height=_HEIGHT)}</div>"
    )


def _reasons(tracks: Sequence[ClockTrack], end_s: float) -> str:
    """One lane per throttle reason of any sample, filled while the reason holds for the highlighted device."""
    names = sorted({reason for track in tracks for point in track.reasons for reason in point.split(",") if reason})
    if not names:
        return '<p class="lane"><span class="side">throttle</span><span>no reason was reported</span></p>'
    lanes = []
    for name in names:
        groups = []
        for index, track in enumerate(tracks):
            spans = _spans(track, name, end_s)
            bars = "".join(
                f'<rect x="{a / end_s * WIDTH:.1f}" y="0" width="{(b - a) / end_s * WIDTH:.1f}" height="10"/>'
                for a, b in spans
            )
            shown = "" if index == 0 else ' style="display:none"'
            groups.append(f'<g class="held" data-track="{index}"{shown}>{bars}</g>')
        label = f"throttle reason {name}, over {figures.seconds(end_s)}"
        lane = svg("".join(groups), label, css="bar reason")
        lanes.append(f'<div class="lane"><span class="side">{text(name)}</span>{lane}</div>')
    return "".join(lanes)


def _spans(track: ClockTrack, name: str, end_s: float) -> list[tuple[float, float]]:
    """Spans of seconds in which a throttle reason held, merged; the last sample holds to the end."""
    found: list[tuple[float, float]] = []
    for index, point in enumerate(track.reasons):
        if name in point.split(","):
            start = track.time_s[index]
            end = track.time_s[index + 1] if index + 1 < len(track.time_s) else end_s
            if found and found[-1][1] == start:
                found[-1] = (found[-1][0], end)
            else:
                found.append((start, end))
    return found


def _axis(breakdown: Breakdown, end_s: float) -> str:
    """Axis of steps, each as wide as its duration, with at most about ten labels."""
    every = -(-len(breakdown.steps) // 10)
    spans = [
        f'<span style="flex:{step.duration_s:.6g} 0 0">{step.step if index % every == 0 else ""}</span>'
        for index, step in enumerate(breakdown.steps)
    ]
    rest = end_s - sum(step.duration_s for step in breakdown.steps)
    if rest > 0:
        spans.append(f'<span style="flex:{rest:.6g} 0 0"></span>')
    seconds = f'<span class="ends"><span>0 s</span><span>{figures.seconds(end_s)}</span></span>'
    return (
        f'<div class="lane"><span class="side">step</span><span class="ticks">{"".join(spans)}</span></div>'
        f'<div class="lane"><span class="side">seconds</span>{seconds}</div>'
    )
