"""Products of the tokens of a chunk with each other and their decays; triangular matrices, by halves.

Arrays are [J, B, ...] as in `chunks`; heads are K key heads of G value heads each. R counts all chunks and
heads.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

einsum = partial(jnp.einsum, preferred_element_type=jnp.float32)
"""Sums in float32 of products in the operands' dtype."""


def visible_pairs(document_JBL: Int[Array, "J B L"]) -> Bool[Array, "J B L L"]:
    """Pairs (token, token not after it) of the same document."""
    L = document_JBL.shape[2]
    same_JBLM = document_JBL[..., :, None] == document_JBL[..., None, :]
    return same_JBLM & jnp.tril(jnp.ones((L, L), bool))[None, None]


def sum_after(g: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """Sums over the tokens after each one, without differences of large sums."""
    from_own = jax.lax.cumsum(g, axis, reverse=True)
    tail = jax.lax.slice_in_dim(from_own, 1, None, axis=axis)
    return jnp.concatenate([tail, jnp.zeros_like(jax.lax.slice_in_dim(g, 0, 1, axis=axis))], axis=axis)


def pair_decay(
    g_JBKGL: Float[Array, "J B K G L"], visible_JBLM: Bool[Array, "J B L L"]
) -> Float[Array, "J B K G L L"]:
    """Decay between the tokens of each visible pair, from log-decays; 0 elsewhere."""
    L = g_JBKGL.shape[-1]
    sums = _sum_between(g_JBKGL.reshape(-1, L)).reshape(*g_JBKGL.shape, L)
    return jnp.where(visible_JBLM[:, :, None, None], jnp.exp(sums), 0.0)


def _sum_between(g_RL: Float[Array, "R L"]) -> Float[Array, "R L L"]:
    """Sum of g over the tokens after j up to i, for j < i, else 0.

    A difference of two sums from the chunk's start would have the error of those: 0.004 for a sum of 80,000,
    128 tokens of Mamba-2's fastest head. Here all parts have the same sign.
    """
    half = g_RL.shape[1] // 2
    if half == 0:
        return jnp.zeros((len(g_RL), 1, 1), g_RL.dtype)
    early, late = jnp.split(g_RL, 2, axis=1)
    across = jnp.cumsum(late, axis=1)[:, :, None] + sum_after(early, 1)[:, None, :]
    return _lower_blocks(_sum_between(jnp.concatenate([early, late])), across)


def decayed_scores(
    q_JBKLH: Float[Array, "J B K L H"],
    k_JBKLH: Float[Array, "J B K L H"],
    g_JBKGLE: Float[Array, "J B K G L E"],
    visible_JBLM: Bool[Array, "J B L L"],
) -> tuple[Float[Array, "J B K G L L"], Float[Array, "J B K G L L"]]:
    """Decayed products of each token's k (strictly lower) and q (lower) with the k of tokens not after it.

    Args:
      g_JBKGLE: log-decays; E is 1, or H with a decay per channel.
    """
    J, B, K, G, L, E = g_JBKGLE.shape
    if E == 1:
        decay_JBKGLM = pair_decay(g_JBKGLE[..., 0], visible_JBLM)
        # The products are those of key heads; only their decay depends on the value head.
        kk, qk = (einsum("jbklh,jbkmh->jbklm", x, k_JBKLH)[:, :, :, None] for x in (k_JBKLH, q_JBKLH))
        return jnp.tril(kk * decay_JBKGLM, -1), qk * decay_JBKGLM
    q_RLH, k_RLH = (
        jnp.broadcast_to(x[:, :, :, None], g_JBKGLE.shape).reshape(-1, L, E) for x in (q_JBKLH, k_JBKLH)
    )
    products_RXLM = _halved_scores(
        jnp.stack([k_RLH, q_RLH], axis=1), k_RLH, jnp.cumsum(g_JBKGLE.reshape(k_RLH.shape), axis=1)
    )
    products = products_RXLM.reshape(J, B, K, G, 2, L, L)
    kk, qk = (jnp.where(visible_JBLM[:, :, None, None], products[..., x, :, :], 0.0) for x in range(2))
    # A token with itself, which `_halved_scores` leaves out: it has no decay.
    own_RL = jnp.sum(q_RLH.astype(jnp.float32) * k_RLH.astype(jnp.float32), axis=-1)
    own_JBKGLM = (own_RL[..., None] * jnp.eye(L)[None]).reshape(kk.shape)
    return kk, qk + own_JBKGLM


def _halved_scores(x_RXLH: Array, k_RLH: Array, sum_RLH: Array) -> Float[Array, "R X L L"]:
    """`sum over h of x[i, h] k[j, h] exp(sum[i, h] - sum[j, h])` for j < i, else 0; R rows, X arrays.

    Decays per channel do not factor out of the sum. Between the halves of a chunk, both tokens are compared
    with the last one of the early half, so that both exponents are at most 0; the halves are cut in turn. A
    decay has a relative error of 2^-24 times the sum over the chunk.
    """
    half, dtype = k_RLH.shape[1] // 2, k_RLH.dtype
    if half < 4:
        # Too small for matmuls: products of single pairs, without rounding.
        lower_RLMH = jnp.tri(2 * half or 1, k=-1, dtype=bool)[None, :, :, None]
        difference = jnp.where(lower_RLMH, sum_RLH[:, :, None] - sum_RLH[:, None], -jnp.inf)
        decayed_k = k_RLH[:, None] * jnp.exp(difference)
        return jnp.sum(x_RXLH[:, :, :, None] * decayed_k[:, None], axis=-1)
    middle_R1H = sum_RLH[:, half - 1 : half]
    late = x_RXLH[:, :, half:] * jnp.exp(sum_RLH[:, half:] - middle_R1H)[:, None]
    early = k_RLH[:, :half] * jnp.exp(middle_R1H - sum_RLH[:, :half])
    across = einsum("rxlh,rmh->rxlm", late.astype(dtype), early.astype(dtype))
    # Both halves in one call, stacked along the rows R.
    halves = (jnp.concatenate(jnp.split(x, 2, axis=-2)) for x in (x_RXLH, k_RLH, sum_RLH))
    return _lower_blocks(_halved_scores(*halves), across)


def invert_unit_lower(a_RLL: Float[Array, "R L L"]) -> Float[Array, "R L L"]:
    """Inverse of I + a, a strictly lower triangular, by halves: [[A, 0], [X, B]] has -B^-1 X A^-1 below."""
    half = a_RLL.shape[-1] // 2
    if half < 2:
        # One element below the diagonal, or none: a @ a is 0.
        return jnp.eye(a_RLL.shape[-1])[None] - a_RLL
    # Both blocks of the diagonal in one call.
    halves = invert_unit_lower(jnp.concatenate([a_RLL[:, :half, :half], a_RLL[:, half:, half:]]))
    early, late = jnp.split(halves, 2)
    # 2 / 3 of L^2 FLOPs per token: full float32 costs little, and the error of an inverse grows.
    product = partial(jnp.matmul, precision="highest")
    return _lower_blocks(halves, -product(late, product(a_RLL[:, half:, :half], early)))


def _lower_blocks(halves: Array, across: Array) -> Array:
    """[[early, 0], [across, late]], with early and late stacked along the first dimension."""
    early, late = jnp.split(halves, 2)
    upper = jnp.concatenate([early, jnp.zeros_like(across)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([across, late], axis=-1)], axis=-2)
