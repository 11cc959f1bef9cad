"""Frozen matrices in blocks of 64 numbers: NF4 (arXiv:2305.14314, section 3), or int8.

A block is 64 neighbours along a matrix's inputs and has one float32 scale, its largest absolute value. The
weight of a torch Linear is [outputs, inputs], so its blocks are those of bitsandbytes: `quantize` and
`dequantize` have the bits of `quantize_4bit(weight, blocksize=64, quant_type="nf4")` of bitsandbytes 0.50.2
on a CPU, two codes a byte, the first in the upper half. Numbers below 1.2e-38 count as zero.

| format | code of x, scale s | its value | bytes a number |
|---|---|---|---|
| nf4 | number of midpoints of `NF4` below x (1 / s) | NF4[code] s | 1/2 + 4/64 |
| int8 | x (127 / s), rounded to nearest, half to even | code (s / 127) | 1 + 4/64 |

Example: of a block with scale 2.0 the number 0.5 is 0.25 of it, between the midpoints 0.2035 and 0.2920, so
it has code 10 and comes back as 0.2461 * 2.0 = 0.4922.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from jtrain.layout.dims import ParamInfo
from jtrain.layout.precision import BLOCK, CODES_PER_BYTE

NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
"""Values of the 16 codes, as bitsandbytes has them."""

_MIDPOINTS = (NF4[:-1] + NF4[1:]) / np.float32(2)
_LARGEST = 127.0
"""Largest code of int8."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockQuantized:
    """Matrix in blocks: what a parameter tree has in place of the array.

    Both arrays have the matrix's dimensions and its partition. Its leaves may also be shapes.

    codes: uint8 with half as many of the last input (nf4), or int8.
    scale: float32, one for 64 inputs; where several dimensions are inputs the first has their blocks, and the
      others are 1: a matrix NHD = 4 x 32 x 256 has scales of 2 x 1 x 256.
    num_inputs, num_outputs: dimensions of the matrix, behind those of layers and experts.
    """

    codes: Any
    scale: Any
    dtype: str = dataclasses.field(metadata=dict(static=True))
    num_inputs: int = dataclasses.field(metadata=dict(static=True))
    num_outputs: int = dataclasses.field(metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return _scaled(self.codes.shape, -1 - self.num_outputs, CODES_PER_BYTE[self.dtype])


def is_quantized(leaf: Any) -> bool:
    """True for a matrix in blocks, also as a leaf of `jax.tree.map(..., is_leaf=is_quantized)`."""
    return isinstance(leaf, BlockQuantized)


def stored_arrays(info: ParamInfo, dtype: str) -> Any:
    """Shapes of a parameter as a state holds it: an array, or a `BlockQuantized`."""
    if dtype not in CODES_PER_BYTE:
        return jax.ShapeDtypeStruct(info.shape, jnp.dtype(dtype))
    return jax.eval_shape(lambda x: quantize(info, x, dtype), jax.ShapeDtypeStruct(info.shape, jnp.float32))


def store(info: ParamInfo, value: Array, dtype: str) -> Any:
    """A parameter's value as a state holds it: in a number format, or in blocks."""
    return quantize(info, value, dtype) if dtype in CODES_PER_BYTE else value.astype(dtype)


def quantize(info: ParamInfo, value: Float[Array, "..."], dtype: str) -> BlockQuantized:
    """A matrix, or the shard of one that has whole blocks, in blocks."""
    num_outputs = len(info.dims.removeprefix("Y").removeprefix("X")) - info.num_inputs
    first = value.ndim - num_outputs - info.num_inputs
    lead, ins, outs = (
        value.shape[:first],
        value.shape[first : value.ndim - num_outputs],
        value.shape[-num_outputs:],
    )
    # [layers and experts, blocks, numbers of a block, outputs]
    x = value.astype(jnp.float32).reshape(*lead, -1, BLOCK, math.prod(outs))
    scale = jnp.max(jnp.abs(x), axis=-2, keepdims=True)
    positive = jnp.where(scale > 0.0, scale, 1.0)
    if dtype == "nf4":
        # By the reciprocal, as bitsandbytes: a quotient may round to the other side of a midpoint.
        relative = x * (1.0 / positive)
        codes = jnp.zeros(x.shape, jnp.uint8)
        for midpoint in _MIDPOINTS:
            codes += (relative > float(midpoint)).astype(jnp.uint8)
        codes = _packed(codes.reshape(*lead, -1, 2, math.prod(outs)))
        codes = codes.reshape(*lead, *ins[:-1], ins[-1] // 2, *outs)
    else:
        codes = jnp.clip(jnp.round(x * (_LARGEST / positive)), -_LARGEST, _LARGEST)
        codes = codes.astype(jnp.int8).reshape(value.shape)
    scale = scale.reshape(*lead, math.prod(ins) // BLOCK, *(1,) * (len(ins) - 1), *outs)
    return BlockQuantized(codes, scale, dtype, info.num_inputs, num_outputs)


def dequantize(matrix: BlockQuantized, dtype: str) -> Float[Array, "..."]:
    """The numbers of the blocks, products in float32 that are rounded to `dtype` once."""
    shape = matrix.shape
    first = len(shape) - matrix.num_inputs - matrix.num_outputs
    lead, outs = shape[:first], math.prod(shape[len(shape) - matrix.num_outputs :])
    scale = matrix.scale.reshape(*lead, -1, 1, outs)
    if matrix.dtype == "nf4":
        relative = _nf4_values(_unpacked(matrix.codes.reshape(*lead, -1, 1, outs)))
    else:
        relative, scale = matrix.codes.astype(jnp.float32), scale * (1.0 / _LARGEST)
    return (relative.reshape(*lead, -1, BLOCK, outs) * scale).astype(dtype).reshape(shape)


def without_blocks(params: Any) -> Any:
    """Parameters with the numbers of blocks, in float32, in place of the blocks."""

    def numbers(leaf: Any) -> Any:
        return dequantize(jax.tree.map(jnp.asarray, leaf), "float32") if is_quantized(leaf) else leaf

    return jax.tree.map(numbers, params, is_leaf=is_quantized)


def _packed(codes: UInt8[Array, "*lead pairs 2 outs"]) -> UInt8[Array, "*lead pairs outs"]:
    """Two codes a byte, the first in the upper half."""
    return codes[..., 0, :] << 4 | codes[..., 1, :]


def _unpacked(codes: UInt8[Array, "*lead pairs 1 outs"]) -> UInt8[Array, "*lead pairs 2 outs"]:
    # By shifts of one broadcast array, which a compiler fuses into the product that follows; a stack of two
    # would be written first.
    shape = (*codes.shape[:-2], 2, codes.shape[-1])
    shift = np.uint8(4) - np.uint8(4) * jax.lax.broadcasted_iota(jnp.uint8, shape, len(shape) - 2)
    return jnp.broadcast_to(codes, shape) >> shift & np.uint8(15)


def _nf4_values(codes: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """`NF4[codes]` by choices between pairs, bit for bit of the code: accelerators gather slowly."""
    values: list[Any] = [jnp.full(codes.shape, value) for value in NF4]
    for bit in (1, 2, 4, 8):
        is_set = codes & np.uint8(bit) > 0
        values = [
            jnp.where(is_set, upper, lower) for lower, upper in zip(values[::2], values[1::2], strict=True)
        ]
    return values[0]


def _scaled(shape: tuple[int, ...], dim: int, factor: int) -> tuple[int, ...]:
    lengths = list(shape)
    lengths[dim] *= factor
    return tuple(lengths)
