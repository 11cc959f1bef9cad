"""rms_norm, rope and swiglu against JAX's own derivatives of the formulas in float64."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jtrain_kernels.rms_norm.api import rms_norm
from jtrain_kernels.rope.api import rope
from jtrain_kernels.swiglu.api import swiglu
from tests.kernels.gradients import agree_with, dtypes, normal


@dtypes
def test_rms_norm_is_its_formula(dtype: str) -> None:
    """Value and the gradients of x and scale agree; eps is large enough that forgetting it would show."""

    def formula(x: Array, scale: Array) -> Array:
        return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 0.1) * scale[None, None]

    agree_with(lambda x, s: rms_norm(x, s, 0.1), formula, (normal(0, 2, 8, 16), normal(1, 16)), dtype)


@dtypes
def test_rope_turns_pairs_half_a_head_apart(dtype: str) -> None:
    """Rotation is multiplication by exp(i angle) as complex numbers; its gradient is the opposite rotation."""
    angle = normal(1, 2, 8, 4)
    cos, sin = jnp.cos(angle), jnp.sin(angle)

    def formula(x: Array) -> Array:
        turned = (x[..., :4] + 1j * x[..., 4:]) * jnp.exp(1j * jnp.asarray(angle, jnp.float64))[:, :, None, :]
        return jnp.concatenate([turned.real, turned.imag], axis=-1)

    agree_with(lambda x: rope(x, cos, sin), formula, (normal(0, 2, 8, 3, 8),), dtype)


@dtypes
def test_swiglu_is_its_formula(dtype: str) -> None:
    """The result is `gate * sigmoid(gate) * up`, also where sigmoid saturates."""

    def formula(gate: Array, up: Array) -> Array:
        return gate / (1 + jnp.exp(-gate)) * up

    agree_with(swiglu, formula, (10 * normal(0, 4, 64), normal(1, 4, 64)), dtype)
    far = jnp.asarray([[-200.0, 200.0]], dtype)
    np.testing.assert_allclose(swiglu(far, jnp.ones_like(far)).astype(jnp.float32), [[0.0, 200.0]])
