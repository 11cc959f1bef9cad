"""Plan printed as tables: arrays, bytes, FLOPs and collectives, beside the compiler's figures."""

import io
from collections.abc import Iterable, Mapping, Sequence

import jax
from jax.sharding import PartitionSpec
from rich.console import Console

from jtrain.layout.layout import Layout
from jtrain.layout.mesh import axis_names
from jtrain.model.adapters.block_quantization import stored_arrays
from jtrain.optim import Optimizer, state_bytes
from jtrain.plan.compile.compiled_step import CompiledStep, compile_step
from jtrain.plan.estimate.collectives import Collective, collectives
from jtrain.plan.estimate.flops import MFU_DEFINITION, flops_per_token
from jtrain.plan.estimate.memory import MemoryPlan, memory
from jtrain.plan.estimate.pipeline import ticks
from jtrain.plan.job import Job
from jtrain.report.number_formats import gib
from jtrain.report.table import Table, numbers, words
from jtrain.report.terminal import new_console, print_blocks
from jtrain.step.layout_choices import layout_line


def print_plan(
    job: Job,
    *,
    available: int | None = None,
    optimizer: Optimizer | None = None,
    topology: str | None = None,
    devices: Sequence[jax.Device] = (),
    console: Console | None = None,
) -> CompiledStep | None:
    """Prints the plan; with `topology` also compiles the step and prints its compiler's figures.

    Args:
      available: bytes that a step may use on one device; None if unknown.
      optimizer: `job.optimizer`, built; needed to compile for `topology`.
      devices: those of `topology` that the mesh takes.

    Raises:
      UserError: the mesh is not of that many devices.
    """
    compiled = None
    if topology is not None:
        assert optimizer is not None, "compiling takes the built optimizer"
        compiled = compile_step(job, optimizer, devices=list(devices))
    # Nothing is printed before the compilation has passed.
    console = console or new_console()
    print_blocks([*pipeline_lines(job), _layout_table(job)], console)
    plan = memory(job)
    title = f"bytes per device, at the peak ({plan.moment})"
    extra_rows = {} if available is None else {"available": available}
    memories = memory_table(title, plan, plan.classes(), extra_rows, compiled)
    print_blocks([memories, collective_table(collectives(job))], console)
    if compiled is not None:
        print_blocks([_compiled_table(compiled, topology or "")], console)
    print_blocks([_flops_line(job), f"MFU counts {MFU_DEFINITION}"], console)
    return compiled


def plan_text(job: Job, *, available: int | None) -> str:
    """Returns the plan as `print_plan` prints it."""
    # A fixed width, so that the text does not depend on the terminal.
    text = io.StringIO()
    print_plan(job, available=available, console=Console(file=text, width=110))
    return text.getvalue()


def brief_lines(job: Job, *, available: int | None) -> list[str]:
    """Returns the plan in a few lines, for the start of a run: parameters, memory, network, FLOPs."""
    plan = memory(job)
    # The three largest classes are most of the memory.
    largest = sorted(plan.classes().items(), key=lambda item: -item[1])[:3]
    available_text = "" if available is None else f" of {gib(available)}"
    sent = sum(row.wire_bytes for row in collectives(job))
    return [
        _title(job),
        f"{gib(plan.total_bytes)}{available_text} GiB per device at the peak "
        f"({', '.join(f'{name} {gib(size)}' for name, size in largest)}); {gib(sent)} GiB sent per step",
        # Not the layers of each stage: the plan has them.
        *pipeline_lines(job)[:1],
        _flops_line(job),
    ]


def _flops_line(job: Job) -> str:
    flops = flops_per_token(job.model, seq_len=job.seq_len, infos=job.layout.infos)
    return (
        f"{flops.total_flops / 1e9:,.3f} GFLOP per token ({flops.attention_flops / flops.total_flops:.0%} "
        f"attention), {flops.total_flops * job.tokens / 1e12:,.2f} TFLOP per step of {job.tokens:,} tokens"
    )


def pipeline_lines(job: Job) -> list[str]:
    """Lines about the stages of a pipelined step; none without stages."""
    pipeline, steps = job.layout.pipeline, ticks(job.layout)
    if pipeline is None or steps is None:
        return []
    # Layers of every worker, each virtual stage as first-last.
    stages = [
        "+".join(f"{first}-{first + count - 1}" if count > 1 else f"{first}" for first, count in of_worker)
        for of_worker in ([pipeline.layers_of(virtual) for virtual in worker] for worker in pipeline.virtual)
    ]
    lines = [
        f"{pipeline.spec.schedule} over mesh.stage={pipeline.stages}: {steps.microbatches} microbatches in "
        f"{steps.num_ticks} ticks, {steps.bubble(1.0, 1.0, 1.0):.1%} of the time waiting if the forward and "
        "both parts of the backward pass take equally long",
        f"layers by stage: {', '.join(stages)}; every stage keeps {steps.num_inputs} inputs of "
        f"{pipeline.layers_per_chunk} layers each and has 1/{pipeline.stages} of the vocabulary, so that all "
        "need the same memory",
    ]
    return [*lines, *([message] if (message := pipeline.identity_message()) else [])]


def _layout_table(job: Job) -> Table:
    """Table with a row per parameter; stacked layers are one, so the largest models have a dozen rows."""
    layout, precision = job.layout, job.layout.precision
    columns = words("parameter", "shape", "split", "grad", "optim") + numbers("MiB", "moments")
    table = Table(_title(job), columns)
    for p in layout.params:
        # By the optimizer's shard, which ZeRO may split further than the parameter.
        elements = 0 if p.info.frozen else layout.local_size(p.optimizer_partition, p.info.shape)
        moments = state_bytes(job.optimizer, p.info, elements)
        # By the stored parameter's shard.
        arrays = jax.tree.leaves(stored_arrays(p.info, p.dtype(precision)))
        size = sum(
            layout.local_size(p.param_partition, array.shape) * array.dtype.itemsize for array in arrays
        )
        table.add(
            p.info.path.removeprefix("layers."),
            " ".join(map(str, p.info.shape)),
            # The three differ by ZeRO stage: parameter, gradient sum, optimizer state.
            _split(layout, p.info.dims, p.param_partition),
            *(
                "frozen" if p.info.frozen else _split(layout, p.info.dims, partition)
                for partition in (p.accumulator_partition, p.optimizer_partition)
            ),
            _mib(size),
            _mib(moments),
        )
    return table


def mesh_line(shape: Mapping[str, int], empty_text: str = "one device") -> str:
    """Axes of more than one device: `data=4 tensor=2`; `alone` if there are none."""
    return " ".join(f"{axis}={n}" for axis, n in shape.items() if n > 1) or empty_text


def _title(job: Job) -> str:
    layout = job.layout
    total = sum(p.info.size for p in layout.params)
    held = f"{layout_line(layout.spec)}, {layout.precision.param_dtype} on device"
    trained = sum(p.info.size for p in layout.trained)
    of_them = "" if trained == total else f", {trained:,} of them trained,"
    return f"{total:,} parameters{of_them} over {mesh_line(layout.mesh.shape)}, {held}"


def memory_table(
    title: str,
    plan: MemoryPlan,
    classes: Mapping[str, int],
    extra_rows: Mapping[str, int],
    compiled: CompiledStep | None,
    measured_bytes: int | None = None,
) -> Table:
    """Table of a plan's bytes by class and in all, with the compiler's and the measured ones.

    Args:
      classes: bytes on the device by class.
      extra_rows: name -> bytes of further rows, below the plan's own.
      measured_bytes: peak of a run.
    """
    names = ["formula GiB", *(["compiler GiB", "formula/compiler"] if compiled else [])]
    names += ["measured GiB"] if measured_bytes is not None else []
    table = Table(title, words("bytes per device") + numbers(*names))

    def add(name: str, formula: int, compiled_bytes: int | None = None, run_bytes: int | None = None) -> None:
        cells = [gib(formula)]
        if compiled:
            # Classes have no counterpart at the compiler, which reports sums only.
            cells += (
                ["", ""]
                if compiled_bytes is None
                else [
                    gib(compiled_bytes),
                    f"{formula / compiled_bytes:.3f}" if formula and compiled_bytes else "-",
                ]
            )
        table.add(name, *cells, "" if run_bytes is None else gib(run_bytes), bold=name == "peak")

    for name, size in classes.items():
        add(name, size)
    # Rows that the compiler reports as well.
    add("arguments", plan.argument_bytes, compiled and compiled.argument_bytes)
    add("temporaries, all", plan.temp_bytes, compiled and compiled.temp_bytes)
    add("peak", plan.total_bytes, compiled and compiled.peak_bytes, measured_bytes)
    add("host memory, arguments", plan.host_argument_bytes, compiled and compiled.host_argument_bytes)
    add("host memory, all", plan.host_bytes)
    for name, size in extra_rows.items():
        add(name, size)
    return table


def collective_table(sent: Iterable[Collective]) -> Table:
    """Table of the collectives that one device takes part in."""
    # Read twice below: for the title and for the rows.
    rows = list(sent)
    columns = words("what", "kind", "axes", "dtype") + numbers("arrays", "GiB whole", "GiB sent")
    table = Table(
        f"collectives per device and step: {gib(sum(row.wire_bytes for row in rows))} GiB sent", columns
    )
    for row in rows:
        axes = "*".join(row.axes) + f" ({row.group})"
        sizes = gib(row.array_bytes), gib(row.wire_bytes)
        table.add(row.purpose, row.kind, axes, row.dtype, f"{row.count:,}", *sizes)
    # One device sends nothing, and an empty table looks like an error.
    if not rows:
        table.add("none", "", "", "", "0", "0", "0")
    return table


def _compiled_table(compiled: CompiledStep, topology: str) -> Table:
    names = ("arrays", "GiB whole", "GiB sent", "asynchronous", "hidden")
    title = f"collectives as compiled for {topology} ({compiled.lower_s + compiled.compile_s:.0f} s)"
    table = Table(title, words("kind", "axes", "dtype") + numbers(*names))
    # The largest first.
    for t in sorted(compiled.traffic, key=lambda t: -t.wire_bytes):
        shares = [
            f"{part / t.array_bytes:.0%}" if t.array_bytes else "-"
            for part in (t.async_bytes, t.hidden_bytes)
        ]
        axes = "*".join(t.axes) + f" ({t.group})"
        table.add(t.kind, axes, t.dtype, f"{t.count:,}", gib(t.array_bytes), gib(t.wire_bytes), *shares)
    return table


def _split(layout: Layout, dims: str, partition: PartitionSpec) -> str:
    """Dimensions with the axes that split them, such as `D/data F/tensor`; without axes of one device."""
    split = [(dim, axis) for dim, axes in zip(dims, partition, strict=True) for axis in axis_names(axes)]
    return " ".join(f"{dim}/{axis}" for dim, axis in split if layout.mesh.shape[axis] > 1) or "whole"


def _mib(size: int) -> str:
    mib = size / 2**20
    # Below 0.1 MiB a fixed decimal would print 0.0.
    return f"{mib:,.1f}" if mib >= 0.1 else f"{mib:.1e}"
