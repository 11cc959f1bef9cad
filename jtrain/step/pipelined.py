"""Forward and backward pass of a pipelined model: one scan over the ticks of a static schedule.

Every worker along `stage` runs the same program and reads its own row of `jtrain.pipeline.ticks.Ticks.table`, which says
what to do in each tick and in which slots inputs and cotangents are. The module's documentation there has the order of
work in a tick. What a worker does alone lies in conditionals on its row: their collectives have groups within one stage,
whose devices take the same branch. What all stages do together (embedding, loss, permutes) lies outside, or in
conditionals on the tick. Permutes are chains: XLA may zero several rings side by side (openxla/xla#45222).

Between the forward and the backward pass of a microbatch each layer keeps what `layout.remat` says, in the slot of the
chunk's input.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain.dims import Batch
from jtrain.layout import Layout
from jtrain.model.fp8_scaling import with_fp8
from jtrain.model.param import Params
from jtrain.model.placement import Placement
from jtrain.model.router import RouterLosses
from jtrain.model.transformer import Transformer
from jtrain.pipeline.placement import PipelineLayout, schedule_of
from jtrain.pipeline.schedule import Hop
from jtrain.pipeline.ticks import NONE, Field, Ticks, arriving_cotangent, arriving_input, make_ticks
from jtrain.step.pipeline_chunks import Chunks, Gradients, Kept
from jtrain.step.pipeline_ends import Ends
from jtrain.step.zero import placement_of, with_whole


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Carry:
    """What passes from tick to tick.

    inputs, cotangents: [slots, B, L, D], of this worker's chunks.
    kept: between forward and backward pass, in the slots of the inputs.
    layers: sums of gradients of this worker's layers.
    ends: sums of gradients of everything else, float32.
    nats: this device's share of the loss so far.
    """

    inputs: Any
    cotangents: Any
    kept: Kept
    layers: Gradients
    ends: Params
    nats: Any


@functools.cache
def ticks_of(pipeline: PipelineLayout, microbatches: int) -> Ticks:
    """The ticks of a layout's schedule."""
    return make_ticks(schedule_of(pipeline, microbatches))


def pipeline_placement(layout: Layout) -> Placement:
    """Placement of a pipelined model: layers keep named values and no weights, and stages share the vocabulary."""
    return dataclasses.replace(placement_of(layout), stage=layout.mesh.stage, regather=True)


def pipelined_gradients(
    model: Transformer,
    layout: Layout,
    params: Params,
    trained: Params,
    scaling: dict[str, Any],
    parts: Batch,
    unit: Float[Array, ""],
) -> tuple[Params, dict[str, Any], Float[Array, ""]]:
    """Gradients of one worker, summed over microbatches, the largest values in 8-bit matmuls, and its share of the loss.

    Args:
      params, trained, scaling: this worker's.
      parts: microbatches, the same on every stage.
      unit: 1 / tokens of the batch.
    """
    assert layout.pipeline is not None
    ticks = ticks_of(layout.pipeline, layout.spec.microbatches)
    placement = pipeline_placement(layout)
    ends = Ends(model, layout, placement, params, ticks.embed_worker, ticks.head_worker)
    worker = _Worker(model, layout, ticks, ends, _chunks(model, layout, placement, params, trained, scaling, unit))
    grads, nats = worker.run({key: value for key, value in trained.items() if key != "layers"}, parts, unit)
    return {**grads.ends, "layers": grads.layers.trained}, _like(scaling, {"layers": grads.layers.seen}), nats


def _like(tree: Any, other: Any) -> Any:
    """`other` without what `tree` has not."""
    return {key: _like(value, other[key]) for key, value in tree.items()} if isinstance(tree, dict) else other


def _chunks(
    model: Transformer,
    layout: Layout,
    placement: Placement,
    params: Params,
    trained: Params,
    scaling: dict[str, Any],
    unit: Float[Array, ""] | float,
) -> Chunks:
    assert layout.pipeline is not None
    pipeline, infos = layout.pipeline, tuple(p.info for p in layout.params)
    weights = with_whole(layout, trained, params)
    if layout.precision.matmul_dtype != "compute":
        unseen = jax.tree.map(lambda history_Y3S: jnp.zeros(history_Y3S.shape[:2], jnp.float32), scaling)
        weights = with_fp8(weights, infos, scaling, unseen, jnp.asarray(unit))
    real_PY = (jnp.asarray(pipeline.order) >= 0).reshape(pipeline.stages, -1)
    router = None
    if model.moe is not None:
        of_losses = jnp.stack([model.moe.balance_loss * unit, model.moe.router_z_loss * unit]) / model.num_layers
        router = RouterLosses(*of_losses)
    return Chunks(
        model.layer(placement),
        weights["layers"],
        pipeline.layers_per_chunk,
        real_PY[jax.lax.axis_index("stage")],
        router,
        1 if model.scan_layers else pipeline.layers_per_chunk,
    )


@dataclasses.dataclass(frozen=True)
class _Worker:
    """One device's work in every tick."""

    model: Transformer
    layout: Layout
    ticks: Ticks
    ends: Ends
    chunks: Chunks

    def run(self, trained: Params, parts: Batch, unit: Float[Array, ""]) -> tuple[_Carry, Float[Array, ""]]:
        """Runs all ticks.

        Args:
          trained: what JAX differentiates, without the layers.
        """
        x_BLD = jax.eval_shape(lambda token_BL: self.ends.embed(trained, token_BL), parts.token_BL[0])
        like = self.chunks.kept_like(x_BLD, self._shared(parts, jnp.int32(0)))
        table_TPF = jnp.asarray(self.ticks.table)
        row_TF = jax.lax.dynamic_index_in_dim(table_TPF, jax.lax.axis_index("stage"), axis=1, keepdims=False)
        ticks, per_chunk = self.ticks, self.chunks.per_chunk
        start = _Carry(
            jnp.zeros((ticks.num_inputs, *x_BLD.shape), x_BLD.dtype),
            jnp.zeros((ticks.num_cotangents, *x_BLD.shape), x_BLD.dtype),
            [jnp.zeros((ticks.num_inputs, per_chunk, *x.shape), x.dtype) for x in jax.tree.leaves(like)],
            self.chunks.no_gradients(),
            jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), trained),
            jnp.zeros((), jnp.float32),
        )

        def tick(carry: _Carry, row_F: Int[Array, " F"]) -> tuple[_Carry, None]:
            return self._tick(carry, row_F, trained, parts, unit, like), None

        end, _ = jax.lax.scan(tick, start, row_TF)
        return end, end.nats

    def _tick(
        self, carry: _Carry, row_F: Int[Array, " F"], trained: Params, parts: Batch, unit: Array, like: Any
    ) -> _Carry:
        inputs = self._embedded(carry.inputs, row_F, trained, parts)
        y_BLD, kept = self._forward(inputs, carry.kept, row_F, parts)
        cotangents, of_ends, nats = self._loss(carry, y_BLD, row_F, trained, parts, unit)
        dx_BLD, layers = self._backward(cotangents, kept, carry.layers, row_F, parts, like)
        of_ends = self._embedding_gradient(of_ends, dx_BLD, row_F, trained, parts)
        for hop in self.ticks.activation_hops:
            inputs = _stored(inputs, row_F[arriving_input(hop)], self._sent(y_BLD, hop, back=False))
        for hop in self.ticks.cotangent_hops:
            cotangents = _stored(cotangents, row_F[arriving_cotangent(hop)], self._sent(dx_BLD, hop, back=True))
        return _Carry(inputs, cotangents, kept, layers, of_ends, nats)

    def _embedded(self, inputs: Array, row_F: Array, trained: Params, parts: Batch) -> Array:
        """`inputs` with the embedding of the microbatch that enters the pipeline."""

        def embed(inputs: Array) -> Array:
            x_BLD = self.ends.embed(trained, parts.token_BL[row_F[Field.EMBED_MICROBATCH]])
            slot = jnp.where(row_F[Field.FORWARD_EMBEDS] == 1, row_F[Field.FORWARD_INPUT], NONE)
            return _stored(inputs, slot, x_BLD)

        return jax.lax.cond(row_F[Field.EMBED_MICROBATCH] != NONE, embed, lambda inputs: inputs, inputs)

    def _forward(self, inputs: Array, kept: Kept, row_F: Array, parts: Batch) -> tuple[Array, Kept]:
        slot = row_F[Field.FORWARD_INPUT]

        def forward(kept: Kept) -> tuple[Array, Kept]:
            shared = self._shared(parts, row_F[Field.FORWARD_MICROBATCH])
            return self.chunks.forward(inputs[slot], row_F[Field.FORWARD_CHUNK], slot, kept, shared)

        def rest(kept: Kept) -> tuple[Array, Kept]:
            return jnp.zeros(inputs.shape[1:], inputs.dtype), kept

        with jax.named_scope("layers"):
            return self._alone(row_F[Field.FORWARD_CHUNK] != NONE, forward, rest, kept)

    def _loss(
        self, carry: _Carry, y_BLD: Array, row_F: Array, trained: Params, parts: Batch, unit: Array
    ) -> tuple[Array, Params, Array]:
        """Cotangents, gradients and loss with those of the microbatch that has passed the last layer."""

        def loss(given: tuple[Array, Params, Array]) -> tuple[Array, Params, Array]:
            cotangents, of_ends, nats = given
            target_BL = parts.target_BL[row_F[Field.HEAD_MICROBATCH]]
            more, grads, dy_BLD = self.ends.loss(trained, y_BLD, target_BL, unit)
            cotangents = _stored(cotangents, row_F[Field.HEAD_COTANGENT], dy_BLD)
            return cotangents, _sum(of_ends, grads), nats + more

        given = (carry.cotangents, carry.ends, carry.nats)
        return jax.lax.cond(row_F[Field.HEAD_MICROBATCH] != NONE, loss, lambda given: given, given)

    def _backward(
        self, cotangents: Array, kept: Kept, layers: Gradients, row_F: Array, parts: Batch, like: Any
    ) -> tuple[Array, Gradients]:
        slot = row_F[Field.BACKWARD_INPUT]

        def backward(layers: Gradients) -> tuple[Array, Gradients]:
            dy_BLD = cotangents[row_F[Field.BACKWARD_COTANGENT]]
            shared = self._shared(parts, row_F[Field.BACKWARD_MICROBATCH])
            return self.chunks.backward(dy_BLD, row_F[Field.BACKWARD_CHUNK], slot, kept, like, layers, shared)

        def rest(layers: Gradients) -> tuple[Array, Gradients]:
            return jnp.zeros(cotangents.shape[1:], cotangents.dtype), layers

        with jax.named_scope("layers"):
            return self._alone(row_F[Field.BACKWARD_CHUNK] != NONE, backward, rest, layers)

    def _embedding_gradient(
        self, of_ends: Params, dx_BLD: Array, row_F: Array, trained: Params, parts: Batch
    ) -> Params:
        def add(of_ends: Params) -> Params:
            token_BL = parts.token_BL[row_F[Field.EMBED_GRADIENT_MICROBATCH]]
            return _sum(of_ends, self.ends.embed_gradient(trained, token_BL, dx_BLD))

        present = row_F[Field.EMBED_GRADIENT_MICROBATCH] != NONE
        return jax.lax.cond(present, add, lambda of_ends: of_ends, of_ends)

    def _shared(self, parts: Batch, microbatch: Array) -> Any:
        return self.model.shared(jax.tree.map(lambda x: x[microbatch], parts))

    def _alone[T](self, present: Array, work: Callable[[T], Any], rest: Callable[[T], Any], given: T) -> Any:
        """`work` where this worker has it in this tick, otherwise `rest`."""
        return jax.lax.cond(present, work, rest, given)

    def _sent(self, x_BLD: Array, hop: Hop, *, back: bool) -> Array:
        """What arrives over `hop`."""
        stages = self.ticks.schedule.stages
        if hop == Hop.LOCAL:
            return x_BLD
        if hop == Hop.WRAP:
            pairs = [(0, stages - 1)] if back else [(stages - 1, 0)]
        else:
            down = [(p, p + 1) for p in range(stages - 1)]
            pairs = down if hop == Hop.DOWN else [(b, a) for a, b in down]
        with jax.named_scope("pipeline"):
            return jax.lax.ppermute(x_BLD, "stage", pairs)


def _stored(slots: Array, slot: Array, x: Array) -> Array:
    """`slots` with x in one of them; as they are if it is NONE."""
    index = jnp.maximum(slot, 0)
    old = jax.lax.dynamic_index_in_dim(slots, index, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(slots, jnp.where(slot == NONE, old, x), index, 0)


def _sum(total: Params, more: Params) -> Params:
    with jax.named_scope("reduce_gradients"):
        return jax.tree.map(lambda a, g: a + g.astype(a.dtype), total, more)
