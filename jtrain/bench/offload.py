"""Training with its state in host memory on the GPU here: tokens/s with and without, and the largest models that fit.

Needs a GPU, and refuses without one. It trains on random tokens, as the benchmark h200 does: the 8B with its optimizer
state on the host and, where the plan says that it fits, without; and the largest models for an H200 and 128 GiB of host
memory. What does not fit into the memory that is there is a row without a number.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from jtrain.bench import REHEARSE, Options, Row, option, row
from jtrain.bench.h200 import step_rate
from jtrain.errors import UserError
from jtrain.layout.layout import LayoutSpec, OffloadSpec, make_layout
from jtrain.layout.mesh import MeshSpec
from jtrain.layout.precision import PrecisionSpec
from jtrain.model.param import map_params
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Optimizer, build
from jtrain.plan.estimate.memory import memory
from jtrain.plan.fit_check import available_bytes, free_host_bytes
from jtrain.plan.job import Job

GIB = 2**30

QWEN14B: dict[str, Any] = dict(
    num_layers=40, d_model=5120, num_heads=40, num_kv_heads=8, head_dim=128, d_ff=17408, vocab_size=151936, qk_norm=True
)
"""Qwen3 14B (its config.json): 14.8 billion parameters."""

QWEN32B: dict[str, Any] = QWEN14B | dict(num_layers=64, num_heads=64, d_ff=25600)
"""Qwen3 32B: 32.8 billion parameters."""

TOY: dict[str, Any] = dict(num_layers=2, d_model=64, num_heads=4, num_kv_heads=2, head_dim=16, d_ff=128, vocab_size=256)
"""Sizes of a rehearsal."""

LLAMA8B: dict[str, Any] = dict(
    num_layers=32, d_model=4096, num_heads=32, num_kv_heads=8, head_dim=128, d_ff=14336, vocab_size=128256
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on one H200, and how it gets there.

    microbatches: one sequence each, so also the global batch.
    """

    name: str
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
        layout = make_layout(spec, MeshSpec(), model.param_infos(), precision=PrecisionSpec(param_dtype="bfloat16"))
        return Job(model, layout, AdamW(peak_lr=3e-4, **self.optimizer), self.microbatches, self.seq_len)


CASES = (
    Case("8B, f32 moments", LLAMA8B, 4096, 32, {}, {"optimizer": 1.0}),
    Case("14B, f32 moments", QWEN14B, 4096, 32, {}, {"optimizer": 1.0}),
    Case(
        "32B, 8-bit moments",
        QWEN32B,
        4096,
        1,
        {"moment_dtype": "int8", "param_rounding": "stochastic"},
        {"optimizer": 1.0, "params": 0.5},
    ),
)


OPTIONS = (
    option("--steps", type=int, default=3, help="timed steps of each (default: 3)"),
    option("--only", choices=("8B", "14B", "32B"), help="one of the models"),
    REHEARSE,
)


def run(args: Options) -> Iterator[Row]:
    """Tokens/s of each model, the 8B's against itself with nothing offloaded.

    Raises:
      UserError: no GPU is here.
    """
    gpu = jax.devices()[0]
    if gpu.platform != "gpu" and not args.rehearse:
        raise UserError(
            f"offload times steps on a GPU, but the device here is {gpu.device_kind!r}. Run the same command on one."
        )
    for case in CASES:
        if args.only is not None and not case.name.startswith(args.only):
            continue
        if args.rehearse:
            case = dataclasses.replace(case, sizes=case.sizes | TOY, seq_len=32, microbatches=2)
        rates: dict[bool, float] = {}
        what = f"{case.name}, length {case.seq_len} x {case.microbatches}"
        for offloaded in (True, False) if case.name.startswith("8B") else (True,):
            name = f"{what}: {'offloaded' if offloaded else 'nothing offloaded'}, {gpu.device_kind}"
            job = case.job(offloaded=offloaded)
            plan = memory(job)
            there = {"device": (plan.total_bytes, available_bytes([gpu])), "host": (plan.host_bytes, free_host_bytes())}
            short = [
                f"{place} {need / GIB:.1f} of {free / GIB:.1f} GiB"
                for place, (need, free) in there.items()
                if free is not None and need > free
            ]
            if short:
                yield row(f"{name} does not fit ({', '.join(short)})", None, "tokens/s")
                continue
            sizes = {"global_batch": case.microbatches, "seq_len": case.seq_len}
            rates[offloaded] = step_rate(job.model, job.layout, optimizer_of(job), **sizes, num_steps=args.steps)
            bar = ">= 6300" if case.name.startswith("14B") and offloaded else None
            yield row(name, rates[offloaded], "tokens/s", bar=bar)
        if len(rates) == 2:
            yield row(f"{what}: offloaded against not", rates[True], "tokens/s", baseline=rates[False], bar=">= 0.9")


def optimizer_of(job: Job) -> Optimizer:
    """The optimizer of a job, built for its parameters."""
    return build(job.optimizer, num_steps=1000, params=map_params(lambda info: info, job.model.param_infos()))
