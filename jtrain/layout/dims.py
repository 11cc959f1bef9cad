"""Legend of array dimensions: one letter each, the same in names, jaxtyping strings and einsums.

| letter | dimension | letter | dimension |
|---|---|---|---|
| B | sequences | N | query heads |
| L | query positions | K | key and value heads |
| M | key positions | G | N / K, query heads per key head |
| D | model width | H | head size |
| F | feed-forward hidden | V | vocabulary |
| Y | stacked layers | X | experts of a layer |
| R | rotated pairs of a head, H / 2; a rank | S | experts that serve one token; size of a state |
| Q | latent of queries | C | latent of keys and values |
| T | dims of a head without positions | U | dims of a head that are rotated, H - T |
| P | size of a head's values, where not H | E | T + P, a head's key and value from the latent |
| A | heads of a recurrent mixer, or its channels | O | its key heads |
| W | taps of a convolution | Z | groups of heads with one input of their states |
| J | tokens that a teacher keeps | I | J + 1, those and all others together |

`axis` always means a mesh axis, `dim` an array dimension.
"""

import dataclasses
import math
from typing import Any, Literal, no_type_check

import jax
from jaxtyping import Int

from jtrain.layout.constants import IGNORE as IGNORE


@no_type_check  # a pytree: its leaves are also shardings, specs and shapes
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed sequences: int32 arrays, numpy on the host and global `jax.Array`s on devices.

    A row holds several documents one after another. `segment_BL` numbers them 1, 2, ... and is 0 in padding;
    `position_BL` restarts at 0 in each document; `target_BL` is the next token of the same document, or
    `IGNORE`. `weight_BL` is the factor of each target in the loss, float32, 0 where there is no target; None
    weighs all alike. The data plane sets it where messages have weights, and a step may set it from the other
    arrays (`ObjectiveSpec`).

    Rows of preference pairs have segments 2 p - 1, the better text of pair p, and 2 p, the worse one.
    `reference_BL`, float32, is what a reference says of them (`DPO`): the nats of each target, or those of a
    whole text at its first token.

    `soft` is what a teacher says of the token after each one (`SoftTargets`, [B, L, J] and [B, L, J + 1]), of
    which a share of the loss is the divergence (`Distillation`).

    `dropout_BL`, uint32, are random bits of each token for the dropout of adapters; a train step sets them.
    """

    token_BL: Int[Any, "B L"]
    target_BL: Int[Any, "B L"]
    position_BL: Int[Any, "B L"]
    segment_BL: Int[Any, "B L"]
    weight_BL: Any = None
    reference_BL: Any = None
    dropout_BL: Any = None
    soft: Any = None


ADAPTER = "_lora"
"""End of the name below which a parameter tree holds the two matrices of an adapter, as `q_DNH_lora`."""


@dataclasses.dataclass(frozen=True)
class AdapterDropout:
    """Dropout of the inputs of an adapter in training.

    rate: share that is dropped, above 0 and below 1.
    seed: of the run.
    """

    rate: float
    seed: int


@dataclasses.dataclass(frozen=True)
class ParamInfo:
    """Description of one parameter, independent of its layout.

    `dims` has one letter per dimension of `shape`; a leading `Y` stacks the layers. `init` is `ones` or
    `zeros` for what multiplies or is added to activations (scales of norms, biases), `constant` for another
    number, `init_value`, or a normal distribution with `mean` and standard deviation `std`, drawn from the
    seed and `path` alone. `top_k` is the number of experts that serve a token, in a stack of experts (leading
    `X`); it is 0 in other parameters.

    `update` is `gradient` for what the optimizer updates, and `expert_load` for correction biases, whose
    gradient is a count of tokens and which move by `load_step` against it (`MoESpec.bias_update_rate`).

    `frozen` is True for what no step changes: it has no gradient and no optimizer state, and is kept in
    `dtype`; None is `precision.param_dtype`.

    `layer_order` has the logical layer of each place of Y, -1 for an identity layer of zeros; None if place y
    holds layer y. Random numbers depend on the logical layer.
    """

    path: str
    shape: tuple[int, ...]
    dims: str
    init: Literal["normal", "ones", "zeros", "constant"]
    std: float = 0.0
    top_k: int = 0
    mean: float = 0.0
    init_value: float = 0.0
    update: Literal["gradient", "expert_load"] = "gradient"
    load_step: float = 0.0
    layer_order: tuple[int, ...] | None = None
    frozen: bool = False
    dtype: str | None = None

    def __post_init__(self) -> None:
        assert len(self.dims) == len(self.shape), (self.path, self.dims, self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_stacked(self) -> bool:
        """True for parameters with one entry per layer, a leading Y."""
        return self.dims.startswith("Y")

    def placed(self, order: tuple[int, ...]) -> "ParamInfo":
        """Returns the parameter with its layers in another order, and padded; itself if nothing changes."""
        # The same object where nothing moves, so that plain runs keep `layer_order=None`.
        if not self.is_stacked or order == tuple(range(self.shape[0])):
            return self
        return dataclasses.replace(self, shape=(len(order), *self.shape[1:]), layer_order=order)

    @property
    def logical(self) -> "ParamInfo":
        """The parameter as the model declares it: `placed` undone."""
        if self.layer_order is None:
            return self
        # Identity layers pad the stack; they are no layers of the model.
        layers = sum(layer >= 0 for layer in self.layer_order)
        return dataclasses.replace(self, shape=(layers, *self.shape[1:]), layer_order=None)

    @property
    def is_matrix(self) -> bool:
        """True for what multiplies as a matrix; False for norm scales and biases, also where each head has
        its own, and for the taps of a convolution, which multiply each channel by itself.
        """
        per_channel = "W" in self.dims or self.mean != 0
        return self.init == "normal" and len(self.dims.removeprefix("Y")) > 1 and not per_channel

    @property
    def is_adapter(self) -> bool:
        """True for the matrices of low rank beside another one."""
        return self.path.rpartition(".")[0].endswith(ADAPTER)

    @property
    def num_inputs(self) -> int:
        """Dimensions of one layer's matrix, behind those of experts, that x is contracted over: the first, if
        it is the model's width D, a latent or a rank, else all but the last.
        """
        dims = self.dims.removeprefix("Y").removeprefix("X")
        return 1 if dims[0] in "DQCR" else len(dims) - 1

    @property
    def is_experts(self) -> bool:
        """True for stacked matrices of X experts; False for a router, whose outputs are X."""
        # A router is DX: its experts come last.
        return self.is_matrix and self.dims.removeprefix("Y").startswith("X")

    @property
    def active_size(self) -> int:
        """Number of elements used for one token: of experts, only `top_k` count."""
        if not self.is_experts:
            return self.size
        return self.size // self.shape[self.dims.index("X")] * self.top_k


def kv_heads_in_use(num_kv_heads: int, tensor: int) -> int:
    """Key heads that all devices along `tensor` compute, with repetition: every device has at least one."""
    # tensor=8 with 2 key heads: 8 are computed, 4 copies of each.
    return max(num_kv_heads, tensor)


def splits_heads(num_heads: int, num_kv_heads: int, tensor: int) -> bool:
    """True if each of `tensor` devices computes whole query heads with whole or shared key heads."""
    return num_heads % tensor == 0 and (num_kv_heads % tensor == 0 or tensor % num_kv_heads == 0)
