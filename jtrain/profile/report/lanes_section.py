"""Section of a profile's page with what each device ran when: a timeline that can be zoomed."""

from jtrain.profile.analysis.step_tracks import LaneTrack
from jtrain.report import charts
from jtrain.report.page import Paragraph, Picture, Section

_COLOURS = {"forward": "c0", "backward": "c1", "optimizer": "c2", "communication": "c5", "data": "c4"}
_COLOURS |= {"checkpoint": "c3", "other": "c7"}


def lanes_section(track: LaneTrack) -> Section:
    """Lanes of every device over one step; a page only, since a terminal has too few columns."""
    left_out = (
        f" Its {track.num_left_out:,} shortest executions are left out; `jtrain profile export --perfetto` has all."
        if track.num_left_out
        else ""
    )
    summary = (
        f"Step {track.step}: drag to move, pinch or press + and - to zoom, touch an op to read it.{left_out}"
    )
    buttons = "".join(
        f'<button type="button" data-lanes="{key}" aria-label="{name}">{text}</button> '
        for key, name, text in (
            ("+", "zoom in", "+"),
            ("-", "zoom out", "−"),
            ("ArrowLeft", "earlier", "◀"),
            ("ArrowRight", "later", "▶"),
            ("0", "the whole step", "whole step"),
        )
    )
    drawn_groups = set(track.groups)
    picture = Picture(
        charts.legend({name: css for name, css in _COLOURS.items() if name in drawn_groups})
        + f'<p class="choose">{buttons}</p>'
        f'<canvas id="lanes-canvas" tabindex="0" role="img" aria-label="ops of each device over step {track.step}">'
        "</canvas>"
        '<p id="lanes-readout" role="status" aria-live="polite"></p>'
    )
    return Section("lanes", "What each device ran when", [Paragraph(summary, "soft"), picture], "page")
