"""Overlapped collectives in plain JAX: `ppermute` and matmuls, with gradients that are overlapped too.

| op | gradient of x | gradient of the kernel |
|---|---|---|
| all_gather_matmul | matmul_reduce_scatter of dy and the transposed kernel | x is gathered again, piece by piece |
| matmul_reduce_scatter | all_gather_matmul of dy and the transposed kernel | from the pieces of dy as they come by |
| matmul_all_reduce | the same after a reduce-scatter of dy | the same |

So a layer keeps its shard of x for the backward pass, never the gathered x. Sums over ranks and over pieces are
float32, rounded to x's dtype only to travel; gradients of kernels are rounded once.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain_kernels.overlap.emit import gather, put, reduce, rows_of
from jtrain_kernels.overlap.schedule import OpName, Schedule, make_schedule
from jtrain_kernels.overlap.swizzle import Swizzle

type Kernels = tuple[Array, ...]


class Plan(NamedTuple):
    """How an op is scheduled over a mesh axis."""

    axis_name: str
    axis_size: int
    swizzle: Swizzle
    parts: int = 1
    torus: tuple[int, ...] = ()

    def schedule(self, op: OpName) -> Schedule:
        return _schedule(op, self)


@functools.cache
def _schedule(op: OpName, plan: Plan) -> Schedule:
    return make_schedule(op, plan.swizzle, plan.axis_size, parts=plan.parts, torus=plan.torus)


def _dot(x_BRK: Array, kernel: Array, kernel_dim: int, dtype: jax.typing.DTypeLike) -> Float[Array, "B _ _"]:
    """Rows of x times the kernel, which is contracted over `kernel_dim`."""
    dims = (((2,), (kernel_dim,)), ((), ()))
    return jax.lax.dot_general(x_BRK, kernel.astype(x_BRK.dtype), dims, preferred_element_type=dtype)


def _kernel_part(x_BRK: Array, dy_BRN: Array) -> Float[Array, "K N"]:
    """These rows' part of a kernel's gradient."""
    return jax.lax.dot_general(x_BRK, dy_BRN, (((0, 1), (0, 1)), ((), ())), preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def all_gather_matmul(x_BRK: Float[Array, "B _ K"], kernels: Kernels, plan: Plan) -> Kernels:
    """`gathered x @ kernel` of each kernel [K, N], x gathered along its rows, once for all: [B, ranks * R, N] each."""

    def visit(outputs: Kernels, number: Array, rows: Array) -> Kernels:
        return tuple(put(y, number, _dot(rows, k, 0, y.dtype)) for y, k in zip(outputs, kernels, strict=True))

    shape = x_BRK.shape[0], x_BRK.shape[1] * plan.axis_size
    outputs = tuple(jax.lax.empty((*shape, kernel.shape[1]), x_BRK.dtype) for kernel in kernels)
    return gather(plan.schedule("all_gather_matmul"), plan.axis_name, x_BRK, visit, outputs)


def _gather_forward(x_BRK: Array, kernels: Kernels, plan: Plan) -> tuple[Kernels, tuple[Array, Kernels]]:
    return all_gather_matmul(x_BRK, kernels, plan), (x_BRK, kernels)


def gather_backward(plan: Plan, saved: tuple[Array, Kernels], dys: Kernels) -> tuple[Array, Kernels]:
    """Of all_gather_matmul: gradients of its arguments, which were saved."""
    x_BRK, kernels = saved
    schedule = plan.schedule("all_gather_matmul")
    each = schedule.piece_rows(dys[0].shape[1])

    def kernel_parts(totals: Kernels, number: Array, rows: Array) -> Kernels:
        return tuple(t + _kernel_part(rows, rows_of(dy, number, each)) for t, dy in zip(totals, dys, strict=True))

    zeros = tuple(jnp.zeros(kernel.shape, jnp.float32) for kernel in kernels)
    totals = gather(schedule, plan.axis_name, x_BRK, kernel_parts, zeros)

    def rows(number: Array) -> Array:
        products = [_dot(rows_of(dy, number, each), k, 1, jnp.float32) for dy, k in zip(dys, kernels, strict=True)]
        return functools.reduce(jnp.add, products)

    dx_BRK = reduced("matmul_reduce_scatter", plan, rows, x_BRK.dtype)
    return dx_BRK, tuple(total.astype(kernel.dtype) for total, kernel in zip(totals, kernels, strict=True))


all_gather_matmul.defvjp(_gather_forward, gather_backward)


def reduced(op: OpName, plan: Plan, rows: Callable[[Array], Array], dtype: jnp.dtype) -> Float[Array, "B _ _"]:
    """Rows summed over ranks: this rank's, or of an all-reduce all.

    rows: what this rank adds to a piece, by its number, float32.
    """
    schedule = plan.schedule(op)
    pieces = reduce(schedule, plan.axis_name, rows, wire_dtype=dtype)
    if op == "matmul_reduce_scatter":
        return jnp.concatenate([piece.value.astype(dtype) for piece in pieces], axis=1)
    batch, each, columns = pieces[0].value.shape
    whole = jax.lax.empty((batch, each * schedule.num_pieces, columns), dtype)
    for piece in pieces:
        whole = put(whole, piece.number, piece.value.astype(dtype))
    return whole


def _sum(op: OpName, x_BRK: Array, kernel_KN: Array, plan: Plan) -> Array:
    each = plan.schedule(op).piece_rows(x_BRK.shape[1])
    return reduced(op, plan, lambda g: _dot(rows_of(x_BRK, g, each), kernel_KN, 0, jnp.float32), x_BRK.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul_reduce_scatter(x_BRK: Float[Array, "B _ K"], kernel_KN: Float[Array, "K N"], plan: Plan) -> Array:
    """This rank's rows of `x @ kernel` summed over ranks, [B, R / ranks, N]."""
    return _sum("matmul_reduce_scatter", x_BRK, kernel_KN, plan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul_all_reduce(x_BRK: Float[Array, "B _ K"], kernel_KN: Float[Array, "K N"], plan: Plan) -> Array:
    """`x @ kernel` summed over ranks, [B, R, N]: the same bits on every rank."""
    return _sum("matmul_all_reduce", x_BRK, kernel_KN, plan)


def _scatter_forward(x_BRK: Array, kernel_KN: Array, plan: Plan) -> tuple[Array, tuple[Array, Array]]:
    return matmul_reduce_scatter(x_BRK, kernel_KN, plan), (x_BRK, kernel_KN)


def _reduce_forward(x_BRK: Array, kernel_KN: Array, plan: Plan) -> tuple[Array, tuple[Array, Array]]:
    return matmul_all_reduce(x_BRK, kernel_KN, plan), (x_BRK, kernel_KN)


def scatter_backward(plan: Plan, saved: tuple[Array, Array], dy_BRN: Array) -> tuple[Array, Array]:
    """Of matmul_reduce_scatter."""
    x_BRK, kernel_KN = saved
    schedule = plan.schedule("all_gather_matmul")
    each = schedule.piece_rows(x_BRK.shape[1])

    def visit(carry: tuple[Array, Array], number: Array, dy: Array) -> tuple[Array, Array]:
        dx, total = carry
        dx = put(dx, number, _dot(dy, kernel_KN, 1, dx.dtype))
        return dx, total + _kernel_part(rows_of(x_BRK, number, each), dy)

    start = jax.lax.empty(x_BRK.shape, x_BRK.dtype), jnp.zeros(kernel_KN.shape, jnp.float32)
    dx_BRK, total = gather(schedule, plan.axis_name, dy_BRN, visit, start)
    return dx_BRK, total.astype(kernel_KN.dtype)


def reduce_backward(plan: Plan, saved: tuple[Array, Array], dy_BRN: Array) -> tuple[Array, Array]:
    """Of matmul_all_reduce."""
    # As the transpose of `psum`: every rank's dy is its own share of the objective's gradient.
    shard = jax.lax.psum_scatter(dy_BRN, plan.axis_name, scatter_dimension=1, tiled=True)
    return scatter_backward(plan, saved, shard)


matmul_reduce_scatter.defvjp(_scatter_forward, scatter_backward)
matmul_all_reduce.defvjp(_reduce_forward, reduce_backward)
