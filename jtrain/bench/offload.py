"""Offload: device peak, host bytes and copies of the step compiled for an H200; with --live, tokens/s on the GPU here.

Without options nothing runs: the compilers of the extra [aot] say what they would allocate and schedule. The 8B is
compared with itself, nothing offloaded; 14B and 32B are plans for one H200 and 128 GiB of host memory.

--live needs a GPU, and refuses without one. It trains on random tokens, as the benchmark h200 does: the same model and
batch with its optimizer state on the host and, where the plan says that it fits, without; and the largest models. What
does not fit into the memory that is there is a row without a number.
"""

import dataclasses
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jtrain.bench import REHEARSE, Options, Row, option, row
from jtrain.errors import UserError
from jtrain.plan import AOT_ENVIRONMENT

if TYPE_CHECKING:
    from jtrain.layout.layout import LayoutSpec
    from jtrain.optim import AdamW
    from jtrain.plan.compile.compiled_step import CompiledStep
    from jtrain.plan.job import Job

GIB = 2**30
HOST_GIB, DEVICE_GIB = 128, 139

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

    def settings(self, *, offloaded: bool = True) -> "tuple[LayoutSpec, AdamW]":
        from jtrain.layout.layout import LayoutSpec, OffloadSpec
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


OPTIONS = (
    option("--live", action="store_true", help="measure on the GPU that is here"),
    option("--steps", type=int, default=3, help="timed steps of each, with --live (default: 3)"),
    option("--only", choices=("8B", "14B", "32B"), help="one of the models"),
    REHEARSE,
)


def run(args: Options) -> Iterator[Row]:
    """Rows of what was compiled, or of what ran.

    Raises:
      UserError: --live without a GPU.
    """
    cases = [case for case in CASES if args.only is None or case.name.startswith(args.only)]
    if args.live:
        if args.rehearse:
            cases = [dataclasses.replace(c, sizes=c.sizes | TOY, seq_len=32, microbatches=2) for c in cases]
        yield from _live(cases, args.steps, rehearse=args.rehearse)
        return
    os.environ.update(AOT_ENVIRONMENT)  # jax reads it when it is imported, which nothing above does
    for case in cases:
        yield from _compiled_rows(case, compiled(case, "h200:1", compare=case.name.startswith("8B")))
    if args.only is None:
        yield from _collective_rows()


def job_of(case: Case, *, offloaded: bool) -> "Job":
    """The job of a case on one device."""
    from jtrain.layout.layout import make_layout
    from jtrain.layout.mesh import MeshSpec
    from jtrain.layout.precision import PrecisionSpec
    from jtrain.model.transformer import Transformer
    from jtrain.plan.job import Job

    spec, optimizer = case.settings(offloaded=offloaded)
    model = Transformer(**case.sizes)
    layout = make_layout(spec, MeshSpec(), model.param_infos(), precision=PrecisionSpec(param_dtype="bfloat16"))
    return Job(model, layout, optimizer, case.microbatches, case.seq_len)


def compiled(case: Case, topology: str, *, compare: bool) -> "list[CompiledStep]":
    """The step with what is offloaded, and to compare with nothing offloaded."""
    from jtrain.layout.layout import make_layout
    from jtrain.layout.mesh import MeshSpec
    from jtrain.layout.precision import PrecisionSpec
    from jtrain.model.param import map_params
    from jtrain.model.transformer import Transformer
    from jtrain.optim import build
    from jtrain.plan.compile.compiled_step import compile_step, topology_devices
    from jtrain.plan.job import Job

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
    from jtrain.plan.estimate.memory import memory

    program, *plain = programs
    plan = memory(job_of(case, offloaded=True))
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


def _live(cases: list[Case], num_steps: int, *, rehearse: bool) -> Iterator[Row]:
    import jax

    gpu = jax.devices()[0]
    if gpu.platform != "gpu" and not rehearse:
        raise UserError(
            f"--live measures tokens/s on a GPU, but the device here is {gpu.device_kind!r}. Run it on one, or leave "
            "--live out: the compiled plans need none."
        )
    from jtrain.bench.h200 import step_rate
    from jtrain.model.param import map_params
    from jtrain.optim import build
    from jtrain.plan.estimate.memory import memory
    from jtrain.plan.fit_check import available_bytes, free_host_bytes

    for case in cases:
        rates: dict[bool, float] = {}
        for offloaded in (True, False) if case.name.startswith("8B") else (True,):
            where = "offloaded" if offloaded else "nothing offloaded"
            name = f"{case.name}, length {case.seq_len} x {case.microbatches}: {where}, {gpu.device_kind}"
            job = job_of(case, offloaded=offloaded)
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
            built = build(job.optimizer, num_steps=1000, params=map_params(lambda info: info, job.model.param_infos()))
            sizes = {"global_batch": case.microbatches, "seq_len": case.seq_len}
            rates[offloaded] = step_rate(job.model, job.layout, built, **sizes, num_steps=num_steps)
            bar = ">= 6300" if case.name.startswith("14B") and offloaded else None
            yield row(name, rates[offloaded], "tokens/s", bar=bar)
        if len(rates) == 2:
            what = f"{case.name}, length {case.seq_len} x {case.microbatches}: offloaded against not"
            yield row(what, rates[True], "tokens/s", baseline=rates[False], bar=">= 0.9")
