"""Hash collisions by queue pairs per connection: on the terminal and as JSON."""

import dataclasses
from typing import Any

from jtrain.plan.fabric.hashing import simulated_max_load
from jtrain.plan.fabric.spine import SETTINGS, SpineTraffic
from jtrain.plan.report.network_sheet import NetworkSheet, describe, incast_line, shell_text, title
from jtrain.report.number_formats import milliseconds
from jtrain.report.page import Title
from jtrain.report.table import Table, numbers, words
from jtrain.report.terminal import print_blocks

PUBLISHED_GAIN = "up to 40 %"
"""What queue pairs and hashing them gained an all-reduce at Meta (SIGCOMM 2024), against ECMP without."""


@dataclasses.dataclass(frozen=True)
class LinkLoad:
    """Load of the fullest link with a number of queue pairs per connection.

    used: queue pairs that carry messages.
    simulated, exact: the load in flows, drawn at random and expected.
    of_even: rate of the flows, by that of an even spread; speed: by that with one queue pair.
    us, faster: time of the all-reduce that sends the flows, and how many times faster it is; None without a
      machine.
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
    """Loads of links with each number of queue pairs; `timed` is the all-reduce that sends the flows."""

    traffic: SpineTraffic
    timed: NetworkSheet | None
    trials: int
    seed: int

    def rows(self) -> list[LinkLoad]:
        """A row per number of queue pairs."""
        return [self._row(queue_pairs) for queue_pairs in SETTINGS]

    def _row(self, queue_pairs: int) -> LinkLoad:
        flows, links, timed = self.traffic.flows, self.traffic.links, self.timed
        # A queue pair without a message carries no flow.
        used = queue_pairs if timed is None else min(queue_pairs, timed.messages)
        # The simulation beside it is a check of this number.
        exact = self.traffic.max_load(used)
        # `us` limits the queue pairs to the messages by itself.
        us = None if timed is None else timed.us(queue_pairs)
        return LinkLoad(
            queue_pairs,
            used,
            simulated_max_load(flows, links, used, trials=self.trials, seed=self.seed),
            exact,
            # An even spread would put flows / links on every link.
            flows / links / exact,
            # By the load with one queue pair.
            self.traffic.max_load() / exact,
            us,
            None if timed is None or us is None else timed.us() / us,
        )


def topology_of(flows: int, links: int) -> SpineTraffic:
    """Flows over links that have just the rate which all flows need together."""
    # Demand by one link's rate: all flows together need all links.
    return SpineTraffic(flows, links, links / flows, hashed=True)


def print_ecmp(sheet: EcmpSheet) -> None:
    """Prints the table, what it means for an all-reduce, and the variables."""
    flows, links, timed = sheet.traffic.flows, sheet.traffic.links, sheet.timed
    names = ["used", f"{sheet.trials:,} draws", "exact", "rate of even", "x 1 QP"]
    names += [] if timed is None else ["all-reduce ms", "x 1 QP"]
    table = Table("", words("queue pairs") + numbers(*names))
    for row in sheet.rows():
        cells = [
            str(row.used),
            f"{row.simulated:.3f}",
            f"{row.exact:.3f}",
            f"{row.of_even:.0%}",
            f"{row.speed:.2f}",
        ]
        # Without a machine there is no all-reduce to time.
        if row.us is not None:
            cells += [milliseconds(row.us), f"{row.faster:.2f}"]
        table.add(str(row.queue_pairs), *cells)
    if timed is not None:
        print_blocks([Title(title(timed)), *describe(timed)])
    note = (
        "Without hashing queue pairs (plain ECMP) every row is as the first: a connection's queue pairs "
        "share a link. `used`: no more than a connection has messages, which NCCL posts in turn."
    )
    even = (
        f"{flows} flows over {links} links: load of the fullest link, in flows; {flows / links:.4g} if even"
    )
    print_blocks([even, table, note])
    if timed is not None:
        gain = (
            f"Meta published {PUBLISHED_GAIN} for all-reduces: an observation on its clusters, no target "
            "of this model."
        )
        print_blocks([gain, incast_line(timed)])
        # Not through `print_blocks`, which would wrap lines of the script.
        print(shell_text(timed), end="")


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
