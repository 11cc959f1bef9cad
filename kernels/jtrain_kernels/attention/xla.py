"""Attention in plain JAX, which runs on every device."""

from jaxtyping import Array

from jtrain_kernels.attention import blocks, chunks
from jtrain_kernels.attention.mask import Mask, Passes


def forward(*arrays: Array, mask: Mask, chunk: int) -> tuple[Array, Array]:
    """See `Passes`."""
    if mask.causal:
        return chunks.forward(chunk, mask, *arrays)
    return blocks.forward(chunk, mask.soft_cap, *arrays)


def backward(*arrays: Array, mask: Mask, chunk: int) -> tuple[Array, Array, Array]:
    """See `Passes`."""
    if mask.causal:
        return chunks.backward(chunk, mask, *arrays)
    return blocks.backward(chunk, mask.soft_cap, *arrays)


PASSES = Passes(forward, backward)
