"""What a model's parameters are, and their first values.

Modules are built without allocating anything: a parameter is a shape, one letter per dimension, and a rule for its
first value. The value itself depends on the seed and on the parameter's path alone, so it is the same on every
mesh, under every ZeRO stage, and for scanned and unscanned layers.
"""

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jtrain.dims import ParamInfo

type Params = dict[str, Any]
"""Nested dict of arrays; a path like `layers.attention.q_DNH` is its keys joined by dots."""


def weight(dims: str, shape: tuple[int, ...], *, std: float, layers: int = 0) -> nnx.Param[Any]:
    """A matrix drawn from a normal of standard deviation `std`; with `layers`, one per layer, stacked."""
    return _param(dims, shape, layers, init="normal", std=std)


def scale(dims: str, shape: tuple[int, ...], *, layers: int = 0) -> nnx.Param[Any]:
    """A norm's scale, which begins at one."""
    return _param(dims, shape, layers, init="ones", std=0.0)


def _param(dims: str, shape: tuple[int, ...], layers: int, *, init: str, std: float) -> nnx.Param[Any]:
    if layers:
        dims, shape = "Y" + dims, (layers, *shape)
    # The dtype is the layout's choice: float32 stands in until the values are made.
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), dims=dims, init=init, std=std)


def param_infos(module: nnx.Module) -> tuple[ParamInfo, ...]:
    """Every parameter of a module, sorted by path."""
    infos: list[ParamInfo] = []
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        meta = variable.get_metadata()
        infos.append(
            ParamInfo(".".join(map(str, path)), variable.get_value().shape, meta["dims"], meta["init"], meta["std"])
        )
    return tuple(sorted(infos, key=lambda info: info.path))


def map_params(fn: Callable[..., Any], infos: tuple[ParamInfo, ...], *trees: Mapping[str, Any]) -> Params:
    """The nested dict of `fn(info, leaf of each tree)` over all parameters."""
    out: Params = {}
    for info in infos:
        *parents, name = info.path.split(".")
        leaves: list[Any] = []
        for tree in trees:
            node: Any = tree
            for key in (*parents, name):
                node = node[key]
            leaves.append(node)
        branch = out
        for key in parents:
            branch = branch.setdefault(key, {})
        branch[name] = fn(info, *leaves)
    return out


def init_params(infos: tuple[ParamInfo, ...], *, seed: int, dtype: str) -> Params:
    """First values of all parameters, `dtype`; jit it with the layout's shardings as `out_shardings`.

    The key of a parameter is folded from the seed and a checksum of its path, and for a stacked one from the layer
    too, so nothing depends on the order in which parameters are made nor on how they are laid out.
    """
    root = jax.random.key(seed)

    def value(info: ParamInfo) -> Array:
        if info.init == "ones":
            return jnp.ones(info.shape, dtype)
        key = jax.random.fold_in(root, zlib.crc32(info.path.encode()))
        if not info.dims.startswith("Y"):
            return (info.std * jax.random.normal(key, info.shape, jnp.float32)).astype(dtype)
        num_layers, *shape = info.shape
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(num_layers))
        draw = jax.vmap(lambda k: jax.random.normal(k, shape, jnp.float32))
        return (info.std * draw(keys)).astype(dtype)

    return map_params(value, infos)
