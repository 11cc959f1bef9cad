"""Reference Mamba-2: token by token, differentiated by JAX."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain_kernels.recurrence.tokens import Token, scan_tokens


def mamba2_token(
    state_BNSP: Float[Array, "B N S P"],
    token: Token,
    a_N: Float[Array, " N"],
    d_N: Float[Array, " N"],
) -> tuple[Float[Array, "B N S P"], Float[Array, "B N P"]]:
    """State after one token, and its result.

    Args:
      token: x [B, N, P], dt [B, N], b and c [B, N, S].
    """
    x_BNP, dt_BN, b_BNS, c_BNS = token
    decay_BN = jnp.exp(dt_BN * a_N[None])
    state_BNSP = (
        state_BNSP * decay_BN[..., None, None] + (dt_BN[..., None] * b_BNS)[..., None] * x_BNP[:, :, None]
    )
    return state_BNSP, jnp.einsum("bns,bnsp->bnp", c_BNS, state_BNSP) + d_N[None, :, None] * x_BNP


def mamba2_reference(
    x_BLNP: Float[Array, "B L N P"],
    dt_BLN: Float[Array, "B L N"],
    a_N: Float[Array, " N"],
    b_BLKS: Float[Array, "B L K S"],
    c_BLKS: Float[Array, "B L K S"],
    d_N: Float[Array, " N"],
    segment_BL: Int[Array, "B L"],
    state_BNSP: Float[Array, "B N S P"],
    segment_B: Int[Array, " B"],
) -> tuple[Float[Array, "B L N P"], Float[Array, "B N S P"]]:
    """Results and the last state; `state_BNSP` is that of the document `segment_B`."""
    repeats = x_BLNP.shape[2] // b_BLKS.shape[2]
    tokens = (x_BLNP, dt_BLN, *(jnp.repeat(x, repeats, axis=2) for x in (b_BLKS, c_BLKS)))

    def step(state_BNSP: Array, token: Token) -> tuple[Array, Array]:
        return mamba2_token(state_BNSP, token, a_N, d_N)

    return scan_tokens(step, tokens, segment_BL, state_BNSP, segment_B)
