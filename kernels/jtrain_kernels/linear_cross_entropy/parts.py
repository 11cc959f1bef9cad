"""Fused unembedding and cross entropy over parts of the vocabulary; never holds the whole unembedding."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain_kernels.linear.reference import contract
from jtrain_kernels.linear_cross_entropy.api import (
    chosen_chunk,
    in_chunks,
    nats_of,
    slope_weights,
    weighted_sums,
)
from jtrain_kernels.linear_cross_entropy.vocab import IGNORE, Axis, Vocab
from jtrain_kernels.soft_cap import capped, times_slope

type Fetch = Callable[[Any], Float[Array, "D W"]]

NO_COLUMN = -2
"""Id of columns that only pad the last part."""


def linear_cross_entropy_in_parts(
    x_BLD: Float[Array, "B _ D"],
    parts: Any,
    column_ZW: Int[Array, "Z W"],
    target_BL: Int[Array, "B L"],
    *,
    fetch: Fetch,
    chunk_tokens: int | None,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    axis: Axis | None = None,
    weight_BL: Float[Array, "B L"] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """`linear_cross_entropy` with an unembedding in Z parts of W columns, each fetched when it is needed.

    Holds one part (D * W), its gradient in float32, and chunk_tokens * W logits; `linear_cross_entropy` holds
    D * V of each and chunk_tokens * V. In return, a part is fetched twice when differentiated, and its logits
    are computed
    twice: four matmuls instead of three.

    With `axis` it is `vocab_parallel_linear_cross_entropy` in parts: each device has parts of its own
    columns, and holds the hidden states of all devices and their gradient once.

    Args:
      parts: inputs of `fetch`, an array or a tree of arrays with leading dimension Z; differentiable.
      column_ZW: ids of the columns of each part; NO_COLUMN for padding.
      target_BL, weight_BL: with `axis`, of the positions of all its devices.
      fetch: part -> columns of the unembedding [D, W]; must be differentiable. Its gradient is computed part
        by part, before the next part is fetched.

    All other arguments and the results are those of `linear_cross_entropy`.
    """
    vocab = Vocab(axis)
    size = _chunk_size(x_BLD, parts, column_ZW, target_BL, fetch, chunk_tokens, axis)
    x_SCD, target_SC, own_SC = _chunked(x_BLD, target_BL, size, vocab)
    weight_SC = None if weight_BL is None else in_chunks(weight_BL.reshape(-1), size)
    return _loss(x_SCD, parts, column_ZW, target_SC, own_SC, weight_SC, fetch, z_loss, soft_cap, vocab)


def token_cross_entropy_in_parts(
    x_BLD: Float[Array, "B _ D"],
    parts: Any,
    column_ZW: Int[Array, "Z W"],
    target_BL: Int[Array, "B L"],
    *,
    fetch: Fetch,
    chunk_tokens: int | None,
    soft_cap: float | None = None,
    axis: Axis | None = None,
) -> Float[Array, "B _"]:
    """`token_cross_entropy` with an unembedding in parts, each fetched once; arguments as above."""
    vocab = Vocab(axis)
    size = _chunk_size(x_BLD, parts, column_ZW, target_BL, fetch, chunk_tokens, axis)
    x_SCD, target_SC, own_SC = _chunked(x_BLD, target_BL, size, vocab)
    nats_SC = nats_of(*_summaries(x_SCD, parts, column_ZW, target_SC, fetch, soft_cap, vocab), own_SC)
    # Chunks may be padded at the end, beyond the tokens of the batch.
    nats_BL = nats_SC.reshape(-1)[: target_BL.size].reshape(target_BL.shape)
    return vocab.local_positions(nats_BL)


def _chunk_size(
    x_BLD: Array,
    parts: Any,
    column_ZW: Array,
    target_BL: Array,
    fetch: Fetch,
    chunk_tokens: int | None,
    axis: Axis | None,
) -> int:
    if chunk_tokens is not None:
        return chunk_tokens
    # eval_shape: the width of a part is known without fetching one.
    width = jax.eval_shape(fetch, jax.tree.map(lambda part: part[0], parts)).shape[1] * column_ZW.shape[0]
    return chosen_chunk(x_BLD, width, target_BL, axis)


def _chunked(x_BLD: Array, target_BL: Array, size: int, vocab: Vocab) -> tuple[Array, Array, Array]:
    """Chunks of all devices' hidden states and targets, and of this device's targets, IGNORE elsewhere."""
    own_BL = vocab.local_targets(target_BL)
    # All devices' tokens at once: parts are the outer loop, so they are not gathered chunk by chunk.
    x_BLD = vocab.gather(x_BLD, 1)
    x_SCD = in_chunks(x_BLD.reshape(-1, x_BLD.shape[-1]), size)
    target_SC, own_SC = (in_chunks(t.reshape(-1), size, fill=IGNORE) for t in (target_BL, own_BL))
    return x_SCD, target_SC, own_SC


def _logits(x_CD: Array, kernel_DW: Array, column_W: Array, soft_cap: float | None) -> Float[Array, "C W"]:
    logits_CW = capped(contract(x_CD, kernel_DW, 1, 0, jnp.float32), soft_cap)
    # Padding columns get no probability, in the loss and in its gradient.
    return jnp.where(column_W == NO_COLUMN, -jnp.inf, logits_CW)


def _summaries(
    x_SCD: Array,
    parts: Any,
    column_ZW: Array,
    target_SC: Array,
    fetch: Fetch,
    soft_cap: float | None,
    vocab: Vocab,
) -> tuple[Float[Array, "S C"], Float[Array, "S C"]]:
    """Log-partition of each token, and the logit of its target."""

    def add_part(
        carry: tuple[Array, ...], part_and_columns: tuple[Any, Array]
    ) -> tuple[tuple[Array, ...], None]:
        kernel_DW, column_W = fetch(part_and_columns[0]).astype(x_SCD.dtype), part_and_columns[1]

        def add_chunk(_: None, token_stats: tuple[Array, ...]) -> tuple[None, tuple[Array, ...]]:
            x_CD, target_C, top_C, total_C, picked_C = token_stats
            logits_CW = _logits(x_CD, kernel_DW, column_W, soft_cap)
            # Online softmax over parts: earlier sums are rescaled to the new maximum.
            higher_C = jnp.maximum(top_C, jnp.max(logits_CW, axis=-1))
            total_C = total_C * jnp.exp(top_C - higher_C) + jnp.sum(
                jnp.exp(logits_CW - higher_C[:, None]), axis=-1
            )
            is_target_CW = column_W[None, :] == target_C[:, None]
            return None, (
                higher_C,
                total_C,
                picked_C + jnp.sum(jnp.where(is_target_CW, logits_CW, 0.0), axis=-1),
            )

        # Parts outside, chunks inside: a part is fetched once and used for all tokens.
        return jax.lax.scan(add_chunk, None, (x_SCD, target_SC, *carry))[1], None

    shape = target_SC.shape
    # The lowest finite number, because -inf - -inf would be nan if a part has only padding.
    start = jnp.full(shape, jnp.finfo(jnp.float32).min), jnp.zeros(shape), jnp.zeros(shape)
    (top_SC, total_SC, picked_SC), _ = jax.lax.scan(add_part, start, (parts, column_ZW))
    return vocab.merge(top_SC, total_SC, picked_SC)


# Arguments 6 to 9 are no arrays: fetch, z_loss, soft_cap, vocab.
@partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8, 9))
def _loss(
    x_SCD: Array,
    parts: Any,
    column_ZW: Array,
    target_SC: Array,
    own_SC: Array,
    weight_SC: Array | None,
    fetch: Fetch,
    z_loss: float,
    soft_cap: float | None,
    vocab: Vocab,
) -> tuple[Array, Array]:
    """Loss over S chunks of C tokens; `own_SC` holds the targets of this device's tokens and IGNORE for all
    others.
    """
    summaries = _summaries(x_SCD, parts, column_ZW, target_SC, fetch, soft_cap, vocab)
    return weighted_sums(*summaries, own_SC, weight_SC, z_loss)


def _forward(
    x_SCD: Array,
    parts: Any,
    column_ZW: Array,
    target_SC: Array,
    own_SC: Array,
    weight_SC: Array | None,
    fetch: Fetch,
    z_loss: float,
    soft_cap: float | None,
    vocab: Vocab,
) -> tuple[tuple[Array, Array], tuple[Array, Any]]:
    lse_SC, picked_SC = _summaries(x_SCD, parts, column_ZW, target_SC, fetch, soft_cap, vocab)

    def add_part(dx_SCD: Array, part_and_columns: tuple[Any, Array]) -> tuple[Array, Any]:
        # The pullback is this part's alone, so its gradient leaves before the next part comes.
        fetched_DW, pull = jax.vjp(fetch, part_and_columns[0])
        kernel_DW, column_W = fetched_DW.astype(x_SCD.dtype), part_and_columns[1]

        def add_chunk(dkernel_DW: Array, token_stats: tuple[Any, ...]) -> tuple[Array, Array]:
            x_CD, target_C, factor_C, lse_C, dx_CD = token_stats
            # Logits are computed a second time: those of the first pass are gone, and lse is over all parts.
            logits_CW = _logits(x_CD, kernel_DW, column_W, soft_cap)
            # d(nats)/d(logits) = softmax - onehot; d(lse^2)/d(logits) = 2 lse softmax.
            weight_C = slope_weights(target_C, factor_C)
            softmax_CW = (
                jnp.exp(logits_CW - lse_C[:, None]) * ((1.0 + 2.0 * z_loss * lse_C) * weight_C)[:, None]
            )
            is_target_CW = column_W[None, :] == target_C[:, None]
            onehot_CW = is_target_CW if factor_C is None else is_target_CW * weight_C[:, None]
            dlogits_CW = times_slope(softmax_CW - onehot_CW, logits_CW, soft_cap).astype(x_CD.dtype)
            dkernel_DW += contract(x_CD, dlogits_CW, 0, 0, jnp.float32)
            return dkernel_DW, dx_CD + contract(dlogits_CW, kernel_DW, 1, 1, jnp.float32)

        start = jnp.zeros(kernel_DW.shape, jnp.float32)
        dkernel_DW, dx_SCD = jax.lax.scan(add_chunk, start, (x_SCD, target_SC, weight_SC, lse_SC, dx_SCD))
        # In the dtype of the fetched part, as its pullback expects.
        return dx_SCD, pull(dkernel_DW.astype(fetched_DW.dtype))[0]

    dx_SCD, dparts = jax.lax.scan(add_part, jnp.zeros(x_SCD.shape, jnp.float32), (parts, column_ZW))
    return weighted_sums(lse_SC, picked_SC, own_SC, weight_SC, z_loss), (dx_SCD.astype(x_SCD.dtype), dparts)


def _backward(
    fetch: Fetch,
    z_loss: float,
    soft_cap: float | None,
    vocab: Vocab,
    saved: tuple[Array, Any],
    cotangents: tuple[Array, Array],
) -> tuple[Array, Any, None, None, None, None]:
    del fetch, z_loss, soft_cap, vocab  # already part of the saved gradients

    def scaled(gradient: Array) -> Array:
        return (gradient.astype(jnp.float32) * cotangents[0]).astype(gradient.dtype)

    return scaled(saved[0]), jax.tree.map(scaled, saved[1]), None, None, None, None


_loss.defvjp(_forward, _backward)
