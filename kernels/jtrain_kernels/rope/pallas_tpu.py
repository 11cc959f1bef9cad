"""Rotary embedding on TPUs in one pass over memory.

XLA:TPU first widens x to float32 in memory, because it cannot otherwise split a head's 128 lanes in two and
join them again. Compiled for a v5p at 8192 tokens of 32 heads, it moves 528 MiB where 132 are enough. In a
register, swapping the halves of a head is one rotation of the lanes.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain_kernels.device import DeviceSpec
from jtrain_kernels.registry import Avals

VMEM_BYTES = 8 * 2**20
"""VMEM for the arrays of a block: half of the default limit of a kernel, which is the same on every TPU."""

_LANES = 128


def block_tokens(tokens: int, heads: int, width: int, itemsize: int) -> int | None:
    """Tokens of a block: the largest power of two that fits; None if no block size divides the tokens."""
    # The second-minor dimension is padded to tiles of 16 rows in bfloat16.
    padded = -(-heads // 16) * 16
    # x and y twice each (two buffers), three float32 intermediates; cos and sin, two buffers each in float32.
    token_bytes = width * (padded * (4 * itemsize + 3 * 4) + 4 * 4)
    fitting_tokens, size = None, 8
    while size * token_bytes <= VMEM_BYTES and tokens % size == 0:
        fitting_tokens, size = size, 2 * size
    return fitting_tokens


def refusal(device: DeviceSpec, avals: Avals) -> str | None:
    """Reason why the kernel cannot run; None if it can."""
    x = avals["x_BLNH"]
    assert isinstance(x, jax.ShapeDtypeStruct)
    B, L, N, H = x.shape
    if device.platform != "tpu":
        return f"it is for TPUs, not for a {device.name}"
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"x is {x.dtype}, not bfloat16 or float32"
    if H != _LANES:
        return f"heads of {H} do not fill {_LANES} lanes once"
    if block_tokens(B * L, N, H, x.dtype.itemsize) is None:
        return f"{B * L} tokens of {N} heads do not divide into blocks that fit into VMEM"
    return None


def rotated(
    x_BLNH: Float[Array, "B L N H"],
    cos_BLR: Float[Array, "B L R"],
    sin_BLR: Float[Array, "B L R"],
    *,
    interpret: Any = False,
) -> Float[Array, "B L N H"]:
    """Rotates pair (i, i + H/2) of every head by its angle.

    Args:
      interpret: passed to `pallas_call`, for emulation.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    B, L, N, H = x_BLNH.shape
    block = block_tokens(B * L, N, H, x_BLNH.dtype.itemsize)
    assert block is not None, "`refusal` checks this first"
    # Over the whole width of a head: x * cos + (x rotated by half a head) * (-sin, sin).
    cos_TH = jnp.concatenate([cos_BLR, cos_BLR], axis=-1).reshape(B * L, H)
    sin_TH = jnp.concatenate([-sin_BLR, sin_BLR], axis=-1).reshape(B * L, H)
    heads = pl.BlockSpec((block, N, H), lambda step: (step, 0, 0))
    table = pl.BlockSpec((block, H), lambda step: (step, 0))
    return pl.pallas_call(
        functools.partial(_kernel, turn=functools.partial(pltpu.roll, shift=H // 2, axis=2)),
        grid=(B * L // block,),
        in_specs=[heads, table, table],
        out_specs=heads,
        out_shape=jax.ShapeDtypeStruct((B * L, N, H), x_BLNH.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="rope",
    )(x_BLNH.reshape(B * L, N, H), cos_TH, sin_TH).reshape(B, L, N, H)


def _kernel(x_ref: Any, cos_ref: Any, sin_ref: Any, y_ref: Any, *, turn: Any) -> None:
    x = x_ref[...].astype(jnp.float32)
    # One angle for all heads of a token.
    cos, sin = cos_ref[...][:, None, :], sin_ref[...][:, None, :]
    y_ref[...] = (x * cos + turn(x) * sin).astype(y_ref.dtype)
