"""Interconnects of a machine, and the time that a collective takes over them.

On NVIDIA's GPUs sums and gathers take what NCCL's own model says (`jtrain.plan.fabric.nccl_model`).
Elsewhere, and for other collectives, the model is a ring: every device sends (n - 1) / n of the array, an
all-reduce twice that, at the speed of the slowest link of the ring, and every hop adds a latency. Inside a
host of GPUs, or a slice of TPUs, these are the direct links; beyond, all of the group's devices in one host
share their network adapters. Source of the GPU
latencies: NCCL's tuning.cc, Simple protocol; of the bandwidths: `jtrain_kernels.device`.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Literal

from jtrain.errors import UserError
from jtrain.plan.estimate.collectives import Collective, Kind
from jtrain.plan.estimate.machine import Machine
from jtrain.plan.fabric.fabric import Fabric
from jtrain.plan.fabric.nccl_model import Group, chosen_us, nccl_group
from jtrain.plan.fabric.torus import TORUS_HOP_S, exchange_share, torus_ring
from jtrain_kernels.device import DeviceSpec

RING_BASE_S, TREE_BASE_S = 8.4e-6, 8.4e-6
LINK_HOP_S = {"ring": 3.4e-6, "tree": 4.0e-6}
NETWORK_HOP_S = 14e-6
"""NCCL's constants for NVLink and for the network between hosts (tuning.cc, 2026-06)."""

_CUBE = 64
"""Chips of the smallest slice of a torus of three dimensions that has wrap-around."""


@dataclasses.dataclass(frozen=True)
class Ring:
    """Interconnect of a group of devices.

    devices: devices of the group; hosts: hosts, or TPU slices, that it spans.
    bytes_per_s: peak rate at which each device can send.
    torus_hops: hops of the group's ring on a torus of TPUs; None for GPUs.
    exchanged_bytes_per_s: rate at which an all-to-all on a torus moves a device's whole array; None for GPUs.
    sums_whole: True if a reduce-scatter is compiled to an all-reduce and a slice: XLA:TPU does so over all of
      a slice of 8 and of 16 chips of a v5p. From a cube of 64 chips on, jtrain scatters along one dimension
      after the other.
    """

    devices: int
    hosts: int
    bytes_per_s: float
    torus_hops: float | None = None
    exchanged_bytes_per_s: float | None = None
    sums_whole: bool = False

    def latency_s(self, kind: Kind) -> float:
        """Latency of one collective of zero bytes, in seconds."""
        passes = 2 if kind == "all-reduce" else 1
        if kind == "collective-permute":  # only to the next device, possibly on the next host
            if self.torus_hops is not None:
                return NETWORK_HOP_S if self.hosts > 1 else TORUS_HOP_S
            return nccl_latency_s(kind, "ring", devices=2, hosts=min(self.hosts, 2))
        if self.torus_hops is not None:
            return passes * (self.torus_hops * TORUS_HOP_S + (self.hosts - 1) * NETWORK_HOP_S)
        return nccl_latency_s(kind, "ring", devices=self.devices, hosts=self.hosts)


def nccl_latency_s(kind: Kind, algorithm: Literal["ring", "tree"], *, devices: int, hosts: int) -> float:
    """Latency in NCCL's own model, for the Simple protocol, without its plateau factor.

    A ring takes n - 1 steps, an all-reduce 2 (n - 1); hosts - 1 steps of a pass go over the network. A tree
    is for all-reduce only: it goes down and up, through each host's devices and over log2 of the hosts.
    """
    if algorithm == "tree":
        per_host = devices // hosts
        # A chain of devices within each host, and a binary tree over the hosts.
        hops = (per_host - 1) * LINK_HOP_S["tree"] + math.floor(math.log2(hosts)) * NETWORK_HOP_S
        return TREE_BASE_S + 2 * hops
    passes = 2 if kind == "all-reduce" else 1
    network_hops = passes * (hosts - 1)
    return (
        RING_BASE_S
        + (passes * (devices - 1) - network_hops) * LINK_HOP_S["ring"]
        + network_hops * NETWORK_HOP_S
    )


def ring(machine: Machine, mesh: Mapping[str, int], axes: tuple[str, ...], group: int | None = None) -> Ring:
    """Interconnect of the groups along `axes` of a mesh; neighbours along the last axis are the closest.

    Args:
      group: devices of one group, if `Layout.rings` splits an axis; the product of the axes otherwise.

    Raises:
      UserError: the group spans more than the direct links, and the speed of the network beyond them is
        unknown.
    """
    spec = machine.device
    order = list(mesh)
    devices = group or math.prod(mesh[axis] for axis in axes)
    # Devices from one member of a group to the next: those of the axes inside that the group does not span.
    stride = math.prod(mesh[axis] for axis in order[order.index(axes[-1]) + 1 :] if axis not in axes)
    linked = min(spec.linked, machine.count)
    # A stride as long as the links reach leaves one member of the group within them.
    linked_group = max(1, min(devices, linked // stride))
    hosts = -(-devices // linked_group)
    hops = exchange_bytes_per_s = None
    speeds: list[float] = []
    if linked_group > 1:
        assert spec.link_bytes_per_s is not None, spec.name
        # Behind a switch a device can use all of its links whatever the group.
        share = 1.0
        if spec.torus_dims is not None:
            share, hops = torus_ring(spec.torus_dims, linked, linked_group)
            exchange_bytes_per_s = spec.link_bytes_per_s * exchange_share(
                spec.torus_dims, linked, linked_group
            )
        speeds.append(spec.link_bytes_per_s * share)
    elif spec.torus_dims is not None:
        # A group with one chip per slice has no hop on the torus; None would mark a GPU.
        hops = 0.0
    if hosts > 1:
        if spec.host.network_bytes_per_s is None:
            raise UserError(
                f"mesh axes {' * '.join(axes)} span {devices} devices, but links join only {linked} x "
                f"{spec.name}, and the speed of the network beyond them is not published. Give --network "
                "GBIT, per device."
            )
        speeds.append(linked_group * spec.host.network_bytes_per_s)
    if hosts > 1:
        exchange_bytes_per_s = None  # the network between slices is slower than the torus
    sums_whole = spec.torus_dims == 3 and linked < _CUBE and linked_group > 4
    return Ring(devices, hosts, min(speeds, default=math.inf), hops, exchange_bytes_per_s, sums_whole)


def collective_s(
    kind: Kind, array_bytes: int, interconnect: Ring, *, count: int = 1, efficiency: float = 1.0
) -> float:
    """Seconds that `count` collectives of `array_bytes` in total take, one after another.

    Args:
      array_bytes: as in `Collective`: sum of the sizes of the whole arrays.
      efficiency: fraction of the peak bandwidth that is reached.
    """
    if interconnect.devices == 1:
        return 0.0
    if kind == "collective-permute":
        return array_bytes / (interconnect.bytes_per_s * efficiency) + count * interconnect.latency_s(kind)
    passes = 2 if kind == "all-reduce" else 1
    wire_bytes = passes * array_bytes * (interconnect.devices - 1) / interconnect.devices
    if kind.endswith("all-to-all") and interconnect.exchanged_bytes_per_s is not None:
        return array_bytes / (
            interconnect.exchanged_bytes_per_s * efficiency
        ) + count * interconnect.latency_s(kind)
    return wire_bytes / (interconnect.bytes_per_s * efficiency) + count * interconnect.latency_s(kind)


@functools.cache
def _nccl_group(device: DeviceSpec, per_host: int, hosts: int) -> Group | None:
    """Devices of a collective, `per_host` of each of `hosts` hosts, as NCCL sees them; None for other
    libraries.
    """
    return nccl_group(Fabric(dataclasses.replace(device, linked=per_host), per_host * hosts))


def seconds(
    collective: Collective, machine: Machine, mesh: Mapping[str, int], *, efficiency: float = 1.0
) -> float:
    """Seconds that all collectives of one purpose take per step."""
    # A permute's group is a pair of devices, but all pairs of the ring send at once.
    group = None if collective.kind == "collective-permute" else collective.group
    interconnect = ring(machine, mesh, collective.axes, group)
    kind = (
        "all-reduce" if collective.kind == "reduce-scatter" and interconnect.sums_whole else collective.kind
    )
    # Terms of the gradient norm are a few bytes each, and compilers join them.
    count = 1 if collective.purpose == "gradient norm" else collective.count
    if kind in ("all-reduce", "all-gather", "reduce-scatter") and interconnect.devices > 1:
        nccl = _nccl_group(machine.device, interconnect.devices // interconnect.hosts, interconnect.hosts)
        if nccl is not None:
            return count * chosen_us(nccl, kind, collective.array_bytes // count, share=efficiency) / 1e6
    return collective_s(kind, collective.array_bytes, interconnect, count=count, efficiency=efficiency)
