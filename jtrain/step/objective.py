"""How a step's sums over tokens become the loss: by which number they are divided, and what each token weighs.

Example: a batch of two answers, of 3 and of 1 token, with losses 1, 1, 1 and 5 nats. `tokens` has 8 / 4 = 2
nats; `per_sample` has (1 + 5) / 2 = 3. Both are means over the global batch: however it is split over devices,
microbatches, context or rows, the loss and its gradient are the same.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain.layout.dims import IGNORE, Batch
from jtrain.layout.layout import Layout
from jtrain.layout.mesh import BATCH_AXES
from jtrain.step.zero import psum_batch


@dataclasses.dataclass(frozen=True)
class ObjectiveSpec:
    """Loss that a step minimises.

    mean: `tokens`: the mean over all targets of the global batch, so that a long answer counts as much as its
      tokens; `per_sample`: the mean over samples of each one's mean, so that all answers count alike. A
      sample is a document's piece in a row; a chat that `on_too_long` splits is several.
    """

    mean: Literal["tokens", "per_sample"] = "tokens"


TOKENS = ObjectiveSpec()


@dataclasses.dataclass(frozen=True)
class LossScale:
    """Numbers of the global batch, the same on every device.

    num_tokens: valid targets.
    unit: 1 / targets, or 1 / samples.
    targets_per_token: targets, or samples, over tokens that are not padding; None for a model without a router.
    """

    num_tokens: Int[Array, ""]
    unit: Float[Array, ""]
    targets_per_token: Float[Array, ""] | None


def scale_of(
    layout: Layout, batch: Batch, spec: ObjectiveSpec = TOKENS, *, has_router: bool
) -> tuple[LossScale, Batch]:
    """Returns the scale of one device's sums, and its batch with the weights of the targets."""
    num_tokens = psum_batch(layout, jnp.sum(batch.target_BL != IGNORE))
    denominator = num_tokens
    if spec.mean == "per_sample":
        weight_BL, denominator = _weigh_samples(layout, batch)
        batch = dataclasses.replace(batch, weight_BL=weight_BL)
    # Accumulation is exact because each microbatch is divided by the count of the whole batch, not its own.
    unit = 1.0 / jnp.maximum(denominator, 1).astype(jnp.float32)
    share = None
    if has_router:
        # A router sees prompts as well: divided by the targets alone, its losses would grow with the prompts.
        num_read = psum_batch(layout, jnp.sum(batch.segment_BL != 0))
        share = 1.0 / (unit * jnp.maximum(num_read, 1).astype(jnp.float32))
    return LossScale(num_tokens, unit, share), batch


def _weigh_samples(layout: Layout, batch: Batch) -> tuple[Float[Array, "B L"], Int[Array, ""]]:
    """Returns 1 / targets of the sample of each token, and the number of samples with a target."""
    context = layout.mesh.context
    rows, length = batch.target_BL.shape
    valid_BL = batch.target_BL != IGNORE
    # A row has at most as many segments as tokens; 0 is padding.
    row_B1 = jnp.arange(rows)[:, None]
    count_BS = jnp.zeros((rows, length * context + 1), jnp.int32)
    count_BS = count_BS.at[row_B1, batch.segment_BL].add(valid_BL.astype(jnp.int32))
    if context > 1:
        # A sample may lie on several devices.
        count_BS = jax.lax.psum(count_BS, "context")
    count_BL = jnp.maximum(count_BS[row_B1, batch.segment_BL], 1)
    axes = tuple(axis for axis in BATCH_AXES if layout.mesh.shape[axis] > 1)
    num_samples = jax.lax.psum(jnp.sum(count_BS > 0), axes)
    return jnp.where(valid_BL, 1.0 / count_BL.astype(jnp.float32), 0.0), num_samples
