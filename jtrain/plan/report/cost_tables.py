"""Tables of `plan cost`: the curve over the number of devices, and another chip beside it."""

from collections.abc import Sequence

from jtrain.plan.economics.cost_curve import (
    ChipComparison,
    CostRow,
    cheapest,
    fastest,
    mesh_text,
)
from jtrain.plan.economics.failures import Failures, assumed_link, duration
from jtrain.report.number_formats import share, short
from jtrain.report.table import Facts, Table, numbers, words
from jtrain.report.terminal import print_blocks
from jtrain_kernels.device import DeviceSpec


def print_curve(
    title: str, rows: Sequence[CostRow], device: DeviceSpec, *, failures: Failures, carbon_g_per_kwh: float
) -> None:
    """Prints a row per number of devices, the best ones, and what is assumed."""
    priced = any(row.cost is not None and row.cost.usd is not None for row in rows)
    # The cells come from the same JSON as `--json`, so that the two cannot differ.
    table = curve_table(title, rows, Facts({"curve": [row.to_json(carbon_g_per_kwh) for row in rows]}))
    print_blocks([table, *_best(rows, device), *_assumed(rows, device, failures, carbon_g_per_kwh, priced)])


def curve_table(title: str, rows: Sequence[CostRow], facts: Facts) -> Table:
    """Table with a row per number of devices; the cheapest is bold.

    Args:
      facts: has the rows' JSON as `curve`.
    """
    costs = [row.cost for row in rows if row.cost is not None]
    # Without a price, device hours stand in for money.
    priced = any(cost.usd is not None for cost in costs)
    headings = ["step s", "MFU", "goodput", "steps/save", "days", "$" if priced else "device h"]
    # All rows are of one chip, so one row with energy means that all have it.
    powered = any(cost.energy_j is not None for cost in costs)
    headings += ["MWh", "J/token", "t CO2"] if powered else []
    # None if no row has a cost; then no row is bold.
    best = cheapest(rows)
    table = Table(title, words("devices", "layout") + numbers(*headings), css="many")
    for index, row in enumerate(rows):
        path = f"curve.{index}"
        count = facts.cell(f"{path}.count", "{:,}".format)
        # A row with no figures, so that a gap in the curve has its reason.
        if row.point is None or row.cost is None:
            table.add(count, "nothing fits" if row.point is None else "fails too often")
            continue
        cells = [
            facts.cell(f"{path}.step_s", "{:,.3g}".format),
            facts.cell(f"{path}.mfu", share),
            facts.cell(f"{path}.goodput", share),
            facts.cell(f"{path}.checkpoint_every_steps", "{:,}".format),
            facts.cell(f"{path}.days", "{:,.4g}".format),
            facts.cell(f"{path}.{'usd' if priced else 'device_hours'}", short),
        ]
        if powered:
            cells += [
                facts.cell(f"{path}.{name}", short) for name in ("mwh", "joules_per_token", "co2_tonnes")
            ]
        table.add(count, mesh_text(row.point.settings), *cells, bold=row is best)
    return table


def _best(rows: Sequence[CostRow], device: DeviceSpec) -> list[str]:
    """The cheapest and the fastest size, and the interval between saves of each."""
    lines: list[str] = []
    for name, row in (("cheapest", cheapest(rows)), ("fastest", fastest(rows))):
        if row is not None and row.cost is not None and row.uptime is not None:
            money = "" if row.cost.usd is None else f", ${row.cost.usd:,.0f}"
            lines.append(
                f"{name}: {row.count:,} x {device.name}, {row.cost.days:,.1f} days, "
                f"{row.cost.device_hours:,.0f} device hours{money}; a failure every "
                f"{duration(row.uptime.mtbf_s)}, saves of {row.uptime.save_s:.2g} s: set "
                f"checkpoint.every_steps={row.uptime.every_steps}"
            )
    return lines


def _assumed(
    rows: Sequence[CostRow], device: DeviceSpec, failures: Failures, carbon: float, priced: bool
) -> list[str]:
    lines = [
        f"assumed: a device fails every {failures.mtbf_hours:,.0f} hours with its share of the host and "
        f"network, a restart takes {failures.restart_s:,.0f} s; no other lost time (data, evaluation, "
        "maintenance)"
    ]
    # A save time that the user gave needs no assumption about the link.
    if failures.save_s is None and device.host.link_bytes_per_s is None:
        lines.append(assumed_link(device))
    if not priced:
        lines.append("for the cost in money, give --price USD (per device and hour)")
    if device.power_w:
        lines.append(
            f"energy: {device.power_w:,.0f} W per device (its maximum; without hosts and cooling); CO2: "
            f"{carbon:,.0f} g per kWh"
        )
    else:
        lines.append(
            f"energy and CO2 unknown: the power of a {device.name} is not published. Set chip.power_w in a "
            "--machine FILE"
        )
    # The curve has no room for the reason, which a search prints.
    if any(row.point is None for row in rows):
        lines.append(
            "nothing fits: `jtrain plan --config=NAME --count N --search` says by how much, and what would "
            "fit"
        )
    return lines


def print_comparison(
    name: str, other: str, compared: Sequence[ChipComparison], rows: Sequence[CostRow], *, price_ratio: float
) -> None:
    """Prints how much faster, dearer and hungrier another chip is than the first one."""
    title = f"{other} at {price_ratio:g} times the price of {name}, by {name}"
    table = Table(
        title, words("devices", "layout") + numbers("step s", "speed", "$ per token", "J per token")
    )
    # `compared` leaves out the counts where either chip has no cost.
    by_count = {row.count: row for row in rows}
    for comparison in compared:
        row = by_count[comparison.count]
        assert row.point is not None
        energy = "-" if comparison.energy is None else f"{comparison.energy:.2f}x"
        cells = [f"{row.timed.step_s:,.3g}", f"{comparison.speed:.2f}x", f"{comparison.cost:.2f}x", energy]
        table.add(f"{comparison.count:,}", mesh_text(row.point.settings), *cells)
    # Below 1 the other chip is cheaper.
    cheaper_counts = ", ".join(f"{comparison.count:,}" for comparison in compared if comparison.cost < 1)
    verdict = (
        f"cheaper per token on {cheaper_counts} x {other}" if cheaper_counts else "never cheaper per token"
    )
    print_blocks([table, f"{other} pays where it is over {price_ratio:g} times as fast: {verdict}"])
