"""Products, collectives and memory traffic of a train step, read off abstract traces of its own functions.

Each part of a step is traced for a class of layouts (`traced_parts.py`), and the trace scales to every layout
of the class: over depth, devices and batch, in a fraction of a millisecond.

Not traced are the collectives that the partitioner adds: of the gradient norm, and under Muon, which updates
whole matrices. Nor is the order of a pipeline's ticks, which its schedule says (`jtrain.pipeline`).
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Literal

from jtrain.layout.layout import Layout
from jtrain.layout.mesh import AXES, axis_names
from jtrain.model.layer_scan import LAYER_INPUT
from jtrain.model.saved_activations import kept_names, offloaded_names
from jtrain.model.transformer import Transformer
from jtrain.pipeline.schedule import StageHop
from jtrain.step.description.jaxpr_places import When
from jtrain.step.description.labelled_sizes import label_values
from jtrain.step.description.layout_class import PartName, class_of
from jtrain.step.description.monomials import evaluate
from jtrain.step.description.pattern_sizes import layer_parts
from jtrain.step.description.saved_arrays import LabelledArray, saving_class, trace_saved
from jtrain.step.description.traced_parts import Gradient, PartTrace, trace_part
from jtrain.step.description.traced_work import Kind
from jtrain.step.objective import TOKENS, Objective, forward_passes
from jtrain.step.pipeline_ticks import chunk_passes, counts_of

_OTHERS: tuple[PartName, ...] = ("embedding", "loss", "end")
"""Parts of a step besides its layers."""

type _TraceAndValues = tuple[PartTrace, Mapping[str, tuple[int, int]]]
"""Trace of a part, and the sizes that its labels stand for."""


@dataclasses.dataclass(frozen=True)
class StepCollective:
    """Collectives of a step that are alike, as one device sees them.

    part: part of the step, or `ticks` of a pipeline, or `partitioner`.
    scope: names of `jax.named_scope` around them.
    parameter: path of the parameter that they move, or whose gradient they sum; empty for other arrays.
    along: mesh axes of a group; axes: those of them with several devices; group: devices of a group.
    when, repeats_products, largest: as in `TracedCollective`.
    count: arrays per step; elements: of the whole arrays together, as in `TracedCollective.dims`.
    """

    part: PartName | Literal["ticks", "partitioner"]
    scope: tuple[str, ...]
    parameter: str
    kind: Kind
    along: tuple[str, ...]
    axes: tuple[str, ...]
    group: int
    dtype: str
    count: int
    elements: int
    when: When = "forward"
    repeats_products: bool = False
    largest: bool = False


@dataclasses.dataclass(frozen=True)
class StepProduct:
    """Products of a step with weights that are alike, [rows, depth] x [depth, columns] in the forward pass.

    count: per step on one device.
    rows, depth, columns: sizes of one of them; of the gradient of a weight, `depth` and `columns` are the
      weight's.
    groups: experts, each of which multiplies some of the rows with its own weight; 0 for a weight of all
      rows.
    """

    part: PartName
    when: Gradient
    in_8_bits: bool
    count: int
    rows: int
    depth: int
    columns: int
    groups: int


@dataclasses.dataclass(frozen=True)
class StepPass:
    """Passes over memory of a step on one device that are alike: bytes that they read and write.

    of_experts: True for rows of tokens sorted by expert.
    """

    when: When
    of_experts: bool
    bytes: int


@dataclasses.dataclass(frozen=True)
class AttentionCalls:
    """Calls of attention's kernel of a step on one device that are alike.

    backward: True for its backward pass; causal: False where every query sees every key.
    """

    when: When
    backward: bool
    causal: bool
    count: int
    rows: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclasses.dataclass(frozen=True)
class Moment:
    """Bytes of tokens' arrays at one moment of a layer's backward pass, besides those that layers save.

    in_attention: True during attention's backward pass, whose kernel has a workspace of its own.
    """

    bytes: int
    in_attention: bool


@dataclasses.dataclass(frozen=True)
class SavedArray:
    """Arrays of one layer on one device that are alike and wait for the layer's backward pass.

    name: of `checkpoint_name`; empty for those without one.
    of_weights: True for copies of weights.
    memory: where they wait.
    """

    name: str
    dtype: str
    bytes: int
    of_weights: bool
    memory: Literal["device", "pinned_host"]


@dataclasses.dataclass(frozen=True)
class StepDescription:
    """A step of a layout.

    rows: sequences that a device computes at a time.
    objective: its loss. Pairs have forward passes of their own, which are those of the trace once more.
    """

    model: Transformer
    layout: Layout
    rows: int
    seq_len: int
    objective: Objective = TOKENS

    def _passes(self, part: PartName | Literal["ticks"], when: When | Gradient) -> int:
        """How often a step computes what a trace has once per microbatch, or per layer of a pipeline."""
        if when != "forward" or part not in ("layers", "embedding", "loss"):
            return 1
        extra_passes = forward_passes(self.objective, is_pipelined=self.layout.pipeline is not None)
        return 1 + (extra_passes.unembeddings if part == "loss" else extra_passes.layers)

    @functools.cached_property
    def _layer_models(self) -> Mapping[str, Transformer]:
        """Model of each part of the layers by its path; the whole model where all layers are alike."""
        has_parts = self.model.pattern and self.layout.pipeline is None
        return layer_parts(self.model) if has_parts else {"layers": self.model}

    @functools.cached_property
    def _saved(self) -> tuple[dict[str, int], dict[str, tuple[SavedArray, ...]]]:
        """Bytes of each named array of a layer, and the arrays that a layer of each part saves."""
        named_bytes, saved = dict[str, int](), dict[str, tuple[SavedArray, ...]]()
        for path, model in reversed([*self._layer_models.items()]):
            named_bytes, saved[path] = self._saved_by(model)
        return named_bytes, saved

    def _saved_by(self, model: Transformer) -> tuple[dict[str, int], tuple[SavedArray, ...]]:
        """Bytes of each named array of a layer, and the arrays that a layer saves."""
        sizes: Any = dict(rows=self.rows, seq_len=self.seq_len)
        layout_class = saving_class(class_of("layers", model, self.layout, **sizes))
        trace = trace_saved(layout_class)
        values = label_values(layout_class, model, self.layout, **sizes)
        names, names_on_host = kept_names(self.layout), offloaded_names(self.layout)

        def saved(arrays: tuple[LabelledArray, ...]) -> list[SavedArray]:
            sizes = evaluate([array.bytes for array in arrays], values)
            return [
                SavedArray(
                    array.name,
                    array.dtype,
                    size,
                    array.of_weights,
                    "pinned_host" if array.name in names_on_host else "device",
                )
                for array, size in zip(arrays, sizes, strict=True)
                # Without `tensor`, a gathered array is its own shard, which is listed already.
                if self.layout.mesh.tensor > 1 or not array.beside_shard
            ]

        named = saved(trace.named)
        named_bytes = collections.Counter[str]()
        for array in named:
            named_bytes[array.name] += array.bytes
        # None: layers without `jax.checkpoint` save all that their backward pass reads, named or not.
        if names is None:
            return named_bytes, tuple(saved(trace.every))
        return named_bytes, tuple(array for array in named if array.name in (LAYER_INPUT, *names))

    @property
    def named_bytes(self) -> Mapping[str, int]:
        """Name -> bytes of one layer's arrays of that name on one device, saved or not; also of its input."""
        return self._saved[0]

    @property
    def saved(self) -> tuple[SavedArray, ...]:
        """Arrays of one layer, or a repetition of a pattern, and microbatch that wait for the backward pass."""
        return self._saved[1]["layers"]

    def saved_bytes(self, path: str) -> int:
        """Bytes that the layers before or after a pattern save on the device, all together."""
        return sum(array.bytes for array in self._saved[1].get(path, ()) if not array.of_weights)

    def _trace(self, part: PartName, model: Transformer) -> _TraceAndValues:
        sizes: Any = dict(rows=self.rows, seq_len=self.seq_len)
        layout_class = class_of(part, model, self.layout, **sizes)
        return trace_part(layout_class), label_values(layout_class, model, self.layout, **sizes)

    @functools.cached_property
    def _layers(self) -> dict[str, _TraceAndValues]:
        """Trace of the layers of each path, and the sizes that its labels stand for."""
        return {path: self._trace("layers", model) for path, model in self._layer_models.items()}

    @functools.cached_property
    def _others(self) -> dict[PartName, _TraceAndValues]:
        """Trace of each other part."""
        return {part: self._trace(part, self.model) for part in _OTHERS}

    @property
    def recomputed_names(self) -> frozenset[str]:
        """Names of the layers' activations that the backward pass computes a second time."""
        return frozenset(name for trace, _ in self._layers.values() for name in trace.recomputed_names)

    def _repeats(self, part: PartName) -> int:
        """How often a device computes a part in a step; a pipeline's identity layers count too."""
        layout = self.layout
        if part == "layers" and layout.pipeline is not None:
            return layout.spec.microbatches * layout.pipeline.places // layout.pipeline.stages
        return layout.spec.microbatches

    @functools.cached_property
    def products(self) -> list[StepProduct]:
        """The products with weights on one device."""
        products: list[StepProduct] = []
        parts: list[tuple[PartName, _TraceAndValues]] = [("layers", one) for one in self._layers.values()]
        # An embedding is a look-up, and the end of a step multiplies nothing.
        parts.append(("loss", self._others["loss"]))
        for part, (trace, values) in parts:
            for product in trace.products:
                count, *sizes = evaluate((product.count, *product.sizes), values)
                # A trace is of one microbatch, or of one layer of a pipeline.
                count *= self._repeats(part) * self._passes(part, product.when)
                products.append(StepProduct(part, product.when, product.in_8_bits, count, *sizes))
        return products

    @functools.cached_property
    def passes(self) -> list[StepPass]:
        """The layers' passes over memory on one device."""
        repeats, passes = self._repeats("layers"), list[StepPass]()
        for trace, values in self._layers.values():
            sizes = evaluate([p.bytes for p in trace.memory.passes], values)
            passes += [
                StepPass(p.when, p.of_experts, repeats * self._passes("layers", p.when) * size)
                for p, size in zip(trace.memory.passes, sizes, strict=True)
            ]
        return passes

    @functools.cached_property
    def attention(self) -> list[AttentionCalls]:
        """The calls of attention's kernel on one device."""
        repeats, calls = self._repeats("layers"), list[AttentionCalls]()
        for trace, values in self._layers.values():
            for call in trace.memory.attention:
                count, *sizes = evaluate((call.count, *call.sizes), values)
                count *= repeats * self._passes("layers", call.when)
                calls.append(AttentionCalls(call.when, call.backward, call.causal, count, *sizes))
        return calls

    @functools.cached_property
    def moments(self) -> list[Moment]:
        """Moments of a layer's backward pass, of which one takes the most memory."""
        return self.moments_of("layers")

    def moments_of(self, path: str) -> list[Moment]:
        """Moments of the backward pass of the layers of a path; none if there are no such layers."""
        if path not in self._layers:
            return []
        trace, values = self._layers[path]
        has_shards = self.layout.mesh.tensor > 1
        # Few powers of sizes make up many moments.
        sizes: dict[Any, float] = {}
        moments: list[Moment] = []
        for moment in trace.memory.moments:
            # On one device along `tensor` a shard and the gathered array are one array.
            arrays = moment.bytes + (moment.shards if has_shards else ())
            for _, powers in arrays:
                if powers not in sizes:
                    sizes[powers] = math.prod((values[name][0] / values[name][1]) ** n for name, n in powers)
            moment_bytes = round(sum(factor * sizes[powers] for factor, powers in arrays))
            moments.append(Moment(moment_bytes, moment.in_attention))
        return moments

    @property
    def weight_input_bytes(self) -> int:
        """Bytes of what the gradients of one layer's weights need besides the weights."""
        trace, values = self._layers["layers"]
        return sum(evaluate(trace.memory.weight_inputs, values))

    @functools.cached_property
    def collectives(self) -> list[StepCollective]:
        """The collectives, with an elementwise optimizer; those of one device are not sent and not listed."""
        layout, shape = self.layout, self.layout.mesh.shape
        collectives: list[StepCollective] = []
        parts: list[tuple[PartName, str, _TraceAndValues]] = [
            ("layers", path, traced) for path, traced in self._layers.items()
        ]
        parts.extend((part, "", traced) for part, traced in self._others.items())
        for part, path, (trace, values) in parts:
            # The end is once per step, every other part once per microbatch.
            repeats = 1 if part == "end" else layout.spec.microbatches
            if part == "layers" and layout.pipeline is not None:
                repeats = chunk_passes(layout) * layout.pipeline.layers_per_chunk
            for collective in trace.collectives:
                axes = tuple(axis for axis in AXES if axis in collective.along and shape[axis] > 1)
                # A collective over axes of size 1 sends nothing.
                if not axes:
                    continue
                count, size = evaluate((collective.count, collective.elements), values)
                group = (
                    math.prod(shape[axis] for axis in axes)
                    if collective.ring is None
                    else layout.rings[collective.ring]
                )
                # A permute's group is a pair of devices, whatever its axes.
                group = 2 if collective.kind == "collective-permute" else group
                identity = (
                    part,
                    collective.scope,
                    collective.parameter.replace("layers.", f"{path}.", 1) if path else collective.parameter,
                    collective.kind,
                    collective.along,
                    axes,
                    group,
                    collective.dtype,
                )
                count *= self._passes(part, collective.when)
                trace_fields = collective.when, collective.repeats_products, collective.largest
                collectives.append(
                    StepCollective(*identity, repeats * count, repeats * count * size, *trace_fields)
                )
        return (
            collectives
            + _sums_of_squares(layout)
            + _between_stages(self.model, layout, self.rows * self.seq_len)
        )


def _sums_of_squares(layout: Layout) -> list[StepCollective]:
    """Terms of the gradient norm: the partitioner sums one dimension of a parameter after the other."""
    collectives: list[StepCollective] = []
    for p in layout.trained:
        # A dimension may be split over several axes, which one all-reduce sums together.
        for split in p.optimizer_partition:
            axes = tuple(axis for axis in axis_names(split) if layout.mesh.shape[axis] > 1)
            if axes:
                group = math.prod(layout.mesh.shape[axis] for axis in axes)
                path = p.info.path
                collectives.append(
                    StepCollective("partitioner", (), path, "all-reduce", axes, axes, group, "float32", 1, 1)
                )
    return collectives


def _between_stages(model: Transformer, layout: Layout, tokens: int) -> list[StepCollective]:
    """Permutes of activations and cotangents: one per hop at the end of each tick, also where it carries
    nothing.
    """
    if layout.pipeline is None:
        return []
    counts = counts_of(layout)
    hops = [hop for hop in (*counts.activation_hops, *counts.cotangent_hops) if hop != StageHop.LOCAL]
    # LOCAL hops stay within a worker.
    times = len(hops) * counts.num_ticks
    # The residual stream is split over `tensor` by positions too.
    elements = times * (tokens // layout.mesh.context // layout.mesh.tensor) * model.d_model
    dtype, axes = layout.precision.compute_dtype, ("stage",)
    return [StepCollective("ticks", (), "", "collective-permute", axes, axes, 2, dtype, times, elements)]
