"""Flips single bits of arrays in the memory of emulated devices, as cosmic rays and failing memory do."""

import ctypes
from typing import Any

import jax
import jax.numpy as jnp


def flip(array: jax.Array, device: jax.Device, byte: int, bit: int) -> None:
    """Flips one bit of the part of `array` that `device` holds."""
    jax.block_until_ready(array)
    [part] = [shard.data for shard in array.addressable_shards if shard.device == device]
    memory = (ctypes.c_uint8 * part.nbytes).from_address(part.unsafe_buffer_pointer())
    memory[byte % part.nbytes] ^= 1 << bit


def copied(state: Any) -> Any:
    """Returns a copy of a state, each device's part in memory of its own."""
    return jax.tree.map(jnp.copy, state)
