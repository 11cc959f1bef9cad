"""Roofline prediction of a step's time, by parts, and of a run's cost in time, money and energy.

`Assumptions` holds the fractions of peak that are assumed, and every sheet prints them. Parts that the schedule can
overlap (gathers of weights with the layers' matmuls, host copies with both) count only their exposed time; the other
parts add up.
"""

import dataclasses
import math

from jtrain.dims import kv_heads_in_use
from jtrain.errors import UserError
from jtrain.layout import Layout
from jtrain.mesh import BATCH_AXES, ZERO_AXES
from jtrain.model.saved_activations import kept_names
from jtrain.pipeline.clocks import Costs
from jtrain.plan.estimate.attention_time import attention_s
from jtrain.plan.estimate.collectives import BETWEEN_STAGES, Collective, collectives
from jtrain.plan.estimate.machine import Machine
from jtrain.plan.estimate.memory import MemoryPlan
from jtrain.plan.estimate.network import seconds
from jtrain.plan.estimate.pipeline import layers_here
from jtrain.plan.estimate.pipeline_time import StageSeconds, bubble_s, in_layers, operation_costs
from jtrain.plan.job import Job
from jtrain.precision import itemsize
from jtrain_kernels import registry
from jtrain_kernels.cost import MATMUL, MEMORY
from jtrain_kernels.device import DeviceSpec

_F32 = 4

SECONDS_PER_DAY = 86_400

CPU_ADAM_S_PER_PARAM = 0.25e-9
"""Adam on a host's two sockets: 2.57 s for 10 billion parameters (arXiv:2101.06840, table 4)."""


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """Assumed fractions of the makers' peaks, and of the wall time that trains.

    matmul: fraction of peak FLOP/s in matmuls and the operations fused with them, at the clock under load. Attention
      has fractions of its own, per implementation: `jtrain_kernels.cost`.
    memory, network, host_link: fractions of the bandwidths.
    goodput: fraction of wall time that trains; Llama 3 405B had over 0.9 (arXiv:2407.21783, section 3.3.4).
    """

    matmul: float = MATMUL
    memory: float = MEMORY
    network: float = 0.8
    host_link: float = 0.8
    goodput: float = 0.9

    def __str__(self) -> str:
        return (
            f"assumed: {self.matmul:.0%} of peak in matrix products, {self.memory:.0%} of memory bandwidth, "
            f"{self.network:.0%} of the network's, {self.host_link:.0%} of the host link's; gathers of weights and "
            "host copies overlap with compute, tensor-parallel and end-of-step collectives do not"
        )


@dataclasses.dataclass(frozen=True)
class NetworkTime:
    """Seconds per step of all collectives over the same axes: in total, and exposed (not overlapped with compute)."""

    axes: tuple[str, ...]
    total_s: float
    exposed_s: float


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Predicted time of a step, by part.

    matmul_s: matmuls without attention's, also recomputed ones; attention_s: attention, by the implementation chosen
      for the machine; accumulate_s: the sum over microbatches; optimizer_s: the update, bound by memory, or by the
      host's cores under layout.offload.update=host.
    bubble_s: waiting for other pipeline stages; costs: seconds of a pipeline's operations.
    network: collectives by mesh axes. host_copy_s: copies of offloaded arrays; exposed_host_s: their exposed part.
    tokens: tokens per step; mfu: model FLOPs utilisation.
    """

    matmul_s: float
    attention_s: float
    accumulate_s: float
    optimizer_s: float
    network: tuple[NetworkTime, ...]
    host_copy_s: float
    exposed_host_s: float
    tokens: int
    mfu: float
    bubble_s: float = 0.0
    costs: Costs | None = None

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of each part; their sum is the step."""
        named = {
            "matrix products": self.matmul_s,
            "attention": self.attention_s,
            "accumulation": self.accumulate_s,
            "optimizer": self.optimizer_s,
        }
        named |= {"pipeline bubble": self.bubble_s} if self.bubble_s else {}
        named |= {f"network, {' * '.join(row.axes)}": row.exposed_s for row in self.network}
        return named | {"host copies": self.exposed_host_s}

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return sum(self.parts.values())

    @property
    def tokens_per_s(self) -> float:
        """Training rate over all devices."""
        return self.tokens / self.step_s


@dataclasses.dataclass(frozen=True)
class Cost:
    """Cost of training on `tokens`: wall time including goodput, device hours, money and energy; None if unknown."""

    tokens: int
    wall_s: float
    device_hours: float
    usd: float | None
    energy_j: float | None

    @property
    def days(self) -> float:
        """Wall time in days."""
        return self.wall_s / SECONDS_PER_DAY


def step_time(job: Job, plan: MemoryPlan, *, assume: Assumptions = Assumptions()) -> StepTime:
    """Predicts the time of one step. Not counted: the matmuls of Muon's update, and the casts of 8-bit matmuls.

    Args:
      plan: memory plan of the same job; its host bytes are the bytes that are copied.

    Raises:
      UserError: the device's peak for the compute dtype or for 8-bit matmuls, the speed of the host link that an
        offload needs, or that of the network that the mesh needs is not published.
    """
    assert job.machine is not None, "a step time is that of a machine"
    layout, device = job.layout, job.machine.device
    spec, mesh = layout.spec, layout.mesh
    peak = device.peak_flops(layout.precision.compute_dtype)
    if peak is None:
        raise UserError(
            f"precision.compute_dtype={layout.precision.compute_dtype}: its peak on {device.name} is not published, "
            "so no step time can be predicted. Set precision.compute_dtype=bfloat16."
        )
    assert device.hbm_bytes_per_s is not None
    hbm = device.hbm_bytes_per_s * assume.memory
    shards = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    tokens = job.global_batch // shards * job.seq_len // mesh.context  # per device, or per group along `tensor`

    flops, again = _forward_flops(job)
    weights = sum(layout.local_size(p.spec(over_data=False), p.info.shape) for p in layout.params if p.info.is_matrix)
    weights *= itemsize(layout.precision.compute_dtype)
    passes = 3 + (again > 0)
    forward = flops.layers + flops.shared - flops.attention  # with the layers' weights
    part = layers_here(layout, job.model.num_layers) / job.model.num_layers  # of the layers, on one device
    by_weights = part * (3 * forward + again)
    seconds_per_token = 3 * flops.unembedding / mesh.stage / peak + by_weights / _weights_peak(layout, device, peak)
    matmul_s = max(tokens * seconds_per_token / mesh.tensor / assume.matmul, spec.microbatches * passes * weights / hbm)
    recomputed = (kept := kept_names(layout)) is not None and "attention" not in kept
    forward_s, backward_s = attention_s(job)
    all_attention_s = part * (forward_s * (1 + recomputed) + backward_s)
    accumulator = sum(layout.local_size(p.accumulator, p.info.shape) for p in layout.params)
    grad = itemsize(layout.precision.param_dtype)
    accumulate_s = spec.microbatches * accumulator * (2 * _F32 + grad) / hbm if spec.microbatches > 1 else 0.0

    optimizer_s, state_copy_s = _update(layout, plan, job.machine, assume, hbm)
    compute_s = matmul_s + all_attention_s + accumulate_s
    sent = _network(job, job.machine, assume, compute_s)
    loop_copy_s = _loop_copies(layout, plan, job.machine, assume)
    exposed_host_s = max(0.0, loop_copy_s - compute_s) + max(0.0, state_copy_s - optimizer_s)
    timed = StepTime(
        matmul_s,
        all_attention_s,
        accumulate_s,
        optimizer_s,
        _by_axes(sent),
        loop_copy_s + state_copy_s,
        exposed_host_s,
        tokens=job.tokens,
        mfu=0.0,
    )
    if layout.pipeline is not None:
        layers_s = matmul_s * by_weights / _weights_peak(layout, device, peak) / seconds_per_token  # without the loss
        once_s = layers_s * forward / (3 * forward + again)  # of a forward pass
        spent = StageSeconds(
            once_s + part * forward_s,
            layers_s - 2 * once_s + all_attention_s - part * forward_s,
            once_s + accumulate_s,
            sum((exposed for one, _, exposed in sent if in_layers(one, layout)), 0.0),
        )
        [message_s] = [took / one.count for one, took, _ in sent if one.purpose == BETWEEN_STAGES]
        costs = operation_costs(layout, spent, message_s=message_s)
        timed = dataclasses.replace(timed, costs=costs, bubble_s=bubble_s(layout, spent, costs))
    # The same count as `flops.py`, but without a loop over all parameters: a search needs it thousands of times.
    model_flops = 3 * (flops.layers + flops.unembedding)
    return dataclasses.replace(timed, mfu=model_flops * timed.tokens_per_s / (mesh.size * peak))


def _weights_peak(layout: Layout, device: DeviceSpec, peak: float) -> float:
    """Peak FLOP/s of matmuls with the layers' weights.

    Raises:
      UserError: matmuls are in 8 bits, and this device has none.
    """
    if layout.precision.matmul_dtype == "compute":
        return peak
    if device.peak_fp8_flops is None:
        raise UserError(
            f"precision.matmul_dtype={layout.precision.matmul_dtype}: {device.name} has no 8-bit matmuls. Set "
            "precision.matmul_dtype=compute."
        )
    return device.peak_fp8_flops


def cost(timed: StepTime, machine: Machine, *, tokens: int, goodput: float, usd_per_hour: float | None = None) -> Cost:
    """Cost of training on `tokens` at the predicted speed.

    Args:
      goodput: fraction of wall time that trains.
      usd_per_hour: price of one device; None leaves the money unknown.
    """
    wall_s = tokens / timed.tokens_per_s / goodput
    hours = wall_s / 3600 * machine.count
    power = machine.device.power_w
    return Cost(
        tokens,
        wall_s,
        hours,
        usd=None if usd_per_hour is None else hours * usd_per_hour,
        energy_j=None if power is None else wall_s * machine.count * power,
    )


@dataclasses.dataclass(frozen=True)
class _Forward:
    """FLOPs of a forward pass per token: layers with attention, attention alone, and the unembedding.

    shared: projections to shared key heads that devices along `tensor` repeat; not counted in `layers`.
    """

    layers: int
    attention: int
    unembedding: int
    shared: int


def _forward_flops(job: Job) -> tuple[_Forward, int]:
    """FLOPs of a forward pass per token, and those with weights that the backward pass recomputes.

    The last matmul of a layer is never recomputed, because no gradient needs its result.
    """
    model = job.model
    width, heads = model.d_model, model.num_heads * model.head_dim
    kv_heads = kv_heads_in_use(model.num_kv_heads, job.layout.mesh.tensor)
    of = {
        "attention_q": 2 * width * heads,
        "attention_k": 2 * width * kv_heads * model.head_dim,
        "attention_v": 2 * width * kv_heads * model.head_dim,
        "attention": 2 * heads * job.seq_len,
        "attention_out": 2 * heads * width,
        "mlp_gate": 2 * width * model.active_d_ff,
        "mlp_up": 2 * width * model.active_d_ff,
    }
    down = 2 * width * model.active_d_ff + (2 * width * model.moe.num_experts if model.moe else 0)  # with the router
    kept = kept_names(job.layout)
    dropped = () if kept is None else [name for name in of if name not in kept and name != "attention"]
    again = model.num_layers * sum(of[name] for name in dropped)
    shared = 4 * width * (kv_heads - model.num_kv_heads) * model.head_dim
    layers = model.num_layers * (sum(of.values()) - shared + down)
    forward = _Forward(
        layers, model.num_layers * of["attention"], 2 * width * model.vocab_size, model.num_layers * shared
    )
    return forward, again


def _update(layout: Layout, plan: MemoryPlan, machine: Machine, assume: Assumptions, hbm: float) -> tuple[float, float]:
    """Seconds of the update, and of the copies of offloaded state; both directions of the link run at once."""
    spec = layout.spec
    elements = sum(layout.local_size(p.optimizer, p.info.shape) for p in layout.params)
    state = plan.optimizer + plan.host_optimizer
    # Gradients are read twice, for their norm and for the update; parameters and state are read and written.
    device_s = (elements * (2 * _F32 + 2 * itemsize(layout.precision.param_dtype)) + 2 * state) / hbm
    if not plan.host_argument_bytes:
        return device_s, 0.0
    link = _host_link(machine, assume)
    if spec.offload.update == "device" or not plan.host_optimizer:
        return device_s, plan.host_argument_bytes / link
    share = plan.host_optimizer / state
    on_host_s = elements * share * CPU_ADAM_S_PER_PARAM * machine.devices_per_host
    # Gradients are copied to the host, parameters back.
    copies_s = (elements * share * (_F32 + itemsize(layout.precision.param_dtype)) + plan.host_parameters) / link
    return device_s * (1 - share) + on_host_s, copies_s


def _loop_copies(layout: Layout, plan: MemoryPlan, machine: Machine, assume: Assumptions) -> float:
    """Seconds of copies in the layers: parameters are fetched for both passes, activations are stored and fetched."""
    if not (plan.host_parameters or plan.host_activations):
        return 0.0
    link = _host_link(machine, assume)
    return layout.spec.microbatches * 2 * (plan.host_parameters + plan.host_activations) / link


def _host_link(machine: Machine, assume: Assumptions) -> float:
    """Bytes/s between a device and host memory.

    Raises:
      UserError: they are not published.
    """
    speed = machine.device.host.link_bytes_per_s
    if speed is None:
        raise UserError(
            f"layout.offload copies to host memory, but the speed of that link is not published for "
            f"{machine.device.name}. Set layout.offload.optimizer, .params and .activations to none."
        )
    return speed * assume.host_link


type _Sent = list[tuple[Collective, float, float]]
"""Collectives with their seconds per step: in total, and exposed."""


def _network(job: Job, machine: Machine, assume: Assumptions, compute_s: float) -> _Sent:
    """Time of each collective. Those that overlap with the layers are hidden by them, in their order."""
    found: _Sent = []
    for one in collectives(job):
        took = seconds(one, machine, job.layout.mesh.shape, efficiency=assume.network)
        hidden = 0.0
        if beside_the_layers(one, job.layout, machine.device):
            hidden = min(took, compute_s)
            compute_s -= hidden
        found.append((one, took, took - hidden))
    return found


def _by_axes(sent: _Sent) -> tuple[NetworkTime, ...]:
    """Time over each set of axes, the most exposed first."""
    rows: dict[tuple[str, ...], list[float]] = {}
    for one, took, exposed in sent:
        row = rows.setdefault(one.axes, [0.0, 0.0])
        row[0] += took
        row[1] += exposed
    return tuple(NetworkTime(axes, *row) for axes, row in sorted(rows.items(), key=lambda item: -item[1][1]))


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
