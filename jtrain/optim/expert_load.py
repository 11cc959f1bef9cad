"""The update of a mixture's correction bias, which follows the load of experts and no gradient."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain.optim.rounding import round_alone


def step_against_load(
    load_X: Float[Array, "*layers X"], bias_X: Float[Array, "*layers X"], *, rate: float
) -> Float[Array, "*layers X"]:
    """New correction bias: a step up for experts with less than the mean load, down for those with more.

    Source: arXiv:2408.15664, algorithm 1.

    Args:
      load_X: tokens of the global batch that chose each expert.
      rate: the step.
    """
    # Whole numbers, so that an expert with exactly the mean load stays where it is.
    experts, load_X = load_X.shape[-1], load_X.astype(jnp.float32)
    below_mean_X = jnp.sign(jnp.sum(load_X, axis=-1, keepdims=True) - experts * load_X)
    return (bias_X.astype(jnp.float32) + round_alone(rate * below_mean_X)).astype(bias_X.dtype)
