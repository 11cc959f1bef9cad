"""Contraction with a weight in 8-bit floats: e4m3 forward, e5m2 gradients, sums in float32 (arXiv:2209.05433)."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain_kernels.fp8.formats import FORWARD, GRADIENT, largest, quantised, restored, scale_of
from jtrain_kernels.linear.cpu import kernel_gradient_cpu
from jtrain_kernels.linear.reference import contract


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fp8Kernel:
    """A weight whose matmuls are to be in 8-bit floats.

    value: the weight, in the dtype that its gradient is to have; a tree's leaf may stand here before it is fetched.
    scale_3: what x, the weight and the gradient of the result are multiplied by before they are rounded, of
      `history.ROLES`; None scales each by its own largest number (current scaling).
    seen_3: with scale_3, what is differentiated in order to learn the largest numbers of the three: the cotangent is
      those numbers, and the value is never read. Use the weight once, or the numbers are added.
    """

    value: Any
    scale_3: Any = None
    seen_3: Any = None

    def __getitem__(self, key: Any) -> "Fp8Kernel":
        """Itself, so that a module's `weight[...]` reads a weight of either kind."""
        assert key is Ellipsis, key
        return self


def linear_fp8(x: Float[Array, "..."], kernel: Fp8Kernel, num_in: int = 1) -> Float[Array, "..."]:
    """As `linear`, of operands rounded to 8 bits; the backward pass rounds the arriving gradient, to e5m2.

    Keeps x and the kernel as they come for the backward pass and rounds them there anew: several matmuls share one x,
    whose 8-bit copies would be kept once for each, and on a GPU the backward pass needs it transposed anyway.
    Clipping passes gradients through.

    Raises:
      ValueError: the contracted dimensions differ.
    """
    shape = kernel.value.shape
    if num_in < 1 or x.shape[x.ndim - num_in :] != shape[:num_in]:
        raise ValueError(
            f"linear_fp8: the last {num_in} dimensions of x {x.shape} must equal the first {num_in} of kernel "
            f"{shape}. Set num_in to the number of dimensions to contract."
        )
    in_size, out_dims = math.prod(shape[:num_in]), shape[num_in:]
    x_TI, kernel_IO = x.reshape(-1, in_size), kernel.value.reshape(in_size, math.prod(out_dims))
    y_TO = _matmul(x_TI, kernel_IO, kernel.scale_3, kernel.seen_3)
    return y_TO.reshape(*x.shape[: x.ndim - num_in], *out_dims)


@jax.custom_vjp
def _matmul(x_TI: Array, kernel_IO: Array, scale_3: Array | None, seen_3: Array | None) -> Float[Array, "T O"]:
    return _forward(x_TI, kernel_IO, scale_3, seen_3)[0]


def _forward(x_TI: Array, kernel_IO: Array, scale_3: Array | None, seen_3: Array | None) -> tuple[Array, Any]:
    del seen_3
    scales = (None, None) if scale_3 is None else (scale_3[0], scale_3[1])
    x8_TI, x_scale = _to_8bit(x_TI, scales[0], FORWARD)
    kernel8_IO, kernel_scale = _to_8bit(kernel_IO, scales[1], FORWARD)
    dtype = x_TI.dtype
    # On Hopper the tensor cores' own sums keep 14 bits: faster, and enough here, but not for gradients (see _backward).
    y_TO = contract(restored(x8_TI, x_scale, dtype), restored(kernel8_IO, kernel_scale, dtype), 1, 0, dtype)
    return y_TO, (x_TI, kernel_IO, x_scale, kernel_scale, scale_3)


def _backward(saved: Any, dy_TO: Array) -> tuple[Array, Array, Array | None, Array | None]:
    x_TI, kernel_IO, x_scale, kernel_scale, scale_3 = saved
    dtype = x_TI.dtype
    dy8_TO, dy_scale = _to_8bit(dy_TO, None if scale_3 is None else scale_3[2], GRADIENT)
    dy = restored(dy8_TO, dy_scale, dtype)
    x = restored(quantised(x_TI, x_scale, FORWARD), x_scale, dtype)
    kernel = restored(quantised(kernel_IO, kernel_scale, FORWARD), kernel_scale, dtype)
    dx_TI, dkernel_IO = jax.lax.platform_dependent(
        dy,
        x,
        kernel,
        cpu=lambda dy, x, kernel: (contract(dy, kernel, 1, 1, dtype), kernel_gradient_cpu(x, dy, kernel_IO.dtype)),
        # HIGHEST is how XLA:GPU is told not to sum in the tensor cores alone; elsewhere it would mean float32 operands.
        cuda=functools.partial(_products, dtype=kernel_IO.dtype, precision=jax.lax.Precision.HIGHEST),
        default=functools.partial(_products, dtype=kernel_IO.dtype),
    )
    if scale_3 is None:
        return dx_TI, dkernel_IO, None, None
    seen_3 = jnp.stack([largest(x_TI), largest(kernel_IO), largest(dy_TO)])
    return dx_TI, dkernel_IO, jnp.zeros_like(scale_3), seen_3


def _products(
    dy_TO: Array, x_TI: Array, kernel_IO: Array, *, dtype: Any, precision: jax.lax.Precision | None = None
) -> tuple[Array, Array]:
    dx_TI = contract(dy_TO, kernel_IO, 1, 1, x_TI.dtype, precision=precision)
    return dx_TI, contract(x_TI, dy_TO, 0, 0, dtype, precision=precision)


def _to_8bit(x: Array, scale: Array | None, dtype: jax.typing.DTypeLike) -> tuple[Array, Array]:
    if scale is None:
        scale = scale_of(largest(x), dtype)
    return quantised(x, scale, dtype), scale


_matmul.defvjp(_forward, _backward)
