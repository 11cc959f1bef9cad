"""The plan as a person reads it: where every array lives, bytes, FLOPs, collectives; the compiler's beside them."""

import dataclasses
from collections.abc import Iterable, Sequence

import jax
from jax.sharding import PartitionSpec
from rich import box
from rich.console import Console
from rich.table import Table

from jtrain.layout import Layout, itemsize
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Muon, Optimizer, state_bytes
from jtrain.plan.aot import CompiledStep, compile_step, topology_devices
from jtrain.plan.collectives import Collective, collectives
from jtrain.plan.flops import MFU_DEFINITION, flops_per_token
from jtrain.plan.memory import MemoryPlan, memory
from jtrain_kernels.device import Platform


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a plan is of: the components of a run that decide bytes and FLOPs."""

    model: Transformer
    layout: Layout
    optimizer: AdamW | Muon
    global_batch: int
    seq_len: int


def print_plan(
    parts: Parts,
    *,
    available: int | None = None,
    optimizer: Optimizer | None = None,
    topology: str | None = None,
    platform: Platform = "gpu",
    console: Console | None = None,
) -> CompiledStep | None:
    """Prints the plan; with `topology` compiles the step for that machine and prints what its compiler says.

    Args:
      available: bytes that one device has for it, if known.
      optimizer: `parts.optimizer`, built; only for `topology`.
      platform: whose compiler the formula is of, without `topology`.

    Raises:
      ValueError: no such topology, or the mesh is not of that many devices.
    """
    console = console or new_console()
    sizes = {"global_batch": parts.global_batch, "seq_len": parts.seq_len}
    compiled = None
    if topology is not None:
        assert optimizer is not None, "compiling takes the built optimizer"
        devices: list[jax.Device] = topology_devices(topology)
        platform = "tpu" if devices[0].platform == "tpu" else "gpu"
        compiled = compile_step(parts.model, parts.layout, optimizer, **sizes, devices=devices)
    plan = memory(parts.model, parts.layout, parts.optimizer, **sizes, platform=platform)
    sent = collectives(parts.model, parts.layout, **sizes)
    tables = [_layout_table(parts), _memory_table(plan, compiled, available), collective_table(sent)]
    if compiled is not None:
        tables.append(_compiled_table(compiled, topology or ""))
    for title, table in tables:
        console.print(title, style="bold", highlight=False)
        console.print(table)
    flops = flops_per_token(parts.model, seq_len=parts.seq_len)
    tokens = parts.global_batch * parts.seq_len
    console.print(
        f"{flops.total_flops / 1e9:,.3f} GFLOP per token ({flops.attention_flops / flops.total_flops:.0%} attention), "
        f"{flops.total_flops * tokens / 1e12:,.2f} TFLOP per step of {tokens:,} tokens\nMFU counts {MFU_DEFINITION}"
    )
    return compiled


def new_console() -> Console:
    """The terminal, or 110 columns where there is none."""
    return Console(width=None if Console().is_terminal else 110)


def new_table(left: Sequence[str], right: Sequence[str]) -> Table:
    """A plain table: `left` columns of text, `right` ones of numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for index, name in enumerate(left):
        table.add_column(name, overflow="fold", no_wrap=index < 2)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _layout_table(parts: Parts) -> tuple[str, Table]:
    """One row per parameter; stacked layers are one parameter, so the largest models have a dozen rows."""
    spec = parts.layout.spec
    total = sum(p.info.size for p in parts.layout.params)
    mesh = " ".join(f"{axis}={n}" for axis, n in parts.layout.mesh.shape.items() if n > 1) or "one device"
    title = f"{total:,} parameters over {mesh}, zero_stage={spec.zero_stage}, {spec.param_dtype} on device"
    columns = ("parameter", "shape", "split", "grad", "optim")
    table = new_table(columns, ("MiB", "moments"))
    for p in parts.layout.params:
        moments = state_bytes(parts.optimizer, p.info, parts.layout.local_size(p.optimizer, p.info.shape))
        size = parts.layout.local_size(p.param, p.info.shape) * itemsize(spec.param_dtype)
        table.add_row(
            p.info.path.removeprefix("layers."),
            " ".join(map(str, p.info.shape)),
            *(_split(parts.layout, p.info.dims, where) for where in (p.param, p.accumulator, p.optimizer)),
            _mib(size),
            _mib(moments),
        )
    return title, table


def _memory_table(plan: MemoryPlan, compiled: CompiledStep | None, available: int | None) -> tuple[str, Table]:
    columns = ["GiB", *(["compiler GiB", "formula/compiler"] if compiled else [])]
    title = f"bytes per device, at the worst moment ({plan.moment})"
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
    """Title and table of what one device sends."""
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
    """`D/data F/tensor`: which dimension is split over which axis, as far as there is anything to split over."""
    used = [(dim, axis) for dim, axis in zip(dims, where, strict=True) if axis and layout.mesh.shape[axis] > 1]
    return " ".join(f"{dim}/{axis}" for dim, axis in used) or "whole"


def gib(size: int) -> str:
    """Bytes as GiB, with as many digits as say something."""
    gib = size / 2**30
    return f"{gib:,.2f}" if gib >= 0.1 else f"{gib:.4f}" if gib >= 1e-4 else f"{gib:.1e}" if size else "0"


def _mib(size: int) -> str:
    mib = size / 2**20
    return f"{mib:,.1f}" if mib >= 0.1 else f"{mib:.1e}"
