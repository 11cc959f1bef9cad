"""Attention of a step: the implementation that the kernels' registry chooses on a job's machine, and its
seconds.

Seconds and choice are those of `jtrain_kernels.cost` and `jtrain_kernels.registry`, for the shapes that one
device computes. An implementation that the planning machine has not installed is not chosen;
`explain_attention` says so.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jtrain.layout.dims import kv_heads_in_use
from jtrain.plan.job import Job
from jtrain.step.pipeline_ticks import attention_is_a_ring
from jtrain_kernels import cost, registry
from jtrain_kernels.device import DeviceSpec

type _Shape = tuple[int, int, int, int, int]
"""Sequences, positions, query heads, key heads and head size of one call."""


def implementation(job: Job) -> str:
    """Name of the implementation that computes a step's attention; plain XLA if the job has no machine."""
    return registry.REFERENCE if job.machine is None else _job_choice(job)[0]


def explain_attention(job: Job) -> str:
    """The chosen implementation, the reason, and the implementations that would have to be installed
    first.
    """
    name, reason, rejected = _job_choice(job)
    # Of the rejected, only those that an installation would bring in are of use to a reader.
    missing = [f"{candidate}: {obstacle}" for candidate, obstacle in rejected if "not installed" in obstacle]
    return f"attention by {name}: {'; '.join([reason, *missing])}"


def attention_s(job: Job) -> tuple[float, float]:
    """Seconds of all forward passes of a step's attention on one device, each counted once, and of all
    backward ones.

    A ring computes a causal block of its own positions, and for each further device two blocks of half of
    them.
    """
    assert job.machine is not None, "seconds are those of a machine"
    # All layers, also those of other stages: `step_time` takes a device's part of them.
    calls = job.model.num_layers * job.layout.spec.microbatches
    counted = [
        (num_calls * calls, _passes_s(job.machine.device, *arguments)) for num_calls, arguments in _calls(job)
    ]
    return sum(num_calls * passes_s[0] for num_calls, passes_s in counted), sum(
        num_calls * passes_s[1] for num_calls, passes_s in counted
    )


def _job_choice(job: Job) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    assert job.machine is not None, "the choice is that of a machine"
    return _choose_implementation(job.machine.device, *next(_calls(job))[1])


def _calls(job: Job) -> Iterator[tuple[int, tuple[_Shape, str, int, bool, str | None]]]:
    """Yields how often a layer calls attention, and the arguments of `_choose_implementation`."""
    model, mesh = job.model, job.layout.mesh
    heads, kv_heads = (
        n // mesh.tensor for n in (model.num_heads, kv_heads_in_use(model.num_kv_heads, mesh.tensor))
    )
    forced_name = dict(job.layout.kernels).get("attention")
    rows, length = job.rows(), job.seq_len
    dtype_and_chunk = job.layout.precision.compute_dtype, model.attention_chunk
    # Ulysses: the exchange gives a device all positions of its part of the heads.
    if mesh.context > 1 and not attention_is_a_ring(job.layout):
        heads, kv_heads = heads // mesh.context, max(1, kv_heads // mesh.context)
    elif mesh.context > 1:
        length //= mesh.context
        # A half block of two sequences stands for two half blocks: each hop attends to half of the pairs.
        half_shape = (2 * rows, length // 2, heads, kv_heads, model.head_dim)
        yield 1, ((rows, length, heads, kv_heads, model.head_dim), *dtype_and_chunk, True, forced_name)
        yield mesh.context - 1, (half_shape, *dtype_and_chunk, False, forced_name)
        return
    yield 1, ((rows, length, heads, kv_heads, model.head_dim), *dtype_and_chunk, True, forced_name)


@functools.cache
def _choose_implementation(
    device: DeviceSpec, shape: _Shape, dtype: str, chunk: int, causal: bool, forced: str | None
) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    """Name of the implementation, the reason, and those of the others. Cached: a search asks thousands of
    times.

    What is forced is not asked whether it can run: the planning machine need not have it.
    """
    if forced is not None:
        return forced, "it is forced", ()
    choice = registry.choose(registry.find("attention"), device, _avals(shape, dtype, chunk, causal))
    return choice.implementation.name, choice.because, choice.rejected


@functools.cache
def _passes_s(
    device: DeviceSpec, shape: _Shape, dtype: str, chunk: int, causal: bool, forced: str | None
) -> tuple[float, float]:
    """Seconds of the forward and of the backward pass of one call."""
    name, avals = (
        _choose_implementation(device, shape, dtype, chunk, causal, forced)[0],
        _avals(shape, dtype, chunk, causal),
    )
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


def _avals(shape: _Shape, dtype: str, chunk: int, causal: bool) -> registry.Avals:
    rows, length, heads, kv_heads, head_dim = shape
    query, key = (
        jax.ShapeDtypeStruct((rows, length, n, head_dim), jnp.dtype(dtype)) for n in (heads, kv_heads)
    )
    segment = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    arrays = dict(q_BLNH=query, k_BMKH=key, v_BMKH=key, segment_BL=segment, segment_BM=segment)
    return dict(arrays, chunk=chunk, window=None, causal=causal)
