"""Reference contraction: one matmul in plain JAX."""

import jax
from jaxtyping import Array, Float


def contract(
    a: Float[Array, "..."],
    b: Float[Array, "..."],
    a_dim: int,
    b_dim: int,
    dtype: jax.typing.DTypeLike,
    *,
    precision: jax.lax.Precision | None = None,
) -> Float[Array, "..."]:
    """Contraction of dimension `a_dim` of `a` with dimension `b_dim` of `b`, accumulated in float32."""
    dims = (((a_dim,), (b_dim,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=dtype)


def linear_reference(
    x: Float[Array, "..."], kernel: Float[Array, "..."], num_in: int = 1
) -> Float[Array, "..."]:
    """The contraction of `linear`, differentiated by JAX."""
    dims = (tuple(range(x.ndim - num_in, x.ndim)), tuple(range(num_in)))
    return jax.lax.dot_general(x, kernel.astype(x.dtype), (dims, ((), ())), preferred_element_type=x.dtype)
