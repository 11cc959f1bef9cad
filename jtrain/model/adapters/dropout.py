"""Dropout before the first matrix of an adapter, drawn by place.

Whether a number of x is dropped is a hash of seed, step, place of the token in the global batch, matrix,
layer, and number of the input. So every layout, a recomputation and a resumed run drop the same numbers, and
no state is kept. The hash is made in three parts, each from the one before, so that a number costs one mix of
bits:

| part | of | shape |
|---|---|---|
| `token_bits` | seed, step, token of the global batch | [B, L], once per step |
| `matrix_key` | matrix and layer | [2], one per layer |
| `InputDropout.apply` | number of the input | that of x, never kept for the backward pass |
"""

import dataclasses
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from jtrain.layout.random_bits import mix_bits

KEY = "dropout"
"""Name of the key of each layer in a weight tree, beside the two matrices of an adapter."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InputDropout:
    """Dropout of the inputs of one matrix.

    rate: share of the numbers that become zero; the others are multiplied by 1 / (1 - rate).
    token_BL: from `token_bits`, of all positions that this device's part of a row has.
    key_2: from `matrix_key`, of one layer.
    """

    rate: float = dataclasses.field(metadata={"static": True})
    token_BL: Any
    key_2: Any

    def apply(self, x: Float[Array, "B _ ..."]) -> Float[Array, "B _ ..."]:
        """Drops numbers of x and scales the others, in the dtype of x."""
        token_BL = self.token_BL
        if (length := x.shape[1]) != token_BL.shape[1]:
            # A product before the gather over `tensor` has this device's positions alone.
            token_BL = jax.lax.dynamic_slice_in_dim(
                token_BL, jax.lax.axis_index("tensor") * length, length, axis=1
            )
        key, first_input = self.key_2
        inputs = x.shape[2:]
        number = first_input + jnp.arange(int(np.prod(inputs)), dtype=jnp.uint32).reshape(1, 1, *inputs)
        bits = mix_bits(mix_bits(token_BL ^ key).reshape(*token_BL.shape, *(1,) * len(inputs)) ^ number)
        is_kept = bits >= jnp.uint32(round(self.rate * 2**32))
        return jnp.where(is_kept, x * (1.0 / (1.0 - self.rate)), jnp.zeros((), x.dtype))


def token_bits(seed: int, step: Int[Array, ""], index_BL: Int[Array, "B L"]) -> UInt32[Array, "B L"]:
    """Random bits of every token in one step.

    Args:
      index_BL: number of each token in the global batch.
    """
    # Both mixes are permutations, so no two tokens of a step have the same bits.
    index_BL = mix_bits(index_BL.astype(jnp.uint32) ^ mix_bits(jnp.uint32(seed)))
    return mix_bits(index_BL ^ mix_bits(step.astype(jnp.uint32) + np.uint32(0x9E3779B9)))


def matrix_key(path: str, layer: UInt32[Array, "*layers"]) -> UInt32[Array, "*layers"]:
    """Key of a matrix in each layer.

    Args:
      layer: numbers of the layers in the model, in any order; 0 for a matrix that is in no stack.
    """
    return mix_bits(mix_bits(layer + np.uint32(0x9E3779B9)) ^ np.uint32(zlib.crc32(path.encode())))
