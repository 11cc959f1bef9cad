"""Contraction with a weight in FP8: e4m3 forward, e5m2 gradients, float32 sums (arXiv:2209.05433).

Letters here: T tokens, I inputs and O outputs of a weight.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jtrain_kernels.errors import UserError
from jtrain_kernels.fp8.formats import FORWARD, GRADIENT, dequantise, largest, quantise, scale_of
from jtrain_kernels.linear.cpu import kernel_gradient_cpu
from jtrain_kernels.linear.reference import contract
from jtrain_kernels.platforms import by_platform

AMAX = "fp8_amax"
"""Name of the largest numbers that the forward pass finds, scalars. A rematerialised layer should save them:
beside the forward pass's cast they cost no pass over the tensor, beside the backward pass's transpose they
do."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fp8Kernel:
    """Weight whose matmuls are computed in FP8.

    value: the weight, in the dtype of its gradient; before the weight is fetched, a leaf of the parameter
      tree.
    scale_3: delayed scaling: factors by which x, the weight and the gradient of the result (`history.ROLES`)
      are multiplied before they are rounded. None scales each tensor by its own amax (current scaling).
    seen_3: with scale_3, an input that is differentiated to obtain the amax of the three tensors: its
      cotangent is those numbers, and its value is never read. Use the weight only once, because cotangents
      are added.
    rounded: with scale_3, the weight in 8 bits and its amax, from `rounded_weight`, where the weight was
      rounded before it was gathered. `value` is then never read, and only takes the gradient, in the dtype of
      x.
    """

    value: Any
    scale_3: Any = None
    seen_3: Any = None
    rounded: Any = None

    def __getitem__(self, key: Any) -> "Fp8Kernel":
        """Returns itself, so that `weight[...]` works for both kinds of weights."""
        assert key is Ellipsis, key
        return self


def rounded_weight(
    weight: Float[Array, "..."], scale: Float[Array, ""]
) -> tuple[Float[Array, "..."], Float[Array, ""]]:
    """Returns a weight, or a shard of it, rounded as `linear_fp8` does, and its amax."""
    return quantise(weight, scale, FORWARD), largest(weight)


def of_one_x(kernels: Sequence[Fp8Kernel]) -> tuple[Fp8Kernel, ...]:
    """The kernels of several matmuls of one x, which then share its FP8 copies.

    All take the first one's scale of x. With delayed scaling the others' are equal, because their histories
    saw the same x, but XLA cannot know that and would cast and transpose x once for each.
    """
    # Column 0 of scale_3 is x's (`history.ROLES`).
    first = kernels[0].scale_3
    if first is None:
        return tuple(kernels)
    return tuple(
        dataclasses.replace(kernel, scale_3=jnp.concatenate([first[:1], kernel.scale_3[1:]]))
        for kernel in kernels
    )


def linear_fp8(x: Float[Array, "..."], kernel: Fp8Kernel, num_in: int = 1) -> Float[Array, "..."]:
    """`linear` with operands rounded to FP8; the backward pass rounds the incoming gradient to e5m2.

    Keeps x and the kernel unrounded for the backward pass and rounds them again there: several matmuls share
    one x, and each would keep an FP8 copy of it; on a GPU the backward pass needs x transposed anyway.
    Gradients pass through clipping unchanged.

    Raises:
      UserError: the contracted dimensions differ.
    """
    shape = kernel.value.shape
    if num_in < 1 or x.shape[x.ndim - num_in :] != shape[:num_in]:
        raise UserError(
            f"linear_fp8: the last {num_in} dimensions of x {x.shape} must equal the first {num_in} of "
            f"kernel {shape}. Set num_in to the number of dimensions to contract."
        )
    in_size, out_dims = math.prod(shape[:num_in]), shape[num_in:]
    x_TI, kernel_IO = x.reshape(-1, in_size), kernel.value.reshape(in_size, math.prod(out_dims))
    rounded = (
        None if kernel.rounded is None else (kernel.rounded[0].reshape(kernel_IO.shape), kernel.rounded[1])
    )
    assert rounded is None or kernel_IO.dtype == x.dtype, (
        "the gradient of a weight rounded before has x's dtype"
    )
    y_TO = _matmul(x_TI, kernel_IO, kernel.scale_3, kernel.seen_3, rounded)
    return y_TO.reshape(*x.shape[: x.ndim - num_in], *out_dims)


@jax.custom_vjp
def _matmul(
    x_TI: Array,
    kernel_IO: Array,
    scale_3: Array | None,
    seen_3: Array | None,
    rounded: tuple[Array, Array] | None,
) -> Float[Array, "T O"]:
    return _forward(x_TI, kernel_IO, scale_3, seen_3, rounded)[0]


def _forward(
    x_TI: Array,
    kernel_IO: Array,
    scale_3: Array | None,
    seen_3: Array | None,
    rounded: tuple[Array, Array] | None,
) -> tuple[Array, Any]:
    # Its value is never read: it is there for its cotangent.
    del seen_3
    # The amax is computed even with delayed scaling: it enters the history in the backward pass.
    dtype, x_amax = x_TI.dtype, checkpoint_name(largest(x_TI), AMAX)
    if scale_3 is None:
        x_scale = scale_of(x_amax, FORWARD)
        kernel_scale = scale_of(checkpoint_name(largest(kernel_IO), AMAX), FORWARD)
    else:
        # In the order of `history.ROLES`: x, the weight, the gradient of the result.
        x_scale, kernel_scale = scale_3[0], scale_3[1]
    x8_TI = quantise(x_TI, x_scale, FORWARD)
    kernel8_IO = quantise(kernel_IO, kernel_scale, FORWARD) if rounded is None else rounded[0]
    # Hopper's tensor cores accumulate in 14 bits: faster, and enough here, but not for gradients (see
    # _backward).
    y_TO = contract(
        dequantise(x8_TI, x_scale, dtype), dequantise(kernel8_IO, kernel_scale, dtype), 1, 0, dtype
    )
    # A weight rounded before is in `rounded`; its `value` is never read.
    saved_kernel = kernel_IO if rounded is None else None
    return y_TO, (x_TI, saved_kernel, x_scale, kernel_scale, x_amax, scale_3, rounded)


def _backward(saved: Any, dy_TO: Array) -> tuple[Array, Array, Array | None, Array | None, None]:
    x_TI, kernel_IO, x_scale, kernel_scale, x_amax, scale_3, rounded = saved
    dtype, dy_amax = x_TI.dtype, largest(dy_TO)
    dy_scale = scale_of(dy_amax, GRADIENT) if scale_3 is None else scale_3[2]
    # One 8-bit copy of dy serves both gradients.
    dy = dequantise(_cast_once(quantise(dy_TO, dy_scale, GRADIENT)), dy_scale, dtype)
    # x and kernel are rounded again, with the same scales, to the same bits as forward.
    x = dequantise(quantise(x_TI, x_scale, FORWARD), x_scale, dtype)
    kernel8_IO, kernel_amax = rounded_weight(kernel_IO, kernel_scale) if rounded is None else rounded
    kernel = dequantise(kernel8_IO, kernel_scale, dtype)
    kernel_dtype = dtype if rounded is not None else kernel_IO.dtype
    dx_TI, dkernel_IO = by_platform(
        dy,
        x,
        kernel,
        cpu=lambda dy, x, kernel: (
            contract(dy, kernel, 1, 1, dtype),
            kernel_gradient_cpu(x, dy, kernel_dtype),
        ),
        # HIGHEST makes XLA:GPU accumulate outside the tensor cores; on other platforms it would mean float32
        # operands.
        cuda=functools.partial(_products, dtype=kernel_dtype, precision=jax.lax.Precision.HIGHEST),
        default=functools.partial(_products, dtype=kernel_dtype),
    )
    if scale_3 is None:
        return dx_TI, dkernel_IO, None, None, None
    # The cotangent of seen_3 carries the three amax values to the caller.
    return dx_TI, dkernel_IO, jnp.zeros_like(scale_3), jnp.stack([x_amax, kernel_amax, dy_amax]), None


def _cast_once(dy8_TO: Array) -> Array:
    """Has XLA:GPU cast the gradient and find its amax in one pass, and transpose 8 bits.

    It would make dy and its transpose for cuBLAS from the unrounded gradient, in a fusion that cannot find an
    amax too.
    """
    return by_platform(dy8_TO, cuda=jax.lax.optimization_barrier, default=lambda dy8_TO: dy8_TO)


def _products(
    dy_TO: Array, x_TI: Array, kernel_IO: Array, *, dtype: Any, precision: jax.lax.Precision | None = None
) -> tuple[Array, Array]:
    dx_TI = contract(dy_TO, kernel_IO, 1, 1, x_TI.dtype, precision=precision)
    return dx_TI, contract(x_TI, dy_TO, 0, 0, dtype, precision=precision)


_matmul.defvjp(_forward, _backward)
