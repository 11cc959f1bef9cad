"""Forward and backward pass of a pipelined model: one scan over the ticks of a static schedule.

Every worker along `stage` runs the same program and reads its own row of `jtrain.pipeline.ticks.Ticks.table`,
which says what to do in each tick and in which slots inputs and cotangents are. The documentation of that
module has the order of work in a tick. What a worker does alone lies in conditionals on its row: their
collectives have groups within one stage, whose devices take the same branch. What all stages do together
(embedding, loss, permutes) lies outside, or in conditionals on the tick. Permutes are chains: XLA may zero
several rings side by side (openxla/xla#45222).

Between the forward and the backward pass of a microbatch each layer keeps what `layout.remat` says, in the
slot of the chunk's input.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jaxtyping import Array, Float, Int

from jtrain.layout.dims import Batch
from jtrain.layout.layout import Layout
from jtrain.model.forward_placement import row_major
from jtrain.model.param import Params
from jtrain.model.transformer import Transformer
from jtrain.pipeline.tick_grid import NONE
from jtrain.pipeline.ticks import SCOPES, TickColumn, Ticks, arriving_cotangent, arriving_input
from jtrain.step.objective import LossScale
from jtrain.step.pipeline_chunks import ChunkPass, Gradients, LayerSlots, Present, StageChunks, add_gradients
from jtrain.step.pipeline_ends import EndLayers, Ends
from jtrain.step.pipeline_ticks import layers_permute, ticks_of
from jtrain.step.pipeline_weights import chunks_of, pipeline_placement
from jtrain.step.stage_moves import send, store
from jtrain.step.zero import (
    gather_once,
    gathers_once,
    scatter_once,
    trained_part,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Carry:
    """The values that pass from tick to tick.

    inputs, cotangents: [slots, B, L, D], of this worker's chunks.
    layer_slots: what layers keep between forward and backward pass, in the slots of the inputs.
    stashes: between the two parts of a backward pass.
    layers: sums of gradients of this worker's layers.
    ends: sums of gradients of everything else, float32.
    nats: this device's share of the loss so far.
    """

    inputs: Any
    cotangents: Any
    layer_slots: LayerSlots
    stashes: LayerSlots
    layers: Gradients
    ends: Params
    nats: Any


def pipelined_gradients(
    model: Transformer,
    layout: Layout,
    params: Params,
    scaling: dict[str, Any],
    parts: Batch,
    scale: LossScale,
) -> tuple[Params, dict[str, Any], Float[Array, ""]]:
    """Gradients of one worker over all microbatches, its largest values in 8 bits, its share of the loss.

    Args:
      params, scaling: this worker's.
      parts: microbatches, the same on every stage.

    Returns:
      Gradients in the shapes of `trained_part`.
    """
    assert layout.pipeline is not None
    if gathers_once(layout):
        # Once per step: layers inside the ticks then see ZeRO-1, and neither gather nor scatter there.
        full_layout, params = gather_once(layout, params)
        grads, amax, nats = pipelined_gradients(model, full_layout, params, scaling, parts, scale)
        return scatter_once(layout, grads), amax, nats
    trained = trained_part(layout, params)
    ticks = ticks_of(layout)
    placement = pipeline_placement(layout)
    ends = Ends(model, layout, placement, params, ticks.embed_worker, ticks.head_worker)
    chunks = chunks_of(
        model, layout, placement, params, trained, scaling, scale.unit, scale.targets_per_token
    )
    worker = Worker(model, layout, ticks, ends, chunks)
    # Everything but the layers: their gradients are summed chunk by chunk in the carry.
    final = worker.run({key: value for key, value in trained.items() if key != "layers"}, parts, scale.unit)
    amax = {"layers": unflatten_dict(final.layers.amax, sep=".")} if scaling else {}
    return {**final.ends, "layers": unflatten_dict(final.layers.trained, sep=".")}, amax, final.nats


def pipelined_nats(
    model: Transformer, layout: Layout, params: Params, parts: Batch, *, top_k: int | None = None
) -> Any:
    """Cross entropy in nats of this device's tokens, [M, B, _], equal on all stages; 0 without a target. With
    `top_k` the result of `Transformer.top_k_of` instead.
    """
    assert layout.pipeline is not None
    ticks = ticks_of(layout, trains=False)
    placement = pipeline_placement(layout)
    ends = Ends(model, layout, placement, params, ticks.embed_worker, ticks.head_worker)
    trained = trained_part(layout, params)
    # Evaluation multiplies in the compute dtype, and there is no gradient whose size `unit` would estimate.
    chunks = chunks_of(model, layout, placement, params, trained, None, jnp.float32(0))
    worker = Worker(model, layout, ticks, ends, chunks)
    trained = {key: value for key, value in trained.items() if key != "layers"}
    return worker.evaluate(trained, parts, top_k)


@dataclasses.dataclass(frozen=True)
class Worker:
    """One device's work in every tick."""

    model: Transformer
    layout: Layout
    ticks: Ticks
    ends: Ends
    chunks: StageChunks

    @property
    def end_layers(self) -> EndLayers:
        """Embedding and loss with the layers that stages do not share."""
        return EndLayers(self.ends, self.chunks.router)

    def run(self, trained: Params, parts: Batch, unit: Float[Array, ""]) -> _Carry:
        """Runs all ticks.

        Args:
          trained: what JAX differentiates, without the layers.
        """
        ticks, x_BLD = self.ticks, self._residual_stream(trained, parts)
        worker = dataclasses.replace(self, chunks=self.chunks.trace(x_BLD, self._shared(parts, jnp.int32(0))))
        chunks = worker.chunks
        start = _Carry(
            jnp.zeros((ticks.num_inputs, *x_BLD.shape), x_BLD.dtype),
            jnp.zeros((ticks.num_cotangents, *x_BLD.shape), x_BLD.dtype),
            chunks.layer_slots(ticks.num_inputs),
            # The additional slot is the one that unsplit passes use within their own tick.
            chunks.stash_slots(ticks.num_stashes + self._mixes_splits),
            chunks.no_gradients(),
            jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), trained),
            jnp.zeros((), jnp.float32),
        )

        def tick(carry: _Carry, row_F: Int[Array, " F"]) -> tuple[_Carry, None]:
            return worker._tick(carry, row_F, trained, parts, unit), None

        # One scan over all ticks: the program has the code of one tick, however long the schedule is.
        return jax.lax.scan(tick, start, self._rows())[0]

    def evaluate(self, trained: Params, parts: Batch, top_k: int | None = None) -> Any:
        """Runs the ticks of a schedule of forward passes; returns each token's cross entropy, or with `top_k`
        `Transformer.top_k_of` it.
        """
        schedule, x_BLD = self.ticks.schedule, self._residual_stream(trained, parts)

        def head(y_BLD: Array, microbatch: Array) -> Any:
            if top_k is None:
                return self.end_layers.nats(trained, y_BLD, parts, microbatch)
            return self.end_layers.top_k(trained, y_BLD, parts, microbatch, top_k)

        def tick(carry: tuple[Array, Any], row_F: Int[Array, " F"]) -> tuple[tuple[Array, Any], None]:
            inputs, said = carry
            inputs = self._embed_next(inputs, row_F, trained, parts)
            y_BLD = self._apply_chunk(inputs, row_F, parts)
            said = self._evaluate_head(said, y_BLD, row_F, head)
            for hop in schedule.activation_hops:
                slot = row_F[arriving_input(hop)]
                inputs = store(inputs, slot, send(y_BLD, hop, schedule.stages, back=False))
            return (inputs, said), None

        inputs = jnp.zeros((self.ticks.num_inputs, *x_BLD.shape), x_BLD.dtype)
        microbatches = len(parts.token_BL)
        nothing = jax.tree.map(
            lambda x: jnp.zeros((microbatches, *x.shape), x.dtype), jax.eval_shape(head, x_BLD, jnp.int32(0))
        )
        return jax.lax.scan(tick, (inputs, nothing), self._rows())[0][1]

    def _residual_stream(self, trained: Params, parts: Batch) -> jax.ShapeDtypeStruct:
        return jax.eval_shape(lambda token_BL: self.ends.embed(trained, token_BL), parts.token_BL[0])

    def _rows(self) -> Int[Array, "T F"]:
        """This worker's part of the table."""
        stage = jax.lax.axis_index("stage")
        # By the axis index: all workers run one program, and only this look-up tells them apart.
        return jax.lax.dynamic_index_in_dim(jnp.asarray(self.ticks.table), stage, axis=1, keepdims=False)

    def _tick(
        self, carry: _Carry, row_F: Int[Array, " F"], trained: Params, parts: Batch, unit: Float[Array, ""]
    ) -> _Carry:
        # The order of a tick is that of `jtrain.pipeline.ticks`: slots are assigned for it.
        inputs = self._embed_next(carry.inputs, row_F, trained, parts)
        y_BLD, layer_slots = self._forward(inputs, carry.layer_slots, row_F, parts)
        is_single, head_sums = self.ticks.packing == "single", (carry.cotangents, carry.ends, carry.nats)
        if not is_single:
            head_sums = self._loss(head_sums, y_BLD, row_F, trained, parts, unit)
        # head_sums[0] and not carry.cotangents: the last stage may use this tick's own loss gradient.
        dx_BLD, stashes, layers = self.backward(head_sums[0], layer_slots, carry, row_F, parts)
        layers = self._weight_gradients(stashes, layers, row_F)
        if is_single:
            # Workers meet in the loss and in permutes. Where one of them came before a worker's only
            # operation of the tick, F, I and W of different workers took turns: ZB-H1 over 4 stages was half
            # as fast.
            y_BLD, dx_BLD, layers = jax.lax.optimization_barrier((y_BLD, dx_BLD, layers))
            head_sums = self._loss(head_sums, y_BLD, row_F, trained, parts, unit)
        cotangents, ends, nats = head_sums
        ends = self._embedding_gradient(ends, dx_BLD, row_F, trained, parts)
        # Moves come last: slots that were freed above may be filled here.
        schedule = self.ticks.schedule
        for hop in schedule.activation_hops:
            slot = row_F[arriving_input(hop)]
            inputs = store(inputs, slot, send(y_BLD, hop, schedule.stages, back=False))
        for hop in schedule.cotangent_hops:
            slot = row_F[arriving_cotangent(hop)]
            cotangents = store(cotangents, slot, send(dx_BLD, hop, schedule.stages, back=True))
        return _Carry(inputs, cotangents, layer_slots, stashes, layers, ends, nats)

    def _embed_next(self, inputs: Array, row_F: Array, trained: Params, parts: Batch) -> Array:
        """`inputs` with the embedding of the microbatch that enters the pipeline."""

        def embed(inputs: Array) -> Array:
            x_BLD = self.end_layers.enter(trained, parts, row_F[TickColumn.EMBED_MICROBATCH])
            # All workers compute the embedding, which sums over `stage`; one of them stores it.
            slot = jnp.where(row_F[TickColumn.FORWARD_EMBEDS] == 1, row_F[TickColumn.FORWARD_INPUT], NONE)
            return store(inputs, slot, x_BLD)

        # The column is the same on all workers, so a collective may lie in this branch.
        return jax.lax.cond(row_F[TickColumn.EMBED_MICROBATCH] != NONE, embed, lambda inputs: inputs, inputs)

    def _forward(
        self, inputs: Array, layer_slots: LayerSlots, row_F: Array, parts: Batch
    ) -> tuple[Array, LayerSlots]:
        chunk, slot = row_F[TickColumn.FORWARD_CHUNK], row_F[TickColumn.FORWARD_INPUT]

        def forward(layer_slots: LayerSlots, present: Present) -> tuple[Array, LayerSlots]:
            shared = self._shared(parts, row_F[TickColumn.FORWARD_MICROBATCH])
            return self.chunks.forward(
                ChunkPass(chunk, shared, slot, present=present), row_major(inputs[slot]), layer_slots
            )

        def idle(layer_slots: LayerSlots) -> tuple[Array, LayerSlots]:
            # Sent on all the same, as every worker takes part in a permute; the table has nobody store it.
            return jnp.zeros(inputs.shape[1:], inputs.dtype), layer_slots

        with jax.named_scope("layers"), jax.named_scope(SCOPES[0]):
            return self._compute_alone(chunk != NONE, forward, idle, layer_slots)

    def _apply_chunk(self, inputs: Array, row_F: Array, parts: Batch) -> Array:
        chunk = row_F[TickColumn.FORWARD_CHUNK]

        def forward(inputs: Array, _: Present) -> Array:
            shared = self._shared(parts, row_F[TickColumn.FORWARD_MICROBATCH])
            return self.chunks.apply(
                ChunkPass(chunk, shared), row_major(inputs[row_F[TickColumn.FORWARD_INPUT]])
            )

        with jax.named_scope("layers"), jax.named_scope(SCOPES[0]):
            return self._compute_alone(
                chunk != NONE, forward, lambda x: jnp.zeros(x.shape[1:], x.dtype), inputs
            )

    def _evaluate_head(
        self, said: Any, y_BLD: Array, row_F: Array, head: Callable[[Array, Array], Any]
    ) -> Any:
        microbatch = row_F[TickColumn.HEAD_MICROBATCH]

        def evaluate(said: Any) -> Any:
            return jax.tree.map(lambda slots, x: store(slots, microbatch, x), said, head(y_BLD, microbatch))

        # This column is the same on all workers too: the loss sums over `stage`.
        return jax.lax.cond(microbatch != NONE, evaluate, lambda said: said, said)

    def _loss(
        self,
        head_sums: tuple[Array, Params, Array],
        y_BLD: Array,
        row_F: Array,
        trained: Params,
        parts: Batch,
        unit: Array,
    ) -> tuple[Array, Params, Array]:
        """Cotangents, gradients and loss with those of the microbatch that has passed the last layer."""

        def loss(head_sums: tuple[Array, Params, Array]) -> tuple[Array, Params, Array]:
            cotangents, end_grads, nats = head_sums
            microbatch = row_F[TickColumn.HEAD_MICROBATCH]
            nats_part, grads, dy_BLD = self.end_layers.loss(trained, y_BLD, parts, microbatch, unit)
            cotangents = store(cotangents, row_F[TickColumn.HEAD_COTANGENT], dy_BLD)
            return cotangents, add_gradients(end_grads, grads), nats + nats_part

        # The column is the same on all workers: the loss sums over `stage`.
        return jax.lax.cond(
            row_F[TickColumn.HEAD_MICROBATCH] != NONE, loss, lambda head_sums: head_sums, head_sums
        )

    def backward(
        self, cotangents: Array, layer_slots: LayerSlots, carry: _Carry, row_F: Array, parts: Batch
    ) -> tuple[Array, LayerSlots, Gradients]:
        chunk, slot, stash = (
            row_F[field]
            for field in (TickColumn.BACKWARD_CHUNK, TickColumn.BACKWARD_INPUT, TickColumn.BACKWARD_STASH)
        )

        def backward(
            accumulated: tuple[LayerSlots, Gradients], present: Present
        ) -> tuple[Array, LayerSlots, Gradients]:
            shared = self._shared(parts, row_F[TickColumn.BACKWARD_MICROBATCH])
            is_unsplit = stash == NONE
            # An unsplit pass writes its stash into the last slot, and reads it back in `add`.
            chunk_pass = ChunkPass(
                chunk, shared, slot, jnp.where(is_unsplit, self.ticks.num_stashes, stash), present
            )
            outputs = self.chunks.backward(
                chunk_pass,
                row_major(cotangents[row_F[TickColumn.BACKWARD_COTANGENT]]),
                layer_slots,
                *accumulated,
            )
            # All passes alike: either none leaves a stash, or each W has its own field in the table.
            if not self._mixes_splits:
                return outputs
            dx_BLD, stashes, layers = outputs

            def add(layers: Gradients, present: Present) -> Gradients:
                return self.chunks.weight_gradients(
                    dataclasses.replace(chunk_pass, present=present), stashes, layers
                )

            return (
                dx_BLD,
                stashes,
                self._compute_alone(is_unsplit & present, add, lambda layers: layers, layers),
            )

        def idle(accumulated: tuple[LayerSlots, Gradients]) -> tuple[Array, LayerSlots, Gradients]:
            return jnp.zeros(cotangents.shape[1:], cotangents.dtype), *accumulated

        with jax.named_scope("layers"), jax.named_scope(SCOPES[1]):
            return self._compute_alone(chunk != NONE, backward, idle, (carry.stashes, carry.layers))

    @property
    def _mixes_splits(self) -> bool:
        """True if some backward passes are split and others not; those use one more slot, for a moment."""
        streams = self.ticks.schedule.streams
        return bool(self.chunks.split) and any(op.kind == "B" for stream in streams for op in stream)

    def _weight_gradients(self, stashes: LayerSlots, layers: Gradients, row_F: Array) -> Gradients:
        if not self.chunks.split:
            return layers
        chunk, stash = row_F[TickColumn.WEIGHT_CHUNK], row_F[TickColumn.WEIGHT_STASH]

        def add(layers: Gradients, present: Present) -> Gradients:
            return self.chunks.weight_gradients(
                ChunkPass(chunk, stash=stash, present=present), stashes, layers
            )

        with jax.named_scope("layers"), jax.named_scope(SCOPES[2]):
            return self._compute_alone(chunk != NONE, add, lambda layers: layers, layers)

    def _embedding_gradient(
        self, end_grads: Params, dx_BLD: Array, row_F: Array, trained: Params, parts: Batch
    ) -> Params:
        def add(end_grads: Params) -> Params:
            microbatch = row_F[TickColumn.EMBED_GRADIENT_MICROBATCH]
            return add_gradients(
                end_grads, self.end_layers.enter_gradient(trained, parts, microbatch, dx_BLD)
            )

        # The same on all workers, as in `_embed_next`.
        has_gradient = row_F[TickColumn.EMBED_GRADIENT_MICROBATCH] != NONE
        return jax.lax.cond(has_gradient, add, lambda end_grads: end_grads, end_grads)

    def _shared(self, parts: Batch, microbatch: Array) -> Any:
        return self.model.shared(jax.tree.map(lambda x: x[microbatch], parts))

    def _compute_alone[T](
        self, has_work: Array, work: Callable[[T, Present], Any], idle: Callable[[T], Any], operand: T
    ) -> Any:
        """`work` where this worker has it in this tick, otherwise `idle`.

        Layers with permutes compute in every tick, and `work` hides what comes of nothing: see
        `layers_permute`.
        """
        # Every worker must join its neighbours' permutes, so idle ones compute on zeros or old slots.
        if layers_permute(self.layout):
            return work(operand, has_work)
        return jax.lax.cond(has_work, lambda operand: work(operand, True), idle, operand)
