"""The hash of what fed a step, so that runs can be compared and a bad batch found again."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt

from jtrain.dims import Batch
from jtrain.mesh import BATCH_AXES


def hash_block(batch: Batch, column_L: Int[Array, " L"]) -> UInt[Array, "2"]:
    """This device's term of a hash of the global batch: add the terms modulo 2^32.

    Each place of the batch is mixed with its global index, so the sum depends on what stands where but not on how it
    is split. It is computed from what the step was fed, not from what the loader meant to feed.

    Args:
      column_L: where in the whole row this device's positions are.
    """
    rows, cols = batch.token_BL.shape
    row = jnp.arange(rows) + rows * jax.lax.axis_index(BATCH_AXES)
    index_BL = row[:, None] * (cols * jax.lax.axis_size("context")) + column_L[None, :]

    def one(seed: int) -> Array:
        h = jnp.full((rows, cols), seed, jnp.uint32)
        for x_BL in (index_BL, batch.token_BL, batch.target_BL, batch.position_BL, batch.segment_BL):
            h = _mix(h ^ x_BL.astype(jnp.uint32))
        return jnp.sum(h, dtype=jnp.uint32)

    return jnp.stack([one(0x9E3779B9), one(0x85EBCA6B)])


def _mix(h: Array) -> Array:
    """Murmur3's 32-bit finaliser: every input bit changes half of the output bits."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
