"""Forward and backward passes of one worker's chunk of layers, with what lies between them kept in slots.

A forward pass keeps what `layout.remat` says of each layer, and never a weight; the backward pass of the same microbatch
may be many ticks later. Weights of chunk c are rows c * k .. (c + 1) * k of the stacked arrays. Gradients are added in
place, layer by layer, to an accumulator with the same rows.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jtrain.model import ops
from jtrain.model.layer_scan import Detached, Layer
from jtrain.model.param import Params
from jtrain.model.router import RouterLosses

type Kept = list[Array]
"""Arrays [slots, k, ...] between forward and backward pass, one per value that a layer keeps."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gradients:
    """Sums over microbatches for this worker's layers, float32, [chunks * k, ...].

    trained: gradients of the weights, in the shapes that JAX differentiates.
    seen: largest absolute values in 8-bit matmuls, for each weight [chunks * k, 3]; empty without them.
    """

    trained: Any
    seen: Any


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Layers of one worker.

    layer: one layer, under `jax.checkpoint`.
    weights: of all chunks, [chunks * k, ...]; leaves are arrays, `Detached` or `ops.Fp8Kernel`.
    per_chunk: places for layers in a chunk, k.
    real_Y: True where a place holds a layer of the model, False for an identity layer; [chunks * k].
    router: cotangents of the router losses of every layer; None for a dense model.
    unroll: layers per iteration of the compiled loops.
    """

    layer: Layer
    weights: Params
    per_chunk: int
    real_Y: Bool[Array, " Y"]
    router: RouterLosses | None
    unroll: int

    def kept_like(self, x_BLD: Any, shared: Any) -> Any:
        """Shapes of what one layer keeps: the `jax.vjp` of a layer as a tree of shapes."""
        return jax.eval_shape(lambda x, w, shared: self._vjp(x, w, shared)[1], x_BLD, self._at(0), shared)

    def forward(
        self, x_BLD: Float[Array, "B _ D"], chunk: Int[Array, ""], slot: Int[Array, ""], kept: Kept, shared: Any
    ) -> tuple[Float[Array, "B _ D"], Kept]:
        """Output of a chunk, and `kept` with a slot filled."""

        def body(carry: tuple[Array, Kept], place: Array) -> tuple[tuple[Array, Kept], None]:
            x_BLD, kept = carry
            x_BLD, vjp = self._vjp(x_BLD, self._at(chunk * self.per_chunk + place), shared)
            return (x_BLD, [_put(all_, one, slot, place) for all_, one in zip(kept, jax.tree.leaves(vjp))]), None

        (x_BLD, kept), _ = jax.lax.scan(body, (x_BLD, kept), jnp.arange(self.per_chunk), unroll=self.unroll)
        return x_BLD, kept

    def apply(self, x_BLD: Float[Array, "B _ D"], chunk: Int[Array, ""], shared: Any) -> Float[Array, "B _ D"]:
        """Output of a chunk, keeping nothing."""

        def body(x_BLD: Array, place: Array) -> tuple[Array, None]:
            return self._one(x_BLD, self._at(chunk * self.per_chunk + place), shared)[0], None

        return jax.lax.scan(body, x_BLD, jnp.arange(self.per_chunk), unroll=self.unroll)[0]

    def backward(
        self,
        dx_BLD: Float[Array, "B _ D"],
        chunk: Int[Array, ""],
        slot: Int[Array, ""],
        kept: Kept,
        like: Any,
        gradients: Gradients,
        shared: Any,
    ) -> tuple[Float[Array, "B _ D"], Gradients]:
        """Gradient of a chunk's input, and `gradients` with those of its weights added.

        Args:
          like: from `kept_like`.
        """

        def body(carry: tuple[Array, Gradients], place: Array) -> tuple[tuple[Array, Gradients], None]:
            dx_BLD, gradients = carry
            row = chunk * self.per_chunk + place
            vjp = jax.tree.unflatten(jax.tree.structure(like), [_take(all_, slot, place) for all_ in kept])
            vjp.args_res[1:] = [self._at(row), shared]
            dx_BLD, dweights, _ = vjp((dx_BLD, self._of_router(row)))
            return (dx_BLD, self._added(gradients, dweights, row)), None

        places = jnp.arange(self.per_chunk)
        carry, _ = jax.lax.scan(body, (dx_BLD, gradients), places, reverse=True, unroll=self.unroll)
        return carry

    def no_gradients(self) -> Gradients:
        """Sums of nothing yet."""
        zeros = functools.partial(jnp.zeros_like, dtype=jnp.float32)
        return Gradients(*jax.tree.map(zeros, _split(self.weights)))

    def _added(self, gradients: Gradients, dweights: Params, row: Array) -> Gradients:
        trained, seen = _split(dweights)
        with jax.named_scope("reduce_gradients"):
            # The largest values of an identity layer, whose weights are zeros, are no one's.
            highest = jnp.where(self.real_Y[row], jnp.inf, 0.0)
            return Gradients(
                jax.tree.map(lambda all_, one: _at_row(all_, row, lambda old: old + one), gradients.trained, trained),
                jax.tree.map(
                    lambda all_, one: _at_row(all_, row, lambda old: jnp.maximum(old, jnp.minimum(one, highest))),
                    gradients.seen,
                    seen,
                ),
            )

    def _of_router(self, row: Array) -> RouterLosses | None:
        return jax.tree.map(lambda weight: jnp.where(self.real_Y[row], weight, 0.0), self.router)

    def _at(self, row: Array | int) -> Params:
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, row, keepdims=False), self.weights)

    def _one(self, x_BLD: Array, weights: Params, shared: Any) -> tuple[Array, RouterLosses | None]:
        losses = None if self.router is None else RouterLosses(*jnp.zeros((2,)))
        return self.layer((x_BLD, losses), weights, shared)

    def _vjp(self, x_BLD: Array, weights: Params, shared: Any) -> tuple[Array, Any]:
        """Output of a layer, and its `jax.vjp` without weights and shared values: the backward pass has them again."""
        (x_BLD, _), vjp = jax.vjp(self._one, x_BLD, weights, shared, saveable_args=(True, False, False))
        return x_BLD, vjp


def _split(weights: Params) -> tuple[Any, Any]:
    """Arrays that JAX differentiates, and the inputs whose gradients are largest absolute values, by path."""

    def trained(leaf: Any) -> Any:
        inner = leaf.value if isinstance(leaf, ops.Fp8Kernel) else leaf
        return inner.trained if isinstance(inner, Detached) else inner

    def seen(leaf: Any) -> Any:
        return leaf.seen_3 if isinstance(leaf, ops.Fp8Kernel) else None

    def is_leaf(leaf: Any) -> bool:
        return isinstance(leaf, ops.Fp8Kernel | Detached)

    return jax.tree.map(trained, weights, is_leaf=is_leaf), jax.tree.map(seen, weights, is_leaf=is_leaf)


def _take(all_: Array, slot: Array, place: Array) -> Array:
    """What one layer keeps, from [slots, k, ...]."""
    sizes = (1, 1, *all_.shape[2:])
    return jax.lax.dynamic_slice(all_, (slot, place, *[0] * (all_.ndim - 2)), sizes).reshape(all_.shape[2:])


def _put(all_: Array, one: Array, slot: Array, place: Array) -> Array:
    """[slots, k, ...] with what one layer keeps."""
    return jax.lax.dynamic_update_slice(all_, one[None, None], (slot, place, *[0] * one.ndim))


def _at_row(all_: Array, row: Array, new: Any) -> Array:
    """`all_` with `new(row)` in place of the row, in float32."""
    old = jax.lax.dynamic_index_in_dim(all_, row, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(all_, new(old).astype(all_.dtype), row, 0)
