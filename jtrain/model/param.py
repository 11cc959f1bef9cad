"""Declaration and initialisation of a model's parameters.

Building a module allocates nothing: a parameter is a shape, one letter per dimension, and an initialisation
rule. The initial value depends only on the seed and the parameter's path, so it is the same on every mesh,
under every ZeRO stage, and for scanned and unscanned layers.
"""

import functools
import math
import operator
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, UInt32

from jtrain.layout.dims import ParamInfo

type Params = dict[str, Any]
"""Nested dict of arrays; a path like `layers.attention.q_DNH` is its keys joined by dots."""

_RULES = ("dims", "init", "std", "top_k", "mean", "init_value", "update", "load_step")
"""Fields of `ParamInfo` that a variable carries as metadata; path and shape are its own."""

DRAWS = 4
"""32-bit random words behind each initial value."""


def weight(
    dims: str, shape: tuple[int, ...], *, std: float, layers: int = 0, top_k: int = 0, mean: float = 0.0
) -> nnx.Param[Any]:
    """Numbers drawn from a normal of `mean` and standard deviation `std`; with `layers`, some for each layer.

    Args:
      top_k: for a stack of experts, the number of experts per token.
      mean: of numbers that multiply no matrix, such as decays.
    """
    return _param(dims, shape, layers, init="normal", std=std, top_k=top_k, mean=mean)


def vector(dims: str, shape: tuple[int, ...], *, ones: bool, layers: int = 0) -> nnx.Param[Any]:
    """Vector that multiplies or is added to activations: it begins at one, or else at zero."""
    return _param(dims, shape, layers, init="ones" if ones else "zeros")


def scalar(value: float, *, layers: int = 0) -> nnx.Param[Any]:
    """One number for each layer, which begins at `value`."""
    return _param("", (), layers, init="constant", init_value=value)


def load_bias(dims: str, shape: tuple[int, ...], *, rate: float, layers: int = 0) -> nnx.Param[Any]:
    """A vector over experts whose gradient is their load, and whose update is a step of `rate` against it."""
    return _param(dims, shape, layers, init="zeros", update="expert_load", load_step=rate)


def aligned(vector: Float[Array, "..."], x: Float[Array, "..."]) -> Float[Array, "..."]:
    """A vector with as many dimensions as x, to be added to its last ones or multiplied with them, in x's
    dtype.
    """
    return vector.astype(x.dtype).reshape((1,) * (x.ndim - vector.ndim) + vector.shape)


def _param(
    dims: str,
    shape: tuple[int, ...],
    layers: int,
    *,
    init: str,
    std: float = 0.0,
    top_k: int = 0,
    mean: float = 0.0,
    init_value: float = 0.0,
    update: str = "gradient",
    load_step: float = 0.0,
) -> nnx.Param[Any]:
    if layers:
        dims, shape = "Y" + dims, (layers, *shape)
    # The layout decides the dtype; float32 is a placeholder until values are drawn.
    rules = (dims, init, std, top_k, mean, init_value, update, load_step)
    metadata: dict[str, Any] = dict(zip(_RULES, rules, strict=True))
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), **metadata)


def param_infos(module: nnx.Module) -> tuple[ParamInfo, ...]:
    """Every parameter of a module, sorted by path."""
    infos: list[ParamInfo] = []
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        meta = variable.get_metadata()
        rules: dict[str, Any] = {name: meta[name] for name in _RULES}
        infos.append(ParamInfo(".".join(map(str, path)), variable.get_value().shape, **rules))
    # By path: the order in which modules are built must not order the state.
    return tuple(sorted(infos, key=lambda info: info.path))


def at_path(tree: Mapping[str, Any], path: str) -> Any:
    """The leaf of a parameter in a tree of all parameters, or of some."""
    return functools.reduce(operator.getitem, path.split("."), tree)


def merge_trees(first: Mapping[str, Any], second: Mapping[str, Any]) -> Params:
    """The leaves of two trees, of which none is in both."""
    merged = {**first, **second}
    for name in first.keys() & second.keys():
        merged[name] = merge_trees(first[name], second[name])
    return merged


def map_params(fn: Callable[..., Any], infos: tuple[ParamInfo, ...], *trees: Mapping[str, Any]) -> Params:
    """Nested dict of `fn(info, leaf of each tree)` for every parameter."""
    mapped: Params = {}
    for info in infos:
        *parents, name = info.path.split(".")
        leaves: list[Any] = []
        for tree in trees:
            node: Any = tree
            for key in (*parents, name):
                node = node[key]
            leaves.append(node)
        branch = mapped
        for key in parents:
            branch = branch.setdefault(key, {})
        branch[name] = fn(info, *leaves)
    return mapped


def init_params(infos: tuple[ParamInfo, ...], *, seed: int, dtype: str) -> Params:
    """Initial values of all parameters in `dtype`; jit it with the layout's shardings as `out_shardings`."""

    def value(info: ParamInfo) -> Array:
        if info.layer_order is not None:
            return jax.lax.map(
                lambda y: init_param(info, seed=seed, dtype=dtype, layer=y), jnp.asarray(info.layer_order)
            )
        if info.init != "normal" or not info.dims.startswith("Y"):
            return init_param(info, seed=seed, dtype=dtype)
        # One layer at a time: the random words of a whole stack would take several times its own memory.
        return jax.lax.map(
            lambda y: init_param(info, seed=seed, dtype=dtype, layer=y), jnp.arange(info.shape[0])
        )

    return map_params(value, infos)


def init_param(info: ParamInfo, *, seed: int, dtype: str, layer: Array | None = None) -> Array:
    """Initial values of one parameter in `dtype`; with `layer`, of that logical layer alone.

    A layer of -1 is an identity layer, of zeros. The random key is folded from the seed, a checksum of the
    parameter's path and, for a stacked parameter, the layer, so values depend neither on the order in which
    parameters are made nor on their layout.
    """
    shape = info.shape if layer is None else info.shape[1:]
    if info.init != "normal":
        if info.init == "constant":
            return _or_identity(info, layer, jnp.full(shape, info.init_value, dtype))
        constant = jnp.ones if info.init == "ones" else jnp.zeros
        return _or_identity(info, layer, constant(shape, dtype))
    keys = jnp.asarray(_draw_keys(info, seed, layers=None if layer is None else info.shape[0]))
    value = info.std * _normal(keys if layer is None else keys[layer], shape)
    if info.mean:
        value += info.mean
    return _or_identity(info, layer, value.astype(dtype))


def _draw_keys(info: ParamInfo, seed: int, *, layers: int | None) -> UInt32[np.ndarray, "*layers 4 2"]:
    """Random keys of a parameter's draws, two words each; with `layers`, of each layer.

    They are folded here and not in the program: with four generators a parameter it compiles 1.4 to 1.9 times
    as long. In numpy, because jax's own function outside of a program has to be compiled as well, for half a
    second.
    """
    # `jax.random.key(seed)` is the pair (0, seed) for seeds below 2^32.
    key = _fold_in(np.array([0, seed], np.uint32), zlib.crc32(info.path.encode()))
    if layers is not None:
        key = _fold_in(key, np.arange(layers))
    return _fold_in(key[..., None, :], np.arange(DRAWS))


def _fold_in(key: UInt32[np.ndarray, "*n 2"], data: Any) -> UInt32[np.ndarray, "*m 2"]:
    """`jax.random.fold_in` in numpy: Threefry-2x32 with 20 rounds (Salmon et al. 2011) of 0 and `data`."""
    first, second = key[..., 0], key[..., 1]
    words = (first, second, first ^ second ^ np.uint32(0x1BD11BDA))
    with np.errstate(over="ignore"):  # sums are modulo 2^32
        x, y = first, np.asarray(data, np.uint32) + second
        for group in range(5):
            for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
                x = x + y
                y = x ^ (y << np.uint32(rotation) | y >> np.uint32(32 - rotation))
            x = x + words[(group + 1) % 3]
            y = y + words[(group + 2) % 3] + np.uint32(group + 1)
    return np.stack([x, y], axis=-1)


def _or_identity(info: ParamInfo, layer: Array | None, value: Array) -> Array:
    """Zeros instead of `value` for an identity layer."""
    if layer is None or info.layer_order is None:
        return value
    return jnp.where(layer >= 0, value, jnp.zeros_like(value))


def _normal(keys: UInt32[Array, "4 2"], shape: Sequence[int]) -> Float[Array, "..."]:
    """Nearly normal numbers of mean 0 and deviation 1, bitwise equal for every compiler, device and sharding.

    `jax.random.normal` evaluates a polynomial, whose rounding depends on how the compiler vectorises it: its
    last bits were seen to change with the sharding. The sum of eight 16-bit uniforms (Irwin-Hall) is exact in
    integers, and one multiplication rounds it. Its tails end at 4.9 deviations; its excess kurtosis is -0.15.
    """

    def add(draw: Array, total: Array) -> Array:
        word = jax.random.bits(jax.random.wrap_key_data(keys[draw], impl="threefry2x32"), shape, jnp.uint32)
        return total + ((word >> 16) + (word & 0xFFFF)).astype(jnp.int32)

    # A loop: XLA:CPU takes half a second to compile one generator, and unrolled there would be four per
    # parameter.
    total = jax.lax.fori_loop(0, DRAWS, add, jnp.zeros(shape, jnp.int32))
    centred = 2 * total - 2 * DRAWS * 0xFFFF
    # A uniform over 2^16 integers has variance (2^32 - 1) / 12; `centred` is twice the sum of eight.
    deviation = math.sqrt(2 * DRAWS * (2.0**32 - 1) / 3)
    return centred.astype(jnp.float32) * (1.0 / deviation)
