"""Frozen matrix with the two trained matrices of low rank beside it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jtrain.layout.dims import ADAPTER


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaptedKernel:
    """Weight `base + scale A B` (arXiv:2106.09685), whose sum is never made.

    base: the frozen matrix, [I..., O...].
    down: A, [I..., R]; up: B, [R, O...].
    """

    base: Any
    down: Any
    up: Any
    scale: float = dataclasses.field(metadata={"static": True})

    def __getitem__(self, key: Any) -> "AdaptedKernel":
        """Returns itself, so that `weight[...]` works for all kinds of weights."""
        assert key is Ellipsis, key
        return self


def join_adapters(tree: Mapping[str, Any], scale: float | None) -> dict[str, Any]:
    """The weights of a layer with an `AdaptedKernel` in place of each target and its two matrices.

    Args:
      tree: fetched weights, nested like the parameters.
      scale: None if the model has no adapter.
    """
    if scale is None:
        return dict(tree)
    joined = {
        name: join_adapters(value, scale) if isinstance(value, dict) else value
        for name, value in tree.items()
        if not name.endswith(ADAPTER)
    }
    for name, pair in tree.items():
        if name.endswith(ADAPTER):
            target = name.removesuffix(ADAPTER)
            # Sorted by name: A comes before B.
            down, up = (pair[key] for key in sorted(pair))
            joined[target] = AdaptedKernel(joined[target], down, up, scale)
    return joined


def without_adapter(tree: Any) -> Any:
    """The parameters of the model itself; an adapter adds nothing before its first update."""
    if not isinstance(tree, dict):
        return tree
    return {name: without_adapter(value) for name, value in tree.items() if not name.endswith(ADAPTER)}
