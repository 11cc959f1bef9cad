"""One plan as a sheet and as JSON: bytes by class, seconds of a step by part, what a run costs; a search as a table."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from jtrain.layout.offload_spec import OFFLOADABLE
from jtrain.plan.compile.compiled_step import CompiledStep
from jtrain.plan.compile.compiled_waits import schedule_waits_s
from jtrain.plan.economics.failures import Uptime, assumed_link
from jtrain.plan.estimate.attention_time import implementation
from jtrain.plan.estimate.collectives import collectives
from jtrain.plan.estimate.flops import MFU_DEFINITION, flops_per_token
from jtrain.plan.estimate.machine import Machine
from jtrain.plan.estimate.memory import MemoryPlan
from jtrain.plan.estimate.step_time import Cost, StepTime
from jtrain.plan.job import Job
from jtrain.plan.report.summary import collective_table, gib, new_table
from jtrain.plan.search import Point, SearchTask

TOLERANCE = 0.10
"""Largest relative difference between formula and compiler in a plan that counts as good."""

SURVEY_BYTES_PER_PARAMETER = 40
"""The survey's rule of thumb for Adam: 16 to 20 bytes of state, as many again of activations and buffers."""

_CLASSES = {
    "parameters": "params",
    "gradients": "grads",
    "optimizer": "optimizer",
    "activations": "activations",
    "loss": "loss",
    "batch": "batch",
}
"""Class of `MemoryPlan` -> its name on the sheet; all other classes are temporaries."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measurements of a run: peak device memory and median step; None if it did not report them."""

    workdir: str
    peak_bytes: int | None
    step_s: float | None
    tokens_per_s: float | None


@dataclasses.dataclass(frozen=True)
class Sheet:
    """Everything known about one config on one machine.

    uptime: what `goodput` was computed from; None if it was given.
    """

    config: str
    job: Job
    plan: MemoryPlan
    timed: StepTime
    cost: Cost
    goodput: float
    largest_rows: int
    uptime: Uptime | None = None
    compiled: CompiledStep | None = None
    measured: Measured | None = None

    @property
    def machine(self) -> Machine:
        """The machine of the job."""
        assert self.job.machine is not None, "a sheet is of a machine"
        return self.job.machine

    @property
    def params(self) -> int:
        """Number of parameters of the model."""
        return sum(p.info.size for p in self.job.layout.params)

    @property
    def difference(self) -> float | None:
        """Relative difference of the formula from the compiler's peak; None without a compiler."""
        return None if self.compiled is None else self.plan.total_bytes / self.compiled.peak_bytes - 1


def classes(plan: MemoryPlan) -> dict[str, int]:
    """Bytes by class: params, grads, optimizer, activations, loss, batch, temporaries on the device, and the host's."""
    found: collections.Counter[str] = collections.Counter()
    for name in (*_CLASSES.values(), "temporaries"):
        found[name] = 0
    for name, size in plan.classes().items():
        found[_CLASSES.get(name, "temporaries")] += size
    return dict(found) | {"host": plan.host_bytes}


def survey_bytes(params: int) -> int:
    """Bytes that training a model takes by the survey's rule (its table I): 280 GB for 7 billion parameters."""
    return SURVEY_BYTES_PER_PARAMETER * params


def to_json(sheet: Sheet) -> dict[str, Any]:
    """The sheet as `--json` writes it; bytes per device."""
    compiled, timed, cost, measured = sheet.compiled, sheet.timed, sheet.cost, sheet.measured
    found: dict[str, Any] = {
        "config": sheet.config,
        "device": sheet.machine.device.name,
        "count": sheet.machine.count,
        "formula": classes(sheet.plan)
        | {
            "argument_bytes": sheet.plan.argument_bytes,
            "temp_bytes": sheet.plan.temp_bytes,
            "host_argument_bytes": sheet.plan.host_argument_bytes,
            "peak_bytes": sheet.plan.total_bytes,
            "parameters": sheet.params,
            "survey_bytes": survey_bytes(sheet.params) // sheet.machine.count,
        },
        "compiler": None
        if compiled is None
        else {
            "argument_bytes": compiled.argument_bytes,
            "temp_bytes": compiled.temp_bytes,
            "host_argument_bytes": compiled.host_argument_bytes,
            "peak_bytes": compiled.peak_bytes,
            "compile_s": compiled.lower_s + compiled.compile_s,
        },
        "step": {
            "step_s": timed.step_s,
            "parts_s": timed.parts,
            "waits_s": timed.waits_s,
            "compiled_waits_s": None if compiled is None else schedule_waits_s(compiled.hlo, sheet.job),
            "attention": implementation(sheet.job),
            "tokens": timed.tokens,
            "tokens_per_s": timed.tokens_per_s,
            "mfu": timed.mfu,
            "flops_per_token": flops_per_token(sheet.job.model, seq_len=sheet.job.seq_len).total_flops,
            "largest_batch": _largest_batch(sheet),
            "collectives": [dataclasses.asdict(c) | {"wire_bytes": c.wire_bytes} for c in collectives(sheet.job)],
        },
        "cost": dataclasses.asdict(cost)
        | {"goodput": sheet.goodput, "uptime": None if sheet.uptime is None else dataclasses.asdict(sheet.uptime)},
    }
    if measured is not None:
        found["measured"] = dataclasses.asdict(measured)
    return found


def print_sheet(sheet: Sheet, console: Console, notes: Sequence[str]) -> None:
    """Prints the sheet, after `notes`."""
    device, machine, job = sheet.machine.device, sheet.machine, sheet.job
    mesh = " ".join(f"{axis}={n}" for axis, n in job.layout.mesh.shape.items() if n > 1) or "one device"
    console.print(
        f"{sheet.config} on {machine}: {sheet.params:,} parameters over {mesh}, {layout_line(sheet)}",
        style="bold",
        highlight=False,
    )
    for note in notes:
        console.print(note, highlight=False)
    for title, table in (_bytes_table(sheet), collective_table(collectives(sheet.job)), _time_table(sheet)):
        console.print(title, style="bold", highlight=False)
        console.print(table)
    assert device.hbm_bytes is not None
    flops = flops_per_token(job.model, seq_len=job.seq_len).total_flops
    rows = sheet.largest_rows
    batch = _largest_batch(sheet)
    largest = (
        f"largest batch that fits: {rows} x {job.seq_len} tokens per device at a time, {batch:,} sequences a step"
        if rows
        else "no batch fits: not one sequence per device"
    )
    console.print(
        "\n".join(
            [_waits_line(sheet), largest, *_cost_lines(sheet), f"{flops / 1e9:,.2f} GFLOP per token: {MFU_DEFINITION}"]
        )
    )


def layout_line(sheet: Sheet) -> str:
    """ZeRO stage, remat, microbatches and offload in one line."""
    spec = sheet.job.layout.spec
    shares = {name: getattr(spec.offload, name) for name in OFFLOADABLE}
    offload = " ".join(f"offload.{name}={share}" for name, share in shares.items() if share != "none")
    return f"zero_stage={spec.zero_stage} remat={spec.remat} microbatches={spec.microbatches} {offload}".rstrip()


def search_table(
    task: SearchTask, points: Sequence[Point], compiled: Mapping[int, CompiledStep | str]
) -> tuple[str, Table]:
    """Title and table of the fastest points, with the compiler's figures for those that were compiled."""
    right = ["GiB", "host GiB", "step s", "tokens/s", "MFU"]
    right += ["compiler GiB", "formula/compiler"] if compiled else []
    table = new_table(("#", "mesh", "zero", "remat", "micro", "offload"), right)
    for index, point in enumerate(points):
        assert point.timed is not None
        mesh = " ".join(f"{axis}={n}" for axis, n in point.mesh.shape.items() if n > 1) or "1"
        kept = f"{len(point.spec.remat_save)} named" if point.spec.remat_save else point.spec.remat
        shares = {name: getattr(point.spec.offload, name) for name in OFFLOADABLE}
        offload = " ".join(f"{name[:5]}={share:.0%}" for name, share in shares.items() if share != "none") or "-"
        said = compiled.get(index)
        beside = ["", ""]
        if isinstance(said, CompiledStep):
            beside = [gib(said.peak_bytes), f"{point.plan.total_bytes / said.peak_bytes:.3f}"]
        elif said is not None:
            beside = [said, ""]
        table.add_row(
            str(index + 1),
            mesh,
            str(point.spec.zero_stage),
            kept,
            str(point.spec.microbatches),
            offload,
            gib(point.plan.total_bytes),
            gib(point.plan.host_bytes),
            f"{point.step_s:,.3g}",
            f"{point.timed.tokens_per_s:,.0f}",
            f"{point.timed.mfu:.1%}",
            *(beside if compiled else []),
        )
    budget = f"{gib(task.budget_bytes)} of {gib(task.machine.hbm_bytes)} GiB per device"
    return f"the fastest that fit into {budget} on {task.machine}", table


def _largest_batch(sheet: Sheet) -> int:
    """Sequences per step of the largest batch that fits."""
    spec, mesh = sheet.job.layout.spec, sheet.job.layout.mesh
    return sheet.largest_rows * spec.microbatches * mesh.batch_shards


def _bytes_table(sheet: Sheet) -> tuple[str, Table]:
    plan, compiled, measured, machine = sheet.plan, sheet.compiled, sheet.measured, sheet.machine
    right = ["formula GiB", *(["compiler GiB", "formula/compiler"] if compiled else [])]
    right += ["measured GiB"] if measured else []
    table = new_table(("bytes per device",), right)

    def add(name: str, formula: int | None, said: int | None = None, seen: int | None = None) -> None:
        cells = ["" if formula is None else gib(formula)]
        if compiled:
            cells += ["", ""] if said is None else [gib(said), f"{formula / said:.3f}" if formula and said else "-"]
        if measured:
            cells.append("" if seen is None else gib(seen))
        table.add_row(name, *cells)

    for name, size in classes(plan).items():
        if name != "host":
            add(name, size)
    add("arguments", plan.argument_bytes, compiled.argument_bytes if compiled else None)
    add("temporaries, all", plan.temp_bytes, compiled.temp_bytes if compiled else None)
    add("peak", plan.total_bytes, compiled.peak_bytes if compiled else None, measured.peak_bytes if measured else None)
    add("host memory, arguments", plan.host_argument_bytes, compiled.host_argument_bytes if compiled else None)
    add("host memory, all", plan.host_bytes)
    add(f"memory of a {machine.device.name}", machine.hbm_bytes)
    if machine.host_bytes_per_device is not None:
        add("host memory, a device's share", machine.host_bytes_per_device)
    add(f"the survey's {SURVEY_BYTES_PER_PARAMETER} bytes a parameter", survey_bytes(sheet.params) // machine.count)
    takes = compiled.peak_bytes if compiled else plan.total_bytes
    there = machine.host_bytes_per_device
    room = machine.room_bytes(unified=sheet.job.layout.spec.offload.unified_memory)
    verdict = "fits" if takes <= room and (there is None or plan.host_bytes <= there) else "DOES NOT FIT"
    share = takes / room
    return f"{verdict}: {share:.0%} of the memory at the peak, in the moment `{plan.moment}`", table


def _time_table(sheet: Sheet) -> tuple[str, Table]:
    timed, measured = sheet.timed, sheet.measured
    table = new_table(("step, predicted",), ("s", "share", "of which hidden s"))
    hidden = {f"network, {' * '.join(row.axes)}": row.total_s - row.exposed_s for row in timed.network}
    hidden["host copies"] = timed.host_copy_s - timed.exposed_host_s
    for name, took in timed.parts.items():
        if took or hidden.get(name):
            table.add_row(name, f"{took:,.4g}", f"{took / timed.step_s:.1%}", f"{hidden.get(name, 0):,.4g}")
    table.add_row("step", f"{timed.step_s:,.4g}", "", "", style="bold")
    if measured is not None and measured.step_s is not None:
        ratio = f"predicted/measured {timed.step_s / measured.step_s:.2f}"
        table.add_row("measured", f"{measured.step_s:,.4g}", ratio, "")
    return f"{timed.tokens_per_s:,.0f} tokens/s, MFU {timed.mfu:.1%}, predicted, not measured", table


def _waits_line(sheet: Sheet) -> str:
    """Seconds of collectives with nothing computed beside them, by the formula and by the compiled schedule."""
    line = f"waits for the network: {sheet.timed.waits_s:,.3g} s by the formula"
    if sheet.compiled is None:
        return line
    found = schedule_waits_s(sheet.compiled.hlo, sheet.job)
    return f"{line}, {'unknown' if found is None else f'{found:,.3g} s'} in the compiled schedule"


def _cost_lines(sheet: Sheet) -> list[str]:
    cost, machine = sheet.cost, sheet.machine
    money = "for the cost in money, give --price USD (per device and hour)"
    if cost.usd is not None:
        money = f"${cost.usd:,.0f}"
    energy = f"energy unknown: the power of a {machine.device.name} is not published"
    if cost.energy_j is not None:
        assert machine.device.power_w is not None
        energy = (
            f"{cost.energy_j / 3.6e9:,.1f} MWh, {cost.energy_j / cost.tokens:.2g} J per token, at "
            f"{machine.device.power_w:,.0f} W per device (its maximum; without hosts and cooling)"
        )
    return [
        f"{cost.tokens:,} tokens at a goodput of {sheet.goodput:.1%}: {cost.days:,.2f} days, "
        f"{cost.device_hours:,.0f} device hours; {money}",
        *([] if sheet.uptime is None else [sheet.uptime.line()]),
        *([] if sheet.uptime is None or machine.device.host.link_bytes_per_s else [assumed_link(machine.device)]),
        energy,
    ]
