"""The loss of an unembedding whose shards are brought together a part of the vocabulary at a time."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain.model import ops

PART_COLUMNS = 16384
"""Columns of the unembedding, over all of `tensor`, that exist at a time: with D = 4096 and bfloat16, 0.13 GB."""


def num_parts(vocab_size: int) -> int:
    """Parts that a vocabulary comes in."""
    return -(-vocab_size // PART_COLUMNS)


def loss_in_parts(
    x_BLD: Float[Array, "B _ D"],
    shard: Float[Array, "_ _"],
    target_BL: Int[Array, "B _"],
    fetch: Callable[[Array], Array],
    *,
    tied: bool,
    tensor: int,
    chunk_tokens: int,
    z_loss: float,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """As `ops.linear_cross_entropy`; no device ever holds more than a part of the unembedding and of its gradient.

    A vocabulary of one part is fetched once; of more, each part twice.

    Args:
      shard: this device's block: [d, V / tensor], or tied, [V / tensor, d].
      fetch: makes some columns (tied: rows) of the shard whole over `data`, in the compute dtype.
    """

    def whole(part_wd: Array) -> Float[Array, "D W"]:
        part_Dw = fetch(part_wd).T if tied else fetch(part_wd.T)
        return jax.lax.all_gather(part_Dw, "tensor", axis=1, tiled=True) if tensor > 1 else part_Dw

    shard_Vd = shard if tied else shard.T
    local, d = shard_Vd.shape
    parts = num_parts(local * tensor)
    if parts == 1:
        return ops.linear_cross_entropy(x_BLD, whole(shard_Vd), target_BL, chunk_tokens=chunk_tokens, z_loss=z_loss)
    missing = -local % parts
    part_Zwd = jnp.pad(shard_Vd, ((0, missing), (0, 0))).reshape(parts, -1, d)
    column_TV = jnp.arange(local * tensor).reshape(tensor, local)
    column_TV = jnp.pad(column_TV, ((0, 0), (0, missing)), constant_values=ops.NO_COLUMN)
    column_ZW = column_TV.reshape(tensor, parts, -1).swapaxes(0, 1).reshape(parts, -1)
    return ops.linear_cross_entropy_in_parts(
        x_BLD, part_Zwd, column_ZW, target_BL, fetch=whole, chunk_tokens=chunk_tokens, z_loss=z_loss
    )
