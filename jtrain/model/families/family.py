"""Model family: how its config.json describes a model, and the names of its tensors."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jtrain.model.families.config_fields import Fields
from jtrain.model.transformer import Transformer


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Tensor of a checkpoint that holds a parameter, or a part of it.

    name: `{y}` is the number of the layer, `{x}` that of the expert, where each has a tensor of its own.
    dims: letters of its dimensions in their order; letters written together are one flattened dimension.
      `I` stands for H whose rotated pairs lie side by side instead of half a head apart, `J` for such a U.
      A digit is a dimension that counts parameters: `N3H D` holds queries, keys and values of each head. `+`
      concatenates: `NH+KH+KH D` holds queries, then keys, then values; `O(S+S+GH) D` does so for each
      key head, G = A / O.
    part: which of the counted or concatenated parameters this one is.
    """

    name: str
    dims: str
    part: int = 0


type Names = dict[str, Tensor]
"""Tensor by the path of its parameter: below the block for parameters of layers."""


@dataclasses.dataclass(frozen=True)
class Family:
    """A `model_type` of transformers.

    architecture: class of its causal language model.
    read: builds the model that the fields of a config.json describe; None for a table of names of a user's
      own, which only exports.
    write: fields of the config.json that describes a model, if one of this family can: it is of this family
      if `read` makes the same model of them.
    """

    model_type: str
    architecture: str
    read: Callable[[Fields], Transformer] | None
    write: Callable[[Transformer], dict[str, Any]]
    names: Names
