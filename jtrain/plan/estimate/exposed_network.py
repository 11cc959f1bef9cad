"""Seconds of a step's collectives, and the part of them that the step waits for.

A collective hides behind what can be computed at the same time: gathers of the forward pass behind the layers' forward
pass, gathers and reductions of the backward pass behind that one, an exchange of experts behind the experts' matmuls
but for its first piece. What hides is not free: it takes memory bandwidth, power and, on GPUs, multiprocessors from the
matmuls beside it, and schedulers leave some of it beside nothing.
"""

import dataclasses

from jtrain.layout import Layout
from jtrain.mesh import ZERO_AXES
from jtrain.model.expert_dispatch import num_pieces
from jtrain.plan.estimate.collectives import Collective, collectives
from jtrain.plan.estimate.machine import Machine
from jtrain.plan.estimate.network import seconds
from jtrain.plan.job import Job
from jtrain_kernels import registry
from jtrain_kernels.device import DeviceSpec

EXCHANGE = "rows to experts"
"""Purpose of the exchange of tokens with the devices of their experts."""


@dataclasses.dataclass(frozen=True)
class NetworkTime:
    """Seconds per step of all collectives over the same axes: in total, and exposed (the step is longer by these)."""

    axes: tuple[str, ...]
    total_s: float
    exposed_s: float


@dataclasses.dataclass
class Hiding:
    """Seconds of computation that collectives can still hide behind; each second hides one second of the network.

    forward_s, backward_s: the layers without the experts; experts_s: the experts' matmuls, in both passes.
    """

    forward_s: float
    backward_s: float
    experts_s: float = 0.0

    def take(self, one: Collective, wanted_s: float) -> float:
        """Returns the seconds of `wanted_s` that are hidden, and takes them."""
        forward = one.purpose.endswith("forward")
        of_experts = min(wanted_s, self.experts_s)
        self.experts_s -= of_experts
        if one.purpose == EXCHANGE:
            return of_experts
        left = wanted_s - of_experts
        if forward:
            hidden = min(left, self.forward_s)
            self.forward_s -= hidden
        else:
            hidden = min(left, self.backward_s)
            self.backward_s -= hidden
            if one.kind == "collective-permute":  # in both passes
                more = min(left - hidden, self.forward_s)
                self.forward_s -= more
                hidden += more
        return of_experts + hidden


type Sent = list[tuple[Collective, float, float]]
"""Collectives with their seconds per step: in total, and exposed."""


def exposed_network(job: Job, machine: Machine, behind: Hiding, *, efficiency: float, beside: float) -> Sent:
    """Time of each collective of a step.

    Args:
      behind: computation that collectives can hide behind; used up.
      efficiency: fraction of the links' bandwidth.
      beside: fraction of hidden seconds by which the step is longer nevertheless.
    """
    sent: Sent = []
    # Only experts hide their exchange, so it comes first.
    for one in sorted(collectives(job), key=lambda one: one.purpose != EXCHANGE):
        took = seconds(one, machine, job.layout.mesh.shape, efficiency=efficiency)
        hidden = behind.take(one, took * hideable(one, job, machine.device)) * (1 - beside)
        sent.append((one, took, took - hidden))
    return sent


def by_axes(sent: Sent) -> tuple[NetworkTime, ...]:
    """Time over each set of axes, the most exposed first."""
    rows: dict[tuple[str, ...], list[float]] = {}
    for one, took, exposed in sent:
        row = rows.setdefault(one.axes, [0.0, 0.0])
        row[0] += took
        row[1] += exposed
    return tuple(NetworkTime(axes, *row) for axes, row in sorted(rows.items(), key=lambda item: -item[1][1]))


def hideable(one: Collective, job: Job, device: DeviceSpec) -> float:
    """Fraction of a collective that can run at the same time as matmuls."""
    if one.purpose == EXCHANGE and job.model.moe is not None:
        pieces = num_pieces(job.rows() * job.seq_len // job.layout.mesh.context, job.model.moe.top_k)
        return (pieces - 1) / pieces
    return float(beside_the_layers(one, job.layout, device))


def beside_the_layers(one: Collective, layout: Layout, device: DeviceSpec) -> bool:
    """True if the layers' matmuls can run at the same time.

    Weights are fetched for the next layer, gradients of the layer before are reduced, and a ring sends the next keys
    while the current ones are used. Beside fused kernels that need collectives in order, only their own copies run.
    """
    if "xla_gpu_disable_async_collectives" in registry.compiler_options(device, dict(layout.kernels)):
        return one.purpose == "activations" and one.kind == "collective-permute"
    if one.purpose.startswith("parameters") or (one.kind == "collective-permute" and "stage" not in one.axes):
        return True
    over_data = set(one.axes) <= set(ZERO_AXES) and one.kind == "reduce-scatter"
    return over_data and one.purpose in ("gradients", "unembedding") and layout.spec.zero_stage >= 2
