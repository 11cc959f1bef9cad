"""The plan's bytes, and the seconds that it waits for the network, against compiled programs of every kind.

    python -m jtrain.bench plan_compiled [--only cuDNN]

Dense layers with ZeRO-3, attention by cuDNN, 8-bit matmuls, experts, sequences over `context`, `tensor`,
state, weights and activations in host memory, sums in bfloat16: compiled for 8 x H200 and 8 x v5p that are
not there, at the widths of llama8b and qwen3_30b_a3b. Nothing runs. Bytes are the compiler's. Seconds are
those that the compute stream of `jtrain.plan.compile.two_streams` waits in the compiled schedule, at the
rates of the plan beside it, so that the schedule alone makes the difference.

Each program takes one to five minutes of a core; `--lines FILE` has each row as soon as there is one.
"""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from jtrain.bench import Options, Row, option, row
from jtrain.config.load import for_devices, load_config
from jtrain.config.run import Run, build_run, build_run_optimizer
from jtrain.plan.compile.compiled_step import compile_step, topology_devices
from jtrain.plan.compile.compiled_waits import compiled_timeline
from jtrain.plan.estimate.machine import make_machine
from jtrain.plan.estimate.memory import memory
from jtrain.plan.estimate.step_time import step_time
from jtrain.plan.from_run import plan_job
from jtrain.plan.job import Job

type Chip = Literal["h200", "v5p"]

GIB = 2**30

COMPILER_OPTIONS: dict[Chip, dict[str, int]] = {"h200": {"xla_gpu_autotune_level": 0}, "v5p": {}}
"""Options beside those of the train step. XLA:GPU tries no kernels of matmuls, which changes no bytes and
takes a third of a compilation where there is no GPU to try them on."""

TOPOLOGIES: dict[Chip, str] = {"h200": "h200:8", "v5p": "v5p:2x2x2"}

_REMAT = "layout.remat=named layout.remat_save=('attention_q','attention_k','attention_v','attention')"
_ZERO = f"layout.microbatches=1 data.global_batch=16 {_REMAT}"
_LONG = f"mesh.data=2 mesh.context=4 layout.microbatches=1 data.seq_len=32768 data.global_batch=4 {_REMAT}"
_EXPERTS = "layout.microbatches=4 data.global_batch=128"
_HYBRID = f"mesh.data=4 mesh.tensor=2 {_ZERO}"
_TENSOR = f"mesh.data=1 mesh.tensor=8 layout.zero_stage=0 layout.microbatches=1 data.global_batch=4 {_REMAT}"
_IN_16_BITS = (
    "layout.microbatches=4 data.global_batch=64 layout.remat=full precision.param_dtype=bfloat16 "
    "precision.grad_accum_dtype=bfloat16"
)


@dataclasses.dataclass(frozen=True)
class PlannedProgram:
    """One program to compile.

    title: what sets it apart from the others.
    sets: settings of the config.
    waits: True if the bar of the seconds holds for it.
    """

    title: str
    chip: Chip
    config: str
    sets: str
    waits: bool = False

    @property
    def name(self) -> str:
        """Name in the table."""
        return f"{self.config}, 8 x {self.chip}, {self.title}"


PROGRAMS = (
    PlannedProgram("ZeRO-3", "h200", "llama8b", _ZERO, waits=True),
    PlannedProgram("cuDNN attention", "h200", "llama8b", f"{_ZERO} kernels=(('attention','cudnn'),)"),
    PlannedProgram(
        "8 bits, delayed scaling",
        "h200",
        "llama8b",
        f"{_ZERO} precision.matmul_dtype=fp8_delayed",
        waits=True,
    ),
    PlannedProgram(
        "8 bits, current scaling",
        "h200",
        "llama8b",
        f"{_ZERO} precision.matmul_dtype=fp8_current",
        waits=True,
    ),
    PlannedProgram("expert=4", "h200", "qwen3_30b_a3b", _EXPERTS, waits=True),
    PlannedProgram("context=4, ring", "h200", "llama8b", _LONG, waits=True),
    PlannedProgram(
        "context=4, ulysses", "h200", "llama8b", f"{_LONG} layout.context_attention=ulysses", waits=True
    ),
    PlannedProgram("tensor=8", "h200", "llama8b", _TENSOR, waits=True),
    PlannedProgram("data=4, tensor=2", "h200", "llama8b", _HYBRID),
    PlannedProgram("optimizer on the host", "h200", "llama8b", f"{_ZERO} layout.offload.optimizer=1.0"),
    PlannedProgram("parameters on the host", "h200", "llama8b", f"{_ZERO} layout.offload.params=1.0"),
    PlannedProgram("activations on the host", "h200", "llama8b", f"{_ZERO} layout.offload.activations=1.0"),
    PlannedProgram("sums in bfloat16", "h200", "llama8b", _IN_16_BITS),
    PlannedProgram("ZeRO-3", "v5p", "llama8b", _ZERO, waits=True),
    PlannedProgram("context=4, ring", "v5p", "llama8b", _LONG, waits=True),
    PlannedProgram("data=4, tensor=2", "v5p", "llama8b", _HYBRID, waits=True),
)


OPTIONS = (option("--only", metavar="TEXT", default="", help="programs whose name has this text"),)
ABSENT_CHIPS = True


@dataclasses.dataclass(frozen=True)
class Figures:
    """Bytes of one program on a device and in host memory, and seconds that it waits for the network."""

    argument_bytes: int
    host_argument_bytes: int
    peak_bytes: int
    waits_s: float


def run(args: Options) -> Iterator[Row]:
    """Rows of each program as it is compiled, then the mean and the largest error of all."""
    errors: list[float] = []
    for program in PROGRAMS:
        if args.only in program.name:
            figures = compiled_figures(program)
            # Peaks alone: arguments must be exact, and seconds have a bar for some programs only.
            errors.append(_error(planned_figures(program).peak_bytes, figures.peak_bytes))
            yield from rows(program, figures)
    # --only may have chosen none.
    if errors:
        yield row("peak: mean error", sum(errors) / len(errors), "%", bar="<= 5")
        yield row("peak: largest error", max(errors), "%", bar="<= 10")


def rows(program: PlannedProgram, figures: Figures) -> Iterator[Row]:
    """The plan's figures of one program beside the compiled ones."""
    plan, name = planned_figures(program), program.name
    # Both differences count: bytes on the wrong side of the host are wrong twice.
    wrong_bytes = abs(plan.argument_bytes - figures.argument_bytes) + abs(
        plan.host_argument_bytes - figures.host_argument_bytes
    )
    yield row(f"{name}: arguments", plan.argument_bytes, "B", baseline=figures.argument_bytes)
    yield row("  off by", wrong_bytes, "B", bar="<= 0")
    yield row(f"{name}: peak", plan.peak_bytes / GIB, "GiB", baseline=figures.peak_bytes / GIB)
    yield row("  off by", _error(plan.peak_bytes, figures.peak_bytes), "%", bar="<= 10")
    yield row(f"{name}: waits for the network", 1e3 * plan.waits_s, "ms", baseline=1e3 * figures.waits_s)
    yield row("  off by", _error(plan.waits_s, figures.waits_s), "%", bar="<= 25" if program.waits else None)


def _error(planned: float, actual: float) -> float:
    """Distance of the plan from the compiled figure, in per cent of that."""
    return 100 * abs(planned / actual - 1)


def program_run(program: PlannedProgram) -> Run:
    """The config of a program with its settings, on 8 devices where it does not say how many."""
    # No setting here has a space in it.
    config = load_config(program.config, (), program.sets.split())
    for_devices(config, 8)
    return build_run(config)


def program_job(program: PlannedProgram) -> Job:
    """The job of a program on its machine."""
    run = program_run(program)
    return plan_job(run, make_machine(program.chip, run.mesh.size, host_memory_bytes=2 * 10**12))


def planned_figures(program: PlannedProgram) -> Figures:
    """The plan of a program."""
    job = program_job(program)
    plan = memory(job)
    return Figures(
        plan.argument_bytes, plan.host_argument_bytes, plan.total_bytes, step_time(job, plan).waits_s
    )


def compiled_figures(program: PlannedProgram) -> Figures:
    """Figures of a program as it is compiled, and the waits of its schedule.

    Raises:
      UserError: the compiler is not installed.
    """
    job, optimizer = program_job(program), build_run_optimizer(program_run(program))
    devices, options = topology_devices(TOPOLOGIES[program.chip]), COMPILER_OPTIONS[program.chip]
    # The plan's job with the plan's options: both describe one program.
    step = compile_step(job, optimizer, devices=devices, compiler_options=options)
    # The compiled schedule at the plan's own rates: what differs is the schedule, not the network.
    waits_s = compiled_timeline(step.hlo, job).waiting_s
    return Figures(step.argument_bytes, step.host_argument_bytes, step.peak_bytes, waits_s)
