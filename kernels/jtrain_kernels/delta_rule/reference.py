"""Reference delta rule: token by token, differentiated by JAX."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain_kernels.recurrence.tokens import Token, scan_tokens


def delta_rule_token(
    state_BNHP: Float[Array, "B N H P"], token: Token
) -> tuple[Float[Array, "B N H P"], Float[Array, "B N P"]]:
    """State after one token, and its result.

    Args:
      token: q and k [B, N, H], v [B, N, P], log-decay [B, N, 1 or H], beta [B, N].
    """
    q_BNH, k_BNH, v_BNP, g_BNE, beta_BN = token
    state_BNHP = state_BNHP * jnp.exp(g_BNE)[..., None]
    error_BNP = v_BNP - jnp.einsum("bnh,bnhp->bnp", k_BNH, state_BNHP)
    state_BNHP += k_BNH[..., None] * (beta_BN[..., None] * error_BNP)[:, :, None]
    return state_BNHP, jnp.einsum("bnh,bnhp->bnp", q_BNH, state_BNHP)


def delta_rule_reference(
    q_BLKH: Float[Array, "B L K H"],
    k_BLKH: Float[Array, "B L K H"],
    v_BLNP: Float[Array, "B L N P"],
    g: Float[Array, "B L N *h"],
    beta_BLN: Float[Array, "B L N"],
    segment_BL: Int[Array, "B L"],
    state_BNHP: Float[Array, "B N H P"],
    segment_B: Int[Array, " B"],
) -> tuple[Float[Array, "B L N P"], Float[Array, "B N H P"]]:
    """Results, with q as it is, and the last state; `state_BNHP` is that of the document `segment_B`."""
    N, K = v_BLNP.shape[2], q_BLKH.shape[2]
    g_BLNE = g if g.ndim == 4 else g[..., None]
    repeated = (jnp.repeat(x_BLKH, N // K, axis=2) for x_BLKH in (q_BLKH, k_BLKH))
    tokens = (*repeated, v_BLNP, g_BLNE, beta_BLN)
    return scan_tokens(delta_rule_token, tokens, segment_BL, state_BNHP, segment_B)
