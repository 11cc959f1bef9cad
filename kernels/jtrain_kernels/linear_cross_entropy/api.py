"""Fused unembedding and cross entropy, which never holds all the logits.

Letters here: C tokens of a chunk, W columns of the unembedding that a device has.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain_kernels import registry
from jtrain_kernels.device import DeviceSpec
from jtrain_kernels.errors import UserError
from jtrain_kernels.linear.cpu import transposed
from jtrain_kernels.linear.reference import contract
from jtrain_kernels.linear_cross_entropy.chunking import CANDIDATES, best_chunk, predict
from jtrain_kernels.linear_cross_entropy.soft_targets import (
    SoftTargets,
    block_columns,
    mixed_goal,
    mixed_nats,
    outcomes,
)
from jtrain_kernels.linear_cross_entropy.token_chunks import (
    by_device,
    in_chunks,
    nats_of,
    slope_weights,
    weighted_sums,
)
from jtrain_kernels.linear_cross_entropy.vocab import IGNORE, Axis, Vocab
from jtrain_kernels.platforms import by_platform
from jtrain_kernels.soft_cap import capped, times_slope


def linear_cross_entropy(
    x_BLD: Float[Array, "B L D"],
    unembed_DV: Float[Array, "D V"],
    target_BL: Int[Array, "B L"],
    *,
    chunk_tokens: int | None,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    weight_BL: Float[Array, "B L"] | None = None,
    soft: SoftTargets | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Cross entropy of `x @ unembed` and its gradient, holding the logits of `chunk_tokens` tokens at a time.

    These are chunk_tokens * V * 4 bytes of logits instead of B * L * V * 4. When differentiated, the gradient
    is computed in the same pass as the loss, with three matmuls; recomputing the logits in the backward pass
    would take four. `d unembed`, D * V * 4 bytes, is then alive from the forward to the backward pass.
    Without differentiation, only the loss is computed. All shapes are one device's block, with `unembed`
    whole.

    Args:
      x_BLD: last hidden states; the matmuls run in their dtype, the softmax and all sums in float32.
      target_BL: next-token ids in [0, V), or -1 where there is nothing to predict.
      chunk_tokens: tokens whose logits exist at a time; None takes the size that was measured on the device,
        or else the best size predicted by `chunking`.
      z_loss: coefficient of the squared log-partition (arXiv:2204.02311, section 5).
      soft_cap: bounds logits smoothly, by tanh, see `soft_cap.py`; None for none.
      weight_BL: float32 factor of each token in both sums and in the gradient; it gets no gradient itself.
        None weighs all tokens alike.
      soft: what a teacher says of each token, [B, L, J] and [B, L, J + 1]; then the nats of a token are its
        share of the divergence from the teacher and the rest of the cross entropy.

    Returns:
      Two float32 sums (not means) over tokens with a target: divide by the global number of such tokens, so
      that accumulation over microbatches is exact. The first is the objective, nats + z_loss *
      sum(logsumexp^2). The second is the nats, for reporting; its gradient is zero.

    Raises:
      UserError: chunk_tokens is not positive.

    Source: the gradient in the forward pass is Liger Kernel's, arXiv:2410.10989, section 3.2.
    """
    return registry.call(
        LINEAR_CROSS_ENTROPY,
        x_BLD=x_BLD,
        unembed_DV=unembed_DV,
        target_BL=target_BL,
        chunk_tokens=chunk_tokens,
        z_loss=z_loss,
        soft_cap=soft_cap,
        axis=None,
        **_given(weight_BL, soft),
    )


def vocab_parallel_linear_cross_entropy(
    x_BLD: Float[Array, "B _ D"],
    unembed_DW: Float[Array, "D W"],
    target_BL: Int[Array, "B L"],
    *,
    axis: Axis,
    chunk_tokens: int | None,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    weight_BL: Float[Array, "B L"] | None = None,
    soft: SoftTargets | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """`linear_cross_entropy` inside a `shard_map` whose `axis` splits positions and vocabulary: W = V / n.

    No device ever holds the columns of another. For each chunk a device gathers all devices' hidden states
    (all-gather), computes their logits in its own columns, and returns its part of their gradient
    (reduce-scatter, in x's dtype). The network carries 2 * B * L * D elements, where gathering the
    unembedding takes 2 * D * V. In addition it carries three float32 per token and device, the parts of the
    log-partition.

    Args:
      x_BLD: this device's block of the L positions; device i of n has positions from i * L / n on.
      unembed_DW: this device's columns; device i has columns from i * W on.
      target_BL, weight_BL, soft: of all positions, the same on every device of the axis.
      chunk_tokens: tokens per device; a chunk has n times as many tokens and V / n columns, so equally many
        logits as on one device.

    Returns:
      The two sums over this device's own tokens. Their cotangent must be the same on every device of the
      axis, like the weight of a mean, because gradients are computed before it is known.

    Raises:
      UserError: chunk_tokens is not positive, or L is not n times the length of x.

    Source: the split is Megatron-LM's vocab-parallel cross entropy, arXiv:1909.08053, section 3.
    """
    n, L = jax.lax.axis_size(axis), x_BLD.shape[1]
    if target_BL.shape[1] != n * L:
        raise UserError(
            f"vocab_parallel_linear_cross_entropy: x has {L} positions on each of {n} devices along "
            f"`{axis}`, but there are {target_BL.shape[1]} targets, not {n * L}. Give the targets of all "
            "positions."
        )
    return registry.call(
        LINEAR_CROSS_ENTROPY,
        x_BLD=x_BLD,
        unembed_DV=unembed_DW,
        target_BL=target_BL,
        chunk_tokens=chunk_tokens,
        z_loss=z_loss,
        soft_cap=soft_cap,
        axis=axis,
        **_given(weight_BL, soft),
    )


def _given(weight_BL: Array | None, soft: SoftTargets | None) -> dict[str, Any]:
    """Arguments of the op that are there."""
    weight = {} if weight_BL is None else {"weight_BL": weight_BL}
    if soft is None:
        return weight
    return weight | {"soft_id_BLJ": soft.id, "soft_logprob_BLI": soft.logprob, "soft_share": soft.share}


def _xla(
    x_BLD: Array,
    unembed_DV: Array,
    target_BL: Array,
    chunk_tokens: int | None,
    z_loss: float,
    soft_cap: float | None,
    axis: Axis | None,
    chunk: int,
    weight_BL: Array | None = None,
    soft_id_BLJ: Array | None = None,
    soft_logprob_BLI: Array | None = None,
    soft_share: float = 1.0,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    size = chunk if chunk_tokens is None else chunk_tokens
    x_ZcD, target_ZC = _chunked(x_BLD, target_BL, size)
    weight_ZC = None if weight_BL is None else by_device(weight_BL, x_BLD, size, fill=0)
    soft = None
    if soft_id_BLJ is not None and soft_logprob_BLI is not None:
        soft = SoftTargets(
            by_device(soft_id_BLJ, x_BLD, size, fill=0),
            by_device(soft_logprob_BLI, x_BLD, size, fill=0),
            soft_share,
        )
    return _loss(x_ZcD, unembed_DV, target_ZC, weight_ZC, soft, z_loss, soft_cap, Vocab(axis))


def _chunked(
    x_BLD: Float[Array, "B _ D"], target_BL: Int[Array, "B L"], size: int
) -> tuple[Float[Array, "Z c D"], Int[Array, "Z C"]]:
    """Splits hidden states of this device, and targets of all that share the vocabulary, into Z chunks."""
    x_ZcD = in_chunks(x_BLD.reshape(-1, x_BLD.shape[-1]), size)
    return x_ZcD, by_device(target_BL, x_BLD, size, fill=IGNORE)


def token_cross_entropy(
    x_BLD: Float[Array, "B _ D"],
    unembed_DW: Float[Array, "D W"],
    target_BL: Int[Array, "B L"],
    *,
    chunk_tokens: int | None,
    soft_cap: float | None = None,
    axis: Axis | None = None,
) -> Float[Array, "B _"]:
    """Cross entropy in nats of each of this device's tokens, float32; 0 where nothing is predicted.

    It is what `linear_cross_entropy`, or with `axis` `vocab_parallel_linear_cross_entropy`, sums up, for
    evaluation: the gradient is not computed in the same pass. Arguments are theirs.
    """
    size = chosen_chunk(x_BLD, unembed_DW.shape[1], target_BL, axis) if chunk_tokens is None else chunk_tokens
    x_ZcD, target_ZC = _chunked(x_BLD, target_BL, size)
    kernel_DW, vocab = unembed_DW.astype(x_BLD.dtype), Vocab(axis)

    def chunk(_: None, x_and_target: tuple[Array, Array]) -> tuple[None, Array]:
        x_cD, target_C = x_and_target
        logits_CW = capped(contract(vocab.gather(x_cD), kernel_DW, 1, 0, jnp.float32), soft_cap)
        return None, nats_of(*vocab.local_slices(*vocab.summary(logits_CW, target_C), target_C))

    _, nats_Zc = jax.lax.scan(chunk, None, (x_ZcD, target_ZC))
    B, L, _ = x_BLD.shape
    # The last chunk is padded; its surplus tokens come after the last token.
    return nats_Zc.reshape(-1)[: B * L].reshape(B, L)


def chosen_chunk(
    x_BLD: Float[Array, "B _ D"], columns: int, target_BL: Int[Array, "B L"], axis: Axis | None
) -> int:
    """Default tokens of a chunk, for a device with `columns` columns of the unembedding."""
    unembed = jax.ShapeDtypeStruct((x_BLD.shape[2], columns), x_BLD.dtype)
    arguments = dict(
        x_BLD=x_BLD,
        unembed_DV=unembed,
        target_BL=target_BL,
        chunk_tokens=None,
        z_loss=0.0,
        soft_cap=None,
        axis=axis,
    )
    return registry.select(LINEAR_CROSS_ENTROPY, registry.avals_of(arguments)).config["chunk"]


# Arguments 5 to 7 are no arrays: z_loss, soft_cap, vocab.
@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _loss(
    x_ZcD: Array,
    unembed_DW: Array,
    target_ZC: Array,
    weight_ZC: Array | None,
    soft_ZC: SoftTargets | None,
    z_loss: float,
    soft_cap: float | None,
    vocab: Vocab,
) -> tuple[Array, Array]:
    """Objective and nats over Z chunks: c tokens of this device, C of all that share the vocabulary."""
    kernel_DW = unembed_DW.astype(x_ZcD.dtype)

    def chunk(sums: Array, tokens: tuple[Any, ...]) -> tuple[Array, None]:
        x_cD, target_C, weight_C, soft_C = tokens
        logits_CW = capped(contract(vocab.gather(x_cD), kernel_DW, 1, 0, jnp.float32), soft_cap)
        lse_C, picked_C = vocab.summary(logits_CW, target_C)
        nats_C = lse_C - picked_C
        if soft_C is not None:
            column_CJ = block_columns(vocab, soft_C.id, logits_CW.shape[1])
            nats_C = mixed_nats(soft_C, nats_C, lse_C, *outcomes(vocab, logits_CW, column_CJ))
        # Logits are of all devices' tokens, but each device sums its own tokens only.
        summary = vocab.local_slices(lse_C, nats_C, target_C, weight_C)
        return sums + _sums(summary, z_loss), None

    tokens = x_ZcD, target_ZC, weight_ZC, soft_ZC
    (total, nats), _ = jax.lax.scan(chunk, jnp.zeros(2, jnp.float32), tokens)
    return total, nats


def _sums(summary: tuple[Any, ...], z_loss: float) -> Float[Array, "2"]:
    """Objective and nats of one chunk."""
    lse_c, nats_c, target_c, weight_c = summary
    return jnp.stack(weighted_sums(lse_c, nats_c, target_c, weight_c, z_loss))


def _forward(
    x_ZcD: Array,
    unembed_DW: Array,
    target_ZC: Array,
    weight_ZC: Array | None,
    soft_ZC: SoftTargets | None,
    z_loss: float,
    soft_cap: float | None,
    vocab: Vocab,
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    kernel_DW = unembed_DW.astype(x_ZcD.dtype)

    def chunk(carry: tuple[Array, Array], tokens: tuple[Any, ...]) -> tuple[tuple[Array, Array], Array]:
        sums, dkernel_DW = carry
        x_cD, target_C, factor_C, soft_C = tokens
        x_CD = vocab.gather(x_cD)
        # Float32 logits: softmax and log-partition are computed from unrounded products.
        logits_CW = capped(contract(x_CD, kernel_DW, 1, 0, jnp.float32), soft_cap)
        lse_C, picked_C = vocab.summary(logits_CW, target_C)
        column_C = vocab.column(target_C, logits_CW.shape[1])
        # No column for targets of other devices, and none for IGNORE, which is below 0.
        is_target_CW = jax.lax.broadcasted_iota(jnp.int32, logits_CW.shape, 1) == column_C[:, None]
        nats_C, goal_CW = lse_C - picked_C, is_target_CW
        if soft_C is not None:
            column_CJ = block_columns(vocab, soft_C.id, logits_CW.shape[1])
            picked_CJ, rest_C = outcomes(vocab, logits_CW, column_CJ)
            nats_C = mixed_nats(soft_C, nats_C, lse_C, picked_CJ, rest_C)
            goal_CW = mixed_goal(soft_C, is_target_CW, logits_CW, column_CJ, rest_C)
        sums = sums + _sums(vocab.local_slices(lse_C, nats_C, target_C, factor_C), z_loss)
        # d(nats)/d(logits) = softmax - onehot; d(lse^2)/d(logits) = 2 lse softmax.
        weight_C = slope_weights(target_C, factor_C)
        softmax_CW = jnp.exp(logits_CW - lse_C[:, None]) * ((1.0 + 2.0 * z_loss * lse_C) * weight_C)[:, None]
        # The column of a target says alone that a token has one; a teacher may have spoken of any.
        if factor_C is not None or soft_C is not None:
            goal_CW = goal_CW * weight_C[:, None]
        # In x's dtype, so that both gradient matmuls run at the rate of x's dtype.
        dlogits_CW = times_slope(softmax_CW - goal_CW, logits_CW, soft_cap).astype(x_CD.dtype)
        dx_cD = vocab.scatter(contract(dlogits_CW, kernel_DW, 1, 1, x_CD.dtype))
        # XLA:CPU contracts over the first dimension slowly; a transposed copy of x pays off there.
        dkernel_DW += by_platform(
            x_CD,
            dlogits_CW,
            cpu=lambda x, dlogits: contract(transposed(x), dlogits, 1, 0, jnp.float32),
            default=lambda x, dlogits: contract(x, dlogits, 0, 0, jnp.float32),
        )
        return (sums, dkernel_DW), dx_cD

    start = (jnp.zeros(2, jnp.float32), jnp.zeros(unembed_DW.shape, jnp.float32))
    # The kernel's gradient is carried through the scan in float32 and rounded once.
    ((total, nats), dkernel_DW), dx_ZcD = jax.lax.scan(chunk, start, (x_ZcD, target_ZC, weight_ZC, soft_ZC))
    return (total, nats), (dx_ZcD, dkernel_DW.astype(unembed_DW.dtype))


def _backward(
    z_loss: float,
    soft_cap: float | None,
    vocab: Vocab,
    saved: tuple[Array, Array],
    cotangents: tuple[Array, Array],
) -> tuple[Array, Array, None, None, None]:
    del z_loss, soft_cap, vocab  # already part of the saved gradients
    dx_ZcD, dkernel_DW = saved
    # The second result is for reporting: its cotangent is not used.
    scale = cotangents[0]

    def scaled(gradient: Array) -> Array:
        return (gradient.astype(jnp.float32) * scale).astype(gradient.dtype)

    # None: targets are integers, and factors and what a teacher says are data.
    return scaled(dx_ZcD), scaled(dkernel_DW), None, None, None


_loss.defvjp(_forward, _backward)


def _sizes(avals: registry.Avals) -> dict[str, int]:
    """Arguments of `chunking.predict` for an op's arguments."""
    x, unembed, target = avals["x_BLD"], avals["unembed_DV"], avals["target_BL"]
    assert isinstance(x, jax.ShapeDtypeStruct)
    assert isinstance(unembed, jax.ShapeDtypeStruct)
    assert isinstance(target, jax.ShapeDtypeStruct)
    # The op sees targets of all shards' positions, and only its own columns.
    (rows, length, width), shards = x.shape, target.shape[1] // x.shape[1]
    sizes = dict(tokens=rows * length, d_model=width, vocab=unembed.shape[1] * shards)
    return sizes | dict(itemsize=x.dtype.itemsize, shards=shards)


def _configs(device: DeviceSpec, avals: registry.Avals) -> tuple[dict[str, int], ...]:
    """Candidate chunk sizes, the predicted best first; only the requested one if chunk_tokens is given."""
    if isinstance(chunk_tokens := avals["chunk_tokens"], int):
        return ({"chunk": chunk_tokens},)
    sizes = _sizes(avals)
    best, _ = best_chunk(device, **sizes)
    other_sizes = [size for size in CANDIDATES if size != best and size <= sizes["tokens"]]
    return tuple({"chunk": size} for size in (best, *other_sizes))


def _cost_s(device: DeviceSpec, avals: registry.Avals) -> float | None:
    (config, *_) = _configs(device, avals)
    predicted = predict(device, config["chunk"], **_sizes(avals))
    return None if predicted is None else predicted.seconds


LINEAR_CROSS_ENTROPY = registry.Op(
    "linear_cross_entropy",
    (registry.Implementation("xla", _xla, cost_s=_cost_s, configs=_configs),),
    cases={
        "llama8b": {
            "x_BLD": jax.ShapeDtypeStruct((2, 8192, 4096), jnp.bfloat16),
            "unembed_DV": jax.ShapeDtypeStruct((4096, 128256), jnp.bfloat16),
            "target_BL": jax.ShapeDtypeStruct((2, 8192), jnp.int32),
            "chunk_tokens": None,
            "z_loss": 0.0,
            "soft_cap": None,
            "axis": None,
        }
    },
)
OPS = (LINEAR_CROSS_ENTROPY,)
