"""Embedding and loss of a pipelined model, split over (stage, tensor): every stage has a part of the
vocabulary.

All stages compute both at the same time, so that no stage has the head's work on top of its layers, and a
tied table is one array like any other (arXiv:2411.05288). Whoever calls must do so in the same ticks on all
stages: the functions sum over `stage`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jtrain.layout.dims import IGNORE
from jtrain.layout.layout import Layout
from jtrain.model.forward_placement import Placement
from jtrain.model.param import Params
from jtrain.model.transformer import Transformer
from jtrain.step.zero import attach_values


@dataclasses.dataclass(frozen=True)
class Ends:
    """Embedding and loss: the parts before the first and after the last layer.

    params: the worker's parameters.
    embed_worker, head_worker: workers of the first and the last virtual stage.
    """

    model: Transformer
    layout: Layout
    placement: Placement
    params: Params
    embed_worker: int
    head_worker: int

    def embed(self, trained: Params, token_BL: Int[Array, "B L"]) -> Float[Array, "B _ D"]:
        """Embedding rows of the tokens, the same on every stage."""
        part_BLD = self.model.embed(self._weights(trained), token_BL, self.placement)
        with jax.named_scope("embed"):
            return jax.lax.psum(part_BLD, "stage")  # of each row one stage has a term that is not zero

    def embed_gradient(
        self, trained: Params, token_BL: Int[Array, "B L"], dx_BLD: Float[Array, "B _ D"]
    ) -> Params:
        """Gradients of `trained` from that of the embedding on the worker `embed_worker`."""
        with jax.named_scope("embed"):
            dx_BLD = jax.lax.psum(self._mask_others(self.embed_worker, dx_BLD), "stage")
        # Every stage adds its rows to the sum, so each row's gradient is that of the sum.
        # Embedding is linear in the table, so its forward pass here is unused and XLA drops it.
        _, vjp = jax.vjp(
            lambda weights: self.model.embed(self._weights(weights), token_BL, self.placement), trained
        )
        return vjp(dx_BLD)[0]

    def loss(
        self,
        trained: Params,
        y_BLD: Float[Array, "B _ D"],
        target_BL: Int[Array, "B L"],
        unit: Float[Array, ""],
    ) -> tuple[Float[Array, ""], Params, Float[Array, "B _ D"]]:
        """This device's share of the loss in nats, and the gradients of `trained` and of y.

        Each stage gets a part of the tokens of the worker `head_worker`, and the op gathers them, chunk by
        chunk.

        Args:
          y_BLD: output of the last layer on `head_worker`; not used on others.
          unit: 1 / tokens of the batch.

        Returns:
          The gradient of y is the same on every stage.
        """
        # Each stage takes 1 / stages of the tokens through the norm; the op itself gathers them for every
        # part of V.
        own_TD, own_target_T = self._own_tokens(y_BLD), self._targets_by_owner(target_BL, y_BLD)

        def objective(trained: Params, x_TD: Array) -> tuple[Array, Array]:
            weights = self._weights(trained)
            x_BLD = self.model.normed(weights, x_TD[None], self.placement)
            total, nats = self.model.cross_entropy(weights, x_BLD, own_target_T[None], self.placement)
            return total * unit, nats * unit

        differentiate = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)
        # The head keeps nothing from tick to tick: its gradients are taken in the tick of its loss.
        (_, nats), (grads, dx_TD) = differentiate(trained, own_TD)
        return nats, grads, self._gather_owners(dx_TD, y_BLD)

    def nats(
        self, trained: Params, y_BLD: Float[Array, "B _ D"], target_BL: Int[Array, "B L"]
    ) -> Float[Array, "B _"]:
        """Cross entropy of each token at this device's positions along `tensor`, the same on every stage."""
        weights = self._weights(trained)
        # [None]: this stage's tokens as one row, for a model that takes [B, L].
        x_BLD = self.model.normed(weights, self._own_tokens(y_BLD)[None], self.placement)
        target_BL = self._targets_by_owner(target_BL, y_BLD)[None]
        own_T = self.model.nats_of(weights, x_BLD, target_BL, self.placement)[0]
        return self._gather_owners(own_T[:, None], y_BLD[..., :1])[..., 0]

    def _weights(self, trained: Params) -> Params:
        return attach_values(self.layout, {**self.params, **trained}, self.params)

    def _mask_others(self, worker: int, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        return jnp.where(jax.lax.axis_index("stage") == worker, x, jnp.zeros_like(x))

    def _own_tokens(self, y_BLD: Float[Array, "B _ D"]) -> Float[Array, "T D"]:
        """This stage's part of the tokens of `head_worker`."""
        y_TD = _pad_tokens(y_BLD.reshape(-1, y_BLD.shape[-1]), self.placement.stage)
        with jax.named_scope("loss"):
            # A sum of one stage's values and zeros: a scatter from `head_worker` that SPMD can express.
            return jax.lax.psum_scatter(self._mask_others(self.head_worker, y_TD), "stage", tiled=True)

    def _gather_owners(self, x_TD: Shaped[Array, "T D"], like_BLD: Array) -> Shaped[Array, "B _ D"]:
        """The tokens of all stages, in the shape of `like_BLD`."""
        rows, length, _ = like_BLD.shape
        with jax.named_scope("loss"):
            x_TD = jax.lax.all_gather(x_TD, "stage", axis=0, tiled=True)
        return x_TD[: rows * length].reshape(rows, length, -1)

    def _targets_by_owner(self, target_BL: Int[Array, "B L"], like_BLD: Any) -> Int[Array, " T"]:
        """Targets of all tokens, by the device along (stage, tensor) that has the token."""
        tensor, stage, rows = self.placement.tensor, self.placement.stage, target_BL.shape[0]
        # Tokens lie [tensor][stage] after the sequence split, but the op numbers devices (stage, tensor).
        by_tensor = target_BL.reshape(rows, tensor, like_BLD.shape[1]).swapaxes(0, 1).reshape(tensor, -1)
        # Padded tokens have no target and add no loss.
        padded = jnp.stack([_pad_tokens(target_T, stage, IGNORE) for target_T in by_tensor])
        return padded.reshape(tensor, stage, -1).swapaxes(0, 1).reshape(-1)


def _pad_tokens(x: Shaped[Array, "T ..."], stage: int, fill: int = 0) -> Shaped[Array, "_ ..."]:
    """Tokens with as many more as make them split evenly over stages."""
    num_padding = -x.shape[0] % stage
    return (
        jnp.pad(x, ((0, num_padding), *((0, 0),) * (x.ndim - 1)), constant_values=fill) if num_padding else x
    )
