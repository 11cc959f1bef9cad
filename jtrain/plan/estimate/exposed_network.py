"""Seconds of a step's collectives, and the part of them that the step waits for.

A collective hides behind what can be computed at the same time: gathers of the forward pass behind the
layers' forward pass, gathers and reductions of the backward pass behind that one, an exchange of experts
behind the experts' matmuls but for its first piece. What hides is not free: it takes memory bandwidth, power
and, on GPUs, multiprocessors from the matmuls beside it, and schedulers leave some of it beside nothing.
"""

import dataclasses
from collections.abc import Iterable

from jtrain.layout.layout import Layout
from jtrain.layout.precision import itemsize
from jtrain.model.expert_dispatch import num_pieces
from jtrain.plan.estimate.collectives import BESIDE_WEIGHTS, GATHERED_AGAIN, Collective, collectives
from jtrain.plan.estimate.machine import Machine
from jtrain.plan.estimate.network import seconds
from jtrain.plan.estimate.pipeline import layer_passes, layers_here
from jtrain.plan.job import Job
from jtrain.step.gradient_sums import sums_gradients
from jtrain.step.pipeline_ticks import attention_is_a_ring
from jtrain_kernels import registry
from jtrain_kernels.device import DeviceSpec

LAST_REDUCTION = 0.6
"""Fraction of a layer's largest reduction that a TPU has nothing to compute beside. XLA:TPU ends each turn of
the loop over layers with the reductions that are left: 0.66 and 0.61 of one feed-forward matrix in two
programs for a v5p. XLA: GPU moves all of them to the next turn, so only those of the last layer wait, and
where gradients are summed none."""

EXCHANGE = "rows to experts"
"""Purpose of the exchange of tokens with the devices of their experts."""


@dataclasses.dataclass(frozen=True)
class NetworkTime:
    """Seconds per step of all collectives over the same axes: in total, and exposed (the step is longer by
    these).

    waits_s: part of exposed_s in which the step waits, because nothing is computed beside the collective; the
      rest is by what hidden collectives slow the computation beside them down.
    """

    axes: tuple[str, ...]
    total_s: float
    exposed_s: float
    waits_s: float


@dataclasses.dataclass
class Hiding:
    """Seconds of computation that collectives can still hide behind; each second hides one second of the
    network.

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


@dataclasses.dataclass(frozen=True)
class Sent:
    """Seconds per step of the collectives of one purpose, as in `NetworkTime`."""

    what: Collective
    total_s: float
    exposed_s: float
    waits_s: float


def exposed_network(
    job: Job, machine: Machine, behind: Hiding, *, efficiency: float, beside: float
) -> list[Sent]:
    """Time of each collective of a step.

    Args:
      behind: computation that collectives can hide behind; used up.
      efficiency: fraction of the links' bandwidth.
      beside: fraction of hidden seconds by which the step is longer nevertheless.
    """
    sent: list[Sent] = []
    # Only experts hide their exchange, so it comes first.
    for one in sorted(collectives(job), key=lambda one: one.purpose != EXCHANGE):
        took = seconds(one, machine, job.layout.mesh.shape, efficiency=efficiency)
        wanted = took * hideable(one, job, machine.device)
        hidden = behind.take(one, wanted)
        sent.append(Sent(one, took, took - hidden * (1 - beside), took - hidden))
    return sent


def by_axes(sent: Iterable[Sent]) -> tuple[NetworkTime, ...]:
    """Time over each set of axes, the most exposed first."""
    rows: dict[tuple[str, ...], list[float]] = {}
    for one in sent:
        row = rows.setdefault(one.what.axes, [0.0, 0.0, 0.0])
        row[0] += one.total_s
        row[1] += one.exposed_s
        row[2] += one.waits_s
    return tuple(NetworkTime(axes, *row) for axes, row in sorted(rows.items(), key=lambda item: -item[1][1]))


def hideable(one: Collective, job: Job, device: DeviceSpec) -> float:
    """Fraction of a collective that can run at the same time as matmuls, in programs that XLA schedules.

    Weights are fetched for the next matmul, and a ring sends the next keys while the current ones are used.
    Inputs that are gathered again wait for nothing but gradients of weights, if queries, keys and values are
    kept; else a layer is recomputed step by step, and beside that only the gradient of its output is
    gathered. XLA:TPU also computes gradients of weights while gradients of activations are sent. Beside fused
    kernels that need collectives in order, only their own copies run.
    """
    layout, on_tpu = job.layout, device.platform == "tpu"
    if "xla_gpu_disable_async_collectives" in registry.compiler_options(dict(layout.kernels)):
        return float(one.purpose == "activations" and one.kind == "collective-permute")
    if one.purpose == EXCHANGE and job.model.moe is not None:
        pieces = num_pieces(job.rows() * job.seq_len // layout.mesh.context, job.model.moe.top_k)
        return (pieces - 1) / pieces
    if one.purpose == GATHERED_AGAIN:
        return 0.5 if one.feeds_products else 1.0
    if one.purpose == BESIDE_WEIGHTS:
        # XLA:GPU has gradients of weights left for the last sum of a layer alone, that of attention's input.
        return 1.0 if on_tpu else 0.5 * (one.kind == "reduce-scatter")
    if one.purpose == "keys and values" and not on_tpu:
        return 1 - _ring_waits(one, layout)
    if one.purpose == "heads for positions" and not on_tpu:
        return 1 - _exchange_waits(one, job)
    if one.purpose.startswith("parameters") or (one.kind == "collective-permute" and "stage" not in one.axes):
        return 1.0
    if one.kind == "reduce-scatter":
        if one.purpose == "gradients" and not one.in_layers:
            return 0.0
        if one.purpose == "gradients" and on_tpu:
            return 1 - LAST_REDUCTION * _left_share(layout)
        if one.purpose == "gradients":
            return 1.0 if sums_gradients(layout) else 1 - 1 / layers_here(layout, job.model.num_layers)
        if one.purpose == "unembedding":
            return 0.0 if on_tpu else 1 - layout.spec.microbatches / one.count
    return 0.0


def _ring_waits(one: Collective, layout: Layout) -> float:
    """Fraction of a ring's permutes on GPUs that nothing hides.

    The first and the last hop are beside the layer's matmuls; the others are in a loop with one kernel.
    XLA:GPU has one permute under way at a time, so that kernel hides one array of a turn: keys or values, and
    no gradient of them.
    """
    devices = layout.mesh.context
    turns = devices - 2
    return turns / devices if one.dtype == "float32" else turns / (devices - 1) / 2


def _exchange_waits(one: Collective, job: Job) -> float:
    """Fraction of attention's exchanges of heads on GPUs that nothing hides.

    Queries and outputs of the forward pass, and the gradient of the output, have nothing but attention to
    follow them. Keys and values travel beside the products of queries, and those of the backward pass beside
    gradients of weights.
    """
    model, layout = job.model, job.layout
    elements = (
        job.rows()
        * job.seq_len
        // layout.mesh.context
        * model.num_heads
        // layout.mesh.tensor
        * model.head_dim
    )
    waits = 3 * layer_passes(layout, model.num_layers) * elements * itemsize(layout.precision.compute_dtype)
    return min(1.0, waits / one.array_bytes)


def _left_share(layout: Layout) -> float:
    """Share of a layer's reductions over data that XLA:TPU leaves to the end of the layer: its largest
    matrix.

    Attention's weights too if attention is a loop over a ring's hops, because nothing is sent beside that
    loop.
    """
    sizes = {p.info.path: p.info.size for p in layout.params if p.info.is_stacked and p.zero_dim is not None}
    left = max(sizes.values())
    if layout.mesh.context > 2 and attention_is_a_ring(layout):
        left += sum(size for path, size in sizes.items() if path.startswith("layers.attention."))
    return left / sum(sizes.values())
