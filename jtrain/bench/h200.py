"""The number sheet of one GPU: tokens/s and MFU of llama1b and the 8B, and of models with state on the host.

Needs a GPU, and refuses without one: a CPU's number would say nothing. Trains on random tokens, so no corpus
and no tokenizer are needed; everything else is the shipped config's, or what --set makes of it. The models of
`OFFLOADED` have their optimizer state in host memory: the 8B is compared with itself where the plan says that
it fits without, the others are the largest for an H200 and 128 GiB of host memory. What does not fit is a row
without a number.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jtrain.bench import REHEARSE, Options, Row, option, row
from jtrain.bench._live import gpu
from jtrain.data import put_batch
from jtrain.layout.dims import Batch
from jtrain.layout.layout import Layout, LayoutSpec, OffloadSpec, make_layout
from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.layout.precision import PrecisionSpec
from jtrain.model.param import map_params
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Optimizer, build
from jtrain.plan.estimate.flops import flops_per_token, mfu
from jtrain.plan.estimate.memory import memory
from jtrain.plan.fit_check import available_bytes, check_fits, free_host_bytes
from jtrain.plan.job import Job
from jtrain.step.state import init_state
from jtrain.step.train_step import make_train_step
from jtrain_kernels.device import DeviceSpec

if TYPE_CHECKING:
    from jtrain.config.run import Run

BARS = {"h100": {"llama1b": ">= 40000"}, "h200": {"llama1b": ">= 55000", "llama8b": ">= 11000"}}
"""GPU -> config -> tokens/s to aim at on one."""

FIDDLERS = {"llama1b": [], "llama8b": ["single_device"]}
"""Config -> its fiddlers here."""

TOY: dict[str, Any] = dict(
    num_layers=2, d_model=64, num_heads=4, num_kv_heads=2, head_dim=16, d_ff=128, vocab_size=256
)
REHEARSED = (
    *(f"model.{name}={size}" for name, size in TOY.items()),
    *("data.seq_len=64", "data.global_batch=2", "layout.microbatches=1"),
)
"""A config's smallest form, for --rehearse."""

GIB = 2**30

QWEN14B: dict[str, Any] = dict(
    num_layers=40,
    d_model=5120,
    num_heads=40,
    num_kv_heads=8,
    head_dim=128,
    d_ff=17408,
    vocab_size=151936,
    qk_norm=True,
)
"""Qwen3 14B (its config.json): 14.8 billion parameters."""

QWEN32B: dict[str, Any] = QWEN14B | dict(num_layers=64, num_heads=64, d_ff=25600)
"""Qwen3 32B: 32.8 billion parameters."""

LLAMA8B: dict[str, Any] = dict(
    num_layers=32, d_model=4096, num_heads=32, num_kv_heads=8, head_dim=128, d_ff=14336, vocab_size=128256
)


@dataclasses.dataclass(frozen=True)
class Offloaded:
    """A model on one H200, and how it gets there.

    microbatches: one sequence each, so also the global batch.
    """

    name: str
    moments: str
    sizes: dict[str, Any]
    seq_len: int
    microbatches: int
    optimizer: dict[str, Any]
    offload: dict[str, Any]

    def job(self, *, offloaded: bool = True) -> Job:
        """The job on one device."""
        spec = LayoutSpec(
            remat="full",
            microbatches=self.microbatches,
            offload=OffloadSpec(**self.offload) if offloaded else OffloadSpec(),
        )
        model = Transformer(**self.sizes)
        layout = make_layout(
            spec, MeshSpec(), model.param_infos(), precision=PrecisionSpec(param_dtype="bfloat16")
        )
        return Job(model, layout, AdamW(peak_lr=3e-4, **self.optimizer), self.microbatches, self.seq_len)


OFFLOADED = (
    Offloaded("8B", "f32", LLAMA8B, 4096, 32, {}, {"optimizer": 1.0}),
    Offloaded("14B", "f32", QWEN14B, 4096, 32, {}, {"optimizer": 1.0}),
    Offloaded(
        "32B",
        "8-bit",
        QWEN32B,
        4096,
        1,
        {"moment_dtype": "int8", "param_rounding": "stochastic"},
        {"optimizer": 1.0, "params": 0.5},
    ),
)


OPTIONS = (
    option("--steps", type=int, default=10, help="timed steps of each, after two that are not"),
    option("--only", choices=(*FIDDLERS, *(case.name for case in OFFLOADED)), help="one of the models"),
    option(
        "--set",
        dest="sets",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="change the config; no bar then",
    ),
    REHEARSE,
)


def run(args: Options) -> Iterator[Row]:
    """Tokens/s and MFU of each config, then tokens/s of the models with state on the host.

    Raises:
      UserError: the first device is no GPU, or the plan says that a config does not fit it.
    """
    gpu_device, spec = gpu("the number sheet", rehearse=args.rehearse)
    for name in FIDDLERS:
        if args.only in (None, name):
            yield from config_rows(name, args, gpu_device, spec)
    for case in OFFLOADED:
        if args.only in (None, case.name):
            # The rehearsal keeps the offload settings, which are what it should exercise.
            small = dataclasses.replace(case, sizes=case.sizes | TOY, seq_len=32, microbatches=2)
            yield from offloaded_rows(small if args.rehearse else case, gpu_device, args.steps)


def config_rows(name: str, args: Options, gpu_device: jax.Device, spec: DeviceSpec) -> Iterator[Row]:
    """Tokens/s, MFU and memory of a shipped config."""
    # Lazy, as below: the models with state on the host need no config and no fiddle.
    from jtrain.config.devices import resolve_mesh
    from jtrain.config.load import load_config
    from jtrain.config.run import build_run
    from jtrain.plan.auto_layout import choose_layout
    from jtrain.plan.from_run import plan_job

    config = load_config(name, FIDDLERS[name], [*args.sets, *(REHEARSED if args.rehearse else ())])
    # The mesh comes first: the automatic layout below depends on it.
    resolve_mesh(config, [gpu_device])
    for line in choose_layout(config, devices=[gpu_device], workdir=None):
        print(line)
    built = build_run(config)
    # Refused before anything is compiled, with the plan's numbers.
    if (available := available_bytes([gpu_device])) is not None:
        check_fits(plan_job(built), available=available)
    rate = tokens_per_s(built, args.steps)
    length = built.data.seq_len
    label = " ".join([name, *args.sets])
    # A changed config has no bar: the bar is for the shipped one.
    bar = None if args.sets else BARS.get(spec.name, {}).get(name)
    yield row(f"{label}, length {length}, {gpu_device.device_kind}", rate, "tokens/s", bar=bar)
    # An unknown chip has no peak, so no MFU.
    if spec.peak_bf16_flops is not None:
        flops, peak_flops = (
            flops_per_token(built.model, seq_len=length),
            spec.peak_flops(built.precision.compute_dtype),
        )
        share = mfu(flops, tokens_per_s=rate, num_devices=1, peak_flops=peak_flops)
        yield row(f"{label}: MFU, causal FLOPs", share, "")
    # Peak of this process: each config runs in a process of its own under one_gpu.
    peak_gib = (gpu_device.memory_stats() or {}).get("peak_bytes_in_use", 0) / GIB
    yield row(f"{label}: device memory peak", peak_gib, "GiB")


def offloaded_rows(case: Offloaded, gpu_device: jax.Device, num_steps: int) -> Iterator[Row]:
    """Tokens/s of a model with its state on the host; of the 8B also against itself without offload."""
    rates: dict[bool, float] = {}
    label = f"{case.name}, {case.moments} moments, length {case.seq_len} x {case.microbatches}"
    # Only the 8B fits without offload too, so only it can be compared with itself.
    for offloaded in (True, False) if case.name == "8B" else (True,):
        name = f"{label}: {'offloaded' if offloaded else 'nothing offloaded'}, {gpu_device.device_kind}"
        job = case.job(offloaded=offloaded)
        # The plan decides, so that a model that does not fit costs no compilation.
        plan = memory(job)
        needs = {
            "device": (plan.total_bytes, available_bytes([gpu_device])),
            "host": (plan.host_bytes, free_host_bytes()),
        }
        shortages = [
            f"{memory_kind} {need / GIB:.1f} of {free / GIB:.1f} GiB"
            for memory_kind, (need, free) in needs.items()
            if free is not None and need > free
        ]
        if shortages:
            yield row(f"{name} does not fit ({', '.join(shortages)})", None, "tokens/s")
            continue
        sizes = {"global_batch": case.microbatches, "seq_len": case.seq_len}
        rates[offloaded] = step_rate(job.model, job.layout, optimizer_of(job), **sizes, num_steps=num_steps)
        # The bar is the 14B's: the largest model whose float32 moments the host's memory holds.
        bar = ">= 6300" if case.name == "14B" and offloaded else None
        yield row(name, rates[offloaded], "tokens/s", bar=bar)
    if len(rates) == 2:
        yield row(
            f"{label}: offloaded against not", rates[True], "tokens/s", baseline=rates[False], bar=">= 0.9"
        )


def optimizer_of(job: Job) -> Optimizer:
    """The optimizer of a job, built for its parameters."""
    return build(job.optimizer, num_steps=1000, params=map_params(lambda info: info, job.model.param_infos()))


def tokens_per_s(built: "Run", num_steps: int) -> float:
    """Tokens/s of a config's step on one device."""
    from jtrain.config.run import build_run_optimizer, run_layout

    # One device: the config's data axis may be larger.
    layout = run_layout(dataclasses.replace(built, mesh=dataclasses.replace(built.mesh, data=1)))
    return step_rate(
        built.model,
        layout,
        build_run_optimizer(built),
        global_batch=built.data.global_batch,
        seq_len=built.data.seq_len,
        num_steps=num_steps,
    )


def step_rate(
    model: Transformer,
    layout: Layout,
    optimizer: Optimizer,
    *,
    global_batch: int,
    seq_len: int,
    num_steps: int,
) -> float:
    """Tokens/s of the jitted step on random tokens, without padding, on the first device."""
    steps_s = random_steps(model, layout, optimizer, global_batch=global_batch, seq_len=seq_len)
    return num_steps * global_batch * seq_len / steps_s(num_steps)


def random_steps(
    model: Transformer, layout: Layout, optimizer: Optimizer, *, global_batch: int, seq_len: int
) -> Callable[[int], float]:
    """Function that runs so many steps on one random batch and returns their seconds; two have run before."""
    mesh = make_mesh(layout.mesh, jax.devices()[:1])
    step = make_train_step(model, optimizer, layout, mesh)
    state = init_state(layout, optimizer, mesh, seed=0)
    shape = (global_batch, seq_len)
    token = np.random.default_rng(0).integers(0, model.vocab_size, shape, np.int32)
    # Position restarts at 0 in every row, and all tokens are of one document.
    position = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    # Targets are the next tokens; the last one wraps around, which no measurement notices.
    batch = put_batch(Batch(token, np.roll(token, -1, axis=1), position, np.ones(shape, np.int32)), mesh)

    def steps_s(count: int) -> float:
        nonlocal state  # each step donates it, so it is replaced
        start_s = time.perf_counter()
        for _ in range(count):
            state, _ = step(state, batch)
        jax.block_until_ready(state)
        return time.perf_counter() - start_s

    # The first step compiles; the second one runs with warm caches.
    steps_s(2)
    return steps_s
