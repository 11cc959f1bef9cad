"""FP8 against bfloat16 on one GPU: a matmul of 8192^3 with its casts, and a step of two layers of the 8B model.

    python -m jtrain.bench fp8_speed --json jtrain/bench/results/fp8_speed-h200.json

Needs a GPU with FP8 matmuls, and refuses elsewhere. XLA autotunes each program when it is compiled. The casts of both
operands are part of every call, and with current scaling the computation of their amax too. Two layers stand for 32,
whose bfloat16 state alone would fill a GPU; the embeddings' fraction of the step is larger than with 32 layers.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jtrain.bench import Row, add_rehearse, row
from jtrain.bench.h200 import REHEARSED, step_rate
from jtrain.errors import UserError
from jtrain.model import ops
from jtrain.precision import MatmulDtype
from jtrain_kernels import device

SIZE = 8192
SCALES = (64.0, 64.0, 64.0)
MODES: tuple[MatmulDtype, ...] = ("compute", "fp8_current", "fp8_delayed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--calls", type=int, default=30, help="timed matmuls, and steps (default: %(default)s)")
    parser.add_argument("--only", choices=("matmul", "layers"), help="one of the two")
    add_rehearse(parser)


def matmul(mode: MatmulDtype, x: Array, kernel: Array) -> Array:
    """`x @ kernel` as the model's layers compute it with `precision.matmul_dtype`."""
    if mode == "compute":
        return ops.linear(x, kernel)
    delayed = mode == "fp8_delayed"
    return ops.linear(x, ops.Fp8Kernel(kernel, *((jnp.asarray(SCALES), jnp.zeros(3)) if delayed else ())))


def run(args: argparse.Namespace) -> Iterator[Row]:
    """Rows of TFLOP/s of the matmul and tokens/s of the step, each compared with bfloat16.

    Raises:
      UserError: the first device is no GPU that multiplies in 8 bits.
    """
    gpu = jax.devices()[0]
    spec = device.from_device(gpu)
    if not args.rehearse and (gpu.platform != "gpu" or spec is None or ops.fp8_unsupported(spec) is not None):
        raise UserError(
            f"8-bit matmuls are timed on an H100, H200 or B200, but the device here is {gpu.device_kind!r}. Run the "
            "same command on one."
        )
    hopper = spec is not None and spec.name in ("h100", "h200")
    size, sets = (64, REHEARSED) if args.rehearse else (SIZE, ())
    if args.only != "layers":
        flops: dict[MatmulDtype, float] = {mode: 2e-12 * size**3 / _seconds(mode, args.calls, size) for mode in MODES}
        yield from _rows(f"matmul {size}^3 with casts", "TFLOP/s", flops, ">= 1.6" if hopper else None)
    if args.only != "matmul":
        rates: dict[MatmulDtype, float] = {mode: _step_rate(mode, args.calls, sets) for mode in MODES}
        yield from _rows("two layers of llama8b, length 8192", "tokens/s", rates, ">= 1.2" if hopper else None)


def _rows(what: str, unit: str, found: dict[MatmulDtype, float], bar: str | None) -> list[Row]:
    return [row(f"{what}: {mode}", found[mode], unit, baseline=found["compute"], bar=bar) for mode in MODES[1:]]


def _seconds(mode: MatmulDtype, calls: int, size: int) -> float:
    """Seconds of one forward matmul: the fastest of five rounds of `calls` calls."""
    x, kernel = (jax.random.normal(jax.random.key(k), (size, size), jnp.bfloat16) for k in range(2))
    step: Callable[[Array, Array], Array] = jax.jit(lambda x, kernel: matmul(mode, x, kernel))
    y = jax.block_until_ready(step(x, kernel))
    rounds: list[float] = []
    for _ in range(5):
        start_s = time.perf_counter()
        for _ in range(calls):
            y = step(x, kernel)
        jax.block_until_ready(y)
        rounds.append((time.perf_counter() - start_s) / calls)
    return min(rounds)


def _step_rate(mode: MatmulDtype, num_steps: int, sets: Sequence[str] = ()) -> float:
    """Tokens per second of a whole training step."""
    from jtrain.config.load import load_config  # lazy: the matmul alone needs no fiddle
    from jtrain.config.run import build_run, run_layout
    from jtrain.plan.from_run import make_optimizer

    built = build_run(load_config("llama8b", ["single_device"], ["model.num_layers=2", *sets]))
    precision = dataclasses.replace(built.precision, matmul_dtype=mode)
    layout = run_layout(dataclasses.replace(built, precision=precision))
    sizes: dict[str, int] = dict(global_batch=built.data.global_batch, seq_len=built.data.seq_len, num_steps=num_steps)
    return step_rate(built.model, layout, make_optimizer(built), **sizes)
