"""Gated delta rule: linear attention that corrects what the state already predicts.

Letters here: N value heads of size P, K key heads of size H, E channels with a decay of their own (1 or H).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain_kernels import cost, registry
from jtrain_kernels.attention.context import WHOLE_ROWS, RowSplit
from jtrain_kernels.delta_rule import chunked
from jtrain_kernels.errors import UserError
from jtrain_kernels.recurrence import parts
from jtrain_kernels.recurrence.chunks import check_chunk
from jtrain_kernels.recurrence.documents import (
    RecurrentState,
    empty_state,
    mask_padding,
)


def delta_rule(
    q_BLKH: Float[Array, "B L K H"],
    k_BLKH: Float[Array, "B L K H"],
    v_BLNP: Float[Array, "B L N P"],
    g: Float[Array, "B L N *h"],
    beta_BLN: Float[Array, "B L N"],
    segment_BL: Int[Array, "B L"],
    *,
    initial: RecurrentState | None = None,
    split: RowSplit = WHOLE_ROWS,
    scale: float | None = None,
    normalize: bool = False,
    chunk: int = 64,
) -> tuple[Float[Array, "B L N P"], RecurrentState]:
    """Gated DeltaNet (arXiv:2412.06464), or with a decay per channel KDA (arXiv:2510.26692).

    Per token and head, with S the state of the token's document, zeros at its start:

        S = exp(g) S;  S = S + k beta (v - k S);  y = scale q S

    Value head n uses key head n * K // N. Padding leaves S as it is; its results mean nothing. The state is
    float32; matmuls and results have v's dtype. One token (L = 1) is one step of the recurrence.

    The backward pass keeps the inputs and N * H * P * 4 bytes per 1024 tokens, and computes each 1024 tokens
    again.

    Args:
      g: log-decay, at most 0, per head [B, L, N] or per channel of the key [B, L, N, H].
      beta_BLN: step size, in (0, 1), or up to 2 with k of length 1.
      initial: state of the tokens before, as returned by the call for them.
      split: of the row over devices; call it under shard_map. What a part does to a state is a matrix of H *
        H per head, for which each device runs the recurrence once more, with H columns beside the P of v.
      scale: by default 1 / sqrt(H).
      normalize: divides q and k by their lengths first.
      chunk: tokens computed at once; a power of two.

    Returns:
      y, and the state after the row: the same on all devices of `split`.

    Raises:
      UserError: heads, channels or chunk do not fit, or the split's parts do not divide.
    """
    (B, _, K, H), (N, P) = k_BLKH.shape, v_BLNP.shape[2:]
    if N % K:
        raise UserError(f"delta_rule: {N} value heads are no multiple of {K} key heads.")
    if g.ndim == 4 and g.shape[3] != H:
        raise UserError(f"delta_rule: g has {g.shape[3]} channels per head, but a key has {H}.")
    check_chunk("delta_rule", chunk)
    if normalize:
        q_BLKH, k_BLKH = map(_normalize, (q_BLKH, k_BLKH))
    # E is the channels of a key, or 1 where all channels of a head share a decay.
    g_BLNE = mask_padding(g if g.ndim == 4 else g[..., None], segment_BL)
    gates = dict(g_BLNE=g_BLNE, beta_BLN=mask_padding(beta_BLN, segment_BL))
    arrays = dict(q_BLKH=q_BLKH, k_BLKH=k_BLKH, v_BLNP=v_BLNP, **gates)
    statics = dict(scale=H**-0.5 if scale is None else scale, chunk=chunk)

    def run(arrays: parts.StateArrays, document_BL: Array, state_BNHP: Array) -> tuple[Array, Array]:
        return registry.call(DELTA_RULE, **arrays, document_BL=document_BL, state_BNHP=state_BNHP, **statics)

    def transition(arrays: parts.StateArrays, document_BL: Array) -> tuple[Array, Array]:
        # The state is linear in the one before: with the identity beside zeros, and no values for it, it
        # becomes the transition beside the tokens' own sum.
        v_BLNP = jnp.pad(arrays["v_BLNP"], ((0, 0), (0, 0), (0, 0), (0, H)))
        columns = jnp.pad(jnp.eye(H, dtype=jnp.float32), ((0, 0), (P, 0)))[None, None]
        columns = jnp.broadcast_to(columns, (len(v_BLNP), N, H, P + H))
        _, state = run({**arrays, "v_BLNP": v_BLNP}, document_BL, columns)
        return state[..., P:], state[..., :P]

    start = empty_state(B, N, H, P) if initial is None else initial
    return parts.run_row("delta_rule", run, transition, jnp.matmul, arrays, segment_BL, start, split)


def _normalize(x_BLKH: Array) -> Array:
    x32 = x_BLKH.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.sum(x32 * x32, axis=-1, keepdims=True) + 1e-6)  # as in Qwen3-Next
    return (x32 * scale).astype(x_BLKH.dtype)


def _case(key_heads: int, heads: int, decays: int) -> registry.Avals:
    tokens, float32 = (1, 8192), jnp.float32
    key, value = (jax.ShapeDtypeStruct((*tokens, n, 128), jnp.bfloat16) for n in (key_heads, heads))
    g, beta = (jax.ShapeDtypeStruct((*tokens, *shape), float32) for shape in ((heads, decays), (heads,)))
    state = jax.ShapeDtypeStruct((1, heads, 128, 128), float32)
    arrays = dict(q_BLKH=key, k_BLKH=key, v_BLNP=value, g_BLNE=g, beta_BLN=beta, state_BNHP=state)
    return dict(arrays, document_BL=jax.ShapeDtypeStruct(tokens, jnp.int32), scale=128**-0.5, chunk=64)


DELTA_RULE = registry.Op(
    "delta_rule",
    (registry.Implementation("xla", chunked.delta_rule, cost_s=cost.delta_rule_s),),
    # Qwen3-Next 80B: 16 key heads, 32 value heads, a decay per head; Kimi Linear: 32 heads, per channel.
    cases={"qwen3_next": _case(16, 32, 1), "kimi_linear": _case(32, 32, 128)},
)
OPS = (DELTA_RULE,)
