"""What an optimizer keeps of every parameter: which arrays, of what shape and dtype, and how numbers get in and out."""

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jtrain.dims import ParamInfo
from jtrain.optim.blocks import Blocks, blocks_of, decode, encode
from jtrain.optim.rounding import Noise, to_bfloat16
from jtrain.optim.spec import AdamW, Muon

type ParamTree = dict[str, Any]
"""One value per parameter (array, `ParamInfo`, sharding, ...), nested like the parameters."""

type Leaf = dict[str, Array]
"""The state of one parameter, by the names of `Moments`' fields; those it does not have are left out."""


def _no_branch() -> ParamTree:
    return {}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Moments:
    """The optimizer's whole state, each field nested like the parameters, without the branches that it has not.

    mu: running mean of the gradient, in `moment_dtype`.
    nu: running mean of its square; with int8, the root of it. Not of what Muon updates.
    mu_scale, nu_scale: with int8, a float32 per block (`jtrain.optim.blocks`).
    master: unrounded parameters, if there are any.
    """

    mu: Any  # a ParamTree; Any because as a pytree it also holds whatever stands for arrays
    nu: Any
    mu_scale: Any = dataclasses.field(default_factory=_no_branch)
    nu_scale: Any = dataclasses.field(default_factory=_no_branch)
    master: Any = dataclasses.field(default_factory=_no_branch)


NAMES = tuple(field.name for field in dataclasses.fields(Moments))


def by_muon(spec: AdamW | Muon, info: ParamInfo) -> bool:
    """Only the layers' matrices are stacked (Y); embedding and unembedding are not."""
    return isinstance(spec, Muon) and info.is_matrix and info.dims.startswith("Y")


def blocks(spec: AdamW | Muon, info: ParamInfo) -> Blocks | None:
    """How the parameter's moments fall into blocks; None if they do not."""
    return blocks_of(info) if spec.moment_dtype == "int8" else None


@functools.cache
def arrays(spec: AdamW | Muon, info: ParamInfo) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every array that is kept of a parameter, by name; a search asks thousands of times."""
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
    """Bytes of state of `elements` of a parameter, which fill whole blocks: those of a shard, or `info.size`."""
    per_parameter = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays(spec, info).values())
    return per_parameter * elements // info.size


def load(spec: AdamW | Muon, info: ParamInfo, leaf: Leaf, name: str) -> Array:
    """A moment, f32."""
    split = blocks(spec, info)
    if split is None:
        return leaf[name].astype(jnp.float32)
    return decode(leaf[name], leaf[f"{name}_scale"], split)


def stored(spec: AdamW | Muon, info: ParamInfo, name: str, value: Array, noise: Noise) -> Leaf:
    """A moment, f32, as it is kept."""
    split = blocks(spec, info)
    if split is not None:
        codes, scale = encode(value, split, signed=name == "mu", bits=noise.bits(name, value.shape))
        return {name: codes, f"{name}_scale": scale}
    if spec.moment_dtype == "bfloat16_sr":
        return {name: to_bfloat16(value, noise.bits(name, value.shape))}
    return {name: value.astype(arrays(spec, info)[name].dtype)}


def by_path(infos: ParamTree, values: ParamTree) -> dict[str, Any]:
    """`values`, nested like `infos`, by path."""
    leaves, structure = jax.tree.flatten(infos)
    return {info.path: value for info, value in zip(leaves, structure.flatten_up_to(values), strict=True)}


def nested(infos: ParamTree, values: Mapping[str, Any]) -> ParamTree:
    """The values of `infos`' parameters by path, nested like `infos`."""
    return jax.tree.map(lambda info: values[info.path], infos)


def kept(infos: ParamTree, wanted: Callable[[ParamInfo], bool]) -> ParamTree:
    """`infos` without what is not wanted, and without the branches that this leaves empty."""
    found = {}
    for key, value in infos.items():
        if isinstance(value, Mapping):
            if branch := kept(dict(value), wanted):
                found[key] = branch
        elif wanted(value):
            found[key] = value
    return found
