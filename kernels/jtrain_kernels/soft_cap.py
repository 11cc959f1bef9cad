"""Soft-caps: numbers bounded smoothly by tanh (arXiv:2408.00118, section 2)."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def capped(x: Float[Array, "*dims"], soft_cap: float | None) -> Float[Array, "*dims"]:
    """`soft_cap * tanh(x / soft_cap)`; x itself without a cap."""
    return x if soft_cap is None else soft_cap * jnp.tanh(x / soft_cap)


def times_slope(
    gradient: Float[Array, "*dims"], y: Float[Array, "*dims"], soft_cap: float | None
) -> Float[Array, "*dims"]:
    """Gradient of the x of which `capped` made y, from the gradient of y; y may be -inf where masked."""
    if soft_cap is None:
        return gradient
    # Masked elements have a gradient of 0, so their slope only has to be finite.
    return gradient * (1.0 - jnp.square(jnp.maximum(y, -soft_cap) / soft_cap))
