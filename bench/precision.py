"""Final losses of `tiny` under every precision of optimizer state, parameters and matmuls; bytes beside them.

    python -m jtrain.bench precision --seeds 3
    python -m jtrain.bench precision --only 8-bit --whole --steps 100

All precisions see the same weights and batches, seed by seed. A CPU computes 8-bit matmuls as a GPU would, but not as
fast: `fp8_speed` measures their speed on one.
"""

import dataclasses
import statistics
import time

import jax

from jtrain.bench import Options, Row, option, row
from jtrain.config.load import load_config
from jtrain.config.run import build_run, run_layout
from jtrain.data import open_dataset, put_batch
from jtrain.layout.mesh import make_mesh
from jtrain.layout.precision import itemsize
from jtrain.optim import state_bytes
from jtrain.plan.from_run import make_optimizer
from jtrain.step.state import init_state
from jtrain.step.train_step import make_train_step
from jtrain.train.evaluation import Evaluation

SMALLER = (
    "model.num_layers=2",
    "model.d_model=128",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.d_ff=384",
    "data.seq_len=128",
    "data.eval_batches=32",
)
BF16 = "precision.param_dtype=bfloat16"
PRECISIONS = {
    "float32": (),
    "bfloat16 moments": ("optimizer.moment_dtype=bfloat16",),
    "bfloat16_sr moments": ("optimizer.moment_dtype=bfloat16_sr",),
    "int8 moments": ("optimizer.moment_dtype=int8",),
    "bfloat16 parameters, float32 masters": (BF16, "optimizer.master_dtype=float32"),
    "bfloat16 parameters, stochastic": (BF16, "optimizer.param_rounding=stochastic"),
    "bfloat16 parameters, nearest": (BF16,),
    "all bfloat16, stochastic": (BF16, "optimizer.param_rounding=stochastic", "optimizer.moment_dtype=bfloat16_sr"),
    "8-bit matmuls, current scaling": ("precision.matmul_dtype=fp8_current",),
    "8-bit matmuls, delayed scaling": ("precision.matmul_dtype=fp8_delayed",),
    "float32, b2=0.999": ("optimizer.b2=0.999",),
    "bfloat16_sr moments, b2=0.999": ("optimizer.b2=0.999", "optimizer.moment_dtype=bfloat16_sr"),
    "int8 moments, b2=0.999": ("optimizer.b2=0.999", "optimizer.moment_dtype=int8"),
}
"""What is trained -> what is set. Those with b2=0.999 are compared with the first of them, the others with float32."""


@dataclasses.dataclass(frozen=True)
class Result:
    """Final losses of one run, nats/byte: the mean of the last tenth of its steps, and of what was held out."""

    train: float
    held_out: float
    bytes_per_parameter: float
    seconds: float


OPTIONS = (
    option("--steps", type=int, default=200, help="updates of each run"),
    option("--seeds", type=int, default=2, help="runs of each precision; the mean counts"),
    option("--only", help="a part of the names of those to run beside their baselines"),
    option("--whole", action="store_true", help="tiny in its own shape, not made smaller"),
)


def run(args: Options) -> list[Row]:
    """Rows of each precision; a spread is that of the seeds."""
    rows: list[Row] = []
    baselines: dict[bool, list[Result]] = {}
    for name, sets in PRECISIONS.items():
        is_baseline, slow = name.startswith("float32"), "0.999" in name
        if args.only and args.only not in name and not is_baseline:
            continue
        if not args.whole:
            sets = (*SMALLER, *sets)
        results = [trained(sets, seed=seed, num_steps=args.steps) for seed in range(args.seeds)]
        baseline = baselines.setdefault(slow, results)
        bar = None if is_baseline or "nearest" in name else "<= 1.02" if "matmuls" in name else "<= 1.01"
        for what in ("train", "held_out"):
            values, wanted = ([getattr(r, what) for r in of] for of in (results, baseline))
            apart = [v / w - 1 for v, w in zip(values, wanted, strict=True)]
            spread = f" ({min(apart):+.2%} .. {max(apart):+.2%})" if not is_baseline else ""
            mean = statistics.mean(wanted)
            rows.append(row(f"{name}: {what.replace('_', ' ')}{spread}", statistics.mean(values), "nats/byte",
                            baseline=None if is_baseline else mean, bar=bar))  # fmt: skip
        size = results[0].bytes_per_parameter
        rows.append(row(f"{name}: parameters and state", size, "bytes/parameter",
                        baseline=None if is_baseline else baseline[0].bytes_per_parameter))  # fmt: skip
        print(f"{name}: {results}", flush=True)
    return rows


def trained(sets: tuple[str, ...], *, seed: int, num_steps: int) -> Result:
    """One run, from its first weights to its last evaluation."""
    started_s = time.perf_counter()
    built = build_run(load_config("tiny", (), ["mesh.data=1", f"seed={seed}", f"num_steps={num_steps}", *sets]))
    mesh = make_mesh(built.mesh, jax.devices()[:1])
    layout = run_layout(built)
    optimizer = make_optimizer(built)
    step = make_train_step(built.model, optimizer, layout, mesh)
    state = init_state(layout, optimizer, mesh, seed=seed)
    dataset = open_dataset(built.data, seed=seed)
    losses: list[float] = []
    with dataset.train_batches(inline=True) as batches:
        for _ in range(num_steps):
            state, metrics = step(state, put_batch(next(batches), mesh))
            losses.append(float(metrics["loss_nats"]))
    held_out, _ = Evaluation(built, layout, mesh, dataset)(state.params)
    assert held_out is not None
    infos = built.model.param_infos()
    total = sum(state_bytes(built.optimizer, i, i.size) + i.size * itemsize(built.precision.param_dtype) for i in infos)
    train = statistics.mean(losses[-max(num_steps // 10, 1) :])
    return Result(train, held_out.loss_nats, total / sum(i.size for i in infos), time.perf_counter() - started_s)
