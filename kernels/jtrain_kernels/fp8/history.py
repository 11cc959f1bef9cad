"""Delayed scaling: a tensor is scaled by what was largest in it in the steps before.

Its own largest number would have to be found first, one more pass over the tensor; one that is known beforehand lets
the cast go with whatever makes the tensor. Also it is one number for all devices and microbatches of a step, so
neither changes what is computed. Source: arXiv:2209.05433 section 3.3, and NVIDIA's Transformer Engine.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain_kernels.fp8.formats import FORWARD, GRADIENT, scale_of

ROLES = ("x", "kernel", "gradient")
"""Of a matmul's three tensors, in the order of every array here."""

STEPS = 16
"""How far back. Long enough to remember an outlier for some steps, short enough that gradients, which shrink by orders
of magnitude in a run's first hundreds of steps, do not fall below the range."""

MARGIN = 1
"""Twofold growth from one step to the next is not clipped; it costs range (of which there are 18 powers of two in e4m3
and 32 in e5m2), not precision."""

FIRST_X = 64.0
"""What the largest activation is taken for while none was seen: clipped above 224, which leaves normalised ones whole;
rounded coarser below 2^-7."""

FIRST_GRADIENT = 128.0
"""The same of a gradient, times `unit`: rounded as any other from 2^-21 to 256 units."""


def empty(num_layers: int) -> Float[Array, "Y 3 S"]:
    """No step seen."""
    return jnp.zeros((num_layers, len(ROLES), STEPS), jnp.float32)


def pushed(history_Y3S: Float[Array, "Y 3 S"], seen_Y3: Float[Array, "Y 3"]) -> Float[Array, "Y 3 S"]:
    """The history with this step's largest numbers in front, the oldest gone."""
    return jnp.concatenate([seen_Y3[..., None], history_Y3S[..., :-1]], axis=-1)


def scales(history_Y3S: Float[Array, "Y 3 S"], unit: Float[Array, ""]) -> Float[Array, "Y 3"]:
    """What to scale each role's tensor by in this step.

    Args:
      unit: the order of magnitude of a gradient, for a first step: 1 / tokens of the batch.
    """
    amax_Y3 = jnp.max(history_Y3S, axis=-1)
    first_3 = jnp.stack([jnp.float32(FIRST_X), jnp.float32(1), FIRST_GRADIENT * unit])
    amax_Y3 = jnp.where(amax_Y3 > 0, amax_Y3, first_3[None])
    forward_Y2 = scale_of(amax_Y3[:, :2], FORWARD, margin=MARGIN)
    return jnp.concatenate([forward_Y2, scale_of(amax_Y3[:, 2:], GRADIENT, margin=MARGIN)], axis=-1)
