"""Reference FP8 contraction: operands rounded to FP8, differentiated by JAX; gradients pass through
rounding.
"""

import jax
from jaxtyping import Array, Float

from jtrain_kernels.fp8.formats import FORWARD, GRADIENT, dequantise, largest, quantise, scale_of
from jtrain_kernels.linear.reference import linear_reference


def linear_fp8_reference(
    x: Float[Array, "..."], kernel: Float[Array, "..."], num_in: int = 1
) -> Float[Array, "..."]:
    """`x` contracted with `kernel`, both rounded to e4m3; the incoming gradient is rounded to e5m2."""
    return _rounded_gradient(linear_reference(_rounded(x), _rounded(kernel), num_in))


def _round_to(x: Array, dtype: jax.typing.DTypeLike) -> Array:
    scale = scale_of(largest(x), dtype)
    return dequantise(quantise(x, scale, dtype), scale, x.dtype)


def _rounded(x: Array) -> Array:
    return x + jax.lax.stop_gradient(_round_to(x, FORWARD) - x)


@jax.custom_vjp
def _rounded_gradient(y: Array) -> Array:
    return y


_rounded_gradient.defvjp(lambda y: (y, None), lambda _, dy: (_round_to(dy, GRADIENT),))
