"""Cross entropy with an unembedding that is split by columns over `tensor`, and gathered from shards in
parts.

Functions take the axes that split the columns, and the number of devices along them: `tensor`, or in a
pipeline `stage` and `tensor`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain.model import ops

PART_COLUMNS = 16384
"""Columns of the unembedding that a device gathers from shards at a time: with D = 4096 and bfloat16, 0.13
GB."""


def num_parts(vocab_size: int, shards: int) -> int:
    """Number of parts in which each of `shards` devices gathers its block of the vocabulary."""
    return -(-vocab_size // shards // PART_COLUMNS)


def unembedding_loss(
    x_BLD: Float[Array, "B _ D"],
    kernel_DW: Float[Array, "D _"],
    target_BL: Int[Array, "B L"],
    *,
    axis: ops.VocabAxis,
    shards: int,
    chunk_tokens: int | None,
    z_loss: float,
    soft_cap: float | None,
    weight_BL: Float[Array, "B L"] | None = None,
    soft: ops.SoftTargets | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """`ops.linear_cross_entropy` at this device's positions, with its V / shards columns of the vocabulary.

    Args:
      target_BL, weight_BL, soft: at all positions.
    """
    settings: Any = dict(
        chunk_tokens=chunk_tokens, z_loss=z_loss, soft_cap=soft_cap, weight_BL=weight_BL, soft=soft
    )
    if shards == 1:
        return ops.linear_cross_entropy(x_BLD, kernel_DW, target_BL, **settings)
    return ops.vocab_parallel_linear_cross_entropy(x_BLD, kernel_DW, target_BL, axis=axis, **settings)


def loss_in_parts(
    x_BLD: Float[Array, "B _ D"],
    shard: Float[Array, "_ _"],
    target_BL: Int[Array, "B L"],
    fetch: Callable[[Array], Array],
    *,
    tied: bool,
    axis: ops.VocabAxis,
    shards: int,
    chunk_tokens: int | None,
    z_loss: float,
    soft_cap: float | None,
    weight_BL: Float[Array, "B L"] | None = None,
    soft: ops.SoftTargets | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Loss of `unembedding_loss` with one part of the columns and of their gradient at a time.

    A single part is gathered once; with several, each part is gathered twice.

    Args:
      shard: this device's block: [d, V / shards], or [V / shards, d] if tied.
      target_BL, weight_BL, soft: at all positions.
      fetch: gathers columns (tied: rows) of all shards, in the compute dtype.
    """
    shard_dW, gather_columns = _columns(shard, fetch, tied=tied)
    # One part: the gathered block is held from the forward to the backward pass, and gathered once.
    if num_parts(shard_dW.shape[1] * shards, shards) == 1:
        return unembedding_loss(
            x_BLD,
            gather_columns(shard_dW),
            target_BL,
            axis=axis,
            shards=shards,
            chunk_tokens=chunk_tokens,
            z_loss=z_loss,
            soft_cap=soft_cap,
            weight_BL=weight_BL,
            soft=soft,
        )
    part_Zdw, column_Zw = _in_parts(shard_dW, axis, shards)
    return ops.linear_cross_entropy_in_parts(
        x_BLD,
        part_Zdw,
        column_Zw,
        target_BL,
        fetch=gather_columns,
        chunk_tokens=chunk_tokens,
        z_loss=z_loss,
        soft_cap=soft_cap,
        axis=axis if shards > 1 else None,
        weight_BL=weight_BL,
        soft=soft,
    )


def token_nats_in_parts(
    x_BLD: Float[Array, "B _ D"],
    shard: Float[Array, "_ _"],
    target_BL: Int[Array, "B L"],
    fetch: Callable[[Array], Array],
    *,
    tied: bool,
    axis: ops.VocabAxis,
    shards: int,
    chunk_tokens: int | None,
    soft_cap: float | None,
) -> Float[Array, "B _"]:
    """Cross entropy of each of this device's tokens in nats, holding one part of the columns at a time.

    Arguments are those of `loss_in_parts`.
    """
    shard_dW, gather_columns = _columns(shard, fetch, tied=tied)
    # With one shard nothing is summed over an axis.
    split = axis if shards > 1 else None
    settings: Any = dict(chunk_tokens=chunk_tokens, soft_cap=soft_cap, axis=split)
    if num_parts(shard_dW.shape[1] * shards, shards) == 1:
        return ops.token_cross_entropy(x_BLD, gather_columns(shard_dW), target_BL, **settings)
    part_Zdw, column_Zw = _in_parts(shard_dW, axis, shards)
    return ops.token_cross_entropy_in_parts(
        x_BLD, part_Zdw, column_Zw, target_BL, fetch=gather_columns, **settings
    )


def top_k_in_parts(
    x_BLD: Float[Array, "B _ D"],
    shard: Float[Array, "_ _"],
    fetch: Callable[[Array], Array],
    *,
    k: int,
    tied: bool,
    axis: ops.VocabAxis,
    shards: int,
    chunk_tokens: int | None,
    soft_cap: float | None,
) -> ops.SoftTargets:
    """Log-probabilities of the k most probable tokens after each of this device's, and of all others
    together.

    Other arguments are those of `loss_in_parts`.
    """
    shard_dW, gather_columns = _columns(shard, fetch, tied=tied)
    part_Zdw, column_Zw = _in_parts(shard_dW, axis, shards)
    return ops.top_k_in_parts(
        x_BLD,
        part_Zdw,
        column_Zw,
        k=k,
        fetch=gather_columns,
        chunk_tokens=chunk_tokens,
        soft_cap=soft_cap,
        axis=axis if shards > 1 else None,
    )


def _columns(
    shard: Float[Array, "_ _"], fetch: Callable[[Array], Array], *, tied: bool
) -> tuple[Float[Array, "d W"], Callable[[Array], Float[Array, "D _"]]]:
    """Returns this device's block of the unembedding, and the function that gathers some of its columns."""

    def gather_columns(part_dw: Array) -> Float[Array, "D W"]:
        # A tied table is [V, D]: ZeRO gathers its second dimension, so parts travel transposed.
        return fetch(part_dw.T).T if tied else fetch(part_dw)

    return (shard.T if tied else shard), gather_columns


def _in_parts(
    shard_dW: Float[Array, "d W"], axis: ops.VocabAxis, shards: int
) -> tuple[Float[Array, "Z d w"], Int[Array, "Z w"]]:
    """Returns the parts of this device's block, padded to equal sizes, and the ids of their columns.

    Columns come last: the few rows of a shard would be padded to a TPU's 128 lanes.
    """
    d, local_columns = shard_dW.shape
    # 128,256 columns over 4 shards: 32,064 each, in 2 parts of 16,032.
    parts = num_parts(local_columns * shards, shards)
    num_padding = -local_columns % parts
    # Every device's own block is cut, so that all gather in each part, and equally much.
    part_dZw = jnp.pad(shard_dW, ((0, 0), (0, num_padding))).reshape(d, parts, -1)
    # Blocks of the vocabulary follow the device's index along the axes, outermost first.
    first = jax.lax.axis_index(axis) * local_columns if shards > 1 else 0
    # NO_COLUMN keeps padding out of the softmax, and no target has that id.
    column_W = jnp.pad(first + jnp.arange(local_columns), (0, num_padding), constant_values=ops.NO_COLUMN)
    return jnp.moveaxis(part_dZw, 1, 0), column_W.reshape(parts, -1)
