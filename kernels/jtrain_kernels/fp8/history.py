"""Delayed scaling: a tensor is scaled by its largest amax in previous steps.

Scaling by the tensor's current amax needs one more pass over the tensor; a scale that is known beforehand
lets XLA fuse the cast with the producer of the tensor. The scale is also the same for all devices and
microbatches of a step, so their number does not change the results. Source: arXiv:2209.05433 section 3.3, and
NVIDIA's Transformer Engine.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrain_kernels.fp8.formats import FORWARD, GRADIENT, scale_of

ROLES = ("x", "kernel", "gradient")
"""The three tensors of a matmul, in the order of every array here."""

STEPS = 16
"""Length of the history in steps. Long enough to remember an outlier for some steps, short enough that
gradients, which shrink by orders of magnitude in the first hundreds of steps of a run, do not fall below the
range."""

MARGIN = 1
"""Headroom in powers of two: twofold growth from one step to the next is not clipped. It costs range (e4m3
has 18 powers of two, e5m2 has 32), not precision."""

FIRST_X = 64.0
"""Assumed amax of activations before the first step: values above 224 are clipped, which keeps normalised
activations, and values below 2^-7 are rounded more coarsely."""

FIRST_GRADIENT = 128.0
"""Assumed amax of gradients before the first step, in units of `unit`: 2^-21 to 256 units round normally."""


def empty(num_layers: int) -> Float[Array, "Y 3 S"]:
    """History before the first step."""
    return jnp.zeros((num_layers, len(ROLES), STEPS), jnp.float32)


def pushed(history_Y3S: Float[Array, "Y 3 S"], seen_Y3: Float[Array, "Y 3"]) -> Float[Array, "Y 3 S"]:
    """History with this step's amax values at the front and the oldest removed."""
    return jnp.concatenate([seen_Y3[..., None], history_Y3S[..., :-1]], axis=-1)


def scales(history_Y3S: Float[Array, "Y 3 S"], unit: Float[Array, ""]) -> Float[Array, "Y 3"]:
    """Scale of each role's tensor in this step.

    Args:
      unit: order of magnitude of a gradient in the first step: 1 / tokens of the batch.
    """
    amax_Y3 = jnp.max(history_Y3S, axis=-1)
    first_3 = jnp.stack([jnp.float32(FIRST_X), jnp.float32(1), FIRST_GRADIENT * unit])
    # 0: not seen yet, as before the first step.
    amax_Y3 = jnp.where(amax_Y3 > 0, amax_Y3, first_3[None])
    forward_Y2 = scale_of(amax_Y3[:, :2], FORWARD, margin=MARGIN)
    return jnp.concatenate([forward_Y2, scale_of(amax_Y3[:, 2:], GRADIENT, margin=MARGIN)], axis=-1)
