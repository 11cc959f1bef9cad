"""Vocabulary parallelism: a vocabulary on one device, or split along an axis that splits tokens too."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

IGNORE = -1
"""Target id of a token that is not predicted."""

type Axis = str | tuple[str, ...]
"""Mesh axis that splits a vocabulary, or several, of which the first is the outermost."""


@dataclasses.dataclass(frozen=True)
class Vocab:
    """Placement of an unembedding's columns: all on this device, or columns from i * W on at device i of
    `axis`.

    Methods run inside a `shard_map`. C counts the tokens of all devices along the axis, in their order; c
    counts this device's tokens. Without an axis both are the same.
    """

    axis: Axis | None = None

    def gather(self, x: Shaped[Array, "..."], dim: int = 0) -> Shaped[Array, "..."]:
        """Concatenation of all devices' arrays along `dim`: from c to C tokens."""
        return x if self.axis is None else jax.lax.all_gather(x, self.axis, axis=dim, tiled=True)

    def scatter(self, x: Shaped[Array, "..."], dim: int = 0) -> Shaped[Array, "..."]:
        """Sum over devices, reduced to this device's tokens; the transpose of `gather`."""
        return (
            x if self.axis is None else jax.lax.psum_scatter(x, self.axis, scatter_dimension=dim, tiled=True)
        )

    def column(self, target_C: Int[Array, "*C"], num_columns: int) -> Int[Array, "*C"]:
        """Column of a target on this device; out of range on other devices, or without a target."""
        # Device i has columns from i * W on, so a target of another device falls outside [0, W).
        return target_C if self.axis is None else target_C - jax.lax.axis_index(self.axis) * num_columns

    def summary(
        self, logits_CW: Float[Array, "C W"], target_C: Int[Array, " C"]
    ) -> tuple[Float[Array, " C"], Float[Array, " C"]]:
        """Log-partition over the whole vocabulary, and logit of the target (arbitrary without a target)."""
        width = logits_CW.shape[1]
        column_C = self.column(target_C, width)
        # Clipped, because a look-up out of range is undefined; the mask below drops such values.
        picked_C = jnp.take_along_axis(logits_CW, jnp.clip(column_C, 0, width - 1)[:, None], axis=1)[:, 0]
        if self.axis is None:
            return jax.nn.logsumexp(logits_CW, axis=-1), picked_C
        top_C = jnp.max(logits_CW, axis=-1)
        total_C = jnp.sum(jnp.exp(logits_CW - top_C[:, None]), axis=-1)
        picked_C = jnp.where((column_C >= 0) & (column_C < width), picked_C, 0.0)
        return self.merge(top_C, total_C, picked_C)

    def merge(
        self, top: Float[Array, "*C"], total: Float[Array, "*C"], picked: Float[Array, "*C"]
    ) -> tuple[Float[Array, "*C"], Float[Array, "*C"]]:
        """Log-partition and target's logit over all columns, from each device's values over its own columns.

        Args:
          top: largest logit.
          total: sum of exp(logit - top).
          picked: logit of the target, 0 if another device has its column.
        """
        if self.axis is None:
            return top + jnp.log(total), picked
        # One all-gather, summed in the same order everywhere; a maximum and two sums have three times the
        # latency.
        stats_n3C = jax.lax.all_gather(jnp.stack([top, total, picked]), self.axis)
        # Axis 0 counts devices; 3 are top, total and picked.
        tops, totals, picks = stats_n3C[:, 0], stats_n3C[:, 1], stats_n3C[:, 2]
        highest = jnp.max(tops, axis=0)
        # Each device's sum is relative to its own largest logit.
        total = jnp.sum(totals * jnp.exp(tops - highest[None]), axis=0)
        # At most one device has the target's column; the others added 0.
        return highest + jnp.log(total), jnp.sum(picks, axis=0)

    def sum_blocks(self, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """Sum over devices of what each finds in its own columns."""
        return x if self.axis is None else jax.lax.psum(x, self.axis)

    def local_slices(self, *of_all: Shaped[Array, " C"] | None) -> tuple[Any, ...]:
        """Slices of this device's tokens; None stays None."""
        if self.axis is None:
            return of_all
        size = next(x.shape[0] for x in of_all if x is not None) // jax.lax.axis_size(self.axis)
        start = jax.lax.axis_index(self.axis) * size
        return tuple(None if x is None else jax.lax.dynamic_slice_in_dim(x, start, size) for x in of_all)

    def local_targets(self, target_BL: Int[Array, "B L"]) -> Int[Array, "B L"]:
        """Targets of this device's positions; IGNORE at all other positions."""
        if self.axis is None:
            return target_BL
        # Device i has positions from i * L / n on.
        owner_BL = jax.lax.broadcasted_iota(jnp.int32, target_BL.shape, 1) // (
            target_BL.shape[1] // jax.lax.axis_size(self.axis)
        )
        return jnp.where(owner_BL == jax.lax.axis_index(self.axis), target_BL, IGNORE)

    def local_positions(self, x_BL: Shaped[Array, "B L *J"]) -> Shaped[Array, "B _ *J"]:
        """This device's positions of an array that has those of all devices."""
        if self.axis is None:
            return x_BL
        size = x_BL.shape[1] // jax.lax.axis_size(self.axis)
        return jax.lax.dynamic_slice_in_dim(x_BL, jax.lax.axis_index(self.axis) * size, size, axis=1)
