"""Jaxprs of the parts of a train step, traced from its own functions with labelled sizes.

Each is of what every device computes, so it holds the collectives and products of one device.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jtrain.layout.dims import Batch
from jtrain.layout.layout import Layout, ParamLayout
from jtrain.layout.mesh import AXES, local_shape
from jtrain.layout.precision import CODES_PER_BYTE
from jtrain.model.fp8_scaling import amax_probes, fp8_weights, history_shape
from jtrain.model.param import Params, map_params
from jtrain.model.router import RouterLosses
from jtrain.model.transformer import Transformer
from jtrain.step.description.labelled_sizes import LabelledSizes, label_sizes
from jtrain.step.description.layout_class import LayoutClass
from jtrain.step.gradient_sums import GradientSums, sums_gradients, zero_sums
from jtrain.step.objective import scale_of
from jtrain.step.optimizer_update import gather_updated
from jtrain.step.pipeline_chunks import ChunkPass
from jtrain.step.pipeline_ends import Ends
from jtrain.step.pipeline_weights import chunks_of, pipeline_placement
from jtrain.step.train_step import gather_rows, reduce_step, weights_of
from jtrain.step.zero import (
    attach_values,
    exchange_heads,
    gather_once,
    gathers_once,
    param_tree,
    placement_of,
    scatter_once,
    trained_part,
    trained_tree,
)
from jtrain_kernels import registry
from jtrain_kernels.device import DEVICES
from jtrain_kernels.platforms import for_a_reader

_OVERLAPPED = tuple(
    f"{name}{bits}" for name in ("all_gather_matmul", "matmul_reduce_scatter") for bits in ("", "_fp8")
)
"""Ops whose collectives are permutes if `layout.tensor_overlap` is True."""

WEIGHT_GRADIENTS, ONCE, UPDATE, METRICS = "weight_gradients", "gathered_once", "update", "metrics"
"""Scopes of gradients of weights that a pipeline computes later, of whole weights, of updated parameters, and
of what devices tell each other about themselves."""


def _jaxpr(mesh: AbstractMesh, fn: Any, *args: Any) -> Any:
    """The jaxpr of what every device computes."""
    # Overlapped ops show their permutes; all others trace as plain XLA, whatever a device would choose.
    forced = {name: "permute" if name in _OVERLAPPED else registry.REFERENCE for name in registry.ops()}
    with registry.on(DEVICES["h200"], forced=forced), for_a_reader():
        # P() although blocks differ between devices: arguments are one device's blocks already, and only
        # their shapes matter.
        local = jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        return jax.make_jaxpr(local)(*args)


def _array(shape: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))


def _block(layout: Layout, p: ParamLayout, spec: P) -> jax.ShapeDtypeStruct:
    dtype = p.dtype(layout.precision)
    # Matrices in blocks as the numbers that are made of them, which products read.
    dtype = layout.precision.compute_dtype if dtype in CODES_PER_BYTE else dtype
    return _array(local_shape(spec, p.info.shape, layout.mesh.shape), dtype)


def _blocks(layout: Layout, spec: Callable[[ParamLayout], P] = lambda p: p.param_partition) -> Params:
    """One device's block of every parameter."""
    return param_tree(layout, lambda p: _block(layout, p, spec(p)))


def _scaling(layout: Layout) -> dict[str, Any]:
    """One device's amax histories."""
    if layout.precision.matmul_dtype != "fp8_delayed":
        return {}
    infos = fp8_weights([p.info for p in layout.params])
    shape = layout.mesh.shape
    return map_params(
        lambda i: _array(local_shape(layout.per_layer, history_shape(i.shape[0]), shape), "float32"), infos
    )


def _batch(sizes: LabelledSizes) -> Batch:
    """One device's rows of a microbatch."""
    ids = _array((sizes.rows, sizes.seq_len // sizes.layout.mesh.context), "int32")
    # A batch has four arrays of one shape and dtype.
    drops = sizes.layout.adapter_dropout is not None
    return Batch(ids, ids, ids, ids, dropout_BL=_array(ids.shape, "uint32") if drops else None)


def residual_stream(sizes: LabelledSizes) -> jax.ShapeDtypeStruct:
    """One device's residual stream."""
    mesh = sizes.layout.mesh
    length = sizes.seq_len // mesh.context // mesh.tensor
    return _array((sizes.rows, length, sizes.model.d_model), sizes.layout.precision.compute_dtype)


def _layers(sizes: LabelledSizes, mesh: AbstractMesh) -> Any:
    model, layout, x = sizes.model, sizes.layout, residual_stream(sizes)
    of_stages = layout.pipeline is not None

    def loop(params: Params, scaling: Any, batch: Batch, x_BLD: Any, dy_BLD: Any) -> Any:
        # Values are never computed; `unit` stands for 1 / tokens of the batch, `zero` for any number.
        unit, zero = jnp.float32(1), jnp.int32(0)
        trained = trained_part(layout, params)
        sums = GradientSums(layout, trained, zero, zero) if sums_gradients(layout) else None
        # Where layers add their gradients to sums, these are what JAX differentiates by.
        differentiated = trained if sums is None else sums.trained_arrays(zero_sums(layout, trained))

        def forward(trained: Params, probes: Any, x_BLD: Any) -> Any:
            weights = weights_of(layout, trained, params, scaling, probes, unit, sums)
            x_BLD, losses = model.through_layers(weights, x_BLD, batch, placement_of(layout))
            return x_BLD, losses

        (y_BLD, losses), vjp = jax.vjp(forward, differentiated, amax_probes(scaling), x_BLD)
        # Losses last: `unread_losses` counts from the end of the results.
        return y_BLD, vjp((dy_BLD, jax.tree.map(jnp.ones_like, losses))), losses

    def chunks(params: Params, scaling: Any, batch: Batch, x_BLD: Any, dy_BLD: Any) -> Any:
        zero = jnp.int32(0)
        trained = trained_part(layout, params)
        shared = model.shared(batch)
        worker = chunks_of(
            model, layout, pipeline_placement(layout), params, trained, scaling, jnp.float32(1)
        )
        worker = worker.trace(x_BLD, shared)
        work = ChunkPass(zero, shared, zero, zero)
        # One slot of each kind, as one microbatch is in flight here.
        y_BLD, kept_slots = worker.forward(work, x_BLD, worker.layer_slots(1))
        backward_inputs = jax.lax.optimization_barrier(
            (kept_slots, worker.stash_slots(1), worker.no_gradients())
        )
        dx_BLD, stashes, gradients = worker.backward(work, dy_BLD, *backward_inputs)
        if worker.split:
            # By this scope readers tell the late pass from the backward pass (`StoredValues.passes`).
            with jax.named_scope(WEIGHT_GRADIENTS):
                gradients = worker.weight_gradients(work, stashes, gradients)
        return y_BLD, dx_BLD, gradients

    layer_params = _blocks(
        layout, lambda p: p.spec(zero_sharded=layout.spec.zero_stage == 3)
    )  # of shared key heads too
    args = layer_params, _scaling(layout), _batch(sizes), x, x
    return _jaxpr(mesh, chunks if of_stages else loop, *args)


def unread_losses(layout_class: LayoutClass) -> int:
    """Number of the last results of layers that nobody reads: only gradients read the routers' losses, those
    that layers save or compute again.
    """
    if layout_class.moe is None or layout_class.staged:
        return 0
    # Without an update of the router's bias, `load` is None, which is no result of a jaxpr.
    return len(dataclasses.fields(RouterLosses)) - (not layout_class.moe.bias_update_rate)


def _ends(layout: Layout, model: Transformer, params: Params) -> Ends:
    return Ends(model, layout, pipeline_placement(layout), params, 0, layout.mesh.stage - 1)


def _embedding(sizes: LabelledSizes, mesh: AbstractMesh) -> Any:
    model, layout = sizes.model, sizes.layout

    def embed_and_gradient(params: Params, token_BL: Any, dx_BLD: Any) -> Any:
        trained = trained_part(layout, params)
        if layout.pipeline is not None:
            ends = _ends(layout, model, params)
            return ends.embed(trained, token_BL), ends.embed_gradient(trained, token_BL, dx_BLD)
        placement = placement_of(layout)
        x_BLD, vjp = jax.vjp(
            lambda t: model.embed(attach_values(layout, t, params), token_BL, placement), trained
        )
        return x_BLD, vjp(dx_BLD)

    return _jaxpr(mesh, embed_and_gradient, _blocks(layout), _batch(sizes).token_BL, residual_stream(sizes))


def _loss(sizes: LabelledSizes, mesh: AbstractMesh) -> Any:
    model, layout = sizes.model, sizes.layout

    def both(params: Params, x_BLD: Any, target_BL: Any) -> Any:
        trained = trained_part(layout, params)
        if layout.pipeline is not None:
            return _ends(layout, model, params).loss(trained, x_BLD, target_BL, jnp.float32(1))
        placement = placement_of(layout)

        def objective(trained: Params, x_BLD: Any) -> Any:
            weights = attach_values(layout, trained, params)
            return model.cross_entropy(weights, model.normed(weights, x_BLD, placement), target_BL, placement)

        return jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)(trained, x_BLD)

    return _jaxpr(mesh, both, _blocks(layout), residual_stream(sizes), _batch(sizes).target_BL)


def _end(sizes: LabelledSizes, mesh: AbstractMesh) -> Any:
    layout = sizes.layout

    def local(params: Params, grads: Params, probes: Any, batch: Batch) -> Any:
        local_params, gathered_params = exchange_heads(layout, params), ()
        if gathers_once(layout):
            with jax.named_scope(ONCE):
                gathered_params = gather_once(layout, local_params)[1]
            grads = scatter_once(layout, grads)
        scale, batch = scale_of(layout, batch, has_router=sizes.model.router is not None)
        sums = reduce_step(layout, grads, probes, jnp.float32(0), batch, scale.num_tokens)
        # Returned with its scale: what nobody reads would not be traced.
        return local_params, gathered_params, sums, (scale.unit, scale.targets_per_token)

    def update(params: Params, rows: Any) -> Any:
        with jax.named_scope(UPDATE):
            # Outside of `local`, as in the step: the update is of whole arrays.
            updated_params = jax.tree.map(
                lambda p, x: gather_updated(layout, p, mesh, x), trained_tree(layout, lambda p: p), params
            )
        with jax.named_scope(METRICS):
            return updated_params, gather_rows(mesh, rows)

    is_gathered_once = gathers_once(layout)
    summed = trained_tree(
        layout,
        lambda p: _block(
            layout, p, p.spec(zero_sharded=False) if is_gathered_once else p.accumulator_partition
        ),
    )
    probes = jax.eval_shape(amax_probes, _scaling(layout))
    params = trained_tree(layout, lambda p: _array(p.info.shape, layout.precision.param_dtype))
    gradients = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)

    def both(blocks: Params, grads: Params, probes: Any, batch: Batch, params: Params, rows: Any) -> Any:
        return gradients(blocks, grads, probes, batch), update(params, rows)

    # A row per device: its share of the loss, and the bad elements of its new state.
    rows = _array((mesh.size, 2), "float32")
    return jax.make_jaxpr(both)(_blocks(layout), summed, probes, _batch(sizes), params, rows)


_JAXPRS = {"layers": _layers, "embedding": _embedding, "loss": _loss, "end": _end}


@functools.lru_cache(maxsize=64)
def jaxpr_of(layout_class: LayoutClass) -> Any:
    """The jaxpr of a part. Those of 22 classes of layers took 100 MiB."""
    sizes = label_sizes(layout_class)
    mesh = AbstractMesh(
        tuple(sizes.layout.mesh.shape.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES)
    )
    return _JAXPRS[layout_class.part](sizes, mesh)
