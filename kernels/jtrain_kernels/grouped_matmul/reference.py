"""Reference grouped matmul: every row times every matrix, of which one product is kept; differentiated by
JAX.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def grouped_matmul_reference(
    x_TI: Float[Array, "T I"], kernel_XIO: Float[Array, "X I O"], group_size_X: Int[Array, " X"]
) -> Float[Array, "T O"]:
    """Multiplies each row of group x with `kernel_XIO[x]`, at X times the work; zeros in rows without a
    group.
    """
    end_X = jnp.cumsum(group_size_X)
    row_T = jnp.arange(x_TI.shape[0])
    mine_TX = (row_T[:, None] >= (end_X - group_size_X)[None, :]) & (row_T[:, None] < end_X[None, :])
    all_TXO = jnp.einsum("ti,xio->txo", x_TI, kernel_XIO)
    return jnp.sum(jnp.where(mine_TX[..., None], all_TXO, 0), axis=1)
