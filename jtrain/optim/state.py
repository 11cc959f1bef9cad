"""Optimizer state: the arrays kept for each parameter, their shapes and dtypes, and how moments are stored
and read.
"""

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jtrain.layout.dims import ParamInfo
from jtrain.optim.quantized_moments import Blocks, blocks_of, decode, encode
from jtrain.optim.rounding import Noise, to_bfloat16
from jtrain.optim.spec import AdamW, Muon

type ParamTree = dict[str, Any]
"""One value per parameter (array, `ParamInfo`, sharding, ...), nested like the parameters."""

type ParamState = dict[str, Array]
"""State of one parameter, keyed by field of `Moments`; fields that the parameter does not have are left
out."""


def _no_branch() -> ParamTree:
    return {}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Moments:
    """The whole state of the optimizer. Each field is nested like the parameters, without empty branches.

    mu: running mean of the gradient, in `moment_dtype`.
    nu: running mean of the squared gradient; with int8, its root. Matrices that Muon updates have none.
    mu_scale, nu_scale: one float32 per block with int8 (`jtrain.optim.quantized_moments`).
    master: unrounded parameters, if `master_dtype` asks for them.
    """

    mu: Any  # a ParamTree; Any because as a pytree it also holds shardings, shapes and the like
    nu: Any
    mu_scale: Any = dataclasses.field(default_factory=_no_branch)
    nu_scale: Any = dataclasses.field(default_factory=_no_branch)
    master: Any = dataclasses.field(default_factory=_no_branch)


NAMES = tuple(field.name for field in dataclasses.fields(Moments))


def by_muon(spec: AdamW | Muon, info: ParamInfo) -> bool:
    """True if Muon updates the parameter: a matrix of the layers (stacked, Y), not the embedding or
    unembedding.
    """
    return isinstance(spec, Muon) and info.is_matrix and info.dims.startswith("Y")


def blocks(spec: AdamW | Muon, info: ParamInfo) -> Blocks | None:
    """Blocks of the parameter's moments; None if they are not quantized."""
    return blocks_of(info) if spec.moment_dtype == "int8" else None


@functools.cache
def arrays(spec: AdamW | Muon, info: ParamInfo) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every state array of a parameter, by name. Cached: the planner's search calls it
    often.
    """
    split = blocks(spec, info)
    plain = {"bfloat16": "bfloat16", "bfloat16_sr": "bfloat16"}.get(spec.moment_dtype, "float32")
    kept: dict[str, jax.ShapeDtypeStruct] = {}
    for name, eight_bits in (("mu", "int8"), ("nu", "uint8")):
        if name == "nu" and by_muon(spec, info):
            continue
        kept[name] = jax.ShapeDtypeStruct(info.shape, jnp.dtype(eight_bits if split else plain))
        if split:
            kept[f"{name}_scale"] = jax.ShapeDtypeStruct(split.scale_shape(info.shape), jnp.dtype("float32"))
    if spec.master_dtype != "none":
        kept["master"] = jax.ShapeDtypeStruct(info.shape, jnp.dtype(spec.master_dtype))
    return types.MappingProxyType(kept)


def state_bytes(spec: AdamW | Muon, info: ParamInfo, elements: int) -> int:
    """Bytes of state for `elements` of a parameter (a shard, or `info.size`), which must fill whole
    blocks.
    """
    per_parameter = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays(spec, info).values())
    return per_parameter * elements // info.size


def load(spec: AdamW | Muon, info: ParamInfo, leaf: ParamState, name: str) -> Array:
    """Reads a moment as f32."""
    split = blocks(spec, info)
    if split is None:
        return leaf[name].astype(jnp.float32)
    return decode(leaf[name], leaf[f"{name}_scale"], split)


def stored(spec: AdamW | Muon, info: ParamInfo, name: str, value: Array, noise: Noise) -> ParamState:
    """Converts an f32 moment to the arrays that store it."""
    split = blocks(spec, info)
    if split is not None:
        codes, scale = encode(value, split, signed=name == "mu", bits=noise.bits(name, value.shape))
        return {name: codes, f"{name}_scale": scale}
    if spec.moment_dtype == "bfloat16_sr":
        return {name: to_bfloat16(value, noise.bits(name, value.shape))}
    return {name: value.astype(arrays(spec, info)[name].dtype)}


def by_path(infos: ParamTree, values: ParamTree) -> dict[str, Any]:
    """Flattens `values`, nested like `infos`, to a dict by path."""
    leaves, structure = jax.tree.flatten(infos)
    return {info.path: value for info, value in zip(leaves, structure.flatten_up_to(values), strict=True)}


def nested(infos: ParamTree, values: Mapping[str, Any]) -> ParamTree:
    """Nests values given by path like `infos`."""
    return jax.tree.map(lambda info: values[info.path], infos)


def kept(infos: ParamTree, wanted: Callable[[ParamInfo], bool]) -> ParamTree:
    """`infos` restricted to the wanted parameters, without empty branches."""
    found = {}
    for key, value in infos.items():
        if isinstance(value, Mapping):
            if branch := kept(dict(value), wanted):
                found[key] = branch
        elif wanted(value):
            found[key] = value
    return found
