"""Context parallelism: attention over rows split across devices, as a ring or by exchanging heads
(Ulysses).
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain_kernels.attention.api import attention, passes_for
from jtrain_kernels.attention.ring import RingAttention, ring_attention
from jtrain_kernels.errors import UserError


@dataclasses.dataclass(frozen=True)
class RowSplit:
    """Split of rows over the devices of a mesh axis, and the algorithm of their attention.

    size: number of devices, c.
    by: `ring` sends keys and values around the devices (`ring.py`). `ulysses` (arXiv:2309.14509) exchanges
      them, so that each device has all positions of 1 / c of the heads: fewer bytes if c is small against N /
      K, and the kernel sees whole rows; but c must divide the heads.
    order: with `contiguous`, device i has the i-th of c parts; with `zigzag`, of 2 c parts it has the i-th
      and the i-th from the end. A ring needs `zigzag`, because otherwise the last device has c times the work
      of the first.
    axis: mesh axis.
    """

    size: int
    by: Literal["ring", "ulysses"] = "ring"
    order: Literal["zigzag", "contiguous"] = "zigzag"
    axis: str = "context"

    def __post_init__(self) -> None:
        if self.by == "ring" and self.order != "zigzag" and self.size > 1:
            raise UserError(
                f"layout.context_attention=ring with data.context_order={self.order}: under a causal mask "
                f"the last of {self.size} devices would have {self.size} times the work of the first. Set "
                "data.context_order=zigzag, or layout.context_attention=ulysses."
            )

    def position_L(self, length: int) -> Int[Array, " L"]:
        """Positions of this device's `length` tokens within the whole row."""
        index, position_L = jax.lax.axis_index(self.axis), jnp.arange(length)
        if self.order == "contiguous" or self.size == 1:
            return position_L + index * length
        half = length // 2
        # In the second half `position_L` itself starts at `half`, hence the last subtraction.
        late = (2 * self.size - 1 - index) * half - half
        return position_L + jnp.where(position_L < half, index * half, late)


WHOLE_ROWS = RowSplit(1)
"""Every device has all positions of its rows."""


def context_attention(
    q_BLNH: Float[Array, "B L N H"],
    k_BLKH: Float[Array, "B L K H"],
    v_BLKP: Float[Array, "B L K P"],
    segment_BL: Int[Array, "B L"],
    *,
    split: RowSplit,
    chunk: int,
    window: int | None = None,
    soft_cap: float | None = None,
    sink_N: Float[Array, " N"] | None = None,
) -> Float[Array, "B L N P"]:
    """`attention` of this device's queries to the keys of all devices along `split.axis`; call it under
    shard_map.

    Args:
      sink_N: the same on all devices of the axis; each returns its part of their gradient.

    Raises:
      UserError: positions or heads do not divide over the devices, or a ring is asked for a window.
    """
    settings: Any = dict(chunk=chunk, window=window, soft_cap=soft_cap)
    if split.size == 1:
        return attention(q_BLNH, k_BLKH, v_BLKP, segment_BL, segment_BL, sink_N=sink_N, **settings)
    if split.order == "zigzag" and q_BLNH.shape[1] % 2:
        raise UserError(
            f"attention: a device has L={q_BLNH.shape[1]} positions, which zig-zag cannot halve. Set "
            f"data.seq_len to a multiple of 2 * mesh.context = {2 * split.size}, or "
            "data.context_order=contiguous."
        )
    if split.by == "ring":
        if window is not None:
            raise UserError(
                f"attention: window={window} with layout.context_attention=ring: a ring's blocks have no "
                "distances. Set layout.context_attention=ulysses."
            )
        return _by_ring(q_BLNH, k_BLKH, v_BLKP, segment_BL, sink_N, split, chunk, soft_cap)
    return _by_heads(q_BLNH, k_BLKH, v_BLKP, segment_BL, sink_N, split, settings)


def _by_ring(
    q_BLNH: Array,
    k_BLKH: Array,
    v_BLKP: Array,
    segment_BL: Array,
    sink_N: Array | None,
    split: RowSplit,
    chunk: int,
    soft_cap: float | None,
) -> Float[Array, "B L N P"]:
    settings: Any = dict(chunk=chunk, soft_cap=soft_cap)
    local_passes = passes_for(q_BLNH, k_BLKH, v_BLKP, segment_BL, segment_BL, causal=True, **settings)
    # A hop's two blocks are stacked along B, each over half of a device's positions.
    half = [jax.ShapeDtypeStruct((2 * x.shape[0], x.shape[1] // 2, *x.shape[2:]), x.dtype) for x in
            (q_BLNH, k_BLKH, v_BLKP, segment_BL, segment_BL)]  # fmt: skip
    # Chosen anew: another implementation may be the fastest for these shapes without a mask.
    hop_passes = passes_for(*half, causal=False, **settings)
    ring = RingAttention(split.axis, split.size, chunk, soft_cap, local_passes, hop_passes)
    return ring_attention(q_BLNH, k_BLKH, v_BLKP, segment_BL, sink_N, ring)


def _by_heads(
    q_BLNH: Array,
    k_BLKH: Array,
    v_BLKP: Array,
    segment_BL: Array,
    sink_N: Array | None,
    split: RowSplit,
    settings: dict[str, Any],
) -> Float[Array, "B L N P"]:
    N, K, c = q_BLNH.shape[2], k_BLKH.shape[2], split.size
    # Key heads are repeated just often enough that every device gets one.
    repeats = 1 if K % c == 0 else c // K
    if N % c or K * repeats % c:
        raise UserError(
            f"layout.context_attention=ulysses: a device has {N} query heads and {K} key heads (all of them "
            f"over mesh.tensor), which do not divide over mesh.context={c}. Set "
            "layout.context_attention=ring, or another mesh.context or mesh.tensor."
        )

    def all_positions(x_BLNH: Array) -> Array:
        return _in_order(
            jax.lax.all_to_all(x_BLNH, split.axis, split_axis=2, concat_axis=1, tiled=True), split
        )

    # With fewer key heads than devices, several devices share a key head.
    k_BLKH, v_BLKP = (jnp.repeat(x, repeats, axis=2) if repeats > 1 else x for x in (k_BLKH, v_BLKP))
    segment_BM = _in_order(jax.lax.all_gather(segment_BL, split.axis, axis=1, tiled=True), split)
    q, k, v = map(all_positions, (q_BLNH, k_BLKH, v_BLKP))
    if sink_N is not None:
        # The sinks of the heads that the exchange gives this device.
        sink_N = jax.lax.dynamic_slice_in_dim(sink_N, jax.lax.axis_index(split.axis) * (N // c), N // c)
    # Results in the split's order of positions before heads are exchanged back.
    y = _as_split(attention(q, k, v, segment_BM, segment_BM, sink_N=sink_N, **settings), split)
    return jax.lax.all_to_all(y, split.axis, split_axis=1, concat_axis=2, tiled=True)


def _in_order(x_BM: Array, split: RowSplit) -> Array:
    """Sorts positions from the devices' order into the order of the row."""
    if split.order == "contiguous":
        return x_BM
    # Each device has two parts; early parts ascend over devices, late parts descend.
    part_BZL = x_BM.reshape(x_BM.shape[0], split.size, 2, -1, *x_BM.shape[2:])
    return jnp.concatenate([part_BZL[:, :, 0], part_BZL[:, ::-1, 1]], axis=1).reshape(x_BM.shape)


def _as_split(x_BM: Array, split: RowSplit) -> Array:
    """Inverse of `_in_order`."""
    if split.order == "contiguous":
        return x_BM
    part_BZL = x_BM.reshape(x_BM.shape[0], 2, split.size, -1, *x_BM.shape[2:])
    return jnp.stack([part_BZL[:, 0], part_BZL[:, 1, ::-1]], axis=2).reshape(x_BM.shape)
