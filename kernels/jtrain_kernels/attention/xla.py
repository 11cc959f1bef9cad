"""Attention in plain JAX, which runs on every device."""

from jaxtyping import Array

from jtrain_kernels.attention import blocks, chunks
from jtrain_kernels.attention.mask import Mask, Passes


def forward(*arrays: Array, mask: Mask, chunk: int) -> tuple[Array, Array]:
    """See `Passes`."""
    return chunks.forward(chunk, mask.window, *arrays) if mask.causal else blocks.forward(chunk, *arrays)


def backward(*arrays: Array, mask: Mask, chunk: int) -> tuple[Array, Array, Array]:
    """See `Passes`."""
    return chunks.backward(chunk, mask.window, *arrays) if mask.causal else blocks.backward(chunk, *arrays)


PASSES = Passes(forward, backward)
