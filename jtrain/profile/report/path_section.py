"""Section of a profile's page with the critical path of a step, and the step without each cause."""

from jtrain.profile.analysis.step_tracks import CriticalPath
from jtrain.report.number_formats import seconds, share
from jtrain.report.page import PageBlock, Paragraph, Section
from jtrain.report.table import Bars, Facts, Table, bars, numbers, words

_CSS = {"computing": "utilisation", "communication": "exposed_communication", "wait": "idle"}
_MOST_ROWS = 12


def path_section(path: CriticalPath, facts: Facts) -> Section:
    """Section with the chain of ops that a step was as long as, and its length without each cause."""
    steps = "1 step" if path.num_steps == 1 else f"mean of {path.num_steps} steps"
    summary = (
        f"Replayed from the trace, {steps}. A cause gains less than its time where another chain of ops then takes as "
        "long; gains do not add up."
    )
    blocks: list[PageBlock] = [Paragraph(summary, "soft")]
    if path.causes:
        blocks.append(_causes_table(path, facts))
    else:
        blocks.append("No cause of lost time makes this step longer by itself.")
    return Section("path", "What the step waited for", [*blocks, _path_table(path, facts)])


def _causes_table(path: CriticalPath, facts: Facts) -> Table:
    columns = (
        words("if this were gone")
        + bars(f"0 to {seconds(path.duration_s)}")
        + numbers("step", "gain", "share")
    )
    table = Table("the step without each cause", columns, css="many")
    for index, cause in enumerate(path.causes):
        gain_s = path.duration_s - cause.without_s
        name = f"without {cause.cause}: {seconds(cause.without_s)}"
        bar = Bars.single(0.0, cause.without_s / path.duration_s, "theoretical", name)
        step = facts.cell(f"path.causes.{index}.without_s", seconds)
        table.add(cause.cause, bar, step, seconds(gain_s), share(gain_s, path.duration_s))
    return table


def _path_table(path: CriticalPath, facts: Facts) -> Table:
    """The path's seconds by what they were spent in; they add up to the step."""
    columns = (
        words("on the critical path") + bars(f"0 to {seconds(path.duration_s)}") + numbers("time", "share")
    )
    table = Table("the critical path of a step", columns, css="many")
    start = 0.0
    for index, row in enumerate(path.rows[:_MOST_ROWS]):
        length = row.seconds / path.duration_s
        bar = Bars.single(start, length, _CSS[row.kind], f"{row.name}: {seconds(row.seconds)}")
        step_share = share(row.seconds, path.duration_s)
        table.add(row.name, bar, facts.cell(f"path.rows.{index}.seconds", seconds), step_share)
        start += length
    rest_s = sum(row.seconds for row in path.rows[_MOST_ROWS:])
    if rest_s:
        bar = Bars.single(start, rest_s / path.duration_s, "whole", f"all else: {seconds(rest_s)}")
        table.add(f"{len(path.rows) - _MOST_ROWS} more", bar, seconds(rest_s), share(rest_s, path.duration_s))
    return table
