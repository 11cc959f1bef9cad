"""Attention of a step: the implementation that the kernels' registry chooses on a job's machine, its seconds
and its workspace.

Seconds and choice are those of `jtrain_kernels.cost` and `jtrain_kernels.registry`, for the calls of the
step's trace. A machine that is only named chooses as if all optional packages were installed, whatever is
installed where the plan is made.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jtrain.layout.precision import itemsize
from jtrain.plan.job import Job
from jtrain.step.description.step_description import AttentionCalls
from jtrain_kernels import cost, registry
from jtrain_kernels.device import DeviceSpec

_F32 = 4

type _Shape = tuple[int, int, int, int, int]
"""Sequences, positions, query heads, key heads and head size of one call."""


def implementation(job: Job) -> str:
    """Name of the implementation that computes a step's attention; plain XLA if the job has no machine."""
    return registry.REFERENCE if job.machine is None else _job_choice(job)[0]


def explain_attention(job: Job) -> str:
    """The chosen implementation, and the reason."""
    name, reason = _job_choice(job)
    return f"attention by {name}: {reason}"


def attention_s(job: Job) -> tuple[float, float]:
    """Seconds of attention in a step's forward passes on one device, and in its backward passes, with what
    those compute again.
    """
    assert job.machine is not None, "seconds are those of a machine"
    forward_s = backward_s = 0.0
    for call in job.step.attention:
        passes_s = _passes_s(_question(job, call))
        if call.when == "forward":
            forward_s += call.count * passes_s[0]
        else:
            backward_s += call.count * passes_s[call.backward]
    return forward_s, backward_s


def attention_workspace(job: Job) -> int:
    """Bytes that the kernel of attention's backward pass has on one device, besides its arrays and their
    gradients.

    In plain XLA probabilities and their gradient, in float32 and in the compute dtype, for a chunk of
    queries with all keys, and for every chunk its float32 mask and its part of the keys. A fused kernel
    holds no scores, but the log-partition of each query, and all arrays once more where it pads heads; cuDNN
    has a mask in the compute dtype.
    """
    return max((_workspace(job, call) for call in job.step.attention if call.backward), default=0)


def _workspace(job: Job, call: AttentionCalls) -> int:
    name, compute = implementation(job), itemsize(job.layout.precision.compute_dtype)
    rows, length, heads, size = call.rows, call.length, call.heads, call.head_dim
    if name in cost.ATTENTION:
        mask = rows * length * length * compute if name == "cudnn" else 0
        width = cost.padded_head(name, size)
        padded = 4 * rows * length * (heads + call.kv_heads) * width * compute if width > size else 0
        return rows * heads * length * _F32 + mask + padded
    chunk = min(job.model.attention_chunk, length)
    queries, keys = (rows * length * n * size for n in (heads, call.kv_heads))
    if job.platform == "tpu":
        # One chunk of queries and one of keys at a time, and one float32 array of scores. The gradient of
        # the output is in chunks, that of the queries in float32.
        keys_at_once = chunk if length % chunk == 0 else length
        in_chunks = queries * (compute + _F32) if length > chunk else 0
        return rows * heads * chunk * keys_at_once * (_F32 + 2 * compute) + in_chunks
    num_chunks = -(-length // chunk)
    rows = 1 if job.platform == "cpu" else rows
    masks = rows * length * (length + chunk) // 2 * _F32
    gradients = 2 * keys * _F32 + keys * compute * (num_chunks - 1) // 2
    return rows * heads * chunk * length * 2 * (_F32 + compute) + masks + gradients


def _job_choice(job: Job) -> tuple[str, str]:
    call = next((call for call in job.step.attention if call.causal), None)
    if call is None:
        return registry.REFERENCE, "no layer has attention"
    return _choose_implementation(_question(job, call))


class _Question(NamedTuple):
    """Everything that decides the implementation of one call.

    installed: True if the device's machine has all optional packages, whatever this process has.
    """

    device: DeviceSpec
    installed: bool
    shape: _Shape
    dtype: str
    chunk: int
    causal: bool
    soft_cap: float | None
    forced: str | None

    def avals(self) -> registry.Avals:
        """Arguments of the op, by name."""
        rows, length, heads, kv_heads, head_dim = self.shape
        query, key = (
            jax.ShapeDtypeStruct((rows, length, n, head_dim), jnp.dtype(self.dtype))
            for n in (heads, kv_heads)
        )
        segment = jax.ShapeDtypeStruct((rows, length), jnp.int32)
        arrays = dict(q_BLNH=query, k_BMKH=key, v_BMKP=key, segment_BL=segment, segment_BM=segment)
        return dict(arrays, chunk=self.chunk, window=None, soft_cap=self.soft_cap, causal=self.causal)


def _question(job: Job, call: AttentionCalls) -> _Question:
    assert job.machine is not None, "the choice is that of a machine"
    # A cap in one layer: the trace does not say which calls are of that layer, and caps rule kernels out.
    caps = (getattr(block.mixer, "soft_cap", None) for block in job.model.period)
    return _Question(
        job.machine.device,
        installed=not job.machine.has_this_install,
        shape=(call.rows, call.length, call.heads, call.kv_heads, call.head_dim),
        dtype=job.layout.precision.compute_dtype,
        chunk=job.model.attention_chunk,
        causal=call.causal,
        soft_cap=next((cap for cap in caps if cap is not None), None),
        forced=dict(job.layout.kernels).get("attention"),
    )


@functools.cache
def _choose_implementation(question: _Question) -> tuple[str, str]:
    """Name of the implementation, and the reason. Cached: a search asks thousands of times.

    What is forced is not asked whether it can run: the planning machine need not have it.
    """
    if question.forced is not None:
        return question.forced, "it is forced"
    choice = registry.choose(
        registry.find("attention"), question.device, question.avals(), installed=question.installed
    )
    return choice.implementation.name, choice.because


@functools.cache
def _passes_s(question: _Question) -> tuple[float, float]:
    """Seconds of the forward and of the backward pass of one call."""
    name, _ = _choose_implementation(question)
    device, avals = question.device, question.avals()
    if name == registry.REFERENCE or name in cost.ATTENTION:
        passes_s = cost.attention_passes_s(device, avals, name)
    else:  # of another distribution, which predicts both passes together
        by_name = {i.name: i for i in registry.implementations(registry.find("attention"))}
        # Its own prediction may be None; then the reference's FLOPs stand in for it.
        both_s = by_name[name].cost_s(device, avals) or cost.attention_s(device, avals, registry.REFERENCE)
        # Split as FLOPs are: a backward pass has BACKWARD_FLOPS times those of a forward pass.
        forward = (both_s or 0.0) / (1 + cost.BACKWARD_FLOPS)
        passes_s = forward, forward * cost.BACKWARD_FLOPS
    assert passes_s is not None, "the peaks of the machine are published"
    return passes_s
