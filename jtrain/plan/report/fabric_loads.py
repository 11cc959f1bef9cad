"""Loads of a step on the links between devices, on the network, and on the links to host memory."""

import dataclasses

from jtrain.plan.estimate.collectives import collectives
from jtrain.plan.estimate.network import ring, seconds
from jtrain.plan.estimate.step_time import Assumptions, StepTime
from jtrain.plan.job import Job

LINKS, NETWORK, TO_HOST = "links", "network", "host"


@dataclasses.dataclass(frozen=True)
class Load:
    """Load of one device's share of an interconnect in a step.

    level: `LINKS` between devices of a host or slice, `NETWORK` beyond, `TO_HOST` between a device and host
      memory.
    bytes_per_s: the maker's rate of one device, one direction; None if it is not published or the level is
      not there.
    wire_bytes: bytes that a device sends; through the network its share of what its host sends.
    busy_s: seconds in which the level is used; a ring over several hosts uses both levels at once.
    """

    level: str
    bytes_per_s: float | None
    wire_bytes: int
    busy_s: float


def loads(job: Job, timed: StepTime) -> tuple[Load, Load, Load]:
    """Loads of the three levels for one step, as the planner times it, with the bytes of flat rings."""
    assert job.machine is not None, "loads are of a machine"
    machine, mesh, assume = job.machine, job.layout.mesh.shape, Assumptions()
    spec, efficiency = machine.device, assume.network_of(machine.device)
    sent = {LINKS: 0.0, NETWORK: 0.0}
    busy = {LINKS: 0.0, NETWORK: 0.0}
    for collective in collectives(job):
        # A permute's group is a pair of devices, but all pairs of the ring send at once.
        group_ring = ring(
            machine,
            mesh,
            collective.axes,
            None if collective.kind == "collective-permute" else collective.group,
        )
        # Rounded up: hosts of a group may hold unequal numbers.
        devices_per_host = -(-group_ring.devices // group_ring.hosts)
        collective_s = seconds(collective, machine, mesh, efficiency=efficiency)
        if devices_per_host > 1:
            sent[LINKS] += collective.wire_bytes
            busy[LINKS] += collective_s
        # A ring enters a host once, so its devices share what crosses the network.
        if group_ring.hosts > 1:
            sent[NETWORK] += collective.wire_bytes / devices_per_host
            busy[NETWORK] += collective_s
    host = spec.host
    # Back from seconds to bytes, with the rate that the planner divided by.
    copied = (
        0 if host.link_bytes_per_s is None else timed.host_copy_s * host.link_bytes_per_s * assume.host_link
    )
    return (
        Load(LINKS, spec.link_bytes_per_s if spec.linked > 1 else None, round(sent[LINKS]), busy[LINKS]),
        Load(NETWORK, host.network_bytes_per_s, round(sent[NETWORK]), busy[NETWORK]),
        Load(TO_HOST, host.link_bytes_per_s, round(copied), timed.host_copy_s),
    )
