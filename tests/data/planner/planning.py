"""Fake sources that consist of lengths only, and planners over them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from jtrain.data.mixture.schedule import Constant, Schedule
from jtrain.data.planner.planner import LoadingPlan, Planner, PlannerSpec, PlannerState

Lengths = Callable[[int, int, int], np.ndarray]


def of_table(table: list[list[int]]) -> Lengths:
    """Returns `Lengths` with the same lengths in each epoch."""
    arrays = [np.asarray(lengths, np.int32) for lengths in table]
    return lambda source, first, count: arrays[source][np.arange(first, first + count) % len(arrays[source])]


def lognormal(sources: int, documents: int = 2000, seed: int = 0) -> list[list[int]]:
    """Returns lengths as in data.md, section 4: median 318, mean 663 tokens, one document in fifty is
    empty.
    """
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(5.76, 1.21, (sources, documents)), 16, 8192).astype(int)
    return np.where(rng.random(lengths.shape) < 0.02, 0, lengths).tolist()


def make(table: list[list[int]], schedule: Schedule | None = None, **fields: Any) -> PlannerSpec:
    names = tuple(f"s{i}" for i in range(len(table)))
    spec = PlannerSpec(
        names=names,
        chunks_per_epoch=tuple(len(t) for t in table),
        seq_len=16,
        global_batch=4,
        schedule=schedule or Constant({name: i + 1 for i, name in enumerate(names)}),
    )
    return dataclasses.replace(spec, **fields)


def run(planner: Planner, state: PlannerState, steps: int) -> tuple[list[LoadingPlan], PlannerState]:
    plans = []
    for _ in range(steps):
        plan, state = planner.plan(state)
        plans.append(plan)
    return plans, state


def content(plan: LoadingPlan) -> list[list[int]]:
    pieces = plan.pieces
    return np.stack([pieces.row, pieces.source, pieces.document, pieces.start, pieces.end]).tolist()


specs = st.fixed_dictionaries(
    {
        "packing": st.sampled_from(["concat", "first_fit", "best_fit"]),
        "unit": st.sampled_from(["tokens", "samples", "rows"]),
        "seq_len": st.integers(2, 24),
        "global_batch": st.integers(1, 6),
        "cost_quadratic": st.sampled_from([0.0, 0.5]),
    }
)
tables = st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(any), min_size=1, max_size=4)
