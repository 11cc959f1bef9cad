"""Packing documents into rows: tokens/s of one core and fill, beside Grain's first fit, best fit and concat-then-split.

Documents in memory, lengths as in a web corpus (median 318, mean 663 tokens, at most 8192), in rows of 8192. Ours is
timed twice: filling alone, which is what each host does for its rows, and with the plan, which is made from lengths
ahead of time. Grain packs while it copies, and gives no targets.
"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jtrain.bench import Options, Row, option, row
from jtrain.data.constructor.collate import Rows, fill_rows, views_of
from jtrain.data.mixture.schedule import Constant
from jtrain.data.planner.packing import Packing
from jtrain.data.planner.planner import LoadingPlan, Planner, PlannerSpec

SEQ_LEN = 8192


OPTIONS = (
    option("--rows", type=int, default=64, help="rows of a batch, and Grain's packing bins"),
    option("--batches", type=int, default=12, help="batches per measurement; the best of three counts"),
)


def run(args: Options) -> list[Row]:
    """Each packing of ours with the one of Grain's, one after the other."""
    documents = web_documents(20_000, seed=0)
    rows: list[Row] = []
    packings: tuple[Packing, ...] = ("concat", "first_fit", "best_fit")
    for packing in packings:
        measure_grain = functools.partial(of_grain, packing, documents, args.rows, args.batches)
        grain_tokens_per_s, grain_fill = best_of_three(measure_grain)
        plan_s, plans = plan_batches(packing, documents, args.rows, args.batches)
        tokens = sum(int(plan.tokens_by_source.sum()) for plan in plans)
        fill = tokens / (len(plans) * args.rows * SEQ_LEN)
        fill_tokens_per_s, _ = best_of_three(functools.partial(of_ours, plans, documents, args.rows))
        both = tokens / (plan_s + tokens / fill_tokens_per_s)
        what = f"{packing}, {args.rows} x {SEQ_LEN}"
        rows += [
            row(f"{what}: fill rows", fill_tokens_per_s, "tokens/s", bar=">= 50e6"),
            row(f"{what}: plan and fill", both, "tokens/s", baseline=grain_tokens_per_s, bar=">= 1"),
            row(f"{what}: real tokens over capacity", fill, "share", bar=">= 0.998"),
            row(f"{what}: the same of Grain", grain_fill, "share"),
        ]
    return rows


def web_documents(count: int, *, seed: int) -> list[np.ndarray]:
    """Ids of documents with a long tail, as views of one array."""
    rng = np.random.default_rng(seed)
    ends = np.cumsum(np.clip(rng.lognormal(5.76, 1.21, count), 16, SEQ_LEN).astype(np.int64))
    return np.split(rng.integers(1, 50_000, ends[-1]).astype(np.uint16), ends[:-1])


def best_of_three(measure: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    """Tokens/s of CPU time, and fill."""
    return max(measure() for _ in range(3))


def plan_batches(
    packing: Packing, documents: list[np.ndarray], rows: int, batches: int
) -> tuple[float, list[LoadingPlan]]:
    """Seconds to plan so many batches, and the plans; one more goes before, unmeasured."""
    lengths = np.asarray([len(ids) for ids in documents], np.int32)
    spec = PlannerSpec(
        names=("web",),
        chunks_per_epoch=(len(documents),),
        seq_len=SEQ_LEN,
        global_batch=rows,
        schedule=Constant({"web": 1}),
        packing=packing,
        cost_linear=24576.0,
        cost_quadratic=1.0,
    )
    planner = Planner(spec, lambda source, first, count: np.take(lengths, range(first, first + count), mode="wrap"))
    _, state = planner.plan(planner.start())
    plans, start_s = [], time.process_time()
    for _ in range(batches):
        plan, state = planner.plan(state)
        plans.append(plan)
    return time.process_time() - start_s, plans


def of_ours(plans: list[LoadingPlan], documents: list[np.ndarray], rows: int) -> tuple[float, float]:
    """Rows filled from plans: tokens/s and fill."""
    out, tokens = Rows.empty(rows, SEQ_LEN), 0
    start_s = time.process_time()
    for plan in plans:
        fill_rows(out, plan.pieces, views_of(lambda source, document: documents[document % len(documents)]))
        tokens += int(plan.tokens_by_source.sum())
    return tokens / (time.process_time() - start_s), tokens / (len(plans) * rows * SEQ_LEN)


def of_grain(packing: Packing, documents: list[np.ndarray], rows: int, batches: int) -> tuple[float, float]:
    """The same from Grain, on one thread."""
    import grain
    from grain import experimental

    source = grain.MapDataset.source([{"token": ids} for ids in documents]).seed(0).shuffle().repeat()
    stream = source.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    if packing == "concat":
        packed: Any = experimental.ConcatThenSplitIterDataset(stream, length_struct={"token": SEQ_LEN})
    else:
        kind = {"first_fit": experimental.FirstFitPackIterDataset, "best_fit": experimental.BestFitPackIterDataset}
        packed = kind[packing](stream, length_struct={"token": SEQ_LEN}, num_packing_bins=rows)
    batched: Iterator[Any] = iter(packed.batch(rows))
    next(batched)
    tokens, start_s = 0, time.process_time()
    for _ in range(batches):
        tokens += int(np.count_nonzero(next(batched)["token_segment_ids"]))
    return tokens / (time.process_time() - start_s), tokens / (batches * rows * SEQ_LEN)
