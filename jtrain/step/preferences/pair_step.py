"""Preference losses in a train step: the reference of each microbatch, and its objective.

The weight of a token depends on the loss of its pair, which needs the log-probabilities of both texts first.
They cost one more product with the unembedding, and no further pass through the layers. A pipeline computes
the loss of a microbatch while others are in its layers, so there the weights come from a forward pass of
their own.
"""

import dataclasses

import jax
from jaxtyping import Array, Float

from jtrain.layout.dims import Batch
from jtrain.layout.layout import Layout
from jtrain.model.adapters.adapted_kernel import without_adapter
from jtrain.model.forward_placement import Placement
from jtrain.model.param import Params
from jtrain.model.transformer import Transformer
from jtrain.step.objective import DPO, LossScale, own_positions
from jtrain.step.pipelined import pipelined_nats
from jtrain.step.preferences.pair_loss import PairMetrics, weigh_tokens
from jtrain.step.zero import attach_values, placement_of, trained_part


@dataclasses.dataclass(frozen=True)
class PairStep:
    """One device's part of a step with preference pairs.

    params: its parameters, with the heads exchanged.
    """

    spec: DPO
    model: Transformer
    layout: Layout
    params: Params

    def with_reference(self, part: Batch) -> Batch:
        """Returns a microbatch with what its loss takes as the nats of the reference."""
        match self.spec.reference:
            case "none":
                return part
            case "adapter_off":
                with jax.named_scope("reference"):
                    layout, params = self._base()
                    weights = attach_values(layout, trained_part(layout, params), params)
                    nats_BL = self.model.token_nats(weights, part, placement_of(layout))
                return dataclasses.replace(part, reference_BL=nats_BL)
        return dataclasses.replace(part, reference_BL=own_positions(self.layout, part.reference_BL))

    def loss(
        self, weights: Params, part: Batch, placement: Placement, scale: LossScale
    ) -> tuple[Float[Array, ""], PairMetrics]:
        """Returns a sum whose gradient is that of the losses of all pairs, and this device's share of their
        means.

        Args:
          part: from `with_reference`.
        """
        x_BLD, router_losses = self.model.forward(weights, part, placement)
        with jax.named_scope("loss"):
            nats_BL = self.model.nats_of(*jax.lax.stop_gradient((weights, x_BLD)), part.target_BL, placement)
            weight_BL, sums = weigh_tokens(self.layout, self.spec, part, nats_BL)
        total, _ = self.model.cross_entropy(weights, x_BLD, part.target_BL, placement, weight_BL)
        router = self.model.router
        if router is not None and router_losses is not None:
            total += router_losses.mean(router, self.model.num_routers, scale.targets_per_token)
        return total * scale.unit, {name: value * scale.unit for name, value in sums.items()}

    def weigh_pipelined(self, parts: Batch, scale: LossScale) -> tuple[Batch, PairMetrics]:
        """Returns the microbatches of a pipeline with the weights of their tokens, and this device's share of
        the means over pairs.
        """
        with jax.named_scope("reference"):
            match self.spec.reference:
                case "none":
                    reference_MBL = None
                case "adapter_off":
                    layout, params = self._base()
                    reference_MBL = pipelined_nats(self.model, layout, params, parts)
                case "stored":
                    reference_MBL = jax.vmap(lambda x_BL: own_positions(self.layout, x_BL))(
                        parts.reference_BL
                    )
            parts = dataclasses.replace(parts, reference_BL=None)
            nats_MBL = pipelined_nats(self.model, self.layout, self.params, parts)
        weighed = dataclasses.replace(parts, reference_BL=reference_MBL)

        def weigh(_: None, part: tuple[Batch, Array]) -> tuple[None, tuple[Array, PairMetrics]]:
            return None, weigh_tokens(self.layout, self.spec, *part)

        with jax.named_scope("loss"):
            _, (weight_MBL, sums) = jax.lax.scan(weigh, None, (weighed, nats_MBL))
        means = {name: value_M.sum() * scale.unit for name, value_M in sums.items()}
        return dataclasses.replace(parts, weight_BL=weight_MBL), means

    def _base(self) -> tuple[Layout, Params]:
        """Returns layout and parameters of the model without its adapter."""
        return without_adapters(self.layout), without_adapter(self.params)


def without_adapters(layout: Layout) -> Layout:
    """The layout of the frozen model of one with an adapter."""
    params = tuple(p for p in layout.params if not p.info.is_adapter)
    return dataclasses.replace(layout, params=params, adapter_scale=None, adapter_dropout=None)
