"""Mamba-2 in chunks (arXiv:2405.21060, section 6), in plain JAX.

With d[i, j] the decay from token j to token i of a chunk, S the state before the chunk, and e[i] the decay
from there to token i:

    y = e (c S) + lower(d[i, j] c[i] b[j]) (dt x) + D x
    S' = e[last] S + sum over j of b[j] (d[last, j] dt[j] x[j])

All decays are exponentials of numbers that are not positive. S is float32, operands of matmuls have x's
dtype, sums are float32.

Letters here: those of api.py; J chunks, L tokens of a chunk, G heads of a group.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain_kernels.mamba2.reference import mamba2_token
from jtrain_kernels.recurrence.chunks import scan_groups, shorten_chunk
from jtrain_kernels.recurrence.scores import einsum, pair_decay, sum_after, visible_pairs


def mamba2(
    x_BLNP: Float[Array, "B L N P"],
    dt_BLN: Float[Array, "B L N"],
    a_N: Float[Array, " N"],
    b_BLKS: Float[Array, "B L K S"],
    c_BLKS: Float[Array, "B L K S"],
    d_N: Float[Array, " N"],
    document_BL: Int[Array, "B L"],
    state_BNSP: Float[Array, "B N S P"],
    *,
    chunk: int,
) -> tuple[Float[Array, "B L N P"], Float[Array, "B N S P"]]:
    """See `api.mamba2`; the state is that of document 0."""
    (B, L, N, P), K = x_BLNP.shape, b_BLKS.shape[2]
    a_N, d_N = a_N.astype(jnp.float32), d_N.astype(jnp.float32)
    # One token, as in sampling: a step of the recurrence needs no chunk.
    if L == 1:
        b, c = (jnp.repeat(x[:, 0].astype(jnp.float32), N // K, axis=1) for x in (b_BLKS, c_BLKS))
        state = jnp.where((document_BL == 0)[..., None, None], state_BNSP, 0.0)
        token = (x_BLNP[:, 0].astype(jnp.float32), dt_BLN[:, 0], b, c)
        state, y_BNP = mamba2_token(state, token, a_N, d_N)
        return y_BNP[:, None].astype(x_BLNP.dtype), state
    by_group = (B, L, K, N // K)
    arrays = (
        x_BLNP.reshape(*by_group, P),
        dt_BLN.reshape(by_group),
        (dt_BLN * a_N[None, None]).reshape(by_group),
        b_BLKS,
        c_BLKS,
    )
    state = state_BNSP.reshape(B, K, N // K, *state_BNSP.shape[2:])
    group = partial(_group, d_N.reshape(K, N // K))
    state, y_BLKGP = scan_groups(group, state, document_BL, arrays, shorten_chunk(chunk, L))
    return y_BLKGP.reshape(x_BLNP.shape), state.reshape(state_BNSP.shape)


def _group(
    d_KG: Array, state_BKGSP: Array, before_JB: Array, tokens: tuple[Array, ...]
) -> tuple[Array, Array]:
    """State after a group of chunks, and the results; heads are K groups of G heads each."""
    document_JBL, *of_tokens = tokens
    # Tokens go behind the heads, over which the products below are batched.
    x_JBKGLP, dt_JBKGL, log_decay_JBKGL = (jnp.moveaxis(x, 2, 4) for x in of_tokens[:3])
    b_JBKLS, c_JBKLS = (jnp.moveaxis(x, 2, 3) for x in of_tokens[3:])
    dtype = x_JBKGLP.dtype
    sum_JBKGL = jnp.cumsum(log_decay_JBKGL, axis=4)
    # Tokens of the document that the state before the chunk belongs to; later documents start from zeros.
    reads_JBL = jnp.expand_dims(document_JBL == before_JB[..., None], (2, 3))
    # Tokens of the chunk's last document, whose state alone goes on.
    writes_JBL = jnp.expand_dims(document_JBL == document_JBL[..., -1:], (2, 3))
    # Decay from the state before the chunk to each token, and from each token to the end of the chunk.
    read_JBKGL = jnp.where(reads_JBL, jnp.exp(sum_JBKGL), 0.0)
    write_JBKGL = jnp.where(writes_JBL, dt_JBKGL * jnp.exp(sum_after(log_decay_JBKGL, 4)), 0.0)

    x32_JBKGLP = x_JBKGLP.astype(jnp.float32)
    x_write = (x32_JBKGLP * write_JBKGL[..., None]).astype(dtype)
    added_JBKGSP = einsum("jbkls,jbkglp->jbkgsp", b_JBKLS, x_write)

    def advance(state: Array, chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        keep_BKG, added = chunk
        # The state before the chunk is what its tokens read.
        return state * keep_BKG[..., None, None] + added, state.astype(dtype)

    # Only this runs chunk by chunk; read of the last token is 0 where another document has begun.
    state_BKGSP, state_JBKGSP = jax.lax.scan(advance, state_BKGSP, (read_JBKGL[..., -1], added_JBKGSP))
    # The products are those of groups; only their decay depends on the head.
    cb_JBKLM = einsum("jbkls,jbkms->jbklm", c_JBKLS, b_JBKLS)
    weight_JBKGLM = cb_JBKLM[:, :, :, None] * pair_decay(log_decay_JBKGL, visible_pairs(document_JBL))
    x_dt = (x32_JBKGLP * dt_JBKGL[..., None]).astype(dtype)
    y_JBKGLP = einsum("jbkglm,jbkgmp->jbkglp", weight_JBKGLM.astype(dtype), x_dt)
    y_JBKGLP += einsum("jbkls,jbkgsp->jbkglp", c_JBKLS, state_JBKGSP) * read_JBKGL[..., None]
    y_JBKGLP += d_KG[None, None, ..., None, None] * x32_JBKGLP
    return state_BKGSP, jnp.moveaxis(y_JBKGLP.astype(dtype), 4, 2)
