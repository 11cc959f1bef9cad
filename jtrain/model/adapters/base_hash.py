"""Hash of the frozen parameters of an adapter: the same on every layout, and for layers in any order."""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, UInt32

from jtrain.layout.dims import ParamInfo
from jtrain.layout.random_bits import mix_bits
from jtrain.model.param import Params, map_params

WORDS = 8
"""32-bit words of a hash."""

# Sums with a salt each, so that 128 bits stand for a parameter.
_SUMS = 4
_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def hash_base(infos: Sequence[ParamInfo], params: Params) -> UInt32[np.ndarray, "8"]:
    """SHA-256 of path, shape, dtype and values of every frozen parameter.

    Values count by wrap-around sums of a mix of each number's bits and its place, which no sharding changes.

    Args:
      params: arrays on any devices, or in host memory, nested like the parameters.
    """
    frozen = tuple(info for info in infos if info.frozen)
    values = map_params(lambda _, value: value, frozen, params)
    # On several hosts every process reads the sums of all: they are replicated.
    sharding = jax.tree.leaves(values)[0].sharding if frozen else None
    replicated = NamedSharding(sharding.mesh, P()) if isinstance(sharding, NamedSharding) else None
    sums = _sums(frozen, replicated)(values)
    lines: list[str] = []

    def add_lines(info: ParamInfo, value: Any, words: Any) -> None:
        # A matrix in blocks has two arrays, codes and scales.
        for array, array_words in zip(jax.tree.leaves(value), jax.tree.leaves(words), strict=True):
            numbers = np.asarray(array_words).tolist()
            lines.append(f"{info.path} {info.logical.shape} {array.dtype.name} {numbers}")

    map_params(add_lines, frozen, values, sums)
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    return np.frombuffer(digest, ">u4").astype(np.uint32)


def hex_of(words: UInt32[np.ndarray, "8"]) -> str:
    """The hash as text."""
    return "".join(f"{int(word):08x}" for word in words)


@functools.lru_cache(maxsize=8)
def _sums(infos: tuple[ParamInfo, ...], sharding: NamedSharding | None) -> "jax.stages.Wrapped":
    """The jitted sums of every parameter; one program, which takes each array once."""

    def sums(params: Params) -> Params:
        return map_params(
            lambda info, value: jax.tree.map(functools.partial(_sums_of, info), value), infos, params
        )

    return jax.jit(sums, out_shardings=sharding)


def _sums_of(info: ParamInfo, value: Array) -> UInt32[Array, "4"]:
    if jax.typeof(value).memory_space is jax.memory.Space.Host:
        value = jax.device_put(value, jax.memory.Space.Device)
    # Bits and not numbers: sums of these are exact, in any order.
    bits = jax.lax.bitcast_convert_type(value, _WORDS[value.dtype.itemsize]).astype(jnp.uint32)
    # The place within a layer, and the layer's own number in the model: the numbers of a stack may exceed 32
    # bits.
    stacked = info.is_stacked
    position = jnp.zeros(bits.shape, jnp.uint32)
    for dim in range(stacked, bits.ndim):
        # Number of the element in the order of rows; it wraps around.
        position = position * np.uint32(bits.shape[dim]) + jax.lax.broadcasted_iota(
            jnp.uint32, bits.shape, dim
        )
    counted = jnp.ones(bits.shape, jnp.uint32)
    if stacked:
        order = np.arange(bits.shape[0]) if info.layer_order is None else np.asarray(info.layer_order)
        shape = (-1, *(1,) * (bits.ndim - 1))
        layer = jnp.broadcast_to(jnp.asarray(order.astype(np.uint32)).reshape(shape), bits.shape)
        # Identity layers of a pipeline are not the model's.
        counted = jnp.broadcast_to(jnp.asarray((order >= 0).astype(np.uint32)).reshape(shape), bits.shape)
        position = mix_bits(position ^ mix_bits(layer + np.uint32(0x9E3779B9)))
    words = [
        jnp.sum(counted * mix_bits(bits ^ mix_bits(position + np.uint32(salt))), dtype=jnp.uint32)
        for salt in range(1, _SUMS + 1)
    ]
    return jnp.stack(words)
