"""The ops a model is made of; the only importer of the kernels package's ops."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rms_norm(x, scale_C, *, eps):
    x32 = x.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    scale_C = scale_C.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + scale_C.shape)
    return (y * scale_C).astype(x.dtype)


def rope(x_BLNH, cos_BLR, sin_BLR):
    a, b = jnp.split(x_BLNH.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_BLR[:, :, None, :], sin_BLR[:, :, None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BLNH.dtype)


def swiglu(gate, up):
    return jax.nn.silu(gate) * up


def linear(x, kernel, num_in=1):
    return jax.lax.dot_general(
        x, kernel, ((tuple(range(x.ndim - num_in, x.ndim)), tuple(range(num_in))), ((), ())),
        preferred_element_type=x.dtype)


def embedding_lookup(table_VD, token_BL):
    return table_VD[token_BL]


def attention(q_BLNH, k_BMKH, v_BMKH, segment_BL, segment_BM, *, chunk):
    B, L, N, H = q_BLNH.shape
    M, K = k_BMKH.shape[1:3]
    q = q_BLNH.reshape(B, L, K, N // K, H)
    s = jnp.einsum("blkgh,bmkh->bkglm", q, k_BMKH, preferred_element_type=jnp.float32) * H**-0.5
    mask = (segment_BL[:, :, None] == segment_BM[:, None, :]) & (jnp.arange(L)[None, :, None] >= jnp.arange(M)[None, None, :])
    s = jnp.where(mask[:, None, None], s, -1e30)
    p = jax.nn.softmax(s, axis=-1).astype(v_BMKH.dtype)
    return jnp.einsum("bkglm,bmkh->blkgh", p, v_BMKH).reshape(B, L, N, H)


def linear_cross_entropy(x_BLD, unembed_DV, target_BL, *, chunk_tokens, z_loss=0.0):
    logits = jnp.einsum("bld,dv->blv", x_BLD, unembed_DV, preferred_element_type=jnp.float32)
    lse = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, jnp.maximum(target_BL, 0)[..., None], axis=-1)[..., 0]
    valid = target_BL >= 0
    nats = jnp.sum(jnp.where(valid, lse - picked, 0.0))
    return nats + z_loss * jnp.sum(jnp.where(valid, lse * lse, 0.0)), jax.lax.stop_gradient(nats)
