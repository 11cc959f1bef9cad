"""Stochastic rounding: up or down by chance, so that the mean of many roundings is the value itself.

The chance is a hash of (path, purpose, step, layer, index within the layer): the same bits come out whether an array is
whole, split over devices or handled layer by layer, and after a restore. No generator's state is kept.
"""

import dataclasses
import math
import zlib

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jtrain.dims import ParamInfo


@dataclasses.dataclass(frozen=True)
class Noise:
    """Where in its parameter an array lies, and at which step: all that its random bits depend on.

    layer: the array is that one layer of a stacked parameter, without the leading Y; None: it has all dimensions.
    start: global index, per dimension of the array, of its first element; None: zeros.
    """

    info: ParamInfo
    step: Array
    layer: int | Array | None = None
    start: tuple[int | Array, ...] | None = None

    def bits(self, purpose: str, shape: tuple[int, ...]) -> Array:
        """Random uint32s of `shape`; another `purpose` gives others."""
        info = self.info
        stacked = info.dims.startswith("Y")
        lengths = info.shape[stacked:]  # of one layer
        start = self.start or (0,) * len(shape)
        layer = self.layer
        within = list(range(len(shape)))  # dimensions of the array that lie within a layer
        if stacked and layer is None:
            layer = _iota(shape, 0) + _uint32(start[0])
            within = within[1:]
        assert len(within) == len(lengths), (info.path, shape, "is neither all layers nor one")
        index = jnp.zeros(shape, jnp.uint32)
        for place, dim in enumerate(within):
            stride = math.prod(lengths[place + 1 :]) % 2**32
            index += (_iota(shape, dim) + _uint32(start[dim])) * jnp.uint32(stride)
        key = _mix(_uint32(self.step) ^ jnp.uint32(zlib.crc32(f"{info.path}:{purpose}".encode())))
        key = _mix(key + jnp.uint32(0x9E3779B9) * (_uint32(layer) if layer is not None else jnp.uint32(0)))
        return _mix(index ^ key)


def to_bfloat16(x: Array, bits: Array) -> Array:
    """f32 `x` as bfloat16: of the two neighbours the upper (in size) with the chance of how far `x` is towards it.

    What bfloat16 holds exactly stays, and so does what is not finite.
    """
    word = jax.lax.bitcast_convert_type(x, jnp.uint32)
    word = (word + (bits >> 16)) & jnp.uint32(0xFFFF0000)
    return jnp.where(jnp.isfinite(x), jax.lax.bitcast_convert_type(word, jnp.float32), x).astype(jnp.bfloat16)


def apart(product: Array) -> Array:
    """`product` itself, f32, kept from being contracted with the sum that it goes into.

    Of `a x + b y` compilers round one product, or none, or both, by what else the loop computes and where its vectors
    end, so the last bit would depend on the layout (seen on the CPU: 3 % of elements). No compiler may drop this bound;
    with it every operation is rounded for itself, as numpy does.
    """
    return jnp.minimum(product, jnp.finfo(jnp.float32).max)


def uniform(bits: Array) -> Array:
    """f32 in [0, 1), from the upper 24 bits."""
    return (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


def _iota(shape: tuple[int, ...], dim: int) -> Array:
    return jax.lax.broadcasted_iota(jnp.uint32, shape, dim)


def _uint32(x: int | Array) -> Array:
    return jnp.asarray(x).astype(jnp.uint32)


def _mix(h: Array) -> Array:
    """Murmur3's 32-bit finaliser: every input bit changes half of the output bits."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
