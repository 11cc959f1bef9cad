"""Frozen matrix with the two trained matrices of low rank beside it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import Array

from jtrain.layout.dims import ADAPTER
from jtrain.model.adapters.dropout import KEY, InputDropout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaptedKernel:
    """Weight `base + scale A B` (arXiv:2106.09685), whose sum is never made.

    base: the frozen matrix, [I..., O...].
    down: A, [I..., R]; up: B, [R, O...].
    dropout: of the inputs of A; None outside of training, and for experts.
    """

    base: Any
    down: Any
    up: Any
    scale: float = dataclasses.field(metadata={"static": True})
    dropout: InputDropout | None = None

    def __getitem__(self, key: Any) -> "AdaptedKernel":
        """Returns itself, so that `weight[...]` works for all kinds of weights."""
        assert key is Ellipsis, key
        return self


def join_adapters(
    tree: Mapping[str, Any], scale: float | None, dropout: tuple[float, Array] | None = None
) -> dict[str, Any]:
    """The weights of a layer with an `AdaptedKernel` in place of each target and its two matrices.

    Args:
      tree: fetched weights, nested like the parameters.
      scale: None if the model has no adapter.
      dropout: its rate, and `token_bits` of the batch; None for none.
    """
    if scale is None:
        return dict(tree)
    joined = {
        name: join_adapters(value, scale, dropout) if isinstance(value, dict) else value
        for name, value in tree.items()
        if not name.endswith(ADAPTER)
    }
    for name, pair in tree.items():
        if name.endswith(ADAPTER):
            target = name.removesuffix(ADAPTER)
            # Sorted by name: A comes before B.
            down, up = (pair[key] for key in sorted(pair) if key != KEY)
            input_dropout = None
            if dropout is not None and KEY in pair:
                rate, token_BL = dropout
                input_dropout = InputDropout(rate, token_BL, pair[KEY])
            joined[target] = AdaptedKernel(joined[target], down, up, scale, input_dropout)
    return joined


def without_adapter(tree: Any) -> Any:
    """The parameters of the model itself; an adapter adds nothing before its first update."""
    if not isinstance(tree, dict):
        return tree
    return {name: without_adapter(value) for name, value in tree.items() if not name.endswith(ADAPTER)}
