"""Offload: device peak, host bytes and copies of the step compiled for an H200; with --live, tokens/s on the GPU here.

Without options nothing runs: the compilers of the extra [aot] say what they would allocate and schedule. The 8B is
compared with itself, nothing offloaded; 14B and 32B are plans for one H200 and 128 GiB of host memory.

--live needs a GPU, and refuses without one. It trains on random tokens, as the benchmark h200 does: the same model and
batch with and without its optimizer state on the host, and the largest models for three steps.
"""

import argparse
import dataclasses
import os
from typing import TYPE_CHECKING, Any

from jtrain.bench import Row, row
from jtrain.errors import UserError
from jtrain.plan import AOT_ENVIRONMENT

if TYPE_CHECKING:
    from jtrain.layout import LayoutSpec
    from jtrain.optim import AdamW
    from jtrain.plan.compile.compiled_step import CompiledStep

GIB = 2**30
HOST_GIB, DEVICE_GIB = 128, 139

QWEN14B: dict[str, Any] = dict(
    num_layers=40, d_model=5120, num_heads=40, num_kv_heads=8, head_dim=128, d_ff=17408, vocab_size=151936, qk_norm=True
)
"""Qwen3 14B (its config.json): 14.8 billion parameters."""

QWEN32B: dict[str, Any] = QWEN14B | dict(num_layers=64, num_heads=64, d_ff=25600)
"""Qwen3 32B: 32.8 billion parameters."""

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

    def settings(self, *, offloaded: bool = True) -> "tuple[LayoutSpec, AdamW]":
        from jtrain.layout import LayoutSpec, OffloadSpec
        from jtrain.optim import AdamW

        spec = LayoutSpec(
            remat="full",
            microbatches=self.microbatches,
            offload=OffloadSpec(**self.offload) if offloaded else OffloadSpec(),
        )
        return spec, AdamW(peak_lr=3e-4, **self.optimizer)


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--live", action="store_true", help="measure on the GPU that is here")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each, with --live (default: 3)")
    parser.add_argument("--only", choices=("8B", "14B", "32B"), help="one of the models")


def run(args: argparse.Namespace) -> list[Row]:
    """Rows of what was compiled, or of what ran.

    Raises:
      UserError: --live without a GPU.
    """
    cases = [case for case in CASES if args.only is None or case.name.startswith(args.only)]
    if args.live:
        return _live(cases, args.steps)
    os.environ.update(AOT_ENVIRONMENT)  # jax reads it when it is imported, which nothing above does
    rows: list[Row] = []
    for case in cases:
        rows += _compiled_rows(case, compiled(case, "h200:1", compare=case.sizes is LLAMA8B))
    if args.only is None:
        rows += _collective_rows()
    return rows


def compiled(case: Case, topology: str, *, compare: bool) -> "list[CompiledStep]":
    """The step with what is offloaded, and to compare with nothing offloaded."""
    from jtrain.layout import make_layout
    from jtrain.mesh import MeshSpec
    from jtrain.model.param import map_params
    from jtrain.model.transformer import Transformer
    from jtrain.optim import build
    from jtrain.plan.compile.compiled_step import compile_step, topology_devices
    from jtrain.plan.job import Job
    from jtrain.precision import PrecisionSpec

    devices = topology_devices(topology)
    model = Transformer(**case.sizes)
    infos = model.param_infos()
    programs: list[CompiledStep] = []
    for offloaded in (True, False) if compare else (True,):
        spec, optimizer = case.settings(offloaded=offloaded)
        if len(devices) > 1:
            spec = dataclasses.replace(spec, zero_stage=3)
        mesh = MeshSpec(data=len(devices))
        layout = make_layout(spec, mesh, infos, precision=PrecisionSpec(param_dtype="bfloat16"))
        built = build(optimizer, num_steps=1000, params=map_params(lambda info: info, infos))
        batch = case.microbatches * len(devices)
        job = Job(model, layout, optimizer, batch, case.seq_len)
        programs.append(compile_step(job, built, devices=devices))
    return programs


def _compiled_rows(case: Case, programs: "list[CompiledStep]") -> list[Row]:
    from jtrain.layout import make_layout
    from jtrain.mesh import MeshSpec
    from jtrain.model.transformer import Transformer
    from jtrain.plan.estimate.memory import memory
    from jtrain.plan.job import Job
    from jtrain.precision import PrecisionSpec

    program, *plain = programs
    spec, optimizer = case.settings()
    model = Transformer(**case.sizes)
    layout = make_layout(spec, MeshSpec(), model.param_infos(), precision=PrecisionSpec(param_dtype="bfloat16"))
    plan = memory(Job(model, layout, optimizer, case.microbatches, case.seq_len))
    name = f"{case.name}, length {case.seq_len} x {case.microbatches}"
    host = program.host_argument_bytes
    rows = [
        row(f"{name}: device peak", program.peak_bytes / GIB, "GiB", bar=f"<= {DEVICE_GIB}"),
        row(f"{name}: host memory", (host + program.host_temp_bytes) / GIB, "GiB", bar=f"<= {HOST_GIB}"),
        row(
            f"{name}: arguments in host memory against the closed form",
            host,
            "bytes",
            baseline=plan.host_parameters + plan.host_optimizer,
            bar=">= 1",
        ),
    ]
    if plain:
        freed, moved = plain[0].peak_bytes - program.peak_bytes, host
        rows += [
            row(f"{name}: device peak, nothing offloaded", plain[0].peak_bytes / GIB, "GiB"),
            row(f"{name}: freed on the device of what moved", freed / GIB, "GiB", baseline=moved / GIB, bar=">= 0.95"),
        ]
    for copies in program.host_copies:
        what = f"{name}: copies {copies.direction}"
        rows += [
            row(f"{what}, per step", copies.bytes / GIB, "GiB"),
            row(f"{what}: asynchronous", copies.async_bytes / copies.bytes, "", bar=">= 0.99"),
            row(f"{what}: beside the other direction or a matmul", _hidden(copies) / copies.bytes, "", bar=">= 0.9"),
            row(f"{what}: exposed", (copies.bytes - _hidden(copies)) / GIB, "GiB"),
        ]
    return rows


def _hidden(copies: Any) -> int:
    """Bytes beside something else: a matmul, or a copy in the other direction."""
    return min(copies.bytes, copies.hidden_bytes + copies.duplex_bytes)


def _collective_rows() -> list[Row]:
    """The 8B over 8 H200: what is offloaded must not be gathered or reduced."""
    case = dataclasses.replace(CASES[0], microbatches=2)
    offloaded, plain = compiled(case, "h200:8", compare=True)
    wire, wire_plain = (sum(t.wire_bytes for t in program.traffic) for program in (offloaded, plain))
    return [
        row("8B over 8: sent per device and step", wire / GIB, "GiB", baseline=wire_plain / GIB, bar="<= 1"),
        row("8B over 8: device peak", offloaded.peak_bytes / GIB, "GiB", baseline=plain.peak_bytes / GIB, bar="<= 0.8"),
    ]


def _live(cases: list[Case], num_steps: int) -> list[Row]:
    import jax

    gpu = jax.devices()[0]
    if gpu.platform != "gpu":
        raise UserError(
            f"--live measures tokens/s on a GPU, but the device here is {gpu.device_kind!r}. Run it on one, or leave "
            "--live out: the compiled plans need none."
        )
    from jtrain.bench.h200 import step_rate
    from jtrain.layout import make_layout
    from jtrain.mesh import MeshSpec
    from jtrain.model.param import map_params
    from jtrain.model.transformer import Transformer
    from jtrain.optim import build
    from jtrain.precision import PrecisionSpec

    rows: list[Row] = []
    for case in cases:
        model = Transformer(**case.sizes)
        rates: list[float] = []
        for offloaded in (False, True) if case.sizes is LLAMA8B else (True,):
            spec, optimizer = case.settings(offloaded=offloaded)
            layout = make_layout(spec, MeshSpec(), model.param_infos(), precision=PrecisionSpec(param_dtype="bfloat16"))
            built = build(optimizer, num_steps=1000, params=map_params(lambda info: info, model.param_infos()))
            sizes = {"global_batch": case.microbatches, "seq_len": case.seq_len}
            rates.append(step_rate(model, layout, built, **sizes, num_steps=num_steps))
        name = f"{case.name}, length {case.seq_len} x {case.microbatches}: offloaded, {gpu.device_kind}"
        if len(rates) == 2:
            rows.append(row(name, rates[1], "tokens/s", baseline=rates[0], bar=">= 0.9"))
        else:
            rows.append(row(name, rates[0], "tokens/s", bar=">= 6300" if case.sizes is QWEN14B else "> 0"))
    return rows
