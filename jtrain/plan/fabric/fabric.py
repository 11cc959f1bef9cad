"""A cluster's network as data: links between devices, adapters, leaf and spine switches."""

import dataclasses
import math
from typing import Literal

from jtrain_kernels.device import DeviceSpec
from jtrain_kernels.errors import UserError

type SpreadOfFlows = Literal["adaptive", "hashed"]
"""Way in which a network spreads flows over links: by load, or by a hash of each."""

type Processor = Literal["intel", "amd"]
"""Maker of a host's processor, which decides NCCL's figures for paths through it."""


@dataclasses.dataclass(frozen=True)
class Network:
    """Switches between hosts, with one network adapter per device.

    rails: leaf switches that a host is connected to, each by the same number of adapters; None for one per
      device.
    hosts_per_leaf: hosts under one leaf switch. The default is a scalable unit of NVIDIA's DGX SuperPOD.
    uplinks: links of equal cost from a leaf to the spine; None for as many of the adapters' rate as are
      needed.
    oversubscription: rate of a leaf's adapters by the rate of its uplinks.
    efficiency: fraction of the adapters' line rate that long messages reach: 46 of 50 GB/s with 400 Gbit/s
      (NVIDIA/nccl-tests issue 290).
    latency_us: latency of the network as its plugin tells NCCL: 0 for InfiniBand and RoCE, 75 for AWS EFA
      (aws/aws-ofi-nccl, platform data of p5.48xlarge).
    routing: `hashed` if switches choose a link per flow by a hash (ECMP), `adaptive` if by load.
    buffer_bytes: buffer of one switch port; None if it is unknown.
    cpu: maker of the hosts' processors.
    sharp: True if switches reduce (NVIDIA SHARP, `NCCL_COLLNET_ENABLE=1`).
    traffic_class: value of `NCCL_IB_TC`; None for NCCL's own.
    """

    rails: int | None = None
    hosts_per_leaf: int = 32
    uplinks: int | None = None
    oversubscription: float = 1.0
    efficiency: float = 0.92
    latency_us: float = 0.0
    routing: SpreadOfFlows = "adaptive"
    buffer_bytes: float | None = None
    cpu: Processor = "intel"
    sharp: bool = False
    traffic_class: int | None = None


@dataclasses.dataclass(frozen=True)
class Fabric:
    """`count` devices of one kind with their links, and the network between their hosts.

    `device.host.network_bytes_per_s` is the line rate of a device's adapter, whatever the oversubscription.
    """

    # Its `linked` is the size of a whole domain, which a small job need not fill.
    device: DeviceSpec
    count: int
    network: Network = Network()

    @property
    def domain(self) -> int:
        """Devices of the job in one domain of direct links: an NVLink domain or a TPU slice."""
        # A job smaller than the domain has no network.
        return min(self.device.linked, self.count)

    @property
    def domains(self) -> int:
        """Domains that the job spans; messages between them go over the network."""
        return self.count // self.domain

    @property
    def hosts(self) -> int:
        """Hosts of the job."""
        # Rounded up: the last host may be used in part.
        return -(-self.count // self.device.host.devices)

    @property
    def rails(self) -> int:
        """Leaf switches that a host is connected to."""
        # One leaf per adapter is the rail-optimised wiring of DGX SuperPOD.
        return self.network.rails or self.device.host.devices

    @property
    def link_bytes_per_s(self) -> float:
        """Rate of one device's links to its domain, one direction; infinite if the domain is one device."""
        if self.domain == 1:
            return math.inf
        # `linked` > 1 without a rate is refused where machines are read.
        assert self.device.link_bytes_per_s is not None
        return self.device.link_bytes_per_s

    @property
    def adapter_bytes_per_s(self) -> float:
        """Line rate of one device's adapter; infinite within one domain."""
        if self.domains == 1:
            return math.inf
        # `make_fabric` refuses several domains without it.
        assert self.device.host.network_bytes_per_s is not None
        return self.device.host.network_bytes_per_s

    @property
    def adapters_per_leaf(self) -> int:
        """Adapters of the hosts under one leaf switch that are connected to it."""
        return self.network.hosts_per_leaf * self.device.host.devices // self.rails

    @property
    def uplinks(self) -> int:
        """Links of equal cost from a leaf to the spine."""
        # As many uplinks, each as fast as an adapter, as oversubscription leaves.
        return self.network.uplinks or math.ceil(self.adapters_per_leaf / self.network.oversubscription)

    @property
    def uplink_bytes_per_s(self) -> float:
        """Rate of one uplink, one direction."""
        return (
            self.adapters_per_leaf * self.adapter_bytes_per_s / self.network.oversubscription / self.uplinks
        )

    def __str__(self) -> str:
        return f"{self.count} x {self.device.name}"


def make_fabric(device: DeviceSpec, count: int, network: Network | None = None) -> Fabric:
    """The fabric of `count` devices of one kind.

    Raises:
      UserError: fewer than two devices, a part of a domain, rails that do not divide a host's adapters, or a
        network whose speed is unknown.
    """
    if count < 2:
        raise UserError(f"--count {count}: a collective has at least 2 devices.")
    fabric = Fabric(device, count, network or Network())
    # Every algorithm here assumes domains of equally many devices.
    if count % fabric.domain:
        below = count - count % fabric.domain
        raise UserError(
            f"--count {count} is no whole number of domains: links join {fabric.domain} x {device.name}. Use "
            f"{below} or {below + fabric.domain}, or set links.devices in a file for --machine."
        )
    # Each leaf takes the same number of a host's adapters.
    if device.host.devices % fabric.rails:
        raise UserError(
            f"network.rails={fabric.rails} does not divide the {device.host.devices} adapters of a host. Set "
            f"it to a divisor, such as {device.host.devices}."
        )
    if fabric.domains > 1 and device.host.network_bytes_per_s is None:
        smaller = f"Use --count {fabric.domain} at most, or set" if fabric.domain > 1 else "Set"
        raise UserError(
            f"{count} x {device.name} span {fabric.domains} domains of {fabric.domain}, and the speed of the "
            f"network between them is not published. {smaller} host.network_gbit_per_s in a file for "
            "--machine."
        )
    return fabric
