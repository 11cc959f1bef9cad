"""The live page: its panels, and the data that its charts and tables show.

Two charts are here to read the others by, loss and tokens/s, which every tracker has. What trackers do not
have: wall time of all attempts by what it went to, the parts of traced steps, the mixture beside its plan,
and checkpoints, restarts and bad steps marked on the one axis of steps that all charts share.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

import jtrain.report
from jtrain.dashboard.run_folder import RunFolder
from jtrain.profile.analysis.figures import CATEGORIES as CATEGORY_NAMES
from jtrain.profile.analysis.figures import PARTS
from jtrain.report.charts import COLOURS
from jtrain.report.number_formats import number, share, short, size
from jtrain.report.page import Chart, Page, PageBlock, Paragraph, Picture, Section, Verbatim, blocks_html
from jtrain.report.table import Cell, Table, numbers, words
from jtrain.report.thinning import thin
from jtrain.telemetry.goodput import CATEGORIES
from jtrain.telemetry.metric_fields import train_fields

type StepRange = tuple[float, float]
"""First and last step that charts show."""

LINES = ("loss_nats", "tokens_per_s", "step_time_ms", "clock_mhz", "power_w")
"""Fields with a chart of lines, one per run."""

_SPEEDS = ("tokens_per_s", "step_time_ms")
_SPANS = 120
"""Spans of steps of a stacked chart: each is some pixels wide."""

_EVENTS = 40
"""Newest events that the page has."""

_CONTROLS = (
    '<div class="controls"><button data-pan="-0.3">◀</button><button data-pan="0.3">▶</button>'
    '<button data-zoom="2">−</button><button data-zoom="0.5">+</button>'
    '<button data-zoom="1e9">all steps</button>'
    '<span id="readout"></span><span id="problem" role="alert"></span></div>'
)


def page_of(runs: Sequence[RunFolder]) -> Page:
    """Describes the page; its data comes by `data_of`."""

    def for_each_run(id: str, title: str, meaning: str, kind: Any = "stack") -> list[PageBlock]:
        # One chart per run on the same axes: stacks of several runs cannot share one.
        return [Chart(f"{id}-{i}", f"{run.name}: {title}", kind, id, meaning) for i, run in enumerate(runs)]

    def lines(*names: str) -> list[PageBlock]:
        return [
            Chart(name, train_fields()[name].title, meaning=train_fields()[name].meaning) for name in names
        ]

    ledger, windows = (
        "of all attempts, from goodput.jsonl",
        "of the mean step of a window, from its breakdown.json",
    )
    shares = "of the tokens of all logged steps so far; dashed: as planned"
    help_text = "Drag across a chart for a part of the steps. Dashes in the first chart are evaluations."
    sections = [
        # How far each run is, and whether it lives: what an operator asks first.
        Section("runs", "Runs", []),
        # The curves by which the other panels are read.
        Section("speed", "Loss and speed", [Picture(_CONTROLS), help_text, *lines(*LINES[:3])]),
        # Not in trackers: they know no ledger of seconds.
        Section("goodput", "Where the wall time went", for_each_run("goodput", "share of wall time", ledger)),
        # Not in trackers: a step's parts come from traces of its ops.
        Section("parts", "Traced windows", for_each_run("parts", "parts of a step, milliseconds", windows)),
        # Not in trackers: they do not know the plan.
        Section(
            "mixture", "Mixture against plan", for_each_run("mixture", "share by source", shares, "line")
        ),
        # Beside step time on one axis: a slow step with a low clock explains itself.
        Section("clocks", "Clocks and power", lines(*LINES[3:])),
        # What a restart would lose.
        Section("checkpoints", "Checkpoints", []),
        # Why a curve has a kink.
        Section("events", "Restarts, bad steps, alerts and the data's messages", []),
        # What the loss means: a text that the model wrote.
        Section("samples", "Newest texts by the model", []),
    ]
    scripts = (Path(jtrain.report.__file__).with_name("chart.js"), Path(__file__).with_name("dashboard.js"))
    return Page(
        f"jtrain: {', '.join(run.name for run in runs)}",
        sections,
        script="".join(script.read_text() for script in scripts),
        is_live=True,
    )


def data_of(runs: Sequence[RunFolder], shown: StepRange | None, buckets: int) -> dict[str, Any]:
    """Data of the page.

    Args:
      shown: None for all steps.
      buckets: parts of the steps of which lines keep their lowest and highest value, one per pixel.
    """
    last = max([1.0, *(steps[-1] for run in runs if len(steps := run.metrics.columns.steps))])
    visible_steps = shown or (0.0, last)
    charts = {name: [*_line_series(runs, name, visible_steps, buckets)] for name in LINES}
    for index, run in enumerate(runs):
        charts[f"goodput-{index}"] = [*_goodput_stack(run, visible_steps)]
        charts[f"parts-{index}"] = [*_parts_stack(run)]
        charts[f"mixture-{index}"] = [*_mixture_series(run, visible_steps, buckets)]
    tables = {
        "runs": [_runs_table(runs)],
        "checkpoints": [_checkpoints_table(runs)],
        "events": [_events_table(runs)],
        "samples": [*_sample_blocks(runs)],
    }
    return {
        "version": sum(run.version for run in runs),
        "steps": [0.0, last],
        "charts": charts,
        "marks": [mark for index, run in enumerate(runs) for mark in _marks(run, index)],
        "blocks": {name: blocks_html(blocks) for name, blocks in tables.items()},
    }


def _colour(index: int) -> str:
    return f"c{index % COLOURS}"


def _line_series(
    runs: Sequence[RunFolder], name: str, shown: StepRange, buckets: int
) -> Iterator[dict[str, Any]]:
    for index, run in enumerate(runs):
        columns, evaluations = run.metrics.columns, run.metrics.evaluations
        values = columns.values(name)
        if name in _SPEEDS:
            # The speed of an attempt's first line is the compiler's, and would be the range of the chart.
            first_lines = [np.searchsorted(columns.steps, event.step, "right") for event in run.wall.attempts]
            values[[line for line in first_lines if line < len(values)]] = np.nan
        yield _series(run.name, _colour(index), columns.steps, values, shown, buckets)
        for column in evaluations.names() if name == "loss_nats" else ():
            label = f"{run.name}, {column.removeprefix('set.').removesuffix('_loss_nats')}"
            values = evaluations.values(column)
            yield _series(label, _colour(index), evaluations.steps, values, shown, buckets, is_dashed=True)


def _mixture_series(run: RunFolder, shown: StepRange, buckets: int) -> Iterator[dict[str, Any]]:
    columns = run.metrics.columns
    tokens = {
        name.partition(".")[2]: np.nancumsum(columns.values(name)) for name in columns.names("data_tokens.")
    }
    # One source has all tokens, whatever the plan is.
    if len(tokens) < 2:
        return
    unit = run.config.get("data.mixture_unit", "'tokens'").strip("'")
    # The largest, as many as there are colours.
    for index, name in enumerate(sorted(tokens, key=lambda name: -tokens[name][-1])[:COLOURS]):
        values, planned = tokens[name] / sum(tokens.values()), columns.values(f"data_planned.{name}")
        yield _series(name, _colour(index), columns.steps, values, shown, buckets)
        label = f"{name}, planned share of {unit}"
        yield _series(label, _colour(index), columns.steps, planned, shown, buckets, is_dashed=True)


def _series(
    name: str,
    colour: str,
    x: Float[np.ndarray, " lines"],
    y: Float[np.ndarray, " lines"],
    shown: StepRange,
    buckets: int,
    *,
    is_dashed: bool = False,
) -> dict[str, Any]:
    """A line through the values that a chart shows, and one more at each end: it goes on beyond the edge."""
    visible = slice(max(0, np.searchsorted(x, shown[0]) - 1), np.searchsorted(x, shown[1], "right") + 1)
    # Lines before the first known value, and all of what nobody told, would only make the page larger.
    x, y = (x[visible], y[visible]) if not np.isnan(y[visible]).all() else (x[:0], y[:0])
    drawn = thin(x, y, buckets=buckets)
    return {
        "name": name,
        "colour": colour,
        "dashed": is_dashed,
        "x": x[drawn].tolist(),
        "y": _digits(y[drawn]),
    }


def _digits(values: Iterable[float]) -> list[float | None]:
    # Six digits are more than a screen has pixels; JSON has no NaN.
    return [None if math.isnan(value) else float(f"{value:.6g}") for value in values]


def _goodput_stack(run: RunFolder, shown: StepRange) -> Iterator[dict[str, Any]]:
    """Share of each category in the wall time of each span of steps."""
    steps = run.wall.columns.steps
    # Each span ends at a logged step: of the steps between two lines nobody knows the seconds.
    ends = np.unique(steps[(steps > shown[0]) & (steps <= shown[1])])
    if not len(ends):
        return
    ends = ends[np.unique(np.linspace(0, len(ends) - 1, _SPANS).round().astype(int))]
    # The seconds of a step's line are those before it; those of a start are before the steps that follow.
    span = np.searchsorted(ends, steps)
    is_shown = (steps >= shown[0]) & (span < len(ends))
    seconds = {
        name: np.bincount(
            span[is_shown], np.nan_to_num(run.wall.columns.values(name))[is_shown], minlength=len(ends)
        )
        for name in CATEGORIES
    }
    total = np.maximum(sum(seconds.values()), 1e-12)
    for index, name in enumerate(name for name in CATEGORIES if seconds[name].any()):
        label = (
            f"{CATEGORY_NAMES.get(name, name.replace('_', ' '))} {share(seconds[name].sum(), total.sum())}"
        )
        from_to = {"x": [shown[0], *ends[:-1].tolist()], "to": ends.tolist()}
        yield {"name": label, "colour": _colour(index), "y": _digits(seconds[name] / total)} | from_to


def _parts_stack(run: RunFolder) -> Iterator[dict[str, Any]]:
    """Milliseconds of each part of the mean step of each traced window."""
    steps = sorted(run.windows)
    for part in PARTS:
        values = [1e3 * run.windows[step][part.key] for step in steps]
        if any(values):
            # A window has few of many thousand steps: the browser makes it wide enough to be seen.
            yield {"name": part.name, "colour": part.key, "x": steps, "to": steps, "y": values}


def _marks(run: RunFolder, index: int) -> Iterator[dict[str, Any]]:
    kinds = [(event.step, event.kind) for event in run.events if event.kind != "data"]
    for step, kind in [*((step, "checkpoint") for step in run.checkpoints), *kinds]:
        yield {"step": step, "kind": kind, "run": index, "colour": _colour(index)}


def _runs_table(runs: Sequence[RunFolder]) -> Table:
    quantities = ("step", "loss", "evaluation", "tokens/s", "MFU", "goodput", "memory", "skipped", "restarts")
    table = Table("runs", words("run", "state") + numbers(*quantities), css="many")
    for index, run in enumerate(runs):
        line = run.metrics.newest
        # Of the published peak, else of the measured one; of a device, else of the host.
        mfu, gib = line.get("mfu") or line.get("measured_peak_share"), line.get("device_memory_peak_gib")
        mib = line.get("host_rss_mib") if gib is None else 1024 * gib
        table.add(
            Cell(run.name, key=_colour(index), title=str(run.workdir)),
            run.status,
            f"{run.step:,} of {run.num_steps or 0:,}",
            number(line.get("loss_nats"), "nats"),
            number(run.metrics.newest_evaluation.get("eval_loss_nats"), "nats"),
            short(line["tokens_per_s"]) if line else "unknown",
            share(mfu),
            share(run.goodput.get("goodput")),
            size(None if mib is None else mib * 2**20),
            str(line.get("skipped_updates", 0)),
            str(len(run.wall.attempts[1:])),
        )
    return table


def _checkpoints_table(runs: Sequence[RunFolder]) -> PageBlock:
    table = Table("checkpoints", words("run") + numbers("step", "size") + words("saved at (UTC)"))
    for run in runs:
        for step, manifest in sorted(run.checkpoints.items(), reverse=True):
            table.add(run.name, f"{step:,}", size(manifest.file_bytes), manifest.saved_at[:19])
    return table if table.rows else "No checkpoint yet."


def _events_table(runs: Sequence[RunFolder]) -> PageBlock:
    events = sorted(
        ((event, run.name) for run in runs for event in run.events), key=lambda pair: -pair[0].step
    )
    title = f"the newest {_EVENTS} of {len(events)} events"
    table = Table(title, words("run") + numbers("step") + words("kind", "what", "at (UTC)"), css="many")
    for event, name in events[:_EVENTS]:
        table.add(name, f"{event.step:,}", event.kind, event.text, event.time)
    return (
        table
        if events
        else "Nothing happened besides steps. Alerts are here if the config has `alerts.file`."
    )


def _sample_blocks(runs: Sequence[RunFolder]) -> Iterator[PageBlock]:
    for run in runs:
        for sample in run.samples[:3]:
            expected = "" if sample.get("expected") is None else f"; expected: {sample['expected']}"
            yield Paragraph(f"{run.name}, step {sample['step']}, {sample['of']}{expected}", "soft")
            yield Verbatim(f"{sample['prompt']}{sample['answer']}")
    if not any(run.samples for run in runs):
        yield "No text yet: a run with `eval.prompts` or `eval.answers` keeps some at each evaluation."
