"""How a weight reaches the matmul that uses it, and how its gradient comes back: every byte on the network of both.

All of it runs inside the step's fully-manual `jax.shard_map`. `gather` and `scatter` are each other's transposes; one
rule finishes a gradient: it is summed over every axis that does not split its parameter.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from jtrain.layout import Layout, ParamLayout, unsplit_axes
from jtrain.mesh import BATCH_AXES
from jtrain.model import ops
from jtrain.model.param import Params, map_params
from jtrain.model.residuals import offloaded_names
from jtrain.model.stream import Detached
from jtrain.model.transformer import Placement


def param_tree(layout: Layout, fn: Callable[[ParamLayout], Any]) -> Params:
    """The nested dict of `fn` over all parameters."""
    layouts = {p.info.path: p for p in layout.params}
    return map_params(lambda info: fn(layouts[info.path]), tuple(p.info for p in layout.params))


def placement_of(layout: Layout) -> Placement:
    """How this layout's weights reach the model, inside the shard_map."""
    spec = layout.spec
    layouts = {p.info.path: p for p in layout.params}

    def fetch(path: str, tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: fetch(f"{path}.{key}", value) for key, value in tree.items()}
        if isinstance(tree, ops.Fp8Kernel):
            return dataclasses.replace(tree, value=fetch(path, tree.value))
        # A profile finds by these names which weight of which layer a collective is for.
        with jax.named_scope(path.replace(".", "/")):
            return _fetch(layout, layouts[path], tree)

    return Placement(
        fetch=fetch,
        tensor=layout.mesh.tensor,
        tensor_overlap=spec.tensor_overlap,
        context=ops.RowSplit(layout.mesh.context, spec.context_attention, layout.context_order),
        expert=layout.mesh.expert,
        remat=spec.remat,
        remat_save=spec.remat_save,
        regather=spec.zero_stage == 3 and layout.mesh.data > 1,
        streams=any(p.param_memory == "pinned_host" for p in layout.params),
        offload=offloaded_names(layout),
        lookup=functools.partial(_lookup, layout) if spec.zero_stage == 3 and layout.mesh.data > 1 else None,
    )


def along_torus(layout: Layout, mesh: Mesh) -> Layout:
    """The same layout, its collectives over `data` along the torus that the mesh's devices lie in, if they do.

    XLA:TPU writes an all-gather or reduce-scatter over 128 chips as an all-reduce, twice the bytes; one dimension of
    the torus at a time they stay what they are, and the bytes are the same as those of one over all.
    """
    line = mesh.devices[tuple(slice(None) if axis == "data" else 0 for axis in mesh.axis_names)]
    if line[0].platform != "tpu" or layout.rings:
        return layout
    rings = torus_rings(np.array([(*device.coords, device.core_on_chip) for device in line]))
    return dataclasses.replace(layout, rings=rings) if len(rings) > 1 else layout


def torus_rings(place_NK: np.ndarray) -> tuple[int, ...]:
    """How many of N devices in a row lie along each dimension of a torus, the slowest first.

    Args:
      place_NK: their K coordinates.

    Returns:
      Numbers whose product is N; (N,) if the devices do not go through a torus in order.
    """
    num, dims = place_NK.shape
    steps = {k: int(np.argmax(place_NK[:, k] != place_NK[0, k])) for k in range(dims) if np.ptp(place_NK[:, k])}
    order = sorted(steps, key=lambda k: -steps[k])  # a slower dimension changes later for the first time
    rings = tuple(len(np.unique(place_NK[:, k])) for k in order)
    if math.prod(rings) != num:
        return (num,)
    for index, k in enumerate(order):
        place = np.moveaxis(place_NK[:, k].reshape(rings), index, 0).reshape(rings[index], -1)
        if np.ptp(place, axis=1).any():
            return (num,)
    return rings


def _splits_data(layout: Layout, p: ParamLayout) -> bool:
    return p.data_dim is not None and layout.mesh.data > 1


def _is_detached(layout: Layout, p: ParamLayout) -> bool:
    """Whether what computes is not what is differentiated: under stage 2, or in host memory."""
    return p.param_memory == "pinned_host" or (layout.spec.zero_stage == 2 and _splits_data(layout, p))


def trained_part(layout: Layout, params: Params) -> Params:
    """What is differentiated: arrays of the shape in which gradients accumulate, on the device.

    Under stage 2 parameters are whole but gradients are shards, and a parameter in host memory has its gradient on the
    device, where microbatches add to it. Only the shape matters then: the value is never read, and XLA drops it.
    """

    def leaf(p: ParamLayout, value: Array) -> Array:
        if not _is_detached(layout, p):
            return value
        shape = list(value.shape)
        if layout.spec.zero_stage == 2 and _splits_data(layout, p):
            assert p.data_dim is not None
            shape[p.data_dim] //= layout.mesh.data
        return jnp.zeros(shape, value.dtype)

    return jax.tree.map(leaf, param_tree(layout, lambda p: p), params)


def with_whole(layout: Layout, trained: Params, params: Params) -> Params:
    """`trained`, and with it what computes where that is another array."""
    layouts = param_tree(layout, lambda p: p)
    return jax.tree.map(lambda p, t, w: Detached(t, w) if _is_detached(layout, p) else t, layouts, trained, params)


def _fetch(layout: Layout, p: ParamLayout, leaf: Any) -> Array:
    """One layer's weight in the form that computes: whole over `data`; a matrix in the compute dtype."""
    spec = layout.spec
    if not p.info.is_matrix:
        return leaf  # scales multiply in float32
    if not _splits_data(layout, p) or spec.zero_stage < 2:
        return _attached(leaf).astype(spec.compute_dtype)
    assert p.data_dim is not None
    dim = p.data_dim - p.info.dims.startswith("Y")  # inside the loop over layers, Y is gone
    if spec.zero_stage == 2:
        return _use_whole(layout, leaf.trained, leaf.value, dim)
    return _gather(layout, _attached(leaf), dim)


def _attached(leaf: Array | Detached) -> Array:
    """The value that computes, whose gradient goes to what is differentiated."""
    if not isinstance(leaf, Detached):
        return leaf

    @jax.custom_vjp
    def value_of(trained: Array, value: Array) -> Array:
        del trained
        return value

    value_of.defvjp(lambda trained, value: (value, None), lambda _, grad: (grad, None))
    return value_of(leaf.trained, leaf.value)


def _gather(layout: Layout, shard: Array, dim: int) -> Array:
    """The whole weight out of its shards over `data`; its gradient is summed over `data` and returns as shards."""

    @jax.custom_vjp
    def gather(shard: Array) -> Array:
        return gather_data(shard.astype(layout.spec.compute_dtype), dim, layout.rings)

    def backward(_: None, grad: Array) -> tuple[Array]:
        return (scatter_data(grad.astype(layout.spec.reduce_dtype), dim, layout.rings).astype(shard.dtype),)

    gather.defvjp(lambda shard: (gather(shard), None), backward)
    return gather(shard)


def _use_whole(layout: Layout, shard: Array, whole: Array, dim: int) -> Array:
    """The whole weight, already here; its gradient is summed over `data` and goes to `shard`."""

    @jax.custom_vjp
    def use(shard: Array, whole: Array) -> Array:
        del shard
        return whole.astype(layout.spec.compute_dtype)

    def backward(_: None, grad: Array) -> tuple[Array, None]:
        return scatter_data(grad.astype(layout.spec.reduce_dtype), dim, layout.rings).astype(shard.dtype), None

    use.defvjp(lambda shard, whole: (use(shard, whole), None), backward)
    return use(shard, whole)


def _lookup(layout: Layout, table_Vd: Array, token_BL: Array) -> Array:
    """Rows of a table whose columns are split over `data`.

    Every device looks up the tokens of all of them in its own columns, and keeps what of its own tokens the others send
    back. That is B * L * D elements on the network, where gathering the table would take V * D, and its gradient is
    summed in float32 where it will be used.
    """
    token_BL = jax.lax.all_gather(token_BL, "data", axis=0, tiled=True)
    x_BLd = ops.embedding_lookup(table_Vd, token_BL).astype(layout.spec.compute_dtype)
    return jax.lax.all_to_all(x_BLd, "data", split_axis=0, concat_axis=2, tiled=True)


def gather_data(shard: Array, dim: int, rings: tuple[int, ...]) -> Array:
    """All shards over `data` along `dim`, in the order of the devices."""
    for groups in reversed(_ring_groups(rings)):  # neighbours first: each step joins what is next to each other
        shard = jax.lax.all_gather(shard, "data", axis=dim, tiled=True, axis_index_groups=groups)
    return shard


def scatter_data(whole: Array, dim: int, rings: tuple[int, ...]) -> Array:
    """This device's shard along `dim` of the sum over `data`, in the dtype given: the transpose of `gather_data`."""
    for groups in _ring_groups(rings):
        whole = jax.lax.psum_scatter(whole, "data", scatter_dimension=dim, tiled=True, axis_index_groups=groups)
    return whole


def _ring_groups(rings: tuple[int, ...]) -> list[list[list[int]] | None]:
    """For each dimension of the torus, the slowest first, which devices along `data` differ only in it."""
    if not rings:
        return [None]
    place = np.arange(math.prod(rings)).reshape(rings)
    return [np.moveaxis(place, k, -1).reshape(-1, size).tolist() for k, size in enumerate(rings)]


def finish_gradient(layout: Layout, p: ParamLayout, grad: Array) -> Array:
    """The finished gradient, split as the optimizer state is: float32, or if nothing is left to sum, as it was found.

    The optimizer computes in float32 either way; bfloat16 gradients of a whole model once more in float32 would take
    twice their bytes.
    """
    if layout.spec.zero_stage == 1 and _splits_data(layout, p):
        assert p.data_dim is not None
        grad = scatter_data(grad.astype(layout.spec.reduce_dtype), p.data_dim, layout.rings)
    axes = unsplit_axes(p.optimizer, layout.mesh.shape)
    if not axes:
        return grad
    return jax.lax.psum(grad.astype(layout.spec.reduce_dtype), axes).astype(jnp.float32)


def own_shard(layout: Layout, p: ParamLayout, mesh: Mesh, param: Array) -> Array:
    """Of a parameter that is whole over `data`, the part whose optimizer state each device holds."""
    if p.param == p.optimizer:
        return param
    dim = p.data_dim
    assert dim is not None

    def local(whole: Array) -> Array:
        size = whole.shape[dim] // layout.mesh.data
        return jax.lax.dynamic_slice_in_dim(whole, jax.lax.axis_index("data") * size, size, dim)

    return jax.shard_map(local, mesh=mesh, in_specs=p.param, out_specs=p.optimizer, check_vma=False)(param)


def whole_again(layout: Layout, p: ParamLayout, mesh: Mesh, shard: Array) -> Array:
    """The parameter that `own_shard` cut, whole over `data`.

    Gathered in front, then put in its place: a gather straight into the donated parameter makes XLA:TPU copy all
    parameters when the step begins, and keep the copies to its end.
    """
    if p.param == p.optimizer:
        return shard
    dim = p.data_dim
    assert dim is not None

    def local(shard: Array) -> Array:
        parts = gather_data(shard, 0, layout.rings).reshape(layout.mesh.data, *shard.shape)
        return jnp.moveaxis(parts, 0, dim).reshape(*shard.shape[:dim], -1, *shard.shape[dim + 1 :])

    return jax.shard_map(local, mesh=mesh, in_specs=p.optimizer, out_specs=p.param, check_vma=False)(shard)


def psum_batch(layout: Layout, x: Array) -> Array:
    """The sum over devices that hold different tokens."""
    return jax.lax.psum(x, tuple(axis for axis in (*BATCH_AXES, "context") if layout.mesh.shape[axis] > 1))
