"""Moves of arrays in a tick: from one stage to the next, and into the slot in which they wait."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jtrain.pipeline.schedule import StageHop
from jtrain.pipeline.tick_grid import NONE


def send(x_BLD: Array, hop: StageHop, stages: int, *, back: bool) -> Array:
    """Returns the array that arrives over `hop`, from one of `stages` workers.

    Args:
      back: True for cotangents, which WRAP from the first worker to the last.
    """
    # Both virtual stages are on this worker: nothing is sent.
    if hop == StageHop.LOCAL:
        return x_BLD
    if hop == StageHop.WRAP:
        pairs = [(0, stages - 1)] if back else [(stages - 1, 0)]
    else:
        down_chain = [(worker, worker + 1) for worker in range(stages - 1)]
        # Chains over all workers; receivers without a slot for what arrives drop it.
        pairs = down_chain if hop == StageHop.DOWN else [(upper, lower) for lower, upper in down_chain]
    with jax.named_scope("pipeline"):
        return jax.lax.ppermute(x_BLD, "stage", pairs)


def store(slots: Array, slot: Array, x: Array) -> Array:
    """Returns `slots` with x in one of them; as they are if it is NONE."""
    # NONE is -1: slot 0 is then rewritten with its own value, which costs no branch.
    index = jnp.maximum(slot, 0)
    current = jax.lax.dynamic_index_in_dim(slots, index, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(slots, jnp.where(slot == NONE, current, x), index, 0)
