"""Heads padded with zeros to a width that a kernel takes; exact, because zeros add nothing to scores or
results.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array


def largest_head(avals: Mapping[str, Any]) -> int:
    """Head size of queries and keys, or that of values if it is larger."""
    return max(avals["q_BLNH"].shape[3], avals["v_BMKP"].shape[3])


def pad_heads(width: int, *arrays: Array) -> tuple[Array, ...]:
    """Arrays [..., H] as [..., width], with zeros after the first H elements; `cut_heads` is the inverse."""
    return tuple(jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])]) for x in arrays)


def cut_heads(width: int, *arrays: Array) -> tuple[Array, ...]:
    """Arrays [..., H] without the elements after the first `width`."""
    return tuple(x[..., :width] for x in arrays)
