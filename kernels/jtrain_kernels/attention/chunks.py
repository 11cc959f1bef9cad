"""Causal, segment-aware attention in plain JAX, one chunk of queries at a time.

A chunk uses only the keys up to its last query, and with a window only those from its first query's window
on, so hardly any score is computed that the causal mask or the window hides.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain_kernels.attention.mask import Mask
from jtrain_kernels.platforms import by_platform
from jtrain_kernels.soft_cap import capped, times_slope


def forward(chunk: int, mask: Mask, *arrays: Array) -> tuple[Float[Array, "B L N P"], Float[Array, "B N L"]]:
    """Result, and each query's log-partition in float32; takes the arrays that `Passes.forward` does.

    Holds the scores of `chunk` queries at a time, B * N * chunk * M * 4 bytes.
    """
    y_BLNP, lse_BKGL1 = _on_each_platform(_forward, chunk, mask, arrays)
    return y_BLNP, lse_BKGL1.reshape(lse_BKGL1.shape[0], -1, lse_BKGL1.shape[3])


def backward(
    chunk: int,
    mask: Mask,
    q_BLNH: Array,
    k_BMKH: Array,
    v_BMKP: Array,
    segment_BL: Array,
    segment_BM: Array,
    y_BLNP: Array,
    lse_BNL: Array,
    dy_BLNP: Array,
) -> tuple[Float[Array, "B L N H"], Float[Array, "B M K H"], Float[Array, "B M K P"]]:
    """Gradients of q, k and v; scores are recomputed from q, k and the log-partitions."""
    (B, N, L), K = lse_BNL.shape, k_BMKH.shape[2]
    # A trailing 1 in place of H, so that `queries` slices log-partitions too.
    lse_BKGL1 = lse_BNL.reshape(B, K, N // K, L, 1)
    arrays = q_BLNH, k_BMKH, v_BMKP, segment_BL, segment_BM, y_BLNP, lse_BKGL1, dy_BLNP
    return _on_each_platform(_backward, chunk, mask, arrays)  # pyright: ignore[reportReturnType]


def _heads_first(x_BLNH: Array, num_kv_heads: int) -> Float[Array, "B K G L H"]:
    """Transposed so that each head is a matrix; the G query heads of a key head lie next to each other."""
    B, L, N, H = x_BLNH.shape
    return x_BLNH.reshape(B, L, num_kv_heads, N // num_kv_heads, H).transpose(0, 2, 3, 1, 4)


def _heads_last(x_BKGLH: Array) -> Float[Array, "B L N H"]:
    B, K, G, L, H = x_BKGLH.shape
    return x_BKGLH.transpose(0, 3, 1, 2, 4).reshape(B, L, K * G, H)


class _Chunk(NamedTuple):
    """Chunk of queries start..stop, and the keys that they may see: first..stop."""

    first: int
    start: int
    stop: int
    mask: Mask

    def queries(self, x_BKGLH: Array) -> Float[Array, "B K Q H"]:
        """The chunk's queries as rows of the score matrix: query heads of one key head, then positions."""
        # The G query heads of a key head become rows of one matrix, so keys are read once for all of them.
        part = x_BKGLH[:, :, :, self.start : self.stop]
        return part.reshape(*part.shape[:2], -1, part.shape[-1])

    def keys(self, x_BKMH: Array) -> Float[Array, "B K M H"]:
        """Keys that the chunk's queries may see."""
        return x_BKMH[:, :, self.first : self.stop]

    def add(self, total_BKHM: Array, chunk_BKHM: Array) -> Float[Array, "B K H M"]:
        """Adds this chunk's gradient of its keys to the total over all keys up to the chunk's last."""
        updated_BKHM = total_BKHM[..., self.first : self.stop] + chunk_BKHM
        # Keys before the window get nothing from this chunk; with `first` 0 there is nothing to keep.
        return (
            jnp.concatenate([total_BKHM[..., : self.first], updated_BKHM], axis=-1)
            if self.first
            else updated_BKHM
        )

    def scores(
        self, q_BKQH: Array, k_BKMH: Array, segment_BL: Array, segment_BM: Array
    ) -> Float[Array, "B K Q M"]:
        """Scaled and capped scores in float32, -inf where masked; no row is fully masked, because a query
        sees itself.
        """
        s_BKQM = jnp.einsum("bkqh,bkmh->bkqm", q_BKQH, k_BKMH, preferred_element_type=jnp.float32)
        same_BLM = segment_BL[:, self.start : self.stop, None] == segment_BM[:, None, self.first : self.stop]
        query_L, key_M = jnp.arange(self.start, self.stop), jnp.arange(self.first, self.stop)
        seen_LM = query_L[:, None] >= key_M[None, :]
        if self.mask.window is not None:
            seen_LM &= query_L[:, None] - key_M[None, :] < self.mask.window
        bias_BLM = jnp.where(same_BLM & seen_LM[None], 0.0, -jnp.inf).astype(jnp.float32)
        # One bias for all heads: comparisons fused into the loops over scores keep XLA:CPU from vectorising
        # the loops.
        bias_BLM = jax.lax.optimization_barrier(bias_BLM)
        B, K, Q, M = s_BKQM.shape
        s_BKGLM = s_BKQM.reshape(B, K, -1, self.stop - self.start, M)
        # The scale is applied to float32 scores: scaled queries would be rounded in bfloat16.
        s_BKGLM = capped(s_BKGLM * q_BKQH.shape[-1] ** -0.5, self.mask.soft_cap)
        return (s_BKGLM + bias_BLM[:, None, None]).reshape(B, K, Q, M)


def _chunks(length: int, chunk: int, mask: Mask) -> list[_Chunk]:
    """Chunks of all queries; the last one is shorter if `chunk` does not divide the length."""
    # A window of 1 reaches no key but the query's own.
    reach = length if mask.window is None else mask.window - 1
    starts = range(0, length, chunk)
    return [_Chunk(max(start - reach, 0), start, min(start + chunk, length), mask) for start in starts]


type _Pass = Callable[..., tuple[Array, ...]]


def _on_each_platform(
    by_queries: _Pass, chunk: int, mask: Mask, arrays: tuple[Array, ...]
) -> tuple[Array, ...]:
    """Runs a pass over the whole block, on a CPU one sequence at a time.

    There the scores of all sequences (B * N * chunk * M * 4 bytes) overflow the caches, and their fresh pages
    cost as much as the arithmetic. On a TPU, which takes splash wherever that runs, unrolled chunks take the
    compiler minutes.
    """

    def by_sequence(*arrays: Array) -> tuple[Array, ...]:
        def sequence_pass(sequence: tuple[Array, ...]) -> tuple[Array, ...]:
            # Without the barrier every loop that reads the arrays would slice them again, element by element.
            sequence = jax.lax.optimization_barrier(sequence)
            # A batch of one sequence, so that both passes are written for arrays with a batch.
            return tuple(x[0] for x in by_queries(chunk, mask, *(x[None] for x in sequence)))

        return jax.lax.map(sequence_pass, arrays)

    return by_platform(*arrays, cpu=by_sequence, default=partial(by_queries, chunk, mask))


def _forward(
    chunk: int,
    mask: Mask,
    q_BLNH: Array,
    k_BMKH: Array,
    v_BMKP: Array,
    segment_BL: Array,
    segment_BM: Array,
) -> tuple[Float[Array, "B L N P"], Float[Array, "B K G L 1"]]:
    """Result, and each query's log-partition in float32."""
    (B, _, N, _), (K, P) = q_BLNH.shape, v_BMKP.shape[2:]
    q_BKGLH = _heads_first(q_BLNH, K)
    k_BKMH, v_BKMP = _heads_first(k_BMKH, K)[:, :, 0], _heads_first(v_BMKP, K)[:, :, 0]
    ys, lses = [], []
    # Chunks are unrolled: each has another number of keys, which a scan could not have.
    for part in _chunks(q_BLNH.shape[1], chunk, mask):
        k, v = part.keys(k_BKMH), part.keys(v_BKMP)
        s_BKQM = part.scores(part.queries(q_BKGLH), k, segment_BL, segment_BM)
        # Subtracted before the exponential, which is then at most 1.
        top_BKQ1 = jnp.max(s_BKQM, axis=-1, keepdims=True)
        p_BKQM = jnp.exp(s_BKQM - top_BKQ1)
        sum_BKQ1 = jnp.sum(p_BKQM, axis=-1, keepdims=True)
        # Normalising the result, not p, saves a pass over the scores.
        y = (
            jnp.einsum("bkqm,bkmp->bkqp", p_BKQM.astype(v.dtype), v, preferred_element_type=jnp.float32)
            / sum_BKQ1
        )
        ys.append(y.astype(q_BLNH.dtype).reshape(B, K, N // K, -1, P))
        lses.append((top_BKQ1 + jnp.log(sum_BKQ1)).reshape(B, K, N // K, -1, 1))
    return _heads_last(jnp.concatenate(ys, axis=3)), jnp.concatenate(lses, axis=3)


def _backward(
    chunk: int,
    mask: Mask,
    q_BLNH: Array,
    k_BMKH: Array,
    v_BMKP: Array,
    segment_BL: Array,
    segment_BM: Array,
    y_BLNP: Array,
    lse_BKGL1: Array,
    dy_BLNP: Array,
) -> tuple[Float[Array, "B L N H"], Float[Array, "B M K H"], Float[Array, "B M K P"]]:
    """Gradients of q, k and v."""
    dtype, (B, L, N, H) = q_BLNH.dtype, q_BLNH.shape
    K, P = v_BMKP.shape[2:]
    q_BKGLH = _heads_first(q_BLNH, K)
    k_BKMH, v_BKMP = _heads_first(k_BMKH, K)[:, :, 0], _heads_first(v_BMKP, K)[:, :, 0]
    dy_BKGLP, y_BKGLP = _heads_first(dy_BLNP, K), _heads_first(y_BLNP, K)
    # Sum of p * dp over keys equals the sum of y * dy over the head: one number per query, without scores.
    delta_BKGL1 = jnp.sum(dy_BKGLP.astype(jnp.float32) * y_BKGLP.astype(jnp.float32), axis=-1, keepdims=True)

    dqs, dk_tails, dv_tails = [], [], []
    dk_BKHM = jnp.zeros((B, K, H, L), jnp.float32)
    dv_BKPM = dk_BKHM if P == H else jnp.zeros((B, K, P, L), jnp.float32)
    # From the last chunk to the first, so that gradients of keys behind a chunk's last key are finished.
    for part in reversed(_chunks(L, chunk, mask)):
        k, v = part.keys(k_BKMH), part.keys(v_BKMP)
        q, dy = part.queries(q_BKGLH), part.queries(dy_BKGLP)
        q, dy = _after((*dqs[-1:], dk_BKHM, dv_BKPM), q, dy)
        s_BKQM = part.scores(q, k, segment_BL, segment_BM)
        # With the log-partition the probabilities need no second maximum and sum.
        p_BKQM = jnp.exp(s_BKQM - part.queries(lse_BKGL1))
        dp_BKQM = jnp.einsum("bkqp,bkmp->bkqm", dy, v, preferred_element_type=jnp.float32)
        ds_BKQM = p_BKQM * (dp_BKQM - part.queries(delta_BKGL1)) * H**-0.5
        ds_BKQM = times_slope(ds_BKQM, s_BKQM, mask.soft_cap).astype(dtype)
        dqs.append(jnp.einsum("bkqm,bkmh->bkqh", ds_BKQM, k).reshape(B, K, N // K, -1, H))
        # Transposing q and dy (H wide) and the results is cheap; transposing p and ds (M wide) is not.
        dv = jnp.einsum("bkpq,bkqm->bkpm", dy.mT, p_BKQM.astype(dtype), preferred_element_type=jnp.float32)
        dk = jnp.einsum("bkhq,bkqm->bkhm", q.mT, ds_BKQM, preferred_element_type=jnp.float32)
        # Keys after this chunk's last query get nothing from earlier chunks, so their gradients are done.
        dk_tails.append(dk_BKHM[..., part.stop :])
        dv_tails.append(dv_BKPM[..., part.stop :])
        dk_BKHM, dv_BKPM = part.add(dk_BKHM, dk), part.add(dv_BKPM, dv)

    def join_tails(finished: Array, tails: list[Array]) -> Float[Array, "B M K H"]:
        return jnp.concatenate([finished, *reversed(tails)], axis=-1).transpose(0, 3, 1, 2).astype(dtype)

    return (
        _heads_last(jnp.concatenate(dqs[::-1], axis=3)),
        join_tails(dk_BKHM, dk_tails),
        join_tails(dv_BKPM, dv_tails),
    )


def _after(results: tuple[Array, ...], *arrays: Array) -> tuple[Array, ...]:
    """`arrays`, bit for bit, but computed only after `results`, so that chunks run one after the other.

    XLA's schedulers start whatever they can, and would keep the scores of all chunks: B * N * L * L * 2
    bytes, 4 GiB of 26 for an 8B model at L=8192 on 8 H200. An `optimization_barrier` does not help, since it
    is removed before scheduling. A test for NaN stays, because no compiler may assume that a gradient is not
    NaN; if it is, the rest becomes NaN too.
    """
    token = sum(x[(0,) * x.ndim].astype(jnp.float32) for x in results)
    return tuple(jnp.where(jnp.isnan(token), jnp.nan, x).astype(x.dtype) for x in arrays)
