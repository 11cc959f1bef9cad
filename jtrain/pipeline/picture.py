"""Pictures of a pipeline schedule: who computes what when, and what each worker keeps, as text and SVG."""

from collections.abc import Sequence

from rich.text import Text

from jtrain.pipeline.clocks import PipelineTimeline, Span
from jtrain.report.charts import step_area, text

COLOURS = {"F": "#4c78a8", "I": "#f2a93b", "W": "#59a14f", "B": "#e15759"}
"""Colour of each kind of operation; later chunks of a worker are paler."""

MEANINGS = {"F": "forward", "I": "backward by input", "W": "backward by weight", "B": "backward"}
_STYLES = {"F": "blue", "I": "yellow", "W": "green", "B": "red"}
_LEVELS = " ▁▂▃▄▅▆▇█"
_LANE, _ROW, _LEFT, _WIDTH = 26, 66, 90, 1200


def text_rows(
    timeline: PipelineTimeline, *, stages: int, width: int, workers: Sequence[int] | None = None
) -> list[Text]:
    """A line per worker as wide as the time, `.` where it waits; beside it the most that it has in flight.

    Where there is room an operation is its kind and microbatch, otherwise a letter per column; later chunks
    are in lower case.

    Args:
      stages: workers of the whole pipeline: a virtual stage from this number on is a later chunk.
      width: columns of the whole line.
      workers: their numbers, if the timeline does not have all workers.
    """
    scale, columns = _columns(timeline, width)
    rows: list[Text] = []
    names = range(len(timeline.workers)) if workers is None else workers
    for worker, spans, steps in zip(names, timeline.workers, timeline.in_flight(), strict=True):
        line = Text(f"worker {worker:<3}")
        column = 0
        for span in spans:
            start, end = round(span.start * scale), round(span.end * scale)
            # Rounding both ends keeps all rows aligned in time, at the price of very short operations.
            if end <= column:
                continue  # shorter than a column
            line.append("." * (start - column), style="dim")
            line.append(_label(span, end - max(start, column), stages), style=_STYLES[span.op.kind])
            column = end
        line.append("." * (columns - column), style="dim")
        line.append(f" {max(count for _, count in steps):>4} in flight")
        rows.append(line)
    return rows


def memory_rows(timeline: PipelineTimeline, *, width: int) -> list[Text]:
    """A line per worker with the height of what it has in flight over time."""
    columns = _columns(timeline, width)[1]
    max_peak = max(timeline.peaks)
    rows: list[Text] = []
    for worker, steps in enumerate(timeline.in_flight()):
        line = Text(f"worker {worker:<3}")
        for column in range(columns):
            # The middle of the column, as the count there stands for the whole column.
            time = timeline.makespan * (column + 0.5) / columns
            count = max((step for step in steps if step[0] <= time), default=(0.0, 0))[1]
            # Rounded up: anything in flight shows.
            line.append(_LEVELS[-(-count * (len(_LEVELS) - 1) // max_peak)])
        rows.append(line)
    return rows


def _columns(timeline: PipelineTimeline, width: int) -> tuple[float, int]:
    """Columns per unit of time, and of the whole time; the shortest operation takes up to 4 whole columns."""
    # 25 columns for `worker 123` and ` 1234 in flight`, and one to spare.
    room = max(20, width - 26)
    shortest = min(span.end - span.start for spans in timeline.workers for span in spans)
    # Whole columns per operation keep equal operations equally wide.
    columns_per_op = min(4, int(room * shortest / timeline.makespan))
    scale = columns_per_op / shortest if columns_per_op else room / timeline.makespan
    return scale, round(timeline.makespan * scale)


def _label(span: Span, width: int, stages: int) -> str:
    """Text of an operation in `width` columns."""
    kind = span.op.kind.lower() if span.op.stage >= stages else span.op.kind
    label = f"{kind}{span.op.microbatch}"
    return label.ljust(width, "-" if width > len(label) else " ") if len(label) <= width else kind * width


def svg(
    timeline: PipelineTimeline,
    *,
    stages: int,
    title: str,
    buffer_bytes: int | None = None,
    workers: Sequence[int] | None = None,
) -> str:
    """A standalone SVG: a lane of operations per worker, and below it the worker's memory over time.

    Args:
      stages: workers of the whole pipeline: a virtual stage from this number on is a later chunk.
      title: the first line.
      buffer_bytes: bytes that one chunk and microbatch keep; None labels counts instead.
      workers: their numbers, if the timeline does not have all workers.
    """
    names = range(len(timeline.workers)) if workers is None else workers
    height = _ROW * len(names) + 60
    # All lanes on one scale, so that a vertical line is one moment.
    scale = _WIDTH / timeline.makespan
    highest = max(timeline.peaks)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 110} {height}" '
        f'font-family="sans-serif" font-size="12" role="img" aria-label="{text(title)}">',
        f'<text x="0" y="16" font-size="14">{text(title)}</text>',
    ]
    for lane, (worker, spans, steps) in enumerate(
        zip(names, timeline.workers, timeline.in_flight(), strict=True)
    ):
        top = 30 + _ROW * lane
        parts.append(f'<text x="0" y="{top + 17}">worker {worker}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH}" height="{_LANE}" fill="#eeeeee"/>')
        parts += [_box(span, top, scale, stages) for span in spans]
        peak = max(count for _, count in steps)
        size = f"{peak} kept" if buffer_bytes is None else f"{peak * buffer_bytes / 2**30:.2f} GiB"
        parts.append(
            f'<path d="{_in_flight(steps, timeline.makespan, top + _ROW - 8, scale, highest)}" '
            'fill="#b0b0b0"/>'
        )
        parts.append(f'<text x="{_LEFT + _WIDTH + 6}" y="{top + _ROW - 10}">{size}</text>')
    for index, (kind, meaning) in enumerate(MEANINGS.items()):
        x = _LEFT + 190 * index
        parts.append(f'<rect x="{x}" y="{height - 22}" width="14" height="14" fill="{COLOURS[kind]}"/>')
        parts.append(f'<text x="{x + 20}" y="{height - 10}">{kind}: {meaning}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _box(span: Span, top: int, scale: float, stages: int) -> str:
    """An operation with its name, if there is room, and times as a tooltip."""
    x, width = _LEFT + span.start * scale, (span.end - span.start) * scale
    # Later chunks are paler, as they are in lower case in text.
    pale = 0.55 if span.op.stage >= stages else 1.0
    box = (
        f'<g><title>{span.op}: {span.start:.6g} to {span.end:.6g}</title><rect x="{x:.2f}" y="{top}" '
        f'width="{width:.2f}" height="{_LANE}" fill="{COLOURS[span.op.kind]}" fill-opacity="{pale}" '
        'stroke="white" stroke-width="0.5"/>'
    )
    # 9 units of width per digit, at the font's size of 12.
    if width > 9 * len(str(span.op.microbatch)):
        box += (
            f'<text x="{x + width / 2:.2f}" y="{top + 17}" text-anchor="middle">{span.op.microbatch}</text>'
        )
    return f"{box}</g>"


def _in_flight(steps: Sequence[tuple[float, int]], end: float, base: int, scale: float, max_peak: int) -> str:
    """Area of what a worker has in flight, `max_peak` being as high as there is room."""
    x = [_LEFT, *(_LEFT + time * scale for time, _ in steps)]
    high = [base, *(base - count * (_ROW - _LANE - 12) / max_peak for _, count in steps)]
    return step_area(x, [base] * len(x), high, _LEFT + end * scale)
