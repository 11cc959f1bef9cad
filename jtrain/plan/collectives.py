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
from jtrain.model.transformer import SAVEABLE, Transformer

type Kind = Literal["all-gather", "reduce-scatter", "all-reduce"]


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of a step that share a purpose, as one device sees them.

    axes, group: the mesh axes that a group spans, and its devices.
    count: arrays per step.
    array_bytes: sum over the arrays of the whole array: an all-gather's result, a reduce-scatter's operand, what an
      all-reduce sums.
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
    if layout.mesh.tensor > 1:
        _activations(found, model, layout, elements=rows * seq_len * model.d_model)
    _scalars(found, layout)
    return found.result()


def kept_activations(layout: Layout) -> tuple[str, ...] | None:
    """Names that a layer keeps for its backward pass besides its input; None if it keeps all and recomputes nothing."""
    spec = layout.spec
    if spec.remat == "none":
        # Weights are gathered again, so what was computed from them is kept by name.
        return SAVEABLE if spec.zero_stage == 3 and layout.mesh.data > 1 else None
    return spec.remat_save


class _Found:
    """Adds up arrays of the same purpose."""

    def __init__(self, layout: Layout) -> None:
        self.mesh = layout.mesh.shape
        self.totals: collections.Counter[tuple[str, Kind, tuple[str, ...], str, str]] = collections.Counter()

    def add(
        self,
        purpose: str,
        kind: Kind,
        axes: Iterable[str],
        dtype: str,
        elements: int,
        count: int,
        size: int | None = None,
    ) -> None:
        """`count` arrays of `elements` each; nothing where the axes have one device, for then there is no network."""
        used = tuple(axis for axis in axes if self.mesh[axis] > 1)
        if used and count:
            self.totals[purpose, kind, used, dtype, "count"] += count
            self.totals[purpose, kind, used, dtype, "bytes"] += count * elements * (size or itemsize(dtype))

    def result(self) -> tuple[Collective, ...]:
        rows = [
            Collective(
                *key[:3],
                group=math.prod(self.mesh[axis] for axis in key[2]),
                dtype=key[3],
                count=self.totals[*key[:4], "count"],
                array_bytes=self.totals[*key[:4], "bytes"],
            )
            for key in self.totals
            if key[4] == "count"
        ]
        return tuple(sorted(rows, key=lambda row: -row.wire_bytes))


def _parameter(found: _Found, model: Transformer, layout: Layout, p: ParamLayout) -> None:
    """One parameter's gathers, the sums of its gradient, and its term of the gradient's norm."""
    spec, mesh = layout.spec, layout.mesh
    stacked = p.info.dims.startswith("Y")
    over_tensor = mesh.tensor if p.tensor_dim is not None else 1
    whole = p.info.size // over_tensor  # all layers, whole over data
    # A tied table is fetched twice, as embedding and as unembedding.
    uses = model.num_layers if stacked else 2 if model.tie_embeddings and p.info.path == "embed_VD" else 1
    one = whole // uses if stacked else whole
    if p.data_dim is not None:
        passes = spec.microbatches * uses
        if spec.zero_stage == 3:
            found.add("parameters, forward", "all-gather", ("data",), spec.compute_dtype, one, passes)
            if stacked:  # the backward pass gathers again; embedding and unembedding are needed only once
                found.add("parameters, backward", "all-gather", ("data",), spec.compute_dtype, one, passes)
        if spec.zero_stage >= 2:
            found.add("gradients", "reduce-scatter", ("data",), spec.reduce_dtype, one, passes)
        if spec.zero_stage == 1:
            found.add("gradients", "reduce-scatter", ("data",), spec.reduce_dtype, whole, 1)
        if spec.zero_stage in (1, 2):
            found.add("updated parameters", "all-gather", ("data",), spec.param_dtype, whole, 1)
    local = layout.local_size(p.optimizer, p.info.shape)
    found.add("gradients", "all-reduce", unsplit_axes(p.optimizer, mesh.shape), spec.reduce_dtype, local, 1)
    for axis in mesh.shape:
        if axis in p.optimizer:  # the partitioner sums one axis after the other
            found.add("gradient norm", "all-reduce", (axis,), "float32", 1, 1)


def _activations(found: _Found, model: Transformer, layout: Layout, *, elements: int) -> None:
    """What `gather_sequence`, `scatter_sequence` and the unembedding send over `tensor`; `elements` of [B, L, D]."""
    spec = layout.spec
    layers = spec.microbatches * model.num_layers
    # Each layer gathers before attention and before the mlp, and scatters after both; transposed, the backward pass
    # does the opposite as often. The embedding scatters, so its backward pass gathers.
    gathers, scatters = 4 * layers + spec.microbatches, 4 * layers + spec.microbatches
    kept = kept_activations(layout)
    if kept is not None:
        gathers += 2 * layers
        if "attention_out" not in kept:  # what follows the mlp's scatter is never recomputed
            scatters += layers
    dtype = spec.compute_dtype
    found.add("activations", "all-gather", ("tensor",), dtype, elements, gathers)
    found.add("activations", "reduce-scatter", ("tensor",), dtype, elements, scatters)
    kernel = model.d_model * model.vocab_size
    found.add("unembedding", "all-gather", ("tensor",), dtype, kernel, spec.microbatches)
    found.add("unembedding", "reduce-scatter", ("tensor",), dtype, kernel, spec.microbatches)


def _scalars(found: _Found, layout: Layout) -> None:
    found.add("metrics", "all-reduce", layout.mesh.shape, "float32", 1, 1)  # loss
    batch = [axis for axis in layout.mesh.shape if axis in (*BATCH_AXES, "context")]
    found.add("metrics", "all-reduce", batch, "int32", 1, 1, size=4)  # valid targets
    found.add("metrics", "all-reduce", batch, "uint32", 2, 1, size=4)  # batch hash
