"""Seconds from a saved state to the first batch at 306 sources, at step 10 and at step 1,000,000.

From the call that opens the sources to the batch, with every process that this starts; what the trainer
imports is loaded before. Beside Grain, whose MapDataset.mix state is one number, and torchdata's
StatefulDataLoader over an iterable without a state of its own, which is read again from the start.
"""

import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.data_parts import files
from bench.data_parts.programs import peer_python, reader
from jtrain.bench import Row, row
from jtrain.data.dataset import PackedText, open_dataset

BATCH = 64
EARLY, LATE = 10, 1_000_000
TORCH_LATE = 10_000
"""Late step of torchdata: it reads all earlier batches again, so a million would take too long."""


def rows(
    *, torch_python: str | None = None, sources: int = files.NUM_SOURCES, rounds: int = 3
) -> Iterator[Row]:
    """Early and late take turns; the fastest round counts."""
    python = peer_python(torch_python)
    parquet = files.sources("parquet", num_sources=sources)
    arrayrecord = files.sources("arrayrecord", num_sources=sources)
    states = states_of(parquet)
    ours: dict[int, list[float]] = {EARLY: [], LATE: []}
    grain: dict[int, list[float]] = {EARLY: [], LATE: []}
    for _ in range(rounds):
        for step in (EARLY, LATE):
            ours[step].append(our_resume_s(parquet, states[step]))
            grain[step].append(peer_resume_s(None, "grain", arrayrecord, step))
    # Once: its late resume takes minutes, and no bar is on it.
    torch = {step: peer_resume_s(python, "torch", parquet, step) for step in (EARLY, TORCH_LATE)}
    # The difference of two resumes: start-up cancels out.
    per_step_s = (torch[TORCH_LATE] - torch[EARLY]) / (TORCH_LATE - EARLY)
    label = f"first batch, {sources} sources"
    for step in ours:
        yield row(f"{label}, step {step:,}", min(ours[step]), "s", bar="< 5")
    late = f"{label}, step {LATE:,} against step {EARLY}"
    yield row(late, min(ours[LATE]), "s", baseline=min(ours[EARLY]), bar="<= 1.25")
    for step in ours:
        yield row(f"{label}, step {step:,}, against Grain", min(ours[step]), "s", baseline=min(grain[step]))
    for step, seconds in torch.items():
        yield row(f"{label}, step {step:,}, torchdata", seconds, "s")
    yield row(f"{label}, step {LATE:,}, torchdata, by its seconds per step", per_step_s * LATE, "s")


def our_resume_s(folder: Path, state: dict[str, Any] | None) -> float:
    """Returns the seconds from `open_dataset` to the first batch after `state`."""
    start_s = time.perf_counter()
    with open_dataset(spec_of(folder), seed=0).train_batches(state) as batches:
        next(batches)
        return time.perf_counter() - start_s


def states_of(folder: Path) -> dict[int, dict[str, Any]]:
    """Returns the state after EARLY steps, and one as after LATE: sources were read hundreds of times."""
    with open_dataset(spec_of(folder), seed=0).train_batches() as batches:
        for _ in range(EARLY):
            next(batches)
        early = batches.state()
    # Scaled, not run: a state holds positions alone, and a million steps would take too long.
    late = copy.deepcopy(early)
    planner = late["planner"]
    planner |= {"step": LATE, "units": planner["units"] * LATE // EARLY, "carry": [[], [], [], []]}
    for columns in planner["sources"].values():
        columns[0], columns[2] = columns[0] * LATE // EARLY, columns[2] * LATE // EARLY  # cursor, tokens
    return {EARLY: early, LATE: late}


def spec_of(folder: Path) -> PackedText:
    """`BATCH` documents per step, on average."""
    return files.mixture(folder, seq_len=8192, global_batch=5)


def peer_resume_s(python: str | None, name: str, folder: Path, step: int) -> float:
    """Returns the seconds from the peer's first call to the batch after `step`, in a new process.

    The peer's imports are not counted.
    """
    with reader(python, "resume", name, folder, step=step, batch=BATCH) as program:
        return program.answer()["first_batch_s"]
