"""Cost spread over data ranks after balancing, attention-aware, and milliseconds to plan a step for 64 ranks.

The cost of a document of n tokens is 24576 n + n**2, the forward FLOPs of a 7B model up to a factor. Whole documents in
rows of 8192, lengths as in a web corpus. What it is compared with is the same rows in random order, which is what a
loader without a plan gives.
"""

import time

import numpy as np

from jtrain.bench import Options, Row, option, row
from jtrain.data.mixture.schedule import Constant
from jtrain.data.planner.balance import spread
from jtrain.data.planner.packing import Packing
from jtrain.data.planner.pieces import Pieces
from jtrain.data.planner.planner import Planner, PlannerSpec

SEQ_LEN, LINEAR = 8192, 24576


OPTIONS = (
    option("--sources", type=int, default=306, help="sources in the mixture"),
    option("--steps", type=int, default=40, help="steps per measurement; means of spread, median of time"),
)


def run(args: Options) -> list[Row]:
    """Ranks of one row to eight: cost spread, then planning time."""
    rows = []
    packed: tuple[tuple[Packing, int, int], ...] = (
        ("concat", 8, 4), ("concat", 64, 1), ("concat", 64, 4), ("concat", 64, 8), ("best_fit", 64, 1),
        ("best_fit", 64, 4))  # fmt: skip
    for packing, ranks, per_rank in packed:
        plan_ms, balanced, plain = measure(args.sources, ranks, per_rank, packing, args.steps)
        what = f"{packing}, {ranks} ranks x {per_rank} rows of {SEQ_LEN}"
        # One row to a rank leaves nothing to exchange: the row with the longest document is the floor.
        rows.append(row(f"{what}: max/mean cost (rows at random: {plain:.3f})", balanced, "ratio",
                        bar="<= 1.05" if per_rank >= 4 else None))  # fmt: skip
        rows.append(row(f"{what}: plan one step, {args.sources} sources", plan_ms, "ms",
                        bar="<= 5" if (ranks, per_rank, packing) == (64, 4, "concat") else None))  # fmt: skip
    return rows


def measure(sources: int, ranks: int, per_rank: int, packing: Packing, steps: int) -> tuple[float, float, float]:
    """Median milliseconds to plan a step; spread over ranks, balanced, and with the rows shuffled."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.76, 1.21, (sources, 4000)), 16, SEQ_LEN).astype(np.int32)
    names = tuple(f"source{i:03}" for i in range(sources))
    weights = dict(zip(names, (rng.pareto(1.2, sources) + 0.05).tolist(), strict=True))

    def ahead(source: int, first: int, count: int) -> np.ndarray:
        first %= lengths.shape[1]
        return lengths[source, first : first + count]  # at least one: `Lengths` may give fewer than asked for

    spec = PlannerSpec(
        names=names,
        chunks_per_epoch=(lengths.shape[1],) * sources,
        seq_len=SEQ_LEN,
        global_batch=ranks * per_rank,
        schedule=Constant(weights),
        packing=packing,
        cost_linear=LINEAR,
        cost_quadratic=1.0,
    )
    planner = Planner(spec, ahead)
    _, state = planner.plan(planner.start())  # asks for the first lengths of every source
    spent_ms, balanced, plain = [], [], []
    for _ in range(steps):
        start_s = time.process_time()
        plan, state = planner.plan(state)
        spent_ms.append((time.process_time() - start_s) * 1e3)
        balanced.append(spread(plan.row_cost, ranks))
        plain.append(spread(rng.permutation(row_costs(plan.pieces, ranks * per_rank)), ranks))
    return float(np.median(spent_ms)), float(np.mean(balanced)), float(np.mean(plain))


def row_costs(pieces: Pieces, rows: int) -> np.ndarray:
    """Counted again, from the plan alone."""
    lengths = pieces.end - pieces.start
    return np.bincount(pieces.row, weights=LINEAR * lengths + lengths**2, minlength=rows).astype(np.int64)
