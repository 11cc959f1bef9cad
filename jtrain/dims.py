"""The legend: one letter per array dimension, the same in names, jaxtyping strings and einsums.

| letter | dimension | letter | dimension |
|---|---|---|---|
| B | sequences | N | query heads |
| L | query positions | K | key and value heads |
| M | key positions | G | N / K, query heads per key head |
| D | model width | H | head size |
| F | feed-forward hidden | V | vocabulary |
| Y | stacked layers | X | experts of a layer |
| R | rotated pairs of a head, H / 2 | S | experts that serve one token |

`axis` always means a mesh axis, `dim` an array dimension.
"""

import dataclasses
import math
from typing import Any, Literal, no_type_check

import jax
from jaxtyping import Int

IGNORE = -1
"""Target id where there is nothing to predict: padding, and the last token of a document."""


@no_type_check  # a pytree: its leaves are also shardings, specs and shapes
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed sequences. Leaves are int32; numpy on the host, global `jax.Array`s on devices.

    A row holds several documents one after another. `segment_BL` numbers them 1, 2, ... and is 0 where the row
    is padded; `position_BL` restarts at 0 in each document; `target_BL` is the next token of the same document,
    or `IGNORE`.
    """

    token_BL: Int[Any, "B L"]
    target_BL: Int[Any, "B L"]
    position_BL: Int[Any, "B L"]
    segment_BL: Int[Any, "B L"]


@dataclasses.dataclass(frozen=True)
class ParamInfo:
    """What one parameter is, wherever it will live.

    `dims` has one letter per dimension of `shape`; a leading `Y` stacks the layers. `init` is `ones` or a normal
    of standard deviation `std`, drawn from the seed and `path` alone. Of a stack of experts (`X` in front), `top_k`
    serve a token; 0 elsewhere.
    """

    path: str
    shape: tuple[int, ...]
    dims: str
    init: Literal["normal", "ones"]
    std: float = 0.0
    top_k: int = 0

    def __post_init__(self) -> None:
        assert len(self.dims) == len(self.shape), (self.path, self.dims, self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """True for what one layer multiplies with; False for norm scales."""
        return len(self.dims.removeprefix("Y")) > 1

    @property
    def is_experts(self) -> bool:
        """True for a matrix of each of X experts; False for a router, whose X are outputs."""
        return self.dims.removeprefix("Y").startswith("X")

    @property
    def active_size(self) -> int:
        """Elements that one token is multiplied with."""
        if not self.is_experts:
            return self.size
        return self.size // self.shape[self.dims.index("X")] * self.top_k
