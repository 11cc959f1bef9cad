"""Stochastic rounding: up or down at random, so that the mean of many roundings is the value itself.

The random bits are a hash of (path, purpose, step, layer, index within the layer). They are the same whether
an array is whole, split over devices or updated layer by layer, and after a restore. There is no generator
state.
"""

import dataclasses
import math
import zlib

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jtrain.layout.dims import ParamInfo
from jtrain.layout.random_bits import mix_bits


@dataclasses.dataclass(frozen=True)
class Noise:
    """Source of random bits for an array, determined by the array's place in its parameter and the step.

    layer: place of the one layer that the array holds, without the leading Y; None if it has all dimensions.
    start: global index of the array's first element, per dimension; None means zeros.
    """

    info: ParamInfo
    step: Array
    layer: int | Array | None = None
    start: tuple[int | Array, ...] | None = None

    def bits(self, purpose: str, shape: tuple[int, ...]) -> Array:
        """Random uint32s of `shape`; each `purpose` gives independent bits."""
        info = self.info
        stacked = info.dims.startswith("Y")
        lengths = info.shape[stacked:]  # of one layer
        start = self.start or (0,) * len(shape)
        layer = self.layer
        order = info.layer_order
        inner_dims = list(range(len(shape)))  # dimensions of the array that lie within a layer
        if stacked and layer is None:
            layer = _iota(shape, 0) + _uint32(start[0]) if order is None else _layers(order, start[0], shape)
            inner_dims = inner_dims[1:]
        elif layer is not None and order is not None:
            # Bits belong to the logical layer, so a pipeline's order does not change them.
            layer = jnp.asarray(order)[layer]
        assert len(inner_dims) == len(lengths), (info.path, shape, "is neither all layers nor one")
        index = jnp.zeros(shape, jnp.uint32)
        for position, dim in enumerate(inner_dims):
            # Row-major index within one whole layer, modulo 2^32, however the array is cut.
            stride = math.prod(lengths[position + 1 :]) % 2**32
            index += (_iota(shape, dim) + _uint32(start[dim])) * jnp.uint32(stride)
        # Path and purpose make the noise of two arrays independent in the same step.
        key = mix_bits(_uint32(self.step) ^ jnp.uint32(zlib.crc32(f"{info.path}:{purpose}".encode())))
        key = mix_bits(
            key + jnp.uint32(0x9E3779B9) * (_uint32(layer) if layer is not None else jnp.uint32(0))
        )
        return mix_bits(index ^ key)


def to_bfloat16(x: Array, bits: Array) -> Array:
    """Rounds f32 `x` to one of its two bfloat16 neighbours at random.

    The probability of a neighbour grows linearly from 0 to 1 as `x` approaches it, so the mean is `x`.

    Values that bfloat16 represents exactly and non-finite values stay unchanged.
    """
    word = jax.lax.bitcast_convert_type(x, jnp.uint32)
    # A carry out of the lower 16 bits rounds up; its probability is what they hold, divided by 2^16.
    word = (word + (bits >> 16)) & jnp.uint32(0xFFFF0000)
    return jnp.where(jnp.isfinite(x), jax.lax.bitcast_convert_type(word, jnp.float32), x).astype(jnp.bfloat16)


def round_alone(product: Array) -> Array:
    """`product`, f32, protected from contraction into a fused multiply-add.

    Compilers round one, none or both products of `a x + b y`, depending on the rest of the loop and on where
    vectors end, so the last bit would depend on the layout (seen on the CPU: 3 % of elements). The minimum
    below is an operation that no compiler may drop, so every operation is rounded by itself, as in numpy.
    """
    return jnp.minimum(product, jnp.finfo(jnp.float32).max)


def moving_mean(new: Array, old: Array, rate: float) -> Array:
    """Exponential moving average: (1 - rate) new + rate old, each product rounded by itself."""
    return round_alone((1.0 - rate) * new) + round_alone(rate * old)


def uniform(bits: Array) -> Array:
    """Uniform f32 in [0, 1), from the upper 24 bits."""
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


def _layers(order: tuple[int, ...], first: int | Array, shape: tuple[int, ...]) -> Array:
    """Logical layers of the places from `first` on, broadcast to `shape`."""
    layer_Y = jax.lax.dynamic_slice_in_dim(jnp.asarray(order), first, shape[0])
    return jnp.broadcast_to(_uint32(layer_Y).reshape(-1, *[1] * (len(shape) - 1)), shape)


def _iota(shape: tuple[int, ...], dim: int) -> Array:
    return jax.lax.broadcasted_iota(jnp.uint32, shape, dim)


def _uint32(x: int | Array) -> Array:
    return jnp.asarray(x).astype(jnp.uint32)
