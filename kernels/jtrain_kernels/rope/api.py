"""Rotary position embedding."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain_kernels import registry


def rope(
    x_BLNH: Float[Array, "B L N H"], cos_BLR: Float[Array, "B L R"], sin_BLR: Float[Array, "B L R"]
) -> Float[Array, "B L N H"]:
    """Rotates pair (i, i + H/2) of every head by its position's angle, in float32, back in x's dtype.

    The half-split layout of Llama checkpoints (arXiv:2104.09864 rotates (2i, 2i + 1)). Only x has a gradient: the
    opposite rotation.
    """
    return registry.call(ROPE, x_BLNH=x_BLNH, cos_BLR=cos_BLR, sin_BLR=sin_BLR)


@jax.custom_vjp
def _xla(x_BLNH: Array, cos_BLR: Array, sin_BLR: Array) -> Float[Array, "B L N H"]:
    a, b = jnp.split(x_BLNH.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_BLR[:, :, None, :], sin_BLR[:, :, None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BLNH.dtype)


def _forward(x_BLNH: Array, cos_BLR: Array, sin_BLR: Array) -> tuple[Array, tuple[Array, Array]]:
    return _xla(x_BLNH, cos_BLR, sin_BLR), (cos_BLR, sin_BLR)


def _backward(saved: tuple[Array, Array], dy_BLNH: Array) -> tuple[Array, None, None]:
    cos_BLR, sin_BLR = saved
    return _xla(dy_BLNH, cos_BLR, -sin_BLR), None, None


_xla.defvjp(_forward, _backward)

_ANGLES = jax.ShapeDtypeStruct((1, 8192, 64), jnp.float32)
ROPE = registry.Op(
    "rope",
    (registry.Implementation("xla", _xla),),
    cases={
        "llama8b": {
            "x_BLNH": jax.ShapeDtypeStruct((1, 8192, 32, 128), jnp.bfloat16),
            "cos_BLR": _ANGLES,
            "sin_BLR": _ANGLES,
        }
    },
)
OPS = (ROPE,)
