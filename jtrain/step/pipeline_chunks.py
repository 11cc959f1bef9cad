"""Forward and backward passes of one worker's chunk of layers, with what lies between them kept in slots.

A forward pass keeps what `layout.remat` says of each layer, and never a weight; the backward pass of the same
microbatch may be many ticks later. Weights of chunk c are rows c * k .. (c + 1) * k of the stacked arrays.
Gradients are added in place, layer by layer, to an accumulator with the same rows.

Under a schedule that splits the backward pass, `backward` leaves out the gradients of the layers' matrices
and fills a slot of stashes instead, from which `weight_gradients` makes them later
(`jtrain.model.split_backward`). Norm scales, routers and routed experts get their gradients in `backward`
always.

`ChunkPass.present` is True, or an array that is False where the worker only keeps its neighbours company.
Then nothing changes but the output, which nobody reads.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Bool, Float, Int

from jtrain.model import ops
from jtrain.model.forward_placement import by_rows
from jtrain.model.layer_scan import Detached, Layer
from jtrain.model.param import Params
from jtrain.model.router import RouterLosses
from jtrain.model.split_backward import Site, SplitKernel, recorded

type LayerSlots = list[Array]
"""Arrays [slots, k, ...], one per value that a layer keeps."""

type Present = bool | Bool[Array, ""]
"""True, or False where the worker has nothing to do."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gradients:
    """Sums over microbatches for this worker's layers, float32, [chunks * k, ...], by path below `layers`.

    trained: gradients of the weights, in the shapes that JAX differentiates.
    seen: largest absolute values in 8-bit matmuls, for each such weight [chunks * k, 3]; empty without them.
    """

    trained: dict[str, Any]
    seen: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ChunkPass:
    """One pass over a chunk.

    chunk: its number on the worker.
    shared: values that every layer reads, of the microbatch.
    slot, stash: slots of what a layer keeps, and of what `weight_gradients` needs.
    """

    chunk: Int[Array, ""]
    shared: Any = None
    slot: Int[Array, ""] | None = None
    stash: Int[Array, ""] | None = None
    present: Present = True


@dataclasses.dataclass(frozen=True)
class StageChunks:
    """Layers of one worker.

    layer: one layer, under `jax.checkpoint`.
    fetch: `Placement.fetch`.
    weights: of all chunks, [chunks * k, ...]; leaves are arrays, `Detached` or `ops.Fp8Kernel`.
    split: paths below `layers` of the weights that get no gradient in `backward`.
    per_chunk: places for layers in a chunk, k.
    real_Y: True where a place holds a layer of the model, False for an identity layer; [chunks * k].
    router: cotangents of the router losses of every layer; None for a dense model.
    unroll: layers per iteration of the compiled loops.
    sites, kept: set by `traced`: products whose weights get their gradients later, and shapes of what a layer
      keeps.
    """

    layer: Layer
    fetch: Callable[[str, Any], Any]
    weights: Params
    split: frozenset[str]
    per_chunk: int
    real_Y: Bool[Array, " Y"]
    router: RouterLosses | None
    unroll: int
    sites: Mapping[str, Site] = dataclasses.field(default_factory=dict)
    kept: Any = None

    def traced(self, x_BLD: Any, shared: Any) -> "StageChunks":
        """The chunks for a residual stream of this shape."""
        with recorded() as sites:
            if self.split:
                jax.eval_shape(lambda x, w, shared: self._one(x, w, shared, None), x_BLD, self._at(0), shared)
        found = dataclasses.replace(self, sites=sites)
        kept = jax.eval_shape(lambda x, w, shared: found._vjp(x, w, shared)[1], x_BLD, self._at(0), shared)
        return dataclasses.replace(found, kept=kept)

    def kept_slots(self, num_slots: int) -> LayerSlots:
        """Empty slots for what the layers of a chunk keep."""
        return self._slots(self.kept, num_slots)

    def stash_slots(self, num_slots: int) -> LayerSlots:
        """Empty slots for what the gradients of a chunk's weights need."""
        return self._slots(jax.eval_shape(self._taps), num_slots)

    def _slots(self, like: Any, num_slots: int) -> LayerSlots:
        return [jnp.zeros((num_slots, self.per_chunk, *x.shape), x.dtype) for x in jax.tree.leaves(like)]

    def forward(
        self, work: ChunkPass, x_BLD: Float[Array, "B _ D"], kept: LayerSlots
    ) -> tuple[Float[Array, "B _ D"], LayerSlots]:
        """Output of a chunk, and `kept` with a slot filled."""

        def body(carry: tuple[Array, LayerSlots], place: Array) -> tuple[tuple[Array, LayerSlots], None]:
            x_BLD, kept = carry
            x_BLD, vjp = self._vjp(x_BLD, self._at(self._row(work, place)), work.shared)
            return (x_BLD, _put_all(kept, vjp, work.slot, place, work.present)), None

        return self._loop(body, (x_BLD, kept))

    def apply(self, work: ChunkPass, x_BLD: Float[Array, "B _ D"]) -> Float[Array, "B _ D"]:
        """Output of a chunk, keeping nothing."""

        def body(x_BLD: Array, place: Array) -> tuple[Array, None]:
            return self.layer((x_BLD, self._no_losses()), self._at(self._row(work, place)), work.shared)[
                0
            ], None

        return self._loop(body, x_BLD)

    def backward(
        self,
        work: ChunkPass,
        dx_BLD: Float[Array, "B _ D"],
        kept: LayerSlots,
        stashes: LayerSlots,
        gradients: Gradients,
    ) -> tuple[Float[Array, "B _ D"], LayerSlots, Gradients]:
        """Gradient of a chunk's input, `stashes` with a slot filled, and `gradients` with those of its
        weights.
        """
        if work.present is not True:
            dx_BLD = jnp.where(work.present, dx_BLD, 0)  # all gradients are then zero

        def body(
            carry: tuple[Array, LayerSlots, Gradients], place: Array
        ) -> tuple[tuple[Array, LayerSlots, Gradients], None]:
            dx_BLD, stashes, gradients = carry
            row = self._row(work, place)
            vjp = jax.tree.unflatten(
                jax.tree.structure(self.kept), [_take(all_, work.slot, place) for all_ in kept]
            )
            vjp.args_res[1:] = [self._at(row), work.shared, self._taps()]
            dx_BLD, dweights, _, taps = vjp((dx_BLD, self._of_router(row, work.present)))
            stashes = _put_all(stashes, taps, work.stash, place, work.present)
            whole = {path: d for path, d in flatten_dict(dweights, sep=".").items() if path not in self.split}
            return (dx_BLD, stashes, self._added(gradients, whole, row, work.present)), None

        return self._loop(body, (dx_BLD, stashes, gradients), reverse=True)

    def weight_gradients(self, work: ChunkPass, stashes: LayerSlots, gradients: Gradients) -> Gradients:
        """`gradients` with those that `backward` left out, from a slot of stashes."""
        like = jax.tree.structure(jax.eval_shape(self._taps))

        def body(gradients: Gradients, place: Array) -> tuple[Gradients, None]:
            taps = jax.tree.unflatten(like, [_take(all_, work.stash, place) for all_ in stashes])
            if work.present is not True:
                taps = jax.tree.map(lambda x: jnp.where(work.present, x, 0), taps)
            row = self._row(work, place)
            weights = {
                path: weight
                for path, weight in flatten_dict(self._at(row), sep=".").items()
                if path in self.split
            }

            def products(weights: dict[str, Any]) -> dict[str, tuple[Array, ...]]:
                kernels = {path: self.fetch(f"layers.{path}", weight) for path, weight in weights.items()}
                return {
                    name: site.again(taps[name], [kernels[path] for path in site.paths])
                    for name, site in self.sites.items()
                }

            _, vjp = jax.vjp(products, weights)  # XLA drops the products themselves
            (dweights,) = vjp({name: of.results for name, of in taps.items()})
            return self._added(gradients, dweights, row, work.present), None

        return self._loop(body, gradients)

    def no_gradients(self) -> Gradients:
        """Sums of nothing yet."""
        return jax.tree.map(
            lambda x: jnp.zeros_like(x, dtype=jnp.float32), _parts(flatten_dict(self.weights, sep="."))
        )

    def _loop[C](self, body: Callable[[C, Array], tuple[C, None]], carry: C, *, reverse: bool = False) -> C:
        """`body` for every place of a chunk."""
        return jax.lax.scan(body, carry, jnp.arange(self.per_chunk), reverse=reverse, unroll=self.unroll)[0]

    def _added(
        self, gradients: Gradients, dweights: dict[str, Any], row: Array, present: Present
    ) -> Gradients:
        # The largest values of an identity layer, whose weights are zeros, are no one's.
        highest = jnp.where(self.real_Y[row] & present, jnp.inf, 0.0)
        more = _parts(dweights)
        with jax.named_scope("reduce_gradients"):
            trained = {path: _add(gradients.trained[path], row, one) for path, one in more.trained.items()}
            seen = {
                path: _highest(gradients.seen[path], row, one, highest) for path, one in more.seen.items()
            }
        return Gradients(gradients.trained | trained, gradients.seen | seen)

    def _of_router(self, row: Array, present: Present) -> RouterLosses | None:
        return jax.tree.map(lambda weight: jnp.where(self.real_Y[row] & present, weight, 0.0), self.router)

    def _no_losses(self) -> RouterLosses | None:
        return None if self.router is None else RouterLosses(*jnp.zeros((2,)))

    def _at(self, row: Array | int) -> Params:
        """Weights of one layer, on the device."""

        def one(x: Array) -> Array:
            on_host = jax.typeof(x).memory_space is jax.memory.Space.Host
            layer = jax.lax.dynamic_index_in_dim(x, row, keepdims=False)
            # By rows, as it lies there: XLA:TPU aborts if the copy is to change the layout too.
            return by_rows(jax.device_put(layer, jax.memory.Space.Device)) if on_host else layer

        return jax.tree.map(one, self.weights)

    def _one(
        self, x_BLD: Array, weights: Params, shared: Any, taps: Any
    ) -> tuple[Array, RouterLosses | None]:
        def split(path: str, tree: Any) -> Any:
            if isinstance(tree, dict):
                return {key: split(f"{path}.{key}" if path else key, value) for key, value in tree.items()}
            if path not in self.split:
                return tree
            return SplitKernel(tree, (taps or {}).get(path), path)

        return self.layer((x_BLD, self._no_losses()), split("", weights), shared)

    def _row(self, work: ChunkPass, place: Array) -> Array:
        return work.chunk * self.per_chunk + place

    def _taps(self) -> dict[str, Any]:
        return {name: site.taps() for name, site in self.sites.items()}

    def _vjp(self, x_BLD: Array, weights: Params, shared: Any) -> tuple[Array, Any]:
        """Output of a layer, and its `jax.vjp` with what it keeps: not its arguments, which `backward` has
        again.
        """
        keep = (True, False, False, False)
        (x_BLD, _), vjp = jax.vjp(self._one, x_BLD, weights, shared, self._taps(), saveable_args=keep)
        return x_BLD, vjp


def _parts(weights: dict[str, Any]) -> Gradients:
    """Arrays that JAX differentiates, and the inputs whose gradients are largest absolute values."""

    def trained(leaf: Any) -> Any:
        inner = leaf.value if isinstance(leaf, ops.Fp8Kernel) else leaf
        return inner.trained if isinstance(inner, Detached) else inner

    seen = {path: leaf.seen_3 for path, leaf in weights.items() if isinstance(leaf, ops.Fp8Kernel)}
    return Gradients(
        {path: trained(leaf) for path, leaf in weights.items()},
        {path: amax for path, amax in seen.items() if amax is not None},
    )


def _take(all_: Array, slot: Any, place: Array) -> Array:
    """Value of one layer, from [slots, k, ...].

    Contiguous by rows: without it XLA:TPU copies all slots in every tick, into the layout that a matmul of
    one of them prefers.
    """
    sizes = (1, 1, *all_.shape[2:])
    return by_rows(jax.lax.dynamic_slice(all_, (slot, place, *[0] * (all_.ndim - 2)), sizes)).reshape(
        all_.shape[2:]
    )


def _put_all(slots: LayerSlots, tree: Any, slot: Any, place: Array, present: Present) -> LayerSlots:
    """`slots` with the values of one layer."""
    leaves = map(
        jnp.asarray, jax.tree.leaves(tree)
    )  # attention on a GPU keeps a constant, which is no traced array
    return [_put(all_, one, slot, place, present) for all_, one in zip(slots, leaves, strict=True)]


def _put(all_: Array, one: Array, slot: Any, place: Array, present: Present) -> Array:
    if present is not True:
        one = jnp.where(present, one, _take(all_, slot, place))
    return jax.lax.dynamic_update_slice(all_, one[None, None], (slot, place, *[0] * one.ndim))


def _add(total_Y: Array, row: Array, one: Array) -> Array:
    old = jax.lax.dynamic_index_in_dim(total_Y, row, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(total_Y, old + one.astype(total_Y.dtype), row, 0)


def _highest(total_Y3: Array, row: Array, one_3: Array, limit: Array) -> Array:
    old_3 = jax.lax.dynamic_index_in_dim(total_Y3, row, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(
        total_Y3, jnp.maximum(old_3, jnp.minimum(one_3, limit)), row, 0
    )
