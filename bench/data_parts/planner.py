"""Planning and filling rows in memory: tokens/s and fill beside Grain's packings; cost over ranks, balanced.

Lengths are those of a web corpus (median 318, mean 663 tokens, at most 8192), in rows of 8192. Filling alone
is what each host does for its rows; the plan is made from lengths ahead of time. Grain packs while it copies,
and gives no targets. Balance: the cost of a document of n tokens is 24576 n + n**2, the forward FLOPs of a 7B
model up to a factor, and what it is compared with is the same rows in random order, which is what a loader
without a plan gives.
"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jtrain.bench import Row, row
from jtrain.data.constructor.collate import Rows, fill_rows, spans_of
from jtrain.data.mixture.schedule import Constant
from jtrain.data.planner.balance import spread
from jtrain.data.planner.packing import Packing
from jtrain.data.planner.pieces import Pieces
from jtrain.data.planner.planner import LoadingPlan, Planner, PlannerSpec

SEQ_LEN, LINEAR = 8192, 24576.0
BATCH_ROWS = 64
"""Rows of a packed batch, and Grain's packing bins."""
PACKINGS: tuple[Packing, ...] = ("concat", "first_fit", "best_fit")
BALANCED: tuple[tuple[Packing, int, int], ...] = (
    ("concat", 8, 4), ("concat", 64, 1), ("concat", 64, 4), ("concat", 64, 8), ("best_fit", 64, 1), ("best_fit", 64, 4),
)  # fmt: skip
"""Packing, data ranks, and rows of each."""


def rows(*, sources: int = 306, steps: int | None = None) -> Iterator[Row]:
    """Yields each packing of ours beside Grain's; then balance, ranks of one row to eight.

    Args:
      sources: in the balanced mixture.
      steps: planned steps per measurement: 12 packed (the best of three counts), 40 balanced.
    """
    # The same documents for every packing.
    documents = web_documents(20_000, seed=0)
    for packing in PACKINGS:
        yield from packing_rows(packing, documents, steps or 12)
    for packing, ranks, per_rank in BALANCED:
        plan_ms, balanced, random_order = balance(sources, ranks, per_rank, packing, steps or 40)
        label = f"{packing}, {ranks} ranks x {per_rank} rows of {SEQ_LEN}"
        # One row to a rank leaves nothing to exchange: the row with the longest document is the floor.
        bar = "<= 1.05" if per_rank >= 4 else None
        yield row(f"{label}: max/mean cost (rows at random: {random_order:.3f})", balanced, "ratio", bar=bar)
        bar = "<= 5" if (ranks, per_rank, packing) == (64, 4, "concat") else None
        yield row(f"{label}: plan one step, {sources} sources", plan_ms, "ms", bar=bar)


def web_lengths(shape: Any, rng: np.random.Generator) -> np.ndarray:
    """Lengths with a long tail, in tokens."""
    # exp(5.76) is the median, 318; the mean is about exp(1.21^2 / 2) = 2.1 times that.
    return np.clip(rng.lognormal(5.76, 1.21, shape), 16, SEQ_LEN).astype(np.int64)


def web_documents(count: int, *, seed: int) -> list[np.ndarray]:
    """Ids of documents with a long tail, as views of one array."""
    rng = np.random.default_rng(seed)
    ends = np.cumsum(web_lengths(count, rng))
    return np.split(rng.integers(1, 50_000, ends[-1]).astype(np.uint16), ends[:-1])


def spec_of(weights: dict[str, float], chunks: int, global_batch: int, packing: Packing) -> PlannerSpec:
    """Returns the planner's settings: so many documents of each source."""
    return PlannerSpec(
        names=tuple(weights),
        chunks_per_epoch=(chunks,) * len(weights),
        seq_len=SEQ_LEN,
        global_batch=global_batch,
        schedule=Constant(weights),
        packing=packing,
        cost_linear=LINEAR,
        cost_quadratic=1.0,
    )


def plan_steps(planner: Planner, steps: int) -> tuple[list[float], list[LoadingPlan]]:
    """Returns CPU seconds to plan each of so many steps, and the plans; a step before them is not timed."""
    # The first step looks up lengths, which later ones find in the buffers.
    _, state = planner.plan(planner.start())
    plan_s, plans = [], []
    for _ in range(steps):
        # CPU time: a busy machine must not decide.
        start_s = time.process_time()
        plan, state = planner.plan(state)
        plan_s.append(time.process_time() - start_s)
        plans.append(plan)
    return plan_s, plans


def packing_rows(packing: Packing, documents: list[np.ndarray], batches: int) -> Iterator[Row]:
    """Rows of one packing, ours and Grain's."""
    grain_tokens_per_s, grain_fill = best_of_three(
        functools.partial(pack_with_grain, packing, documents, batches)
    )
    lengths = np.asarray([len(ids) for ids in documents], np.int32)
    planner = Planner(
        spec_of({"web": 1.0}, len(documents), BATCH_ROWS, packing),
        lambda source, first, count: np.take(lengths, range(first, first + count), mode="wrap"),
    )
    plan_s, plans = plan_steps(planner, batches)
    tokens = sum(int(plan.tokens_by_source.sum()) for plan in plans)
    fill_tokens_per_s, fill = best_of_three(functools.partial(fill_from_plans, plans, documents))
    # Seconds add up: planning, then filling at its own rate.
    tokens_per_s = tokens / (sum(plan_s) + tokens / fill_tokens_per_s)
    label = f"{packing}, {BATCH_ROWS} x {SEQ_LEN}"
    yield row(f"{label}: fill rows", fill_tokens_per_s, "tokens/s", bar=">= 50e6")
    yield row(f"{label}: plan and fill", tokens_per_s, "tokens/s", baseline=grain_tokens_per_s, bar=">= 1")
    yield row(f"{label}: real tokens over capacity", fill, "share", bar=">= 0.998")
    yield row(f"{label}: the same of Grain", grain_fill, "share")


def best_of_three(measure: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    """Returns the best tokens/s of CPU time of three measurements, with its fill."""
    return max(measure() for _ in range(3))


def fill_from_plans(plans: list[LoadingPlan], documents: list[np.ndarray]) -> tuple[float, float]:
    """Fills rows from plans; returns tokens/s and fill."""
    out, tokens = Rows.empty(BATCH_ROWS, SEQ_LEN), 0
    start_s = time.process_time()
    for plan in plans:
        fill_rows(out, plan.pieces, spans_of(lambda source, document: documents[document % len(documents)]))
        tokens += int(plan.tokens_by_source.sum())
    return tokens / (time.process_time() - start_s), tokens / (len(plans) * BATCH_ROWS * SEQ_LEN)


def pack_with_grain(packing: Packing, documents: list[np.ndarray], batches: int) -> tuple[float, float]:
    """Packs the same with Grain, on one thread; returns tokens/s and fill."""
    import grain
    from grain import experimental

    # Shuffled and endless, as the planner's documents are.
    source = grain.MapDataset.source([{"token": ids} for ids in documents]).seed(0).shuffle().repeat()
    stream = source.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    if packing == "concat":
        packed: Any = experimental.ConcatThenSplitIterDataset(stream, length_struct={"token": SEQ_LEN})
    else:
        dataset_class = {
            "first_fit": experimental.FirstFitPackIterDataset,
            "best_fit": experimental.BestFitPackIterDataset,
        }
        packed = dataset_class[packing](stream, length_struct={"token": SEQ_LEN}, num_packing_bins=BATCH_ROWS)
    batched: Iterator[Any] = iter(packed.batch(BATCH_ROWS))
    # The first batch fills Grain's packing bins, and is not timed.
    next(batched)
    tokens, start_s = 0, time.process_time()
    for _ in range(batches):
        tokens += int(np.count_nonzero(next(batched)["token_segment_ids"]))
    return tokens / (time.process_time() - start_s), tokens / (batches * BATCH_ROWS * SEQ_LEN)


def balance(
    sources: int, ranks: int, per_rank: int, packing: Packing, steps: int
) -> tuple[float, float, float]:
    """Median milliseconds to plan a step; mean spread over ranks, balanced, and with the rows shuffled."""
    rng = np.random.default_rng(0)
    lengths = web_lengths((sources, 4000), rng).astype(np.int32)
    names = [f"source{i:03}" for i in range(sources)]
    weights = dict(zip(names, (rng.pareto(1.2, sources) + 0.05).tolist(), strict=True))

    def lengths_from(source: int, first: int, count: int) -> np.ndarray:
        first %= lengths.shape[1]
        # May be fewer than `count`, at the end of the array: `Lengths` allows it, if there is one at least.
        return lengths[source, first : first + count]

    planner = Planner(spec_of(weights, lengths.shape[1], ranks * per_rank, packing), lengths_from)
    spent_s, plans = plan_steps(planner, steps)
    balanced = [spread(plan.row_cost, ranks) for plan in plans]
    random_order = [
        spread(rng.permutation(row_costs(plan.pieces, ranks * per_rank)), ranks) for plan in plans
    ]
    return 1e3 * float(np.median(spent_s)), float(np.mean(balanced)), float(np.mean(random_order))


def row_costs(pieces: Pieces, num_rows: int) -> np.ndarray:
    """Returns the cost of each row, counted again from the plan alone."""
    lengths = pieces.end - pieces.start
    return np.bincount(pieces.row, weights=LINEAR * lengths + lengths**2, minlength=num_rows).astype(np.int64)
