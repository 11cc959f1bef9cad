"""What a step takes and what a run costs, predicted from the layout: seconds with their parts, money, energy.

A roofline. What is assumed rather than known is `Assumptions`, and every sheet prints it. Parts that the schedule can
hide behind each other (the weights' gathers behind the layers' products, the host's copies behind both) count only by
what sticks out; the rest is a sum.
"""

import dataclasses
import math

from jtrain.layout import Layout, itemsize
from jtrain.mesh import BATCH_AXES
from jtrain.model.residuals import kept_names
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Muon
from jtrain.plan.collectives import Collective, collectives
from jtrain.plan.memory import MemoryPlan
from jtrain.plan.network import Machine, seconds
from jtrain.plan.published import SECONDS_PER_DAY

_F32 = 4

SCORE_BYTES_FORWARD, SCORE_BYTES_BACKWARD = 16, 26
"""Memory traffic per attention score where no fused kernel keeps scores on the chip: forward, float32 written, read by
the maximum and by the exponential, which writes bf16 that the product reads; backward, the same again, twice over."""

CPU_ADAM_S_PER_PARAM = 0.25e-9
"""Adam on a host's two sockets: 2.57 s for 10 billion parameters (arXiv:2101.06840, table 4)."""


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """Shares of the makers' peaks that are taken to be reached, and of the time that trains.

    matmul: of matrix products and what is fused around them, at the clock that holds under load.
    memory, network, host_link: of the bandwidths.
    goodput: share of wall time that trains; Llama 3 405B had over 0.9 (arXiv:2407.21783, section 3.3.4).
    """

    matmul: float = 0.65
    memory: float = 0.8
    network: float = 0.8
    host_link: float = 0.8
    goodput: float = 0.9

    def __str__(self) -> str:
        return (
            f"assumed: {self.matmul:.0%} of peak in matrix products, {self.memory:.0%} of memory bandwidth, "
            f"{self.network:.0%} of the network's, {self.host_link:.0%} of the host link's; weights' gathers and host "
            "copies hide behind compute, tensor-parallel and end-of-step collectives do not"
        )


@dataclasses.dataclass(frozen=True)
class NetworkTime:
    """All collectives over the same axes, per step: seconds they take, and how many of them nothing hides."""

    axes: tuple[str, ...]
    total_s: float
    exposed_s: float


@dataclasses.dataclass(frozen=True)
class StepTime:
    """A predicted step, by what the device waits for.

    matmul_s: matrix products, recomputed ones too; scores_s: attention's memory traffic; accumulate_s: adding
      microbatches; optimizer_s: the update, bound by memory, or by the host's cores where that computes it.
    network: by mesh axes. host_copy_s: copies of offloaded arrays; exposed_host_s: what sticks out of it.
    """

    matmul_s: float
    scores_s: float
    accumulate_s: float
    optimizer_s: float
    network: tuple[NetworkTime, ...]
    host_copy_s: float
    exposed_host_s: float
    tokens: int
    mfu: float

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of each part; their sum is the step."""
        named = {
            "matrix products": self.matmul_s,
            "attention scores": self.scores_s,
            "accumulation": self.accumulate_s,
            "optimizer": self.optimizer_s,
        }
        named |= {f"network, {' * '.join(row.axes)}": row.exposed_s for row in self.network}
        return named | {"host copies": self.exposed_host_s}

    @property
    def step_s(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s


@dataclasses.dataclass(frozen=True)
class Cost:
    """A run over `tokens`: wall time with its goodput, device time, money and energy where they are known."""

    tokens: int
    wall_s: float
    device_hours: float
    usd: float | None
    energy_j: float | None

    @property
    def days(self) -> float:
        return self.wall_s / SECONDS_PER_DAY


def step_time(
    model: Transformer,
    layout: Layout,
    optimizer: AdamW | Muon,
    plan: MemoryPlan,
    machine: Machine,
    *,
    global_batch: int,
    seq_len: int,
    assume: Assumptions = Assumptions(),
) -> StepTime:
    """Predicts one step. Muon's products are not counted.

    Args:
      plan: of the same run: what it says is on the host is what is copied.

    Raises:
      ValueError: no peak is published for the compute dtype, no speed for the host link that an offload needs, or
        none for the network that the mesh needs.
    """
    spec, mesh, device = layout.spec, layout.mesh, machine.device
    peak = device.peak_flops(spec.compute_dtype)
    if peak is None:
        raise ValueError(
            f"layout.compute_dtype={spec.compute_dtype}: no peak is published for it on {device.name}, so no step time "
            "can be predicted. Set layout.compute_dtype=bfloat16."
        )
    assert device.hbm_bytes_per_s is not None
    hbm = device.hbm_bytes_per_s * assume.memory
    shards = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    tokens = global_batch // shards * seq_len  # of one device, or of one group along `tensor`

    flops, again = _forward_flops(model, layout, seq_len)
    per_token = 3 * flops.layers + 0.5 * flops.attention + again + 3 * flops.unembedding
    weights = sum(p.info.size for p in layout.params if p.info.is_matrix) // mesh.tensor * itemsize(spec.compute_dtype)
    passes = 3 + (again > 0)
    matmul_s = max(
        tokens * per_token / mesh.tensor / (peak * assume.matmul), spec.microbatches * passes * weights / hbm
    )
    scores = model.num_layers * model.num_heads / mesh.tensor * tokens * seq_len / 2
    recomputed = (kept := kept_names(layout)) is not None and "attention" not in kept
    scores_s = scores * (SCORE_BYTES_FORWARD * (1 + recomputed) + SCORE_BYTES_BACKWARD) / hbm
    accumulator = sum(layout.local_size(p.accumulator, p.info.shape) for p in layout.params)
    grad = itemsize(spec.param_dtype)
    accumulate_s = spec.microbatches * accumulator * (2 * _F32 + grad) / hbm if spec.microbatches > 1 else 0.0

    optimizer_s, state_copy_s = _update(layout, plan, machine, assume, hbm)
    compute_s = matmul_s + scores_s + accumulate_s
    sent = collectives(model, layout, global_batch=global_batch, seq_len=seq_len)
    network = _network(sent, layout, machine, assume, compute_s)
    loop_copy_s = _loop_copies(layout, plan, machine, assume)
    exposed_host_s = max(0.0, loop_copy_s - compute_s) + max(0.0, state_copy_s - optimizer_s)
    timed = StepTime(
        matmul_s,
        scores_s,
        accumulate_s,
        optimizer_s,
        network,
        loop_copy_s + state_copy_s,
        exposed_host_s,
        tokens=global_batch * seq_len,
        mfu=0.0,
    )
    # What `flops.py` counts, without going through all parameters: a search asks thousands of times.
    model_flops = 3 * (flops.layers + flops.unembedding)
    return dataclasses.replace(timed, mfu=model_flops * timed.tokens_per_s / (mesh.size * peak))


def cost(timed: StepTime, machine: Machine, *, tokens: int, goodput: float, usd_per_hour: float | None = None) -> Cost:
    """What training on `tokens` costs at the predicted speed.

    Args:
      goodput: share of wall time that trains.
      usd_per_hour: price of one device; without it there are device hours only.
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
    """FLOPs of a forward pass per token: the layers' products and attention together, attention alone, the rest."""

    layers: int
    attention: int
    unembedding: int


def _forward_flops(model: Transformer, layout: Layout, seq_len: int) -> tuple[_Forward, int]:
    """FLOPs of a forward pass per token, and those that the backward pass repeats.

    The last product of a layer is never repeated: nothing needs its result. Attention's backward pass is 2.5 forward
    passes, for it makes the scores again.
    """
    width, heads = model.d_model, model.num_heads * model.head_dim
    of = {
        "attention_q": 2 * width * heads,
        "attention_k": 2 * width * model.num_kv_heads * model.head_dim,
        "attention_v": 2 * width * model.num_kv_heads * model.head_dim,
        "attention": 2 * heads * seq_len,
        "attention_out": 2 * heads * width,
        "mlp_gate": 2 * width * model.d_ff,
        "mlp_up": 2 * width * model.d_ff,
    }
    down = 2 * width * model.d_ff
    kept = kept_names(layout)
    again = 0 if kept is None else model.num_layers * sum(flops for name, flops in of.items() if name not in kept)
    layers = model.num_layers * (sum(of.values()) + down)
    return _Forward(layers, model.num_layers * of["attention"], 2 * width * model.vocab_size), again


def _update(layout: Layout, plan: MemoryPlan, machine: Machine, assume: Assumptions, hbm: float) -> tuple[float, float]:
    """Seconds of the optimizer, and of the copies of what it updates in host memory (both directions at once)."""
    spec = layout.spec
    elements = sum(layout.local_size(p.optimizer, p.info.shape) for p in layout.params)
    state = plan.optimizer + plan.host_optimizer
    # Gradients are read twice, for the norm and for the update; parameters and state are read and written.
    device_s = (elements * (2 * _F32 + 2 * itemsize(spec.param_dtype)) + 2 * state) / hbm
    if not plan.host_argument_bytes:
        return device_s, 0.0
    link = _host_link(machine, assume)
    if spec.offload.update == "device" or not plan.host_optimizer:
        return device_s, plan.host_argument_bytes / link
    share = plan.host_optimizer / state
    on_host_s = elements * share * CPU_ADAM_S_PER_PARAM * machine.devices_per_host
    # Gradients go down, parameters come back.
    copies_s = (elements * share * (_F32 + itemsize(spec.param_dtype)) + plan.host_parameters) / link
    return device_s * (1 - share) + on_host_s, copies_s


def _loop_copies(layout: Layout, plan: MemoryPlan, machine: Machine, assume: Assumptions) -> float:
    """Seconds of copies within the layers: weights come in for both passes, activations go out and come back."""
    if not (plan.host_parameters or plan.host_activations):
        return 0.0
    link = _host_link(machine, assume)
    return layout.spec.microbatches * 2 * (plan.host_parameters + plan.host_activations) / link


def _host_link(machine: Machine, assume: Assumptions) -> float:
    """Bytes/s to host memory.

    Raises:
      ValueError: nobody publishes them.
    """
    speed = machine.device.host.link_bytes_per_s
    if speed is None:
        raise ValueError(
            f"layout.offload needs memory of the host, but for {machine.device.name} nobody publishes how fast it is "
            "reached. Set layout.offload.optimizer, .params and .activations to none."
        )
    return speed * assume.host_link


def _network(
    sent: tuple[Collective, ...], layout: Layout, machine: Machine, assume: Assumptions, compute_s: float
) -> tuple[NetworkTime, ...]:
    """Time over each set of axes. What runs beside the layers is hidden by them, first come first hidden."""
    rows: dict[tuple[str, ...], list[float]] = {}
    for one in sent:
        took = seconds(one, machine, layout.mesh.shape, efficiency=assume.network)
        hidden = 0.0
        if _beside_the_layers(one, layout):
            hidden = min(took, compute_s)
            compute_s -= hidden
        row = rows.setdefault(one.axes, [0.0, 0.0])
        row[0] += took
        row[1] += took - hidden
    return tuple(NetworkTime(axes, *row) for axes, row in sorted(rows.items(), key=lambda item: -item[1][1]))


def _beside_the_layers(one: Collective, layout: Layout) -> bool:
    """Whether the layers' products can go on meanwhile: weights are fetched ahead, gradients leave behind."""
    if one.purpose.startswith("parameters"):
        return True
    over_data = one.axes == ("data",) and one.kind == "reduce-scatter"
    return over_data and one.purpose in ("gradients", "unembedding") and layout.spec.zero_stage >= 2
