"""Overlapped collectives with FP8 matmuls, whose gathered operands are sent in FP8: half of bfloat16's bytes.

The algorithm is that of `xla/op.py`, the number formats are those of `jtrain_kernels.fp8`. A gathered operand
is rounded before it is sent: x to e4m3, and in the backward pass dy to e5m2. Partial sums are sent in x's
dtype.

Example: x [1, 1024, 4096] on each of 8 ranks. A permute carries 4 MiB in place of 8. If the largest |x| of
all ranks is 5.3, the scale is 64, since 5.3 * 64 = 339 fits under e4m3's 448 and 5.3 * 128 does not: every
rank rounds alike.

Letters here: R rows of one rank, K inputs and N outputs of a kernel, G kernels that share x.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain_kernels.fp8.formats import FORWARD, GRADIENT, dequantise, largest, quantise, scale_of
from jtrain_kernels.fp8.history import ROLES
from jtrain_kernels.linear.reference import contract
from jtrain_kernels.overlap.xla.lower_schedule import gather, put, rows_of
from jtrain_kernels.overlap.xla.op import KernelTuple, OverlapPlan, reduce_scattered
from jtrain_kernels.platforms import by_platform

type PerKernel = Float[Array, "G 3"] | None
"""`Fp8Kernel.scale_3`, or `seen_3`, for each of G kernels; None for current scaling. Columns are
`history.ROLES`: 0 x, 1 kernel, 2 gradient."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def all_gather_matmul(
    x_BRK: Float[Array, "B _ K"],
    kernels: KernelTuple,
    scale_G3: PerKernel,
    seen_G3: PerKernel,
    plan: OverlapPlan,
) -> KernelTuple:
    """`gathered x @ kernel` for each kernel [K, N], of shape [B, ranks * R, N] each.

    With delayed scaling x has one amax history. Every kernel keeps a copy of it; the first kernel's copy is
    used.
    """
    return _gather_forward(x_BRK, kernels, scale_G3, seen_G3, plan)[0]


def _gather_forward(
    x_BRK: Array, kernels: KernelTuple, scale_G3: PerKernel, seen_G3: PerKernel, plan: OverlapPlan
) -> tuple[KernelTuple, Any]:
    """The outputs of `all_gather_matmul`, and what `_gather_backward` needs of the forward pass.

    R rows of x per rank are quantised once and sent around; at each arrival `visit` multiplies a piece of
    them by all kernels and writes the product at the place of the piece, a number, in the gathered rows.
    """
    # seen_G3 is an input only so that its cotangent can carry this step's amax out of the backward pass.
    del seen_G3
    dtype = x_BRK.dtype
    # One scale of x for all kernels, that of the first. With a plan: x is one shard of the gathered rows, and
    # every rank must scale by the same number.
    x_scale = _scale(x_BRK, scale_G3, 0, "x", plan)
    kernel_scales = tuple(_scale(k, scale_G3, i, "kernel") for i, k in enumerate(kernels))
    kernels8 = tuple(quantise(k, scale, FORWARD) for k, scale in zip(kernels, kernel_scales, strict=True))

    def visit(outputs: KernelTuple, piece: Array, rows8: Array) -> KernelTuple:
        # Dequantised right before the product: XLA:GPU folds this into cuBLAS as a scaled FP8 operand.
        rows = dequantise(rows8, x_scale, dtype)
        products = (
            _dot(rows, dequantise(k8, s, dtype), dtype) for k8, s in zip(kernels8, kernel_scales, strict=True)
        )
        return tuple(put(y, piece, product) for y, product in zip(outputs, products, strict=True))

    shape = x_BRK.shape[0], x_BRK.shape[1] * plan.axis_size
    # Every row is written by some visit, so the outputs need no zeros.
    outputs = tuple(jax.lax.empty((*shape, kernel.shape[1]), dtype) for kernel in kernels)
    # Rounded once, before the first send; each hop passes the 8-bit rows on as they are.
    x8_BRK = quantise(x_BRK, x_scale, FORWARD)
    outputs = gather(plan.schedule("all_gather_matmul"), plan.axis_name, x8_BRK, visit, outputs)
    # x is saved as the shard in its own dtype: `_of_scales` needs its exact amax in the backward pass.
    return outputs, (x_BRK, kernels, x_scale, kernel_scales, scale_G3)


def _gather_backward(
    plan: OverlapPlan, saved: Any, dys: KernelTuple
) -> tuple[Array, KernelTuple, PerKernel, PerKernel]:
    """Gradients of x, of the kernels, and of the two arguments about scales (`_of_scales`).

    dys has one [B, ranks * R, N] per kernel, the columns of this rank. x is gathered again for the kernels'
    gradients; x's own gradient is the sum over kernels and ranks, of which this rank keeps its R rows.
    """
    x_BRK, kernels, x_scale, kernel_scales, scale_G3 = saved
    dtype = x_BRK.dtype
    schedule = plan.schedule("all_gather_matmul")
    rows_per_piece = schedule.piece_rows(dys[0].shape[1])
    # No plan here: each rank has all rows of its columns of dy, and rounds them for itself.
    dy_scales = tuple(_scale(dy, scale_G3, i, "gradient") for i, dy in enumerate(dys))
    dys8 = tuple(quantise(dy, scale, GRADIENT) for dy, scale in zip(dys, dy_scales, strict=True))
    kernels8 = tuple(quantise(k, scale, FORWARD) for k, scale in zip(kernels, kernel_scales, strict=True))

    def dy_rows(piece: Array) -> list[Array]:
        return [
            dequantise(rows_of(dy8, piece, rows_per_piece), s, dtype)
            for dy8, s in zip(dys8, dy_scales, strict=True)
        ]

    def kernel_parts(totals: KernelTuple, piece: Array, rows8: Array) -> KernelTuple:
        rows = dequantise(rows8, x_scale, dtype)
        return tuple(t + _kernel_part(rows, dy) for t, dy in zip(totals, dy_rows(piece), strict=True))

    def dx_piece(piece: Array) -> Array:
        # Dequantised in each call: the 8-bit kernels stay in memory, not a bfloat16 copy for all pieces.
        full_kernels = (dequantise(k8, s, dtype) for k8, s in zip(kernels8, kernel_scales, strict=True))
        return functools.reduce(jnp.add, map(_dot_back, dy_rows(piece), full_kernels))

    zeros = tuple(jnp.zeros(kernel.shape, jnp.float32) for kernel in kernels)
    # x is sent a second time, in 8 bits again, since the forward pass kept only the shard.
    totals = gather(schedule, plan.axis_name, quantise(x_BRK, x_scale, FORWARD), kernel_parts, zeros)
    dx_BRK = reduce_scattered(plan, dx_piece, dtype)
    dkernels = tuple(total.astype(kernel.dtype) for total, kernel in zip(totals, kernels, strict=True))
    # The order of the four results is that of the differentiable arguments.
    return dx_BRK, dkernels, *_of_scales(scale_G3, x_BRK, kernels, dys)


all_gather_matmul.defvjp(_gather_forward, _gather_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def matmul_reduce_scatter(
    x_BRK: Float[Array, "B _ K"],
    kernel_KN: Float[Array, "K N"],
    scale_13: PerKernel,
    seen_13: PerKernel,
    plan: OverlapPlan,
) -> Float[Array, "B _ N"]:
    """This rank's rows of `x @ kernel` summed over ranks, [B, R / ranks, N]."""
    return _scatter_forward(x_BRK, kernel_KN, scale_13, seen_13, plan)[0]


def _scatter_forward(
    x_BRK: Array, kernel_KN: Array, scale_13: PerKernel, seen_13: PerKernel, plan: OverlapPlan
) -> tuple[Array, Any]:
    """The output of `matmul_reduce_scatter`, and what `_scatter_backward` needs of the forward pass."""
    del seen_13
    dtype = x_BRK.dtype
    rows_per_piece = plan.schedule("matmul_reduce_scatter").piece_rows(x_BRK.shape[1])
    # x is not gathered here, so its scale needs no agreement between ranks.
    x_scale = _scale(x_BRK, scale_13, 0, "x")
    kernel_scale = _scale(kernel_KN, scale_13, 0, "kernel")
    x8_BRK, kernel8_KN = quantise(x_BRK, x_scale, FORWARD), quantise(kernel_KN, kernel_scale, FORWARD)

    def y_piece(piece: Array) -> Array:
        x = dequantise(rows_of(x8_BRK, piece, rows_per_piece), x_scale, dtype)
        return _dot(x, dequantise(kernel8_KN, kernel_scale, dtype), jnp.float32)

    # Partial sums travel in x's dtype; a sum in 8 bits would lose what each rank adds.
    y_BRN = reduce_scattered(plan, y_piece, dtype)
    return y_BRN, (x_BRK, kernel_KN, x_scale, kernel_scale, scale_13)


def _scatter_backward(
    plan: OverlapPlan, saved: Any, dy_BRN: Array
) -> tuple[Array, Array, PerKernel, PerKernel]:
    """Gradients of x, of the kernel, and of the two arguments about scales (`_of_scales`).

    dy_BRN is this rank's shard of rows: it is gathered in 8 bits, and each piece gives rows of dx and a part
    of the kernel's gradient.
    """
    x_BRK, kernel_KN, x_scale, kernel_scale, scale_13 = saved
    dtype = x_BRK.dtype
    schedule = plan.schedule("all_gather_matmul")
    rows_per_piece = schedule.piece_rows(x_BRK.shape[1])
    # With a plan: dy is the gathered operand in this direction.
    dy_scale = _scale(dy_BRN, scale_13, 0, "gradient", plan)
    x8_BRK, kernel8_KN = quantise(x_BRK, x_scale, FORWARD), quantise(kernel_KN, kernel_scale, FORWARD)

    def visit(carry: tuple[Array, Array], piece: Array, dy8: Array) -> tuple[Array, Array]:
        dx, total = carry
        dy = dequantise(dy8, dy_scale, dtype)
        # dx rows are complete here (each rank has its own columns), so they are rounded right away.
        dx = put(dx, piece, _dot_back(dy, dequantise(kernel8_KN, kernel_scale, dtype)).astype(dtype))
        return dx, total + _kernel_part(
            dequantise(rows_of(x8_BRK, piece, rows_per_piece), x_scale, dtype), dy
        )

    # Rows of dx are each written once; the kernel's gradient is a sum over pieces and starts at 0.
    start = jax.lax.empty(x_BRK.shape, dtype), jnp.zeros(kernel_KN.shape, jnp.float32)
    dx_BRK, total = gather(schedule, plan.axis_name, quantise(dy_BRN, dy_scale, GRADIENT), visit, start)
    return dx_BRK, total.astype(kernel_KN.dtype), *_of_scales(scale_13, x_BRK, (kernel_KN,), (dy_BRN,))


matmul_reduce_scatter.defvjp(_scatter_forward, _scatter_backward)


def _scale(
    x: Array,
    scale_G3: PerKernel,
    kernel: int,
    role: Literal["x", "kernel", "gradient"],
    plan: OverlapPlan | None = None,
) -> Float[Array, ""]:
    """Scale of the tensor in a role of `history.ROLES`, a power of two.

    Args:
      x: the tensor.
      kernel: number of the kernel whose history has the scale; unused without delayed scaling.
      plan: given if x is one rank's shard of a gathered array: then the amax is taken over ranks, so that all
        scale alike.
    """
    # Delayed scaling: the scale is known before the tensor is, and is already the same on all ranks.
    if scale_G3 is not None:
        return scale_G3[kernel, ROLES.index(role)]
    amax = largest(x)
    if plan is not None:
        amax = jax.lax.pmax(amax, plan.axis_name)
    return scale_of(amax, GRADIENT if role == "gradient" else FORWARD)


def _of_scales(
    scale_G3: PerKernel, x: Array, kernels: KernelTuple, dys: KernelTuple
) -> tuple[PerKernel, PerKernel]:
    """Cotangents of `scale_G3` (zero) and `seen_G3` (this rank's amax of each tensor)."""
    if scale_G3 is None:
        return None, None
    # This rank's amax only: the train step takes the maximum over ranks once for all tensors.
    seen_G3 = [[largest(x), largest(kernel), largest(dy)] for kernel, dy in zip(kernels, dys, strict=True)]
    # Zeros: a scale is a power of two that is not trained.
    return jnp.zeros_like(scale_G3), jnp.array(seen_G3)


def _dot(x_BRK: Array, kernel_KN: Array, dtype: jax.typing.DTypeLike) -> Float[Array, "B _ N"]:
    """Product for the forward pass. On Hopper the tensor cores accumulate in 14 bits: faster, and enough
    forward.
    """
    y = contract(x_BRK.reshape(-1, x_BRK.shape[2]), kernel_KN, 1, 0, dtype)
    return y.reshape(*x_BRK.shape[:2], -1)


def _dot_back(dy_BRN: Array, kernel_KN: Array) -> Float[Array, "B _ K"]:
    """Gradient of x, `dy @ kernel.T`, in float32."""
    dx = _exact(dy_BRN.reshape(-1, dy_BRN.shape[2]), kernel_KN, 1, 1)
    return dx.reshape(*dy_BRN.shape[:2], -1)


def _kernel_part(x_BRK: Array, dy_BRN: Array) -> Float[Array, "K N"]:
    """Part of the kernel's gradient by some rows, `x.T @ dy` over sequences and rows, in float32."""
    return _exact(x_BRK.reshape(-1, x_BRK.shape[2]), dy_BRN.reshape(-1, dy_BRN.shape[2]), 0, 0)


def _exact(a: Array, b: Array, a_dim: int, b_dim: int) -> Array:
    """Product accumulated in float32 throughout.

    Precision HIGHEST asks XLA:GPU for that; on other platforms it would mean float32 operands.
    """
    product = functools.partial(contract, a_dim=a_dim, b_dim=b_dim, dtype=jnp.float32)
    return by_platform(
        a, b, cuda=functools.partial(product, precision=jax.lax.Precision.HIGHEST), default=product
    )
