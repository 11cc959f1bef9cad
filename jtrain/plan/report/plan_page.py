"""HTML page of a plan: one file with its pictures, which loads nothing over the network.

The file embeds the plan's JSON. Every displayed number of it is a `<data>` element with its path and all its digits.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jtrain.config.run import Run
from jtrain.plan.economics.cost_curve import CARBON_G_PER_KWH, CostRow, cheapest, cost_row, mesh_text
from jtrain.plan.economics.failures import Failures
from jtrain.plan.report.fabric_loads import Load, loads
from jtrain.plan.report.plan_charts import STYLE, fabric_picture, legend, line_chart, short, stacked
from jtrain.plan.report.plan_sheet import Sheet, classes, layout_line, to_json
from jtrain.profile.analysis.figures import rate, seconds, share, size
from jtrain.profile.report.page.markup import cell, data, document, embedded, rect, row, section, svg, table, text
from jtrain.runtime.atomic_io import write_whole

FACTORS = (0.25, 0.5, 1, 2, 4, 8)
"""Sizes of the cluster in the cost curve, by the plan's own."""


def write_page(file: Path, sheet: Sheet, run: Run) -> None:
    """Writes the page atomically."""
    write_whole(file, page(sheet, curve(sheet, run)))


def curve(sheet: Sheet, run: Run) -> list[CostRow]:
    """The cost of the plan's tokens on smaller and larger machines of whole hosts, the plan's own size among them."""
    machine, spent = sheet.machine, sheet.cost
    price = None if spent.usd is None else spent.usd / spent.device_hours
    whole = machine.device.host.devices
    counts = [round(machine.count * factor) for factor in FACTORS if machine.count * factor >= 1]
    return [
        cost_row(
            run, dataclasses.replace(machine, count=n), tokens=spent.tokens, failures=Failures(), usd_per_hour=price
        )
        for n in counts
        if n <= whole or n % whole == 0
    ]


def page(sheet: Sheet, rows: Sequence[CostRow]) -> str:
    """Returns the page as HTML."""
    levels = loads(sheet.job, sheet.timed)
    content = to_json(sheet) | {
        "fabric": [dataclasses.asdict(one) for one in levels],
        "curve": [one.to_json(CARBON_G_PER_KWH) for one in rows],
    }
    title = f"{sheet.config} on {sheet.machine}"
    mesh = " ".join(f"{axis}={n}" for axis, n in sheet.job.layout.mesh.shape.items() if n > 1) or "one device"
    sections = (
        section("step", "Step time by part, predicted", *_step(sheet)),
        section("memory", "Memory of one device at the peak, by class", *_memory(sheet)),
        section("fabric", "Interconnects and their loads in a step", *_fabric(sheet, levels)),
        section("cost", "Cost over the number of devices", *_cost(rows)),
    )
    body = (
        f"<main>\n<h1>{text(title)}</h1>\n<p>{sheet.params:,} parameters over {text(mesh)}, {text(layout_line(sheet))}"
        f"</p>\n{_figures(sheet)}\n{''.join(sections)}</main>\n{embedded('plan', json.dumps(content))}\n"
    )
    return document(title, body, style=STYLE)


def _figures(sheet: Sheet) -> str:
    """Key figures."""
    timed, spent = sheet.timed, sheet.cost
    found = [
        ("step", data("step.step_s", timed.step_s, seconds(timed.step_s))),
        ("tokens per second", data("step.tokens_per_s", timed.tokens_per_s, f"{timed.tokens_per_s:,.0f}")),
        ("MFU", data("step.mfu", timed.mfu, share(timed.mfu, 1.0))),
        ("peak memory", data("formula.peak_bytes", sheet.plan.total_bytes, size(sheet.plan.total_bytes))),
        ("goodput", data("cost.goodput", sheet.goodput, share(sheet.goodput, 1.0))),
        ("tokens", data("cost.tokens", spent.tokens, short(spent.tokens))),
        ("device hours", data("cost.device_hours", spent.device_hours, f"{spent.device_hours:,.0f}")),
    ]
    if sheet.uptime is not None:
        every = sheet.uptime.every_steps
        found.append(("checkpoint.every_steps", data("cost.uptime.every_steps", every, f"{every:,}")))
    if spent.usd is not None:
        found.append(("money", data("cost.usd", spent.usd, f"${spent.usd:,.0f}")))
    cells = (f"<div><dt>{text(name)}</dt><dd>{value}</dd></div>" for name, value in found)
    return f'<dl id="figures">{"".join(cells)}</dl>'


def _step(sheet: Sheet) -> list[str]:
    """A stacked bar of the step, and a row with a bar per part, each starting where the one before ends."""
    timed = sheet.timed
    parts = {name: took for name, took in timed.parts.items() if took}
    hidden = {f"network, {' * '.join(one.axes)}": one.total_s - one.exposed_s for one in timed.network}
    hidden["host copies"] = timed.host_copy_s - timed.exposed_host_s
    rows, at = [], 0.0
    for index, (name, took) in enumerate(parts.items()):
        of_step = took / timed.step_s
        bar = svg(rect(at, of_step, f"c{index % 8}"), f"{name}: {seconds(took)}, {of_step:.1%} of the step")
        beside = seconds(hidden[name]) if hidden.get(name) else ""
        cells = (
            cell(text(name), header=True),
            cell(bar, css="bar"),
            cell(data(f"step.parts_s.{name}", took, seconds(took)), css="number"),
            cell(share(took, timed.step_s), css="number"),
            cell(beside, css="number"),
        )
        rows.append(row(*cells))
        at += of_step
    columns = (("part", ""), ("of the step", ""), ("time", "number"), ("share", "number"), ("hidden", "number"))
    whole = stacked({name: took / timed.step_s for name, took in parts.items()}, f"the step: {seconds(timed.step_s)}")
    said = '<p class="soft">Hidden: seconds of the network and of host copies beside computation.</p>'
    return [whole, legend(list(parts)), table(columns, rows, "parts of the step", css="many"), said]


def _memory(sheet: Sheet) -> list[str]:
    """A stacked bar of the classes on the scale of the device's memory, and a row per class."""
    there = sheet.machine.hbm_bytes
    found = {name: amount for name, amount in classes(sheet.plan).items() if name != "host" and amount}
    scale = max(there, sheet.plan.total_bytes)
    bar = stacked({name: amount / scale for name, amount in found.items()}, f"memory: {size(sheet.plan.total_bytes)}")
    ends = f'<p class="ends"><span>0</span><span>{size(scale)}</span></p>'
    rows = [
        row(
            cell(text(name), header=True),
            cell(svg(rect(0.0, amount / scale, f"c{index % 8}"), f"{name}: {size(amount)}"), css="bar"),
            cell(data(f"formula.{name}", amount, size(amount)), css="number"),
            cell(share(amount / there, 1.0), css="number"),
        )
        for index, (name, amount) in enumerate(found.items())
    ]
    columns = (("class", ""), (f"0 to {size(scale)}", ""), ("bytes", "number"), ("of the device", "number"))
    free = there - sheet.plan.total_bytes
    verdict = f"{size(free)} of {size(there)} stay free" if free >= 0 else f"{size(-free)} too much for {size(there)}"
    at_host = ""
    if sheet.plan.host_bytes:
        held = data("formula.host", sheet.plan.host_bytes, size(sheet.plan.host_bytes))
        at_host = f"<p>In host memory, per device: {held}.</p>"
    moment = f"<p>The peak is in the moment <b>{text(sheet.plan.moment)}</b>: {verdict}.</p>"
    return [moment, bar, ends, legend(list(found)), table(columns, rows, "memory by class", css="few"), at_host]


def _fabric(sheet: Sheet, levels: Sequence[Load]) -> list[str]:
    """A drawing of the levels with their loads, and a row per level."""
    machine, step_s = sheet.machine, sheet.timed.step_s
    names = {"links": "links between devices", "network": "network between hosts", "host": "links to host memory"}
    rows = []
    for index, one in enumerate(levels):
        busy = min(1.0, one.busy_s / step_s)
        bar = svg(rect(0.0, busy, f"c{index}"), f"{names[one.level]}: busy for {busy:.1%} of the step")
        cells = (
            cell(names[one.level], header=True),
            cell(bar, css="bar"),
            cell(data(f"fabric.{index}.busy_s", one.busy_s, seconds(one.busy_s)), css="number"),
            cell(data(f"fabric.{index}.wire_bytes", one.wire_bytes, size(one.wire_bytes)), css="number"),
            cell(data(f"fabric.{index}.bytes_per_s", one.bytes_per_s, rate(one.bytes_per_s)), css="number"),
        )
        rows.append(row(*cells))
    columns = (
        ("level", ""), ("of the step", ""), ("busy", "number"), ("bytes a device sends", "number"), ("peak", "number"),
    )  # fmt: skip
    drawn = fabric_picture(machine, levels, step_s)
    note = (
        "The wider a line, the larger the part of the step in which it is busy. A collective over several hosts uses "
        "links and network at once; bytes are those of rings. python -m jtrain.plan network has the network itself."
    )
    listed = table(columns, rows, "loads of the interconnects", css="many")
    return [f'<div class="frame" role="region" tabindex="0" aria-label="fabric">{drawn}</div>', listed, _soft(note)]


def _cost(rows: Sequence[CostRow]) -> list[str]:
    """Days and device hours over the number of devices, and a row per number."""
    there = [(index, one) for index, one in enumerate(rows) if one.cost is not None]
    best = cheapest(rows)
    if best is None or best.cost is None:
        return [_soft("No size of the machine that was tried has a layout that fits.")]
    priced = best.cost.usd is not None
    listed: list[str] = []
    days: list[tuple[int, float]] = []
    costs: list[tuple[int, float]] = []
    for index, one in there:
        assert one.cost is not None
        assert one.uptime is not None
        assert one.point is not None
        spent: Any = one.cost.usd if priced else one.cost.device_hours
        days.append((one.count, one.cost.days))
        costs.append((one.count, spent))
        at, amount = f"curve.{index}", f"${spent:,.0f}" if priced else f"{spent:,.0f}"
        energy = "unknown"
        if one.cost.energy_j is not None:
            per_token = one.cost.energy_j / one.cost.tokens
            energy = data(f"{at}.joules_per_token", per_token, f"{per_token:.3g}")
        cells = (
            cell(data(f"{at}.count", one.count, f"{one.count:,}"), header=True),
            cell(text(mesh_text(one.point.settings))),
            cell(data(f"{at}.step_s", one.timed.step_s, seconds(one.timed.step_s)), css="number"),
            cell(data(f"{at}.goodput", one.uptime.goodput, share(one.uptime.goodput, 1.0)), css="number"),
            cell(
                data(f"{at}.checkpoint_every_steps", one.uptime.every_steps, f"{one.uptime.every_steps:,}"),
                css="number",
            ),
            cell(data(f"{at}.days", one.cost.days, f"{one.cost.days:,.4g}"), css="number"),
            cell(data(f"{at}.{'usd' if priced else 'device_hours'}", spent, amount), css="number"),
            cell(energy, css="number"),
        )
        listed.append(row(*cells, css="whole" if one is best else ""))
    money = "$" if priced else "device hours"
    names = ("devices", "fastest layout", "step", "goodput", "steps per save", "days", money, "J per token")
    columns = tuple((name, "" if index < 2 else "number") for index, name in enumerate(names))
    missing = [f"{one.count:,}" for one in rows if one.cost is None]
    none = f"Nothing fits on {', '.join(missing)} devices. " if missing else ""
    charts = line_chart(days, "days") + line_chart(costs, money)
    said = (
        f"{none}The cheapest is bold. Every size has the fastest layout that fits, without pipeline stages, and fails "
        "as often as Llama 3's devices did (python -m jtrain.plan cost --help)."
    )
    return [charts, table(columns, listed, "cost by number of devices", css="many"), _soft(said)]


def _soft(words: str) -> str:
    return f'<p class="soft">{text(words)}</p>'
