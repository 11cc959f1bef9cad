"""Heads padded with zeros to a width that a kernel takes; exact, because zeros add nothing to scores or
results.
"""

import jax.numpy as jnp
from jaxtyping import Array


def pad_heads(width: int, *arrays: Array) -> tuple[Array, ...]:
    """Arrays [..., H] as [..., width], with zeros after the first H elements; `cut_heads` is the inverse."""
    return tuple(jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])]) for x in arrays)


def cut_heads(width: int, *arrays: Array) -> tuple[Array, ...]:
    """Arrays [..., H] without the elements after the first `width`."""
    return tuple(x[..., :width] for x in arrays)
