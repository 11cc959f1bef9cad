"""Train state (parameters, optimizer state, step): its shardings and its first values."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jtrain.layout.dims import ParamInfo
from jtrain.layout.layout import Layout
from jtrain.model.fp8_scaling import first_scaling
from jtrain.model.param import Params, init_param, init_params, map_params
from jtrain.optim import Moments, Optimizer, check_layout
from jtrain.optim.optimizer import check_offload
from jtrain.step.guard import GuardState, first_guard
from jtrain.step.host_offload import sharding, to_host
from jtrain.step.optimizer_update import host_state
from jtrain.step.zero import param_tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Train state: all arrays that a run carries from step to step.

    It is a pytree, whose leaves may also be shapes or shardings.

    step: completed updates, an int32 scalar.
    scaling: scales of the 8-bit matmuls (`jtrain.model.fp8_scaling`); empty unless
      precision.matmul_dtype=fp8_delayed.
    guard: history of losses and gradient norms (`jtrain.step.guard`), replicated.
    """

    step: Any
    params: Params
    opt_state: Moments
    scaling: dict[str, Any] = dataclasses.field(default_factory=dict)
    guard: GuardState | dict[str, Any] = dataclasses.field(default_factory=dict)


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
    drawn = map_params(lambda info: jax.ShapeDtypeStruct(info.shape, _drawn_dtype(layout, optimizer)), infos)
    shapes = jax.eval_shape(lambda params: _first_state(layout, optimizer, params), drawn)
    params = param_tree(layout, lambda p: sharding(mesh, p.param, p.param_memory))
    opt_state = optimizer.state_map(
        lambda info, name: sharding(
            mesh, layouts[info.path].optimizer, "pinned_host" if (info.path, name) in on_host else "device"
        )
    )
    scaling = jax.tree.map(lambda _: NamedSharding(mesh, layout.per_layer), shapes.scaling)
    guard = jax.tree.map(lambda _: NamedSharding(mesh, P()), shapes.guard)
    shardings = TrainState(NamedSharding(mesh, P()), params, opt_state, scaling, guard)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def init_state(layout: Layout, optimizer: Optimizer, mesh: Mesh, *, seed: int) -> TrainState:
    """Creates the state before the first step in its final sharding: no device ever holds more than its
    share.

    Offloaded arrays start as zeros in host memory; random values overwrite them layer by layer.
    """
    like = abstract_state(layout, optimizer, mesh)
    optimizer = optimizer.placed(layout)
    drawn = TrainState(
        None,
        optimizer.params,
        optimizer.state_map(lambda i, name: i if name == "master" else None),
        jax.tree.map(lambda _: None, like.scaling),
        jax.tree.map(lambda _: None, like.guard),
    )
    leaves, structure = jax.tree.flatten(like)
    infos = jax.tree.leaves(drawn, is_leaf=lambda x: x is None)
    here = [x.sharding.memory_kind != "pinned_host" for x in leaves]

    def first_here() -> list[Array]:
        drawn = init_params(
            tuple(p.info for p in layout.params), seed=seed, dtype=_drawn_dtype(layout, optimizer)
        )
        values = jax.tree.leaves(_first_state(layout, optimizer, drawn))
        return [value for value, is_here in zip(values, here, strict=True) if is_here]

    of_here = [x.sharding for x, is_here in zip(leaves, here, strict=True) if is_here]
    made = iter(jax.jit(first_here, out_shardings=of_here)())
    states = [
        next(made) if h else _first_on_host(x, i, seed) for x, i, h in zip(leaves, infos, here, strict=True)
    ]
    return jax.tree.unflatten(structure, states)


def _first_on_host(like: jax.ShapeDtypeStruct, info: ParamInfo | None, seed: int) -> Array:
    """Creates an array in host memory: zeros, or a parameter's first values, drawn on the device layer by
    layer.
    """
    shape = like.sharding.shard_shape(like.shape)
    zeros = jax.make_array_from_callback(like.shape, like.sharding, lambda _: np.zeros(shape, like.dtype))
    if info is None:
        return zeros
    dtype = like.dtype.name

    def fill(x: Array) -> Array:
        if not info.dims.startswith("Y"):
            return to_host(init_param(info, seed=seed, dtype=dtype))

        def layer(y: Array, x: Array) -> Array:
            logical = y if info.layer_order is None else jnp.asarray(info.layer_order)[y]
            value = to_host(init_param(info, seed=seed, dtype=dtype, layer=logical))
            return jax.lax.dynamic_update_index_in_dim(x, value, y, 0)

        return jax.lax.fori_loop(0, info.shape[0], layer, x)

    return jax.jit(fill, donate_argnums=0, out_shardings=like.sharding)(zeros)


def shardings_of(state: TrainState) -> TrainState:
    """Returns the shardings of a state's arrays; the state may be abstract."""
    return jax.tree.map(lambda x: x.sharding, state)


def _drawn_dtype(layout: Layout, optimizer: Optimizer) -> str:
    """Master weights start in float32. Parameters get the same bits whether they are rounded now or when
    drawn.
    """
    return "float32" if optimizer.spec.master_dtype != "none" else layout.precision.param_dtype


def _first_state(layout: Layout, optimizer: Optimizer, drawn: Params) -> TrainState:
    """Returns the state before the first step; `drawn` are all parameters in `_drawn_dtype`."""
    opt_state = optimizer.init(drawn)
    params = jax.tree.map(lambda x: x.astype(layout.precision.param_dtype), drawn)
    delayed = layout.precision.matmul_dtype == "fp8_delayed"
    scaling = first_scaling(tuple(p.info for p in layout.params)) if delayed else {}
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state, scaling, first_guard())
