"""Gated delta rule in chunks (arXiv:2412.06464, section 3.3; per channel: arXiv:2510.26692), in plain JAX.

With d[i, j] the decay from token j to token i of a chunk, S the state before the chunk, and e[i] the decay
from there to token i:

    T = inverse(I + strictly_lower(beta[i] d[i, j] k[i] k[j])) beta
    u = T v - (T (e k)) S                               what each token adds to the state
    y = (q e) S + lower(d[i, j] q[i] k[j]) u
    S' = e[last] S + sum over j of (k[j] d[last, j]) u[j]

Exponents of decays are never positive. T, S and sums are float32, operands of matmuls have v's dtype.

Letters here: those of api.py; J chunks, L tokens of a chunk, G value heads of a key head.
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
    scale: float, state_BKGHP: Array, before_JB: Array, tokens: tuple[Array, ...]
) -> tuple[Array, Array]:
    """State after a group of chunks, and the results; heads are K key heads of G value heads each."""
    document_JBL, *of_tokens = tokens
    q_JBKLH, k_JBKLH = (jnp.moveaxis(x, 2, 3) for x in of_tokens[:2])
    v_JBKGLP, g_JBKGLE, beta_JBKGL = (jnp.moveaxis(x, 2, 4) for x in of_tokens[2:])
    dtype = v_JBKGLP.dtype
    # Log of e[i]: the decay from the state before the chunk to each token.
    sum_JBKGLE = jnp.cumsum(g_JBKGLE, axis=4)
    # Tokens of the document that the state before the chunk belongs to; later documents start from zeros.
    reads_JBL = document_JBL == before_JB[..., None]
    # Tokens of the chunk's last document, whose state alone goes on.
    writes_JBL = document_JBL == document_JBL[..., -1:]

    def decayed(x_JBKLH: Array, log_decay_JBKGLE: Array, mask_JBL: Array) -> Array:
        """`x exp(log_decay)` where the mask is true, in the dtype of matmuls; 0 elsewhere."""
        decay = jnp.where(mask_JBL[:, :, None, None, :, None], jnp.exp(log_decay_JBKGLE), 0.0)
        return (x_JBKLH[:, :, :, None] * decay).astype(dtype)

    k_read, q_read = (decayed(x, sum_JBKGLE, reads_JBL) for x in (k_JBKLH, q_JBKLH))
    k_write = decayed(k_JBKLH, sum_after(g_JBKGLE, 4), writes_JBL)
    # The old state goes on only if its document is still the one of the last token.
    keep_JBKGE = jnp.where(reads_JBL[:, :, -1, None, None, None], jnp.exp(sum_JBKGLE[..., -1, :]), 0.0)

    kk_JBKGLM, qk_JBKGLM = decayed_scores(q_JBKLH, k_JBKLH, g_JBKGLE, visible_pairs(document_JBL))
    # beta[i] scales rows here; the beta behind the inverse, in T, scales columns.
    system_JBKGLM = kk_JBKGLM * beta_JBKGL[..., None]
    inverse_RLM = invert_unit_lower(system_JBKGLM.reshape(-1, *system_JBKGLM.shape[4:]))
    inverse_JBKGLM = (inverse_RLM.reshape(system_JBKGLM.shape) * beta_JBKGL[..., None, :]).astype(dtype)
    # T v and T (e k), the parts of u that need no state, for all chunks of the group at once.
    u_JBKGLP = einsum("jbkglm,jbkgmp->jbkglp", inverse_JBKGLM, v_JBKGLP)
    w_JBKGLH = einsum("jbkglm,jbkgmh->jbkglh", inverse_JBKGLM, k_read).astype(dtype)

    def advance(state_BKGHP: Array, chunk: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        u, w, k_write, keep = chunk
        u = (u - einsum("bkglh,bkghp->bkglp", w, state_BKGHP.astype(dtype))).astype(dtype)
        next_state = state_BKGHP * keep[..., None] + einsum("bkglh,bkglp->bkghp", k_write, u)
        return next_state, (state_BKGHP.astype(dtype), u)

    # Only what needs the state runs chunk by chunk: two matmuls.
    state_BKGHP, (state_JBKGHP, u_JBKGLP) = jax.lax.scan(
        advance, state_BKGHP, (u_JBKGLP, w_JBKGLH, k_write, keep_JBKGE)
    )
    y_JBKGLP = einsum("jbkglh,jbkghp->jbkglp", q_read, state_JBKGHP)
    y_JBKGLP += einsum("jbkglm,jbkgmp->jbkglp", qk_JBKGLM.astype(dtype), u_JBKGLP)
    # Scaled here in float32: a scaled q would be rounded once more.
    return state_BKGHP, jnp.moveaxis((y_JBKGLP * scale).astype(dtype), 4, 2)
