"""Hash collisions by queue pairs per connection: on the terminal and as JSON."""

import dataclasses
from typing import Any

from rich.console import Console

from jtrain.plan.fabric.hashing import simulated_max_load
from jtrain.plan.fabric.spine import SETTINGS, SpineTraffic
from jtrain.plan.report.network_sheet import NetworkSheet, describe, incast_line, milliseconds, shell_text, table, title

PUBLISHED_GAIN = "up to 40 %"
"""What queue pairs and hashing them gained an all-reduce at Meta (SIGCOMM 2024), against ECMP without."""


@dataclasses.dataclass(frozen=True)
class LinkLoad:
    """Load of the fullest link with a number of queue pairs per connection.

    used: queue pairs that carry messages.
    simulated, exact: the load in flows, drawn at random and expected.
    of_even: rate of the flows, by that of an even spread; speed: by that with one queue pair.
    us, faster: time of the all-reduce that sends the flows, and how many times faster it is; None without a machine.
    """

    queue_pairs: int
    used: int
    simulated: float
    exact: float
    of_even: float
    speed: float
    us: float | None
    faster: float | None


@dataclasses.dataclass(frozen=True)
class EcmpSheet:
    """Loads of links with each number of queue pairs; `timed` is the all-reduce that sends the flows, if one does."""

    traffic: SpineTraffic
    timed: NetworkSheet | None
    trials: int
    seed: int

    def rows(self) -> list[LinkLoad]:
        """A row per number of queue pairs."""
        return [self._row(queue_pairs) for queue_pairs in SETTINGS]

    def _row(self, queue_pairs: int) -> LinkLoad:
        flows, links, timed = self.traffic.flows, self.traffic.links, self.timed
        used = queue_pairs if timed is None else min(queue_pairs, timed.messages)
        exact = self.traffic.max_load(used)
        us = None if timed is None else timed.us(queue_pairs)
        return LinkLoad(
            queue_pairs,
            used,
            simulated_max_load(flows, links, used, trials=self.trials, seed=self.seed),
            exact,
            flows / links / exact,
            self.traffic.max_load() / exact,
            us,
            None if timed is None or us is None else timed.us() / us,
        )


def topology_of(flows: int, links: int) -> SpineTraffic:
    """Flows over links that have just the rate which all flows need together."""
    return SpineTraffic(flows, links, links / flows, hashed=True)


def print_ecmp(sheet: EcmpSheet) -> None:
    """Prints the table, what it means for an all-reduce, and the variables."""
    console = Console(width=None if Console().is_terminal else 110)
    flows, links = sheet.traffic.flows, sheet.traffic.links
    if sheet.timed is not None:
        console.print(title(sheet.timed), style="bold", highlight=False)
        for line in describe(sheet.timed):
            console.print(line, highlight=False)
    console.print(f"{flows} flows over {links} links: load of the fullest link, in flows; {flows / links:.4g} if even")
    right = ["used", f"{sheet.trials:,} draws", "exact", "rate of even", "x 1 QP"]
    right += [] if sheet.timed is None else ["all-reduce ms", "x 1 QP"]
    found = table(["queue pairs"], right)
    for row in sheet.rows():
        cells = [str(row.used), f"{row.simulated:.3f}", f"{row.exact:.3f}", f"{row.of_even:.0%}", f"{row.speed:.2f}"]
        if row.us is not None:
            cells += [milliseconds(row.us), f"{row.faster:.2f}"]
        found.add_row(str(row.queue_pairs), *cells)
    console.print(found)
    console.print(
        "Without hashing queue pairs (plain ECMP) every row is as the first: a connection's queue pairs share a link. "
        "`used`: no more than a connection has messages, which NCCL posts in turn.",
        highlight=False,
    )
    if sheet.timed is None:
        return
    console.print(
        f"Meta published {PUBLISHED_GAIN} for all-reduces: an observation on its clusters, no target of this model.",
        highlight=False,
    )
    console.print(incast_line(sheet.timed), highlight=False)
    console.print(shell_text(sheet.timed), end="", highlight=False, markup=False, soft_wrap=True)


def to_json(sheet: EcmpSheet) -> dict[str, Any]:
    """The rows, and what they are of."""
    return {
        "traffic": dataclasses.asdict(sheet.traffic),
        "trials": sheet.trials,
        "seed": sheet.seed,
        "rows": [dataclasses.asdict(row) for row in sheet.rows()],
        "queue_pairs": None if sheet.timed is None else sheet.timed.queue_pairs,
        "shell": [] if sheet.timed is None else shell_text(sheet.timed).splitlines(),
    }
