"""What joins the devices of a machine, and how long a collective takes over it.

A collective is a ring: every device sends (n - 1) / n of the array, an all-reduce twice that, at the speed of the
slowest stretch of the ring, and every hop adds a latency. Inside a host of GPUs, or a slice of TPUs, that stretch is
the links; beyond, all of the group's devices in one host share their network adapters. Source of the latencies of GPUs:
NCCL's tuning.cc, for the Simple protocol; of bandwidths: `jtrain_kernels.device`.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from jtrain.plan.collectives import Collective, Kind
from jtrain_kernels.device import DEVICES, DeviceSpec, from_name

RING_BASE_S, TREE_BASE_S = 8.4e-6, 8.4e-6
LINK_HOP_S = {"ring": 3.4e-6, "tree": 4.0e-6}
NETWORK_HOP_S = 14e-6
"""NCCL's constants for NVLink and for the network between hosts (tuning.cc, 2026-06)."""

TORUS_HOP_S = 1e-6
"""From one TPU to its neighbour. Source: scaling book, part 3."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """`count` devices of one kind.

    host_memory_bytes: memory of one host that a run may pin, shared by the host's devices; None if nobody said.
    """

    device: DeviceSpec
    count: int
    host_memory_bytes: int | None = None

    @property
    def hbm_bytes(self) -> int:
        assert self.device.hbm_bytes is not None
        return self.device.hbm_bytes

    @property
    def devices_per_host(self) -> int:
        return min(self.count, self.device.host.devices)

    @property
    def host_bytes_per_device(self) -> int | None:
        """One device's share of its host's memory."""
        return None if self.host_memory_bytes is None else self.host_memory_bytes // self.devices_per_host

    def __str__(self) -> str:
        return f"{self.count} x {self.device.name}"


def make_machine(
    name: str, count: int, *, host_memory_bytes: int | None = None, network_bytes_per_s: float | None = None
) -> Machine:
    """The machine that a command line names.

    Args:
      network_bytes_per_s: of one device beyond its links, instead of what its maker builds in.

    Raises:
      ValueError: no such device; one without published peaks; no devices; or half a host.
    """
    spec = from_name(name)
    if spec.peak_bf16_flops is None or spec.hbm_bytes is None or spec.hbm_bytes_per_s is None:
        known = [spec.name for spec in DEVICES.values() if spec.peak_bf16_flops is not None]
        raise ValueError(
            f"--device {name}: nobody publishes its peaks, so no step time can be predicted. There are: "
            f"{', '.join(known)}. For bytes alone: python -m jtrain.launch --config=... --dry-run."
        )
    if count < 1:
        raise ValueError(f"--count {count} must be at least 1.")
    per_host = spec.host.devices
    if count > per_host and count % per_host:
        below = count - count % per_host
        raise ValueError(
            f"--count {count}: hosts have {per_host} x {name} each. Use {below}, {below + per_host}, or fewer than "
            f"{per_host}."
        )
    if network_bytes_per_s is not None:
        spec = dataclasses.replace(spec, host=dataclasses.replace(spec.host, network_bytes_per_s=network_bytes_per_s))
    return Machine(spec, count, host_memory_bytes)


@dataclasses.dataclass(frozen=True)
class Ring:
    """What a group of devices communicates over.

    devices: of the group; hosts: that it spans, or slices.
    bytes_per_s: that each device can send at once, peak.
    """

    devices: int
    hosts: int
    bytes_per_s: float
    torus_hops: float | None = None

    def latency_s(self, kind: Kind) -> float:
        """Of one collective, however small."""
        passes = 2 if kind == "all-reduce" else 1
        if kind == "collective-permute":  # to the next device only, which may be on the next host
            if self.torus_hops is not None:
                return NETWORK_HOP_S if self.hosts > 1 else TORUS_HOP_S
            return nccl_latency_s(kind, "ring", devices=2, hosts=min(self.hosts, 2))
        if self.torus_hops is not None:
            return passes * (self.torus_hops * TORUS_HOP_S + (self.hosts - 1) * NETWORK_HOP_S)
        return nccl_latency_s(kind, "ring", devices=self.devices, hosts=self.hosts)


def nccl_latency_s(kind: Kind, algorithm: Literal["ring", "tree"], *, devices: int, hosts: int) -> float:
    """NCCL's own model, Simple protocol, without its plateau factor.

    A ring takes n - 1 steps, an all-reduce 2 (n - 1); of a pass, hosts - 1 go over the network. A tree is for
    all-reduce: down and up, through each host's devices and over log2 of the hosts.
    """
    if algorithm == "tree":
        per_host = devices // hosts
        hops = (per_host - 1) * LINK_HOP_S["tree"] + math.floor(math.log2(hosts)) * NETWORK_HOP_S
        return TREE_BASE_S + 2 * hops
    passes = 2 if kind == "all-reduce" else 1
    between = passes * (hosts - 1)
    return RING_BASE_S + (passes * (devices - 1) - between) * LINK_HOP_S["ring"] + between * NETWORK_HOP_S


def ring(machine: Machine, mesh: Mapping[str, int], axes: tuple[str, ...], group: int | None = None) -> Ring:
    """What the groups along `axes` of a mesh communicate over; neighbours along the last axis are the closest.

    Args:
      group: devices of one, where the axes are taken in turns (`Layout.rings`); all of the axes' otherwise.

    Raises:
      ValueError: the group leaves the links, and nobody says how fast the network beyond them is.
    """
    spec = machine.device
    order = list(mesh)
    devices = group or math.prod(mesh[axis] for axis in axes)
    stride = math.prod(mesh[axis] for axis in order[order.index(axes[-1]) + 1 :] if axis not in axes)
    linked = min(spec.linked, machine.count)
    inside = max(1, min(devices, linked // stride))
    hosts = -(-devices // inside)
    hops = None
    speeds: list[float] = []
    if inside > 1:
        assert spec.link_bytes_per_s is not None, spec.name
        share = 1.0
        if spec.torus_dims is not None:
            share, hops = _torus(spec.torus_dims, linked, inside)
        speeds.append(spec.link_bytes_per_s * share)
    elif spec.torus_dims is not None:
        hops = 0.0
    if hosts > 1:
        if spec.host.network_bytes_per_s is None:
            raise ValueError(
                f"mesh axes {' * '.join(axes)} span {devices} devices, but links join only {linked} x {spec.name}, and "
                "no speed is published for the network beyond. Give --network GBIT, of one device."
            )
        speeds.append(inside * spec.host.network_bytes_per_s)
    return Ring(devices, hosts, min(speeds, default=math.inf), hops)


def _torus(dims: int, slice_devices: int, group: int) -> tuple[float, float]:
    """Share of a chip's links that a group of a slice uses, and how many hops its rings have.

    A group lies along its share of the slice's dimensions, at least one. Small slices have no wrap-around (below a
    cube of 4 x 4 x 4, or 16 x 16), which halves what a ring gets. Source: scaling book, part 2.
    """
    there = max(1, min(dims, int(math.log2(slice_devices))))
    used = max(1.0, there * math.log(group) / math.log(slice_devices))
    wraps = slice_devices >= (64 if dims == 3 else 256)
    side = group ** (1 / used)
    return used / dims * (1.0 if wraps else 0.5), used * (side / 2 if wraps else side - 1)


def collective_s(kind: Kind, array_bytes: int, over: Ring, *, count: int = 1, efficiency: float = 1.0) -> float:
    """Seconds that `count` collectives of `array_bytes` together take, one after another.

    Args:
      array_bytes: sum of the whole arrays: all-gathers' results, reduce-scatters' operands, what all-reduces sum, what
        a device gives to all-to-alls or sends in permutes.
      efficiency: share of the peak speed that is reached.
    """
    if over.devices == 1:
        return 0.0
    if kind == "collective-permute":
        return array_bytes / (over.bytes_per_s * efficiency) + count * over.latency_s(kind)
    passes = 2 if kind == "all-reduce" else 1
    wire_bytes = passes * array_bytes * (over.devices - 1) / over.devices
    if kind.endswith("all-to-all") and over.torus_hops is not None:
        wire_bytes = max(wire_bytes, array_bytes * over.torus_hops / 2)  # half the way round is the farthest
    return wire_bytes / (over.bytes_per_s * efficiency) + count * over.latency_s(kind)


def seconds(sent: Collective, machine: Machine, mesh: Mapping[str, int], *, efficiency: float = 1.0) -> float:
    """Seconds that all collectives of one purpose take in a step."""
    group = None if sent.kind == "collective-permute" else sent.group  # a pair of them, but all pairs at once
    over = ring(machine, mesh, sent.axes, group)
    return collective_s(sent.kind, sent.array_bytes, over, count=sent.count, efficiency=efficiency)
