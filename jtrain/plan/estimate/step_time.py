"""Roofline prediction of a step's time, by parts, and of a run's cost in time, money and energy.

`Assumptions` holds the fractions of peak that are assumed, and every sheet prints them. Parts that the
schedule can overlap (gathers of weights with the layers' matmuls, host copies with both) count only their
exposed time; the other parts add up.
"""

import dataclasses

from jtrain.errors import UserError
from jtrain.layout.layout import Layout
from jtrain.layout.precision import itemsize
from jtrain.pipeline.clocks import Costs
from jtrain.plan.estimate.attention_kernel import attention_s
from jtrain.plan.estimate.collectives import BETWEEN_STAGES
from jtrain.plan.estimate.exposed_network import Hiding, NetworkTime, by_axes, exposed_network
from jtrain.plan.estimate.flops import flops_per_token, mfu
from jtrain.plan.estimate.machine import Machine
from jtrain.plan.estimate.matmul_time import bf16_peak, matmuls, rate_of
from jtrain.plan.estimate.memory import MemoryPlan
from jtrain.plan.estimate.memory_passes import memory_passes
from jtrain.plan.estimate.pipeline_time import StageSeconds, bubble_s, operation_costs
from jtrain.plan.job import Job
from jtrain_kernels.cost import MEMORY
from jtrain_kernels.device import DeviceSpec

_F32 = 4

SECONDS_PER_DAY = 86_400

CPU_ADAM_S_PER_PARAM = 0.25e-9
"""Adam on a host's two sockets: 2.57 s for 10 billion parameters (arXiv:2101.06840, table 4)."""


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """Assumed fractions of the makers' peaks.

    matmul: fraction of peak FLOP/s in matmuls; None for that of the chip, the precision and the shape
      (`jtrain.plan.estimate.matmul_time`). Attention has fractions of its own: `jtrain_kernels.cost`.
    memory, network, torus, host_link: fractions of the bandwidths; `torus` of the links between TPUs.
    slowdown, torus_slowdown: fraction of the seconds of a collective beside matmuls by which the step is
      longer nevertheless: what the collective takes of the memory, of the power and on GPUs of the
      multiprocessors. What has nothing beside it counts whole (`jtrain.plan.estimate.exposed_network`).
    slowest: speed of the slowest of several GPUs, for which all others wait at every collective, by the speed
      of one alone; their clocks differ with power and heat. Up to 6 % are reported (arXiv:2511.09861).
    computation: seconds of matmuls, attention and passes over memory by those predicted, as a run measured.
    """

    matmul: float | None = None
    memory: float = MEMORY
    network: float = 0.8
    torus: float = 0.9
    host_link: float = 0.8
    slowdown: float = 0.4
    torus_slowdown: float = 0.1
    slowest: float = 0.94
    computation: float = 1.0

    def network_of(self, device: DeviceSpec) -> float:
        """Fraction of the bandwidth of a device's links."""
        return self.torus if device.torus_dims else self.network

    def slowdown_of(self, device: DeviceSpec) -> float:
        """Fraction of hidden collectives that a step on this device is longer by."""
        return self.torus_slowdown if device.torus_dims else self.slowdown

    def slowest_of(self, device: DeviceSpec, devices: int) -> float:
        """Speed of the slowest of several devices; TPUs of a slice have one clock."""
        return self.slowest if device.platform == "gpu" and devices > 1 else 1.0

    def of(self, device: DeviceSpec, *, devices: int, in_8_bits: bool) -> str:
        """The assumptions for a step on `devices` of a kind, with the layers' matmuls in 8 bits or not, in
        one line.
        """
        rate = rate_of(device).fp8 if in_8_bits else rate_of(device).bf16
        matmul = f"up to {rate:.0%}" if self.matmul is None else f"{self.matmul:.0%}"
        slowest = self.slowest_of(device, devices)
        return (
            f"assumed: {matmul} of peak in {'8-bit ' if in_8_bits else ''}matrix products, {self.memory:.0%} "
            f"of memory bandwidth, {self.network_of(device):.0%} of the network's, {self.host_link:.0%} of "
            "the host link's; gathers of weights overlap with compute but for "
            f"{self.slowdown_of(device):.0%}, "
            "copies to and from the host in the layers wholly, tensor-parallel and end-of-step collectives "
            "not" + (f"; the slowest device has {slowest:.0%} of the others' speed" if slowest < 1 else "")
        )


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Predicted time of a step, by part.

    matmul_s: matmuls without attention's, also recomputed ones; attention_s: attention, by the implementation
      chosen for the machine; passes_s: norms, SwiGLU, the loss and other passes over memory; accumulate_s:
      the sum over microbatches; optimizer_s: the update, bound by memory, or by the host's cores under
      layout.offload.update=host.
    bubble_s: waiting for other pipeline stages; costs: seconds of a pipeline's operations.
    slowest_s: waiting for the slowest device.
    network: collectives by mesh axes. host_copy_s: copies of offloaded arrays; exposed_host_s: their exposed
      part.
    tokens: tokens per step; mfu: model FLOPs utilisation.
    """

    matmul_s: float
    attention_s: float
    passes_s: float
    accumulate_s: float
    optimizer_s: float
    network: tuple[NetworkTime, ...]
    host_copy_s: float
    exposed_host_s: float
    tokens: int
    mfu: float
    bubble_s: float = 0.0
    slowest_s: float = 0.0
    costs: Costs | None = None

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of each part; their sum is the step."""
        part_s = {
            "matrix products": self.matmul_s,
            "attention": self.attention_s,
            "passes over memory": self.passes_s,
            "accumulation": self.accumulate_s,
            "optimizer": self.optimizer_s,
        }
        part_s |= {"pipeline bubble": self.bubble_s} if self.bubble_s else {}
        part_s |= {"slowest device": self.slowest_s} if self.slowest_s else {}
        part_s |= {f"network, {' * '.join(row.axes)}": row.exposed_s for row in self.network}
        return part_s | {"host copies": self.exposed_host_s}

    @property
    def waits_s(self) -> float:
        """Seconds of collectives in which the device computes nothing."""
        return sum((row.waits_s for row in self.network), 0.0)

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
    """Cost of training on `tokens`: wall time including goodput, device hours, money and energy; None if
    unknown.
    """

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
    """Predicts the time of one step. Not counted: the matmuls of Muon's update, and the casts of 8-bit
    matmuls.

    Args:
      plan: memory plan of the same job; its host bytes are the bytes that are copied.

    Raises:
      UserError: the device's peak for the compute dtype or for 8-bit matmuls, the speed of the host link that
        an offload needs, or that of the network that the mesh needs is not published.
    """
    assert job.machine is not None, "a step time is that of a machine"
    layout, device = job.layout, job.machine.device
    spec, mesh = layout.spec, layout.mesh
    assert device.hbm_bytes_per_s is not None
    hbm = device.hbm_bytes_per_s * assume.memory
    multiply = matmuls(job, memory=assume.memory, fraction=assume.matmul).scaled(assume.computation)
    passes = memory_passes(job, hbm / assume.computation)
    attention_forward_s, attention_backward_s = (assume.computation * pass_s for pass_s in attention_s(job))
    forward_s = multiply.layers["forward"] + attention_forward_s + passes.forward_s
    by_input_s = (
        # What is computed again runs in the backward pass, right before the gradients that need it.
        multiply.layers["by_input"] + multiply.layers["again"] + attention_backward_s + passes.backward_s
    )
    by_weight_s = multiply.layers["by_weight"]
    accumulated = sum(layout.local_size(p.accumulator_partition, p.info.shape) for p in layout.trained)
    gradient_bytes = itemsize(layout.precision.param_dtype)
    # The sum is read and written, the new gradient is read.
    bytes_per_sum = 2 * itemsize(layout.precision.grad_accum_dtype) + gradient_bytes
    accumulate_s = spec.microbatches * accumulated * bytes_per_sum / hbm if spec.microbatches > 1 else 0.0

    optimizer_s, state_copy_s = _update(layout, plan, job.machine, assume, hbm)
    all_attention_s = attention_forward_s + attention_backward_s
    compute_s = multiply.all_s + all_attention_s + passes.all_s + accumulate_s
    experts_s = multiply.experts_s + passes.experts_s
    hiding = Hiding(forward_s, by_input_s + by_weight_s, experts_s)
    if experts_s:  # forward and backward pass have them in proportion
        dense_share = 1 - experts_s / (forward_s + by_input_s + by_weight_s)
        hiding = dataclasses.replace(
            hiding, forward_s=forward_s * dense_share, backward_s=(by_input_s + by_weight_s) * dense_share
        )
    efficiency, slowdown = assume.network_of(device), assume.slowdown_of(device)
    collective_times = exposed_network(job, job.machine, hiding, efficiency=efficiency, slowdown=slowdown)
    forward_copy_s, backward_copy_s, copy_s = _loop_copies(layout, plan, job.machine, assume)
    # Each pass hides copies behind its own computation only: time to spare in one does not help the other.
    exposed_loop_s = max(0.0, forward_copy_s - forward_s) + max(
        0.0, backward_copy_s - by_input_s - by_weight_s
    )
    if plan.total_bytes > job.machine.hbm_bytes and job.machine.room_bytes(spec) > job.machine.hbm_bytes:
        # Pages that do not fit, the optimizer's first, move to the device and back once per step.
        pages_s = 2 * (plan.total_bytes - job.machine.hbm_bytes) / _host_link(job.machine, assume)
        copy_s, exposed_loop_s = copy_s + pages_s, exposed_loop_s + pages_s
    timed = StepTime(
        multiply.all_s,
        all_attention_s,
        passes.all_s,
        accumulate_s,
        optimizer_s,
        by_axes(collective_times),
        copy_s + state_copy_s,
        exposed_loop_s + max(0.0, state_copy_s - optimizer_s),
        tokens=job.tokens,
        mfu=0.0,
        # Collectives and copies do not depend on a device's clock.
        slowest_s=compute_s * (1 / assume.slowest_of(device, mesh.size) - 1),
    )
    if layout.pipeline is not None:
        waits_s = sum((time.exposed_s for time in collective_times if time.collective.in_layers), 0.0)
        # Sums are added to where gradients of weights are made: in W, or in an unsplit B.
        stage_seconds = StageSeconds(forward_s, by_input_s, by_weight_s + accumulate_s, waits_s)
        # A pipeline has exactly one such collective; otherwise unpacking fails.
        [message_s] = [
            time.total_s / time.collective.count
            for time in collective_times
            if time.collective.purpose == BETWEEN_STAGES
        ]
        costs = operation_costs(layout, stage_seconds, message_s=message_s)
        timed = dataclasses.replace(timed, costs=costs, bubble_s=bubble_s(layout, stage_seconds, costs))
    flops, rate = flops_per_token(job.model, seq_len=job.seq_len, infos=job.layout.infos), timed.tokens_per_s
    utilisation = mfu(flops, tokens_per_s=rate, num_devices=mesh.size, peak_flops=bf16_peak(job))
    assert utilisation is not None
    return dataclasses.replace(timed, mfu=utilisation)


def cost(
    timed: StepTime, machine: Machine, *, tokens: int, goodput: float, usd_per_hour: float | None = None
) -> Cost:
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


def _update(
    layout: Layout, plan: MemoryPlan, machine: Machine, assume: Assumptions, hbm: float
) -> tuple[float, float]:
    """Seconds of the update, and of the copies of offloaded state; both directions of the link run at
    once.
    """
    elements = sum(layout.local_size(p.optimizer_partition, p.info.shape) for p in layout.trained)
    state = plan.optimizer + plan.host_optimizer
    # Gradients are read twice, for their norm and for the update; parameters and state are read and written.
    device_s = (elements * (2 * _F32 + 2 * itemsize(layout.precision.param_dtype)) + 2 * state) / hbm
    if not plan.host_argument_bytes + plan.host_gradients:
        return device_s, 0.0
    link = _host_link(machine, assume)
    # Sums in host memory come to the device for the norm first, before any update can begin.
    norm_s = plan.host_gradients / link
    if not layout.updates_on_host or not plan.host_optimizer:
        return device_s, norm_s + (plan.host_argument_bytes + plan.host_gradients) / link
    share = plan.host_optimizer / state
    # The figure is of a whole host, whose cores update the shards of all its devices.
    on_host_s = elements * share * CPU_ADAM_S_PER_PARAM * machine.devices_per_host
    # Gradients are copied to the host, unless their sums are there; parameters back.
    gradient_bytes = 0 if plan.host_gradients else elements * share * _F32
    param_bytes = elements * share * itemsize(layout.precision.param_dtype)
    return device_s * (1 - share) + on_host_s, norm_s + (
        gradient_bytes + param_bytes + plan.host_parameters
    ) / link


def _loop_copies(
    layout: Layout, plan: MemoryPlan, machine: Machine, assume: Assumptions
) -> tuple[float, float, float]:
    """Seconds of copies beside the layers' forward pass, beside their backward pass, and of all copies.

    Both passes fetch parameters, and the backward pass activations, one layer ahead. The forward pass stores
    activations while it fetches: the link runs both ways at once. Sums of gradients are fetched in the first
    half of a layer's backward pass and stored in the second.
    """
    if not (plan.host_parameters or plan.host_activations or plan.host_gradients):
        return 0.0, 0.0, 0.0
    s_per_byte = layout.spec.microbatches / _host_link(machine, assume)
    fetched_s, saved_s, sums_s = (
        s_per_byte * size for size in (plan.host_parameters, plan.host_activations, plan.host_gradients)
    )
    # A single microbatch has no sum to fetch, and only stores its gradients.
    all_sums_s = sums_s * (1 if layout.spec.microbatches == 1 else 2)
    return max(fetched_s, saved_s), fetched_s + saved_s + all_sums_s, 2 * (fetched_s + saved_s) + all_sums_s


def _host_link(machine: Machine, assume: Assumptions) -> float:
    """Bytes/s between a device and host memory.

    Raises:
      UserError: they are not published.
    """
    speed = machine.device.host.link_bytes_per_s
    if speed is None:
        raise UserError(
            "layout.offload copies to host memory, but the speed of that link is not published for "
            f"{machine.device.name}. Set layout.offload.optimizer, .params, .activations and .gradients to "
            "none."
        )
    return speed * assume.host_link
