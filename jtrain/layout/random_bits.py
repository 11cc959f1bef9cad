"""Random bits as a hash of where they are used: no generator state, so every layout and every resume draws
the same.
"""

import jax.numpy as jnp
from jaxtyping import Array


def mix_bits(h: Array) -> Array:
    """Murmur3's 32-bit finaliser of uint32s: every input bit changes half of the output bits on average."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
