"""cuDNN's fused attention, for NVIDIA GPUs.

Segments become an additive mask of B * L * M elements in the compute dtype, made once per layer. cuDNN's own
packed layout needs the maximum number of documents per row, and drops the documents beyond it. Lengths alone,
as JAX's `dot_product_attention` takes them, would not separate the documents (MaxText issue 4478).
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain_kernels import compat
from jtrain_kernels.attention.mask import Mask, Passes
from jtrain_kernels.attention.pad_heads import cut_heads, largest_head, pad_heads
from jtrain_kernels.device import DeviceSpec

_LARGEST_HEAD = {8: 128, 9: 256, 10: 128}
"""Largest head size by major compute capability, forward and backward (cuDNN 9 support matrix)."""


def supports(device: DeviceSpec, avals: Mapping[str, Any]) -> str | None:
    """Reason why the implementation cannot run; None if it can."""
    query, M = avals["q_BLNH"], avals["k_BMKH"].shape[1]
    L, H = query.shape[1], largest_head(avals)
    if device.compute_capability is None or device.compute_capability[0] not in _LARGEST_HEAD:
        return "cuDNN runs on NVIDIA GPUs from Ampere on"
    if avals.get("soft_cap") is not None:
        return f"cuDNN does not cap scores, but soft_cap={avals['soft_cap']}"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN computes attention in bfloat16 or float16, not in {query.dtype}"
    largest = _LARGEST_HEAD[device.compute_capability[0]]
    if largest < H or H % 8:
        return f"cuDNN takes heads of a multiple of 8 up to {largest} on {device.name}, but head_dim={H}"
    if L % 2 or M % 2:
        return f"cuDNN takes an even number of positions with a mask, but there are {L} queries and {M} keys"
    return None


def forward(
    q_BLNH: Float[Array, "B L N H"],
    k_BMKH: Float[Array, "B M K H"],
    v_BMKP: Float[Array, "B M K P"],
    segment_BL: Int[Array, "B L"],
    segment_BM: Int[Array, "B M"],
    *,
    mask: Mask,
    chunk: int,
) -> tuple[Float[Array, "B L N P"], Float[Array, "B N L"]]:
    """See `Passes`."""
    del chunk
    arrays = _equal_heads(q_BLNH, k_BMKH, v_BMKP)
    y_BLNP, lse_BNL = compat.cudnn_attention(
        *arrays, bias=_bias(segment_BL, segment_BM, q_BLNH), **_statics(mask, q_BLNH)
    )
    (y_BLNP,) = cut_heads(v_BMKP.shape[-1], y_BLNP)
    # Under a causal mask every query sees itself, so no row is empty.
    if mask.causal:
        return y_BLNP, lse_BNL
    # If a query sees none of these keys, all scores have the mask's value, and the log-partition is
    # meaningless.
    seen_BL1 = jnp.any(segment_BL[:, :, None] == segment_BM[:, None, :], axis=2, keepdims=True)
    lse_BNL = jnp.where(seen_BL1.mT, lse_BNL, -jnp.inf)
    return jnp.where(seen_BL1[..., None], y_BLNP, 0), lse_BNL


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
) -> tuple[Float[Array, "B L N H"], Float[Array, "B M K H"], Float[Array, "B M K P"]]:
    """See `Passes`."""
    del chunk
    # Made again, not saved: B * L * M elements per layer would stay in memory until the backward pass.
    bias = _bias(segment_BL, segment_BM, q_BLNH)
    q, k, v, y, dy = _equal_heads(q_BLNH, k_BMKH, v_BMKP, y_BLNP, dy_BLNP)
    arrays = q, k, v, lse_BNL, y, dy
    dq, dk, dv = compat.cudnn_attention(*arrays, bias=bias, **_statics(mask, q_BLNH))
    (dq, dk), (dv,) = cut_heads(q_BLNH.shape[-1], dq, dk), cut_heads(v_BMKP.shape[-1], dv)
    return dq, dk, dv


PASSES = Passes(forward, backward)


def _statics(mask: Mask, q_BLNH: Array) -> dict[str, Any]:
    return dict(causal=mask.causal, window=mask.window, scale=q_BLNH.shape[-1] ** -0.5)


def _equal_heads(*arrays: Array) -> tuple[Array, ...]:
    """Arrays with heads of one size: cuDNN takes no others in both passes."""
    return pad_heads(max(x.shape[-1] for x in arrays), *arrays)


def _bias(segment_BL: Array, segment_BM: Array, q_BLNH: Array) -> Float[Array, "B 1 L M"]:
    """Bias of the scores: 0 within a segment, else half of the dtype's lowest number: sums stay finite."""
    same_BLM = segment_BL[:, :, None] == segment_BM[:, None, :]
    # Half, so that adding a finite score cannot overflow to -inf, which would give nan in an empty row.
    lowest = 0.5 * float(jnp.finfo(q_BLNH.dtype).min)
    # One bias for all heads.
    return jnp.where(same_BLM, 0.0, lowest).astype(q_BLNH.dtype)[:, None]
