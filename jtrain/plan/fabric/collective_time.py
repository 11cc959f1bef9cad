"""Time of a collective over a fabric's levels, for any library: latency + bytes / bandwidth per phase.

Levels are the links of a domain and the network between domains. NVLink counts with the part of its line rate
that NCCL counts with, a torus with all of it. Latencies of GPUs are NCCL's of the Simple protocol, of TPUs
those of the torus; a host's adapters work side by side, each for its own device.
"""

import dataclasses
import math

from jtrain.plan.fabric import nccl_constants as published
from jtrain.plan.fabric.fabric import Fabric
from jtrain.plan.fabric.nccl_channels import generation_of
from jtrain.plan.fabric.nccl_constants import SIMPLE
from jtrain.plan.fabric.spine import CollectiveKind
from jtrain.plan.fabric.torus import TORUS_HOP_S, exchange_share, torus_ring


@dataclasses.dataclass(frozen=True)
class NetworkPhase:
    """One step of an algorithm, in which all devices send alike.

    level: `links` or `network`. sent_bytes: by one device. bytes_per_s: its rate there.
    """

    operation: str
    level: str
    latency_us: float
    sent_bytes: float
    bytes_per_s: float

    @property
    def us(self) -> float:
        """Microseconds that the phase takes."""
        return self.latency_us + 1e6 * self.sent_bytes / self.bytes_per_s


@dataclasses.dataclass(frozen=True)
class CollectiveAlgorithm:
    """An algorithm for a collective; its phases run one after another, or side by side."""

    name: str
    phases: tuple[NetworkPhase, ...]
    side_by_side: bool = False

    @property
    def us(self) -> float:
        """Microseconds that the collective takes."""
        phase_us = [phase.us for phase in self.phases]
        # Levels that work side by side end with the slower one.
        return max(phase_us) if self.side_by_side else sum(phase_us)


@dataclasses.dataclass(frozen=True)
class _Levels:
    """Sizes and rates of a fabric's two levels; `network` is what the spine leaves of an adapter's rate."""

    fabric: Fabric
    link: float
    network: float

    @property
    def ring(self) -> float:
        """Rate of a ring over all devices: a domain's adapters share what each device sends."""
        return min(self.link, self.fabric.domain * self.network)


def collective_algorithms(
    fabric: Fabric, kind: CollectiveKind, array_bytes: int, *, share: float
) -> list[CollectiveAlgorithm]:
    """The algorithms for a collective, fastest first.

    Args:
      array_bytes: the whole array; of an all-to-all, one device's operand.
      share: fraction of the adapters' line rate that the network carries.
    """
    link = fabric.link_bytes_per_s
    generation = generation_of(fabric.device.compute_capability)
    # NCCL never counts with NVLink's whole line rate.
    if generation is not None:
        link *= published.COUNTED_LINK[generation]
    # A slice smaller than the full torus leaves some of each chip's links unused.
    if fabric.device.torus_dims is not None and fabric.domain > 1:
        link *= torus_ring(fabric.device.torus_dims, fabric.domain, fabric.domain)[0]
    levels = _Levels(fabric, link, fabric.adapter_bytes_per_s * share)
    if kind == "all-to-all":
        return [_direct(levels, array_bytes)]
    # Any library has the ring; trees are NCCL's, for all-reduce alone.
    algorithms = [_one_ring(levels, kind, array_bytes)]
    if fabric.device.torus_dims is None and kind == "all-reduce":
        algorithms.append(_double_tree(levels, array_bytes))
    # With one level there is nothing to divide into phases.
    if fabric.domains > 1 and fabric.domain > 1:
        algorithms.append(_hierarchical(levels, kind, array_bytes))
    return sorted(algorithms, key=lambda algorithm: algorithm.us)


def _passes(kind: CollectiveKind) -> int:
    # An all-reduce is a reduce-scatter and an all-gather.
    return 2 if kind == "all-reduce" else 1


def _inside_us(fabric: Fabric, hops: int) -> float:
    """Latency of `hops` steps of a ring within one domain; a torus runs its rings both ways round."""
    if fabric.device.torus_dims is None:
        return hops * published.LINK_US["Ring"][SIMPLE]
    # A torus has its own number of hops, which rings both ways round shorten.
    return 1e6 * TORUS_HOP_S * torus_ring(fabric.device.torus_dims, fabric.domain, fabric.domain)[1]


def _between_us(fabric: Fabric, hops: int) -> float:
    """Latency of `hops` steps over the network."""
    # Simple waits for the plugin's latency twice.
    return hops * (published.NETWORK_US["Ring"][SIMPLE] + 2 * fabric.network.latency_us)


def _base_us(fabric: Fabric) -> float:
    """Latency of a collective before its first hop: that of a GPU's kernel."""
    return 0.0 if fabric.device.torus_dims is not None else published.BASE_US["Ring"][SIMPLE]


def _one_ring(levels: _Levels, kind: CollectiveKind, array_bytes: int) -> CollectiveAlgorithm:
    """Rings over all devices: every device sends (n - 1) / n of the array, twice for an all-reduce."""
    fabric, passes = levels.fabric, _passes(kind)
    # Of count - 1 hops, domains - 1 cross the network and the others stay within.
    links_us = _inside_us(fabric, fabric.count - fabric.domains) if fabric.domain > 1 else 0.0
    latency = _base_us(fabric) + passes * (links_us + _between_us(fabric, fabric.domains - 1))
    sent = passes * (fabric.count - 1) / fabric.count * array_bytes
    # The level that bounds the rate, for the report.
    level = "links" if fabric.domains == 1 or levels.link < fabric.domain * levels.network else "network"
    name = "rings of the torus" if fabric.device.torus_dims is not None else "ring"
    return CollectiveAlgorithm(
        name, (NetworkPhase(f"{kind} over all devices", level, latency, sent, levels.ring),)
    )


def _double_tree(levels: _Levels, array_bytes: int) -> CollectiveAlgorithm:
    """NCCL's double binary tree over domains, a chain within: each half of the array takes its own tree."""
    fabric = levels.fabric
    # As in a ring, Simple waits for the plugin's latency twice.
    hop = published.NETWORK_US["Tree"][SIMPLE] + 2 * fabric.network.latency_us
    latency = published.BASE_US["Tree"][SIMPLE]
    latency += (
        2 * (fabric.domain - 1) * published.LINK_US["Tree"][SIMPLE] + 2 * int(math.log2(fabric.domains)) * hop
    )
    # Each of a domain's adapters carries its part of what the tree sends.
    over_network = 2 * (fabric.domains - 1) / fabric.domains * array_bytes / fabric.domain
    # Up and down the chain the array crosses each link twice; the slower level decides.
    if 2.0 * array_bytes / levels.link >= over_network / levels.network:
        return CollectiveAlgorithm(
            "double tree", (NetworkPhase("up and down", "links", latency, 2.0 * array_bytes, levels.link),)
        )
    return CollectiveAlgorithm(
        "double tree", (NetworkPhase("up and down", "network", latency, over_network, levels.network),)
    )


def _hierarchical(levels: _Levels, kind: CollectiveKind, array_bytes: int) -> CollectiveAlgorithm:
    """Within the domains first, then the same parts of all domains over the network, then within again."""
    fabric = levels.fabric
    domain, domains = fabric.domain, fabric.domains
    step_us, parts = _inside_us(fabric, domain - 1), (domain - 1) / domain * array_bytes
    scatter = NetworkPhase("reduce-scatter in each domain", "links", step_us, parts, levels.link)
    gather = NetworkPhase("all-gather in each domain", "links", step_us, parts, levels.link)
    # The same part of the array of all domains: 1 / domain of it per adapter.
    passes = _passes(kind)
    latency = _base_us(fabric) + _between_us(fabric, passes * (domains - 1))
    sent = passes * (domains - 1) / domains * array_bytes / domain
    middle = NetworkPhase(f"{kind} between domains", "network", latency, sent, levels.network)
    # A reduce-scatter is the default below: first within, then between.
    phases = {"all-reduce": (scatter, middle, gather), "all-gather": (middle, gather)}
    return CollectiveAlgorithm("hierarchical", phases.get(kind, (scatter, middle)))


def _direct(levels: _Levels, array_bytes: int) -> CollectiveAlgorithm:
    """Every device sends each of the others its part; within and between domains at the same time."""
    fabric = levels.fabric
    inside = (fabric.domain - 1) / fabric.count * array_bytes
    link, hop = levels.link, _inside_us(fabric, 1)
    if fabric.device.torus_dims is not None and fabric.domain > 1:
        # The torus's share counts a device's own part, too.
        inside = fabric.domain / fabric.count * array_bytes
        link = fabric.link_bytes_per_s * exchange_share(
            fabric.device.torus_dims, fabric.domain, fabric.domain
        )
    phases = [NetworkPhase("within each domain", "links", _base_us(fabric) + hop, inside, link)]
    if fabric.domains > 1:
        # What goes to other domains leaves over the device's own adapter.
        outside = (fabric.count - fabric.domain) / fabric.count * array_bytes
        latency = _base_us(fabric) + _between_us(fabric, 1)
        phases.append(NetworkPhase("between domains", "network", latency, outside, levels.network))
    return CollectiveAlgorithm("direct", tuple(phases), side_by_side=True)
