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
from jtrain.plan.estimate.collectives import DURING_WEIGHT_GRADIENTS, REGATHERED, Collective, collectives
from jtrain.plan.estimate.machine import Machine
from jtrain.plan.estimate.network import seconds
from jtrain.plan.estimate.pipeline import device_layers, layer_passes
from jtrain.plan.job import Job
from jtrain.step.gradient_sums import sums_gradients
from jtrain.step.pipeline_ticks import attention_is_a_ring
from jtrain_kernels import registry
from jtrain_kernels.device import DeviceSpec

LAST_REDUCTION = 0.6
"""Fraction of a layer's largest reduction that a TPU has nothing to compute beside. XLA:TPU ends each turn of
the loop over layers with the reductions that are left: 0.66 and 0.61 of one feed-forward matrix in two
programs for a v5p. XLA:GPU moves all of them to the next turn, so only those of the last layer wait, and
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

    def take(self, collective: Collective, hideable_s: float) -> float:
        """Returns the seconds of `hideable_s` that are hidden, and takes them."""
        is_forward = collective.purpose.endswith("forward")
        # Experts first: their matmuls hide any collective, but an exchange hides behind nothing else.
        by_experts_s = min(hideable_s, self.experts_s)
        self.experts_s -= by_experts_s
        if collective.purpose == EXCHANGE:
            return by_experts_s
        remaining_s = hideable_s - by_experts_s
        if is_forward:
            hidden_s = min(remaining_s, self.forward_s)
            self.forward_s -= hidden_s
        else:
            hidden_s = min(remaining_s, self.backward_s)
            self.backward_s -= hidden_s
            if collective.kind == "collective-permute":  # in both passes
                by_forward_s = min(remaining_s - hidden_s, self.forward_s)
                self.forward_s -= by_forward_s
                hidden_s += by_forward_s
        return by_experts_s + hidden_s


@dataclasses.dataclass(frozen=True)
class CollectiveTime:
    """Seconds per step of the collectives of one purpose, as in `NetworkTime`."""

    collective: Collective
    total_s: float
    exposed_s: float
    waits_s: float


def exposed_network(
    job: Job, machine: Machine, hiding: Hiding, *, efficiency: float, slowdown: float
) -> list[CollectiveTime]:
    """Time of each collective of a step.

    Args:
      hiding: computation that collectives can hide behind; used up.
      efficiency: fraction of the links' bandwidth.
      slowdown: fraction of hidden seconds by which the step is longer nevertheless.
    """
    times: list[CollectiveTime] = []
    # Only experts hide their exchange, so it comes first.
    for collective in sorted(collectives(job), key=lambda collective: collective.purpose != EXCHANGE):
        total_s = seconds(collective, machine, job.layout.mesh.shape, efficiency=efficiency)
        hideable_s = total_s * hideable_fraction(collective, job, machine.device)
        hidden_s = hiding.take(collective, hideable_s)
        # In total; exposed, with what hidden ones slow down; waits, with nothing computed beside them.
        times.append(
            CollectiveTime(collective, total_s, total_s - hidden_s * (1 - slowdown), total_s - hidden_s)
        )
    return times


def by_axes(times: Iterable[CollectiveTime]) -> tuple[NetworkTime, ...]:
    """Time over each set of axes, the most exposed first."""
    rows: dict[tuple[str, ...], list[float]] = {}
    for time in times:
        # In the order of `NetworkTime`'s fields.
        row = rows.setdefault(time.collective.axes, [0.0, 0.0, 0.0])
        row[0] += time.total_s
        row[1] += time.exposed_s
        row[2] += time.waits_s
    return tuple(NetworkTime(axes, *row) for axes, row in sorted(rows.items(), key=lambda item: -item[1][1]))


def hideable_fraction(collective: Collective, job: Job, device: DeviceSpec) -> float:
    """Fraction of a collective that can run at the same time as matmuls, in programs that XLA schedules.

    Weights are fetched for the next matmul, and a ring sends the next keys while the current ones are used.
    Inputs that are gathered again wait for nothing but gradients of weights, if queries, keys and values are
    kept; else a layer is recomputed step by step, and beside that only the gradient of its output is
    gathered. XLA:TPU also computes gradients of weights while gradients of activations are sent. Beside fused
    kernels that need collectives in order, only their own copies run.
    """
    layout, on_tpu = job.layout, device.platform == "tpu"
    if "xla_gpu_disable_async_collectives" in registry.compiler_options(dict(layout.kernels)):
        return float(collective.purpose == "activations" and collective.kind == "collective-permute")
    if collective.purpose == EXCHANGE and job.model.router is not None:
        # The first piece has no matmul to run beside.
        pieces = num_pieces(job.rows() * job.seq_len // layout.mesh.context, job.model.router.top_k)
        return (pieces - 1) / pieces
    if collective.purpose == REGATHERED:
        return 0.5 if collective.feeds_products else 1.0
    if collective.purpose == DURING_WEIGHT_GRADIENTS:
        # XLA:GPU has gradients of weights left for the last sum of a layer alone, that of attention's input.
        return 1.0 if on_tpu else 0.5 * (collective.kind == "reduce-scatter")
    if collective.purpose == "keys and values" and not on_tpu:
        return 1 - _ring_waits(collective, layout)
    if collective.purpose == "heads for positions" and not on_tpu:
        return 1 - _exchange_waits(collective, job)
    if collective.purpose.startswith("parameters") or (
        collective.kind == "collective-permute" and "stage" not in collective.axes
    ):
        return 1.0
    if collective.kind == "reduce-scatter":
        if collective.purpose == "gradients" and not collective.in_layers:
            return 0.0
        if collective.purpose == "gradients" and on_tpu:
            return 1 - LAST_REDUCTION * _trailing_share(layout)
        if collective.purpose == "gradients":
            # Without sums, only the reductions of the last layer have no next turn of the loop.
            return 1.0 if sums_gradients(layout) else 1 - 1 / device_layers(layout, job.model.num_periods)
        if collective.purpose == "unembedding":
            # Of each microbatch's parts of the unembedding one stays exposed.
            return 0.0 if on_tpu else 1 - layout.spec.microbatches / collective.count
    return 0.0


def _ring_waits(collective: Collective, layout: Layout) -> float:
    """Fraction of a ring's permutes on GPUs that nothing hides.

    The first and the last hop are beside the layer's matmuls; the others are in a loop with one kernel.
    XLA:GPU has one permute under way at a time, so that kernel hides one array of a turn: keys or values, and
    no gradient of them.
    """
    devices = layout.mesh.context
    turns = devices - 2
    return turns / devices if collective.dtype == "float32" else turns / (devices - 1) / 2


def _exchange_waits(collective: Collective, job: Job) -> float:
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
    exposed_bytes = (
        3 * layer_passes(layout, model.num_layers) * elements * itemsize(layout.precision.compute_dtype)
    )
    return min(1.0, exposed_bytes / collective.array_bytes)


def _trailing_share(layout: Layout) -> float:
    """Share of a layer's reductions over data that XLA:TPU leaves to the end of the layer: its largest
    matrix.

    Attention's weights too if attention is a loop over a ring's hops, because nothing is sent beside that
    loop.
    """
    sizes = {p.info.path: p.info.size for p in layout.params if p.info.is_stacked and p.zero_dim is not None}
    trailing_size = max(sizes.values())
    # With two devices no hop is left for a loop.
    if layout.mesh.context > 2 and attention_is_a_ring(layout):
        trailing_size += sum(size for path, size in sizes.items() if path.startswith("layers.attention."))
    return trailing_size / sum(sizes.values())
