"""tokamax's flash attention for Hopper GPUs, a Pallas kernel (Mosaic GPU).

The kernel takes no segments, but a range of keys per query: the first key that the query sees, and the one after the
last. The documents of a row are contiguous, so the range is equivalent, and blocks of other documents are skipped.
tokamax's inner functions are called, because its public ones query the live device and give no gradients for a
log-partition that the caller provides.
"""

import functools
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain_kernels.attention.mask import Mask, Passes
from jtrain_kernels.device import DeviceSpec

VERSION = "0.0.17"
"""The tokamax version whose inner functions are called here."""


def supports(device: DeviceSpec, avals: Mapping[str, Any]) -> str | None:
    """Reason why the implementation cannot run; None if it can."""
    query, M = avals["q_BLNH"], avals["k_BMKH"].shape[1]
    L, H = query.shape[1], query.shape[3]
    if device.compute_capability is None or device.compute_capability[0] != 9:
        return "tokamax's kernel, as it is called here, is for Hopper GPUs"
    if importlib.util.find_spec("tokamax") is None:
        return f"tokamax is not installed: pip install tokamax=={VERSION}"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"tokamax computes attention in bfloat16 or float16, not in {query.dtype}"
    if H not in (64, 128, 256):
        return f"tokamax takes heads of 64, 128 or 256, but head_dim={H}"
    if L % 128 or M % 128:
        return f"tokamax takes multiples of 128 positions, but there are {L} queries and {M} keys"
    return None


def configs(device: DeviceSpec, avals: Mapping[str, Any]) -> Sequence[Mapping[str, int]]:
    """Candidate blocks and stages of the forward and backward kernels; tokamax's own heuristic first."""
    del device
    wide = avals["q_BLNH"].shape[3] > 128
    first = dict(
        block_q=64, block_kv=64 if wide else 128, stages=2, block_backward=64, stages_backward=1 if wide else 2
    )
    if wide:
        return [first]
    others = [dict(block_q=128), dict(block_q=128, block_kv=64), dict(stages=3), dict(block_backward=128)]
    return [first, *(first | other for other in others)]


def forward(
    q_BLNH: Float[Array, "B L N H"],
    k_BMKH: Float[Array, "B M K H"],
    v_BMKH: Float[Array, "B M K H"],
    segment_BL: Int[Array, "B L"],
    segment_BM: Int[Array, "B M"],
    *,
    mask: Mask,
    chunk: int,
    block_q: int,
    block_kv: int,
    stages: int,
    block_backward: int,
    stages_backward: int,
) -> tuple[Float[Array, "B L N H"], Float[Array, "B N L"]]:
    """See `Passes`."""
    from tokamax._src.ops.attention import pallas_mosaic_gpu_kernel_sm90 as sm90  # lazy: 2 s

    del chunk, block_backward, stages_backward
    kernel = functools.partial(
        sm90.flash_attention_kernel,
        is_causal=mask.causal,
        logits_soft_cap=None,
        logits_scale=q_BLNH.shape[-1] ** -0.5,
        out_dtype=q_BLNH.dtype,
        normalize_output=True,
        return_residuals=True,
        use_stable_softmax=True,
        rescale_threshold=1.0,
        # A persistent kernel would query the live device for its number of cores.
        config=sm90.Config(block_q=block_q, block_kv=block_kv, num_stages=stages, persistent=False),
    )
    each: Any = jax.vmap(lambda q, k, v, first, end: kernel(q, k, v, None, None, first, end))
    y_BLNH, (top_BNL, total_BNL) = each(q_BLNH, k_BMKH, v_BMKH, *_ranges(segment_BL, segment_BM, mask))
    return y_BLNH, top_BNL + jnp.log(total_BNL)


def backward(
    q_BLNH: Array,
    k_BMKH: Array,
    v_BMKH: Array,
    segment_BL: Array,
    segment_BM: Array,
    y_BLNH: Array,
    lse_BNL: Array,
    dy_BLNH: Array,
    *,
    mask: Mask,
    chunk: int,
    block_q: int,
    block_kv: int,
    stages: int,
    block_backward: int,
    stages_backward: int,
) -> tuple[Float[Array, "B L N H"], Float[Array, "B M K H"], Float[Array, "B M K H"]]:
    """See `Passes`."""
    from tokamax._src.ops.attention import pallas_mosaic_gpu_vjp_kernel_sm90 as sm90  # lazy: 2 s

    del chunk, block_q, block_kv, stages
    block = block_backward
    config = sm90.Config(
        block_q_dkv=block, block_kv_dkv=block, block_q_dq=block, block_kv_dq=block, num_stages=stages_backward
    )

    def one(*arrays: Array) -> tuple[Array, Array, Array]:
        q, k, v, lse, y, dy, first, end = arrays
        # With the log-partition in place of the largest score, the exponentials sum to 1.
        return sm90.flash_attention_vjp_kernel(
            q, k, v, (lse, jnp.ones_like(lse)), y, dy, None, None, first, end,
            logits_scale=q.shape[-1] ** -0.5,
            logits_soft_cap=None,
            is_causal=mask.causal,
            ds_dtype=None,
            config=config,
        )[:3]  # fmt: skip

    ranges = _ranges(segment_BL, segment_BM, mask)
    return jax.vmap(one)(q_BLNH, k_BMKH, v_BMKH, lse_BNL, y_BLNH, dy_BLNH, *ranges)


PASSES = Passes(forward, backward)


def _ranges(segment_BL: Array, segment_BM: Array, mask: Mask) -> tuple[Int[Array, "B 1 L"], Int[Array, "B 1 L"]]:
    """First key of each query's segment and window, and the one after the segment's last; equal if it has no key."""
    same_BLM = segment_BL[:, :, None] == segment_BM[:, None, :]
    first_BL = jnp.argmax(same_BLM, axis=2).astype(jnp.int32)
    end_BL = first_BL + jnp.sum(same_BLM, axis=2, dtype=jnp.int32)
    if mask.window is not None:
        first_BL = jnp.maximum(first_BL, jnp.arange(segment_BL.shape[1], dtype=jnp.int32)[None] - mask.window + 1)
    return first_BL[:, None], end_BL[:, None]
