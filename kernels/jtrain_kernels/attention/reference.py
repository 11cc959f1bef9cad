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
) -> Float[Array, "B L N P"]:
    """`softmax(q k / sqrt(H)) v` over the keys of a query's segment up to its index, at most `window`.

    Materialises all scores.
    """
    (L, N, H), (M, K) = q_BLNH.shape[1:], k_BMKH.shape[1:3]
    k_BMNH, v_BMNP = jnp.repeat(k_BMKH, N // K, axis=2), jnp.repeat(v_BMKP, N // K, axis=2)
    s_BNLM = jnp.einsum("blnh,bmnh->bnlm", q_BLNH, k_BMNH) * H**-0.5
    mask_BLM = segment_BL[:, :, None] == segment_BM[:, None, :]
    distance_LM = jnp.arange(L)[:, None] - jnp.arange(M)[None, :]
    mask_BLM &= ((distance_LM >= 0) & (distance_LM < (M if window is None else window)))[None]
    p_BNLM = jax.nn.softmax(jnp.where(mask_BLM[:, None], s_BNLM, -jnp.inf), axis=-1)
    return jnp.einsum("bnlm,bmnp->blnp", p_BNLM, v_BMNP)
