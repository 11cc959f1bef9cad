"""Gated delta rule in chunks (arXiv:2412.06464, section 3.3; per channel: arXiv:2510.26692), in plain JAX.

With d[i, j] the decay from token j to token i of a chunk, S the state before the chunk, and e[i] the decay
from there to token i:

    T = inverse(I + strictly_lower(beta[i] d[i, j] k[i] k[j])) beta
    u = T v - (T (e k)) S                               what each token adds to the state
    y = (q e) S + lower(d[i, j] q[i] k[j]) u
    S' = e[last] S + sum over j of (k[j] d[last, j]) u[j]

Exponents of decays are never positive. T, S and sums are float32, operands of matmuls have v's dtype.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain_kernels.delta_rule.reference import delta_rule_token
from jtrain_kernels.recurrence.chunks import scan_groups, shorten_chunk
from jtrain_kernels.recurrence.scores import (
    decayed_scores,
    einsum,
    invert_unit_lower,
    sum_after,
    visible_pairs,
)


def delta_rule(
    q_BLKH: Float[Array, "B L K H"],
    k_BLKH: Float[Array, "B L K H"],
    v_BLNP: Float[Array, "B L N P"],
    g_BLNE: Float[Array, "B L N E"],
    beta_BLN: Float[Array, "B L N"],
    document_BL: Int[Array, "B L"],
    state_BNHP: Float[Array, "B N H P"],
    *,
    scale: float,
    chunk: int,
) -> tuple[Float[Array, "B L N P"], Float[Array, "B N H P"]]:
    """See `api.delta_rule`; E is 1, or H with a decay per channel; the state is that of document 0."""
    (B, L, K, H), N = k_BLKH.shape, v_BLNP.shape[2]
    if L == 1:
        q, k = (jnp.repeat(x[:, 0].astype(jnp.float32), N // K, axis=1) for x in (q_BLKH, k_BLKH))
        state = jnp.where((document_BL == 0)[..., None, None], state_BNHP, 0.0)
        token = (q * scale, k, v_BLNP[:, 0].astype(jnp.float32), g_BLNE[:, 0], beta_BLN[:, 0])
        state, y_BNP = delta_rule_token(state, token)
        return y_BNP[:, None].astype(v_BLNP.dtype), state
    by_key_head = (x.reshape(B, L, K, N // K, *x.shape[3:]) for x in (v_BLNP, g_BLNE, beta_BLN))
    arrays = (q_BLKH, k_BLKH, *by_key_head)
    state = state_BNHP.reshape(B, K, N // K, H, -1)
    state, y_BLKGP = scan_groups(partial(_group, scale), state, document_BL, arrays, shorten_chunk(chunk, L))
    return y_BLKGP.reshape(v_BLNP.shape), state.reshape(state_BNHP.shape)


def _group(
    scale: float, state_BKGHP: Array, before_ZB: Array, tokens: tuple[Array, ...]
) -> tuple[Array, Array]:
    """State after a group of chunks, and the results; heads are K key heads of G value heads each."""
    document_ZBL, *of_tokens = tokens
    q_ZBKLH, k_ZBKLH = (jnp.moveaxis(x, 2, 3) for x in of_tokens[:2])
    v_ZBKGLP, g_ZBKGLE, beta_ZBKGL = (jnp.moveaxis(x, 2, 4) for x in of_tokens[2:])
    dtype = v_ZBKGLP.dtype
    # Log of e[i]: the decay from the state before the chunk to each token.
    sum_ZBKGLE = jnp.cumsum(g_ZBKGLE, axis=4)
    # Tokens of the document that the state before the chunk belongs to; later documents start from zeros.
    reads_ZBL = document_ZBL == before_ZB[..., None]
    # Tokens of the chunk's last document, whose state alone goes on.
    writes_ZBL = document_ZBL == document_ZBL[..., -1:]

    def decayed(x_ZBKLH: Array, log_decay_ZBKGLE: Array, mask_ZBL: Array) -> Array:
        """`x exp(log_decay)` where the mask is true, in the dtype of matmuls; 0 elsewhere."""
        decay = jnp.where(mask_ZBL[:, :, None, None, :, None], jnp.exp(log_decay_ZBKGLE), 0.0)
        return (x_ZBKLH[:, :, :, None] * decay).astype(dtype)

    k_read, q_read = (decayed(x, sum_ZBKGLE, reads_ZBL) for x in (k_ZBKLH, q_ZBKLH))
    k_write = decayed(k_ZBKLH, sum_after(g_ZBKGLE, 4), writes_ZBL)
    # The old state goes on only if its document is still the one of the last token.
    keep_ZBKGE = jnp.where(reads_ZBL[:, :, -1, None, None, None], jnp.exp(sum_ZBKGLE[..., -1, :]), 0.0)

    kk_ZBKGLM, qk_ZBKGLM = decayed_scores(q_ZBKLH, k_ZBKLH, g_ZBKGLE, visible_pairs(document_ZBL))
    # beta[i] scales rows here; the beta behind the inverse, in T, scales columns.
    system_ZBKGLM = kk_ZBKGLM * beta_ZBKGL[..., None]
    inverse_RLM = invert_unit_lower(system_ZBKGLM.reshape(-1, *system_ZBKGLM.shape[4:]))
    inverse_ZBKGLM = (inverse_RLM.reshape(system_ZBKGLM.shape) * beta_ZBKGL[..., None, :]).astype(dtype)
    # T v and T (e k), the parts of u that need no state, for all chunks of the group at once.
    u_ZBKGLP = einsum("zbkglm,zbkgmp->zbkglp", inverse_ZBKGLM, v_ZBKGLP)
    w_ZBKGLH = einsum("zbkglm,zbkgmh->zbkglh", inverse_ZBKGLM, k_read).astype(dtype)

    def advance(state_BKGHP: Array, chunk: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        u, w, k_write, keep = chunk
        u = (u - einsum("bkglh,bkghp->bkglp", w, state_BKGHP.astype(dtype))).astype(dtype)
        next_state = state_BKGHP * keep[..., None] + einsum("bkglh,bkglp->bkghp", k_write, u)
        return next_state, (state_BKGHP.astype(dtype), u)

    # Only what needs the state runs chunk by chunk: two matmuls.
    state_BKGHP, (state_ZBKGHP, u_ZBKGLP) = jax.lax.scan(
        advance, state_BKGHP, (u_ZBKGLP, w_ZBKGLH, k_write, keep_ZBKGE)
    )
    y_ZBKGLP = einsum("zbkglh,zbkghp->zbkglp", q_read, state_ZBKGHP)
    y_ZBKGLP += einsum("zbkglm,zbkgmp->zbkglp", qk_ZBKGLM.astype(dtype), u_ZBKGLP)
    # Scaled here in float32: a scaled q would be rounded once more.
    return state_BKGHP, jnp.moveaxis((y_ZBKGLP * scale).astype(dtype), 4, 2)
