"""Reference SwiGLU: the formula, differentiated by JAX."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def swiglu_reference(gate: Float[Array, "*dims"], up: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """`silu(gate) * up` in float32, in gate's dtype."""
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)
