"""Quantized moments (`moment_dtype="int8"`): eight bits per element and one f32 scale per block.

A block is up to 128 neighbours along one dimension of one layer, so that shards and layers hold whole blocks
and the scales are split like the parameter. Values are relative to the largest of their block, in the dynamic
map of arXiv:2110.02861 section 2.1: seven decades, each with half as many values as the next larger one. For
e = 2^k + j, 0 <= j < 2^k, code e stands for

    10^(k - K) (0.1 + 0.9 (j + 0.5) / 2^k) / top

with K = 6 for first moments (127 magnitudes, a sign, and 0) and K = 7 for second moments (254 and 0; code e -
1). `top` is the largest value of the map, 1 - 0.45 / 2^K, so that the block's largest is exact with either
sign.

Example, signed: a block whose largest magnitude is 2.0 has scale 2.0 / 0.99297 = 2.01416. The value 0.5 is
0.24824 of it, between 0.24766 (code 74, which decodes to 0.4988) and 0.26172 (code 75, to 0.5271): 96 % of
the roundings give 74 and 4 % give 75, so the mean is 0.5.

Differences from the paper: blocks lie along one dimension and are smaller than 2048, to fit shards; the
second moment is stored as its root, which spans half as many decades; rounding is stochastic, so that a
moment also moves where its steps are smaller than the map's; a positive second moment is never stored as 0,
which would divide by eps alone (arXiv:2309.01507 section 4.1). The embedding stays float32 as in the paper
(section 2.3). The unembedding and norm scales stay float32 too: no loop over layers updates the unembedding
in parts, and three float32 copies of it take 6 GiB at 4096 x 128256 on an H200.
"""

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array

from jtrain.layout.dims import ParamInfo
from jtrain.optim.rounding import round_alone, uniform

LETTERS = ("H", "F")
"""Candidate dimensions for blocks; a matrix uses the first that it has. ZeRO splits neither, `tensor` only
F."""

LONGEST = 128
"""Longest block: 4 bytes of scale for 128 elements, 0.03 bytes each."""

SHORTEST = 8
"""Shorter blocks would spend more on scales than eight bits save."""

_DECADES = 7


@dataclasses.dataclass(frozen=True)
class MomentBlocks:
    """Division of one parameter's moments into blocks.

    letter: the dimension along which blocks lie.
    dim: index of the dimension, counted from the end (-1), so that it is valid with and without the layer
      dimension.
    length: elements per block; divides the dimension.
    """

    letter: str
    dim: int
    length: int

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scales of an array; the number of dimensions stays the same."""
        lengths = list(shape)
        lengths[self.dim] //= self.length
        return tuple(lengths)

    def split(self, x: Array) -> Array:
        """`x` with its blocked dimension reshaped to (blocks, elements per block)."""
        dim = x.ndim + self.dim
        return x.reshape(*x.shape[:dim], -1, self.length, *x.shape[dim + 1 :])

    def joined(self, blocks: Array) -> Array:
        """The inverse of `split`."""
        dim = blocks.ndim + self.dim - 1
        return blocks.reshape(*blocks.shape[:dim], -1, *blocks.shape[dim + 2 :])


def blocks_of(info: ParamInfo) -> MomentBlocks | None:
    """Blocks of a parameter's moments; None if they stay float32.

    Moments of norm scales, embedding and unembedding stay float32, and moments whose blocks would be shorter
    than `SHORTEST`.
    """
    letter = next((letter for letter in LETTERS if letter in info.dims), None)
    if letter is None or not info.dims.startswith("Y"):
        return None
    dim = info.dims.index(letter)
    # The greatest power of two up to 128 that divides the dimension: 128 has no other divisors.
    length = math.gcd(info.shape[dim], LONGEST)
    return MomentBlocks(letter, dim - len(info.dims), length) if length >= SHORTEST else None


def top(signed: bool) -> float:
    """The largest value of the map, before normalisation to 1."""
    return 1 - 0.45 / 2 ** _largest_k(signed)


def encode(x: Array, blocks: MomentBlocks, *, signed: bool, bits: Array | None) -> tuple[Array, Array]:
    """Quantizes f32 `x` to codes and scales: a first moment to int8, the root of a second one to uint8.

    bits: random uint32s of the shape of `x` for stochastic rounding, so that `decode` returns `x` on average
      (the second moment itself, not its root). None rounds to the value of the cell that holds `x`.
    """
    blocked = blocks.split(x)
    magnitude = jnp.abs(blocked) if signed else jnp.sqrt(blocked)
    # The largest value of a block gets the largest code exactly: it is divided by the map's own maximum.
    scale = jnp.max(magnitude, axis=blocks.dim, keepdims=True) * jnp.float32(1 / top(signed))
    # A block of zeros has scale 0, and must not divide by it.
    relative = magnitude / jnp.where(scale > 0, scale, 1.0)
    code = _cell(relative, signed)
    if bits is not None:
        # The cell's value may lie above or below the number: take the map's values on both sides of it.
        lower_code = jnp.maximum(code - (relative < _value(code, signed)), 0)
        lower_value, upper_value = _value(lower_code, signed), _value(lower_code + 1, signed)
        if not signed:
            # In squares, so that the second moment itself is right on average and not its root.
            relative, lower_value, upper_value = (
                round_alone(relative**2),
                round_alone(lower_value**2),
                round_alone(upper_value**2),
            )
        code = lower_code + (
            relative - lower_value > uniform(blocks.split(bits)) * (upper_value - lower_value)
        )
    # At least code 1 for a positive second moment: 0 would divide by eps alone.
    code = jnp.clip(code, 0 if signed else (magnitude > 0).astype(jnp.int32), _codes(signed))
    if signed:
        code = jnp.where(blocked < 0, -code, code)
    codes = blocks.joined(code).astype(jnp.int8 if signed else jnp.uint8)
    return codes, jnp.squeeze(scale, blocks.dim)


def decode(codes: Array, scale: Array, blocks: MomentBlocks) -> Array:
    """Dequantizes a moment to f32."""
    signed = codes.dtype == jnp.int8
    blocked = blocks.split(codes.astype(jnp.int32))
    magnitude = _value(jnp.abs(blocked), signed) * jnp.expand_dims(scale, blocks.dim)
    if signed:
        return blocks.joined(jnp.where(blocked < 0, -magnitude, magnitude))
    return blocks.joined(magnitude**2)


def _largest_k(signed: bool) -> int:
    """K of the formula above: 6 with a sign, which takes one bit of the eight, and 7 without."""
    return _DECADES - signed


def _codes(signed: bool) -> int:
    """The largest code."""
    return 2**_DECADES - 1 if signed else 2 ** (_DECADES + 1) - 2


def _value(code: Array, signed: bool) -> Array:
    """Value of a code from 0 to `_codes`, relative to the block's largest value times `top`."""
    # Unsigned codes are e - 1: their lowest decade, k = 1, starts at e = 2.
    map_code = code if signed else code + 1
    first_decade = 0 if signed else 1
    value = jnp.zeros(code.shape, jnp.float32)
    for k in range(first_decade, first_decade + _DECADES):
        decade = 10.0 ** (k - _largest_k(signed))
        slope = decade * 0.9 / 2**k
        # Within a decade the map is linear in the code: value = slope * e + offset.
        line = round_alone(slope * map_code.astype(jnp.float32)) + (
            decade * (0.1 + 0.45 / 2**k) - slope * 2**k
        )
        value = jnp.where(map_code >= 2**k, line, value)
    return jnp.where(code > 0, value, 0.0)


def _cell(relative: Array, signed: bool) -> Array:
    """Code of the cell (an equal part of a decade) that holds `relative`; 0 below the lowest decade.

    Example, signed: 0.24824 lies in the decade from 0.1 to 1, k = 6, which has 64 cells of 0.9 / 64 = 0.01406;
    (0.24824 - 0.1) / 0.01406 = 10.54 is cell 10, code 64 + 10 = 74.
    """
    first_decade = 0 if signed else 1
    code = jnp.zeros(relative.shape, jnp.int32)
    for k in range(first_decade, first_decade + _DECADES):
        decade_start = 10.0 ** (k - _largest_k(signed) - 1)
        # A decade ends at 10 times its start: 2^k equal cells, each 9 decade_start / 2^k wide.
        cell = jnp.floor((relative - decade_start) * (2**k / (9 * decade_start))).astype(jnp.int32)
        code = jnp.where(relative >= decade_start, 2**k + jnp.clip(cell, 0, 2**k - 1) - first_decade, code)
    return code
