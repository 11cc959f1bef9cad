"""Collectives of one train step, from the layout alone: kind, axes, dtype, number of arrays and bytes.

`jtrain.step.train_step` and `jtrain.model.transformer` write every collective out, and this module mirrors them line by
line; a test compiles the real step and finds the same arrays. Compilers may join several arrays into one instruction.

Not counted: the collectives that the partitioner adds under Muon, which updates whole matrices.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable
from typing import Literal

from jtrain.hlo.parser import wire_bytes
from jtrain.layout.dims import kv_heads_in_use
from jtrain.layout.layout import VOCABULARY_AXES, Layout, ParamLayout
from jtrain.layout.mesh import BATCH_AXES, ZERO_AXES, axis_names, unsplit_axes
from jtrain.layout.precision import itemsize
from jtrain.model.expert_dispatch import num_pieces
from jtrain.model.fp8_scaling import fp8_weights
from jtrain.model.router import MoESpec
from jtrain.model.saved_activations import kept_names
from jtrain.model.unembedding import num_parts
from jtrain.pipeline.schedule import StageHop
from jtrain.plan.estimate.pipeline import layer_passes, layers_here, splits_backward, ticks
from jtrain.plan.job import Job
from jtrain.step.gradient_sums import sums_gradients
from jtrain.step.zero import gathers_in_8_bits, gathers_once

type Kind = Literal[
    "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all", "collective-permute"
]

BETWEEN_STAGES = "stage to stage"
"""Purpose of the permutes of activations and cotangents at the end of each tick."""

BESIDE_WEIGHTS = "activations, backward"
"""Purpose of the sums of gradients of activations, and of the gather of attention's: what the layer's gradients of
weights, or those of its feed-forward part, do not wait for."""

GATHERED_AGAIN = "activations, again"
"""Purpose of the gathers of activations that the backward pass repeats, because a layer keeps no gathered input."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of a step that share a purpose, as one device sees them.

    axes: mesh axes that a group spans.
    group: devices of a group; fewer than the axes have if `Layout.rings` splits an axis.
    count: arrays per step.
    array_bytes: sum of the sizes of the whole arrays: results of all-gathers, operands of reduce-scatters and
      all-reduces, a device's operands of all-to-alls and collective-permutes. A ragged all-to-all counts with all
      experts chosen equally often.
    """

    purpose: str
    kind: Kind
    axes: tuple[str, ...]
    group: int
    dtype: str
    count: int
    array_bytes: int

    @property
    def wire_bytes(self) -> int:
        """Bytes that one device sends per step, on a ring: (n - 1) / n of the array, twice for an all-reduce."""
        return wire_bytes(self.kind, self.array_bytes, self.group)


def collectives(job: Job) -> tuple[Collective, ...]:
    """The collectives of one train step with an elementwise optimizer, largest first.

    Raises:
      UserError: the batch does not split evenly over the mesh and the microbatches.
    """
    model, layout, rows = job.model, job.layout, job.rows()
    found = _Found(layout)
    for p in layout.params:
        _parameter(found, job, p)
    tokens = rows * job.seq_len // layout.mesh.context
    if splits_embeddings(layout):
        _split_embeddings(found, job, tokens=tokens)
    if layout.mesh.tensor * layout.mesh.stage > 1:
        _split_vocabulary(found, job, tokens=tokens)
    if layout.mesh.tensor > 1:
        _activations(found, job, elements=tokens * model.d_model)
    if layout.pipeline is not None:
        _between_stages(found, job, tokens=tokens // layout.mesh.tensor)
    if layout.mesh.context > 1:
        _context(found, job, tokens=tokens)
    if model.moe is not None:
        _experts(found, job, model.moe, tokens=tokens)
    _scalars(found, layout)
    return found.result()


def splits_embeddings(layout: Layout) -> bool:
    """True if no device ever holds a whole embedding or unembedding: see `Placement.lookup`."""
    return layout.gathers_weights and not gathers_once(layout)


class _Found:
    """Sums of the arrays that share a purpose."""

    def __init__(self, layout: Layout) -> None:
        self.mesh = layout.mesh.shape
        self.rings = layout.rings or (layout.mesh.zero_shards,)
        self.totals: collections.Counter[tuple[str, Kind, tuple[str, ...], int, str, str]] = collections.Counter()

    def add(
        self,
        purpose: str,
        kind: Kind,
        axes: Iterable[str],
        dtype: str,
        elements: int,
        count: int,
        *,
        size: int | None = None,
        group: int | None = None,
    ) -> None:
        """Adds `count` arrays of `elements` each; nothing if the axes have one device, which needs no network."""
        used = tuple(axis for axis in axes if self.mesh[axis] > 1)
        if used and count:
            key = purpose, kind, used, group or math.prod(self.mesh[axis] for axis in used), dtype
            self.totals[*key, "count"] += count
            self.totals[*key, "bytes"] += count * elements * (size or itemsize(dtype))

    def over_zero_axes(self, purpose: str, kind: Kind, dtype: str, elements: int, count: int) -> None:
        """Adds a collective of `gather_shards` or `scatter_shards`: one per ring, each over its part of the array."""
        for index, group in enumerate(self.rings):
            self.add(purpose, kind, ZERO_AXES, dtype, elements // math.prod(self.rings[:index]), count, group=group)

    def result(self) -> tuple[Collective, ...]:
        """The collectives found, the most bytes on the wire first."""
        rows = [
            Collective(*key[:5], count=self.totals[*key[:5], "count"], array_bytes=self.totals[*key[:5], "bytes"])
            for key in self.totals
            if key[5] == "count"
        ]
        return tuple(sorted(rows, key=lambda row: -row.wire_bytes))


def _parameter(found: _Found, job: Job, p: ParamLayout) -> None:
    """Adds one parameter's gathers, the sums of its gradient, and its term of the gradient norm."""
    model, layout = job.model, job.layout
    spec, mesh = layout.spec, layout.mesh
    stacked = p.info.is_stacked
    whole = layout.local_size(p.spec(zero_sharded=False), p.info.shape)  # all layers, gathered over data
    if p.zero_dim is not None:
        # A tied table is used twice, as embedding and as unembedding.
        tied = model.tie_embeddings and p.info.path == "embed_VD"
        one = whole // layers_here(layout, model.num_layers) if stacked else whole
        passes = layer_passes(layout, model.num_layers) if stacked else spec.microbatches * (2 if tied else 1)
        if gathers_once(layout):
            if spec.zero_stage == 3:
                found.over_zero_axes("whole parameters", "all-gather", layout.precision.compute_dtype, whole, 1)
            found.over_zero_axes("gradients", "reduce-scatter", layout.precision.reduce_dtype, whole, 1)
            passes = 0
        if spec.zero_stage == 3 and stacked:
            dtype = layout.precision.compute_dtype
            if gathers_in_8_bits(layout) and fp8_weights([p.info]):
                dtype = "float8_e4m3fn"
            found.over_zero_axes("parameters, forward", "all-gather", dtype, one, passes)
            # W of 8-bit products needs the weight once more, for its largest value.
            again = splits_backward(layout) and layout.precision.matmul_dtype != "compute" and p.info.is_matrix
            times = passes * (2 if again else 1)
            found.over_zero_axes("parameters, backward", "all-gather", dtype, one, times)
        if spec.zero_stage == 2 or (spec.zero_stage == 3 and stacked):
            found.over_zero_axes("gradients", "reduce-scatter", layout.precision.reduce_dtype, one, passes)
        if spec.zero_stage == 1:
            found.over_zero_axes("gradients", "reduce-scatter", layout.precision.reduce_dtype, whole, 1)
        if spec.zero_stage in (1, 2):
            found.over_zero_axes("updated parameters", "all-gather", layout.precision.param_dtype, whole, 1)
    if p.shared_by > 1:  # `jtrain.step.zero.own_heads`, and its transpose
        own = layout.local_size(p.spec(zero_sharded=spec.zero_stage >= 1), p.info.shape)
        for dtype in (layout.precision.param_dtype, layout.precision.reduce_dtype):
            found.add("shared key heads", "all-to-all", ("tensor",), dtype, own, 1)
    local = layout.local_size(p.optimizer, p.info.shape)
    found.add("gradients", "all-reduce", unsplit_axes(p.optimizer, mesh.shape), layout.precision.reduce_dtype, local, 1)
    for split in p.optimizer:  # the partitioner sums one dimension after the other
        found.add("gradient norm", "all-reduce", axis_names(split), "float32", 1, 1)


def _split_embeddings(found: _Found, job: Job, *, tokens: int) -> None:
    """Adds the traffic of split embeddings: see `jtrain.step.zero._lookup` and `jtrain.model.unembedding`."""
    model, layout = job.model, job.layout
    spec, mesh = layout.spec, layout.mesh
    lookups = spec.microbatches * (1 if layout.pipeline is None else 2)  # a pipeline looks up again for the gradient
    found.add("token ids", "all-gather", ZERO_AXES, "int32", mesh.zero_shards * tokens, lookups, size=4)
    found.add(
        "embedding",
        "all-to-all",
        ZERO_AXES,
        layout.precision.compute_dtype,
        tokens * model.d_model,
        2 * spec.microbatches,
    )
    shards = mesh.tensor * mesh.stage
    parts = num_parts(model.vocab_size, shards)
    local = model.d_model * -(-model.vocab_size // shards // parts)  # of one part, gathered over data
    count = spec.microbatches * parts
    fetches = count * (2 if parts > 1 else 1)  # once for the loss, once for its gradient
    found.over_zero_axes("unembedding", "all-gather", layout.precision.compute_dtype, local, fetches)
    found.over_zero_axes("unembedding", "reduce-scatter", layout.precision.reduce_dtype, local, count)


def _split_vocabulary(found: _Found, job: Job, *, tokens: int) -> None:
    """Adds the loss over `tensor` and `stage`: hidden states, their gradient, three numbers of each token's logits.

    They are sent in chunks of tokens, the last one padded. If columns come in parts, all tokens are sent at once,
    because each part needs all hidden states.
    """
    model, layout = job.model, job.layout
    spec, n = layout.spec, layout.mesh.tensor * layout.mesh.stage
    tokens += -tokens % n
    in_parts = splits_embeddings(layout) and num_parts(model.vocab_size, n) > 1
    own = tokens if in_parts else tokens // n
    chunk = min(model.loss_chunk, own)
    chunks = -(-own // chunk)
    times = spec.microbatches if in_parts else spec.microbatches * chunks
    states = tokens if in_parts else chunk * n
    known = chunks * chunk if in_parts else chunk * n
    for kind in ("all-gather", "reduce-scatter"):
        found.add("loss", kind, VOCABULARY_AXES, layout.precision.compute_dtype, states * model.d_model, times)
    found.add("loss", "all-gather", VOCABULARY_AXES, "float32", 3 * n * known, times)


def _between_stages(found: _Found, job: Job, *, tokens: int) -> None:
    """Adds what stages send each other: see `jtrain.step.pipelined` and `jtrain.step.pipeline_ends`.

    Every tick ends with one permute per hop, also where it carries nothing. The embedding and its gradient are summed
    over stages, the output of the last layer is split over them, and its gradient gathered.

    Args:
      tokens: of one microbatch on one device.
    """
    layout, dtype = job.layout, job.layout.precision.compute_dtype
    steps = ticks(layout)
    assert steps is not None
    hops = [hop for hop in (*steps.activation_hops, *steps.cotangent_hops) if hop != StageHop.LOCAL]
    elements, times = tokens * job.model.d_model, layout.spec.microbatches
    found.add(BETWEEN_STAGES, "collective-permute", ("stage",), dtype, elements, len(hops) * steps.num_ticks, group=2)
    found.add("embedding", "all-reduce", ("stage",), dtype, elements, 2 * times)
    for kind in ("reduce-scatter", "all-gather"):
        found.add("last layer", kind, ("stage",), dtype, elements, times)


def _activations(found: _Found, job: Job, *, elements: int) -> None:
    """Adds the arrays of `gather_sequence` and `scatter_sequence` over `tensor`; `elements` of one [B, L, D]."""
    layout, spec = job.layout, job.layout.spec
    layers = layer_passes(layout, job.model.num_layers)
    # Each layer gathers before attention and before the MLP, and scatters after both; the backward pass is the
    # transpose, with as many of each. The embedding scatters, so its backward pass gathers.
    gathers, scatters = 4 * layers + spec.microbatches, 4 * layers + spec.microbatches
    kept = kept_names(layout)
    dtype = layout.precision.compute_dtype
    if spec.tensor_overlap:
        _permutes(found, layout, layers, kept, elements=elements)
        gathers, scatters, kept = spec.microbatches, spec.microbatches, None
    again = 0
    if kept is not None:
        again = 2 * layers
        if "attention_out" not in kept:  # the MLP's scatter is the last operation of a layer, and never recomputed
            scatters += layers
    if splits_backward(layout) and not spec.tensor_overlap:
        gathers += 4 * layers  # gradients of weights gather both inputs and both gradients of results again
    groups = spec.sequence_groups
    backward: dict[Kind, int] = {"all-gather": layers, "reduce-scatter": 2 * layers}
    counts: dict[Kind, int] = {"all-gather": gathers, "reduce-scatter": scatters}
    for kind, times in counts.items():
        beside = 0 if spec.tensor_overlap else backward[kind]
        of_layers = times - beside - spec.microbatches  # the embedding's are not in groups
        found.add("activations", kind, ("tensor",), dtype, elements // groups, of_layers * groups)
        found.add("activations", kind, ("tensor",), dtype, elements, spec.microbatches)
        found.add(BESIDE_WEIGHTS, kind, ("tensor",), dtype, elements // groups, beside * groups)
    found.add(GATHERED_AGAIN, "all-gather", ("tensor",), dtype, elements // groups, again * groups)


def _permutes(found: _Found, layout: Layout, layers: int, kept: tuple[str, ...] | None, *, elements: int) -> None:
    """Adds the permutes of the layers' overlapped projections: each gathers or scatters n - 1 of n parts.

    The forward pass gathers twice and scatters twice. In the backward pass each gathering projection gathers its input
    again, because a layer keeps no gathered input, and scatters; each scattering one gathers. Projections whose names
    are not kept are recomputed.

    With 8-bit matmuls gathered arrays travel in 8 bits, with the same scale on all devices. If the backward pass is
    split, the gradients of weights gather what the gradient of the input has gathered already. Of two devices XLA may
    join the gather that recomputes a projection with that of its gradient, which is not counted.
    """
    again = [0, 0, 0]
    if kept is not None:
        again = [
            not {"attention_q", "attention_k", "attention_v"} <= set(kept),
            not {"mlp_gate", "mlp_up"} <= set(kept),
            "attention_out" not in kept,
        ]
    gathers, sums = 4 + again[0] + again[1], 4 + again[2]
    gradients = 4 if splits_backward(layout) else 2
    mode, dtype, n = layout.precision.matmul_dtype, layout.precision.compute_dtype, layout.mesh.tensor
    forward, gradient = (dtype, dtype) if mode == "compute" else ("float8_e4m3fn", "float8_e5m2")
    for travels, times in ((forward, gathers), (gradient, gradients), (dtype, sums)):
        found.add(
            "activations", "collective-permute", ("tensor",), travels, elements // n, times * layers * (n - 1), group=2
        )
    if mode == "fp8_current":  # scales of x, kept for its second gather, and of dy
        found.add("scales", "all-reduce", ("tensor",), "float32", 1, gathers * layers)


def _context(found: _Found, job: Job, *, tokens: int) -> None:
    """Adds the traffic of attention over `context`: see `jtrain_kernels.attention`; `tokens` of one device.

    Segments are the same for all layers, so JAX hoists their sends in the forward pass out of a plain loop over layers,
    but not out of a pipeline; those of the backward pass and of recomputation stay in it, and so do all in a loop that
    sums gradients. If the backward pass recomputes a ring, XLA joins its first hop with the first hop of the gradient's
    ring: the same keys go to the same neighbour.
    """
    model, layout = job.model, job.layout
    spec, mesh = layout.spec, layout.mesh
    layers = layer_passes(layout, model.num_layers)
    kv_heads = kv_heads_in_use(model.num_kv_heads, mesh.tensor) // mesh.tensor  # of one device
    query, key = (tokens * heads * model.head_dim for heads in (model.num_heads // mesh.tensor, kv_heads))
    kept, axes = kept_names(layout), ("context",)
    plain = layout.pipeline is None and not sums_gradients(layout)
    again, once = layers if kept is not None else 0, spec.microbatches if plain else layers
    if spec.context_attention == "ulysses":
        key *= 1 if kv_heads % mesh.context == 0 else mesh.context // kv_heads
        for elements in (query, key):  # queries and the output; keys and values
            found.add(
                "heads for positions",
                "all-to-all",
                axes,
                layout.precision.compute_dtype,
                elements,
                2 * (2 * layers + again),
            )
        found.add("segments", "all-gather", axes, "int32", tokens * mesh.context, once + again, size=4)
        return
    recomputed = again if kept is not None and "attention" not in kept else 0
    hops = mesh.context - 1
    for dtype, elements, count in (
        (layout.precision.compute_dtype, key, 2 * (hops * (2 * layers + recomputed) - recomputed)),
        ("int32", tokens, hops * (once + layers + recomputed) - recomputed),
        ("float32", key, 2 * mesh.context * layers),
    ):
        size = 4 if dtype == "int32" else None
        found.add("keys and values", "collective-permute", axes, dtype, elements, count, size=size, group=2)


def _experts(found: _Found, job: Job, moe: MoESpec, *, tokens: int) -> None:
    """Adds the traffic of `jtrain.model.router` and `jtrain.model.expert_dispatch`."""
    model, layout, mesh = job.model, job.layout, job.layout.mesh
    layers = layer_passes(layout, model.num_layers)
    again = 0 if kept_names(layout) is None else layers
    pieces = num_pieces(tokens, moe.top_k)
    found.add(
        "expert counts",
        "all-gather",
        ("expert",),
        "int32",
        mesh.expert * pieces * moe.num_experts,
        layers + again,
        size=4,
    )
    # To the experts and back, and the same for gradients. No name in remat_save keeps any of it.
    row_elements = tokens * moe.top_k * model.d_model // pieces
    found.add(
        "rows to experts",
        "ragged-all-to-all",
        ("expert",),
        layout.precision.compute_dtype,
        row_elements,
        pieces * (4 * layers + 2 * again),
    )
    slots = tokens * moe.top_k
    found.add("routing", "all-gather", ("tensor",), "int32", slots, layers + again, size=4)
    found.add("routing", "all-gather", ("tensor",), "float32", slots, layers + again)
    found.add("routing", "reduce-scatter", ("tensor",), "float32", slots, layers)
    # A step needs only the gradient of the router's losses: if the backward pass counts the choices again, XLA drops
    # the first count.
    found.add("routing", "all-reduce", ("context", "tensor"), "int32", job.rows() * moe.num_experts, layers, size=4)


def _scalars(found: _Found, layout: Layout) -> None:
    """Adds the sums of metrics, and the maxima that delayed scaling needs."""
    found.add("metrics", "all-reduce", layout.mesh.shape, "float32", 1, 1)  # loss
    found.add("metrics", "all-gather", layout.mesh.shape, "float32", 2 * layout.mesh.size, 1)  # by_device
    batch = [axis for axis in layout.mesh.shape if axis in (*BATCH_AXES, "context")]
    found.add("metrics", "all-reduce", batch, "int32", 1, 1, size=4)  # valid targets
    found.add("metrics", "all-reduce", batch, "uint32", 2, 1, size=4)  # batch hash
    if layout.precision.matmul_dtype == "fp8_delayed":
        for info in fp8_weights([p.info for p in layout.params]):  # the absolute maxima of x, the weight and dy
            axes = [axis for axis in layout.mesh.shape if axis != "stage"]
            found.add("scales", "all-reduce", axes, "float32", 3 * layers_here(layout, info.shape[0]), 1)
