"""Tables of `plan walls`: the two walls beside the published ones, and how they move."""

import dataclasses

from jtrain.plan.economics.walls import (
    LINEAR,
    PUBLISHED_FLOP,
    Best,
    Cluster,
    RunSize,
    best_layout,
    data_wall,
    latency_wall,
)
from jtrain.plan.estimate.step_time import SECONDS_PER_DAY
from jtrain.plan.report.summary import new_console, new_table

FACTORS = ((1.0, 1.0), (0.25, 1.0), (4.0, 1.0), (16.0, 1.0), (1.0, 0.25), (1.0, 4.0))
"""Factors of batch and latency for which the walls are shown."""


@dataclasses.dataclass(frozen=True)
class Moved:
    """The walls with another batch or latency; `data_flop` is None where nothing scales linearly."""

    batch_tokens: float
    latency_s: float
    data_flop: float | None
    latency_flop: float


def moved(cluster: Cluster) -> list[Moved]:
    """The walls for each of `FACTORS`."""
    found: list[Moved] = []
    for batch, latency in FACTORS:
        other = cluster.changed(batch=batch, latency=latency)
        wall = data_wall(other)
        flop = None if wall is None else wall.shape.flop
        found.append(Moved(other.batch_tokens, other.latency_s, flop, latency_wall(other).flop))
    return found


def print_walls(
    cluster: Cluster, wall: Best, last: RunSize, rows: list[Moved], *, own: Best | None, count: int | None
) -> None:
    """Prints both walls, what binds at the first, how they move, and how far the user's own cluster gets."""
    console, name = new_console(), cluster.device.name
    days = cluster.seconds / SECONDS_PER_DAY
    console.print(
        f"walls of a run of {days:g} days on {name}: {cluster.batch_tokens:,.0f} tokens a step, "
        f"{1e6 * cluster.latency_s:.3g} us for a matmul with its collective on no data",
        style="bold",
        highlight=False,
    )
    table = new_table(("wall", "largest run"), ("FLOP", "published", "parameters", "tokens", "layers", "devices"))
    for kind, what, shape, devices in (
        ("data movement", "scales linearly", wall.shape, f"{wall.devices:,}"),
        ("latency", "ends in time at all", last, "any number"),
    ):
        sizes = f"{shape.parameters:.1e}", f"{shape.tokens:.1e}", f"{shape.layers:,.0f}"
        table.add_row(kind, what, f"{shape.flop:.1e}", f"{PUBLISHED_FLOP[kind]:.0e}", *sizes, devices)
    console.print(table)
    beyond = best_layout(2 * wall.shape.flop, cluster) or wall
    console.print(
        f"linear: the devices reach {wall.share:.0%} of their matmul rate (at least {LINEAR:.0%}), with data="
        f"{wall.data:,} tensor={wall.tensor} stage={wall.stages}. A run twice as large reaches {beyond.share:.0%}; "
        f"what binds there: {beyond.binds}",
        highlight=False,
    )
    if own is not None:
        line = (
            f"{count:,} x {name} train at most {own.shape.flop:.1e} FLOP in {days:g} days ({own.shape.parameters:.1e} "
            f"parameters), {own.share:.0%} of their matmul rate: {own.shape.flop / wall.shape.flop:.1e} of the first "
            "wall"
        )
        console.print(line, highlight=False)
    console.print("how the walls move", style="bold")
    table = new_table(("tokens a step", "latency"), ("data movement, FLOP", "latency, FLOP"))
    for row in rows:
        flop = "none scales" if row.data_flop is None else f"{row.data_flop:.1e}"
        table.add_row(f"{row.batch_tokens:,.0f}", f"{1e6 * row.latency_s:.3g} us", flop, f"{row.latency_flop:.1e}")
    console.print(table)
    console.print(
        "published: arXiv:2411.01137, of chips like an H100 with batches that grow with the run; its constants are not "
        "these, so the numbers need not agree. Both walls move out with the batch and in with the latency. Optimistic: "
        "all that can hide is hidden. Dense models of 20 tokens per parameter, width = 128 x layers.",
        highlight=False,
    )
