"""Hash of the batch that fed a step, to compare runs and to find a bad batch again."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt

from jtrain.layout.dims import Batch
from jtrain.layout.mesh import BATCH_AXES
from jtrain.layout.random_bits import mix_bits


def index_in_batch(rows: int, column_L: Int[Array, " L"]) -> Int[Array, "B L"]:
    """Returns the number of each of this device's tokens in the global batch, row by row.

    Args:
      rows: of this device.
      column_L: index in the whole row of each of this device's positions.
    """
    # Rows lie in the order of the batch axes; columns as `column_L` says, for zig-zag order is not
    # contiguous.
    row = jnp.arange(rows) + rows * jax.lax.axis_index(BATCH_AXES)
    return row[:, None] * (column_L.shape[0] * jax.lax.axis_size("context")) + column_L[None, :]


def hash_block(batch: Batch, column_L: Int[Array, " L"]) -> UInt[Array, "2"]:
    """Returns this device's term of a hash of the global batch; the hash is the sum of all terms modulo 2^32.

    Each element is mixed with its global index, so the hash depends on the order of elements but not on how
    the batch is sharded. It is computed from the batch on the device, so errors between loader and device
    show.

    Args:
      column_L: index in the whole row of each of this device's positions.
    """
    rows, cols = batch.token_BL.shape
    index_BL = index_in_batch(rows, column_L)

    def hash_from(seed: int) -> Array:
        h = jnp.full((rows, cols), seed, jnp.uint32)
        for x_BL in (index_BL, batch.token_BL, batch.target_BL, batch.position_BL, batch.segment_BL):
            # Each array is mixed before the next enters: equal values of two arrays would cancel in one xor.
            h = mix_bits(h ^ x_BL.astype(jnp.uint32))
        if batch.weight_BL is not None:
            h = mix_bits(h ^ jax.lax.bitcast_convert_type(batch.weight_BL, jnp.uint32))
        return jnp.sum(h, dtype=jnp.uint32)

    # Two seeds (the golden ratio, a constant of Murmur3) make 64 bits of two independent 32-bit hashes.
    return jnp.stack([hash_from(0x9E3779B9), hash_from(0x85EBCA6B)])
