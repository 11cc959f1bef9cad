"""One plan as a sheet and as JSON: bytes by class, seconds by part, costs; a search as a table."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from jtrain.plan.compile.compiled_step import CompiledStep
from jtrain.plan.compile.compiled_waits import schedule_waits_s
from jtrain.plan.economics.failures import Uptime, assumed_link
from jtrain.plan.estimate.attention_kernel import implementation
from jtrain.plan.estimate.collectives import collectives
from jtrain.plan.estimate.flops import MFU_DEFINITION, flops_per_token
from jtrain.plan.estimate.machine import Machine
from jtrain.plan.estimate.memory import MemoryPlan
from jtrain.plan.estimate.step_time import Cost, StepTime
from jtrain.plan.job import Job
from jtrain.plan.report.summary import collective_table, memory_table, mesh_line
from jtrain.plan.search_task import Point, SearchTask
from jtrain.plan.single_changes import FASTER
from jtrain.plan.smaller_settings import set_options
from jtrain.report.charts import coloured
from jtrain.report.number_formats import gib, seconds, share
from jtrain.report.page import Title
from jtrain.report.table import Bars, Facts, Table, bars, numbers, words
from jtrain.report.terminal import print_blocks
from jtrain.step.layout_choices import layout_cells, layout_line

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
class RunMeasurements:
    """Measurements of a run: peak device memory and median step; None if it did not report them."""

    workdir: str
    peak_bytes: int | None
    step_s: float | None
    tokens_per_s: float | None


@dataclasses.dataclass(frozen=True)
class Sheet:
    """Everything known about one config on one machine.

    uptime: what `goodput` was computed from; None if it was given.
    faster: layouts with one setting changed that are faster, the fastest first, and what each has otherwise;
      None where they were not asked for.
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
    measured: RunMeasurements | None = None
    faster: tuple[tuple[Point, dict[str, object]], ...] | None = None

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
    """Bytes by class: the device's, with all that is not state or batch as temporaries, and the host's."""
    class_bytes: collections.Counter[str] = collections.Counter()
    # All classes, in the order of the sheet, also those of 0 bytes.
    for name in (*_CLASSES.values(), "temporaries"):
        class_bytes[name] = 0
    for name, size in plan.classes().items():
        # Several classes of the plan may become one of the sheet.
        class_bytes[_CLASSES.get(name, "temporaries")] += size
    return dict(class_bytes) | {"host": plan.host_bytes}


def survey_bytes(params: int) -> int:
    """Bytes to train a model by the survey's rule (its table I): 280 GB for 7 billion parameters."""
    return SURVEY_BYTES_PER_PARAMETER * params


def to_json(sheet: Sheet) -> dict[str, Any]:
    """The sheet as `--json` writes it; bytes per device."""
    compiled, timed, cost, measured = sheet.compiled, sheet.timed, sheet.cost, sheet.measured
    document: dict[str, Any] = {
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
            # Of one device: the survey's rule is of the whole model.
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
            # From the compiled text, so it needs no device.
            "compiled_waits_s": None if compiled is None else schedule_waits_s(compiled.hlo, sheet.job),
            "attention": implementation(sheet.job),
            "tokens": timed.tokens,
            "tokens_per_s": timed.tokens_per_s,
            "mfu": timed.mfu,
            "flops_per_token": flops_per_token(
                sheet.job.model, seq_len=sheet.job.seq_len, infos=sheet.job.layout.infos
            ).total_flops,
            "largest_batch": _largest_batch(sheet),
            "collectives": [
                dataclasses.asdict(c) | {"wire_bytes": c.wire_bytes} for c in collectives(sheet.job)
            ],
        },
        "cost": dataclasses.asdict(cost)
        | {
            "goodput": sheet.goodput,
            "uptime": None if sheet.uptime is None else dataclasses.asdict(sheet.uptime),
        },
    }
    if sheet.faster is not None:
        document["faster"] = [
            {
                "settings": settings,
                "step_s": point.step_s,
                "peak_bytes": point.plan.total_bytes,
            }
            for point, settings in sheet.faster
        ]
    # The key exists only where a run was measured.
    if measured is not None:
        document["measured"] = dataclasses.asdict(measured)
    return document


def faster_line(sheet: Sheet) -> str | None:
    """How far the layout is from the best with one setting changed; None where that was not asked for."""
    if sheet.faster is None:
        return None
    if not sheet.faster:
        return f"no single change of its layout is predicted to be {FASTER:.0%} faster"
    point, settings = sheet.faster[0]
    share, memory_share = (
        sheet.timed.step_s / point.step_s - 1,
        point.plan.total_bytes / sheet.machine.hbm_bytes,
    )
    return (
        f"{share:.0%} slower than with {set_options(settings.items())}: "
        f"{sheet.job.tokens / point.step_s:,.0f} tokens/s, {memory_share:.0%} of the memory"
    )


def print_sheet(sheet: Sheet, console: Console, notes: Sequence[str]) -> None:
    """Prints the sheet, after `notes`."""
    job, rows, batch = sheet.job, sheet.largest_rows, _largest_batch(sheet)
    flops = flops_per_token(job.model, seq_len=job.seq_len, infos=job.layout.infos).total_flops
    largest = (
        f"largest batch that fits: {rows} x {job.seq_len} tokens per device at a time, {batch:,} sequences a "
        "step"
        if rows
        else "no batch fits: not one sequence per device"
    )
    # Cells read the JSON, so that the sheet and `--json` agree.
    facts = Facts(to_json(sheet))
    tables = _bytes_table(sheet), collective_table(collectives(job)), step_table(sheet, facts)
    lines = _waits_line(sheet, facts.value("step.compiled_waits_s")), largest, *_cost_lines(sheet)
    counted = f"{flops / 1e9:,.2f} GFLOP per token: {MFU_DEFINITION}"
    title = Title(f"{sheet.config} on {sheet.machine}: {subtitle(sheet)}")
    advice = [] if (line := faster_line(sheet)) is None else [line]
    print_blocks([title, *advice, *notes, *tables, *lines, counted], console)


def subtitle(sheet: Sheet) -> str:
    """Parameters, mesh and layout in one line."""
    layout = sheet.job.layout
    return f"{sheet.params:,} parameters over {mesh_line(layout.mesh.shape)}, {layout_line(layout.spec)}"


def search_table(
    task: SearchTask, points: Sequence[Point], compiled: Mapping[int, CompiledStep | str]
) -> Table:
    """Table of the fastest points, with the compiler's figures for those that were compiled."""
    names = ["GiB", "host GiB", "step s", "tokens/s", "MFU"]
    # Only where some of the points were compiled.
    names += ["compiler GiB", "formula/compiler"] if compiled else []
    budget = f"{gib(task.budget_bytes)} of {gib(task.machine.hbm_bytes)} GiB per device"
    columns = words("#", "mesh", *layout_cells(task.config_spec)) + numbers(*names)
    table = Table(f"the fastest that fit into {budget} on {task.machine}", columns)
    for index, point in enumerate(points):
        assert point.timed is not None
        # Text where the compiler refused the point, "" where it was not asked.
        outcome = compiled.get(index, "")
        if isinstance(outcome, CompiledStep):
            compiler_cells = [gib(outcome.peak_bytes), f"{point.plan.total_bytes / outcome.peak_bytes:.3f}"]
        else:
            compiler_cells = [outcome]
        table.add(
            str(index + 1),
            mesh_line(point.mesh.shape, "1"),
            *layout_cells(point.spec).values(),
            gib(point.plan.total_bytes),
            gib(point.plan.host_bytes),
            f"{point.step_s:,.3g}",
            f"{point.timed.tokens_per_s:,.0f}",
            f"{point.timed.mfu:.1%}",
            *(compiler_cells if compiled else []),
        )
    return table


def _largest_batch(sheet: Sheet) -> int:
    """Sequences per step of the largest batch that fits."""
    spec, mesh = sheet.job.layout.spec, sheet.job.layout.mesh
    # `largest_rows` counts one device and one microbatch.
    return sheet.largest_rows * spec.microbatches * mesh.batch_shards


def _bytes_table(sheet: Sheet) -> Table:
    plan, compiled, measured, machine = sheet.plan, sheet.compiled, sheet.measured, sheet.machine
    # The compiler knows better where it was asked.
    peak_bytes = compiled.peak_bytes if compiled else plan.total_bytes
    host_capacity = machine.host_bytes_per_device
    room_bytes = machine.room_bytes(sheet.job.layout.spec)
    verdict = (
        "fits"
        if peak_bytes <= room_bytes and (host_capacity is None or plan.host_bytes <= host_capacity)
        else "DOES NOT FIT"
    )
    title = (
        f"{verdict}: {peak_bytes / room_bytes:.0%} of the memory at the peak, in the moment `{plan.moment}`"
    )
    # The host has a row of its own below.
    of_device = {name: size for name, size in classes(plan).items() if name != "host"}
    extra_rows = {f"memory of a {machine.device.name}": machine.hbm_bytes}
    extra_rows |= {} if host_capacity is None else {"host memory, a device's share": host_capacity}
    survey = f"the survey's {SURVEY_BYTES_PER_PARAMETER} bytes a parameter"
    # The survey's rule is of the whole model, so each device has its share.
    extra_rows[survey] = survey_bytes(sheet.params) // machine.count
    return memory_table(title, plan, of_device, extra_rows, compiled, measured and measured.peak_bytes)


def step_table(sheet: Sheet, facts: Facts) -> Table:
    """Table of the step's parts, each bar starting where the one before ends.

    Args:
      facts: the sheet's JSON.
    """
    timed, measured = sheet.timed, sheet.measured
    # Keys are the names of `timed.parts`, so that each row finds its own.
    hidden = {f"network, {' * '.join(row.axes)}": row.total_s - row.exposed_s for row in timed.network}
    hidden["host copies"] = timed.host_copy_s - timed.exposed_host_s
    table = Table(
        f"{timed.tokens_per_s:,.0f} tokens/s, MFU {timed.mfu:.1%}, predicted, not measured",
        words("step, predicted") + bars("of the step") + numbers("time", "share", "of which hidden"),
        css="many",
    )
    parts = coloured({name: part_s / timed.step_s for name, part_s in timed.parts.items() if part_s})
    for name, part_s in timed.parts.items():
        # A part that is hidden whole has no bar, but a row.
        if part_s or hidden.get(name):
            bar = Bars((parts[name],), f"{name}: {seconds(part_s)} of the step") if part_s else ""
            hidden_text = seconds(hidden[name]) if hidden.get(name) else ""
            table.add(
                name,
                bar,
                facts.cell(f"step.parts_s.{name}", seconds),
                share(part_s, timed.step_s),
                hidden_text,
            )
    table.add("step", "", facts.cell("step.step_s", seconds), bold=True)
    # A run that logged no step time has memory only.
    if measured is not None and measured.step_s is not None:
        ratio = f"predicted/measured {timed.step_s / measured.step_s:.2f}"
        table.add("measured", "", facts.cell("measured.step_s", seconds), ratio)
    return table


def _waits_line(sheet: Sheet, compiled_s: float | None) -> str:
    """Seconds of collectives beside which nothing is computed, by formula and by compiled schedule."""
    line = f"waits for the network: {sheet.timed.waits_s:,.3g} s by the formula"
    if sheet.compiled is None:
        return line
    return f"{line}, {'unknown' if compiled_s is None else f'{compiled_s:,.3g} s'} in the compiled schedule"


def _cost_lines(sheet: Sheet) -> list[str]:
    cost, machine = sheet.cost, sheet.machine
    money = "for the cost in money, give --price USD (per device and hour)"
    if cost.usd is not None:
        money = f"${cost.usd:,.0f}"
    energy = f"energy unknown: the power of a {machine.device.name} is not published"
    if cost.energy_j is not None:
        assert machine.device.power_w is not None
        energy = (
            # A megawatt-hour is 3.6e9 J.
            f"{cost.energy_j / 3.6e9:,.1f} MWh, {cost.energy_j / cost.tokens:.2g} J per token, at "
            f"{machine.device.power_w:,.0f} W per device (its maximum; without hosts and cooling)"
        )
    return [
        f"{cost.tokens:,} tokens at a goodput of {sheet.goodput:.1%}: {cost.days:,.2f} days, "
        f"{cost.device_hours:,.0f} device hours; {money}",
        *([] if sheet.uptime is None else [sheet.uptime.line()]),
        *(
            []
            # The note belongs to the uptime, which counts saves over that link.
            if sheet.uptime is None or machine.device.host.link_bytes_per_s
            else [assumed_link(machine.device)]
        ),
        energy,
    ]
