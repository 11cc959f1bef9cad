"""Forward and backward passes of one worker's chunk of layers, with what lies between them kept in slots.

A forward pass keeps what `layout.remat` says of each layer, and never a weight; the backward pass of the same
microbatch may be many ticks later. Weights of chunk c are rows c * k .. (c + 1) * k of the stacked arrays.
Gradients are added in place, layer by layer, to an accumulator with the same rows.

Under a schedule that splits the backward pass, `backward` leaves out the gradients of the layers' matrices
and fills a slot of stashes instead, from which `weight_gradients` makes them later
(`jtrain.model.split_backward`). Norm scales, routers and routed experts get their gradients in `backward`
always.

Example: 8 layers on 2 workers with 2 chunks each make k = 2. Worker 0 has rows 0 to 3 of its stacks: chunk 0
is rows 0 and 1, chunk 1 rows 2 and 3. With 3 input slots, one value [B, L, D] of a layer takes an array [3,
2, B, L, D], and the pass of chunk 1 in slot 2 fills [2, 0] and [2, 1].

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
from jtrain.model.forward_placement import row_major
from jtrain.model.layer_scan import Detached, Layer
from jtrain.model.param import Params
from jtrain.model.router import RouterLosses
from jtrain.model.split_backward import Site, SplitKernel, record_sites

type LayerSlots = list[Array]
"""Arrays [slots, k, ...], one per value that a layer keeps."""

type Present = bool | Bool[Array, ""]
"""True, or False where the worker has nothing to do."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gradients:
    """Sums over microbatches for this worker's layers, float32, [chunks * k, ...], by path below `layers`.

    trained: gradients of the weights, in the shapes that JAX differentiates.
    amax: largest absolute values in 8-bit matmuls, for each such weight [chunks * k, 3]; empty without them.
    """

    trained: dict[str, Any]
    amax: dict[str, Any]


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
    padded: whether any place of any worker holds an identity layer.
    router: cotangents of the router losses of every layer; None for a dense model.
    unroll: layers per iteration of the compiled loops.
    sites, saved_shapes: set by `trace`: products whose weights get their gradients later, and shapes of what
      a layer keeps.
    """

    layer: Layer
    fetch: Callable[[str, Any], Any]
    weights: Params
    split: frozenset[str]
    per_chunk: int
    real_Y: Bool[Array, " Y"]
    padded: bool
    router: RouterLosses | None
    unroll: int
    sites: Mapping[str, Site] = dataclasses.field(default_factory=dict)
    saved_shapes: Any = None

    def trace(self, x_BLD: Any, shared: Any) -> "StageChunks":
        """The chunks for a residual stream of this shape."""
        # Sites first: `_vjp` below passes their taps, without which split kernels cannot be differentiated.
        with record_sites() as sites:
            if self.split:
                jax.eval_shape(
                    lambda x, w, shared: self._run_layer(x, w, shared, None),
                    x_BLD,
                    self._weights_at(0),
                    shared,
                )
        with_sites = dataclasses.replace(self, sites=sites)
        saved_shapes = jax.eval_shape(
            lambda x, w, shared: with_sites._vjp(x, w, shared)[1], x_BLD, self._weights_at(0), shared
        )
        return dataclasses.replace(with_sites, saved_shapes=saved_shapes)

    def layer_slots(self, num_slots: int) -> LayerSlots:
        """Empty slots for what the layers of a chunk keep."""
        return self._slots(self.saved_shapes, num_slots)

    def stash_slots(self, num_slots: int) -> LayerSlots:
        """Empty slots for what the gradients of a chunk's weights need."""
        return self._slots(jax.eval_shape(self._taps), num_slots)

    def _slots(self, shapes: Any, num_slots: int) -> LayerSlots:
        return [jnp.zeros((num_slots, self.per_chunk, *x.shape), x.dtype) for x in jax.tree.leaves(shapes)]

    def forward(
        self, chunk_pass: ChunkPass, x_BLD: Float[Array, "B _ D"], layer_slots: LayerSlots
    ) -> tuple[Float[Array, "B _ D"], LayerSlots]:
        """Output of a chunk, and `layer_slots` with a slot filled."""

        def body(carry: tuple[Array, LayerSlots], index: Array) -> tuple[tuple[Array, LayerSlots], None]:
            x_BLD, layer_slots = carry
            # A vjp is a pytree: its arrays go into the slots, its structure is the same for every layer.
            x_BLD, vjp = self._vjp(x_BLD, self._weights_at(self._row(chunk_pass, index)), chunk_pass.shared)
            return (x_BLD, _put_all(layer_slots, vjp, chunk_pass.slot, index, chunk_pass.present)), None

        return self._loop(body, (x_BLD, layer_slots))

    def apply(self, chunk_pass: ChunkPass, x_BLD: Float[Array, "B _ D"]) -> Float[Array, "B _ D"]:
        """Output of a chunk, keeping nothing."""

        def body(x_BLD: Array, index: Array) -> tuple[Array, None]:
            return self.layer(
                (x_BLD, self._no_losses()), self._weights_at(self._row(chunk_pass, index)), chunk_pass.shared
            )[0], None

        return self._loop(body, x_BLD)

    def backward(
        self,
        chunk_pass: ChunkPass,
        dx_BLD: Float[Array, "B _ D"],
        layer_slots: LayerSlots,
        stashes: LayerSlots,
        gradients: Gradients,
    ) -> tuple[Float[Array, "B _ D"], LayerSlots, Gradients]:
        """Gradient of a chunk's input, `stashes` with a slot filled, and the new `gradients`."""
        if chunk_pass.present is not True:
            dx_BLD = jnp.where(chunk_pass.present, dx_BLD, 0)  # all gradients are then zero

        def body(
            carry: tuple[Array, LayerSlots, Gradients], index: Array
        ) -> tuple[tuple[Array, LayerSlots, Gradients], None]:
            dx_BLD, stashes, gradients = carry
            row = self._row(chunk_pass, index)
            vjp = jax.tree.unflatten(
                jax.tree.structure(self.saved_shapes),
                [_take(slots, chunk_pass.slot, index) for slots in layer_slots],
            )
            # The arguments that `saveable_args` left out: weights, shared values and taps, fetched or made
            # anew.
            vjp.args_res[1:] = [self._weights_at(row), chunk_pass.shared, self._taps()]
            dx_BLD, dweights, _, taps = vjp((dx_BLD, self._router_cotangents(row, chunk_pass.present)))
            stashes = _put_all(stashes, taps, chunk_pass.stash, index, chunk_pass.present)
            # Split weights have zero gradients here: `weight_gradients` makes theirs from the taps.
            unsplit_grads = {
                path: grad for path, grad in flatten_dict(dweights, sep=".").items() if path not in self.split
            }
            return (
                dx_BLD,
                stashes,
                self._add_gradients(gradients, unsplit_grads, row, chunk_pass.present),
            ), None

        # The last layer of the chunk first, at the same index as in the forward pass.
        return self._loop(body, (dx_BLD, stashes, gradients), reverse=True)

    def weight_gradients(self, chunk_pass: ChunkPass, stashes: LayerSlots, gradients: Gradients) -> Gradients:
        """`gradients` with those that `backward` left out, from a slot of stashes."""
        taps_tree = jax.tree.structure(jax.eval_shape(self._taps))

        def body(gradients: Gradients, index: Array) -> tuple[Gradients, None]:
            taps = jax.tree.unflatten(taps_tree, [_take(slots, chunk_pass.stash, index) for slots in stashes])
            if chunk_pass.present is not True:
                # A slot that nobody wrote may hold anything; zeros add zero gradients.
                taps = jax.tree.map(lambda x: jnp.where(chunk_pass.present, x, 0), taps)
            row = self._row(chunk_pass, index)
            weights = {
                path: weight
                for path, weight in flatten_dict(self._weights_at(row), sep=".").items()
                if path in self.split
            }

            def products(weights: dict[str, Any]) -> dict[str, tuple[Array, ...]]:
                kernels = {path: self.fetch(f"layers.{path}", weight) for path, weight in weights.items()}
                return {
                    name: site.replay(taps[name], [kernels[path] for path in site.paths])
                    for name, site in self.sites.items()
                }

            _, vjp = jax.vjp(products, weights)  # XLA drops the products themselves
            (dweights,) = vjp({name: product_taps.results for name, product_taps in taps.items()})
            return self._add_gradients(gradients, dweights, row, chunk_pass.present), None

        return self._loop(body, gradients)

    def no_gradients(self) -> Gradients:
        """Sums of nothing yet."""
        return jax.tree.map(
            lambda x: jnp.zeros_like(x, dtype=jnp.float32), _parts(flatten_dict(self.weights, sep="."))
        )

    def _loop[C](self, body: Callable[[C, Array], tuple[C, None]], carry: C, *, reverse: bool = False) -> C:
        """`body` for every place of a chunk."""
        return jax.lax.scan(body, carry, jnp.arange(self.per_chunk), reverse=reverse, unroll=self.unroll)[0]

    def _add_gradients(
        self, gradients: Gradients, dweights: dict[str, Any], row: Array, present: Present
    ) -> Gradients:
        # The largest values of an identity layer, whose weights are zeros, are no one's.
        limit = jnp.where(self.real_Y[row] & present, jnp.inf, 0.0)
        # A weight in 8 bits has two gradients: of its values, and of the probe that carries the amax.
        parts = _parts(dweights)
        if self.padded:
            # A bias is added to the stream, so its gradient is not 0 where the layer's weights are.
            trained = jax.tree.map(lambda grad: jnp.where(self.real_Y[row], grad, 0), parts.trained)
            parts = Gradients(trained, parts.amax)
        with jax.named_scope("reduce_gradients"):
            trained = {path: _add(gradients.trained[path], row, grad) for path, grad in parts.trained.items()}
            amax = {
                path: _highest(gradients.amax[path], row, grad, limit) for path, grad in parts.amax.items()
            }
        return Gradients(gradients.trained | trained, gradients.amax | amax)

    def _router_cotangents(self, row: Array, present: Present) -> RouterLosses | None:
        return jax.tree.map(lambda weight: jnp.where(self.real_Y[row] & present, weight, 0.0), self.router)

    def _no_losses(self) -> RouterLosses | None:
        if self.router is None:
            return None
        # Each layer begins at zero: only the gradients of these sums are used (`_router_cotangents`).
        return RouterLosses(*jnp.zeros((2,)), load=None if self.router.load is None else jnp.zeros(()))

    def _weights_at(self, row: Array | int) -> Params:
        """Weights of one layer, on the device."""

        def layer_slice(x: Array) -> Array:
            on_host = jax.typeof(x).memory_space is jax.memory.Space.Host
            layer = jax.lax.dynamic_index_in_dim(x, row, keepdims=False)
            # By rows, as it lies there: XLA:TPU aborts if the copy is to change the layout too.
            return row_major(jax.device_put(layer, jax.memory.Space.Device)) if on_host else layer

        return jax.tree.map(layer_slice, self.weights)

    def _run_layer(
        self, x_BLD: Array, weights: Params, shared: Any, taps: Any
    ) -> tuple[Array, RouterLosses | None]:
        def split(path: str, tree: Any) -> Any:
            if isinstance(tree, dict):
                return {key: split(f"{path}.{key}" if path else key, value) for key, value in tree.items()}
            if path not in self.split:
                return tree
            # Taps belong to a product's first kernel; its other kernels have none.
            return SplitKernel(tree, (taps or {}).get(path), path)

        return self.layer((x_BLD, self._no_losses()), split("", weights), shared)

    def _row(self, chunk_pass: ChunkPass, index: Array) -> Array:
        # Layers of a worker lie chunk by chunk, k places each.
        return chunk_pass.chunk * self.per_chunk + index

    def _taps(self) -> dict[str, Any]:
        return {name: site.taps() for name, site in self.sites.items()}

    def _vjp(self, x_BLD: Array, weights: Params, shared: Any) -> tuple[Array, Any]:
        """Output of a layer, and its `jax.vjp` without the arguments, which `backward` has again."""
        # Only the layer's input is an argument that the slots must hold.
        keep = (True, False, False, False)
        (x_BLD, _), vjp = jax.vjp(self._run_layer, x_BLD, weights, shared, self._taps(), saveable_args=keep)
        return x_BLD, vjp


def _parts(weights: dict[str, Any]) -> Gradients:
    """Arrays that JAX differentiates, and the inputs whose gradients are largest absolute values."""

    def trained(leaf: Any) -> Any:
        inner = leaf.value if isinstance(leaf, ops.Fp8Kernel) else leaf
        # Of a weight that the forward pass reads elsewhere, the array that JAX differentiates.
        return inner.trained if isinstance(inner, Detached) else inner

    probes = {path: leaf.seen_3 for path, leaf in weights.items() if isinstance(leaf, ops.Fp8Kernel)}
    arrays = {path: trained(leaf) for path, leaf in weights.items()}
    return Gradients(
        {path: array for path, array in arrays.items() if array is not None},
        {path: probe for path, probe in probes.items() if probe is not None},
    )


def _take(slots: Array, slot: Any, index: Array) -> Array:
    """Value of one layer, from [slots, k, ...].

    Contiguous by rows: without it XLA:TPU copies all slots in every tick, into the layout that a matmul of
    one of them prefers.
    """
    sizes = (1, 1, *slots.shape[2:])
    return row_major(jax.lax.dynamic_slice(slots, (slot, index, *[0] * (slots.ndim - 2)), sizes)).reshape(
        slots.shape[2:]
    )


def _put_all(slots: LayerSlots, tree: Any, slot: Any, index: Array, present: Present) -> LayerSlots:
    """`slots` with the values of one layer."""
    # Attention on a GPU keeps a constant, which is no traced array.
    leaves = map(jnp.asarray, jax.tree.leaves(tree))
    return [
        _put(slot_array, leaf, slot, index, present) for slot_array, leaf in zip(slots, leaves, strict=True)
    ]


def _put(slots: Array, leaf: Array, slot: Any, index: Array, present: Present) -> Array:
    # Without work the slot keeps its value: another microbatch may be waiting in it.
    if present is not True:
        leaf = jnp.where(present, leaf, _take(slots, slot, index))
    return jax.lax.dynamic_update_slice(slots, leaf[None, None], (slot, index, *[0] * leaf.ndim))


def _add(total_Y: Array, row: Array, grad: Array) -> Array:
    current = jax.lax.dynamic_index_in_dim(total_Y, row, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(total_Y, current + grad.astype(total_Y.dtype), row, 0)


def _highest(total_Y3: Array, row: Array, amax_3: Array, limit: Array) -> Array:
    current_3 = jax.lax.dynamic_index_in_dim(total_Y3, row, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(
        total_Y3, jnp.maximum(current_3, jnp.minimum(amax_3, limit)), row, 0
    )


def add_gradients(total: Params, addend: Params) -> Params:
    """Sums of gradients, each in the dtype of its total."""
    with jax.named_scope("reduce_gradients"):
        return jax.tree.map(lambda a, g: a + g.astype(a.dtype), total, addend)
