"""Share of the adapters' rate that the spine leaves: oversubscription and hash collisions on uplinks.

The slowest flow decides: every device waits for the last. Flows are the connections of one leaf's adapters
that leave it. A ring whose hosts come leaf by leaf leaves a leaf once per adapter of one host; hosts in any
order (`scattered`) leave it with every adapter. In an all-to-all every adapter sends to all others.
"""

import dataclasses
import itertools
import math
from typing import Literal

from jtrain.plan.fabric.fabric import Fabric
from jtrain.plan.fabric.hashing import expected_max_load

type CollectiveKind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all"]
"""Collective whose time over switches is computed."""


@dataclasses.dataclass(frozen=True)
class SpineTraffic:
    """Flows of one leaf that cross the spine at once.

    flows: connections; links: uplinks of the leaf that they are spread over.
    demand: rate that one flow would need, by the rate of one uplink.
    hashed: True if a hash spreads them, False if switches do it by load.
    """

    flows: int
    links: int
    demand: float
    hashed: bool

    def max_load(self, queue_pairs: int = 1) -> float:
        """Expected load of the fullest uplink, in flows."""
        if not self.flows:
            return 0.0
        # Routing by load keeps the uplinks even.
        if not self.hashed:
            return self.flows / self.links
        return expected_max_load(self.flows, self.links, queue_pairs)

    def slowdown(self, queue_pairs: int = 1) -> float:
        """Factor by which the flows take longer than at line rate; at least 1."""
        # An uplink with room to spare makes no flow faster than its adapter.
        return max(1.0, self.max_load(queue_pairs) * self.demand)


def spine_traffic(fabric: Fabric, kind: CollectiveKind, *, connections: int, scattered: bool) -> SpineTraffic:
    """Flows that leave one leaf switch.

    Args:
      connections: of one adapter to one other.
      scattered: True if the hosts of the job lie in any order, not leaf by leaf.
    """
    network, hosts = fabric.network, fabric.hosts
    hashed, links = network.routing == "hashed", fabric.uplinks
    # All hosts are under one leaf of each rail, so nothing crosses the spine.
    if fabric.domains == 1 or hosts <= network.hosts_per_leaf:
        return SpineTraffic(0, links, 0.0, hashed)
    adapter_demand = (
        fabric.adapter_bytes_per_s / fabric.uplink_bytes_per_s
    )  # an adapter's rate by an uplink's
    per_host = fabric.device.host.devices // fabric.rails
    if kind == "all-to-all":
        # An adapter shares its rate among its flows to all other hosts, those under its own leaf included.
        peers = hosts - network.hosts_per_leaf  # of the same rail, under other leaves
        return SpineTraffic(fabric.adapters_per_leaf * peers, links, adapter_demand / (hosts - 1), hashed)
    # Leaf by leaf, a ring leaves a leaf from one host only: through that host's adapters of this rail.
    adapters = fabric.adapters_per_leaf if scattered else per_host
    return SpineTraffic(adapters * connections, links, adapter_demand / connections, hashed)


SETTINGS = (1, 2, 4, 8, 16, 32)
"""Values of `NCCL_IB_QPS_PER_CONNECTION` that are compared; NCCL takes 1 to 128."""

MIN_GAIN = 0.1
"""Gain by which twice as many queue pairs must be faster to be advised: each takes memory and time of its
adapter."""


def advised_queue_pairs(traffic: SpineTraffic, *, limit: int) -> int:
    """The fewest queue pairs per connection, up to `limit`, whose doubling gains less than 10 %."""
    for queue_pairs, doubled in itertools.pairwise(SETTINGS):
        # Past `limit` there are no messages for more queue pairs.
        if doubled > limit or traffic.slowdown(queue_pairs) / traffic.slowdown(doubled) < 1 + MIN_GAIN:
            return queue_pairs
    return SETTINGS[-1]


@dataclasses.dataclass(frozen=True)
class Incast:
    """Several senders to one receiving port.

    backlog_bytes: what a switch port must hold at most: all senders but one wait there.
    admitted_bytes: the same if receivers admit senders by clear-to-send messages, each with one window.
    window_bytes: largest window of one sender that fits the buffer; None if the buffer is unknown.
    overflows: True if even the admitted backlog exceeds the port's buffer; None if the buffer is unknown.
    """

    senders: int
    backlog_bytes: float
    admitted_bytes: float
    window_bytes: float | None
    overflows: bool | None


NCCL_WINDOW = 4.0 * 1024**2
"""Bytes that one NCCL connection has under way at most: `NCCL_BUFFSIZE`. The receiver's clear-to-send admits
them."""


def incast(senders: int, message_bytes: float, buffer_bytes: float | None) -> Incast:
    """Backlog where `senders` send a message each to one port at its line rate, at the same moment."""
    queued_senders = max(0, senders - 1)
    # Receivers admit one window per sender, however long its message.
    admitted = queued_senders * min(message_bytes, NCCL_WINDOW)
    window = None if buffer_bytes is None else buffer_bytes / queued_senders if queued_senders else math.inf
    overflows = None if buffer_bytes is None else admitted > buffer_bytes
    return Incast(senders, queued_senders * message_bytes, admitted, window, overflows)


def senders_to_one(kind: CollectiveKind, algorithm: str, domains: int) -> int:
    """Adapters that send to one adapter at the same time.

    One in a ring, two children in a tree, and in an all-to-all all others.
    """
    if kind == "all-to-all":
        return domains - 1
    return 1 if algorithm == "Ring" else min(2, domains - 1)
