"""Attention as two nested loops over chunks of queries and chunks of keys.

One loop body is compiled for any length, and only one pair's scores exist, B * N * chunk * chunk * 4 bytes. Unrolled
chunk by chunk as in `chunks.py`, attention took 3 of the 4 minutes in which XLA:TPU compiled a layer of llama8b at
length 4096.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def _at(x: Array, index: Array, chunk: int, axis: int = 1) -> Array:
    """Chunk `index` of the positions."""
    return jax.lax.dynamic_slice_in_dim(x, index * chunk, chunk, axis)


def _put(x: Array, part: Array, index: Array, chunk: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), index * chunk, 1)


def _grouped(x_BLNH: Array, num_kv_heads: int) -> Float[Array, "B L K G H"]:
    """Query heads grouped by key head, G each."""
    B, L, N, H = x_BLNH.shape
    return x_BLNH.reshape(B, L, num_kv_heads, N // num_kv_heads, H)


def _scores(
    q_BLKGH: Array, k_BMKH: Array, query_BL: Array, key_BM: Array, ahead: Array, window: int | None
) -> Float[Array, "B K G L M"]:
    """Scaled scores in float32, -inf where masked; the queries start `ahead` positions after the keys."""
    s_BKGLM = jnp.einsum("blkgh,bmkh->bkglm", q_BLKGH, k_BMKH, preferred_element_type=jnp.float32)
    chunk = key_BM.shape[1]
    distance_LM = jnp.arange(chunk)[:, None] + ahead - jnp.arange(chunk)[None, :]
    seen_LM = distance_LM >= 0 if window is None else (distance_LM >= 0) & (distance_LM < window)
    seen_BLM = (query_BL[:, :, None] == key_BM[:, None, :]) & seen_LM[None]
    return jnp.where(seen_BLM[:, None, None], s_BKGLM * q_BLKGH.shape[-1] ** -0.5, -jnp.inf)


def _first(i: Array, chunk: int, window: int | None) -> Array | int:
    """First chunk of keys that some query of chunk i sees."""
    return 0 if window is None else jnp.maximum(i * chunk - (window - 1), 0) // chunk


def forward(
    chunk: int,
    window: int | None,
    q_BLNH: Float[Array, "B L N H"],
    k_BMKH: Float[Array, "B M K H"],
    v_BMKH: Float[Array, "B M K H"],
    segment_BL: Int[Array, "B L"],
    segment_BM: Int[Array, "B M"],
) -> tuple[Float[Array, "B L N H"], Float[Array, "B K G L 1"]]:
    """Result, and each query's log-partition in float32; `chunk` divides L."""
    B, L, N, H = q_BLNH.shape
    K = k_BMKH.shape[2]
    q_BLKGH = _grouped(q_BLNH, K)

    def queries(i: Array, results: tuple[Array, Array]) -> tuple[Array, Array]:
        q_BCKGH, query_BC = _at(q_BLKGH, i, chunk), _at(segment_BL, i, chunk)

        def keys(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, y = carry
            k_BCKH, v_BCKH = _at(k_BMKH, j, chunk), _at(v_BMKH, j, chunk)
            s = _scores(q_BCKGH, k_BCKH, query_BC, _at(segment_BM, j, chunk), (i - j) * chunk, window)
            higher = jnp.maximum(top, jnp.max(s, axis=-1, keepdims=True))
            p, shrink = jnp.exp(s - higher), jnp.exp(top - higher)
            total = total * shrink + jnp.sum(p, axis=-1, keepdims=True)
            p = p.astype(v_BCKH.dtype)
            y = y * shrink + jnp.einsum("bkglm,bmkh->bkglh", p, v_BCKH, preferred_element_type=jnp.float32)
            return higher, total, y

        # The lowest finite number, because -inf - -inf would be nan if a chunk of keys is fully masked.
        one = (B, K, N // K, chunk, 1)
        start = jnp.full(one, jnp.finfo(jnp.float32).min), jnp.zeros(one), jnp.zeros((*one[:-1], H))
        top, total, y_BKGCH = jax.lax.fori_loop(_first(i, chunk, window), i + 1, keys, start)
        y_BCKGH = (y_BKGCH / total).transpose(0, 3, 1, 2, 4)
        lse_BKGL1 = jax.lax.dynamic_update_slice_in_dim(results[1], top + jnp.log(total), i * chunk, 3)
        return _put(results[0], y_BCKGH, i, chunk), lse_BKGL1

    empty = jnp.zeros(q_BLKGH.shape, q_BLNH.dtype), jnp.zeros((B, K, N // K, L, 1))
    y_BLKGH, lse_BKGL1 = jax.lax.fori_loop(0, L // chunk, queries, empty)
    return y_BLKGH.reshape(B, L, N, H), lse_BKGL1


def backward(
    chunk: int,
    window: int | None,
    q_BLNH: Array,
    k_BMKH: Array,
    v_BMKH: Array,
    segment_BL: Array,
    segment_BM: Array,
    y_BLNH: Array,
    lse_BKGL1: Array,
    dy_BLNH: Array,
) -> tuple[Float[Array, "B L N H"], Float[Array, "B M K H"], Float[Array, "B M K H"]]:
    """Gradients of q, k and v; `chunk` divides L."""
    dtype, L = q_BLNH.dtype, q_BLNH.shape[1]
    K, scale = k_BMKH.shape[2], q_BLNH.shape[-1] ** -0.5
    q_BLKGH, y_BLKGH, dy_BLKGH = (_grouped(x, K) for x in (q_BLNH, y_BLNH, dy_BLNH))

    def queries(i: Array, gradients: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        q, y, dy, query_BC = (_at(x, i, chunk) for x in (q_BLKGH, y_BLKGH, dy_BLKGH, segment_BL))
        lse = _at(lse_BKGL1, i, chunk, 3)
        delta_BCKG = jnp.sum(dy.astype(jnp.float32) * y.astype(jnp.float32), axis=-1)
        delta = delta_BCKG.transpose(0, 2, 3, 1)[..., None]

        def keys(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dq, dk_BMKH, dv_BMKH = carry
            k, v = _at(k_BMKH, j, chunk), _at(v_BMKH, j, chunk)
            s = _scores(q, k, query_BC, _at(segment_BM, j, chunk), (i - j) * chunk, window)
            p = jnp.exp(s - lse)
            dp = jnp.einsum("blkgh,bmkh->bkglm", dy, v, preferred_element_type=jnp.float32)
            ds = (p * (dp - delta) * scale).astype(dtype)
            dv = jnp.einsum("bkglm,blkgh->bmkh", p.astype(dtype), dy, preferred_element_type=jnp.float32)
            dk = jnp.einsum("bkglm,blkgh->bmkh", ds, q, preferred_element_type=jnp.float32)
            dq += jnp.einsum("bkglm,bmkh->blkgh", ds, k, preferred_element_type=jnp.float32)
            dk_BMKH = _put(dk_BMKH, _at(dk_BMKH, j, chunk) + dk, j, chunk)
            dv_BMKH = _put(dv_BMKH, _at(dv_BMKH, j, chunk) + dv, j, chunk)
            return dq, dk_BMKH, dv_BMKH

        dq_BLKGH, *of_keys = gradients
        start = jnp.zeros(q.shape, jnp.float32), *of_keys
        dq, dk_BMKH, dv_BMKH = jax.lax.fori_loop(_first(i, chunk, window), i + 1, keys, start)
        return _put(dq_BLKGH, dq, i, chunk), dk_BMKH, dv_BMKH

    zeros = jnp.zeros(k_BMKH.shape, jnp.float32)
    start = jnp.zeros(q_BLKGH.shape, dtype), zeros, zeros
    dq_BLKGH, dk_BMKH, dv_BMKH = jax.lax.fori_loop(0, L // chunk, queries, start)
    return dq_BLKGH.reshape(q_BLNH.shape), dk_BMKH.astype(dtype), dv_BMKH.astype(dtype)
