"""Plan printed as tables: where every array lives, bytes, FLOPs and collectives, beside the compiler's figures."""

import io
from collections.abc import Iterable, Sequence

import jax
from jax.sharding import PartitionSpec
from rich import box
from rich.console import Console
from rich.table import Table

from jtrain.layout.layout import Layout
from jtrain.layout.mesh import axis_names
from jtrain.layout.precision import itemsize
from jtrain.optim import Optimizer, state_bytes
from jtrain.plan.compile.compiled_step import CompiledStep, compile_step
from jtrain.plan.estimate.collectives import Collective, collectives
from jtrain.plan.estimate.flops import MFU_DEFINITION, flops_per_token
from jtrain.plan.estimate.memory import MemoryPlan, memory
from jtrain.plan.estimate.pipeline import ticks
from jtrain.plan.job import Job


def print_plan(
    job: Job,
    *,
    available: int | None = None,
    optimizer: Optimizer | None = None,
    topology: str | None = None,
    devices: Sequence[jax.Device] = (),
    console: Console | None = None,
) -> CompiledStep | None:
    """Prints the plan; with `topology` also compiles the step for that machine and prints its compiler's figures.

    Args:
      available: bytes that a step may use on one device; None if unknown.
      optimizer: `job.optimizer`, built; needed to compile for `topology`.
      devices: those of `topology` that the mesh takes.

    Raises:
      UserError: the mesh is not of that many devices.
    """
    console = console or new_console()
    compiled = None
    if topology is not None:
        assert optimizer is not None, "compiling takes the built optimizer"
        compiled = compile_step(job, optimizer, devices=list(devices))
    tables = [
        _layout_table(job),
        _memory_table(memory(job), compiled, available),
        collective_table(collectives(job)),
    ]
    if compiled is not None:
        tables.append(_compiled_table(compiled, topology or ""))
    for line in pipeline_lines(job):
        console.print(line, highlight=False)
    for title, table in tables:
        console.print(title, style="bold", highlight=False)
        console.print(table)
    console.print(f"{_flops_line(job)}\nMFU counts {MFU_DEFINITION}")
    return compiled


def plan_text(job: Job, *, available: int | None) -> str:
    """Returns the plan as `print_plan` prints it."""
    text = io.StringIO()
    print_plan(job, available=available, console=Console(file=text, width=110))
    return text.getvalue()


def brief_lines(job: Job, *, available: int | None) -> list[str]:
    """Returns the plan in a few lines, for the start of a run: parameters, memory, network, FLOPs."""
    plan = memory(job)
    largest = sorted(plan.classes().items(), key=lambda item: -item[1])[:3]
    of = "" if available is None else f" of {gib(available)}"
    sent = sum(row.wire_bytes for row in collectives(job))
    return [
        _title(job),
        f"{gib(plan.total_bytes)}{of} GiB per device at the peak "
        f"({', '.join(f'{name} {gib(size)}' for name, size in largest)}); {gib(sent)} GiB sent per step",
        *pipeline_lines(job)[:1],
        _flops_line(job),
    ]


def _flops_line(job: Job) -> str:
    flops = flops_per_token(job.model, seq_len=job.seq_len)
    return (
        f"{flops.total_flops / 1e9:,.3f} GFLOP per token ({flops.attention_flops / flops.total_flops:.0%} attention), "
        f"{flops.total_flops * job.tokens / 1e12:,.2f} TFLOP per step of {job.tokens:,} tokens"
    )


def pipeline_lines(job: Job) -> list[str]:
    """Lines about the stages of a pipelined step; none without stages."""
    pipeline, steps = job.layout.pipeline, ticks(job.layout)
    if pipeline is None or steps is None:
        return []
    stages = [
        "+".join(f"{first}-{first + count - 1}" if count > 1 else f"{first}" for first, count in of_worker)
        for of_worker in ([pipeline.layers_of(virtual) for virtual in worker] for worker in pipeline.virtual)
    ]
    lines = [
        f"{pipeline.spec.schedule} over mesh.stage={pipeline.stages}: {steps.microbatches} microbatches in "
        f"{steps.num_ticks} ticks, {steps.bubble(1.0, 1.0, 1.0):.1%} of the time waiting if the forward and both parts "
        "of the backward pass take equally long",
        f"layers by stage: {', '.join(stages)}; every stage keeps {steps.num_inputs} inputs of "
        f"{pipeline.layers_per_chunk} layers each and has 1/{pipeline.stages} of the vocabulary, so that all need the "
        "same memory",
    ]
    return [*lines, *([said] if (said := pipeline.said()) else [])]


def new_console() -> Console:
    """A console as wide as the terminal, or of 110 columns without one."""
    return Console(width=None if Console().is_terminal else 110)


def new_table(left: Sequence[str], right: Sequence[str]) -> Table:
    """A plain table with `left` columns of text and `right` columns of numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for index, name in enumerate(left):
        table.add_column(name, overflow="fold", no_wrap=index < 2)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _layout_table(job: Job) -> tuple[str, Table]:
    """Title and table with a row per parameter; stacked layers are one, so the largest models have a dozen rows."""
    layout, precision = job.layout, job.layout.precision
    columns = ("parameter", "shape", "split", "grad", "optim")
    table = new_table(columns, ("MiB", "moments"))
    for p in layout.params:
        moments = state_bytes(job.optimizer, p.info, layout.local_size(p.optimizer, p.info.shape))
        size = layout.local_size(p.param, p.info.shape) * itemsize(precision.param_dtype)
        table.add_row(
            p.info.path.removeprefix("layers."),
            " ".join(map(str, p.info.shape)),
            *(_split(layout, p.info.dims, where) for where in (p.param, p.accumulator, p.optimizer)),
            _mib(size),
            _mib(moments),
        )
    return _title(job), table


def _title(job: Job) -> str:
    layout = job.layout
    total = sum(p.info.size for p in layout.params)
    mesh = " ".join(f"{axis}={n}" for axis, n in layout.mesh.shape.items() if n > 1) or "one device"
    held = f"zero_stage={layout.spec.zero_stage}, {layout.precision.param_dtype} on device"
    return f"{total:,} parameters over {mesh}, {held}"


def _memory_table(plan: MemoryPlan, compiled: CompiledStep | None, available: int | None) -> tuple[str, Table]:
    columns = ["GiB", *(["compiler GiB", "formula/compiler"] if compiled else [])]
    title = f"bytes per device, at the peak ({plan.moment})"
    table = new_table(("class",), columns)
    for name, size in plan.classes().items():
        table.add_row(name, gib(size), *(["", ""] if compiled else []))
    sums: list[tuple[str, int, int]] = [("arguments", plan.argument_bytes, compiled.argument_bytes if compiled else 0)]
    sums.append(("temporaries", plan.temp_bytes, compiled.temp_bytes if compiled else 0))
    sums.append(("total", plan.total_bytes, compiled.peak_bytes if compiled else 0))
    for name, formula, said in sums:
        table.add_row(name, gib(formula), *([gib(said), f"{formula / said:.3f}"] if compiled else []), style="bold")
    if available is not None:
        table.add_row("available", gib(available), *(["", ""] if compiled else []))
    if plan.host_bytes or (compiled and compiled.host_argument_bytes):
        said = compiled.host_argument_bytes if compiled else 0
        ratio = f"{plan.host_argument_bytes / said:.3f}" if said else "-"
        host = plan.host_argument_bytes
        table.add_row("host memory, arguments", gib(host), *([gib(said), ratio] if compiled else []))
        table.add_row("host memory, all", gib(plan.host_bytes), *(["", ""] if compiled else []))
    return title, table


def collective_table(sent: Iterable[Collective]) -> tuple[str, Table]:
    """Title and table of the collectives that one device takes part in."""
    rows = list(sent)
    title = f"collectives per device and step: {gib(sum(row.wire_bytes for row in rows))} GiB sent"
    table = new_table(("what", "kind", "axes", "dtype"), ("arrays", "GiB whole", "GiB sent"))
    for row in rows:
        axes = "*".join(f"{axis}" for axis in row.axes) + f" ({row.group})"
        table.add_row(
            row.purpose, row.kind, axes, row.dtype, f"{row.count:,}", gib(row.array_bytes), gib(row.wire_bytes)
        )
    if not rows:
        table.add_row("none", "", "", "", "0", "0", "0")
    return title, table


def _compiled_table(compiled: CompiledStep, topology: str) -> tuple[str, Table]:
    title = f"collectives as compiled for {topology} ({compiled.lower_s + compiled.compile_s:.0f} s)"
    table = new_table(("kind", "axes", "dtype"), ("arrays", "GiB whole", "GiB sent", "asynchronous", "hidden"))
    for t in sorted(compiled.traffic, key=lambda t: -t.wire_bytes):
        shares = [f"{part / t.array_bytes:.0%}" if t.array_bytes else "-" for part in (t.async_bytes, t.hidden_bytes)]
        axes = "*".join(t.axes) + f" ({t.group})"
        table.add_row(t.kind, axes, t.dtype, f"{t.count:,}", gib(t.array_bytes), gib(t.wire_bytes), *shares)
    return title, table


def _split(layout: Layout, dims: str, where: PartitionSpec) -> str:
    """Dimensions with the axes that split them, such as `D/data F/tensor`; axes of one device are left out."""
    split = [(dim, axis) for dim, axes in zip(dims, where, strict=True) for axis in axis_names(axes)]
    return " ".join(f"{dim}/{axis}" for dim, axis in split if layout.mesh.shape[axis] > 1) or "whole"


def gib(size: int) -> str:
    """Bytes as text in GiB; small sizes have more decimals."""
    gib = size / 2**30
    return f"{gib:,.2f}" if gib >= 0.1 else f"{gib:.4f}" if gib >= 1e-4 else f"{gib:.1e}" if size else "0"


def _mib(size: int) -> str:
    mib = size / 2**20
    return f"{mib:,.1f}" if mib >= 0.1 else f"{mib:.1e}"
