"""Reference RMSNorm: the formula, differentiated by JAX."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm_reference(
    x: Float[Array, "*rest C"], scale_C: Float[Array, " C"], eps: float
) -> Float[Array, "*rest C"]:
    """`x / sqrt(mean(x^2) + eps) * scale` in float32, back in x's dtype."""
    x32 = x.astype(jnp.float32)
    scale = scale_C.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + scale_C.shape)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps) * scale).astype(x.dtype)
