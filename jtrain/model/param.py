"""What a model's parameters are, and their first values.

Modules are built without allocating anything: a parameter is a shape, one letter per dimension, and a rule for its
first value. The value itself depends on the seed and on the parameter's path alone, so it is the same on every
mesh, under every ZeRO stage, and for scanned and unscanned layers.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jtrain.dims import ParamInfo

type Params = dict[str, Any]
"""Nested dict of arrays; a path like `layers.attention.q_DNH` is its keys joined by dots."""


def weight(dims: str, shape: tuple[int, ...], *, std: float, layers: int = 0, top_k: int = 0) -> nnx.Param[Any]:
    """A matrix drawn from a normal of standard deviation `std`; with `layers`, one per layer, stacked.

    Args:
      top_k: of a stack of experts, how many serve a token.
    """
    return _param(dims, shape, layers, init="normal", std=std, top_k=top_k)


def scale(dims: str, shape: tuple[int, ...], *, layers: int = 0) -> nnx.Param[Any]:
    """A norm's scale, which begins at one."""
    return _param(dims, shape, layers, init="ones", std=0.0)


def _param(dims: str, shape: tuple[int, ...], layers: int, *, init: str, std: float, top_k: int = 0) -> nnx.Param[Any]:
    if layers:
        dims, shape = "Y" + dims, (layers, *shape)
    # The dtype is the layout's choice: float32 stands in until the values are made.
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), dims=dims, init=init, std=std, top_k=top_k)


def param_infos(module: nnx.Module) -> tuple[ParamInfo, ...]:
    """Every parameter of a module, sorted by path."""
    infos: list[ParamInfo] = []
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        meta = variable.get_metadata()
        shape, of = variable.get_value().shape, (meta[name] for name in ("dims", "init", "std", "top_k"))
        infos.append(ParamInfo(".".join(map(str, path)), shape, *of))
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
    """First values of all parameters, `dtype`; jit it with the layout's shardings as `out_shardings`."""

    def value(info: ParamInfo) -> Array:
        if info.init == "ones" or not info.dims.startswith("Y"):
            return init_param(info, seed=seed, dtype=dtype)
        # One layer at a time: the random words of a whole stack would take several times its own memory.
        return jax.lax.map(lambda y: init_param(info, seed=seed, dtype=dtype, layer=y), jnp.arange(info.shape[0]))

    return map_params(value, infos)


def init_param(info: ParamInfo, *, seed: int, dtype: str, layer: Array | None = None) -> Array:
    """First values of one parameter, `dtype`; with `layer`, of that one layer of a stacked one.

    The key of a parameter is folded from the seed and a checksum of its path, and for a stacked one from the layer
    too, so nothing depends on the order in which parameters are made nor on how they are laid out.
    """
    shape = info.shape if layer is None else info.shape[1:]
    if info.init == "ones":
        return jnp.ones(shape, dtype)
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(info.path.encode()))
    if layer is not None:
        key = jax.random.fold_in(key, layer)
    return (info.std * _normal(key, shape)).astype(dtype)


def _normal(key: Array, shape: Sequence[int]) -> Float[Array, "..."]:
    """Nearly normal numbers of mean 0 and deviation 1, the same to the last bit wherever and however compiled.

    `jax.random.normal` evaluates a polynomial, whose rounding depends on how the compiler vectorises it: its last bits
    were seen to change with the sharding. The sum of eight 16-bit uniforms (Irwin-Hall) is exact in integers, and one
    multiplication rounds it. Its tails end at 4.9 deviations; its excess kurtosis is -0.15.
    """

    def add(draw: Array, total: Array) -> Array:
        word = jax.random.bits(jax.random.fold_in(key, draw), shape, jnp.uint32)
        return total + ((word >> 16) + (word & 0xFFFF)).astype(jnp.int32)

    # A loop, because a generator takes XLA:CPU half a second to compile, and written out there are four a parameter.
    total = jax.lax.fori_loop(0, 4, add, jnp.zeros(shape, jnp.int32))
    centred = 2 * total - 8 * 0xFFFF
    deviation = math.sqrt(8 * (2.0**32 - 1) / 3)  # of `centred`: a uniform of 2^16 integers varies by (2^32 - 1) / 12
    return centred.astype(jnp.float32) * (1.0 / deviation)
