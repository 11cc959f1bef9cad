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

from jtrain.layout.dims import IGNORE, Batch
from jtrain.layout.layout import Layout
from jtrain.model.forward_placement import Placement
from jtrain.model.layer_scan import LayerCarry
from jtrain.model.param import Params
from jtrain.model.router import RouterLosses
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
        part_BLD = self.model.embed(self.weights(trained), token_BL, self.placement)
        with jax.named_scope("embed"):
            return jax.lax.psum(part_BLD, "stage")  # of each row one stage has a term that is not zero

    def embed_gradient(
        self, trained: Params, token_BL: Int[Array, "B L"], dx_BLD: Float[Array, "B _ D"]
    ) -> Params:
        """Gradients of `trained` from that of the embedding on the worker `embed_worker`."""
        with jax.named_scope("embed"):
            dx_BLD = jax.lax.psum(self.mask_others(self.embed_worker, dx_BLD), "stage")
        # Every stage adds its rows to the sum, so each row's gradient is that of the sum.
        # Embedding is linear in the table, so its forward pass here is unused and XLA drops it.
        _, vjp = jax.vjp(
            lambda weights: self.model.embed(self.weights(weights), token_BL, self.placement), trained
        )
        return vjp(dx_BLD)[0]

    def loss(
        self,
        trained: Params,
        y_BLD: Float[Array, "B _ D"],
        target_BL: Int[Array, "B L"],
        unit: Float[Array, ""],
        weight_BL: Float[Array, "B L"] | None = None,
        soft: Any = None,
    ) -> tuple[Float[Array, ""], Params, Float[Array, "B _ D"]]:
        """This device's share of the loss in nats, and the gradients of `trained` and of y.

        Each stage gets a part of the tokens of the worker `head_worker`, and the op gathers them, chunk by
        chunk.

        Args:
          y_BLD: output of the last layer on `head_worker`; not used on others.
          unit: 1 / tokens of the batch.
          weight_BL, soft: `Batch.weight_BL`, `Batch.soft`.

        Returns:
          The gradient of y is the same on every stage.
        """
        # Each stage takes 1 / stages of the tokens through the norm; the op itself gathers them for every
        # part of V.
        own_TD, own_target_T = self._own_tokens(y_BLD), self._by_owner(target_BL, y_BLD, IGNORE)
        # None has no arrays, and stays None.
        weight_BT, soft_BT = jax.tree.map(lambda x: self._by_owner(x, y_BLD, 0)[None], (weight_BL, soft))

        def objective(trained: Params, x_TD: Array) -> tuple[Array, Array]:
            weights = self.weights(trained)
            x_BLD = self.model.normed(weights, x_TD[None], self.placement)
            # As in `Transformer.loss`.
            more = {} if soft_BT is None else {"soft": soft_BT}
            targets = own_target_T[None], self.placement, weight_BT
            total, nats = self.model.cross_entropy(weights, x_BLD, *targets, **more)
            return total * unit, nats * unit

        differentiate = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)
        # The head keeps nothing from tick to tick: its gradients are taken in the tick of its loss.
        (_, nats), (grads, dx_TD) = differentiate(trained, own_TD)
        return nats, grads, self._gather_owners(dx_TD, y_BLD)

    def nats(
        self, trained: Params, y_BLD: Float[Array, "B _ D"], target_BL: Int[Array, "B L"]
    ) -> Float[Array, "B _"]:
        """Cross entropy of each token at this device's positions along `tensor`, the same on every stage."""
        weights = self.weights(trained)
        target_BL = self._by_owner(target_BL, y_BLD, IGNORE)[None]
        own_T = self.model.nats_of(weights, self._own_normed(weights, y_BLD), target_BL, self.placement)[0]
        return self._gather_owners(own_T[:, None], y_BLD)[..., 0]

    def top_k(self, trained: Params, y_BLD: Float[Array, "B _ D"], k: int) -> Any:
        """`Transformer.top_k_of` at this device's positions along `tensor`, the same on every stage."""
        weights = self.weights(trained)
        said = self.model.top_k_of(weights, self._own_normed(weights, y_BLD), k, self.placement)
        return jax.tree.map(lambda x: self._gather_owners(x[0], y_BLD), said)

    def _own_normed(self, weights: Params, y_BLD: Float[Array, "B _ D"]) -> Float[Array, "1 T D"]:
        # [None]: this stage's tokens as one row, for a model that takes [B, L].
        return self.model.normed(weights, self._own_tokens(y_BLD)[None], self.placement)

    def weights(self, trained: Params) -> Params:
        """Parameters that the forward pass reads."""
        return attach_values(self.layout, {**self.params, **trained}, self.params)

    def mask_others(self, worker: int, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """The array on one worker, and zeros on the others."""
        return jnp.where(jax.lax.axis_index("stage") == worker, x, jnp.zeros_like(x))

    def _own_tokens(self, y_BLD: Float[Array, "B _ D"]) -> Float[Array, "T D"]:
        """This stage's part of the tokens of `head_worker`."""
        y_TD = _pad_tokens(y_BLD.reshape(-1, y_BLD.shape[-1]), self.placement.stage)
        with jax.named_scope("loss"):
            # A sum of one stage's values and zeros: a scatter from `head_worker` that SPMD can express.
            return jax.lax.psum_scatter(self.mask_others(self.head_worker, y_TD), "stage", tiled=True)

    def _gather_owners(self, x_TD: Shaped[Array, "T D"], like_BLD: Array) -> Shaped[Array, "B _ D"]:
        """The tokens of all stages, in the shape of `like_BLD`."""
        rows, length, _ = like_BLD.shape
        with jax.named_scope("loss"):
            x_TD = jax.lax.all_gather(x_TD, "stage", axis=0, tiled=True)
        return x_TD[: rows * length].reshape(rows, length, -1)

    def _by_owner(
        self, value_BL: Shaped[Array, "B L *J"], like_BLD: Any, fill: int
    ) -> Shaped[Array, "T ..."]:
        """Targets, weights or the like of all tokens, by the device along (stage, tensor) that has the token."""
        tensor, stage, (rows, _, *rest) = self.placement.tensor, self.placement.stage, value_BL.shape
        # Tokens lie [tensor][stage] after the sequence split, but the op numbers devices (stage, tensor).
        by_tensor = value_BL.reshape(rows, tensor, like_BLD.shape[1], *rest).swapaxes(0, 1)
        by_tensor = by_tensor.reshape(tensor, -1, *rest)
        # Padded tokens have no target and add no loss.
        padded = jnp.stack([_pad_tokens(value_T, stage, fill) for value_T in by_tensor])
        return padded.reshape(tensor, stage, -1, *rest).swapaxes(0, 1).reshape(-1, *rest)


@dataclasses.dataclass(frozen=True)
class EndLayers:
    """Layers before and after those that stages share: `model.first`, and an unfinished last period.

    Every stage computes them in the ticks of embedding and loss, in which all stages meet anyway, on the same
    numbers or on zeros. Only one stage has cotangents, so gradients are those of one device after the sum
    over `stage`. Their forward pass is computed again for the gradient.
    """

    ends: Ends
    router: RouterLosses | None

    def enter(self, trained: Params, parts: Batch, microbatch: Array) -> Float[Array, "B _ D"]:
        """Input of the first virtual stage, the same on every stage."""
        x_BLD = self.ends.embed(trained, parts.token_BL[microbatch])
        if not self.ends.model.first:
            return x_BLD
        return self._through("first_layers", trained, x_BLD, parts, microbatch)[0]

    def enter_gradient(
        self, trained: Params, parts: Batch, microbatch: Array, dx_BLD: Float[Array, "B _ D"]
    ) -> Params:
        """Gradients of `trained` from that of `enter` on the worker `embed_worker`."""
        token_BL = parts.token_BL[microbatch]
        if not self.ends.model.first:
            return self.ends.embed_gradient(trained, token_BL, dx_BLD)

        def first(trained: Params, x_BLD: Array) -> LayerCarry:
            return self._through("first_layers", trained, x_BLD, parts, microbatch)

        _, vjp = jax.vjp(first, trained, self.ends.embed(trained, token_BL))
        grads, dx_BLD = vjp(self._cotangents(self.ends.embed_worker, dx_BLD))
        return jax.tree.map(jnp.add, grads, self.ends.embed_gradient(trained, token_BL, dx_BLD))

    def loss(
        self, trained: Params, y_BLD: Float[Array, "B _ D"], parts: Batch, microbatch: Array, unit: Array
    ) -> tuple[Float[Array, ""], Params, Float[Array, "B _ D"]]:
        """Computes `Ends.loss`; behind further layers, `head_worker` has the gradient of y, others 0."""
        target_BL, weight_BL, soft = jax.tree.map(
            lambda x: x[microbatch], (parts.target_BL, parts.weight_BL, parts.soft)
        )
        if not self.ends.model.last:
            return self.ends.loss(trained, y_BLD, target_BL, unit, weight_BL, soft)

        def last(trained: Params, y_BLD: Array) -> LayerCarry:
            return self._through_last(trained, y_BLD, parts, microbatch)

        (x_BLD, _), vjp = jax.vjp(last, trained, y_BLD)
        nats, grads, dx_BLD = self.ends.loss(trained, x_BLD, target_BL, unit, weight_BL, soft)
        last_grads, dy_BLD = vjp(self._cotangents(self.ends.head_worker, dx_BLD))
        return nats, jax.tree.map(jnp.add, grads, last_grads), dy_BLD

    def nats(
        self, trained: Params, y_BLD: Float[Array, "B _ D"], parts: Batch, microbatch: Array
    ) -> Float[Array, "B _"]:
        """Computes `Ends.nats`."""
        y_BLD = self._leave(trained, y_BLD, parts, microbatch)
        return self.ends.nats(trained, y_BLD, parts.target_BL[microbatch])

    def top_k(
        self, trained: Params, y_BLD: Float[Array, "B _ D"], parts: Batch, microbatch: Array, k: int
    ) -> Any:
        """Computes `Ends.top_k`."""
        return self.ends.top_k(trained, self._leave(trained, y_BLD, parts, microbatch), k)

    def _leave(self, trained: Params, y_BLD: Array, parts: Batch, microbatch: Array) -> Array:
        return self._through_last(trained, y_BLD, parts, microbatch)[0] if self.ends.model.last else y_BLD

    def _through_last(self, trained: Params, y_BLD: Array, parts: Batch, microbatch: Array) -> LayerCarry:
        # Other workers have outputs of other layers: zeros keep finite what nobody reads.
        y_BLD = self.ends.mask_others(self.ends.head_worker, y_BLD)
        return self._through("last_layers", trained, y_BLD, parts, microbatch)

    def _through(
        self, path: str, trained: Params, x_BLD: Array, parts: Batch, microbatch: Array
    ) -> LayerCarry:
        model = self.ends.model
        carry = x_BLD, None if model.router is None else RouterLosses.zeros(model.router)
        shared = model.shared(jax.tree.map(lambda x: x[microbatch], parts))
        with jax.named_scope("layers"):
            return model.through_single(path, self.ends.weights(trained), carry, shared, self.ends.placement)

    def _cotangents(self, worker: int, dx_BLD: Array) -> LayerCarry:
        mask = self.ends.mask_others
        return mask(worker, dx_BLD), jax.tree.map(lambda x: mask(worker, x), self.router)


def _pad_tokens(x: Shaped[Array, "T ..."], stage: int, fill: int = 0) -> Shaped[Array, "_ ..."]:
    """Tokens with as many more as make them split evenly over stages."""
    num_padding = -x.shape[0] % stage
    return (
        jnp.pad(x, ((0, num_padding), *((0, 0),) * (x.ndim - 1)), constant_values=fill) if num_padding else x
    )
