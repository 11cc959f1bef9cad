"""Gradient of a weight on CPUs, by a transpose that runs at matmul speed."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain_kernels.linear.reference import contract


def transposed(x_TC: Float[Array, "T C"]) -> Float[Array, "C T"]:
    """`x.T` in memory, as `identity @ x.T`.

    XLA:CPU's own transpose, also inside a matmul whose left operand is contracted over its first dimension,
    walks memory by columns and costs more than the matmul. A matmul contracted over both last dimensions runs
    at full speed. Every sum has one non-zero term, so the result is exact if all values are finite; one inf
    or nan makes its whole column nan.
    """
    return contract(jnp.eye(x_TC.shape[1], dtype=x_TC.dtype), x_TC, 1, 1, x_TC.dtype)


def kernel_gradient_cpu(
    x_TI: Float[Array, "T I"], dy_TO: Float[Array, "T O"], dtype: jax.typing.DTypeLike
) -> Float[Array, "I O"]:
    """`x^T dy`, computed by transposing the narrower of the two in memory first."""
    if x_TI.shape[1] <= dy_TO.shape[1]:
        return contract(transposed(x_TI), dy_TO, 1, 0, dtype)
    # Otherwise dy is the narrower one: dy^T x is computed, and the result transposed back.
    return transposed(contract(transposed(dy_TO), x_TI, 1, 0, dtype))
