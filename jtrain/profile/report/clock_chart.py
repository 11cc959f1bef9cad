"""Charts of clocks, power, temperature and throttle reasons over a window, with one device highlighted at a
time.
"""

import itertools
from collections.abc import Sequence

from jtrain.profile.analysis.records import Breakdown, ClockTrack
from jtrain.report.charts import WIDTH, borders, ends, lane, plot, step_area, step_line, svg, text
from jtrain.report.number_formats import seconds
from jtrain.report.page import Picture

QUANTITIES = (
    ("sm_mhz", "SM clock", "MHz"),
    ("mem_mhz", "memory clock", "MHz"),
    ("power_w", "power", "W"),
    ("temperature_c", "temperature", "°C"),
)

_HEIGHT = 100
_BUCKETS = 400
"""Time buckets of a line; of each its first, lowest, highest and last sample are drawn."""


def clock_charts(breakdown: Breakdown) -> list[str | Picture]:
    """Charts of all sampled quantities, on one axis of seconds from the window's start."""
    tracks = [track for track in breakdown.clocks if track.time_s]
    if not tracks:
        return ["No clock was sampled in this window; the reason is under unknown values below."]
    durations = [step.duration_s for step in breakdown.steps]
    end_s = max(max(track.time_s[-1] for track in tracks), sum(durations))
    marks = borders((at / end_s * WIDTH for at in itertools.accumulate(durations)), _HEIGHT)
    lanes = [_chart(tracks, *quantity, end_s, marks) for quantity in QUANTITIES]
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


def _chart(tracks: Sequence[ClockTrack], field: str, name: str, unit: str, end_s: float, marks: str) -> str:
    known = [value for track in tracks for value in getattr(track, field) if value is not None]
    if not known:
        return lane(name, "<span>unknown</span>")
    margin = 0.05 * (max(known) - min(known)) or 0.01 * abs(max(known)) or 1.0
    low, high = min(known) - margin, max(known) + margin
    lines: list[str] = []
    for index, track in enumerate(tracks):
        values = getattr(track, field)
        drawn = thin(track.time_s, values, end_s)
        x = [track.time_s[i] / end_s * WIDTH for i in drawn]
        y = [None if values[i] is None else (high - values[i]) / (high - low) * _HEIGHT for i in drawn]
        front = " front" if index == 0 else ""
        lines.append(f'<path class="line{front}" data-track="{index}" d="{step_line(x, y, WIDTH)}"/>')
    label = f"{name} in {unit} over {seconds(end_s)}: from {min(known):,.0f} to {max(known):,.0f} {unit}"
    ends_of = f"{low:,.0f} {unit}", f"{high:,.0f} {unit}"
    return plot(marks + "".join(lines), name, *ends_of, label, css=field, height=_HEIGHT)


def _reasons(tracks: Sequence[ClockTrack], end_s: float) -> list[str]:
    """One lane per throttle reason of any sample, filled while the reason holds for the highlighted
    device.
    """
    names = sorted(
        {reason for track in tracks for point in track.reasons for reason in point.split(",") if reason}
    )
    if not names:
        return [lane("throttle", "<span>no reason was reported</span>")]
    lanes: list[str] = []
    for name in names:
        held: list[str] = []
        for index, track in enumerate(tracks):
            x = [time_s / end_s * WIDTH for time_s in track.time_s]
            high = [0.0 if name in point.split(",") else 10.0 for point in track.reasons]
            shown = "" if index == 0 else ' style="display:none"'
            path = step_area(x, [10.0] * len(x), high, WIDTH)
            held.append(f'<path class="held" data-track="{index}"{shown} d="{path}"/>')
        label = f"throttle reason {name}, over {seconds(end_s)}"
        lanes.append(lane(text(name), svg("".join(held), label, css="bar reason")))
    return lanes


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
    return lane("step", f'<span class="ticks">{"".join(spans)}</span>')
