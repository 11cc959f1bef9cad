"""Grouped matmul as a loop over blocks of rows, each of one group; the number of blocks is known at run time.

This is for back ends whose compiler makes `ragged_dot` dense (XLA:CPU and XLA:GPU multiply every row with
every matrix and keep one of the results). Here the work is proportional to the rows in groups, rounded up to
blocks. Rows without a group cost nothing, so a buffer sized for the worst case costs only memory.

Example: groups of 3, 0 and 4 rows in a buffer of 10, blocks of 2 rows. Blocks start at 0 and 2 (group 0),
then at 3 and 5 (group 2; group 1 has no rows): four products of 2 rows. The block at 2 writes rows 2 and 3,
and the block at 3 overwrites row 3. Rows 7 to 9 belong to no group and are never read.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def matmul(
    x_TI: Float[Array, "T I"],
    kernel: Float[Array, "X _ _"],
    group_size_X: Int[Array, " X"],
    *,
    transposed: bool,
    block_rows: int,
) -> Float[Array, "T O"]:
    """Multiplies rows with their group's matrix, summed in float32; undefined in rows of no group.

    Args:
      kernel: [X, I, O], or [X, O, I] if `transposed`.
      block_rows: rows per product.
    """
    num_rows = x_TI.shape[0]
    out_dim = kernel.shape[1 if transposed else 2]
    blocks = _Blocks(group_size_X, block_rows)
    # One block more than rows, because a slice that starts in the last rows would be moved back.
    padded_TI = jnp.pad(x_TI, ((0, block_rows), (0, 0)))

    def body(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        group, start, y_TO = carry
        x_bI = jax.lax.dynamic_slice_in_dim(padded_TI, start, block_rows)
        matrix = jax.lax.dynamic_index_in_dim(kernel, group, keepdims=False)
        contracted = ((1,), (1 if transposed else 0,))
        y_bO = jax.lax.dot_general(x_bI, matrix, (contracted, ((), ())), preferred_element_type=x_TI.dtype)
        # Rows past the group's end belong to later groups, whose blocks come later and overwrite them.
        y_TO = jax.lax.dynamic_update_slice_in_dim(y_TO, y_bO, start, axis=0)
        return *blocks.after(group, start), y_TO

    # Zeros, although rows of no group are undefined: uninitialised memory might hold nan.
    first = (*blocks.first, jnp.zeros((num_rows + block_rows, out_dim), x_TI.dtype))
    _, _, y_TO = jax.lax.while_loop(lambda carry: blocks.remain(carry[0]), body, first)
    return y_TO[:num_rows]


def kernel_gradient(
    x_TI: Float[Array, "T I"], dy_TO: Float[Array, "T O"], group_size_X: Int[Array, " X"], *, block_rows: int
) -> Float[Array, "X I O"]:
    """`x^T dy` for each group, float32; zeros for a group without rows."""
    blocks = _Blocks(group_size_X, block_rows)
    # As above: a slice that starts in the last rows would be moved back.
    padded_TI, padded_TO = (jnp.pad(a, ((0, block_rows), (0, 0))) for a in (x_TI, dy_TO))

    def body(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        group, start, sum_XIO = carry
        x_bI = jax.lax.dynamic_slice_in_dim(padded_TI, start, block_rows)
        dy_bO = jax.lax.dynamic_slice_in_dim(padded_TO, start, block_rows)
        # In the gradient, rows past the group's end would add to the wrong group, so they become zero.
        mine_b1 = (start + jnp.arange(block_rows) < blocks.end_X[group])[:, None]
        x_bI, dy_bO = (jnp.where(mine_b1, a, 0) for a in (x_bI, dy_bO))
        part_IO = jax.lax.dot_general(
            x_bI, dy_bO, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        # Added to the group's sum so far, as a group may have several blocks.
        part_IO += jax.lax.dynamic_index_in_dim(sum_XIO, group, keepdims=False)
        return *blocks.after(group, start), jax.lax.dynamic_update_index_in_dim(sum_XIO, part_IO, group, 0)

    zeros_XIO = jnp.zeros((group_size_X.shape[0], x_TI.shape[1], dy_TO.shape[1]), jnp.float32)
    return jax.lax.while_loop(lambda carry: blocks.remain(carry[0]), body, (*blocks.first, zeros_XIO))[2]


class _Blocks:
    """Positions of blocks: each starts where the previous one ends, or at the first row of a group."""

    def __init__(self, group_size_X: Int[Array, " X"], block_rows: int) -> None:
        self.block_rows = block_rows
        self.num_groups = group_size_X.shape[0]
        self.end_X = jnp.cumsum(group_size_X).astype(jnp.int32)

    def _group_of(self, row: Array) -> Array:
        """Group of a row, or the number of groups for a row past the last one; skips groups without rows."""
        # All groups that end at or before the row lie before it; empty groups end where they start.
        return jnp.sum(self.end_X <= row).astype(jnp.int32)

    @property
    def first(self) -> tuple[Array, Array]:
        """Group and first row of the first block."""
        start = jnp.zeros((), jnp.int32)
        return self._group_of(start), start

    def after(self, group: Array, start: Array) -> tuple[Array, Array]:
        """Group and first row of the block after this one."""
        # At the group's end at the latest, so that the next group's first row starts a block.
        start = jnp.minimum(start + self.block_rows, self.end_X[group])
        return self._group_of(start), start

    def remain(self, group: Array) -> Array:
        """True if `group` is a valid group, so that blocks remain."""
        return group < self.num_groups
