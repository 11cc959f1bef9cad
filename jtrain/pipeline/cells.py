"""Schedules as CSV in the cells of torchtitan: a row per worker, an operation per cell, an empty cell for
idle time.

    0F0,0F1,,,0B0,0B1
    ,1F0,1B0,1F1,1B1,

Idle cells may be written for the eye. They are dropped when read: the clocks of `clocks.py` say when a worker
waits.
"""

import csv
import io
import itertools
from pathlib import Path

from jtrain.errors import FileError, UserError
from jtrain.pipeline.clocks import dataflow, unit_costs
from jtrain.pipeline.schedule import ChunkPlacement, PipelineSchedule, StageOp, parse_op, worker_of


def to_csv(schedule: PipelineSchedule) -> str:
    """The schedule as CSV, each operation in the column of its start with unit costs; B takes two columns."""
    timeline = dataflow(schedule, unit_costs(schedule))
    # Unit costs make all times whole numbers.
    width = int(timeline.makespan)
    rows: list[list[str]] = []
    for spans in timeline.workers:
        row = [""] * width
        for span in spans:
            row[int(span.start)] = str(span.op)
        rows.append(row)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def read_csv(path: Path, *, stages: int | None = None, microbatches: int | None = None) -> PipelineSchedule:
    """The schedule of a CSV file. Its operations are parsed, not checked: see `checker.check`.

    Args:
      stages, microbatches: what the run has; None takes them from the file.

    Raises:
      FileError: the file cannot be read.
      UserError: a cell is not an operation, or the file is of other numbers; the message has line and cell.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise FileError(f"schedule {path} cannot be read: {reason}.") from error
    return parse_csv(text, str(path), stages=stages, microbatches=microbatches)


def parse_csv(
    text: str, name: str, *, stages: int | None = None, microbatches: int | None = None
) -> PipelineSchedule:
    """The schedule of a CSV text, named `name` in messages; otherwise as `read_csv`."""
    # Line numbers of the file, for messages: empty lines are skipped but counted.
    lines = [
        (number, cells)
        for number, cells in enumerate(csv.reader(io.StringIO(text)), start=1)
        if any(cell.strip() for cell in cells)
    ]
    if not lines:
        raise UserError(f"schedule {name} is empty. Write a row of operations per worker, such as 0F0,0B0.")
    streams = tuple(tuple(_row(name, number, cells)) for number, cells in lines)
    if stages is not None and len(streams) != stages:
        raise UserError(
            f"schedule {name} is for {len(streams)} stages, one per row, but stages={stages}. Set stages to "
            f"{len(streams)} (mesh.stage of a config), or write another schedule."
        )
    # Microbatches are numbered from 0; a missing one is found later, by `checker.check`.
    count = 1 + max(op.microbatch for stream in streams for op in stream)
    if microbatches is not None and count != microbatches:
        raise UserError(
            f"schedule {name} has {count} microbatches, but microbatches={microbatches}. Set microbatches to "
            f"{count} (layout.microbatches of a config), or write another schedule."
        )
    chunks, placement = _placement(name, lines, streams)
    return PipelineSchedule(name, len(streams), count, chunks, placement, streams)


def _row(name: str, number: int, cells: list[str]) -> list[StageOp]:
    """The operations of one line."""
    ops: list[StageOp] = []
    for column, cell in enumerate(cells, start=1):
        # Idle time, written for the eye.
        if not cell.strip():
            continue
        try:
            ops.append(parse_op(cell.strip()))
        except UserError as error:
            raise UserError(f"schedule {name}, line {number}, cell {column}: {error}") from error
    return ops


def _placement(
    name: str, lines: list[tuple[int, list[str]]], streams: tuple[tuple[StageOp, ...], ...]
) -> tuple[int, ChunkPlacement]:
    """Virtual stages per worker, and which of the placements puts them into these rows."""
    stages = len(streams)
    total = 1 + max(op.stage for stream in streams for op in stream)
    if total % stages:
        raise UserError(
            f"schedule {name} has virtual stages 0 to {total - 1} in {stages} rows. Each row needs as many "
            f"as the others: their number must be a multiple of {stages}."
        )
    chunks = total // stages
    # A V has exactly two chunks per worker.
    placements: tuple[ChunkPlacement, ...] = ("round_robin", "v") if chunks == 2 else ("round_robin",)
    misfits: list[tuple[int, int, StageOp, ChunkPlacement]] = []
    for placement in placements:
        ops = itertools.chain.from_iterable(((p, op) for op in stream) for p, stream in enumerate(streams))
        misplaced = next(((p, op) for p, op in ops if worker_of(op.stage, stages, placement) != p), None)
        if misplaced is None:
            return chunks, placement
        misfits.append((lines[misplaced[0]][0], *misplaced, placement))
    # The placement that holds the furthest is probably the one that the user meant.
    number, p, op, placement = max(misfits, key=lambda misfit: misfit[:2])
    # Cells are counted from 1, as spreadsheets do.
    cell = next(i for i, cell in enumerate(lines[p][1], start=1) if cell.strip() == str(op))
    row = lines[worker_of(op.stage, stages, placement)][0]
    raise UserError(
        f"schedule {name}, line {number}, cell {cell}: {op} is in the row of worker {p}, but virtual stage "
        f"{op.stage} belongs in line {row}. With {chunks} per worker, row p holds p, p + {stages}, ...; with "
        f"2, also p and {2 * stages - 1} - p."
    )
