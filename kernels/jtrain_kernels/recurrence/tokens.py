"""Recurrences token by token: the references of the chunked ops."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

type Token = tuple[Array, ...]
"""Arrays of one token, [B, ...]."""


def scan_tokens(
    step: Callable[[Array, Token], tuple[Array, Array]],
    tokens: tuple[Array, ...],
    segment_BL: Int[Array, "B L"],
    state_BNHP: Float[Array, "B N H P"],
    segment_B: Int[Array, " B"],
) -> tuple[Float[Array, "B L N P"], Float[Array, "B N H P"]]:
    """Results of all tokens and the last state, with zeros where a document starts.

    Args:
      step: state and token -> next state and result.
      tokens: [B, L, ...] each.
      state_BNHP: state before the row, of the document `segment_B`.
    """

    def next_token(
        carry: tuple[Array, Array], token: tuple[Array, Token]
    ) -> tuple[tuple[Array, Array], Array]:
        (state, last_B), (segment_B, values) = carry, token
        is_padding_B = segment_B == 0
        # Padding ends no document.
        continues_B = is_padding_B | (segment_B == last_B)
        state = jnp.where(continues_B[:, None, None, None], state, 0.0)
        next_state, y_BNP = step(state, values)
        # The state after padding is the one before it; the result there means nothing.
        state = jnp.where(is_padding_B[:, None, None, None], state, next_state)
        return (state, jnp.where(is_padding_B, last_B, segment_B)), y_BNP

    inputs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (segment_BL, tokens))
    (state, _), y_LBNP = jax.lax.scan(next_token, (state_BNHP, segment_B), inputs)
    return jnp.moveaxis(y_LBNP, 0, 1), state
