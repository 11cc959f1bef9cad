"""tokamax's flash attention for Hopper and Blackwell GPUs, Pallas kernels (Mosaic GPU).

The kernels take no segments, but a range of keys per query: the first key that the query sees, and the one
after the last. The documents of a row are contiguous, so the range is equivalent. Causal attention needs no
end of the range. The forward kernel skips blocks outside of the range; the backward kernels compute and mask
them. No array of L * M elements exists. tokamax's inner functions are called, because its public ones query
the live device and give no gradients for a log-partition that the caller provides.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain_kernels.attention.mask import Mask, Passes
from jtrain_kernels.attention.pad_heads import cut_heads, largest_head, pad_heads
from jtrain_kernels.device import DeviceSpec

HEADS = {90: (64, 128, 256), 100: (64, 128)}
"""Capability -> head sizes of the kernels; smaller heads are padded."""


def _capability(device: DeviceSpec) -> int:
    """Compute capability as a number, 90 for 9.0; 0 for a device without one."""
    major, minor = device.compute_capability or (0, 0)
    return 10 * major + minor


def _padded(capability: int, H: int) -> int:
    """Smallest head size of the kernels that holds H elements."""
    return next(width for width in HEADS[capability] if width >= H)


def supports(device: DeviceSpec, avals: Mapping[str, Any]) -> str | None:
    """Reason why the implementation cannot run; None if it can."""
    query, M = avals["q_BLNH"], avals["k_BMKH"].shape[1]
    L, H = query.shape[1], largest_head(avals)
    if _capability(device) not in HEADS:
        return (
            "tokamax's kernels, as they are called here, are for Hopper and Blackwell (sm90 and sm100) GPUs"
        )
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"tokamax computes attention in bfloat16 or float16, not in {query.dtype}"
    if max(HEADS[_capability(device)]) < H:
        return (
            f"tokamax takes heads of up to {max(HEADS[_capability(device)])} on {device.name}, but "
            f"head_dim={H}"
        )
    if L % 128 or M % 128:
        return f"tokamax takes multiples of 128 positions, but there are {L} queries and {M} keys"
    return None


def configs(device: DeviceSpec, avals: Mapping[str, Any]) -> Sequence[Mapping[str, int]]:
    """Candidate blocks and stages of the forward and backward kernels; the fastest on an H100 first.

    Measured 2026-11-22, JAX 0.11.2: heads of 64 at 8 x 4096 positions, heads of 128 at 2 x 8192. With heads
    of 128 three and four stages of the backward kernels are equally fast, and three leave 64 KiB of shared
    memory to spare. Heads of 256 have tokamax's own heuristic. Of Blackwell's, the first is the heuristic's
    largest whose backward kernel spills no registers (compiled for B200).
    """
    capability = _capability(device)
    H = _padded(capability, largest_head(avals))
    if capability == 100:
        first = dict(capability=100, block_q=128, block_kv=128, stages=256 // H, stages_backward=2)
        first |= dict(block_q_dkv=64, block_kv_dkv=128, block_q_dq=128, block_kv_dq=64)
        return [first, first | dict(stages_backward=4), first | dict(block_q_dkv=128, block_kv_dq=128)]
    wide = H > 128
    # By head size: 64 and 128 as measured on an H100, 256 as in tokamax's heuristic.
    stages_backward = {64: 2, 128: 3, 256: 1}[H]
    first = dict(
        capability=90, block_q=64, block_kv=64 if wide else 128, stages=2, stages_backward=stages_backward
    )
    first |= dict(block_q_dkv=64, block_kv_dkv=64, block_q_dq=64, block_kv_dq=64)
    if wide:
        return [first]
    # Forward blocks of 128 queries spill registers, and were slower on an H100 with heads of 64. With heads
    # of 128 the backward kernels' larger blocks spill too, and forward blocks of 64 keys with four stages
    # took 1.2 times as long; with heads of 64 tokamax's authors found some of the larger backward blocks
    # fastest.
    variations = [dict(stages=3), *(dict(stages_backward=n) for n in (2, 3, 4) if n != stages_backward)]
    if H == 64:
        variations += [dict(block_kv=64, stages=4), dict(block_kv_dq=128)]
        variations += [dict(block_q_dkv=128, block_q_dq=128), dict(block_q_dkv=128, block_kv_dq=128)]
    return [first, *(first | variation for variation in variations)]


def forward(
    q_BLNH: Float[Array, "B L N H"],
    k_BMKH: Float[Array, "B M K H"],
    v_BMKP: Float[Array, "B M K P"],
    segment_BL: Int[Array, "B L"],
    segment_BM: Int[Array, "B M"],
    *,
    mask: Mask,
    chunk: int,
    capability: int,
    block_q: int,
    block_kv: int,
    stages: int,
    **of_backward: int,
) -> tuple[Float[Array, "B L N P"], Float[Array, "B N L"]]:
    """See `Passes`."""
    del chunk, of_backward
    H, P = q_BLNH.shape[-1], v_BMKP.shape[-1]
    kernel = functools.partial(
        _forward_kernel(capability, block_q, block_kv, stages),
        is_causal=mask.causal,
        logits_soft_cap=mask.soft_cap,
        logits_scale=H**-0.5,
        out_dtype=q_BLNH.dtype,
        normalize_output=True,
        return_residuals=True,
        use_stable_softmax=True,
        rescale_threshold=1.0,
    )
    batched_kernel: Any = jax.vmap(lambda q, k, v, first, end: kernel(q, k, v, None, None, first, end))
    arrays = (
        *pad_heads(_padded(capability, H), q_BLNH, k_BMKH),
        *pad_heads(_padded(capability, P), v_BMKP),
    )
    y_BLNP, (top_BNL, total_BNL) = batched_kernel(*arrays, *key_ranges(segment_BL, segment_BM, mask))
    # The kernel returns the largest score and the sum of exponentials; their log-partition is one number.
    return cut_heads(P, y_BLNP)[0], top_BNL + jnp.log(total_BNL)


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
    capability: int,
    block_q_dkv: int,
    block_kv_dkv: int,
    block_q_dq: int,
    block_kv_dq: int,
    stages_backward: int,
    **of_forward: int,
) -> tuple[Float[Array, "B L N H"], Float[Array, "B M K H"], Float[Array, "B M K P"]]:
    """See `Passes`."""
    del chunk, of_forward
    H, P = q_BLNH.shape[-1], v_BMKP.shape[-1]
    blocks = dict(
        block_q_dkv=block_q_dkv, block_kv_dkv=block_kv_dkv, block_q_dq=block_q_dq, block_kv_dq=block_kv_dq
    )
    kernel = functools.partial(
        _backward_kernel(capability, num_stages=stages_backward, **blocks),
        logits_scale=H**-0.5,
        logits_soft_cap=mask.soft_cap,
        is_causal=mask.causal,
        ds_dtype=None,
    )

    def backward_of_row(
        *arrays: Any,  # the last is None without an end of the range
    ) -> tuple[Array, Array, Array]:
        q, k, v, y, dy, lse, first, end = arrays
        # With the log-partition in place of the largest score, the exponentials sum to 1.
        return kernel(q, k, v, (lse, jnp.ones_like(lse)), y, dy, None, None, first, end)[:3]

    arrays = (
        *pad_heads(_padded(capability, H), q_BLNH, k_BMKH),
        *pad_heads(_padded(capability, P), v_BMKP, y_BLNP, dy_BLNP),
    )
    dq, dk, dv = jax.vmap(backward_of_row)(*arrays, lse_BNL, *key_ranges(segment_BL, segment_BM, mask))
    (dq, dk), (dv,) = cut_heads(H, dq, dk), cut_heads(P, dv)
    return dq, dk, dv


PASSES = Passes(forward, backward)


def _forward_kernel(capability: int, block_q: int, block_kv: int, stages: int) -> Any:
    """tokamax's forward kernel with its configuration; a persistent one would query the live device."""
    if capability == 100:
        from tokamax._src.ops.attention import pallas_mosaic_gpu_kernel_sm100 as sm100  # lazy: 2 s

        config: Any = sm100.Config(
            block_q=block_q, block_kv=block_kv, num_stages=stages, collective=False, persistent=False
        )
        return functools.partial(sm100.flash_attention_kernel, config=config)
    from tokamax._src.ops.attention import pallas_mosaic_gpu_kernel_sm90 as sm90  # lazy: 2 s

    config = sm90.Config(block_q=block_q, block_kv=block_kv, num_stages=stages, persistent=False)
    return functools.partial(sm90.flash_attention_kernel, config=config)


def _backward_kernel(capability: int, **blocks_and_stages: int) -> Any:
    """tokamax's backward kernels with their configuration."""
    if capability == 100:
        from tokamax._src.ops.attention import pallas_mosaic_gpu_vjp_kernel_sm100 as sm100  # lazy: 2 s

        config: Any = sm100.Config(**blocks_and_stages)
        return functools.partial(sm100.flash_attention_vjp_kernel, config=config)
    from tokamax._src.ops.attention import pallas_mosaic_gpu_vjp_kernel_sm90 as sm90  # lazy: 2 s

    return functools.partial(sm90.flash_attention_vjp_kernel, config=sm90.Config(**blocks_and_stages))


def key_ranges(
    segment_BL: Array, segment_BM: Array, mask: Mask
) -> tuple[Int[Array, "B 1 L"], Int[Array, "B 1 L"] | None]:
    """First key of each query's segment and window, and the one after the last; equal without a key.

    There is no end if the mask is causal: the query itself ends its range, and a comparison less per score is
    faster.
    """
    L = segment_BL.shape[1]
    # Queries and keys are the same positions, so a segment's keys are the run around its query.
    if mask.causal:
        position_1L = jnp.arange(L, dtype=jnp.int32)[None]
        same_BL = segment_BL[:, 1:] == segment_BL[:, :-1]
        # The first position starts a segment whether or not its id differs from a neighbour's.
        starts_BL = jnp.pad(~same_BL, ((0, 0), (1, 0)), constant_values=True)
        # The running maximum of start positions is the start of the current segment.
        first_BL = jax.lax.cummax(jnp.where(starts_BL, position_1L, 0), axis=1)
        if mask.window is not None:
            first_BL = jnp.maximum(first_BL, position_1L - mask.window + 1)
        return first_BL[:, None], None
    same_BLM = segment_BL[:, :, None] == segment_BM[:, None, :]
    # argmax of booleans is the first True; if there is none, the count below is 0 and the range empty.
    first_BL = jnp.argmax(same_BLM, axis=2).astype(jnp.int32)
    return first_BL[:, None], (first_BL + jnp.sum(same_BLM, axis=2, dtype=jnp.int32))[:, None]
