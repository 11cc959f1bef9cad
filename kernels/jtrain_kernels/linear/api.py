"""Contraction of the last dimensions with a weight, with a backward pass that suits each back end.

Letters here: T tokens, I inputs and O outputs of a weight.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain_kernels import cost, registry
from jtrain_kernels.errors import UserError
from jtrain_kernels.linear.cpu import kernel_gradient_cpu
from jtrain_kernels.linear.reference import contract, linear_reference
from jtrain_kernels.linear.unmerged import dkernel_tpu, dx_tpu
from jtrain_kernels.platforms import by_platform


def linear(x: Float[Array, "..."], kernel: Float[Array, "..."], num_in: int = 1) -> Float[Array, "..."]:
    """`x` contracted over its last `num_in` dimensions with the first `num_in` of `kernel`.

    Computes and returns x's dtype. The gradient of x has x's dtype, and the gradient of the kernel has the
    kernel's: a float32 kernel's gradient is never rounded to bfloat16, even if x is bfloat16.

    Raises:
      UserError: the contracted dimensions differ.
    """
    if num_in < 1 or x.shape[x.ndim - num_in :] != kernel.shape[:num_in]:
        raise UserError(
            f"linear: the last {num_in} dimensions of x {x.shape} must equal the first {num_in} of kernel "
            f"{kernel.shape}. Set num_in to the number of dimensions to contract."
        )
    return registry.call(LINEAR, x=x, kernel=kernel, num_in=num_in)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _xla(x: Array, kernel: Array, num_in: int) -> Float[Array, "..."]:
    def merged(x: Array, kernel: Array) -> Array:
        y_TO = contract(*_matrices(x, kernel, num_in), 1, 0, x.dtype)
        return y_TO.reshape(*x.shape[: x.ndim - num_in], *kernel.shape[num_in:])

    # XLA:TPU would copy to merge dimensions (see `unmerged`); all others multiply matrices.
    tpu = partial(linear_reference, num_in=num_in)
    return by_platform(x, kernel.astype(x.dtype), tpu=tpu, default=merged)


def _forward(x: Array, kernel: Array, num_in: int) -> tuple[Array, tuple[Array, Array]]:
    return _xla(x, kernel, num_in), (x, kernel)


def _backward(num_in: int, saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, kernel = saved
    return _dx(dy, x, kernel, num_in), _dkernel(x, dy, kernel, num_in)


_xla.defvjp(_forward, _backward)


def _dx(dy: Array, x: Array, kernel: Array, num_in: int) -> Float[Array, "..."]:
    def merged(dy: Array, kernel: Array) -> Array:
        x_TI, kernel_IO = _matrices(x, kernel, num_in)
        # dx = dy kernel^T, without a transposed copy: both are contracted over their last dimension.
        return contract(dy.reshape(len(x_TI), -1), kernel_IO, 1, 1, x.dtype).reshape(x.shape)

    tpu = partial(dx_tpu, num_in=num_in, dtype=x.dtype)
    return by_platform(dy, kernel.astype(x.dtype), tpu=tpu, default=merged)


def _dkernel(x: Array, dy: Array, kernel: Array, num_in: int) -> Float[Array, "..."]:
    def merged(x: Array, dy: Array, product: Callable[[Array, Array, Any], Array]) -> Array:
        x_TI, _ = _matrices(x, kernel, num_in)
        # In the kernel's dtype: a float32 weight's gradient is never rounded to bfloat16.
        return product(x_TI, dy.reshape(len(x_TI), -1), kernel.dtype).reshape(kernel.shape)

    return by_platform(
        x,
        dy,
        cpu=partial(merged, product=kernel_gradient_cpu),
        tpu=partial(dkernel_tpu, num_in=num_in, dtype=kernel.dtype),
        default=partial(merged, product=lambda x, dy, dtype: contract(x, dy, 0, 0, dtype)),
    )


def _matrices(x: Array, kernel: Array, num_in: int) -> tuple[Float[Array, "T I"], Float[Array, "I O"]]:
    """Both with all contracted dimensions merged into one, and all others."""
    inputs = math.prod(kernel.shape[:num_in])
    return x.reshape(-1, inputs), kernel.reshape(inputs, -1)


LINEAR = registry.Op(
    "linear",
    (registry.Implementation("xla", _xla, cost_s=cost.linear_s),),
    cases={
        "llama8b": {
            "x": jax.ShapeDtypeStruct((1, 8192, 4096), jnp.bfloat16),
            "kernel": jax.ShapeDtypeStruct((4096, 14336), jnp.float32),
            "num_in": 1,
        }
    },
)
OPS = (LINEAR,)
