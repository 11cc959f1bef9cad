"""Charts of clocks, power, temperature and throttle reasons over a window, one device highlighted."""

import itertools
from collections.abc import Sequence

import numpy as np

from jtrain.profile.analysis.records import Breakdown, ClockTrack
from jtrain.report.charts import WIDTH, borders, ends, lane, plot, step_area, step_line, svg, text
from jtrain.report.number_formats import seconds
from jtrain.report.page import Picture
from jtrain.report.thinning import thin

QUANTITIES = (
    ("sm_mhz", "core clock", "MHz"),
    ("mem_mhz", "memory clock", "MHz"),
    ("power_w", "power", "W"),
    ("temperature_c", "temperature", "°C"),
)

_HEIGHT = 100
_BUCKETS = 400
"""Time buckets of a line, which `thin` draws."""


def clock_charts(breakdown: Breakdown) -> list[str | Picture]:
    """Charts of all sampled quantities, on one axis of seconds from the window's start."""
    tracks = [track for track in breakdown.clocks if track.time_s]
    if not tracks:
        return ["No clock was sampled in this window; the reason is under unknown values below."]
    durations = [step.duration_s for step in breakdown.steps]
    # A sample may lie after the last step, and steps after the last sample.
    end_s = max(max(track.time_s[-1] for track in tracks), sum(durations))
    # The ends of steps, summed up from their durations: steps follow each other without gaps.
    marks = borders(
        (end_of_step_s / end_s * WIDTH for end_of_step_s in itertools.accumulate(durations)), _HEIGHT
    )
    # What no device tells has no lane; the notes say why.
    lanes = [
        _chart(tracks, *quantity, end_s, marks)
        for quantity in QUANTITIES
        if any(value is not None for track in tracks for value in getattr(track, quantity[0]))
    ]
    lanes += [*_reasons(tracks, end_s), _axis(breakdown, end_s), ends("seconds", "0 s", seconds(end_s))]
    lanes.append(
        lane(
            "cursor",
            '<input id="moment" type="range" min="0" max="1000" value="0" step="1" '
            'aria-label="time in the window at which values are shown">',
        )
    )
    names = (f"device {track.device} ({track.source})" for track in tracks)
    options = "".join(f'<option value="{index}">{text(name)}</option>' for index, name in enumerate(names))
    return [
        Picture(
            f'<p class="choose"><label for="track">Highlight:</label> <select id="track">{options}</select></p>'
            f'<div id="timeline" data-end-s="{end_s!r}">{"".join(lanes)}</div>'
            '<p id="readout" role="status" aria-live="polite"></p>'
        )
    ]


def _chart(tracks: Sequence[ClockTrack], field: str, name: str, unit: str, end_s: float, marks: str) -> str:
    known_values = [value for track in tracks for value in getattr(track, field) if value is not None]
    # A constant quantity gets 1 % of itself as margin, and a constant 0 gets 1.
    margin = 0.05 * (max(known_values) - min(known_values)) or 0.01 * abs(max(known_values)) or 1.0
    low, high = min(known_values) - margin, max(known_values) + margin
    lines: list[str] = []
    for index, track in enumerate(tracks):
        values = getattr(track, field)
        # None, for unknown, becomes NaN.
        indices = thin(np.asarray(track.time_s), np.asarray(values, np.float64), buckets=_BUCKETS).tolist()
        x = [track.time_s[i] / end_s * WIDTH for i in indices]
        y = [None if values[i] is None else (high - values[i]) / (high - low) * _HEIGHT for i in indices]
        # The first device is highlighted until the page's script changes that.
        front = " front" if index == 0 else ""
        lines.append(f'<path class="line{front}" data-track="{index}" d="{step_line(x, y, WIDTH)}"/>')
    label = (
        f"{name} in {unit} over {seconds(end_s)}: from {min(known_values):,.0f} to {max(known_values):,.0f} "
        f"{unit}"
    )
    ends_of = f"{low:,.0f} {unit}", f"{high:,.0f} {unit}"
    return plot(marks + "".join(lines), name, *ends_of, label, css=field, height=_HEIGHT)


def _reasons(tracks: Sequence[ClockTrack], end_s: float) -> list[str]:
    """One lane per throttle reason of any sample, filled while it holds for the highlighted device."""
    names = sorted(
        {reason for track in tracks for point in track.reasons for reason in point.split(",") if reason}
    )
    if not names:
        return [lane("throttle", "<span>no reason was reported</span>")]
    lanes: list[str] = []
    for name in names:
        areas: list[str] = []
        for index, track in enumerate(tracks):
            x = [time_s / end_s * WIDTH for time_s in track.time_s]
            # From 10, the bottom of the lane, up to 0 while the reason holds; from 10 to 10 nothing is drawn.
            high = [0.0 if name in point.split(",") else 10.0 for point in track.reasons]
            hidden_style = "" if index == 0 else ' style="display:none"'
            path = step_area(x, [10.0] * len(x), high, WIDTH)
            areas.append(f'<path class="held" data-track="{index}"{hidden_style} d="{path}"/>')
        label = f"throttle reason {name}, over {seconds(end_s)}"
        lanes.append(lane(text(name), svg("".join(areas), label, css="bar reason")))
    return lanes


def _axis(breakdown: Breakdown, end_s: float) -> str:
    """Axis of steps, each as wide as its duration, with at most ten labels."""
    label_step = -(-len(breakdown.steps) // 10)
    spans = [
        f'<span style="flex:{step.duration_s:.6g} 0 0">{step.step if index % label_step == 0 else ""}</span>'
        for index, step in enumerate(breakdown.steps)
    ]
    untraced_s = end_s - sum(step.duration_s for step in breakdown.steps)
    # Samples after the last step: an empty span keeps the axis aligned with the charts above.
    if untraced_s > 0:
        spans.append(f'<span style="flex:{untraced_s:.6g} 0 0"></span>')
    return lane("step", f'<span class="ticks">{"".join(spans)}</span>')
