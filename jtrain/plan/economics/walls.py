"""Walls of a training run that has to end in time: its size when data movement or latency stops it.

A larger model needs more devices to finish in the same days, but its batch does not grow with them. Each
device gets fewer tokens, pipelines get fewer microbatches and gradients less time to hide behind, until
devices wait: the data-movement wall. Beyond it more devices still help a little, down to one matmul and one
collective after the other through all layers, which no number of devices shortens: the latency wall.

Runs are of dense transformers with N parameters, 20 N tokens and 120 N^2 FLOP, whose width is 128 times the
layers. The best layout over data, tensor and pipeline axes is searched for, in closed form, with the
planner's rates of chip and network. Everything is hidden that can be hidden, so the walls are optimistic. The
idea is that of E. Erdil and D. Schneider-Joseph, Data movement limits to frontier model training
(arXiv:2411.01137), whose constants were not at hand: this model claims that both walls exist and move with
batch and latency, not that they are where the paper has them.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

from jtrain.plan.estimate.machine import Machine
from jtrain.plan.estimate.matmul_time import rate_of
from jtrain.plan.estimate.network import ring
from jtrain.plan.estimate.step_time import SECONDS_PER_DAY, Assumptions
from jtrain_kernels.device import DeviceSpec

PUBLISHED_FLOP = {"data movement": 2e28, "latency": 2e31}
"""Walls of a three-month run in the paper, for H100-like chips and batches that grow with the run."""

TOKENS_PER_PARAMETER = 20
ASPECT = 128
"""Width by layers: about that of Llama 3 8B and 405B."""

SERIAL = 4
"""Collectives of a layer that wait for each other in one step: two in the forward pass, two in the backward
pass."""

LINEAR = 0.8
"""Share of a device's own matmul rate from which on a run still scales linearly."""

_BF16 = 2
_TENSOR, _STAGES, _CHUNKS = 2.0 ** np.arange(11), 2.0 ** np.arange(13), 2.0 ** np.arange(5)
_DATA, _TOKENS = 2.0 ** np.arange(24), 2.0 ** np.arange(4, 15)

type Times = Float[np.ndarray, "t d p v b"]
"""One number per layout: tensor, data and pipeline axes, chunks of a stage, tokens of a microbatch."""


@dataclasses.dataclass(frozen=True)
class RunSize:
    """A dense transformer of `flop` FLOP of training; layers and width are not rounded."""

    flop: float

    @property
    def parameters(self) -> float:
        """Parameters, without embeddings."""
        # flop = 6 N * tokens = 120 N^2, solved for N.
        return math.sqrt(self.flop / 6 / TOKENS_PER_PARAMETER)

    @property
    def tokens(self) -> float:
        """Tokens that it is trained on."""
        return TOKENS_PER_PARAMETER * self.parameters

    @property
    def layers(self) -> float:
        """Layers, of 12 width^2 parameters each."""
        # N = 12 layers * width^2 = 12 ASPECT^2 layers^3, solved for the layers.
        return (self.parameters / 12 / ASPECT**2) ** (1 / 3)

    @property
    def width(self) -> float:
        """Width of the residual stream."""
        return ASPECT * self.layers


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Chips of one kind, as many as wanted, and the run's limits.

    seconds: time in which a run has to end. batch_tokens: tokens of a step.
    latency_s: seconds of one matmul with its collective on no data.
    """

    device: DeviceSpec
    seconds: float
    batch_tokens: float
    latency_s: float

    @property
    def flops(self) -> float:
        """FLOP/s of one device in large matmuls."""
        assert self.device.peak_bf16_flops is not None
        return self.device.peak_bf16_flops * rate_of(self.device).bf16

    def changed(self, *, batch: float = 1.0, latency: float = 1.0) -> "Cluster":
        """The same with the batch and the latency multiplied."""
        return dataclasses.replace(
            self, batch_tokens=self.batch_tokens * batch, latency_s=self.latency_s * latency
        )


@dataclasses.dataclass(frozen=True)
class BestLayout:
    """The fastest layout for a run.

    share: FLOP/s by those of its devices' matmuls alone. days: time of the whole run.
    times_s: seconds of a step by cause; all but the pipeline bubble and the latency run side by side.
    """

    shape: RunSize
    tensor: int
    data: int
    stages: int
    share: float
    days: float
    times_s: Mapping[str, float]

    @property
    def devices(self) -> int:
        """Devices of the layout."""
        return self.tensor * self.data * self.stages

    @property
    def binds(self) -> str:
        """The cause beside computation that takes the most time."""
        return max(
            (name for name in self.times_s if name != "computation"), key=lambda name: self.times_s[name]
        )


def collective_latency_s(device: DeviceSpec) -> float:
    """Seconds of an all-reduce of nothing between two linked devices, by the constants of `network.py`.

    Raises:
      UserError: no links join two devices, and the network between them is not published.
    """
    # Two devices are the fewest, with the shortest ring.
    return ring(Machine(device, 2), {"tensor": 2}, ("tensor",)).latency_s("all-reduce")


@functools.cache
def _bandwidths(device: DeviceSpec) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes/s of a device along the tensor axis [t], and along the data and the pipeline axis [t, d]."""
    share = Assumptions().network_of(device)

    def along(axis: str, shape: dict[str, int]) -> float:
        # No smaller than a domain, so that small shapes lie within the links.
        machine = Machine(device, max(device.linked, math.prod(shape.values())))
        return share * ring(machine, shape, (axis,)).bytes_per_s

    tensor = [along("tensor", {"tensor": int(t)}) for t in _TENSOR]
    data = [[along("data", {"data": int(d), "tensor": int(t)}) for d in _DATA] for t in _TENSOR]
    # By the product of the inner axes: a stage's neighbour is that many devices away.
    inner = {
        n: along("stage", {"stage": 2, "tensor": n}) for n in {int(t * d) for t in _TENSOR for d in _DATA}
    }
    stage = [[inner[int(t * d)] for d in _DATA] for t in _TENSOR]
    return np.array(tensor), np.array(data), np.array(stage)


def best_layout(flop: float, cluster: Cluster, *, max_devices: int | None = None) -> BestLayout | None:
    """The layout that uses its devices best of those that end the run in time; None if none does.

    Args:
      max_devices: devices of the cluster; None for as many as wanted. The data axis then need not be a power
        of two.

    Raises:
      UserError: the speed of the network between hosts is not published.
    """
    shape = RunSize(flop)
    t, d, p, v, b = np.ix_(_TENSOR, _DATA, _STAGES, _CHUNKS, _TOKENS)
    tensor_w, data_w, stage_w = _bandwidths(cluster.device)
    assert cluster.device.hbm_bytes_per_s is not None
    hbm = cluster.device.hbm_bytes_per_s * Assumptions().memory
    weights = 12 * shape.width**2  # of a layer
    # Scales all sizes of the data axis, so that one of them uses every device.
    if max_devices is not None:
        d = d * (max_devices / 2 ** math.floor(math.log2(max_devices)))
    devices = t * d * p
    # Of one replica and step; fractions are allowed, as in the whole model.
    microbatches = cluster.batch_tokens / d / b
    stage_layers = shape.layers / p

    # Of a layer and microbatch, in both passes; the backward pass is twice the forward pass.
    # 6: a multiplication and an addition per weight and token, in three passes.
    compute = 6 * weights * b / t / cluster.flops
    memory = 3 * weights * _BF16 / t / hbm
    # 8: SERIAL all-reduces, each a reduce-scatter and an all-gather of the residual stream.
    sent = 8 * _BF16 * b * shape.width * (t - 1) / t / tensor_w.reshape(-1, 1, 1, 1, 1)
    latency = SERIAL * cluster.latency_s
    # 2 v: each chunk sends activations on and gets their gradients back; tensor shards send their parts.
    hops = np.where(p > 1, 2 * v * _BF16 * b * shape.width / t / stage_w[:, :, None, None, None], 0.0)
    layers = stage_layers * (np.maximum(np.maximum(compute, memory), sent) + latency)
    # A pipeline's fill and drain cost p - 1 chunks, each 1 / v of a stage.
    slots = microbatches + (p - 1) / v
    # Sends between stages hide behind the layers, so the longer of the two counts.
    piped = slots * np.maximum(layers, hops)
    # Reduce-scatter and all-gather of the stage's weights, beside the whole step.
    gradients = 2 * _BF16 * weights * stage_layers / t * (d - 1) / d / data_w[:, :, None, None, None]
    step = np.maximum(piped, gradients)

    wall_s = shape.tokens / cluster.batch_tokens * step
    share = 6 * shape.parameters * cluster.batch_tokens / (devices * cluster.flops * step)
    # A chunk has at least one layer, and a replica at least one microbatch.
    is_possible = (p * v <= shape.layers) & (microbatches >= 1) & (t <= shape.width)
    is_possible = is_possible & (wall_s <= cluster.seconds) & (devices <= (max_devices or math.inf))
    # 0 marks what is impossible; every possible share is above it.
    score = np.where(is_possible, share, 0.0)
    best_index = np.unravel_index(np.argmax(score), score.shape)
    if not score[best_index]:
        return None

    def at_best(values: np.ndarray) -> float:
        return float(np.broadcast_to(values, score.shape)[best_index])

    layer_passes = at_best(microbatches * stage_layers)
    return BestLayout(
        shape,
        int(_TENSOR[best_index[0]]),
        round(at_best(d)),
        int(_STAGES[best_index[2]]),
        float(score[best_index]),
        at_best(wall_s) / SECONDS_PER_DAY,
        {
            "computation": layer_passes * at_best(compute),
            "weights from memory": layer_passes * at_best(memory),
            "tensor-parallel network": layer_passes * at_best(sent),
            "activations between stages": at_best(microbatches * hops),
            "gradients over the network": at_best(gradients),
            "pipeline bubble": at_best((slots - microbatches) * np.maximum(layers, hops)),
            "latency": layer_passes * latency,
        },
    )


def data_wall(cluster: Cluster) -> BestLayout | None:
    """The largest run that still scales linearly; None if not even the smallest does.

    Raises:
      UserError: the speed of the network between hosts is not published.
    """
    return _largest(cluster, LINEAR, None)


def largest_run(cluster: Cluster, devices: int) -> BestLayout | None:
    """The largest run that this many devices end in time; None if not even the smallest."""
    return _largest(cluster, 0.0, devices)


def _largest(cluster: Cluster, min_share: float, devices: int | None) -> BestLayout | None:
    """The largest run that some layout ends in time with at least this share of its devices' rate, to 1 %."""
    low, high, largest = 20.0, 40.0, None  # log10 of the FLOP
    # 0.004 of log10 is 1 %.
    while high - low > 0.004:
        middle = (low + high) / 2
        best = best_layout(10**middle, cluster, max_devices=devices)
        if best is not None and best.share >= min_share:
            low, largest = middle, best
        else:
            high = middle
    return largest


def latency_wall(cluster: Cluster) -> RunSize:
    """The largest run that can end in time on any number of devices: every layer waits for its collectives.

    Steps take at least layers * SERIAL * latency, and there are tokens / batch of them.
    """
    # seconds = 20 N / batch * (N / 12 / ASPECT^2)^(1/3) * SERIAL * latency
    per_parameter = TOKENS_PER_PARAMETER / cluster.batch_tokens * SERIAL * cluster.latency_s
    parameters = (cluster.seconds / per_parameter * (12 * ASPECT**2) ** (1 / 3)) ** (3 / 4)
    return RunSize(6 * TOKENS_PER_PARAMETER * parameters**2)
