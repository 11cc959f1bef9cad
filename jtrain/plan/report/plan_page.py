"""Page of a plan, with its pictures."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jtrain.config.run import Run
from jtrain.plan.economics.cost_curve import CARBON_G_PER_KWH, CostRow, cost_row
from jtrain.plan.economics.failures import Failures
from jtrain.plan.report.cost_tables import curve_table
from jtrain.plan.report.fabric_loads import Load, loads
from jtrain.plan.report.fabric_picture import fabric_picture
from jtrain.plan.report.plan_sheet import Sheet, classes, step_table, subtitle, to_json
from jtrain.report.charts import bars_svg, coloured, legend, line_chart
from jtrain.report.number_formats import rate, seconds, share, short, size
from jtrain.report.page import Page, PageBlock, Paragraph, Picture, Section, html
from jtrain.report.table import Bars, Cell, Facts, Table, bars, numbers, words
from jtrain.runtime.atomic_io import write_whole

FACTORS = (0.25, 0.5, 1, 2, 4, 8)
"""Sizes of the cluster in the cost curve, by the plan's own."""


def write_page(file: Path, sheet: Sheet, run: Run) -> None:
    """Writes the page atomically."""
    write_whole(file, html(page_of(sheet, curve(sheet, run))))


def curve(sheet: Sheet, run: Run) -> list[CostRow]:
    """The cost of the plan's tokens on smaller and larger machines of whole hosts, and on its own."""
    machine, spent = sheet.machine, sheet.cost
    # The sheet has the total; a row needs the price of an hour.
    price = None if spent.usd is None else spent.usd / spent.device_hours
    devices_per_host = machine.device.host.devices
    # Below one device there is nothing to plan.
    counts = [round(machine.count * factor) for factor in FACTORS if machine.count * factor >= 1]
    return [
        cost_row(
            run,
            dataclasses.replace(machine, count=n),
            tokens=spent.tokens,
            failures=Failures(),
            usd_per_hour=price,
        )
        for n in counts
        # A machine of several hosts has whole ones.
        if n <= devices_per_host or n % devices_per_host == 0
    ]


def page_of(sheet: Sheet, rows: Sequence[CostRow]) -> Page:
    """Describes the page."""
    levels = loads(sheet.job, sheet.timed)
    # One document for the page and its tables, so that every cell has its source.
    content = to_json(sheet) | {
        "fabric": [dataclasses.asdict(entry) for entry in levels],
        "curve": [entry.to_json(CARBON_G_PER_KWH) for entry in rows],
    }
    facts = Facts(content)
    sections = [
        Section("step", "Step time by part, predicted", _step(sheet, facts)),
        Section("memory", "Memory of one device at the peak, by class", _memory(sheet, facts)),
        Section("fabric", "Interconnects and their loads in a step", _fabric(sheet, levels, facts)),
        Section("cost", "Cost over the number of devices", _cost(rows, facts)),
    ]
    return Page(
        f"{sheet.config} on {sheet.machine}",
        sections,
        introduction=[subtitle(sheet)],
        tiles=_tiles(sheet, facts),
        kind="plan",
        content=content,
    )


def _tiles(sheet: Sheet, facts: Facts) -> list[tuple[str, str | Cell]]:
    """Key figures."""
    tiles = [
        ("step", facts.cell("step.step_s", seconds)),
        ("tokens per second", facts.cell("step.tokens_per_s", "{:,.0f}".format)),
        ("MFU", facts.cell("step.mfu", share)),
        ("peak memory", facts.cell("formula.peak_bytes", size)),
        ("goodput", facts.cell("cost.goodput", share)),
        ("tokens", facts.cell("cost.tokens", short)),
        ("device hours", facts.cell("cost.device_hours", "{:,.0f}".format)),
    ]
    # A goodput that the user gave has no interval between saves.
    if sheet.uptime is not None:
        tiles.append(("checkpoint.every_steps", facts.cell("cost.uptime.every_steps", "{:,}".format)))
    if sheet.cost.usd is not None:
        tiles.append(("money", facts.cell("cost.usd", "${:,.0f}".format)))
    # A list of its own type: lists are invariant in the type of their elements.
    return list(tiles)


def _step(sheet: Sheet, facts: Facts) -> list[PageBlock]:
    """A stacked bar of the step, and a row per part."""
    timed = sheet.timed
    # Parts of no length would have no segment of the bar.
    parts = coloured({name: took / timed.step_s for name, took in timed.parts.items() if took})
    bar = Bars(tuple(parts.values()), f"the step: {seconds(timed.step_s)}, by part")
    note = Paragraph("Hidden: seconds of the network and of host copies beside computation.", "soft")
    return [Picture(bars_svg(bar) + legend(parts)), step_table(sheet, facts), note]


def _memory(sheet: Sheet, facts: Facts) -> list[PageBlock]:
    """A stacked bar of the classes on the scale of the device's memory, and a row per class."""
    hbm_bytes, peak = sheet.machine.hbm_bytes, sheet.plan.total_bytes
    # Host memory is not part of the device's bar.
    sizes = {name: amount for name, amount in classes(sheet.plan).items() if name != "host" and amount}
    # A plan that does not fit ends past the device's memory.
    scale = max(hbm_bytes, peak)
    parts = coloured({name: amount / scale for name, amount in sizes.items()})
    columns = words("class") + bars(f"0 to {size(scale)}") + numbers("bytes", "of the device")
    table = Table("memory by class", columns, css="few")
    for name, amount in sizes.items():
        bar = Bars.single(0.0, amount / scale, parts[name].css, f"{name}: {size(amount)}")
        table.add(name, bar, facts.cell(f"formula.{name}", size), share(amount, hbm_bytes))
    # Negative where the plan does not fit.
    free = hbm_bytes - peak
    verdict = (
        f"{size(free)} of {size(hbm_bytes)} stay free"
        if free >= 0
        else f"{size(-free)} too much for {size(hbm_bytes)}"
    )
    memory_bar = bars_svg(Bars(tuple(parts.values()), f"memory: {size(peak)}, by part"))
    axis = f'<p class="ends"><span>0</span><span>{size(scale)}</span></p>'
    if sheet.plan.host_bytes:
        table.add("host memory, per device", "", facts.cell("formula.host", size))
    moment = f"The peak is in the moment {sheet.plan.moment}: {verdict}."
    return [moment, Picture(memory_bar + axis + legend(parts)), table]


def _fabric(sheet: Sheet, levels: Sequence[Load], facts: Facts) -> list[PageBlock]:
    """A drawing of the levels with their loads, and a row per level."""
    step_s = sheet.timed.step_s
    names = {
        "links": "links between devices",
        "network": "network between hosts",
        "host": "links to host memory",
    }
    columns = words("level") + bars("of the step") + numbers("busy", "bytes a device sends", "peak")
    table = Table("loads of the interconnects", columns, css="many")
    for index, (load, name) in enumerate(zip(levels, names.values(), strict=True)):
        # Overlapping collectives can add up to more than the step.
        path, busy = f"fabric.{index}", min(1.0, load.busy_s / step_s)
        table.add(
            name,
            Bars.single(0.0, busy, f"c{index}", f"{name}: busy for {busy:.1%} of the step"),
            facts.cell(f"{path}.busy_s", seconds),
            facts.cell(f"{path}.wire_bytes", size),
            facts.cell(f"{path}.bytes_per_s", rate),
        )
    drawing = fabric_picture(sheet.machine, levels, step_s)
    note = (
        "The wider a line, the larger the part of the step in which it is busy. A collective over several "
        "hosts uses links and network at once; bytes are those of rings. python -m jtrain.plan network has "
        "the network itself."
    )
    frame = f'<div class="frame" role="region" tabindex="0" aria-label="fabric">{drawing}</div>'
    return [Picture(frame), table, Paragraph(note, "soft")]


def _cost(rows: Sequence[CostRow], facts: Facts) -> list[PageBlock]:
    """Days and device hours over the number of devices, and a row per number."""
    sizes = [(row.count, row.cost) for row in rows if row.cost is not None]
    if not sizes:
        return [Paragraph("No size of the machine that was tried has a layout that fits.", "soft")]
    # All rows have the same price, so the first tells for all.
    money = "device hours" if sizes[0][1].usd is None else "$"
    costs = [(count, cost.device_hours if cost.usd is None else cost.usd) for count, cost in sizes]
    missing = [f"{row.count:,}" for row in rows if row.cost is None]
    missing_text = f"Nothing fits on {', '.join(missing)} devices. " if missing else ""
    note = (
        f"{missing_text}The cheapest is bold. Every size has the fastest layout that fits, without pipeline "
        "stages, and fails as often as Llama 3's devices did (python -m jtrain.plan cost --help)."
    )
    days = line_chart([(count, cost.days) for count, cost in sizes], "days", counted="devices")
    chart = Picture(days + line_chart(costs, money, counted="devices"))
    return [chart, curve_table("cost by number of devices", rows, facts), Paragraph(note, "soft")]
