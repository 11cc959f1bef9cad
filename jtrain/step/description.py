"""What a train step sends over the network and computes twice, read off abstract traces of its own functions.

Each part of a step is traced for a class of layouts, with sizes that tell each other apart (`labelled_sizes.py`), and
the trace scales to every layout of the class: over depth, devices and batch. A trace takes a few tenths of a second and
is kept in memory and on disk (`description_cache.py`); a scaled one takes a fraction of a millisecond.

Not traced are the collectives that the partitioner adds: of the gradient norm, and under Muon, which updates whole
matrices. Nor is the order of a pipeline's ticks, which its schedule says (`jtrain.pipeline`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jtrain.layout.dims import Batch
from jtrain.layout.layout import Layout, ParamLayout
from jtrain.layout.mesh import AXES, axis_names, local_shape
from jtrain.model.fp8_scaling import fp8_weights, history_shape, unseen
from jtrain.model.param import Params, map_params
from jtrain.model.transformer import Transformer
from jtrain.pipeline.schedule import StageHop
from jtrain.step.description_cache import kept
from jtrain.step.gradient_sums import GradientSums, no_sums, sums_gradients
from jtrain.step.labelled_sizes import Labelled, LayoutClass, Monomial, Part, class_of, evaluated, labelled, values_of
from jtrain.step.pipeline_chunks import ChunkPass
from jtrain.step.pipeline_ends import Ends
from jtrain.step.pipeline_ticks import chunk_passes, counts_of
from jtrain.step.pipelined import chunks_of, pipeline_placement
from jtrain.step.traced_collectives import Kind, When, traced_collectives
from jtrain.step.train_step import everywhere, finished, weights_of
from jtrain.step.zero import (
    gathered_once,
    gathers_once,
    own_heads,
    param_tree,
    placement_of,
    psum_batch,
    scattered_once,
    trained_part,
    whole_again,
    with_whole,
)
from jtrain_kernels import registry
from jtrain_kernels.device import DEVICES

_OVERLAPPED = tuple(f"{name}{bits}" for name in ("all_gather_matmul", "matmul_reduce_scatter") for bits in ("", "_fp8"))
"""Ops whose collectives are permutes if `layout.tensor_overlap` is True."""

WEIGHT_GRADIENTS, ONCE, UPDATE, METRICS = "weight_gradients", "gathered_once", "update", "metrics"
"""Scopes of gradients of weights that a pipeline computes later, of whole weights, of updated parameters, and of what
devices tell each other about themselves."""

_PARTS: tuple[Part, ...] = ("layers", "embedding", "loss", "end")


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

    part: Part | Literal["ticks", "partitioner"]
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
class LabelledCollective:
    """A `StepCollective` of a class of layouts: `ring` is the number of a torus dimension, None for whole axes."""

    scope: tuple[str, ...]
    parameter: str
    kind: Kind
    along: tuple[str, ...]
    ring: int | None
    dtype: str
    count: Monomial
    elements: Monomial
    when: When
    repeats_products: bool
    largest: bool


@dataclasses.dataclass(frozen=True)
class PartTrace:
    """What one part of a step does, for a class of layouts.

    again: names of the activations that the backward pass computes a second time.
    """

    collectives: tuple[LabelledCollective, ...]
    again: tuple[str, ...]


def repeated_activations(model: Transformer, layout: Layout, *, rows: int, seq_len: int) -> frozenset[str]:
    """Names of the layers' activations that the backward pass computes a second time.

    Args:
      rows: sequences that a device computes at a time.
    """
    return frozenset(traced(class_of("layers", model, layout, rows=rows, seq_len=seq_len)).again)


def step_collectives(model: Transformer, layout: Layout, *, rows: int, seq_len: int) -> list[StepCollective]:
    """The collectives of one step with an elementwise optimizer; those of one device are not sent and not listed.

    Args:
      rows: sequences that a device computes at a time.
    """
    found: list[StepCollective] = []
    shape = layout.mesh.shape
    for part in _PARTS:
        of = class_of(part, model, layout, rows=rows, seq_len=seq_len)
        values = values_of(of, model, layout, rows=rows, seq_len=seq_len)
        times = 1 if part == "end" else layout.spec.microbatches
        if part == "layers" and layout.pipeline is not None:
            times = chunk_passes(layout) * layout.pipeline.layers_per_chunk
        labelled_ones = traced(of).collectives
        counts = evaluated([one.count for one in labelled_ones], values)
        sizes = evaluated([one.elements for one in labelled_ones], values)
        for one, count, size in zip(labelled_ones, counts, sizes, strict=True):
            axes = tuple(axis for axis in AXES if axis in one.along and shape[axis] > 1)
            if axes:
                group = math.prod(shape[axis] for axis in axes) if one.ring is None else layout.rings[one.ring]
                group = 2 if one.kind == "collective-permute" else group
                found.append(
                    StepCollective(
                        part,
                        one.scope,
                        one.parameter,
                        one.kind,
                        one.along,
                        axes,
                        group,
                        one.dtype,
                        times * count,
                        times * count * size,
                        one.when,
                        one.repeats_products,
                        one.largest,
                    )
                )
    return found + _sums_of_squares(layout) + _between_stages(model, layout, rows * seq_len)


def _sums_of_squares(layout: Layout) -> list[StepCollective]:
    """Terms of the gradient norm: the partitioner sums one dimension of a parameter after the other."""
    found: list[StepCollective] = []
    for p in layout.params:
        for split in p.optimizer:
            axes = tuple(axis for axis in axis_names(split) if layout.mesh.shape[axis] > 1)
            if axes:
                group = math.prod(layout.mesh.shape[axis] for axis in axes)
                path = p.info.path
                found.append(StepCollective("partitioner", (), path, "all-reduce", axes, axes, group, "float32", 1, 1))
    return found


def _between_stages(model: Transformer, layout: Layout, tokens: int) -> list[StepCollective]:
    """Permutes of activations and cotangents: one per hop at the end of each tick, also where it carries nothing."""
    if layout.pipeline is None:
        return []
    counts = counts_of(layout)
    hops = [hop for hop in (*counts.activation_hops, *counts.cotangent_hops) if hop != StageHop.LOCAL]
    times = len(hops) * counts.num_ticks
    elements = times * (tokens // layout.mesh.context // layout.mesh.tensor) * model.d_model
    dtype, axes = layout.precision.compute_dtype, ("stage",)
    return [StepCollective("ticks", (), "", "collective-permute", axes, axes, 2, dtype, times, elements)]


@functools.cache
def traced(of: LayoutClass) -> PartTrace:
    """What one part of the step does, in a class of layouts."""
    return kept(of, _trace, _part_trace)


def _part_trace(collectives: list[dict[str, Any]], again: list[str]) -> PartTrace:
    """A trace from its fields as JSON has them."""
    return PartTrace(tuple(_labelled(**fields) for fields in collectives), tuple(again))


def _labelled(scope: list[str], along: list[str], count: Any, elements: Any, **fields: Any) -> LabelledCollective:
    (n, of_n), (size, of_size) = count, elements
    powers = [tuple((letter, power) for letter, power in of) for of in (of_n, of_size)]
    sizes: Any = dict(count=(n, powers[0]), elements=(size, powers[1]))
    return LabelledCollective(scope=tuple(scope), along=tuple(along), **sizes, **fields)


def _trace(of: LayoutClass) -> PartTrace:
    sizes = labelled(of)
    mesh = AbstractMesh(tuple(sizes.layout.mesh.shape.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    paths = [p.info.path for p in sizes.layout.params]
    found, again = traced_collectives(_JAXPRS[of.part](sizes, mesh))
    collectives = (
        LabelledCollective(
            one.scope,
            next((path for path in paths if ".".join(one.scope).endswith(path)), ""),
            one.kind,
            one.axes,
            None if one.ring is None else sizes.layout.rings.index(one.ring),
            one.dtype,
            sizes.monomial(math.prod(one.trips)),
            sizes.monomial(math.prod(one.dims)),
            one.when,
            one.repeats_products,
            one.largest,
        )
        for one in found
    )
    return PartTrace(tuple(collectives), tuple(sorted(again)))


def _jaxpr(mesh: AbstractMesh, fn: Any, *args: Any) -> Any:
    """The jaxpr of what every device computes."""
    forced = {name: "permute" if name in _OVERLAPPED else registry.REFERENCE for name in registry.ops()}
    with registry.on(DEVICES["h200"], forced=forced):
        local = jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        return jax.make_jaxpr(local)(*args)


def _array(shape: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))


def _blocks(layout: Layout, spec: Callable[[ParamLayout], P] = lambda p: p.param) -> Params:
    """One device's block of every parameter."""
    dtype = layout.precision.param_dtype
    return param_tree(layout, lambda p: _array(local_shape(spec(p), p.info.shape, layout.mesh.shape), dtype))


def _scaling(layout: Layout) -> dict[str, Any]:
    """One device's amax histories."""
    if layout.precision.matmul_dtype != "fp8_delayed":
        return {}
    infos = fp8_weights([p.info for p in layout.params])
    shape = layout.mesh.shape
    return map_params(
        lambda i: _array(local_shape(layout.per_layer, history_shape(i.shape[0]), shape), "float32"), infos
    )


def _batch(sizes: Labelled) -> Batch:
    """One device's rows of a microbatch."""
    ids = _array((sizes.rows, sizes.seq_len // sizes.layout.mesh.context), "int32")
    return Batch(ids, ids, ids, ids)


def _stream(sizes: Labelled) -> jax.ShapeDtypeStruct:
    """One device's residual stream."""
    mesh = sizes.layout.mesh
    length = sizes.seq_len // mesh.context // mesh.tensor
    return _array((sizes.rows, length, sizes.model.d_model), sizes.layout.precision.compute_dtype)


def _layers(sizes: Labelled, mesh: AbstractMesh) -> Any:
    model, layout, x = sizes.model, sizes.layout, _stream(sizes)
    of_stages = layout.pipeline is not None

    def loop(params: Params, scaling: Any, batch: Batch, x_BLD: Any, dy_BLD: Any) -> Any:
        unit, zero = jnp.float32(1), jnp.int32(0)
        trained = trained_part(layout, params)
        sums = GradientSums(layout, trained, zero, zero) if sums_gradients(layout) else None
        differentiated = trained if sums is None else sums.differentiated(no_sums(layout, trained))

        def forward(trained: Params, seen: Any, x_BLD: Any) -> Any:
            weights = weights_of(layout, trained, params, scaling, seen, unit, sums)
            x_BLD, losses = model.through_layers(weights["layers"], x_BLD, batch, placement_of(layout))
            return x_BLD, losses

        (y_BLD, losses), vjp = jax.vjp(forward, differentiated, unseen(scaling), x_BLD)
        return y_BLD, vjp((dy_BLD, jax.tree.map(jnp.ones_like, losses)))

    def chunks(params: Params, scaling: Any, batch: Batch, x_BLD: Any, dy_BLD: Any) -> Any:
        zero = jnp.int32(0)
        trained = trained_part(layout, params)
        shared = model.shared(batch)
        worker = chunks_of(model, layout, pipeline_placement(layout), params, trained, scaling, jnp.float32(1))
        worker = worker.traced(x_BLD, shared)
        work = ChunkPass(zero, shared, zero, zero)
        y_BLD, kept = worker.forward(work, x_BLD, worker.kept_slots(1))
        given = jax.lax.optimization_barrier((kept, worker.stash_slots(1), worker.no_gradients()))
        dx_BLD, stashes, gradients = worker.backward(work, dy_BLD, *given)
        if worker.split:
            with jax.named_scope(WEIGHT_GRADIENTS):
                gradients = worker.weight_gradients(work, stashes, gradients)
        return y_BLD, dx_BLD, gradients

    own = _blocks(layout, lambda p: p.spec(zero_sharded=layout.spec.zero_stage == 3))  # of shared key heads too
    args = own, _scaling(layout), _batch(sizes), x, x
    return _jaxpr(mesh, chunks if of_stages else loop, *args)


def _ends(layout: Layout, model: Transformer, params: Params) -> Ends:
    return Ends(model, layout, pipeline_placement(layout), params, 0, layout.mesh.stage - 1)


def _embedding(sizes: Labelled, mesh: AbstractMesh) -> Any:
    model, layout = sizes.model, sizes.layout

    def both(params: Params, token_BL: Any, dx_BLD: Any) -> Any:
        trained = trained_part(layout, params)
        if layout.pipeline is not None:
            ends = _ends(layout, model, params)
            return ends.embed(trained, token_BL), ends.embed_gradient(trained, token_BL, dx_BLD)
        placement = placement_of(layout)
        x_BLD, vjp = jax.vjp(lambda t: model.embed(with_whole(layout, t, params), token_BL, placement), trained)
        return x_BLD, vjp(dx_BLD)

    return _jaxpr(mesh, both, _blocks(layout), _batch(sizes).token_BL, _stream(sizes))


def _loss(sizes: Labelled, mesh: AbstractMesh) -> Any:
    model, layout = sizes.model, sizes.layout

    def both(params: Params, x_BLD: Any, target_BL: Any) -> Any:
        trained = trained_part(layout, params)
        if layout.pipeline is not None:
            return _ends(layout, model, params).loss(trained, x_BLD, target_BL, jnp.float32(1))
        placement = placement_of(layout)

        def objective(trained: Params, x_BLD: Any) -> Any:
            weights = with_whole(layout, trained, params)
            return model.cross_entropy(weights, model.normed(weights, x_BLD, placement), target_BL, placement)

        return jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)(trained, x_BLD)

    return _jaxpr(mesh, both, _blocks(layout), _stream(sizes), _batch(sizes).target_BL)


def _end(sizes: Labelled, mesh: AbstractMesh) -> Any:
    layout = sizes.layout

    def local(params: Params, grads: Params, seen: Any, batch: Batch) -> Any:
        own, found = own_heads(layout, params), ()
        if gathers_once(layout):
            with jax.named_scope(ONCE):
                found = gathered_once(layout, own)[1]
            grads = scattered_once(layout, grads)
        loss, num_tokens = jnp.float32(0), psum_batch(layout, jnp.sum(batch.target_BL))
        return own, found, finished(layout, grads, seen, loss, batch, num_tokens)

    def update(params: Params, rows: Any) -> Any:
        with jax.named_scope(UPDATE):
            again = jax.tree.map(lambda p, x: whole_again(layout, p, mesh, x), param_tree(layout, lambda p: p), params)
        with jax.named_scope(METRICS):
            return again, everywhere(mesh, rows)

    whole = gathers_once(layout)
    summed = _blocks(layout, lambda p: p.spec(zero_sharded=False) if whole else p.accumulator)
    seen = jax.eval_shape(unseen, _scaling(layout))
    params = param_tree(layout, lambda p: _array(p.info.shape, layout.precision.param_dtype))
    gradients = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)

    def both(blocks: Params, grads: Params, seen: Any, batch: Batch, params: Params, rows: Any) -> Any:
        return gradients(blocks, grads, seen, batch), update(params, rows)

    rows = _array((mesh.size, 2), "float32")
    return jax.make_jaxpr(both)(_blocks(layout), summed, seen, _batch(sizes), params, rows)


_JAXPRS = {"layers": _layers, "embedding": _embedding, "loss": _loss, "end": _end}
