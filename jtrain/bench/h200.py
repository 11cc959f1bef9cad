"""The number sheet of one GPU: llama1b at length 4096 and the 8B at length 8192, bf16, tokens/s and MFU.

Needs a GPU, and refuses without one: a CPU's number would say nothing. Trains on random tokens, so no corpus and no
tokenizer are needed; everything else is the shipped config's, or what --set makes of it.
"""

import dataclasses
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax
import numpy as np

from jtrain.bench import REHEARSE, Options, Row, option, row
from jtrain.data import put_batch
from jtrain.errors import UserError
from jtrain.layout.dims import Batch
from jtrain.layout.layout import Layout
from jtrain.layout.mesh import make_mesh
from jtrain.model.transformer import Transformer
from jtrain.optim import Optimizer
from jtrain.plan.estimate.flops import flops_per_token, mfu
from jtrain.step.state import init_state
from jtrain.step.train_step import make_train_step
from jtrain_kernels import device

if TYPE_CHECKING:
    from jtrain.config.run import Run

BARS = {"h100": {"llama1b": ">= 40000"}, "h200": {"llama1b": ">= 55000", "llama8b": ">= 11000"}}
"""GPU -> config -> tokens/s to aim at on one."""

FIDDLERS = {"llama1b": [], "llama8b": ["single_device"]}
"""Config -> its fiddlers here."""

REHEARSED = (
    "model.num_layers=2", "model.d_model=64", "model.num_heads=4", "model.num_kv_heads=2", "model.head_dim=16",
    "model.d_ff=128", "model.vocab_size=256", "data.seq_len=64", "data.global_batch=2", "layout.microbatches=1",
)  # fmt: skip
"""A config's smallest form, for --rehearse."""


OPTIONS = (
    option("--steps", type=int, default=10, help="timed steps of each, after two that are not"),
    option("--only", choices=tuple(FIDDLERS), help="one of the two"),
    option(
        "--set", dest="sets", action="append", default=[], metavar="PATH=VALUE", help="change the config; no bar then"
    ),
    REHEARSE,
)


def run(args: Options) -> Iterator[Row]:
    """Tokens/s and MFU of each config.

    Raises:
      UserError: the first device is no GPU, or the plan says that a config does not fit it.
    """
    # Lazy, as below: other benchmarks use `step_rate`, which needs no config and no fiddle.
    from jtrain.config.devices import settle_mesh
    from jtrain.config.load import load_config
    from jtrain.config.run import build_run
    from jtrain.plan.auto_layout import settle
    from jtrain.plan.fit_check import available_bytes, check_fits
    from jtrain.plan.from_run import plan_job

    gpu = jax.devices()[0]
    spec = device.from_device(gpu)
    if (gpu.platform != "gpu" or spec is None) and not args.rehearse:
        raise UserError(
            f"the number sheet needs a GPU, but the device here is {gpu.device_kind!r}. Run the same command on one."
        )
    for name in [args.only] if args.only else list(FIDDLERS):
        config = load_config(name, FIDDLERS[name], [*args.sets, *(REHEARSED if args.rehearse else ())])
        settle_mesh(config, [gpu])
        for line in settle(config, devices=[gpu], workdir=None):
            print(line)
        built = build_run(config)
        if (available := available_bytes([gpu])) is not None:
            check_fits(plan_job(built), available=available)
        rate = tokens_per_s(built, args.steps)
        length = built.data.seq_len
        what = " ".join([name, *args.sets])
        bar = BARS.get(spec.name, {}).get(name) if spec is not None and not args.sets else None
        yield row(f"{what}, length {length}, {gpu.device_kind}", rate, "tokens/s", bar=bar)
        dtype = built.precision.compute_dtype
        if spec is not None and spec.peak_bf16_flops is not None:
            flops, peak_flops = flops_per_token(built.model, seq_len=length), spec.peak_flops(dtype)
            yield row(
                f"{what}: MFU, causal FLOPs", mfu(flops, tokens_per_s=rate, num_devices=1, peak_flops=peak_flops), ""
            )
        peak_gib = (gpu.memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30
        yield row(f"{what}: device memory peak", peak_gib, "GiB")


def tokens_per_s(built: "Run", num_steps: int) -> float:
    """Of a config's step on one device."""
    from jtrain.config.run import run_layout
    from jtrain.plan.from_run import make_optimizer

    layout = run_layout(dataclasses.replace(built, mesh=dataclasses.replace(built.mesh, data=1)))
    return step_rate(
        built.model,
        layout,
        make_optimizer(built),
        global_batch=built.data.global_batch,
        seq_len=built.data.seq_len,
        num_steps=num_steps,
    )


def step_rate(
    model: Transformer, layout: Layout, optimizer: Optimizer, *, global_batch: int, seq_len: int, num_steps: int
) -> float:
    """Tokens/s of the jitted step on random tokens, without padding, on the first device."""
    mesh = make_mesh(layout.mesh, jax.devices()[:1])
    step = make_train_step(model, optimizer, layout, mesh)
    state = init_state(layout, optimizer, mesh, seed=0)
    shape = (global_batch, seq_len)
    token = np.random.default_rng(0).integers(0, model.vocab_size, shape, np.int32)
    position = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    batch = put_batch(Batch(token, np.roll(token, -1, axis=1), position, np.ones(shape, np.int32)), mesh)
    for _ in range(2):
        state, _ = step(state, batch)
    jax.block_until_ready(state)
    start_s = time.perf_counter()
    for _ in range(num_steps):
        state, _ = step(state, batch)
    jax.block_until_ready(state)
    return num_steps * token.size / (time.perf_counter() - start_s)
