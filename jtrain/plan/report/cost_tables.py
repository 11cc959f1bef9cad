"""Tables of `plan cost`: the curve over the number of devices, and another chip beside it."""

from collections.abc import Sequence

from jtrain.plan.economics.cost_curve import (
    J_PER_KWH,
    Compared,
    CostRow,
    cheapest,
    fastest,
    mesh_text,
)
from jtrain.plan.economics.failures import Failures, assumed_link, duration
from jtrain.plan.report.plan_charts import short
from jtrain.plan.report.summary import new_console, new_table
from jtrain_kernels.device import DeviceSpec


def print_curve(
    title: str, rows: Sequence[CostRow], device: DeviceSpec, *, failures: Failures, carbon_g_per_kwh: float
) -> None:
    """Prints a row per number of devices, the best ones, and what is assumed."""
    console = new_console()
    priced = any(row.cost is not None and row.cost.usd is not None for row in rows)
    right = ["step s", "MFU", "goodput", "steps/save", "days", "$" if priced else "device h"]
    right += ["MWh", "J/token", "t CO2"] if device.power_w else []
    table = new_table(("devices", "layout"), right)
    for row in rows:
        table.add_row(*_cells(row, device, carbon_g_per_kwh))
    console.print(title, style="bold", highlight=False)
    console.print(table)
    for line in (*_best(rows, device), *_assumed(rows, device, failures, carbon_g_per_kwh, priced)):
        console.print(line, highlight=False)


def _cells(row: CostRow, device: DeviceSpec, carbon: float) -> list[str]:
    if row.point is None or row.uptime is None or row.cost is None:
        return [f"{row.count:,}", "nothing fits" if row.point is None else "fails too often"]
    cells = [
        f"{row.count:,}",
        mesh_text(row.point.settings),
        f"{row.timed.step_s:,.3g}",
        f"{row.timed.mfu:.1%}",
        f"{row.uptime.goodput:.1%}",
        f"{row.uptime.every_steps:,}",
        f"{row.cost.days:,.0f}" if row.cost.days >= 100 else f"{row.cost.days:.3g}",
        short(row.cost.device_hours if row.cost.usd is None else row.cost.usd),
    ]
    if device.power_w and row.cost.energy_j is not None:
        kwh = row.cost.energy_j / J_PER_KWH
        cells += [short(kwh / 1000), f"{row.cost.energy_j / row.cost.tokens:.2g}", short(kwh * carbon / 1e6)]
    return cells


def _best(rows: Sequence[CostRow], device: DeviceSpec) -> list[str]:
    """The cheapest and the fastest size, and the interval between saves of each."""
    lines: list[str] = []
    for name, row in (("cheapest", cheapest(rows)), ("fastest", fastest(rows))):
        if row is not None and row.cost is not None and row.uptime is not None:
            money = "" if row.cost.usd is None else f", ${row.cost.usd:,.0f}"
            lines.append(
                f"{name}: {row.count:,} x {device.name}, {row.cost.days:,.1f} days, {row.cost.device_hours:,.0f} "
                f"device hours{money}; a failure every {duration(row.uptime.mtbf_s)}, saves of {row.uptime.save_s:.2g} "
                f"s: set checkpoint.every_steps={row.uptime.every_steps}"
            )
    return lines


def _assumed(rows: Sequence[CostRow], device: DeviceSpec, failures: Failures, carbon: float, priced: bool) -> list[str]:
    lines = [
        f"assumed: a device fails every {failures.mtbf_hours:,.0f} hours with its share of the host and network, a "
        f"restart takes {failures.restart_s:,.0f} s; no other lost time (data, evaluation, maintenance)"
    ]
    if failures.save_s is None and device.host.link_bytes_per_s is None:
        lines.append(assumed_link(device))
    if not priced:
        lines.append("for the cost in money, give --price USD (per device and hour)")
    if device.power_w:
        lines.append(
            f"energy: {device.power_w:,.0f} W per device (its maximum; without hosts and cooling); CO2: {carbon:,.0f} "
            "g per kWh"
        )
    else:
        lines.append(
            f"energy and CO2 unknown: the power of a {device.name} is not published. Set chip.power_w in a --machine "
            "FILE"
        )
    if any(row.point is None for row in rows):
        lines.append(
            "nothing fits: `jtrain plan --config=NAME --count N --search` says by how much, and what would fit"
        )
    return lines


def print_comparison(
    name: str, other: str, compared: Sequence[Compared], rows: Sequence[CostRow], *, price_ratio: float
) -> None:
    """Prints how much faster, dearer and hungrier another chip is than the first one."""
    console = new_console()
    table = new_table(("devices", "layout"), ("step s", "speed", "$ per token", "J per token"))
    by_count = {row.count: row for row in rows}
    for one in compared:
        row = by_count[one.count]
        assert row.point is not None
        energy = "-" if one.energy is None else f"{one.energy:.2f}x"
        cells = [f"{row.timed.step_s:,.3g}", f"{one.speed:.2f}x", f"{one.cost:.2f}x", energy]
        table.add_row(f"{one.count:,}", mesh_text(row.point.settings), *cells)
    console.print(f"{other} at {price_ratio:g} times the price of {name}, by {name}", style="bold", highlight=False)
    console.print(table)
    pays = [one.count for one in compared if one.cost < 1]
    listed = ", ".join(f"{n:,}" for n in pays)
    verdict = f"cheaper per token on {listed} x {other}" if pays else "never cheaper per token"
    console.print(f"{other} pays where it is over {price_ratio:g} times as fast: {verdict}", highlight=False)
