"""Optimizer update of global arrays, on the device or streamed through host memory.

The update is elementwise (for Muon, layer by layer), so the sharding of the optimizer state decides what each
device computes. Parameters and state in host memory stream through the device slice by slice
(`host_offload.py`). Each device streams its own shard, so the network carries no additional bytes.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jtrain.layout.layout import Layout, ParamLayout
from jtrain.model.param import Params
from jtrain.optim import Moments, Optimizer, Update
from jtrain.optim.state import arrays, flatten_by_path, uses_muon
from jtrain.step.guard import not_finite, not_finite_on_cpu
from jtrain.step.host_offload import (
    Arrays,
    SliceIndex,
    Slices,
    StreamedParam,
    global_start,
    on_host_cores,
    stream_updates,
    to_device,
    to_host,
)
from jtrain.step.torus_collectives import gather_shards
from jtrain.step.zero import param_tree

_COUNT = "not_finite"
"""Array of a streamed parameter beside its own ones: NaN and infinite elements of each of its new slices."""

_GRAD = "grad"
"""Array of a streamed parameter that its update reads and does not write."""


def host_state(layout: Layout, optimizer: Optimizer) -> frozenset[tuple[str, str]]:
    """Returns the optimizer arrays in host memory, as pairs (path of the parameter, name of the array)."""
    state_arrays = {path: arrays(optimizer.spec, info) for path, info in optimizer.infos.items()}
    return layout.host_state(
        {
            (path, name): math.prod(x.shape) * x.dtype.itemsize
            for path, param_arrays in state_arrays.items()
            for name, x in param_arrays.items()
        }
    )


def make_update(
    optimizer: Optimizer, layout: Layout, mesh: Mesh
) -> Callable[[Update, Params, Params, Moments], tuple[Params, Moments, Array]]:
    """Returns `update(scalars, grads, params, opt_state) -> (params, opt_state, counts)`, to be traced.

    `scalars` come from `optimizer.begin`. `counts` is [devices] f32, in the order of the mesh: the elements
    of each device's shard of the new parameters and state that are NaN or infinite. Parameters and scales are
    counted; a moment that is not finite has made its parameter NaN. Arrays that stream through host memory
    are counted slice by slice.
    """
    host_arrays = host_state(layout, optimizer)
    on_host: dict[str, frozenset[str]] = {
        p.info.path: frozenset(name for path, name in host_arrays if path == p.info.path)
        | ({"param"} if _streams(p, optimizer) else frozenset())
        | ({_GRAD} if p.gradient_memory == "pinned_host" else frozenset())
        for p in layout.trained
    }
    streaming = [p for p in layout.trained if on_host[p.info.path]]

    def update(
        scalars: Update, grads: Params, params: Params, opt_state: Moments
    ) -> tuple[Params, Moments, Float[Array, " devices"]]:
        grad = flatten_by_path(optimizer.params, grads)
        param = flatten_by_path(param_tree(layout, lambda p: p.info), params)
        leaves = optimizer.leaves(opt_state)
        for p in layout.trained:
            path = p.info.path
            if not _streams(p, optimizer):
                device_param = to_device(param[path]) if p.param_memory == "pinned_host" else param[path]
                # The update reads and writes only this device's shard of the parameter, which is gathered
                # afterwards.
                param[path] = own_shard(layout, p, mesh, device_param)
            if not on_host[path]:
                new = optimizer.update_param(scalars, p.info, grad[path], param[path], leaves[path])
                param[path], leaves[path] = new
        # `update_param` makes a parameter NaN where a moment of its shape is not finite, so only scales are
        # left.
        resident = {
            path: (param[path], {name: x for name, x in leaves[path].items() if x.shape != param[path].shape})
            for path in (p.info.path for p in layout.trained)
            if not on_host[path]
        }
        if optimizer.spec.moment_dtype.startswith("bfloat16"):
            # The parameter needs the moments unrounded. XLA:GPU would fuse its update with the count, and
            # compute the moments there a second time, from copies of all old ones: 4 bytes per parameter.
            resident = jax.lax.optimization_barrier(resident)
        counts = _not_finite_by_device(layout, mesh, resident)
        if streaming:
            states = {p.info.path: {"param": param[p.info.path], **leaves[p.info.path]} for p in streaming}
            streamed_grads = {p.info.path: grad[p.info.path] for p in streaming}
            streamed_states, streamed_counts = _streamed_update(
                optimizer, layout, on_host, mesh, scalars, streamed_grads, states
            )
            counts += streamed_counts
            for path, new in streamed_states.items():
                param[path] = new.pop("param")
                leaves[path] = new
        for p in layout.trained:
            path = p.info.path
            if not _streams(p, optimizer):
                device_param = gather_updated(layout, p, mesh, param[path])
                param[path] = to_host(device_param) if p.param_memory == "pinned_host" else device_param
        new_params = param_tree(layout, lambda p: param[p.info.path])  # frozen ones as they were
        return new_params, optimizer.state(leaves), counts

    return update


def _not_finite_by_device(
    layout: Layout, mesh: Mesh, arrays: dict[str, tuple[Array, Arrays]]
) -> Float[Array, " devices"]:
    """Counts the NaN and infinite elements of each device's shards of the optimizer's arrays."""
    specs = {p.info.path: p.optimizer_partition for p in layout.trained if p.info.path in arrays}
    count = not_finite_on_cpu if mesh.devices.flat[0].platform == "cpu" else not_finite

    def count_shards(arrays: dict[str, tuple[Array, Arrays]]) -> Array:
        return count(arrays)[None].astype(jnp.float32)

    by_device = P(mesh.axis_names)
    return jax.shard_map(count_shards, mesh=mesh, in_specs=(specs,), out_specs=by_device, check_vma=False)(
        arrays
    )


def _streams(p: ParamLayout, optimizer: Optimizer) -> bool:
    """True if the parameter itself streams through the update, slice by slice of each device's shard.

    A parameter that is gathered after the update cannot stream, because the device then holds all of it.
    Neither can one that Muon updates, because Muon needs whole matrices.
    """
    return (
        p.param_memory == "pinned_host"
        and p.param_partition == p.optimizer_partition
        and not uses_muon(optimizer.spec, p.info)
    )


def _streamed_update(
    optimizer: Optimizer,
    layout: Layout,
    on_host: dict[str, frozenset[str]],
    mesh: Mesh,
    scalars: Update,
    grads: dict[str, Array],
    states: dict[str, Arrays],
) -> tuple[dict[str, Arrays], Float[Array, " devices"]]:
    """Updates the parameters that have arrays in host memory, by path; each device its own shard.

    Returns the new states, and how many elements of each device's shards are NaN or infinite.
    """
    layouts = [p for p in layout.trained if on_host[p.info.path]]

    def streamed_param(p: ParamLayout, scalars: Update, grad: Array, state: Arrays) -> StreamedParam:
        is_stacked = p.info.dims.startswith("Y")
        slices = Slices({_GRAD: grad, **state}, stacked=is_stacked)
        start = global_start(p.optimizer_partition, grad.shape)
        # One count per slice, sliced like every other array.
        counts = jnp.zeros((grad.shape[0], slices.parts) if is_stacked else (slices.parts,), jnp.int32)

        def update(index: SliceIndex, pieces: Arrays) -> Arrays:
            layer, part = slices.place(index)
            # The old count is not read: the new one is computed below.
            del pieces[_COUNT]
            if is_stacked:
                pieces = {name: x[0] for name, x in pieces.items()}
            grad, param = pieces.pop(_GRAD), pieces.pop("param")
            # Noise depends on the global index, so slices round as the whole array would.
            first = (start[is_stacked] + part * grad.shape[0], *start[is_stacked + 1 :])
            param, new_state = optimizer.update_param(
                scalars, p.info, grad, param, pieces, layer=layer if is_stacked else None, start=first
            )
            new = {"param": param, **new_state}
            new[_COUNT] = not_finite(new)[None]
            return {name: x[None] for name, x in new.items()} if is_stacked else new

        return StreamedParam(state | {_GRAD: grad, _COUNT: counts}, on_host[p.info.path], slices, update)

    def update_on_host(p: ParamLayout, scalars: Update, grad: Array, state: Arrays) -> Arrays:
        def update(scalars: Update, grad: Array, state: Arrays) -> Arrays:
            new_state = {name: x for name, x in state.items() if name != "param"}
            param, new_state = optimizer.update_param(scalars, p.info, grad, state["param"], new_state)
            new = {"param": param, **new_state}
            return new | {_COUNT: not_finite(new)}

        new = on_host_cores(update, scalars, grad, state)
        # Only the count goes back to the device, and a parameter that lives there.
        device_names = {_COUNT} if "param" in on_host[p.info.path] else {_COUNT, "param"}
        return new | {name: to_device(new[name]) for name in device_names}

    def update_shards(
        scalars: Update, grads: dict[str, Array], states: dict[str, Arrays]
    ) -> tuple[dict[str, Arrays], Array]:
        # If update=host, the host's cores update parameters whose state is in host memory. A parameter in
        # host memory whose state is on the device streams, and so does one with only its gradient in host
        # memory.
        host_params = [
            p
            for p in layouts
            if layout.spec.offload.update == "host" and on_host[p.info.path] - {"param", _GRAD}
        ]
        new_states = {
            p.info.path: update_on_host(p, scalars, grads[p.info.path], states[p.info.path])
            for p in host_params
        }
        # Stacks first: an array of one slice needs no index that the first fetch could wait for.
        streamed_params = sorted(
            (p for p in layouts if p not in host_params), key=lambda p: not p.info.is_stacked
        )
        leaves = [
            streamed_param(p, scalars, grads[p.info.path], states[p.info.path]) for p in streamed_params
        ]
        new_states |= {
            p.info.path: new
            for p, new in zip(streamed_params, stream_updates(leaves, scalars.grad_norm), strict=True)
        }
        # Gradients were only read; their buffers are the caller's.
        for new in new_states.values():
            new.pop(_GRAD, None)
        count = sum((jnp.sum(new.pop(_COUNT)) for new in new_states.values()), jnp.zeros((), jnp.int32))
        return new_states, count[None].astype(jnp.float32)

    specs = {p.info.path: p.optimizer_partition for p in layouts}
    out_specs = (specs, P(mesh.axis_names))
    return jax.shard_map(
        update_shards, mesh=mesh, in_specs=(P(), specs, specs), out_specs=out_specs, check_vma=False
    )(scalars, grads, states)


def own_shard(layout: Layout, p: ParamLayout, mesh: Mesh, param: Array) -> Array:
    """Slices from a whole parameter the shard whose optimizer state each device holds."""
    if p.param_partition == p.optimizer_partition:
        return param
    dim = p.zero_dim
    assert dim is not None

    def slice_shard(full_param: Array) -> Array:
        size = full_param.shape[dim] // layout.mesh.zero_shards
        return jax.lax.dynamic_slice_in_dim(
            full_param, jax.lax.axis_index(layout.mesh.zero_axes) * size, size, dim
        )

    return jax.shard_map(
        slice_shard, mesh=mesh, in_specs=p.param_partition, out_specs=p.optimizer_partition, check_vma=False
    )(param)


def gather_updated(layout: Layout, p: ParamLayout, mesh: Mesh | AbstractMesh, shard: Array) -> Array:
    """Gathers the parameter that `own_shard` sliced.

    Shards are gathered along a new leading dimension and then moved into place. With a gather directly into
    the donated parameter, XLA:TPU copies all parameters at the start of the step and keeps the copies to its
    end.
    """
    if p.param_partition == p.optimizer_partition:
        return shard
    dim = p.zero_dim
    assert dim is not None

    def gather_param(shard: Array) -> Array:
        parts = gather_shards(layout, shard, 0).reshape(layout.mesh.zero_shards, *shard.shape)
        return jnp.moveaxis(parts, 0, dim).reshape(*shard.shape[:dim], -1, *shard.shape[dim + 1 :])

    return jax.shard_map(
        gather_param, mesh=mesh, in_specs=p.optimizer_partition, out_specs=p.param_partition, check_vma=False
    )(shard)
