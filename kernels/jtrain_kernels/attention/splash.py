"""Splash attention, JAX's Pallas kernel for TPUs, which skips blocks that the mask hides."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain_kernels import compat
from jtrain_kernels.attention.mask import Mask, Passes
from jtrain_kernels.attention.pad_heads import cut_heads, pad_heads
from jtrain_kernels.device import DeviceSpec

LANES = 128
"""Lanes of a TPU's vector registers; widths of blocks are multiples of it."""


def supports(device: DeviceSpec, avals: Mapping[str, Any]) -> str | None:
    """Reason why the implementation cannot run; None if it can."""
    L, M = avals["q_BLNH"].shape[1], avals["k_BMKH"].shape[1]
    if device.platform != "tpu":
        return "splash is a kernel for TPUs"
    if L % LANES or M % LANES:
        return f"splash takes multiples of {LANES} positions, but there are {L} queries and {M} keys"
    return None


def configs(device: DeviceSpec, avals: Mapping[str, Any]) -> Sequence[Mapping[str, int]]:
    """Candidate blocks of queries and keys; the largest of the published tunings first."""
    del device
    L, M = avals["q_BLNH"].shape[1], avals["k_BMKH"].shape[1]
    sizes = [(512, 1024), (512, 512), (1024, 1024), (256, 512), (128, 128)]
    # Blocks must divide the positions; 128 always does, as `supports` has checked.
    fitting = [dict(block_q=q, block_kv=kv) for q, kv in sizes if L % q == 0 and M % kv == 0]
    return fitting or [dict(block_q=LANES, block_kv=LANES)]


def forward(
    q_BLNH: Float[Array, "B L N H"],
    k_BMKH: Float[Array, "B M K H"],
    v_BMKP: Float[Array, "B M K P"],
    segment_BL: Int[Array, "B L"],
    segment_BM: Int[Array, "B M"],
    *,
    mask: Mask,
    chunk: int,
    block_q: int,
    block_kv: int,
    interpret: bool = False,
) -> tuple[Float[Array, "B L N P"], Float[Array, "B N L"]]:
    """See `Passes`.

    The kernel has no scale. The keys are scaled, because they have fewer heads than the queries: in bfloat16
    a further rounding if H is no power of 4.
    """
    del chunk
    H, P = q_BLNH.shape[-1], v_BMKP.shape[-1]
    kernel = _kernel(q_BLNH, k_BMKH, mask, block_q, block_kv, interpret, residuals=True)
    of_heads = (
        *pad_heads(_padded(H), _heads_first(q_BLNH), _heads_first(_scaled(k_BMKH))),
        *pad_heads(_padded(P), _heads_first(v_BMKP)),
    )
    y_BNLP, (lse_BNL,) = jax.vmap(kernel)(*of_heads, _segments(segment_BL, segment_BM))
    # The kernel writes it once per lane, and XLA would keep all 128 until the backward pass.
    lse_BNL = jax.lax.optimization_barrier(lse_BNL)
    (y_BNLP,) = cut_heads(P, y_BNLP)
    seen_BNL = lse_BNL > kernel.kwargs["mask_value"] / 2  # a query that sees no key has only the mask's value
    return _heads_first(y_BNLP), jnp.where(seen_BNL, lse_BNL, -jnp.inf)


def backward(
    q_BLNH: Array,
    k_BMKH: Array,
    v_BMKP: Array,
    segment_BL: Array,
    segment_BM: Array,
    y_BLNP: Array,
    lse_BNL: Array,
    dy_BLNP: Array,
    *,
    mask: Mask,
    chunk: int,
    block_q: int,
    block_kv: int,
    interpret: bool = False,
) -> tuple[Float[Array, "B L N H"], Float[Array, "B M K H"], Float[Array, "B M K P"]]:
    """See `Passes`."""
    del chunk
    kernel = _kernel(q_BLNH, k_BMKH, mask, block_q, block_kv, interpret, residuals=False)
    H, P = q_BLNH.shape[-1], v_BMKP.shape[-1]
    # The sums of y * dy are a pass of their own: as the end of the matmul that gives dy, they make XLA:TPU's
    # matmul 1.6 times as long.
    dy_BLNP = jax.lax.optimization_barrier(dy_BLNP)
    q, k, v, y, dy = map(_heads_first, (q_BLNH, _scaled(k_BMKH), v_BMKP, y_BLNP, dy_BLNP))
    q, k, v, y, dy = *pad_heads(_padded(H), q, k), *pad_heads(_padded(P), v, y, dy)
    saved = q, k, v, _segments(segment_BL, segment_BM), y, lse_BNL
    dq, dk, dv = jax.vmap(functools.partial(compat.splash_backward, kernel))(saved, dy)
    gradients = *cut_heads(H, dq, dk), *cut_heads(P, dv)
    dq_BLNH, dk_BMKH, dv_BMKP = map(_heads_first, gradients)
    # dk is the gradient of the scaled keys, so the scale is applied to it once more.
    return dq_BLNH, _scaled(dk_BMKH), dv_BMKP


PASSES = Passes(forward, backward)


def _padded(H: int) -> int:
    """Head size of the kernel: half of the lanes, or a multiple of them; smaller heads are padded."""
    return LANES // 2 if H <= LANES // 2 else -(-H // LANES) * LANES


def _heads_first(x_BLNH: Array) -> Float[Array, "B N L H"]:
    """Swaps positions and heads; its own inverse."""
    return x_BLNH.swapaxes(1, 2)


def _scaled(k_BMKH: Array) -> Float[Array, "B M K H"]:
    return (k_BMKH.astype(jnp.float32) * k_BMKH.shape[-1] ** -0.5).astype(k_BMKH.dtype)


def _segments(segment_BL: Array, segment_BM: Array) -> Any:
    # Lazy: 1 s.
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as splash,
    )

    return splash.SegmentIds(segment_BL, segment_BM)


def _kernel(
    q_BLNH: Array, k_BMKH: Array, mask: Mask, block_q: int, block_kv: int, interpret: bool, *, residuals: bool
) -> Any:
    # Lazy: 1 s.
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as splash,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    (L, N), M = q_BLNH.shape[1:3], k_BMKH.shape[1]
    if mask.window is not None:
        # Window sizes count the keys before and after the query's own.
        head_mask = masks.LocalMask((L, M), window_size=(mask.window - 1, 0), offset=0)
    else:
        head_mask = masks.CausalMask((L, M)) if mask.causal else masks.FullMask((L, M))
    blocks = splash.BlockSizes(
        block_q=block_q, block_kv=block_kv, block_q_dkv=block_q, block_kv_dkv=block_kv,
        block_q_dq=block_q, block_kv_dq=block_kv,
    )  # fmt: skip
    # All query heads have the same mask, which the kernel processes once.
    return splash.make_splash_mha(
        masks.MultiHeadMask([head_mask] * N),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=blocks,
        save_residuals=residuals,
        attn_logits_soft_cap=mask.soft_cap,
        interpret=interpret,
    )
