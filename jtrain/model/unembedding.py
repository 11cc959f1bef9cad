"""Cross entropy with an unembedding that is split by columns over `tensor`, and gathered over `data` in parts."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain.model import ops

PART_COLUMNS = 16384
"""Columns of the unembedding that a device gathers over `data` at a time: with D = 4096 and bfloat16, 0.13 GB."""


def num_parts(vocab_size: int, tensor: int) -> int:
    """Number of parts in which each of `tensor` devices gathers its block of the vocabulary."""
    return -(-vocab_size // tensor // PART_COLUMNS)


def unembedding_loss(
    x_BLD: Float[Array, "B _ D"],
    kernel_DW: Float[Array, "D _"],
    target_BL: Int[Array, "B L"],
    *,
    tensor: int,
    chunk_tokens: int | None,
    z_loss: float,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """`ops.linear_cross_entropy` at this device's positions, with its V / tensor columns of the vocabulary.

    Args:
      target_BL: targets at all positions.
    """
    if tensor == 1:
        return ops.linear_cross_entropy(x_BLD, kernel_DW, target_BL, chunk_tokens=chunk_tokens, z_loss=z_loss)
    return ops.vocab_parallel_linear_cross_entropy(
        x_BLD, kernel_DW, target_BL, axis="tensor", chunk_tokens=chunk_tokens, z_loss=z_loss
    )


def loss_in_parts(
    x_BLD: Float[Array, "B _ D"],
    shard: Float[Array, "_ _"],
    target_BL: Int[Array, "B L"],
    fetch: Callable[[Array], Array],
    *,
    tied: bool,
    tensor: int,
    chunk_tokens: int | None,
    z_loss: float,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The same loss as `unembedding_loss`, holding only one part of the columns and of their gradient at a time.

    A single part is gathered once; with several, each part is gathered twice.

    Args:
      shard: this device's block: [d, V / tensor], or [V / tensor, d] if tied.
      target_BL: targets at all positions.
      fetch: gathers columns (tied: rows) of the shard over `data`, in the compute dtype.
    """

    def whole(part_wd: Array) -> Float[Array, "D W"]:
        return fetch(part_wd).T if tied else fetch(part_wd.T)

    shard_Wd = shard if tied else shard.T
    local, d = shard_Wd.shape
    parts = num_parts(local * tensor, tensor)
    if parts == 1:
        return unembedding_loss(
            x_BLD, whole(shard_Wd), target_BL, tensor=tensor, chunk_tokens=chunk_tokens, z_loss=z_loss
        )
    missing = -local % parts
    part_Zwd = jnp.pad(shard_Wd, ((0, missing), (0, 0))).reshape(parts, -1, d)
    first = jax.lax.axis_index("tensor") * local if tensor > 1 else 0
    column_W = jnp.pad(first + jnp.arange(local), (0, missing), constant_values=ops.NO_COLUMN)
    return ops.linear_cross_entropy_in_parts(
        x_BLD,
        part_Zwd,
        column_W.reshape(parts, -1),
        target_BL,
        fetch=whole,
        chunk_tokens=chunk_tokens,
        z_loss=z_loss,
        axis="tensor" if tensor > 1 else None,
    )
