"""Contraction of the last dimensions with a weight, with a backward pass that suits each back end."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain_kernels import cost, registry
from jtrain_kernels.errors import UserError
from jtrain_kernels.linear.cpu import kernel_gradient_cpu
from jtrain_kernels.linear.reference import contract


def linear(x: Float[Array, "..."], kernel: Float[Array, "..."], num_in: int = 1) -> Float[Array, "..."]:
    """`x` contracted over its last `num_in` dimensions with the first `num_in` of `kernel`.

    Computes and returns x's dtype. The gradient of x has x's dtype, and the gradient of the kernel has the kernel's: a
    float32 kernel's gradient is never rounded to bfloat16, even if x is bfloat16.

    Raises:
      UserError: the contracted dimensions differ.
    """
    if num_in < 1 or x.shape[x.ndim - num_in :] != kernel.shape[:num_in]:
        raise UserError(
            f"linear: the last {num_in} dimensions of x {x.shape} must equal the first {num_in} of kernel "
            f"{kernel.shape}. Set num_in to the number of dimensions to contract."
        )
    return registry.call(LINEAR, x=x, kernel=kernel, num_in=num_in)


def _xla(x: Array, kernel: Array, num_in: int) -> Float[Array, "..."]:
    in_dims, out_dims = kernel.shape[:num_in], kernel.shape[num_in:]
    lead = x.shape[: x.ndim - num_in]
    y_TO = _matmul(x.reshape(-1, math.prod(in_dims)), kernel.reshape(math.prod(in_dims), math.prod(out_dims)))
    return y_TO.reshape(*lead, *out_dims)


@jax.custom_vjp
def _matmul(x_TI: Float[Array, "T I"], kernel_IO: Float[Array, "I O"]) -> Float[Array, "T O"]:
    return contract(x_TI, kernel_IO.astype(x_TI.dtype), 1, 0, x_TI.dtype)


def _forward(x_TI: Array, kernel_IO: Array) -> tuple[Array, tuple[Array, Array]]:
    return _matmul(x_TI, kernel_IO), (x_TI, kernel_IO)


def _backward(saved: tuple[Array, Array], dy_TO: Array) -> tuple[Array, Array]:
    x_TI, kernel_IO = saved
    dx_TI = contract(dy_TO, kernel_IO.astype(x_TI.dtype), 1, 1, x_TI.dtype)
    dkernel_IO = jax.lax.platform_dependent(
        x_TI,
        dy_TO,
        cpu=lambda x, dy: kernel_gradient_cpu(x, dy, kernel_IO.dtype),
        default=lambda x, dy: contract(x, dy, 0, 0, kernel_IO.dtype),
    )
    return dx_TI, dkernel_IO


_matmul.defvjp(_forward, _backward)

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
