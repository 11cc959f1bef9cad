"""Meshes and numbers of microbatches that split a model and its batch evenly."""

import itertools
from collections.abc import Iterator

from jtrain.layout.dims import splits_heads
from jtrain.layout.mesh import MeshSpec
from jtrain.plan.job import Job

LONG = 32_768
"""Tokens of a sequence from which on a search splits sequences over `context`."""


def mesh_options(job: Job, *, stage: int = 1) -> Iterator[MeshSpec]:
    """Yields every (replica, data, expert, context, tensor) mesh that splits the model and the batch evenly.

    Sequences are split over `context` from `LONG` tokens on: shorter ones fit, and batches split for nothing.
    With stages neither experts nor sequences are split: docs/pipelines.md says why.
    """
    assert job.machine is not None, "meshes are of a machine"
    model, count, seq_len = job.model, job.machine.count // stage, job.seq_len
    for tensor, context in itertools.product(divisors(count), divisors(count)):
        # The sequence is cut in 2 * context pieces, so that causal work is even.
        if context > 1 and (stage > 1 or seq_len < LONG or seq_len % (2 * context * tensor)):
            continue
        if (
            count % (tensor * context)
            or model.d_ff % tensor
            or model.vocab_size % (tensor * stage)
            or seq_len % tensor
        ):
            continue
        # Key heads may be shared: more tensor shards than key heads are possible.
        if not splits_heads(model.num_heads, model.num_kv_heads, tensor):
            continue
        batch_shards = count // tensor // context
        if job.global_batch % batch_shards:
            continue
        for data, expert in itertools.product(divisors(batch_shards), divisors(batch_shards)):
            # ZeRO splits D over data and context, and that of shared key heads over tensor as well.
            width = data * context * (tensor if tensor > model.num_kv_heads else 1)
            if model.d_model % width or batch_shards % (data * expert):
                continue
            moe = model.router
            if expert == 1 or (stage == 1 and moe is not None and moe.num_experts % expert == 0):
                yield MeshSpec(batch_shards // data // expert, stage, data, expert, context, tensor)


_MAX_PER_STAGE = 16
"""Microbatches per stage from which on more hardly shorten the bubble: at most 1 / 16 of a step."""


def microbatch_options(rows: int, stages: int, *, multiple_of: int = 1) -> tuple[int, ...]:
    """Numbers of microbatches that split a device's sequences evenly, and that a pipeline can use.

    Args:
      multiple_of: microbatches that a schedule runs as a group.
    """
    # With fewer microbatches than stages some worker always waits.
    max_microbatches = rows if stages == 1 else _MAX_PER_STAGE * stages
    return tuple(n for n in divisors(rows) if stages <= n <= max_microbatches and n % multiple_of == 0)


def divisors(n: int) -> list[int]:
    """Divisors of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]
