"""Fused unembedding and cross entropy over parts of the vocabulary; never holds the whole unembedding.

Letters here: S chunks of C tokens, Z parts of the unembedding of W columns each.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain_kernels.linear.reference import contract
from jtrain_kernels.linear_cross_entropy.api import chosen_chunk
from jtrain_kernels.linear_cross_entropy.soft_targets import (
    SoftTargets,
    mixed_goal,
    mixed_nats,
    of_others,
    part_columns,
    pick,
)
from jtrain_kernels.linear_cross_entropy.token_chunks import in_chunks, nats_of, slope_weights, weighted_sums
from jtrain_kernels.linear_cross_entropy.vocab import IGNORE, Axis, Vocab
from jtrain_kernels.soft_cap import capped, times_slope

type Fetch = Callable[[Any], Float[Array, "D W"]]
"""Function that gives a part of the unembedding, by its number."""

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
    soft: SoftTargets | None = None,
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
      column_ZW: ids of the columns of each part; NO_COLUMN for padding. With `soft` they are consecutive in
        each part, and its padding is at its end.
      target_BL, weight_BL, soft: with `axis`, of the positions of all its devices.
      fetch: part -> columns of the unembedding [D, W]; must be differentiable. Its gradient is computed part
        by part, before the next part is fetched.

    All other arguments and the results are those of `linear_cross_entropy`.
    """
    vocab = Vocab(axis)
    size = _chunk_size(x_BLD, parts, column_ZW, target_BL, fetch, chunk_tokens, axis)
    x_SCD, target_SC, own_SC = _chunked(x_BLD, target_BL, size, vocab)
    weight_SC = None if weight_BL is None else in_chunks(weight_BL.reshape(-1), size)
    # None has no arrays, and stays None.
    soft_SC = jax.tree.map(lambda x: in_chunks(x.reshape(-1, x.shape[-1]), size), soft)
    return _loss(
        x_SCD, parts, column_ZW, target_SC, own_SC, weight_SC, soft_SC, fetch, z_loss, soft_cap, vocab
    )


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
    summary = _summaries(x_SCD, parts, column_ZW, target_SC, None, fetch, soft_cap, vocab)
    nats_SC = nats_of(summary.lse, summary.picked, own_SC)
    # Chunks may be padded at the end, beyond the tokens of the batch.
    nats_BL = nats_SC.reshape(-1)[: target_BL.size].reshape(target_BL.shape)
    return vocab.local_positions(nats_BL)


def top_k_in_parts(
    x_BLD: Float[Array, "B _ D"],
    parts: Any,
    column_ZW: Int[Array, "Z W"],
    *,
    k: int,
    fetch: Fetch,
    chunk_tokens: int | None,
    soft_cap: float | None = None,
    axis: Axis | None = None,
) -> SoftTargets:
    """Log-probabilities of the `k` most probable tokens after each of this device's, and of all others
    together.

    Args:
      column_ZW: as of `linear_cross_entropy_in_parts` with `soft`.

    Returns:
      The tokens of each in falling order of their probability, those of equal ones in order of their ids.
    """
    vocab = Vocab(axis)
    whole_BLD = vocab.gather(x_BLD, 1)
    target_BL = jnp.full(whole_BLD.shape[:2], IGNORE)
    size = _chunk_size(x_BLD, parts, column_ZW, target_BL, fetch, chunk_tokens, axis)
    x_SCD, target_SC, _ = _chunked(x_BLD, target_BL, size, vocab)

    def add_part(best: tuple[Array, Array], part_and_columns: tuple[Any, Array]) -> tuple[Any, None]:
        kernel_DW, column_W = fetch(part_and_columns[0]).astype(x_SCD.dtype), part_and_columns[1]

        def add_chunk(_: None, chunk: tuple[Array, Array, Array]) -> tuple[None, tuple[Array, Array]]:
            x_CD, logit_CJ, id_CJ = chunk
            logits_CW = _logits(x_CD, kernel_DW, column_W, soft_cap)
            added_id_CW = jnp.broadcast_to(column_W, logits_CW.shape)
            # What was kept stands before the new columns, as its ids are lower.
            return None, _largest(
                jnp.concatenate([logit_CJ, logits_CW], axis=1),
                jnp.concatenate([id_CJ, added_id_CW], axis=1),
                k,
            )

        return jax.lax.scan(add_chunk, None, (x_SCD, *best))[1], None

    start = jnp.full((*target_SC.shape, k), -jnp.inf), jnp.full((*target_SC.shape, k), NO_COLUMN)
    (logit_SCJ, id_SCJ), _ = jax.lax.scan(add_part, start, (parts, column_ZW))
    # Of each device's best the best: devices have columns in the order of the concatenation.
    _, id_SCJ = _largest(vocab.gather(logit_SCJ, 2), vocab.gather(id_SCJ, 2), k)
    summary = _summaries(x_SCD, parts, column_ZW, target_SC, id_SCJ, fetch, soft_cap, vocab)
    outcome_SCI = jnp.concatenate([summary.soft_picked, summary.rest[..., None]], axis=-1)
    logprob_SCI = outcome_SCI - summary.lse[..., None]

    def own(x_SC: Array) -> Array:
        """This device's positions, without the tokens that pad the last chunk."""
        x_T = x_SC.reshape(-1, x_SC.shape[-1])[: target_BL.size]
        return vocab.local_positions(x_T.reshape(*target_BL.shape, -1))

    return SoftTargets(own(id_SCJ), own(logprob_SCI))


def _largest(logit: Float[Array, "*C W"], id: Int[Array, "*C W"], k: int) -> tuple[Array, Array]:
    """The k largest logits and their ids; of equal ones those that come first."""
    largest, index = jax.lax.top_k(logit, k)
    return largest, jnp.take_along_axis(id, index, axis=-1)


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


class _Summary(NamedTuple):
    """Of each token, over all columns.

    lse: log-partition.
    picked: logit of the target.
    soft_picked, rest: logits of the tokens that a teacher kept, and the log-partition of all others; None
      without a teacher.
    """

    lse: Float[Array, "S C"]
    picked: Float[Array, "S C"]
    soft_picked: Any
    rest: Any


def _summaries(
    x_SCD: Array,
    parts: Any,
    column_ZW: Array,
    target_SC: Array,
    soft_id_SCJ: Array | None,
    fetch: Fetch,
    soft_cap: float | None,
    vocab: Vocab,
) -> _Summary:
    """Passes over all parts once."""

    def add_part(carry: _Sums, part_and_columns: tuple[Any, Array]) -> tuple[_Sums, None]:
        kernel_DW, column_W = fetch(part_and_columns[0]).astype(x_SCD.dtype), part_and_columns[1]

        def add_chunk(_: None, token_stats: tuple[Any, ...]) -> tuple[None, _Sums]:
            x_CD, target_C, soft_id_CJ, sums = token_stats
            logits_CW = _logits(x_CD, kernel_DW, column_W, soft_cap)
            is_target_CW = column_W[None, :] == target_C[:, None]
            picked_C = sums.picked + jnp.sum(jnp.where(is_target_CW, logits_CW, 0.0), axis=-1)
            whole, others, soft_picked_CJ = _add_logits(sums.whole, logits_CW), sums.others, sums.soft_picked
            if soft_id_CJ is not None:
                column_CJ = part_columns(soft_id_CJ, column_W)
                others = _add_logits(others, of_others(logits_CW, column_CJ))
                soft_picked_CJ = soft_picked_CJ + pick(logits_CW, column_CJ)
            return None, _Sums(whole, picked_C, others, soft_picked_CJ)

        # Parts outside, chunks inside: a part is fetched once and used for all tokens.
        return jax.lax.scan(add_chunk, None, (x_SCD, target_SC, soft_id_SCJ, carry))[1], None

    zero_SC = jnp.zeros(target_SC.shape)
    # The lowest finite number, because -inf - -inf would be nan if a part has only padding.
    none_yet = jnp.full(target_SC.shape, jnp.finfo(jnp.float32).min), zero_SC
    start = _Sums(none_yet, zero_SC, None, None)
    if soft_id_SCJ is not None:
        start = _Sums(none_yet, zero_SC, none_yet, jnp.zeros(soft_id_SCJ.shape))
    sums, _ = jax.lax.scan(add_part, start, (parts, column_ZW))
    lse_SC, picked_SC = vocab.merge(*sums.whole, sums.picked)
    if sums.others is None:
        return _Summary(lse_SC, picked_SC, None, None)
    rest_SC, _ = vocab.merge(*sums.others, zero_SC)
    return _Summary(lse_SC, picked_SC, vocab.sum_blocks(sums.soft_picked), rest_SC)


class _Sums(NamedTuple):
    """Of each token, over the parts so far; `whole` and `others` are a largest logit and a sum of
    exponentials.
    """

    whole: tuple[Array, Array]
    picked: Array
    others: tuple[Array, Array] | None
    soft_picked: Any


def _add_logits(sums: Any, logits_CW: Array) -> tuple[Array, Array]:
    """A largest logit and a sum of exponentials with those of further columns."""
    top_C, total_C = sums
    # Online softmax over parts: earlier sums are rescaled to the new maximum.
    higher_C = jnp.maximum(top_C, jnp.max(logits_CW, axis=-1))
    added_C = jnp.sum(jnp.exp(logits_CW - higher_C[:, None]), axis=-1)
    return higher_C, total_C * jnp.exp(top_C - higher_C) + added_C


# Arguments 7 to 10 are no arrays: fetch, z_loss, soft_cap, vocab.
@partial(jax.custom_vjp, nondiff_argnums=(7, 8, 9, 10))
def _loss(
    x_SCD: Array,
    parts: Any,
    column_ZW: Array,
    target_SC: Array,
    own_SC: Array,
    weight_SC: Array | None,
    soft_SC: SoftTargets | None,
    fetch: Fetch,
    z_loss: float,
    soft_cap: float | None,
    vocab: Vocab,
) -> tuple[Array, Array]:
    """Loss over S chunks of C tokens; `own_SC` holds the targets of this device's tokens and IGNORE for all
    others.
    """
    soft_id_SCJ = None if soft_SC is None else soft_SC.id
    summary = _summaries(x_SCD, parts, column_ZW, target_SC, soft_id_SCJ, fetch, soft_cap, vocab)
    return weighted_sums(summary.lse, _nats(summary, soft_SC), own_SC, weight_SC, z_loss)


def _nats(summary: _Summary, soft_SC: SoftTargets | None) -> Float[Array, "S C"]:
    nats_SC = summary.lse - summary.picked
    if soft_SC is None:
        return nats_SC
    return mixed_nats(soft_SC, nats_SC, summary.lse, summary.soft_picked, summary.rest)


def _forward(
    x_SCD: Array,
    parts: Any,
    column_ZW: Array,
    target_SC: Array,
    own_SC: Array,
    weight_SC: Array | None,
    soft_SC: SoftTargets | None,
    fetch: Fetch,
    z_loss: float,
    soft_cap: float | None,
    vocab: Vocab,
) -> tuple[tuple[Array, Array], tuple[Array, Any]]:
    soft_id_SCJ = None if soft_SC is None else soft_SC.id
    summary = _summaries(x_SCD, parts, column_ZW, target_SC, soft_id_SCJ, fetch, soft_cap, vocab)

    def add_part(dx_SCD: Array, part_and_columns: tuple[Any, Array]) -> tuple[Array, Any]:
        # The pullback is this part's alone, so its gradient leaves before the next part comes.
        fetched_DW, pull = jax.vjp(fetch, part_and_columns[0])
        kernel_DW, column_W = fetched_DW.astype(x_SCD.dtype), part_and_columns[1]

        def add_chunk(dkernel_DW: Array, token_stats: tuple[Any, ...]) -> tuple[Array, Array]:
            x_CD, target_C, factor_C, soft_C, lse_C, rest_C, dx_CD = token_stats
            # Logits are computed a second time: those of the first pass are gone, and lse is over all parts.
            logits_CW = _logits(x_CD, kernel_DW, column_W, soft_cap)
            # d(nats)/d(logits) = softmax - onehot; d(lse^2)/d(logits) = 2 lse softmax.
            weight_C = slope_weights(target_C, factor_C)
            softmax_CW = (
                jnp.exp(logits_CW - lse_C[:, None]) * ((1.0 + 2.0 * z_loss * lse_C) * weight_C)[:, None]
            )
            is_target_CW = column_W[None, :] == target_C[:, None]
            goal_CW = is_target_CW
            if soft_C is not None:
                goal_CW = mixed_goal(soft_C, goal_CW, logits_CW, part_columns(soft_C.id, column_W), rest_C)
            # The column of a target says alone that a token has one; a teacher may have spoken of any.
            if factor_C is not None or soft_C is not None:
                goal_CW = goal_CW * weight_C[:, None]
            dlogits_CW = times_slope(softmax_CW - goal_CW, logits_CW, soft_cap).astype(x_CD.dtype)
            dkernel_DW += contract(x_CD, dlogits_CW, 0, 0, jnp.float32)
            return dkernel_DW, dx_CD + contract(dlogits_CW, kernel_DW, 1, 1, jnp.float32)

        start = jnp.zeros(kernel_DW.shape, jnp.float32)
        tokens = x_SCD, target_SC, weight_SC, soft_SC, summary.lse, summary.rest, dx_SCD
        dkernel_DW, dx_SCD = jax.lax.scan(add_chunk, start, tokens)
        # In the dtype of the fetched part, as its pullback expects.
        return dx_SCD, pull(dkernel_DW.astype(fetched_DW.dtype))[0]

    dx_SCD, dparts = jax.lax.scan(add_part, jnp.zeros(x_SCD.shape, jnp.float32), (parts, column_ZW))
    sums = weighted_sums(summary.lse, _nats(summary, soft_SC), own_SC, weight_SC, z_loss)
    return sums, (dx_SCD.astype(x_SCD.dtype), dparts)


def _backward(
    fetch: Fetch,
    z_loss: float,
    soft_cap: float | None,
    vocab: Vocab,
    saved: tuple[Array, Any],
    cotangents: tuple[Array, Array],
) -> tuple[Array, Any, None, None, None, None, None]:
    del fetch, z_loss, soft_cap, vocab  # already part of the saved gradients

    def scaled(gradient: Array) -> Array:
        return (gradient.astype(jnp.float32) * cotangents[0]).astype(gradient.dtype)

    return scaled(saved[0]), jax.tree.map(scaled, saved[1]), None, None, None, None, None


_loss.defvjp(_forward, _backward)
