"""Products of the tokens of a chunk with each other and their decays; triangular matrices, by halves.

Arrays are [Z, B, ...] as in `chunks`; heads are K key heads of G value heads each. R counts all chunks and
heads.
"""

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

einsum = partial(jnp.einsum, preferred_element_type=jnp.float32)
"""Sums in float32 of products in the operands' dtype."""


def visible_pairs(document_ZBL: Int[Array, "Z B L"]) -> Bool[Array, "Z B L L"]:
    """Pairs (token, token not after it) of the same document."""
    L = document_ZBL.shape[2]
    same_ZBLM = document_ZBL[..., :, None] == document_ZBL[..., None, :]
    return same_ZBLM & jnp.tril(jnp.ones((L, L), bool))[None, None]


def pair_decay(
    sum_ZBLKG: Float[Array, "Z B L K G"], visible_ZBLM: Bool[Array, "Z B L L"]
) -> Float[Array, "Z B K G L L"]:
    """Decay between the tokens of each visible pair, from log-decays summed over the chunk; 0 elsewhere."""
    sum_ZBKGL = jnp.moveaxis(sum_ZBLKG, 2, 4)
    difference = sum_ZBKGL[..., :, None] - sum_ZBKGL[..., None, :]
    # Masked before exp: differences to later tokens are positive and may overflow.
    return jnp.exp(jnp.where(visible_ZBLM[:, :, None, None], difference, -jnp.inf))


def decayed_scores(
    q_ZBLKH: Array, k_ZBLKH: Array, sum_ZBLKGE: Array, document_ZBL: Array
) -> tuple[Float[Array, "Z B K G L L"], Float[Array, "Z B K G L L"]]:
    """Decayed products of each token's k (strictly lower) and q (lower) with the k of tokens not after it."""
    visible_ZBLM = visible_pairs(document_ZBL)
    lower_LM = jnp.tril(jnp.ones(visible_ZBLM.shape[2:], jnp.float32), -1)[None, None, None, None]
    if sum_ZBLKGE.shape[-1] == 1:
        decay_ZBKGLM = pair_decay(sum_ZBLKGE[..., 0], visible_ZBLM)
        # The products are those of key heads; only their decay depends on the value head.
        kk, qk = (einsum("zblkh,zbmkh->zbklm", x, k_ZBLKH)[:, :, :, None] for x in (k_ZBLKH, q_ZBLKH))
        return kk * decay_ZBKGLM * lower_LM, qk * decay_ZBKGLM
    sum_ZBKGLE = jnp.moveaxis(sum_ZBLKGE, 2, 4)
    shape = sum_ZBKGLE.shape

    def rows(x_ZBLKH: Array) -> Array:
        """[rows, L, H], one row per chunk, sequence and value head."""
        x_ZBKGLH = jnp.moveaxis(x_ZBLKH, 2, 3)[:, :, :, None]
        return jnp.broadcast_to(x_ZBKGLH, shape).reshape(-1, *shape[4:])

    q_RLH, k_RLH = rows(q_ZBLKH), rows(k_ZBLKH)
    products_RXLM = _halved_scores(
        jnp.stack([k_RLH, q_RLH], axis=1), k_RLH, sum_ZBKGLE.reshape(-1, *shape[4:])
    )
    products = products_RXLM.reshape(*shape[:4], 2, shape[4], shape[4])
    kk, qk = (jnp.where(visible_ZBLM[:, :, None, None], products[:, :, :, :, x], 0.0) for x in range(2))
    own_ZBKGL = jnp.sum(q_RLH.astype(jnp.float32) * k_RLH.astype(jnp.float32), axis=-1).reshape(shape[:5])
    return kk, qk + own_ZBKGL[..., None] * jnp.eye(shape[4])[None, None, None, None]


def _halved_scores(x_RXLH: Array, k_RLH: Array, sum_RLH: Array) -> Float[Array, "R X L L"]:
    """`sum over h of x[i, h] k[j, h] exp(sum[i, h] - sum[j, h])` for j < i, else 0; R rows, X arrays.

    Decays per channel do not factor out of the sum. Between the halves of a chunk, both tokens are compared
    with the last one of the early half, so that both exponents are at most 0; the halves are cut in turn.
    """
    half, dtype = k_RLH.shape[1] // 2, k_RLH.dtype
    if half == 0:
        return jnp.zeros((*x_RXLH.shape[:-1], 1), jnp.float32)
    middle_R1H = sum_RLH[:, half - 1 : half]
    late = x_RXLH[:, :, half:] * jnp.exp(sum_RLH[:, half:] - middle_R1H)[:, None]
    early = k_RLH[:, :half] * jnp.exp(middle_R1H - sum_RLH[:, :half])
    across = einsum("rxlh,rmh->rxlm", late.astype(dtype), early.astype(dtype))
    halves = (jnp.concatenate(jnp.split(x, 2, axis=-2)) for x in (x_RXLH, k_RLH, sum_RLH))
    return _lower_blocks(_halved_scores(*halves), across)


def invert_unit_lower(a_RLL: Float[Array, "R L L"]) -> Float[Array, "R L L"]:
    """Inverse of I + a, a strictly lower triangular, by halves: [[A, 0], [X, B]] has -B^-1 X A^-1 below."""
    half = a_RLL.shape[-1] // 2
    if half == 0:
        return jnp.ones_like(a_RLL)
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
