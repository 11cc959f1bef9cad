"""Documents in packed rows, and the state that a recurrence carries from one call to the next.

A recurrence starts anew where a document starts: where the segment differs from that of the token before.
Padding (segment 0) leaves the state as it is and ends no document, so that the state after a padded prompt is
the one after its last token.

This module numbers documents. The state is reset where an op reads and writes it: in its chunked.py.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecurrentState:
    """State of a recurrence after a token, for the next tokens of the same rows.

    state_BNHP: float32; keys of size H to values of size P (for Mamba-2, state size to head size).
    segment_B: segment of the last token that is no padding; 0 before the first. Tokens of another segment
      start from zeros.
    """

    state_BNHP: Any
    segment_B: Any


def empty_state(batch: int, heads: int, key_size: int, value_size: int) -> RecurrentState:
    """State before the first token."""
    return RecurrentState(
        jnp.zeros((batch, heads, key_size, value_size), jnp.float32), jnp.zeros(batch, jnp.int32)
    )


def fill_padding(segment_BL: Int[Array, "B L"], first_B: Int[Array, " B"]) -> Int[Array, "B L"]:
    """Segments with padding replaced by the segment before it; `first_B` comes before the row.

    Example: 0 1 1 0 2 0 after 7 becomes 7 1 1 1 2 2.
    """
    position_BL = jnp.where(segment_BL > 0, jnp.arange(segment_BL.shape[1])[None], -1)
    last_BL = jax.lax.cummax(position_BL, axis=1)
    filled_BL = jnp.take_along_axis(segment_BL, jnp.maximum(last_BL, 0), axis=1)
    return jnp.where(last_BL >= 0, filled_BL, first_B[:, None])


def number_documents(
    segment_BL: Int[Array, "B L"], first_B: Int[Array, " B"]
) -> tuple[Int[Array, "B L"], Int[Array, " B"]]:
    """Number of each token's document within the row, and the segment after the row.

    Document 0 is the one of `first_B`, which goes on; each change of the segment starts the next one. Unlike
    segments, numbers never repeat in a row.
    """
    filled_BL = fill_padding(segment_BL, first_B)
    before_BL = jnp.concatenate([first_B[:, None], filled_BL[:, :-1]], axis=1)
    return jnp.cumsum(filled_BL != before_BL, axis=1, dtype=jnp.int32), filled_BL[:, -1]


def mask_padding(
    x_BLN: Float[Array, "B L *dims"], segment_BL: Int[Array, "B L"]
) -> Float[Array, "B L *dims"]:
    """Float32 values, 0 at padding: a log-decay or a step size with which a token leaves the state as it
    is.
    """
    valid_BL = jnp.expand_dims(segment_BL > 0, tuple(range(2, x_BLN.ndim)))
    return jnp.where(valid_BL, x_BLN.astype(jnp.float32), 0.0)
