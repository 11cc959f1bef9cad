"""Tokens/s of the full loop (data, metrics, TensorBoard, logging) over the bare jitted step in a loop."""

import contextlib
import io
import statistics
import tempfile
import time
from pathlib import Path

import jax

from jtrain.bench import Options, Row, option, row
from jtrain.config import tree
from jtrain.config.devices import resolve_mesh
from jtrain.config.load import load_config
from jtrain.config.run import Run, build_run, build_run_optimizer, run_layout
from jtrain.data import open_dataset, put_batch
from jtrain.layout.mesh import make_mesh
from jtrain.step.state import init_state
from jtrain.step.train_step import make_train_step
from jtrain.telemetry.metrics import FILE, read
from jtrain.train import attempt

OPTIONS = (
    option("--config", default="tiny", help="what to train (default: tiny, its own shape)"),
    option("--steps", type=int, default=20, help="steps per measurement"),
    option("--rounds", type=int, default=5, help="bare and full alternate this often; the median counts"),
)


def run(args: Options) -> list[Row]:
    """Alternates the two, so that a machine that slows down slows both; compilation is in neither."""
    # Twice the steps: the second half is logged as one interval, without compilation.
    sets = [f"num_steps={2 * args.steps}", f"metrics.log_every_steps={args.steps}", "eval.every_steps=None"]
    run_config = load_config(
        # No checkpoint and no evaluation, which the bare step does not have either.
        args.config,
        (),
        [*sets, "checkpoint.every_steps=None", "optimizer.warmup_steps=0"],
    )
    # The mesh is resolved in place, and `build_run` reads it.
    resolve_mesh(run_config, jax.devices())
    built = build_run(run_config)
    text = tree.flat(run_config)
    bare, full = [], []
    for _ in range(args.rounds + 1):
        bare.append(bare_tokens_per_s(built, args.steps))
        full.append(full_tokens_per_s(built, text))
    ratios = [f / b for f, b in zip(full[1:], bare[1:], strict=True)]  # the first round fills caches
    spread = f"{min(ratios):.3f} .. {max(ratios):.3f} over {args.rounds} rounds"
    median = statistics.median(bare[1:])
    # A ratio of medians would mix rounds; the median of ratios compares neighbours in time.
    return [
        row(
            f"{args.config}: full loop ({spread})",
            statistics.median(ratios) * median,
            "tokens/s",
            baseline=median,
            bar=">= 0.97",
        )
    ]


def bare_tokens_per_s(built: Run, num_steps: int) -> float:
    """The jitted step on one batch that is already there, results read once at the end."""
    mesh = make_mesh(built.mesh, jax.devices())
    layout, optimizer = run_layout(built), build_run_optimizer(built)
    step = make_train_step(built.model, optimizer, layout, mesh)
    state = init_state(layout, optimizer, mesh, seed=built.seed)
    batch = put_batch(next(open_dataset(built.data, seed=built.seed).train_batches()), mesh)
    # Compiles outside of the clock.
    state, metrics = step(state, batch)
    jax.block_until_ready(state)
    tokens = int(metrics["tokens"])
    start_s = time.perf_counter()
    for _ in range(num_steps):
        state, metrics = step(state, batch)
    # Steps are dispatched ahead; the clock stops when the last one has ended.
    jax.block_until_ready(state)
    return num_steps * tokens / (time.perf_counter() - start_s)


def full_tokens_per_s(built: Run, config_text: str) -> float:
    """`loop.train`, the second half of its steps, as it logs it itself."""
    with tempfile.TemporaryDirectory() as folder:
        # The loop's lines would fill the output of the benchmark.
        with contextlib.redirect_stdout(io.StringIO()):
            attempt.train(built, workdir=Path(folder), config_text=config_text)
        last = read(Path(folder) / FILE)[-1]
    # The last line must be of the last step, or the figure would cover other steps.
    assert last["step"] == built.num_steps, last
    return last["tokens_per_s"]
