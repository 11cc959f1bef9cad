"""Reference attention: the formula on the whole score matrix, differentiated by JAX."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def attention_reference(
    q_BLNH: Float[Array, "B L N H"],
    k_BMKH: Float[Array, "B M K H"],
    v_BMKP: Float[Array, "B M K P"],
    segment_BL: Int[Array, "B L"],
    segment_BM: Int[Array, "B M"],
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    sink_N: Float[Array, " N"] | None = None,
) -> Float[Array, "B L N P"]:
    """`softmax(q k / sqrt(H)) v` over the keys of a query's segment up to its index, at most `window`.

    Scores are capped, and a sink joins each query's softmax as one more key without a value, if given.
    Materialises all scores.
    """
    (L, N, H), (M, K) = q_BLNH.shape[1:], k_BMKH.shape[1:3]
    k_BMNH, v_BMNP = jnp.repeat(k_BMKH, N // K, axis=2), jnp.repeat(v_BMKP, N // K, axis=2)
    s_BNLM = jnp.einsum("blnh,bmnh->bnlm", q_BLNH, k_BMNH) * H**-0.5
    if soft_cap is not None:
        s_BNLM = soft_cap * jnp.tanh(s_BNLM / soft_cap)
    mask_BLM = segment_BL[:, :, None] == segment_BM[:, None, :]
    distance_LM = jnp.arange(L)[:, None] - jnp.arange(M)[None, :]
    mask_BLM &= ((distance_LM >= 0) & (distance_LM < (M if window is None else window)))[None]
    s_BNLM = jnp.where(mask_BLM[:, None], s_BNLM, -jnp.inf)
    if sink_N is None:
        p_BNLM = jax.nn.softmax(s_BNLM, axis=-1)
    else:
        sink_BNL1 = jnp.broadcast_to(sink_N[None, :, None, None], (*s_BNLM.shape[:3], 1))
        p_BNLM = jax.nn.softmax(jnp.concatenate([s_BNLM, sink_BNL1], axis=-1), axis=-1)[..., :-1]
    return jnp.einsum("bnlm,bmnp->blnp", p_BNLM, v_BMNP)
