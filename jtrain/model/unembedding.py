"""Cross entropy with an unembedding that is split by columns over `tensor`, in a pipeline over `stage` and `tensor`,
and gathered from shards in parts.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrain.errors import UserError
from jtrain.model import ops

PART_COLUMNS = 16384
"""Columns of the unembedding that a device gathers from shards at a time: with D = 4096 and bfloat16, 0.13
GB."""


def num_parts(vocab_size: int, shards: int) -> int:
    """Number of parts in which each of `shards` devices gathers its block of the vocabulary."""
    return -(-vocab_size // shards // PART_COLUMNS)


@dataclasses.dataclass(frozen=True)
class Unembedding:
    """Unembedding whose columns are split over devices, and what becomes of its logits.

    weight: this device's columns, [D, V / shards], in the compute dtype; with `fetch` its shard of them, [d, V /
      shards], or [V / shards, d] if tied.
    fetch: gathers columns (tied: rows) of all shards, in the compute dtype; None where `weight` is whole.
    axis, shards: axes that split the columns, and the number of devices along them.
    chunk_tokens: tokens whose logits exist at a time; None leaves it to the op.
    """

    weight: Float[Array, "_ _"]
    fetch: Callable[[Array], Array] | None
    tied: bool
    axis: ops.VocabAxis
    shards: int
    chunk_tokens: int | None
    soft_cap: float | None

    def loss(
        self,
        x_BLD: Float[Array, "B _ D"],
        target_BL: Int[Array, "B L"],
        *,
        z_loss: float,
        weight_BL: Float[Array, "B L"] | None = None,
        soft: ops.SoftTargets | None = None,
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """`ops.linear_cross_entropy` at this device's positions.

        A single part is gathered once; with several, one part of the columns and of their gradient exists at a
        time, and each is gathered twice.

        Args:
          target_BL, weight_BL, soft: at all positions.
        """
        settings: Any = dict(self._settings, z_loss=z_loss, weight_BL=weight_BL, soft=soft)
        if (kernel_DW := self._whole_columns()) is None:
            return ops.linear_cross_entropy_in_parts(
                x_BLD, *self._in_parts(), target_BL, fetch=self._gather, axis=self._split, **settings
            )
        if self._split is None:
            return ops.linear_cross_entropy(x_BLD, kernel_DW, target_BL, **settings)
        return ops.vocab_parallel_linear_cross_entropy(
            x_BLD, kernel_DW, target_BL, axis=self._split, **settings
        )

    def token_nats(self, x_BLD: Float[Array, "B _ D"], target_BL: Int[Array, "B L"]) -> Float[Array, "B _"]:
        """Cross entropy of each of this device's tokens in nats; 0 without a target.

        Args:
          target_BL: at all positions.
        """
        settings: Any = dict(self._settings, axis=self._split)
        if (kernel_DW := self._whole_columns()) is not None:
            return ops.token_cross_entropy(x_BLD, kernel_DW, target_BL, **settings)
        return ops.token_cross_entropy_in_parts(
            x_BLD, *self._in_parts(), target_BL, fetch=self._gather, **settings
        )

    def top_k(self, x_BLD: Float[Array, "B _ D"], k: int) -> ops.SoftTargets:
        """Log-probabilities of the k most probable tokens after each of this device's, and of all others
        together.
        """
        return ops.top_k_in_parts(
            x_BLD, *self._in_parts(), k=k, fetch=self._gather, axis=self._split, **self._settings
        )

    @property
    def _settings(self) -> dict[str, Any]:
        return dict(chunk_tokens=self.chunk_tokens, soft_cap=self.soft_cap)

    @property
    def _split(self) -> ops.VocabAxis | None:
        # With one shard nothing is summed over an axis.
        return self.axis if self.shards > 1 else None

    @property
    def _shard(self) -> Float[Array, "d W"]:
        return self.weight.T if self.tied else self.weight

    def _gather(self, part_dw: Array) -> Float[Array, "D W"]:
        """Some of this device's columns, of all shards."""
        if self.fetch is None:
            return part_dw
        # A tied table is [V, D]: ZeRO gathers its second dimension, so parts travel transposed.
        return self.fetch(part_dw.T).T if self.tied else self.fetch(part_dw)

    def _whole_columns(self) -> Float[Array, "D W"] | None:
        """All of this device's columns, gathered; None if they are gathered in several parts."""
        if self.fetch is not None and num_parts(self._shard.shape[1] * self.shards, self.shards) > 1:
            return None
        # Held from the forward to the backward pass.
        return self._gather(self._shard)

    def _in_parts(self) -> tuple[Float[Array, "Z d w"], Int[Array, "Z w"]]:
        """Parts of this device's block, padded to equal sizes, and the ids of their columns.

        Columns come last: the few rows of a shard would be padded to a TPU's 128 lanes.
        """
        shard_dW = self._shard
        d, local_columns = shard_dW.shape
        # 128,256 columns over 4 shards: 32,064 each, in 2 parts of 16,032.
        parts = num_parts(local_columns * self.shards, self.shards)
        num_padding = -local_columns % parts
        # Every device's own block is cut, so that all gather in each part, and equally much.
        part_dZw = jnp.pad(shard_dW, ((0, 0), (0, num_padding))).reshape(d, parts, -1)
        # Blocks of the vocabulary follow the device's index along the axes, outermost first.
        first = jax.lax.axis_index(self.axis) * local_columns if self.shards > 1 else 0
        # NO_COLUMN keeps padding out of the softmax, and no target has that id.
        column_W = jnp.pad(first + jnp.arange(local_columns), (0, num_padding), constant_values=ops.NO_COLUMN)
        return jnp.moveaxis(part_dZw, 1, 0), column_W.reshape(parts, -1)


def loss_chunk(chosen_tokens: int | Literal["auto"]) -> int:
    """Tokens whose logits exist at a time, of a model's `loss_chunk_tokens`.

    Raises:
      UserError: it is still `auto`.
    """
    if chosen_tokens == "auto":
        raise UserError(
            "model.loss_chunk_tokens=auto has to be chosen first: the best value depends on the devices. "
            "`jtrain.plan` and `jtrain.launch` choose it; elsewhere set a number."
        )
    return chosen_tokens
