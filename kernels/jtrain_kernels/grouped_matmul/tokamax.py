"""tokamax's grouped matmul for Hopper GPUs, Pallas kernels (Mosaic GPU), forward and backward.

tokamax's inner functions are called, because its public one queries the live device even when compiling for
another.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain_kernels.device import DeviceSpec
from jtrain_kernels.registry import Avals

_TILE = 64
"""Size of the smallest blocks."""

_OF_KERNEL = dict(block_m=64, block_n=64, block_k=128, stages=4)
"""Blocks of the kernel's gradient, which are right on an H100 and an H200. With 128 x 64 x 128 tokamax's
kernel was wrong by 19 to 29 % of the largest element, probably because masked rows are in registers that the
next step writes."""


def supports(device: DeviceSpec, avals: Avals) -> str | None:
    """Reason why the implementation cannot run; None if it can."""
    x, kernel = avals["x"], avals["kernel"]
    assert isinstance(x, jax.ShapeDtypeStruct)
    assert isinstance(kernel, jax.ShapeDtypeStruct)
    if device.compute_capability is None or device.compute_capability[0] != 9:
        return "tokamax's kernels, as they are called here, are for Hopper GPUs"
    if x.dtype != jnp.bfloat16 or kernel.dtype not in (jnp.bfloat16, jnp.float32):
        return f"tokamax multiplies bfloat16 with bfloat16, not {x.dtype} with {kernel.dtype}"
    if kernel.shape[1] % 128 or kernel.shape[2] % 128 or x.shape[0] % _TILE:
        return (
            f"tokamax takes multiples of 128 columns and {_TILE} rows, not x {x.shape} and kernel "
            f"{kernel.shape}"
        )
    return None


def configs(device: DeviceSpec, avals: Avals) -> Sequence[dict[str, int]]:
    """Candidate blocks and stages of both products; the one measured as a whole on an H200 first."""
    del device, avals
    first = dict(block_m=128, block_n=64, block_k=64, stages=4)
    return [
        first,
        *(first | variation for variation in (dict(block_n=128), dict(block_m=64), dict(block_k=128))),
    ]


def matmul(
    x: Float[Array, "T I"],
    kernel: Float[Array, "X I O"],
    group_size: Int[Array, " X"],
    *,
    block_m: int,
    block_n: int,
    block_k: int,
    stages: int,
) -> Float[Array, "T O"]:
    """See `api.grouped_matmul`."""
    from tokamax._src.ops.ragged_dot import pallas_mosaic_gpu_common as common  # lazy: 2 s
    from tokamax._src.ops.ragged_dot import pallas_mosaic_gpu_kernel_sm90 as sm90

    def blocks(block_m: int, block_n: int, block_k: int, stages: int) -> common.Config:
        return common.Config(
            block_m=block_m,
            block_n=block_n,
            block_k=block_k,
            num_stages=stages,
            split_k=1,
            persistent=False,  # a persistent kernel would query the live device for its cores
            grid_minor_dim=common.MatmulDimension.M,
        )

    config = blocks(block_m, block_n, block_k, stages)

    def used(rows: Array, group_size: Array) -> Array:
        """Zeroes rows without a group; the gradient's kernel multiplies them by zero, which leaves nan."""
        return jnp.where((jnp.arange(rows.shape[0]) < jnp.sum(group_size))[:, None], rows, 0)

    def last_block_used(rows: Array, group_size: Array) -> Array:
        """`used`, in place, of the only block in which that kernel reads rows of no group."""
        # Blocks of rows start at multiples of the size, so only the one that contains `end` mixes both kinds.
        end, size = jnp.sum(group_size), min(_OF_KERNEL["block_k"], rows.shape[0])
        # The last block is moved back if the buffer ends within it.
        start = jnp.minimum(end // size * size, rows.shape[0] - size)
        block = jax.lax.dynamic_slice_in_dim(rows, start, size)
        block = jnp.where((start + jnp.arange(size) < end)[:, None], block, 0)
        return jax.lax.dynamic_update_slice_in_dim(rows, block, start, axis=0)

    @jax.custom_vjp
    def product(x: Array, kernel: Array, group_size: Array) -> Array:
        # Parameters may be float32: the kernel is cast here, and its gradient below has its dtype again.
        return sm90.ragged_dot_kernel(x, kernel.astype(x.dtype), group_size, x.dtype, config)

    def forward(x: Array, kernel: Array, group_size: Array) -> tuple[Array, Any]:
        return product(x, kernel, group_size), (x, kernel, group_size)

    def backward(saved: Any, dy: Array) -> tuple[Array, Array, None]:
        x, kernel, group_size = saved
        # dx = dy kernel^T: the same kernel with depth and columns swapped.
        matrix = kernel.astype(x.dtype).swapaxes(1, 2)
        dy = last_block_used(dy, group_size)
        dx = sm90.ragged_dot_kernel(dy, matrix, group_size, x.dtype, config)
        # The kernel transposes x in a pass over memory, and XLA fuses the mask of all rows into it.
        x = used(x, group_size)
        dkernel = sm90.ragged_contracting_dim_dot_kernel(
            x, dy, group_size, kernel.dtype, blocks(**_OF_KERNEL)
        )
        return dx, dkernel, None

    product.defvjp(forward, backward)
    return product(x, kernel, group_size)
