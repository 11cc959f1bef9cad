"""Seconds and bytes of a pipelined step's parts, from the plan of one stage's devices.

A pipeline over P stages gives each stage 1/P of the devices, and 1/P of the layers, of the embedding and of the loss
(`jtrain.step` splits the vocabulary over the stages). So a stage takes 1/P of what its devices alone would take for the
whole model, and that is what the planner predicts without a pipeline.
"""

import dataclasses

from jtrain.layout import LayoutSpec
from jtrain.plan.estimate.attention_time import attention_s
from jtrain.plan.estimate.collectives import Collective, collectives
from jtrain.plan.estimate.machine import Machine
from jtrain.plan.estimate.memory import MemoryPlan, memory
from jtrain.plan.estimate.network import collective_s, ring, seconds
from jtrain.plan.estimate.step_time import Assumptions, beside_the_layers, step_time
from jtrain.plan.job import Job
from jtrain.precision import itemsize

_ONCE = ("updated parameters", "gradient norm", "shared key heads")
"""Purposes of collectives that run once per step, not once per microbatch."""


@dataclasses.dataclass(frozen=True)
class StageWork:
    """Seconds of a stage for one microbatch, all its chunks together, and bytes of one of its devices.

    forward_s, by_input_s, by_weight_s: F, I and W; a recomputed forward pass is part of I, gathers that do not hide
      behind the layers are parts of F and I, the accumulation of gradients is part of W.
    message_s, message_bytes: an activation or cotangent from one device to the one of the next stage.
    once_s: the rest of the step, once: reductions that wait for all microbatches, and the update.
    state_bytes: parameters, optimizer, batch, gradients and the workspace of one layer.
    kept_bytes: what a microbatch keeps between F and I or B. stash_bytes: what it keeps between I and W.
    """

    forward_s: float
    by_input_s: float
    by_weight_s: float
    message_s: float
    once_s: float
    message_bytes: int
    state_bytes: int
    kept_bytes: int
    stash_bytes: int


def stage_work(job: Job, stages: int, machine: Machine, *, assume: Assumptions) -> StageWork:
    """The work of each of `stages` stages.

    Args:
      job: the whole model on the devices of one stage, with the microbatches of the pipeline.
      machine: all devices.

    Raises:
      UserError: as in `step_time`.
    """
    layout, m = job.layout, job.layout.spec.microbatches
    plan = memory(job)
    timed = step_time(job, plan, assume=assume)
    nothing_again = dataclasses.replace(layout.spec, remat="none", remat_save=())
    matmul_s = step_time(job.relaid(nothing_again, layout.mesh), plan, assume=assume).matmul_s
    attention_forward_s, attention_backward_s = attention_s(job)
    again_s = timed.matmul_s - matmul_s + timed.attention_s - attention_forward_s - attention_backward_s
    compute_s = timed.matmul_s + timed.attention_s
    waiting_s, at_end_s = _network(job, machine, compute_s, assume)
    parts = {
        "forward_s": matmul_s / 3 + attention_forward_s + waiting_s / 2,
        "by_input_s": matmul_s / 3 + attention_backward_s + again_s + waiting_s / 2,
        "by_weight_s": matmul_s / 3 + timed.accumulate_s,
    }
    tokens = job.rows() * job.seq_len // layout.mesh.context
    size = itemsize(layout.precision.compute_dtype)
    message_bytes = tokens * job.model.d_model * size // layout.mesh.tensor
    hop = ring(machine, layout.mesh.shape | {"stage": stages}, ("stage",))
    return StageWork(
        **{name: took / stages / m for name, took in parts.items()},
        message_s=collective_s("collective-permute", message_bytes, hop, count=1, efficiency=assume.network),
        once_s=(timed.optimizer_s + at_end_s + timed.exposed_host_s) / stages,
        message_bytes=message_bytes,
        state_bytes=_state_bytes(plan, stages),
        kept_bytes=plan.activations // stages,
        stash_bytes=_stash_bytes(job, tokens) // stages,
    )


def _network(job: Job, machine: Machine, compute_s: float, assume: Assumptions) -> tuple[float, float]:
    """Seconds per step of collectives that the layers wait for, and of those that run once at the end."""
    assert job.machine is not None
    hidden_s = waiting_s = at_end_s = 0.0
    for one in collectives(job):
        took = seconds(one, machine, job.layout.mesh.shape, efficiency=assume.network)
        if _is_once(one, job.layout.spec):
            at_end_s += took
        elif beside_the_layers(one, job.layout, job.machine.device):
            hidden_s += took
        else:
            waiting_s += took
    return waiting_s + max(0.0, hidden_s - compute_s), at_end_s


def _is_once(one: Collective, spec: LayoutSpec) -> bool:
    """True if the collective runs once per step."""
    sums = one.purpose == "gradients" and (one.kind == "all-reduce" or spec.zero_stage < 2)
    return sums or one.purpose in _ONCE


def _state_bytes(plan: MemoryPlan, stages: int) -> int:
    """Bytes of one device that no schedule changes: stages split layers and vocabulary, not the work of one layer."""
    split = plan.parameters + plan.optimizer + plan.gradients + plan.loss
    return split // stages + plan.batch + plan.weights + plan.workspace


def _stash_bytes(job: Job, tokens: int) -> int:
    """Bytes that W needs of one microbatch and all layers: the input and the output's cotangent of each linear."""
    model = job.model
    heads, kv_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = model.d_model + heads + 2 * kv_heads + heads + model.d_model
    mlp = model.d_model + 2 * model.active_d_ff + model.active_d_ff + model.d_model
    size = itemsize(job.layout.precision.compute_dtype)
    return tokens * model.num_layers * (attention + mlp) * size // job.layout.mesh.tensor
