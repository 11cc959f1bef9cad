"""Losses of preference pairs from the log-probabilities of their texts, and the weights of tokens that have
their gradients.

A row holds pairs: pair p has segments 2 p - 1, the better text, and 2 p, the worse one. The loss of a pair is
a function of two sums over its tokens, so its gradient is that of `sum(weight * nats)`, where a token weighs
the derivative of the loss by the sum that the token is in.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain.layout.dims import Batch
from jtrain.layout.layout import Layout
from jtrain.step.objective import DPO, count_targets, sum_texts

PAIR_MEANS = ("reward_margin", "accuracy")
"""Means over pairs that a step returns beside their loss."""

type PairMetrics = dict[str, Float[Array, ""]]
"""Sums over pairs: `loss`, `reward_margin` and `accuracy`."""


def pair_losses(
    spec: DPO, score_BP2: Float[Array, "B pairs 2"], count_BP2: Int[Array, "B pairs 2"]
) -> tuple[Float[Array, "B pairs"], Float[Array, "B pairs"]]:
    """Returns the loss of each pair, and beta times the difference of its scores, the margin of its rewards.

    Args:
      score_BP2: log-probability of each text, less that of the reference.
      count_BP2: targets of each text.

    Source: arXiv:2305.18290 (sigmoid), 2310.12036 with means over tokens (ipo), 2405.14734 (simpo).
    """
    if spec.form != "sigmoid":
        score_BP2 = score_BP2 / jnp.maximum(count_BP2, 1).astype(jnp.float32)
    delta_BP = score_BP2[..., 0] - score_BP2[..., 1]
    margin_BP = spec.beta * delta_BP
    if spec.form == "ipo":
        return jnp.square(delta_BP - 0.5 / spec.beta), margin_BP
    return jax.nn.softplus(spec.margin - margin_BP), margin_BP


def weigh_tokens(
    layout: Layout, spec: DPO, batch: Batch, nats_BL: Float[Array, "B _"]
) -> tuple[Float[Array, "B L"], PairMetrics]:
    """Returns the weight of each token in a sum of nats that has the gradient of all pairs' losses, and this
    device's share of the sums over pairs.

    Args:
      batch: rows of pairs; `reference_BL` at the same positions as `nats_BL`.
      nats_BL: cross entropy of this device's tokens along `tensor`.
    """
    tensor, context = layout.mesh.tensor, layout.mesh.context
    # Token by token: of sums of thousands of nats a small difference would be lost.
    score_BL = (0.0 if batch.reference_BL is None else batch.reference_BL) - nats_BL
    count_BP2 = count_targets(layout, batch)
    is_pair_BP = jnp.all(count_BP2 > 0, axis=-1)

    def total(score_BP2: Float[Array, "B pairs 2"]) -> tuple[Float[Array, ""], PairMetrics]:
        loss_BP, margin_BP = pair_losses(spec, score_BP2, count_BP2)
        values = {
            "loss": loss_BP,
            "reward_margin": margin_BP,
            "accuracy": (margin_BP > 0).astype(jnp.float32),
        }
        sums = {name: jnp.sum(x, where=is_pair_BP) for name, x in values.items()}
        return sums["loss"], sums

    grad_BP2, sums = jax.grad(total, has_aux=True)(sum_texts(layout, batch, score_BL, split=tensor))
    grad_BS = jnp.pad(grad_BP2.reshape(len(grad_BP2), -1), ((0, 0), (1, 0)))
    # A score falls as nats rise.
    weight_BL = -grad_BS[jnp.arange(len(grad_BS))[:, None], batch.segment_BL]
    # All devices of a row have its sums.
    copies = tensor * context * layout.mesh.stage
    return weight_BL, {name: value / copies for name, value in sums.items()}
