"""Attention of a block of queries to a block of keys without a causal mask: one hop of ring attention.

Only segments mask, so every score is computed; the scores of one chunk of queries with all keys exist at a
time.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain_kernels.soft_cap import capped, times_slope


def _parts(x: Array, chunk: int, axis: int = 1) -> Array:
    """Positions split into chunks, with the chunk index as the first dimension."""
    shape = *x.shape[:axis], x.shape[axis] // chunk, chunk, *x.shape[axis + 1 :]
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _whole(x: Array, axis: int = 1) -> Array:
    # The inverse of `_parts`.
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _fitting(length: int, chunk: int) -> int:
    """Largest chunk size up to `chunk` that divides the length."""
    # The loop needs chunks of one size; a divisor of the length needs no padding.
    return next(size for size in range(min(chunk, length), 0, -1) if length % size == 0)


def _grouped(x_BLNH: Array, num_kv_heads: int) -> Float[Array, "B L K G H"]:
    B, L, N, H = x_BLNH.shape
    return x_BLNH.reshape(B, L, num_kv_heads, N // num_kv_heads, H)


def _scores(
    q_BLKGH: Array, k_BMKH: Array, segment_BL: Array, segment_BM: Array, soft_cap: float | None
) -> Float[Array, "B K G L M"]:
    """Scaled and capped scores in float32, -inf where masked; a row may be fully masked."""
    s_BKGLM = jnp.einsum("blkgh,bmkh->bkglm", q_BLKGH, k_BMKH, preferred_element_type=jnp.float32)
    seen_BLM = segment_BL[:, :, None] == segment_BM[:, None, :]
    seen_B11LM = seen_BLM[:, None, None]
    return jnp.where(seen_B11LM, capped(s_BKGLM * q_BLKGH.shape[-1] ** -0.5, soft_cap), -jnp.inf)


def forward(
    chunk: int,
    soft_cap: float | None,
    q_BLNH: Float[Array, "B L N H"],
    k_BMKH: Float[Array, "B M K H"],
    v_BMKP: Float[Array, "B M K P"],
    segment_BL: Int[Array, "B L"],
    segment_BM: Int[Array, "B M"],
) -> tuple[Float[Array, "B L N P"], Float[Array, "B N L"]]:
    """Result, and each query's log-partition in float32; 0 and -inf for a query that sees no key."""
    chunk, K = _fitting(q_BLNH.shape[1], chunk), k_BMKH.shape[2]

    def forward_chunk(part: tuple[Array, Array]) -> tuple[Array, Array]:
        q_BCKGH, segment_BC = part
        s = _scores(q_BCKGH, k_BMKH, segment_BC, segment_BM, soft_cap)
        # The lowest finite number, because -inf - -inf would be nan if a row is fully masked.
        top = jnp.maximum(jnp.max(s, axis=-1), jnp.finfo(jnp.float32).min)
        p = jnp.exp(s - top[..., None])
        total = jnp.sum(p, axis=-1)
        y = jnp.einsum(
            "bkglm,bmkp->bkglp", p.astype(v_BMKP.dtype), v_BMKP, preferred_element_type=jnp.float32
        )
        # A query without keys has total 0; dividing by 1 gives it y = 0.
        y = y / jnp.where(total == 0, 1.0, total)[..., None]
        lse = jnp.where(total == 0, -jnp.inf, top + jnp.log(total))
        # [B, K, G, C, P] -> [B, C, K, G, P]: both dimensions of heads side by side again.
        return y.transpose(0, 3, 1, 2, 4).astype(q_BLNH.dtype), lse

    y, lse = jax.lax.map(forward_chunk, (_parts(_grouped(q_BLNH, K), chunk), _parts(segment_BL, chunk)))
    B, L, N, _ = q_BLNH.shape
    return _whole(y).reshape(B, L, N, -1), _whole(lse, axis=3).reshape(B, N, L)


def backward(
    chunk: int,
    soft_cap: float | None,
    q_BLNH: Array,
    k_BMKH: Array,
    v_BMKP: Array,
    segment_BL: Array,
    segment_BM: Array,
    y_BLNP: Array,
    lse_BNL: Array,
    dy_BLNP: Array,
) -> tuple[Float[Array, "B L N H"], Float[Array, "B M K H"], Float[Array, "B M K P"]]:
    """Gradients of q, k and v in float32, so that the caller can add those of other blocks."""
    dtype, scale = q_BLNH.dtype, q_BLNH.shape[-1] ** -0.5
    (B, L, N, _), K = q_BLNH.shape, k_BMKH.shape[2]
    chunk = _fitting(L, chunk)
    q, y, dy = (_parts(_grouped(x, K), chunk) for x in (q_BLNH, y_BLNP, dy_BLNP))
    lse = _parts(lse_BNL.reshape(B, K, N // K, L), chunk, axis=3)

    def backward_chunk(
        key_sums: tuple[Array, Array], part: tuple[Array, ...]
    ) -> tuple[tuple[Array, Array], Array]:
        q, y, dy, segment_BC, lse = part
        # Sum of y * dy per query, as in `chunks`: p * dp summed over keys without the scores.
        delta = jnp.einsum("blkgp,blkgp->bkgl", dy.astype(jnp.float32), y.astype(jnp.float32))
        # A row that sees none of these keys has p = 0: lse is over all keys, so it is finite.
        s = _scores(q, k_BMKH, segment_BC, segment_BM, soft_cap)
        p = jnp.exp(s - lse[..., None])
        dp = jnp.einsum("blkgp,bmkp->bkglm", dy, v_BMKP, preferred_element_type=jnp.float32)
        ds = times_slope(p * (dp - delta[..., None]) * scale, s, soft_cap).astype(dtype)
        dv = jnp.einsum("bkglm,blkgp->bmkp", p.astype(dtype), dy, preferred_element_type=jnp.float32)
        dk = jnp.einsum("bkglm,blkgh->bmkh", ds, q, preferred_element_type=jnp.float32)
        dq = jnp.einsum("bkglm,bmkh->blkgh", ds, k_BMKH, preferred_element_type=jnp.float32)
        return (key_sums[0] + dk, key_sums[1] + dv), dq

    dk_zeros = jnp.zeros(k_BMKH.shape, jnp.float32)
    dv_zeros = dk_zeros if v_BMKP.shape == k_BMKH.shape else jnp.zeros(v_BMKP.shape, jnp.float32)
    (dk_BMKH, dv_BMKP), dq = jax.lax.scan(
        backward_chunk, (dk_zeros, dv_zeros), (q, y, dy, _parts(segment_BL, chunk), lse)
    )
    return _whole(dq).reshape(q_BLNH.shape), dk_BMKH, dv_BMKP
