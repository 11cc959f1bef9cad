"""NCCL's own estimate of a collective's time, by which it chooses algorithm and protocol.

    time = latency + bytes / bandwidth,    both by algorithm, protocol, hosts and GPUs per host

This is the model of NCCL's sources (`jtrain.plan.fabric.nccl_constants`), for domains of equally many GPUs.
NCCL knows nothing of oversubscription, of hash collisions and of what an adapter reaches: `on_network` adds
them.

Not here: CollNet, which NVLS takes the place of where GPUs are joined by an NVSwitch; broadcast and reduce;
the corrections of NVLSTree for Grace hosts; the kernels for symmetric memory.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Literal

from jtrain.plan.fabric import nccl_constants as published
from jtrain.plan.fabric.fabric import Fabric, Processor
from jtrain.plan.fabric.nccl_channels import Node, generation_of
from jtrain.plan.fabric.nccl_constants import PROTOCOLS, SIMPLE, Algorithm, Protocol

type Reduction = Literal["all-reduce", "all-gather", "reduce-scatter"]
"""Collectives that NCCL has a model of; an all-to-all is sends and receives, which it has none of."""


MAX_GATHERED = 32
"""GPUs of a domain up to which NVLS gathers and scatters."""


@dataclasses.dataclass(frozen=True)
class Group:
    """GPUs of one collective, as NCCL sees them.

    node: one NVLink domain; nodes: their number.
    adapter_gb_per_s: line rate of one GPU's adapter.
    latency_us, cpu, sharp: as in `jtrain.plan.fabric.fabric.Network`.
    """

    node: Node
    nodes: int
    adapter_gb_per_s: float
    latency_us: float = 0.0
    cpu: Processor = "intel"
    sharp: bool = False

    @property
    def ranks(self) -> int:
        """GPUs of the collective."""
        return self.node.gpus * self.nodes

    @functools.cached_property
    def channels(self) -> int:
        """Channels of a ring as NCCL runs them: each channel of the search is used twice."""
        return 2 * self.node.ring().count


@dataclasses.dataclass(frozen=True)
class Estimate:
    """NCCL's model of one algorithm and protocol: `bandwidth` is bytes of the array by time, in GB/s."""

    algorithm: Algorithm
    protocol: Protocol
    latency_us: float
    bandwidth: float


@dataclasses.dataclass(frozen=True)
class TimedEstimate:
    """Time of one collective by one algorithm and protocol.

    nccl_us: NCCL's estimate, by which it chooses. network_us: the same with what the network carries.
    """

    estimate: Estimate
    nccl_us: float
    network_us: float


def nccl_group(fabric: Fabric) -> Group | None:
    """The devices of a fabric as NCCL sees them; None if it is not their library, or one device is alone."""
    device = fabric.device
    generation = generation_of(device.compute_capability)
    # Other makers have no NCCL, and a single device sends nothing.
    if generation is None or (fabric.domain == 1 and fabric.domains == 1):
        return None
    # A domain of one GPU has no links that could bound it.
    link = math.inf
    if fabric.domain > 1:
        link = fabric.link_bytes_per_s / 1e9 * published.COUNTED_LINK[generation]
    adapter = None
    if fabric.domains > 1:
        # An adapter's bytes cross PCIe, which may be slower than its line.
        to_host = device.host.link_bytes_per_s
        limit = math.inf if to_host is None else to_host / 1e9 * published.COUNTED_PCIE
        adapter = min(fabric.adapter_bytes_per_s / 1e9, limit)
    network = fabric.network
    node = Node(fabric.domain, generation, link, adapter)
    # The line rate, not `adapter`: what the network carries is a share of it.
    line = 0.0 if adapter is None else fabric.adapter_bytes_per_s / 1e9
    return Group(node, fabric.domains, line, network.latency_us, network.cpu, network.sharp)


@functools.cache
def estimates(group: Group, kind: Reduction) -> tuple[Estimate, ...]:
    """Algorithms and protocols that NCCL may choose from; `time_us` adds the corrections for a size."""
    candidates = [*_ring(group, kind)]
    if kind == "all-reduce":
        candidates += _tree(group)
    # Only from Hopper on the NVSwitch reduces.
    if published.NVLS_EFFICIENCY[group.node.generation]:
        candidates += _nvls(group, kind)
    # NCCL offers PAT only to hosts of one GPU.
    if kind != "all-reduce" and group.node.gpus == 1:
        candidates.append(_pat(group))
    return tuple(candidates)


def time_us(estimate: Estimate, group: Group, kind: Reduction, array_bytes: int) -> float:
    """NCCL's estimate for an array.

    Args:
      array_bytes: the whole array: operand of an all-reduce or reduce-scatter, result of an all-gather.
    """
    latency, bandwidth = estimate.latency_us, estimate.bandwidth
    is_corrected_nvls = estimate.algorithm == "NVLSTree" and group.node.generation == "blackwell"
    if (estimate.algorithm == "Tree" or is_corrected_nvls) and array_bytes >= 64:
        # The table has an entry per power of two from 64 bytes on; 1 past its end.
        factors = published.TREE_CORRECTION[PROTOCOLS.index(estimate.protocol)]
        index = int(math.log2(array_bytes // 64))
        bandwidth *= factors[index] if index < len(factors) else 1.0
    if estimate.algorithm == "Ring" and estimate.protocol == "Simple":
        latency *= _plateau(group, kind, array_bytes)
    return latency + array_bytes / (1000 * bandwidth)


def on_network(estimate: Estimate, group: Group, kind: Reduction, array_bytes: int, *, share: float) -> float:
    """NCCL's estimate, or what the adapters take if that is longer.

    Args:
      share: fraction of the adapters' line rate that the network carries.
    """
    nccl_us = time_us(estimate, group, kind, array_bytes)
    if group.nodes == 1:
        return nccl_us
    # A ring splits the array over all ranks, a tree over the domains.
    parts = group.ranks if estimate.algorithm == "Ring" else group.nodes
    passes = 2 if kind == "all-reduce" else 1
    sent = passes * (parts - 1) / parts * array_bytes / group.node.gpus  # by one adapter
    # NCCL does not know the share, so its own estimate may be too short.
    return max(nccl_us, estimate.latency_us + sent / (1000 * group.adapter_gb_per_s * share))


def chosen_us(group: Group, kind: Reduction, array_bytes: int, *, share: float) -> float:
    """Time on the network of the algorithm and protocol that NCCL chooses."""
    # NCCL chooses by its own estimate, and is then held to what the network carries.
    best = min(estimates(group, kind), key=lambda estimate: time_us(estimate, group, kind, array_bytes))
    return on_network(best, group, kind, array_bytes, share=share)


def timed(group: Group, kind: Reduction, array_bytes: int, *, share: float = 1.0) -> list[TimedEstimate]:
    """Every algorithm and protocol with its times; the first is what NCCL chooses."""
    rows = [
        TimedEstimate(
            estimate,
            time_us(estimate, group, kind, array_bytes),
            on_network(estimate, group, kind, array_bytes, share=share),
        )
        for estimate in estimates(group, kind)
    ]
    return sorted(rows, key=lambda row: row.nccl_us)


def bus_bandwidth(kind: str, ranks: int, array_bytes: int, us: float) -> float:
    """Bus bandwidth in GB/s, as nccl-tests defines it: what each GPU would send if all sent equally."""
    # Bytes per microsecond by 1000 are GB/s.
    return array_bytes / (1000 * us) * (2 if kind == "all-reduce" else 1) * (ranks - 1) / ranks


def _by_nodes(group: Group, table: dict[str, tuple[float, float, float]], name: str | None = None) -> float:
    """The entry of a table for one, two or more domains."""
    return table[name or group.node.generation][min(group.nodes, 3) - 1]


def _hop_us(group: Group, algorithm: Algorithm, protocol: int) -> float:
    """Latency of one hop over the network, with the plugin's, which Simple waits for twice."""
    return published.NETWORK_US[algorithm][protocol] + group.latency_us * (2 if protocol == SIMPLE else 1)


def _ll_gb_per_s(group: Group) -> float:
    """Largest bandwidth of LL: by the GPU within a domain, by the host's processor between domains."""
    # NCCL reuses two rows of the table for the processors.
    by_cpu = "volta" if group.cpu == "intel" else "ampere"
    return _by_nodes(group, published.LL_GB_PER_S, None if group.nodes == 1 else by_cpu)


def _ring(group: Group, kind: Reduction) -> Iterator[Estimate]:
    """Ring: n - 1 steps, twice for an all-reduce, of which one per domain goes over the network."""
    passes = 2 if kind == "all-reduce" else 1
    steps, network_steps = passes * (group.ranks - 1), passes * (group.nodes - 1)
    channels = group.node.ring()
    for index, protocol in enumerate(PROTOCOLS):
        bus = channels.total
        # LL sends a flag of 4 bytes with each 4 of data: half of the bandwidth.
        if protocol == "LL":
            bus = min(_ll_gb_per_s(group), bus * 0.5)
        if protocol == "LL128":
            bus = min(bus * 0.92, channels.count * _by_nodes(group, published.RING_LL128_GB_PER_S))
        # A step cannot be shorter than the processor's post of one message.
        posts = 0.0 if group.nodes == 1 else published.POST_US[group.cpu] * (3 if index == SIMPLE else 1)
        inside_us = max(published.LINK_US["Ring"][index], posts)
        # Between hosts of one GPU, NCCL counts a hop of a ring as one of a tree.
        exposed: Algorithm = "Tree" if group.node.gpus == 1 else "Ring"
        latency = published.BASE_US["Ring"][index] + (steps - network_steps) * inside_us
        latency += network_steps * _hop_us(group, exposed, index)
        # The array's bandwidth: bus bandwidth by the steps that each byte takes.
        yield Estimate("Ring", protocol, latency, bus * group.ranks / steps)


def _tree(group: Group) -> Iterator[Estimate]:
    """Double binary tree over domains, a chain within: log2 of the domains up and down.

    The factors of the bandwidth are those of NCCL's sources.
    """
    channels = group.node.tree()
    for index, protocol in enumerate(PROTOCOLS):
        bus = min(channels.total * 0.92, channels.count * _by_nodes(group, published.TREE_GB_PER_S))
        if protocol == "LL":
            bus = min(bus / 3.8, _ll_gb_per_s(group))
        if protocol == "LL128":
            limit = channels.count * _by_nodes(group, published.TREE_LL128_GB_PER_S)
            bus = min(bus * (7 / 9 if group.nodes == 1 else 120 / 128), limit)
        # For these generations NCCL's search finds only trees whose network traffic passes a single GPU.
        if group.node.generation in ("hopper", "blackwell"):
            bus *= 0.85
        hops = int(math.log2(group.nodes)) * _hop_us(group, "Tree", index)
        latency = (
            published.BASE_US["Tree"][index]
            + 2 * (group.node.gpus - 1) * published.LINK_US["Tree"][index]
            + 2 * hops
        )
        # The array passes each channel twice, up and down.
        yield Estimate("Tree", protocol, latency, bus * 0.5)


def _nvls(group: Group, kind: Reduction) -> Iterator[Estimate]:
    """Reduction in the NVSwitch; between domains a tree, or SHARP."""
    node, channels = group.node, group.node.nvls()
    # With one channel the factor (count - 1) / count below is 0; gathers stay within one domain.
    if channels.count < 2 or (kind != "all-reduce" and (group.nodes > 1 or node.gpus > MAX_GATHERED)):
        return
    switch_gb_per_s = (
        # The factors of the switch's bandwidth are those of NCCL's sources, like those of a tree.
        channels.gb_per_s * published.NVLS_EFFICIENCY[node.generation] * (channels.count - 1) / channels.count
    )
    switch_gb_per_s *= 2 if kind == "all-reduce" else (node.gpus - 1) / node.gpus
    inside_us = published.LINK_US["NVLS"][SIMPLE]
    # NCCL counts NVLS in bus bandwidth; the factor makes it the array's.
    bandwidth_factor = group.ranks / (2 * (group.ranks - 1)) if kind == "all-reduce" else 1.0
    if group.nodes == 1:
        yield Estimate("NVLS", "Simple", inside_us, channels.count * switch_gb_per_s * bandwidth_factor)
        return
    network_gb_per_s = channels.gb_per_s * (2 if group.nodes == 2 else 1)
    # The slowest of the switch, the network and NCCL's own limit for NVLSTree.
    tree_gb_per_s = min(switch_gb_per_s, network_gb_per_s, _by_nodes(group, published.NVLS_TREE_GB_PER_S))
    hops = 2 * int(math.log2(group.nodes)) * _hop_us(group, "NVLSTree", SIMPLE)
    yield Estimate("NVLSTree", "Simple", inside_us + hops, channels.count * tree_gb_per_s * bandwidth_factor)
    # The switches reduce, so one hop replaces the tree's.
    if group.sharp:
        sharp_gb_per_s = min(switch_gb_per_s, channels.gb_per_s)
        latency = inside_us + _hop_us(group, "NVLS", SIMPLE)
        yield Estimate("NVLS", "Simple", latency, channels.count * sharp_gb_per_s * bandwidth_factor)


def _pat(group: Group) -> Estimate:
    """Parallel aggregated trees, for hosts of one GPU."""
    # 3.5, 2.8 and 0.75 are constants of NCCL's sources.
    hops = int(math.log2(group.nodes)) * _hop_us(group, "PAT", SIMPLE) / 3.5
    latency = published.BASE_US["PAT"][SIMPLE] + hops + group.ranks * 2.8
    return Estimate("PAT", "Simple", latency, group.node.ring().total * 0.75)


def _plateau(group: Group, kind: Reduction, array_bytes: int) -> float:
    """Factor of the latency of a ring with Simple; 1.0 below 64 bytes per rank and channel.

    Between hosts it is `PLATEAU` for an all-reduce, and 1.0 for a gather or a scatter. Within one domain only
    Blackwell has a factor, for all three kinds: it rises from 1.0 at one step of the ring towards `PLATEAU`,
    and falls again by up to 0.1 between 256 and 512 KiB per rank and channel.

    Example within a domain: an all-reduce of 8 GPUs has 2 * 7 = 14 steps, so the rise is complete: 1.4 up to
    256 KiB per rank and channel, 1.35 at 384 KiB, 1.3 from 512 KiB on. A gather of 2 GPUs has 1 step: 1.0.

    Args:
      array_bytes: the whole array, as in `time_us`.
    """
    is_blackwell = group.node.generation == "blackwell"
    applies = kind == "all-reduce" if group.nodes > 1 else is_blackwell
    # NCCL applies the factor from 64 bytes per rank and channel on.
    rank_bytes = array_bytes // (group.channels * group.ranks)  # per rank and channel
    if not applies or rank_bytes < 64:
        return 1.0
    factor = published.PLATEAU[group.node.generation]
    # Between hosts the factor is the same for every size.
    if group.nodes > 1:
        return factor
    # Within one domain, for Blackwell alone, it grows with the steps and falls with the size.
    steps = (2 if kind == "all-reduce" else 1) * (group.ranks - 1)
    full_rise, floor_rise = factor - 1, 0.1
    rise = 1 - (floor_rise / full_rise) ** max(0, steps - 1)
    fall = floor_rise * min(1.0, max(0.0, (rank_bytes - 256 * 1024) / (256 * 1024)))
    return 1 + rise * (full_rise - fall)
