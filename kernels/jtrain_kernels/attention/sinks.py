"""Attention sinks: a learned score per head that takes part in the softmax's denominator, without a value.

A sink is one more key, of which the result has nothing. Results and log-partitions of any implementation
become those with a sink afterwards, and backward passes that are given them compute the gradients with a
sink, as they do for the blocks of a ring; so every implementation with passes serves sinks.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float


def with_sink(
    y_BLNP: Float[Array, "B L N P"], lse_BNL: Float[Array, "B N L"], sink_N: Float[Array, " N"] | None
) -> tuple[Float[Array, "B L N P"], Float[Array, "B N L"]]:
    """Results and log-partitions with the sink of each head; unchanged without sinks."""
    if sink_N is None:
        return y_BLNP, lse_BNL
    total_BNL = jnp.logaddexp(lse_BNL, sink_N.astype(jnp.float32)[None, :, None])
    # The share of the softmax's mass that is left to the keys.
    share_BLN1 = jnp.exp(lse_BNL - total_BNL).swapaxes(1, 2)[..., None]
    return (y_BLNP.astype(jnp.float32) * share_BLN1).astype(y_BLNP.dtype), total_BNL


def sink_gradient(
    y_BLNP: Float[Array, "B L N P"],
    lse_BNL: Float[Array, "B N L"],
    dy_BLNP: Float[Array, "B L N P"],
    sink_N: Float[Array, " N"] | None,
) -> Float[Array, " N"] | None:
    """Gradient of the sinks, from the results and log-partitions that `with_sink` returned."""
    if sink_N is None:
        return None
    delta_BLN = jnp.sum(y_BLNP.astype(jnp.float32) * dy_BLNP.astype(jnp.float32), axis=-1)
    # A score's gradient is its probability times (value * dy - delta), and a sink has no value.
    share_BNL = jnp.exp(sink_N.astype(jnp.float32)[None, :, None] - lse_BNL)
    return -jnp.einsum("bnl,bln->n", share_BNL, delta_BLN).astype(sink_N.dtype)
