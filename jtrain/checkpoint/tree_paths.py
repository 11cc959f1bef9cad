"""Paths of the leaves of a state: as keys, and joined by dots as manifests hold them."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jtrain.checkpoint.files import ManifestLeaf


def by_keys(tree: Any) -> list[tuple[tuple[str, ...], Any]]:
    """Returns every leaf with the keys of its path."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    simple = jax.tree_util.keystr
    # `simple=True`: `q` for a dict key, an attribute and a NamedTuple field alike.
    return [(tuple(simple((key,), simple=True) for key in path), leaf) for path, leaf in flat]


def leaves(tree: Any) -> dict[str, ManifestLeaf]:
    """Returns path joined by dots -> shape and dtype, for a pytree of arrays or of `jax.ShapeDtypeStruct`."""

    def leaf(array: Any) -> ManifestLeaf:
        dtype = jnp.dtype(array.dtype)
        return ManifestLeaf(tuple(array.shape), dtype.name, math.prod(array.shape) * dtype.itemsize)

    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf(array) for path, array in flat}
