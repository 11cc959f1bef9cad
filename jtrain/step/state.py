"""Train state (parameters, optimizer state, step): its shardings and its first values."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jtrain.layout.dims import ParamInfo
from jtrain.layout.layout import Layout, ParamLayout
from jtrain.model.adapters.base_hash import WORDS
from jtrain.model.adapters.block_quantization import is_quantized, store
from jtrain.model.fp8_scaling import first_scaling
from jtrain.model.param import Params, at_path, init_param, init_params, map_params
from jtrain.optim import Moments, Optimizer, check_layout
from jtrain.optim.optimizer import check_offload
from jtrain.step.guard import GuardState, first_guard
from jtrain.step.host_offload import sharding, to_host
from jtrain.step.optimizer_update import host_state
from jtrain.step.zero import param_tree, trained_values


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Train state: all arrays that a run carries from step to step.

    It is a pytree, whose leaves may also be shapes or shardings.

    step: completed updates, an int32 scalar.
    scaling: scales of the 8-bit matmuls (`jtrain.model.fp8_scaling`); empty unless
      precision.matmul_dtype=fp8_delayed.
    guard: history of losses and gradient norms (`jtrain.step.guard`), replicated.
    base_hash: hash of the frozen parameters (`jtrain.model.adapters.base_hash`), uint32 [8], replicated;
      empty without any.
    """

    step: Any
    params: Params
    opt_state: Moments
    scaling: dict[str, Any] = dataclasses.field(default_factory=dict)
    guard: GuardState | dict[str, Any] = dataclasses.field(default_factory=dict)
    base_hash: Any = dataclasses.field(default_factory=dict)


def abstract_state(layout: Layout, optimizer: Optimizer, mesh: Mesh) -> TrainState:
    """Returns shapes, dtypes and shardings of the state without allocating anything.

    Raises:
      UserError: the layout or the offload does not suit the optimizer, or these devices have no host memory.
    """
    check_layout(optimizer.spec, layout)
    check_offload(layout.spec, optimizer.spec)
    optimizer = optimizer.placed(layout)
    on_host = host_state(layout, optimizer)
    layouts = {p.info.path: p for p in layout.params}
    infos = tuple(p.info for p in layout.params)
    # The shapes of the scaling, guard and moments follow from tracing the first state, which allocates
    # nothing.
    drawn_shapes = map_params(
        lambda info: jax.ShapeDtypeStruct(info.shape, _drawn_dtype(layout, optimizer)), infos
    )
    shapes = jax.eval_shape(lambda params: _first_state(layout, optimizer, params), drawn_shapes)
    params = _for_each_array(
        layout, lambda p: sharding(mesh, p.param_partition, p.param_memory), shapes.params
    )
    # Whole arrays are in one memory each, so the tree does not depend on the offload.
    opt_state = optimizer.state_map(
        lambda info, name: sharding(
            mesh,
            layouts[info.path].optimizer_partition,
            "pinned_host" if (info.path, name) in on_host else "device",
        )
    )
    scaling = jax.tree.map(lambda _: NamedSharding(mesh, layout.per_layer), shapes.scaling)
    guard = jax.tree.map(lambda _: NamedSharding(mesh, P()), shapes.guard)
    base_hash = jax.tree.map(lambda _: NamedSharding(mesh, P()), shapes.base_hash)
    shardings = TrainState(NamedSharding(mesh, P()), params, opt_state, scaling, guard, base_hash)
    return jax.tree.map(
        lambda leaf, leaf_sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf_sharding),
        shapes,
        shardings,
    )


def without_base(layout: Layout, state: TrainState) -> TrainState:
    """The part of a state that a checkpoint holds: without frozen parameters, whose hash it keeps."""
    if layout.adapter_scale is None:
        return state
    return dataclasses.replace(state, params=trained_values(layout, state.params))


def with_base(layout: Layout, state: TrainState, base: Params) -> TrainState:
    """The state with the frozen parameters of `base`, which may hold others as well."""
    base_params, trained_params = (_by_path(tree) for tree in (base, state.params))
    params = param_tree(layout, lambda p: (base_params if p.info.frozen else trained_params)[p.info.path])
    return dataclasses.replace(state, params=params)


def place_params(infos: tuple[ParamInfo, ...], likes: Params, arrays: Params) -> Params:
    """Puts whole arrays, layers in the model's order, where a state has them.

    Args:
      infos: parameters as the layout places them.
      likes: shapes, dtypes and shardings of the state's parameters.
    """

    def place(info: ParamInfo, like: jax.ShapeDtypeStruct, value: np.ndarray) -> Array:
        if info.layer_order is not None:
            # -1, an identity layer, is the row of zeros behind the last.
            value = np.concatenate([value, np.zeros_like(value[:1])])[list(info.layer_order)]
        value = value.astype(like.dtype)
        return jax.make_array_from_callback(like.shape, like.sharding, lambda index: value[index])

    return map_params(place, infos, likes, arrays)


def _for_each_array(layout: Layout, fn: Callable[[ParamLayout], Any], params: Params) -> Params:
    """`fn` of each parameter's layout in place of each of its arrays: a matrix in blocks has two."""
    return jax.tree.map(
        lambda p, arrays: jax.tree.map(lambda _: fn(p), arrays), param_tree(layout, lambda p: p), params
    )


def _by_path(tree: Params) -> dict[str, Any]:
    """Parameters of nested dicts by their keys, joined by dots."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_quantized)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def init_state(
    layout: Layout, optimizer: Optimizer, mesh: Mesh, *, seed: int, base: Params | None = None
) -> TrainState:
    """Creates the state before the first step, sharded: no device ever holds more than its share.

    Offloaded arrays start as zeros in host memory; random values overwrite them layer by layer.

    Args:
      base: parameters that are not drawn, as the state has them; master weights start from them as well.
    """
    abstract = abstract_state(layout, optimizer, mesh)
    optimizer = optimizer.placed(layout)
    # The same tree as `abstract`: a `ParamInfo` where values are drawn at random, None where they are zeros.
    drawn = TrainState(
        None,
        _for_each_array(layout, lambda p: p.info, abstract.params),
        optimizer.state_map(lambda info, name: info if name == "master" else None),
        jax.tree.map(lambda _: None, abstract.scaling),
        jax.tree.map(lambda _: None, abstract.guard),
        jax.tree.map(lambda _: None, abstract.base_hash),
    )
    leaves, structure = jax.tree.flatten(abstract)
    # None counts as a leaf here, or the lists would have different lengths.
    infos = jax.tree.leaves(drawn, is_leaf=lambda leaf: leaf is None)
    given_leaves = _given_leaves(layout, optimizer, drawn, abstract, base or {})
    is_on_device = [
        leaf.sharding.memory_kind != "pinned_host" and value is None
        for leaf, value in zip(leaves, given_leaves, strict=True)
    ]

    def first_device_values() -> list[Array]:
        drawn = init_params(
            tuple(p.info for p in layout.params), seed=seed, dtype=_drawn_dtype(layout, optimizer)
        )
        values = jax.tree.leaves(_first_state(layout, optimizer, drawn))
        return [value for value, on_device in zip(values, is_on_device, strict=True) if on_device]

    device_shardings = [
        leaf.sharding for leaf, on_device in zip(leaves, is_on_device, strict=True) if on_device
    ]
    # One program for all arrays on the device: a parameter and its master weights are drawn once.
    device_arrays = iter(jax.jit(first_device_values, out_shardings=device_shardings)())
    states = [
        value if value is not None else next(device_arrays) if on_device else _first_on_host(leaf, info, seed)
        for leaf, info, on_device, value in zip(leaves, infos, is_on_device, given_leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, states)


def _given_leaves(
    layout: Layout, optimizer: Optimizer, drawn: TrainState, abstract: TrainState, base: Params
) -> list[Array | None]:
    """The values of `base` at their places among the leaves of a state; None elsewhere."""
    values = _by_path(base)
    nothing = jax.tree.map(lambda _: None, drawn, is_leaf=lambda leaf: leaf is None)
    masters = optimizer.state_map(lambda info, name: values.get(info.path) if name == "master" else None)
    # A master weight is sharded as the optimizer's state, and never rounded.
    masters = jax.tree.map(
        lambda value, leaf: (
            None if value is None else jax.device_put(value.astype(leaf.dtype), leaf.sharding)
        ),
        masters,
        abstract.opt_state,
        is_leaf=lambda leaf: leaf is None,
    )
    nothing_given = _for_each_array(layout, lambda _: None, abstract.params)
    params = param_tree(layout, lambda p: values.get(p.info.path, at_path(nothing_given, p.info.path)))
    given_state = dataclasses.replace(nothing, params=params, opt_state=masters)
    return jax.tree.leaves(given_state, is_leaf=lambda leaf: leaf is None)


def _first_on_host(abstract: jax.ShapeDtypeStruct, info: ParamInfo | None, seed: int) -> Array:
    """Creates an array in host memory: zeros, or first values, drawn on the device layer by layer."""
    shape = abstract.sharding.shard_shape(abstract.shape)
    # Every shard has the same shape, so one callback serves all of them.
    zeros = jax.make_array_from_callback(
        abstract.shape, abstract.sharding, lambda _: np.zeros(shape, abstract.dtype)
    )
    if info is None:
        return zeros
    dtype = abstract.dtype.name

    def fill(stack: Array) -> Array:
        if not info.dims.startswith("Y"):
            return to_host(init_param(info, seed=seed, dtype=dtype))

        def layer(place: Array, stack: Array) -> Array:
            # A pipeline's place 5 may hold layer 2: random numbers belong to the layer, wherever it lies.
            logical = place if info.layer_order is None else jnp.asarray(info.layer_order)[place]
            value = to_host(init_param(info, seed=seed, dtype=dtype, layer=logical))
            return jax.lax.dynamic_update_index_in_dim(stack, value, place, 0)

        return jax.lax.fori_loop(0, info.shape[0], layer, stack)

    # Donated: the zeros and the values would otherwise be in host memory together.
    return jax.jit(fill, donate_argnums=0, out_shardings=abstract.sharding)(zeros)


def shardings_of(state: TrainState) -> TrainState:
    """Returns the shardings of a state's arrays; the state may be abstract."""
    return jax.tree.map(lambda x: x.sharding, state)


def _drawn_dtype(layout: Layout, optimizer: Optimizer) -> str:
    """Dtype of first values: float32 for master weights, whose rounding gives the parameters' own bits."""
    return "float32" if optimizer.spec.master_dtype != "none" else layout.precision.param_dtype


def _first_state(layout: Layout, optimizer: Optimizer, drawn: Params) -> TrainState:
    """Returns the state before the first step; `drawn` are all parameters in `_drawn_dtype`."""
    opt_state = optimizer.init(trained_values(layout, drawn))
    # `init` got the unrounded values: master weights start from them.
    params = jax.tree.map(
        lambda p, x: store(p.info, x, p.dtype(layout.precision)), param_tree(layout, lambda p: p), drawn
    )
    delayed = layout.precision.matmul_dtype == "fp8_delayed"
    scaling = first_scaling(tuple(p.info for p in layout.params)) if delayed else {}
    base_hash = {} if layout.adapter_scale is None else jnp.zeros(WORDS, jnp.uint32)
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state, scaling, first_guard(), base_hash)
