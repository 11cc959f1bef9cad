"""Rotary position embedding."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain_kernels import cost, registry
from jtrain_kernels.rope import pallas_tpu


def rope(
    x_BLNH: Float[Array, "B L N H"], cos_BLR: Float[Array, "B L R"], sin_BLR: Float[Array, "B L R"]
) -> Float[Array, "B L N H"]:
    """Rotates pair (i, i + H/2) of every head by its position's angle, in float32, and returns x's dtype.

    This is the half-split layout of Llama checkpoints (arXiv:2104.09864 rotates (2i, 2i + 1)). Only x has a
    gradient: the opposite rotation.
    """
    return registry.call(ROPE, x_BLNH=x_BLNH, cos_BLR=cos_BLR, sin_BLR=sin_BLR)


type RotationKernel = Callable[[Array, Array, Array], Array]
"""Kernel of a rotation: heads, cosine and sine -> rotated heads."""


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def rope_by(
    x_BLNH: Array, cos_BLR: Array, sin_BLR: Array, rotation: RotationKernel
) -> Float[Array, "B L N H"]:
    """`rope` with the given rotation in both passes."""
    return rotation(x_BLNH, cos_BLR, sin_BLR)


def _forward(
    x_BLNH: Array, cos_BLR: Array, sin_BLR: Array, rotation: RotationKernel
) -> tuple[Array, tuple[Array, Array]]:
    # Only the tables are saved: the rotation's gradient does not depend on x.
    return rotation(x_BLNH, cos_BLR, sin_BLR), (cos_BLR, sin_BLR)


def _backward(
    rotation: RotationKernel, saved: tuple[Array, Array], dy_BLNH: Array
) -> tuple[Array, None, None]:
    cos_BLR, sin_BLR = saved
    # The inverse of a rotation is the rotation by the negative angle.
    return rotation(dy_BLNH, cos_BLR, -sin_BLR), None, None


rope_by.defvjp(_forward, _backward)


def _rotated(x_BLNH: Array, cos_BLR: Array, sin_BLR: Array) -> Array:
    """Rotation in plain JAX."""
    a, b = jnp.split(x_BLNH.astype(jnp.float32), 2, axis=-1)
    # The dimension of heads is inserted: [B, L, 1, R].
    cos, sin = cos_BLR[:, :, None, :], sin_BLR[:, :, None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BLNH.dtype)


# Half of a head of 128: one angle per pair.
_ANGLES = jax.ShapeDtypeStruct((1, 8192, 64), jnp.float32)
ROPE = registry.Op(
    "rope",
    (
        registry.Implementation(
            "pallas_tpu",
            partial(rope_by, rotation=pallas_tpu.rotated),
            pallas_tpu.refusal,
            partial(cost.rope_s, one_pass=True),
            only_forced="no hardware has run the kernel yet, and XLA cannot fuse across it",
        ),
        registry.Implementation(
            "xla", partial(rope_by, rotation=_rotated), cost_s=partial(cost.rope_s, one_pass=False)
        ),
    ),
    cases={
        "llama8b": {
            "x_BLNH": jax.ShapeDtypeStruct((1, 8192, 32, 128), jnp.bfloat16),
            "cos_BLR": _ANGLES,
            "sin_BLR": _ANGLES,
        }
    },
)
OPS = (ROPE,)
