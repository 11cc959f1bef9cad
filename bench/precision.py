"""Final losses of `tiny` under every precision of optimizer state, parameters and matmuls; bytes beside them.

    python -m jtrain.bench precision --seeds 3
    python -m jtrain.bench precision --only 8-bit --whole --steps 100

All precisions see the same weights and batches, seed by seed. A CPU computes 8-bit matmuls as a GPU would,
but not as fast: `fp8_speed` measures their speed on one.
"""

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jtrain.bench import Options, Row, option, row
from jtrain.bench.tiny import train_config
from jtrain.config.load import load_config
from jtrain.config.run import build_run
from jtrain.layout.precision import itemsize
from jtrain.optim import state_bytes

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
    "all bfloat16, stochastic": (
        BF16,
        "optimizer.param_rounding=stochastic",
        "optimizer.moment_dtype=bfloat16_sr",
    ),
    "8-bit matmuls, current scaling": ("precision.matmul_dtype=fp8_current",),
    "8-bit matmuls, delayed scaling": ("precision.matmul_dtype=fp8_delayed",),
    "float32, b2=0.999": ("optimizer.b2=0.999",),
    "bfloat16_sr moments, b2=0.999": ("optimizer.b2=0.999", "optimizer.moment_dtype=bfloat16_sr"),
    "int8 moments, b2=0.999": ("optimizer.b2=0.999", "optimizer.moment_dtype=int8"),
}
"""What is trained -> what is set. Those with b2=0.999 are compared with the first of them, the others with
float32."""


class Losses(NamedTuple):
    """Final losses of one run, nats/byte: mean of the last tenth of its steps, and of held-out documents."""

    train: float
    held_out: float


OPTIONS = (
    option("--steps", type=int, default=200, help="updates of each run"),
    option("--seeds", type=int, default=2, help="runs of each precision; the mean counts"),
    option("--only", help="a part of the names of those to run beside their baselines"),
    option("--whole", action="store_true", help="tiny in its own shape, not made smaller"),
)


def run(args: Options) -> Iterator[Row]:
    """Rows of each precision; a spread is that of the seeds."""
    chosen = [name for name in PRECISIONS if args.only is None or args.only in name]
    has_slow_b2 = any("0.999" in name for name in chosen)
    baselines = [
        name for name in PRECISIONS if name.startswith("float32") and (has_slow_b2 or "0.999" not in name)
    ]
    shape = () if args.whole else SMALLER
    runs = {
        name: [final_losses((*shape, *sets), seed=seed, num_steps=args.steps) for seed in range(args.seeds)]
        for name, sets in PRECISIONS.items()
        if name in chosen or name in baselines
    }
    for name, losses in runs.items():
        size = bytes_per_parameter((*shape, *PRECISIONS[name]))
        # Baselines have no ratio.
        if name in baselines:
            for split, values in zip(Losses._fields, zip(*losses, strict=True), strict=True):
                yield row(f"{name}: {split.replace('_', ' ')}", statistics.mean(values), "nats/byte")
            yield row(f"{name}: parameters and state", size, "bytes/parameter")
            continue
        # The float32 of the same b2: that of 0.999 is the last baseline.
        baseline_name = baselines[-1 if "0.999" in name else 0]
        # No bar for rounding to nearest: it is there to show what stochastic rounding gains.
        bar = None if "nearest" in name else "<= 1.02" if "matmuls" in name else "<= 1.01"
        for split in Losses._fields:
            values, baseline_losses = (
                [getattr(losses_of_seed, split) for losses_of_seed in runs[precision]]
                for precision in (name, baseline_name)
            )
            # Seed by seed: both runs saw the same weights and batches, so their noise is shared.
            differences = [
                value / baseline_loss - 1
                for value, baseline_loss in zip(values, baseline_losses, strict=True)
            ]
            label = f"{name}: {split.replace('_', ' ')} ({min(differences):+.2%} .. {max(differences):+.2%})"
            yield row(
                label,
                statistics.mean(values),
                "nats/byte",
                baseline=statistics.mean(baseline_losses),
                bar=bar,
            )
        baseline = bytes_per_parameter((*shape, *PRECISIONS[baseline_name]))
        yield row(f"{name}: parameters and state", size, "bytes/parameter", baseline=baseline)


def final_losses(sets: tuple[str, ...], *, seed: int, num_steps: int) -> Losses:
    """One run, from its first weights to its last evaluation."""
    # One evaluation, after the last update.
    sets += (
        f"seed={seed}",
        f"num_steps={num_steps}",
        f"eval.every_steps={num_steps}",
        "metrics.log_every_steps=1",
    )
    with tempfile.TemporaryDirectory() as folder:
        lines = train_config(
            "tiny", (*sets, "checkpoint.every_steps=None", "metrics.tensorboard=False"), Path(folder)
        )
    # The last tenth: a single step's loss has the noise of its batch.
    losses = [line["loss_nats"] for line in lines if "loss_nats" in line]
    held_out = [line["eval_loss_nats"] for line in lines if "eval_loss_nats" in line]
    return Losses(statistics.mean(losses[-max(num_steps // 10, 1) :]), held_out[-1])


def bytes_per_parameter(sets: tuple[str, ...]) -> float:
    """Bytes of parameters and of the optimizer's state."""
    built = build_run(load_config("tiny", (), sets))
    infos = built.model.param_infos()
    # Moments and masters by state_bytes, the parameter itself by its own dtype.
    total = sum(
        state_bytes(built.optimizer, i, i.size) + i.size * itemsize(built.precision.param_dtype)
        for i in infos
    )
    return total / sum(i.size for i in infos)
