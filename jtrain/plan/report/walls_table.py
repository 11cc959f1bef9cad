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
from jtrain.report.table import Table, numbers, words
from jtrain.report.terminal import print_blocks

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
    name, days = cluster.device.name, cluster.seconds / SECONDS_PER_DAY
    title = (
        f"walls of a run of {days:g} days on {name}: {cluster.batch_tokens:,.0f} tokens a step, "
        f"{1e6 * cluster.latency_s:.3g} us for a matmul with its collective on no data"
    )
    names = ("FLOP", "published", "parameters", "tokens", "layers", "devices")
    walls = Table(title, words("wall", "largest run") + numbers(*names))
    for kind, what, shape, devices in (
        ("data movement", "scales linearly", wall.shape, f"{wall.devices:,}"),
        ("latency", "ends in time at all", last, "any number"),
    ):
        sizes = f"{shape.parameters:.1e}", f"{shape.tokens:.1e}", f"{shape.layers:,.0f}"
        walls.add(kind, what, f"{shape.flop:.1e}", f"{PUBLISHED_FLOP[kind]:.0e}", *sizes, devices)
    beyond = best_layout(2 * wall.shape.flop, cluster) or wall
    lines = [
        f"linear: the devices reach {wall.share:.0%} of their matmul rate (at least {LINEAR:.0%}), with "
        f"data={wall.data:,} tensor={wall.tensor} stage={wall.stages}. A run twice as large reaches "
        f"{beyond.share:.0%}; what binds there: {beyond.binds}"
    ]
    if own is not None:
        lines.append(
            f"{count:,} x {name} train at most {own.shape.flop:.1e} FLOP in {days:g} days "
            f"({own.shape.parameters:.1e} parameters), {own.share:.0%} of their matmul rate: "
            f"{own.shape.flop / wall.shape.flop:.1e} of the first wall"
        )
    moves = Table(
        "how the walls move",
        words("tokens a step", "latency") + numbers("data movement, FLOP", "latency, FLOP"),
    )
    for row in rows:
        flop = "none scales" if row.data_flop is None else f"{row.data_flop:.1e}"
        moves.add(
            f"{row.batch_tokens:,.0f}", f"{1e6 * row.latency_s:.3g} us", flop, f"{row.latency_flop:.1e}"
        )
    published = (
        "published: arXiv:2411.01137, of chips like an H100 with batches that grow with the run; its "
        "constants are not these, so the numbers need not agree. Both walls move out with the batch and in "
        "with the latency. Optimistic: all that can hide is hidden. Dense models of 20 tokens per parameter, "
        "width = 128 x layers."
    )
    print_blocks([walls, *lines, moves, published])
