"""Overlapped collectives in plain JAX, from `ppermute` and matmuls, with gradients that overlap too.

| op | gradient of x | gradient of the kernel |
|---|---|---|
| all_gather_matmul | matmul_reduce_scatter of dy and the transposed kernel | x, gathered again in pieces |
| matmul_reduce_scatter | all_gather_matmul of dy and the transposed kernel | pieces of dy as they arrive |

A layer therefore keeps its shard of x for the backward pass, never the gathered x. Sums over ranks and over
pieces are float32, rounded to x's dtype only to be sent; gradients of kernels are rounded once.

Example: gate and up of Llama 3 8B over 8 ranks, ring. x is [1, 1024, 4096] in bfloat16 on each rank, both
kernels [4096, 1792], both results [1, 8192, 1792]. Seven permutes of 8 MiB carry x around, each beside two
matmuls of 1024 rows. Saved for the backward pass are 8 MiB of x, where the gathered x has 64.

Letters here: R rows of one rank, K inputs and N outputs of a kernel.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain_kernels.overlap.schedule import OpName, OverlapSchedule, make_schedule
from jtrain_kernels.overlap.swizzle import Swizzle
from jtrain_kernels.overlap.xla.lower_schedule import gather, put, reduce, rows_of

type KernelTuple = tuple[Array, ...]
"""Kernels that share x, [K, N] each, or their products."""


class OverlapPlan(NamedTuple):
    """Parameters of an op's schedule over a mesh axis."""

    axis_name: str
    axis_size: int
    swizzle: Swizzle
    parts: int = 1

    def schedule(self, op: OpName) -> OverlapSchedule:
        return _schedule(op, self)


@functools.cache
def _schedule(op: OpName, plan: OverlapPlan) -> OverlapSchedule:
    return make_schedule(op, plan.swizzle, plan.axis_size, parts=plan.parts)


def _dot(x_BRK: Array, kernel: Array, kernel_dim: int, dtype: jax.typing.DTypeLike) -> Float[Array, "B _ _"]:
    """Product of rows of x and the kernel, contracted over the kernel's dimension `kernel_dim`."""
    dims = (((2,), (kernel_dim,)), ((), ()))
    return jax.lax.dot_general(x_BRK, kernel.astype(x_BRK.dtype), dims, preferred_element_type=dtype)


def _kernel_part(x_BRK: Array, dy_BRN: Array) -> Float[Array, "K N"]:
    """Contribution of these rows to a kernel's gradient."""
    # Contracted over batch and rows.
    return jax.lax.dot_general(
        x_BRK, dy_BRN, (((0, 1), (0, 1)), ((), ())), preferred_element_type=jnp.float32
    )


# Argument 2 is the plan, which is no array.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def all_gather_matmul(x_BRK: Float[Array, "B _ K"], kernels: KernelTuple, plan: OverlapPlan) -> KernelTuple:
    """`gathered x @ kernel` for each kernel [K, N]: [B, ranks * R, N] each; x is gathered once."""

    def visit(outputs: KernelTuple, number: Array, rows: Array) -> KernelTuple:
        return tuple(put(y, number, _dot(rows, k, 0, y.dtype)) for y, k in zip(outputs, kernels, strict=True))

    # Every row is written by one visit, so the outputs need no zeros.
    shape = x_BRK.shape[0], x_BRK.shape[1] * plan.axis_size
    outputs = tuple(jax.lax.empty((*shape, kernel.shape[1]), x_BRK.dtype) for kernel in kernels)
    return gather(plan.schedule("all_gather_matmul"), plan.axis_name, x_BRK, visit, outputs)


def _gather_forward(
    x_BRK: Array, kernels: KernelTuple, plan: OverlapPlan
) -> tuple[KernelTuple, tuple[Array, KernelTuple]]:
    # Only the shard is saved: a gathered x for each layer would cost axis_size times its memory.
    return all_gather_matmul(x_BRK, kernels, plan), (x_BRK, kernels)


def gather_backward(
    plan: OverlapPlan, saved: tuple[Array, KernelTuple], dys: KernelTuple
) -> tuple[Array, KernelTuple]:
    """Gradients of `all_gather_matmul` with respect to its saved arguments."""
    x_BRK, kernels = saved
    schedule = plan.schedule("all_gather_matmul")
    rows_per_piece = schedule.piece_rows(dys[0].shape[1])

    def kernel_parts(totals: KernelTuple, number: Array, rows: Array) -> KernelTuple:
        return tuple(
            t + _kernel_part(rows, rows_of(dy, number, rows_per_piece))
            for t, dy in zip(totals, dys, strict=True)
        )

    # Sums over pieces in float32, so that a gradient is rounded once, however many ranks there are.
    zeros = tuple(jnp.zeros(kernel.shape, jnp.float32) for kernel in kernels)
    totals = gather(schedule, plan.axis_name, x_BRK, kernel_parts, zeros)

    def rows(number: Array) -> Array:
        products = [
            _dot(rows_of(dy, number, rows_per_piece), k, 1, jnp.float32)
            for dy, k in zip(dys, kernels, strict=True)
        ]
        # Added before they travel: one reduce-scatter serves all kernels.
        return functools.reduce(jnp.add, products)

    # Two collectives, one after the other: x is gathered for the kernels, dx is scattered.
    dx_BRK = reduce_scattered(plan, rows, x_BRK.dtype)
    return dx_BRK, tuple(total.astype(kernel.dtype) for total, kernel in zip(totals, kernels, strict=True))


all_gather_matmul.defvjp(_gather_forward, gather_backward)


def reduce_scattered(
    plan: OverlapPlan, rows: Callable[[Array], Array], dtype: jnp.dtype
) -> Float[Array, "B _ _"]:
    """This rank's rows, summed over ranks.

    Args:
      rows: number of a piece -> this rank's summand, float32.
      dtype: of the result, and of partial sums while they travel.
    """
    pieces = reduce(plan.schedule("matmul_reduce_scatter"), plan.axis_name, rows, wire_dtype=dtype)
    # Pieces of a shard lie next to each other, so concatenation restores its rows.
    return jnp.concatenate([piece.astype(dtype) for piece in pieces], axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul_reduce_scatter(
    x_BRK: Float[Array, "B _ K"], kernel_KN: Float[Array, "K N"], plan: OverlapPlan
) -> Array:
    """This rank's rows of `x @ kernel` summed over ranks, [B, R / ranks, N]."""
    rows_per_piece = plan.schedule("matmul_reduce_scatter").piece_rows(x_BRK.shape[1])

    def rows(number: Array) -> Array:
        return _dot(rows_of(x_BRK, number, rows_per_piece), kernel_KN, 0, jnp.float32)

    return reduce_scattered(plan, rows, x_BRK.dtype)


def _scatter_forward(x_BRK: Array, kernel_KN: Array, plan: OverlapPlan) -> tuple[Array, tuple[Array, Array]]:
    return matmul_reduce_scatter(x_BRK, kernel_KN, plan), (x_BRK, kernel_KN)


def scatter_backward(plan: OverlapPlan, saved: tuple[Array, Array], dy_BRN: Array) -> tuple[Array, Array]:
    """Gradients of `matmul_reduce_scatter` with respect to its saved arguments."""
    x_BRK, kernel_KN = saved
    schedule = plan.schedule("all_gather_matmul")
    rows_per_piece = schedule.piece_rows(x_BRK.shape[1])

    def visit(carry: tuple[Array, Array], number: Array, dy: Array) -> tuple[Array, Array]:
        dx, total = carry
        # Each piece of dy serves both gradients as it arrives; x is local, so nothing else is sent.
        dx = put(dx, number, _dot(dy, kernel_KN, 1, dx.dtype))
        return dx, total + _kernel_part(rows_of(x_BRK, number, rows_per_piece), dy)

    start = jax.lax.empty(x_BRK.shape, x_BRK.dtype), jnp.zeros(kernel_KN.shape, jnp.float32)
    dx_BRK, total = gather(schedule, plan.axis_name, dy_BRN, visit, start)
    return dx_BRK, total.astype(kernel_KN.dtype)


matmul_reduce_scatter.defvjp(_scatter_forward, scatter_backward)
