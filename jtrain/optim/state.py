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
from jtrain.optim.quantized_moments import MomentBlocks, blocks_of, decode, encode
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


def uses_muon(spec: AdamW | Muon, info: ParamInfo) -> bool:
    """True if Muon updates the parameter: a matrix of the layers (stacked, Y)."""
    # `Muon` is a subclass of `AdamW`, so the test is for the narrower one.
    return isinstance(spec, Muon) and info.is_matrix and info.dims.startswith("Y")


def blocks(spec: AdamW | Muon, info: ParamInfo) -> MomentBlocks | None:
    """Blocks of the parameter's moments; None if they are not quantized."""
    return blocks_of(info) if spec.moment_dtype == "int8" else None


@functools.cache
def arrays(spec: AdamW | Muon, info: ParamInfo) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of a parameter's state arrays by name, cached for the planner's search."""
    blocking = blocks(spec, info)
    float_dtype = {"bfloat16": "bfloat16", "bfloat16_sr": "bfloat16"}.get(spec.moment_dtype, "float32")
    arrays_by_name: dict[str, jax.ShapeDtypeStruct] = {}
    # First moments have a sign; second moments are stored as their roots, which have none.
    for name, int8_dtype in (("mu", "int8"), ("nu", "uint8")):
        # Muon normalises by its matrix iteration and keeps no second moment.
        if name not in spec.moments or (name == "nu" and uses_muon(spec, info)):
            continue
        arrays_by_name[name] = jax.ShapeDtypeStruct(
            info.shape, jnp.dtype(int8_dtype if blocking else float_dtype)
        )
        if blocking:
            arrays_by_name[f"{name}_scale"] = jax.ShapeDtypeStruct(
                blocking.scale_shape(info.shape), jnp.dtype("float32")
            )
    if spec.master_dtype != "none":
        arrays_by_name["master"] = jax.ShapeDtypeStruct(info.shape, jnp.dtype(spec.master_dtype))
    # Read-only, because the cache returns the same mapping to every caller.
    return types.MappingProxyType(arrays_by_name)


def state_bytes(spec: AdamW | Muon, info: ParamInfo, elements: int) -> int:
    """Bytes of state for `elements` of a parameter (a shard, or `info.size`), in whole blocks."""
    # Bytes of the whole parameter; scales make it a fraction per element, so the division comes last.
    per_parameter = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays(spec, info).values())
    return per_parameter * elements // info.size


def load_moment(spec: AdamW | Muon, info: ParamInfo, leaf: ParamState, name: str) -> Array:
    """Reads a moment as f32."""
    blocking = blocks(spec, info)
    if blocking is None:
        return leaf[name].astype(jnp.float32)
    return decode(leaf[name], leaf[f"{name}_scale"], blocking)


def store_moment(spec: AdamW | Muon, info: ParamInfo, name: str, value: Array, noise: Noise) -> ParamState:
    """Converts an f32 moment to the arrays that store it."""
    blocking = blocks(spec, info)
    if blocking is not None:
        codes, scale = encode(value, blocking, signed=name == "mu", bits=noise.bits(name, value.shape))
        return {name: codes, f"{name}_scale": scale}
    if spec.moment_dtype == "bfloat16_sr":
        return {name: to_bfloat16(value, noise.bits(name, value.shape))}
    return {name: value.astype(arrays(spec, info)[name].dtype)}


def flatten_by_path(infos: ParamTree, values: ParamTree) -> dict[str, Any]:
    """Flattens `values`, nested like `infos`, to a dict by path."""
    leaves, structure = jax.tree.flatten(infos)
    return {info.path: value for info, value in zip(leaves, structure.flatten_up_to(values), strict=True)}


def nest(infos: ParamTree, values: Mapping[str, Any]) -> ParamTree:
    """Nests values given by path like `infos`."""
    return jax.tree.map(lambda info: values[info.path], infos)


def select_params(infos: ParamTree, is_selected: Callable[[ParamInfo], bool]) -> ParamTree:
    """`infos` restricted to the selected parameters, without empty branches."""
    selected = {}
    for key, value in infos.items():
        if isinstance(value, Mapping):
            if branch := select_params(dict(value), is_selected):
                selected[key] = branch
        elif is_selected(value):
            selected[key] = value
    return selected
