"""Interface of mixers of positions: a description that makes a module, and the module's calls."""

import abc
import dataclasses
from typing import Any, ClassVar

from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jtrain.model import ops
from jtrain.model.norm import NormSpec
from jtrain.model.rope import Positions, PositionTables, RopeSpec
from jtrain.model.sizes import ModelSizes
from jtrain.model.tensor_parallel import TensorAxis

type Rotation = tuple[Float[Array, "B L R"], Float[Array, "B L R"]] | PositionTables | None
"""Cosine and sine of every position's angles, or what else a mixer reads of positions; None for nothing."""


class Mixer(nnx.Module):
    """A layer that mixes positions of one document, causally.

    Heads or channels are split over `tensor`; each array here holds this device's.
    """

    @abc.abstractmethod
    def __call__(
        self,
        x_BLD: Float[Array, "B _ D"],
        rotation: Rotation,
        segment_BL: Int[Array, "B L"],
        tensor: TensorAxis = TensorAxis(),  # noqa: B008 - frozen
        context: ops.RowSplit = ops.WHOLE_ROWS,
    ) -> Float[Array, "B _ D"]:
        """Output at this device's positions; inside, its heads at all positions along `tensor`."""

    @abc.abstractmethod
    def extend(
        self,
        x_BLD: Float[Array, "B L D"],
        rotation: Rotation,
        position_BL: Int[Array, "B L"],
        valid_BL: Bool[Array, "B L"],
        cache: Any,
    ) -> tuple[Float[Array, "B L D"], Any]:
        """Output at the next positions of one document, on one device, and the cache with them.

        Args:
          valid_BL: False for padding, which stands after all tokens and must not change what later tokens
            read.
          cache: of the positions before, as `MixerSpec.empty_cache` makes it.
        """


@dataclasses.dataclass(frozen=True)
class MixerSpec(abc.ABC):
    """Description of a mixer; `name` is where a block keeps its module, and so part of parameters' paths."""

    name: ClassVar[str]

    @abc.abstractmethod
    def module(self, sizes: ModelSizes, norm: NormSpec, *, layers: int) -> Mixer:
        """The layer.

        Args:
          norm: kind of the model's norms.
          layers: length of the stack of layers; 0 for a single one.
        """

    @abc.abstractmethod
    def with_sizes(self, sizes: ModelSizes) -> "MixerSpec":
        """This mixer with the sizes that it takes from the model, so that mixers of two models compare."""

    @abc.abstractmethod
    def empty_cache(self, sizes: ModelSizes, *, batch: int, max_len: int, dtype: str) -> Any:
        """Cache of a layer before the first position, with room for `max_len`: arrays [B, ...]."""

    def rotation(self, sizes: ModelSizes) -> tuple[RopeSpec | Positions, int] | None:
        """Rotation that it reads, and the size of the heads that are turned; None for nothing."""
        return None

    def mixing_flops(self, sizes: ModelSizes, *, seq_len: int) -> int:
        """FLOPs of a trained token besides those of matrices; by default those of causal attention.

        2 matmuls of 2 FLOPs per pair of positions, 3 times for both passes, halved by the causal mask: 6.
        """
        return 6 * sizes.num_heads * sizes.head_dim * seq_len
