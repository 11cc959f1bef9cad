"""What one train step puts on the network, from the layout alone: kind, axes, dtype, arrays and bytes.

`jtrain.step` and `jtrain.model.transformer` write every collective out, so this is their mirror, line by line; a test
compiles the real step and finds the same, array by array. Compilers may join arrays into one instruction.

Under Muon the partitioner adds what whole matrices take; that is not here.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable
from typing import Literal

from jtrain.layout import Layout, ParamLayout, check_batch, itemsize, unsplit_axes
from jtrain.mesh import BATCH_AXES
from jtrain.model.residuals import kept_names
from jtrain.model.router import MoESpec
from jtrain.model.scaling import fp8_weights
from jtrain.model.transformer import Transformer
from jtrain.model.unembedding import num_parts

type Kind = Literal[
    "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all", "collective-permute"
]


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of a step that share a purpose, as one device sees them.

    axes: the mesh axes that a group spans.
    group: its devices; fewer than the axes have where `Layout.rings` takes an axis in turns.
    count: arrays per step.
    array_bytes: sum over the arrays of the whole array: an all-gather's result, a reduce-scatter's operand, what an
      all-reduce sums, what a device gives to an all-to-all or sends in a collective-permute; to a ragged all-to-all if
      all experts are chosen alike.
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
        if self.kind == "collective-permute":
            return self.array_bytes
        passes = 2 if self.kind == "all-reduce" else 1
        return passes * self.array_bytes * (self.group - 1) // self.group


def collectives(model: Transformer, layout: Layout, *, global_batch: int, seq_len: int) -> tuple[Collective, ...]:
    """The collectives of one train step with an elementwise optimizer, largest first.

    Raises:
      ValueError: the batch does not split evenly over the mesh and the microbatches.
    """
    rows = check_batch(layout.spec, layout.mesh, global_batch=global_batch, seq_len=seq_len)
    found = _Found(layout)
    for p in layout.params:
        _parameter(found, model, layout, p)
    tokens = rows * seq_len // layout.mesh.context
    if splits_embeddings(layout):
        _split_embeddings(found, model, layout, tokens=tokens)
    if layout.mesh.tensor > 1:
        _split_vocabulary(found, model, layout, tokens=tokens)
        _activations(found, model, layout, elements=tokens * model.d_model)
    if layout.mesh.context > 1:
        _context(found, model, layout, tokens=tokens)
    if model.moe is not None:
        _experts(found, model, model.moe, layout, rows=rows, tokens=tokens)
    _scalars(found, layout)
    return found.result()


def splits_embeddings(layout: Layout) -> bool:
    """Whether no device ever holds a whole embedding or unembedding: see `Placement.lookup`."""
    return layout.spec.zero_stage == 3 and layout.mesh.data > 1


class _Found:
    """Adds up arrays of the same purpose."""

    def __init__(self, layout: Layout) -> None:
        self.mesh = layout.mesh.shape
        self.rings = layout.rings or (self.mesh["data"],)
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
        """`count` arrays of `elements` each; nothing where the axes have one device, for then there is no network."""
        used = tuple(axis for axis in axes if self.mesh[axis] > 1)
        if used and count:
            key = purpose, kind, used, group or math.prod(self.mesh[axis] for axis in used), dtype
            self.totals[*key, "count"] += count
            self.totals[*key, "bytes"] += count * elements * (size or itemsize(dtype))

    def over_data(self, purpose: str, kind: Kind, dtype: str, elements: int, count: int) -> None:
        """`gather_data` or `scatter_data`: along the fastest ring only what its devices have together."""
        for index, group in enumerate(self.rings):
            self.add(purpose, kind, ("data",), dtype, elements // math.prod(self.rings[:index]), count, group=group)

    def result(self) -> tuple[Collective, ...]:
        rows = [
            Collective(*key[:5], count=self.totals[*key[:5], "count"], array_bytes=self.totals[*key[:5], "bytes"])
            for key in self.totals
            if key[5] == "count"
        ]
        return tuple(sorted(rows, key=lambda row: -row.wire_bytes))


def _parameter(found: _Found, model: Transformer, layout: Layout, p: ParamLayout) -> None:
    """One parameter's gathers, the sums of its gradient, and its term of the gradient's norm."""
    spec, mesh = layout.spec, layout.mesh
    stacked = p.info.dims.startswith("Y")
    whole = layout.local_size(p.spec(over_data=False), p.info.shape)  # all layers, whole over data
    # A tied table is used twice, as embedding and as unembedding.
    uses = model.num_layers if stacked else 2 if model.tie_embeddings and p.info.path == "embed_VD" else 1
    one = whole // uses if stacked else whole
    if p.data_dim is not None:
        passes = spec.microbatches * uses
        if spec.zero_stage == 3 and stacked:
            found.over_data("parameters, forward", "all-gather", spec.compute_dtype, one, passes)
            found.over_data("parameters, backward", "all-gather", spec.compute_dtype, one, passes)
        if spec.zero_stage == 2 or (spec.zero_stage == 3 and stacked):
            found.over_data("gradients", "reduce-scatter", spec.reduce_dtype, one, passes)
        if spec.zero_stage == 1:
            found.over_data("gradients", "reduce-scatter", spec.reduce_dtype, whole, 1)
        if spec.zero_stage in (1, 2):
            found.over_data("updated parameters", "all-gather", spec.param_dtype, whole, 1)
    local = layout.local_size(p.optimizer, p.info.shape)
    found.add("gradients", "all-reduce", unsplit_axes(p.optimizer, mesh.shape), spec.reduce_dtype, local, 1)
    for axis in mesh.shape:
        if axis in p.optimizer:  # the partitioner sums one axis after the other
            found.add("gradient norm", "all-reduce", (axis,), "float32", 1, 1)


def _split_embeddings(found: _Found, model: Transformer, layout: Layout, *, tokens: int) -> None:
    """Embeddings where no device holds them whole: see `jtrain.gather._lookup` and `jtrain.model.unembedding`."""
    spec, mesh = layout.spec, layout.mesh
    found.add("token ids", "all-gather", ("data",), "int32", mesh.data * tokens, spec.microbatches, size=4)
    found.add("embedding", "all-to-all", ("data",), spec.compute_dtype, tokens * model.d_model, 2 * spec.microbatches)
    parts = num_parts(model.vocab_size, mesh.tensor)
    local = model.d_model * -(-model.vocab_size // mesh.tensor // parts)  # of one part, whole over data
    count = spec.microbatches * parts
    fetches = count * (2 if parts > 1 else 1)  # for the loss, then again for its gradient
    found.over_data("unembedding", "all-gather", spec.compute_dtype, local, fetches)
    found.over_data("unembedding", "reduce-scatter", spec.reduce_dtype, local, count)


def _split_vocabulary(found: _Found, model: Transformer, layout: Layout, *, tokens: int) -> None:
    """The loss over `tensor`: hidden states, three numbers of each token's logits, and the gradient of the former.

    In chunks of tokens, the last filled up; where columns come in parts, all at once, for each part needs all states.
    """
    spec, n = layout.spec, layout.mesh.tensor
    in_parts = splits_embeddings(layout) and num_parts(model.vocab_size, n) > 1
    own = tokens if in_parts else tokens // n
    chunk = min(model.loss_chunk, own)
    chunks = -(-own // chunk)
    times = spec.microbatches if in_parts else spec.microbatches * chunks
    states = tokens if in_parts else chunk * n
    known = chunks * chunk if in_parts else chunk * n
    for kind in ("all-gather", "reduce-scatter"):
        found.add("loss", kind, ("tensor",), spec.compute_dtype, states * model.d_model, times)
    found.add("loss", "all-gather", ("tensor",), "float32", 3 * n * known, times)


def _activations(found: _Found, model: Transformer, layout: Layout, *, elements: int) -> None:
    """What `gather_sequence` and `scatter_sequence` send over `tensor`; `elements` of [B, L, D]."""
    spec = layout.spec
    layers = spec.microbatches * model.num_layers
    # Each layer gathers before attention and before the mlp, and scatters after both; transposed, the backward pass
    # does the opposite as often. The embedding scatters, so its backward pass gathers.
    gathers, scatters = 4 * layers + spec.microbatches, 4 * layers + spec.microbatches
    kept = kept_names(layout)
    dtype = spec.compute_dtype
    if spec.tensor_overlap:
        _permutes(found, layout, layers, kept, elements=elements)
        gathers, scatters, kept = spec.microbatches, spec.microbatches, None
    if kept is not None:
        gathers += 2 * layers
        if "attention_out" not in kept:  # what follows the mlp's scatter is never recomputed
            scatters += layers
    found.add("activations", "all-gather", ("tensor",), dtype, elements, gathers)
    found.add("activations", "reduce-scatter", ("tensor",), dtype, elements, scatters)


def _permutes(found: _Found, layout: Layout, layers: int, kept: tuple[str, ...] | None, *, elements: int) -> None:
    """What the layers' overlapped projections send: each gathers or scatters once, n - 1 of n parts.

    Forward two gather and two scatter. Backward each of the first gathers its input again and scatters, and each of the
    others gathers: a layer keeps no gathered input. What is recomputed besides is what has no name that is kept.

    Where matmuls are in 8 bits, what is gathered travels in 8 bits, scaled alike on all devices.
    """
    again = [0, 0, 0]
    if kept is not None:
        again = [
            not {"attention_q", "attention_k", "attention_v"} <= set(kept),
            not {"mlp_gate", "mlp_up"} <= set(kept),
            "attention_out" not in kept,
        ]
    gathers, sums = 4 + again[0] + again[1], 4 + again[2]
    mode, dtype, n = layout.spec.matmul_dtype, layout.spec.compute_dtype, layout.mesh.tensor
    forward, gradient = (dtype, dtype) if mode == "compute" else ("float8_e4m3fn", "float8_e5m2")
    for travels, times in ((forward, gathers), (gradient, 2), (dtype, sums)):
        found.add(
            "activations", "collective-permute", ("tensor",), travels, elements // n, times * layers * (n - 1), group=2
        )
    if mode == "fp8_current":  # x's, for whose second gather it is kept, and dy's
        found.add("scales", "all-reduce", ("tensor",), "float32", 1, (4 + again[0] + again[1]) * layers)


def _context(found: _Found, model: Transformer, layout: Layout, *, tokens: int) -> None:
    """What attention over `context` sends: see `jtrain_kernels.attention`; `tokens` of one device.

    Segments are the same for all layers, so JAX takes what the forward pass sends of them out of the loop over layers;
    the backward pass, and what it computes again, stays in it. Where it computes a ring again, XLA joins the first hop
    of that with the first of its own: the same keys, to the same neighbour.
    """
    spec, mesh = layout.spec, layout.mesh
    layers = spec.microbatches * model.num_layers
    query, key = (tokens * heads // mesh.tensor * model.head_dim for heads in (model.num_heads, model.num_kv_heads))
    kept, axes = kept_names(layout), ("context",)
    again, once = layers if kept is not None else 0, spec.microbatches
    if spec.context_attention == "ulysses":
        kv_heads = model.num_kv_heads // mesh.tensor
        key *= 1 if kv_heads % mesh.context == 0 else mesh.context // kv_heads
        for elements in (query, key):  # queries and the result; keys and values
            found.add("heads for positions", "all-to-all", axes, spec.compute_dtype, elements, 2 * (2 * layers + again))
        found.add("segments", "all-gather", axes, "int32", tokens * mesh.context, once + again, size=4)
        return
    recomputed = again if kept is not None and "attention" not in kept else 0
    hops = mesh.context - 1
    for dtype, elements, count in (
        (spec.compute_dtype, key, 2 * (hops * (2 * layers + recomputed) - recomputed)),
        ("int32", tokens, hops * (once + layers + recomputed) - recomputed),
        ("float32", key, 2 * mesh.context * layers),
    ):
        size = 4 if dtype == "int32" else None
        found.add("keys and values", "collective-permute", axes, dtype, elements, count, size=size, group=2)


def _experts(found: _Found, model: Transformer, moe: MoESpec, layout: Layout, *, rows: int, tokens: int) -> None:
    """What `jtrain.model.router` and `jtrain.model.expert_rows` send."""
    spec, mesh = layout.spec, layout.mesh
    layers = spec.microbatches * model.num_layers
    again = 0 if kept_names(layout) is None else layers
    found.add(
        "expert counts", "all-gather", ("expert",), "int32", mesh.expert * moe.num_experts, layers + again, size=4
    )
    # There and back, and the same for gradients; nothing of it has a name to be kept by.
    row_elements = tokens * moe.top_k * model.d_model
    found.add(
        "rows to experts", "ragged-all-to-all", ("expert",), spec.compute_dtype, row_elements, 4 * layers + 2 * again
    )
    slots = tokens * moe.top_k
    found.add("routing", "all-gather", ("tensor",), "int32", slots, layers + again, size=4)
    found.add("routing", "all-gather", ("tensor",), "float32", slots, layers + again)
    found.add("routing", "reduce-scatter", ("tensor",), "float32", slots, layers)
    # Of the router's losses a step wants only the gradient: where the backward pass counts the choices again, the first
    # count is not computed.
    found.add("routing", "all-reduce", ("context", "tensor"), "int32", rows * moe.num_experts, layers, size=4)


def _scalars(found: _Found, layout: Layout) -> None:
    found.add("metrics", "all-reduce", layout.mesh.shape, "float32", 1, 1)  # loss
    batch = [axis for axis in layout.mesh.shape if axis in (*BATCH_AXES, "context")]
    found.add("metrics", "all-reduce", batch, "int32", 1, 1, size=4)  # valid targets
    found.add("metrics", "all-reduce", batch, "uint32", 2, 1, size=4)  # batch hash
    if layout.spec.matmul_dtype == "fp8_delayed":
        for info in fp8_weights([p.info for p in layout.params]):  # the largest numbers of x, the weight and dy
            found.add("scales", "all-reduce", layout.mesh.shape, "float32", 3 * info.shape[0], 1)
