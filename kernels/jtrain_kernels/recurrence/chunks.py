"""Chunks of recurrences: tokens of a chunk are computed at once, chunks one after the other.

Chunks run in groups. Within a group all that does not depend on the state is computed for all chunks at once;
the backward pass keeps one state per group and computes the group again. Arrays are [J, B, L, ...]: chunks of
a group, sequences, tokens of a chunk.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jtrain_kernels.errors import UserError

GROUP_TOKENS = 1024
"""Tokens of a group, at most. Arrays of a group that have no token of another group in them bound the
temporary memory of both passes; one state is kept per group."""

type GroupFn = Callable[[Array, Array, tuple[Array, ...]], tuple[Array, Array]]
"""State before a group, `number_before_chunks` and the arrays of the group -> state after it, and results."""


def scan_groups(
    group: GroupFn, state: Array, document_BL: Int[Array, "B L"], arrays: tuple[Array, ...], chunk: int
) -> tuple[Array, Array]:
    """State after the row and the results of all tokens, [B, L, ...].

    Rows are filled up to whole groups with zeros of the last document.

    Args:
      group: takes arrays of [J, B, L, ...], first the documents, and returns results of that form.
      arrays: [B, L, ...].
    """
    B, L = document_BL.shape
    num_chunks = -(-L // chunk)
    num_groups = -(-num_chunks * chunk // max(GROUP_TOKENS, chunk))
    per_group = -(-num_chunks // num_groups)
    padding = num_groups * per_group * chunk - L

    def grouped(x: Array, **mode: Any) -> Array:
        x = jnp.pad(x, ((0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)), **mode)
        return jnp.moveaxis(x.reshape(B, num_groups, per_group, chunk, *x.shape[2:]), 0, 2)

    def step(carry: tuple[Array, Array], tokens: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        state, before_B = carry
        document_JBL = tokens[0]
        before_JB = jnp.concatenate([before_B[None], document_JBL[:-1, :, -1]])
        state, y = group(state, before_JB, tokens)
        return (state, document_JBL[-1, :, -1]), y

    tokens = (grouped(document_BL, mode="edge"), *map(grouped, arrays))
    # The state before the row belongs to document 0.
    carry = (state, jnp.zeros(B, document_BL.dtype))
    # Common subexpressions need no guard within a scan, whose iterations XLA cannot merge.
    (state, _), y = jax.lax.scan(jax.checkpoint(step, prevent_cse=False), carry, tokens)
    y = jnp.moveaxis(y, 2, 0)
    return state, y.reshape(B, -1, *y.shape[4:])[:, :L]


def check_chunk(op: str, chunk: int) -> None:
    """Checks the length of a chunk.

    Raises:
      UserError: it is no power of two; chunks are halved.
    """
    if chunk < 1 or chunk & (chunk - 1):
        below = 1 << (max(chunk, 1).bit_length() - 1)
        raise UserError(f"{op}: chunk={chunk} must be a power of two. Nearest sizes: {below}, {2 * below}.")


def shorten_chunk(chunk: int, length: int) -> int:
    """Chunk for rows of `length` tokens: a short row is one short chunk."""
    return min(chunk, 1 << (length - 1).bit_length())
