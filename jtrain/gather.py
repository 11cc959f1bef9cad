"""How a weight reaches the matmul that uses it, and how its gradient comes back: every byte on the network of both.

All of it runs inside the step's fully-manual `jax.shard_map`. `gather` and `scatter` are each other's transposes; one
rule finishes a gradient: it is summed over every axis that does not split its parameter.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jtrain.layout import Layout, ParamLayout, unsplit_axes
from jtrain.mesh import BATCH_AXES
from jtrain.model.param import Params, map_params
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
        return _fetch(layout, layouts[path], tree)

    return Placement(
        fetch=fetch,
        tensor=layout.mesh.tensor,
        remat=spec.remat,
        remat_save=spec.remat_save,
        regather=spec.zero_stage == 3 and layout.mesh.data > 1,
    )


def _splits_data(layout: Layout, p: ParamLayout) -> bool:
    return p.data_dim is not None and layout.mesh.data > 1


def trained_part(layout: Layout, params: Params) -> Params:
    """What is differentiated: arrays of the shape in which gradients accumulate.

    Under stage 2 parameters are whole but gradients are shards. Only the shard's shape matters: its value is never
    read, and XLA drops it.
    """

    def leaf(p: ParamLayout, value: Array) -> Array:
        if layout.spec.zero_stage != 2 or not _splits_data(layout, p):
            return value
        assert p.data_dim is not None
        return jax.lax.slice_in_dim(value, 0, value.shape[p.data_dim] // layout.mesh.data, axis=p.data_dim)

    return jax.tree.map(leaf, param_tree(layout, lambda p: p), params)


def with_whole(layout: Layout, trained: Params, params: Params) -> Params:
    """Under stage 2, (shard to differentiate, whole to compute with) at every leaf; otherwise `trained`."""
    if layout.spec.zero_stage != 2:
        return trained
    layouts = param_tree(layout, lambda p: p)
    return jax.tree.map(lambda p, t, w: (t, w) if _splits_data(layout, p) else t, layouts, trained, params)


def _fetch(layout: Layout, p: ParamLayout, leaf: Any) -> Array:
    """One layer's weight in the form that computes: whole over `data`; a matrix in the compute dtype."""
    spec = layout.spec
    if not p.info.is_matrix:
        return leaf  # scales multiply in float32
    if spec.zero_stage < 2 or not _splits_data(layout, p):
        return leaf.astype(spec.compute_dtype)
    assert p.data_dim is not None
    dim = p.data_dim - p.info.dims.startswith("Y")  # inside the loop over layers, Y is gone
    if spec.zero_stage == 2:
        shard, whole = leaf
        return _use_whole(shard, whole, dim, spec.compute_dtype, spec.reduce_dtype)
    return _gather(leaf, dim, spec.compute_dtype, spec.reduce_dtype)


def _gather(shard: Array, dim: int, compute_dtype: str, reduce_dtype: str) -> Array:
    """The whole weight out of its shards over `data`; its gradient is summed over `data` and returns as shards."""

    @jax.custom_vjp
    def gather(shard: Array) -> Array:
        return jax.lax.all_gather(shard.astype(compute_dtype), "data", axis=dim, tiled=True)

    def backward(_: None, grad: Array) -> tuple[Array]:
        return (_scatter(grad, dim, reduce_dtype).astype(shard.dtype),)

    gather.defvjp(lambda shard: (gather(shard), None), backward)
    return gather(shard)


def _use_whole(shard: Array, whole: Array, dim: int, compute_dtype: str, reduce_dtype: str) -> Array:
    """The whole weight, already here; its gradient is summed over `data` and goes to `shard`."""

    @jax.custom_vjp
    def use(shard: Array, whole: Array) -> Array:
        del shard
        return whole.astype(compute_dtype)

    def backward(_: None, grad: Array) -> tuple[Array, None]:
        return _scatter(grad, dim, reduce_dtype).astype(shard.dtype), None

    use.defvjp(lambda shard, whole: (use(shard, whole), None), backward)
    return use(shard, whole)


def _scatter(grad: Array, dim: int, reduce_dtype: str) -> Array:
    return jax.lax.psum_scatter(grad.astype(reduce_dtype), "data", scatter_dimension=dim, tiled=True)


def finish_gradient(layout: Layout, p: ParamLayout, grad: Array) -> Array:
    """The finished gradient, float32, split as the optimizer state is."""
    if layout.spec.zero_stage == 1 and _splits_data(layout, p):
        assert p.data_dim is not None
        grad = _scatter(grad, p.data_dim, layout.spec.reduce_dtype)
    axes = unsplit_axes(p.optimizer, layout.mesh.shape)
    return jax.lax.psum(grad.astype(layout.spec.reduce_dtype), axes).astype(jnp.float32)


def psum_batch(layout: Layout, x: Array) -> Array:
    """The sum over devices that hold different tokens."""
    return jax.lax.psum(x, tuple(axis for axis in (*BATCH_AXES, "context") if layout.mesh.shape[axis] > 1))
