"""Reference rotary embedding, as products of complex numbers."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rope_reference(
    x_BLNH: Float[Array, "B L N H"], cos_BLR: Float[Array, "B L R"], sin_BLR: Float[Array, "B L R"]
) -> Float[Array, "B L N H"]:
    """`(x[i] + j x[i + H/2]) * exp(j angle)`."""
    a, b = jnp.split(x_BLNH.astype(jnp.float32), 2, axis=-1)
    turned = jax.lax.complex(a, b) * jax.lax.complex(cos_BLR, sin_BLR)[:, :, None, :]
    return jnp.concatenate([turned.real, turned.imag], axis=-1).astype(x_BLNH.dtype)
