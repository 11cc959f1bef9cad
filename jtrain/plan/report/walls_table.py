"""Tables of `plan walls`: the two walls beside the published ones, and how they move."""

import dataclasses

from jtrain.plan.economics.walls import (
    LINEAR,
    PUBLISHED_FLOP,
    BestLayout,
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
class WallsRow:
    """The walls with another batch or latency; `data_flop` is None where nothing scales linearly."""

    batch_tokens: float
    latency_s: float
    data_flop: float | None
    latency_flop: float


def walls_by_factor(cluster: Cluster) -> list[WallsRow]:
    """The walls for each of `FACTORS`."""
    rows: list[WallsRow] = []
    for batch, latency in FACTORS:
        scaled = cluster.changed(batch=batch, latency=latency)
        # None where not even the smallest run scales linearly.
        wall = data_wall(scaled)
        flop = None if wall is None else wall.shape.flop
        rows.append(WallsRow(scaled.batch_tokens, scaled.latency_s, flop, latency_wall(scaled).flop))
    return rows


def print_walls(
    cluster: Cluster,
    wall: BestLayout,
    last: RunSize,
    rows: list[WallsRow],
    *,
    user_run: BestLayout | None,
    count: int | None,
) -> None:
    """Prints both walls, what binds at the first, how they move, and how far the user's own cluster gets."""
    name, days = cluster.device.name, cluster.seconds / SECONDS_PER_DAY
    title = (
        f"walls of a run of {days:g} days on {name}: {cluster.batch_tokens:,.0f} tokens a step, "
        f"{1e6 * cluster.latency_s:.3g} us for a matmul with its collective on no data"
    )
    names = ("FLOP", "published", "parameters", "tokens", "layers", "devices")
    walls = Table(title, words("wall", "largest run") + numbers(*names))
    for kind, claim, shape, devices in (
        ("data movement", "scales linearly", wall.shape, f"{wall.devices:,}"),
        ("latency", "ends in time at all", last, "any number"),
    ):
        sizes = f"{shape.parameters:.1e}", f"{shape.tokens:.1e}", f"{shape.layers:,.0f}"
        walls.add(kind, claim, f"{shape.flop:.1e}", f"{PUBLISHED_FLOP[kind]:.0e}", *sizes, devices)
    # Just past the wall: what binds there is what made the wall.
    beyond = best_layout(2 * wall.shape.flop, cluster) or wall
    lines = [
        f"linear: the devices reach {wall.share:.0%} of their matmul rate (at least {LINEAR:.0%}), with "
        f"data={wall.data:,} tensor={wall.tensor} stage={wall.stages}. A run twice as large reaches "
        f"{beyond.share:.0%}; what binds there: {beyond.binds}"
    ]
    # Only with --count is there a cluster of the user's own.
    if user_run is not None:
        lines.append(
            f"{count:,} x {name} train at most {user_run.shape.flop:.1e} FLOP in {days:g} days "
            f"({user_run.shape.parameters:.1e} parameters), {user_run.share:.0%} of their matmul rate: "
            f"{user_run.shape.flop / wall.shape.flop:.1e} of the first wall"
        )
    factor_table = Table(
        "how the walls move",
        words("tokens a step", "latency") + numbers("data movement, FLOP", "latency, FLOP"),
    )
    for row in rows:
        flop = "none scales" if row.data_flop is None else f"{row.data_flop:.1e}"
        factor_table.add(
            f"{row.batch_tokens:,.0f}", f"{1e6 * row.latency_s:.3g} us", flop, f"{row.latency_flop:.1e}"
        )
    published = (
        "published: arXiv:2411.01137, of chips like an H100 with batches that grow with the run; its "
        "constants are not these, so the numbers need not agree. Both walls move out with the batch and in "
        "with the latency. Optimistic: all that can hide is hidden. Dense models of 20 tokens per parameter, "
        "width = 128 x layers."
    )
    print_blocks([walls, *lines, factor_table, published])
