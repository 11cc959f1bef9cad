"""Split of a batch: sequences over devices and microbatches, positions over `context` and `tensor`."""

import dataclasses

from jtrain.errors import UserError
from jtrain.layout.layout_spec import LayoutSpec
from jtrain.layout.mesh import BATCH_AXES, MeshSpec, shard_size


def split_batch(spec: LayoutSpec, mesh: MeshSpec, *, global_batch: int, seq_len: int) -> LayoutSpec:
    """Returns `spec` with as many microbatches as `microbatch_tokens` takes on a mesh.

    512 sequences of 8192 tokens over data=16, at most 16,384 tokens: 16 microbatches of 2 sequences. A device
    computes at least one sequence at a time, however long. A batch that does not split is left to
    `check_batch`, which refuses it.
    """
    sequences, remainder = divmod(global_batch, mesh.batch_shards * spec.microbatches)
    if spec.microbatch_tokens is None or remainder:
        return spec
    # Between layers a device holds its part of the positions only.
    positions = seq_len // (mesh.context * mesh.tensor)
    sizes = [n for n in range(sequences, 0, -1) if sequences % n == 0 and n % spec.sequence_groups == 0]
    fitting_sizes = [n for n in sizes if n * positions <= spec.microbatch_tokens]
    # The largest that keeps to the limit, else the smallest that there is.
    size = next(iter(fitting_sizes or sizes[-1:]), sequences)
    return dataclasses.replace(spec, microbatches=spec.microbatches * (sequences // size))


def check_batch(spec: LayoutSpec, mesh: MeshSpec, *, global_batch: int, seq_len: int) -> int:
    """Returns the number of sequences that one device computes at a time.

    Raises:
      UserError: sequences or positions do not split evenly over the devices, or sequences into groups.
    """
    # Sequences of one device per step, over all of its microbatches.
    sequences_per_step = shard_size("data.global_batch", global_batch, mesh.shape, BATCH_AXES)
    # `tensor` cuts positions too: the residual stream between layers is split by sequence.
    shard_size("data.seq_len", seq_len, mesh.shape, ("context", "tensor"))
    # ulysses needs this only in zig-zag order; the data checks it.
    if mesh.context > 1 and spec.context_attention == "ring" and seq_len % (2 * mesh.context):
        below = seq_len - seq_len % (2 * mesh.context)
        raise UserError(
            f"data.seq_len={seq_len} over mesh.context={mesh.context}: each device has an early and a late "
            f"part of a row, so it must be a multiple of {2 * mesh.context}. Nearest: {below}, "
            f"{below + 2 * mesh.context}."
        )
    if sequences_per_step % spec.microbatches:
        shards = global_batch // sequences_per_step
        raise UserError(
            f"data.global_batch={global_batch} over {shards} devices is {sequences_per_step} sequences each, which "
            f"layout.microbatches={spec.microbatches} does not divide. Set data.global_batch to a multiple "
            f"of {shards * spec.microbatches}, or layout.microbatches to a divisor of {sequences_per_step}."
        )
    sequences_at_a_time = sequences_per_step // spec.microbatches
    if sequences_at_a_time % spec.sequence_groups:
        raise UserError(
            f"layout.sequence_groups={spec.sequence_groups} does not divide the {sequences_at_a_time} sequences that a "
            "device computes at a time. Set it to a divisor of them, or change data.global_batch or "
            "layout.microbatches."
        )
    return sequences_at_a_time
