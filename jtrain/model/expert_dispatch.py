"""Dispatch of tokens to experts and back: rows sorted by expert, without any scatter of activations.

A row is a pair of a token and one of its S experts. There are P = T * S rows, and the rows of one expert are
neighbours. With n devices along `expert`, each holds X / n experts. One ragged all-to-all sends rows to the
device of their expert and sorts them by expert at the same time; its inverse returns the results. Buffers are
sized for the worst case, in which all tokens of all devices choose one device's experts: n * T * min(S, X /
n) rows.

Example: tokens 0, 1, 2 with S = 2 choose the experts (2, 0), (0, 1), (2, 1). Pairs are numbered t * 2 + s, so
the experts of pairs 0 to 5 are 2, 0, 0, 1, 2, 1. Sorted by expert the rows hold the pairs 1, 2, 3, 5, 0, 4
(`pair_P`); token 0's rows are 4 and 0 (`row_TS[0]`), and `count_X` is 2, 2, 2.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertOrder:
    """Permutation that sorts (token, slot) pairs by expert: int32 arrays, or other leaves of a pytree.

    pair_P: the pair of each row, t * S + s. Rows of pairs without an expert come last.
    row_TS: the row of each pair.
    count_X: number of rows of each expert.
    """

    pair_P: Any
    row_TS: Any
    count_X: Any

    @property
    def used_P(self) -> Array:
        """True in rows of experts."""
        return jnp.arange(self.pair_P.size) < jnp.sum(self.count_X)


def order_of(expert_TS: Int[Array, "T S"], num_experts: int) -> ExpertOrder:
    """Sorts pairs by expert, then by token; an expert index of `num_experts` means no expert."""
    expert_P = expert_TS.reshape(-1)
    # Stable, so that the rows of an expert are in the order of tokens.
    pair_P = jnp.argsort(expert_P, stable=True).astype(jnp.int32)
    row_P = (
        jnp.zeros_like(pair_P).at[pair_P].set(jnp.arange(pair_P.size, dtype=jnp.int32), unique_indices=True)
    )
    # Pairs without an expert match no column; their rows are the last ones.
    count_X = jnp.sum(expert_P[:, None] == jnp.arange(num_experts)[None, :], axis=0, dtype=jnp.int32)
    return ExpertOrder(pair_P, row_P.reshape(expert_TS.shape), count_X)


@jax.custom_vjp
def to_rows(x_TD: Float[Array, "T D"], order: ExpertOrder) -> Float[Array, "P D"]:
    """Copies each token to its rows; a token's gradient is the float32 sum over its rows."""
    # pair // S is the token.
    return x_TD[order.pair_P // order.row_TS.shape[1]]


def _to_rows_forward(x_TD: Array, order: ExpertOrder) -> tuple[Array, ExpertOrder]:
    return to_rows(x_TD, order), order


def _to_rows_backward(order: ExpertOrder, dx_PD: Array) -> tuple[Array, None]:
    return _sum_of_slots(dx_PD, order, None), None


to_rows.defvjp(_to_rows_forward, _to_rows_backward)


@jax.custom_vjp
def from_rows(
    y_PD: Float[Array, "P D"], weight_TS: Float[Array, "T S"], order: ExpertOrder
) -> Float[Array, "T D"]:
    """Weighted sum of the rows of each token's experts, computed in float32 and returned in the dtype of y.

    Rows of no expert, and their gradient, have no effect.
    """
    return _sum_of_slots(y_PD, order, weight_TS)


def _from_rows_forward(
    y_PD: Array, weight_TS: Array, order: ExpertOrder
) -> tuple[Array, tuple[Array, Array, ExpertOrder]]:
    return from_rows(y_PD, weight_TS, order), (y_PD, weight_TS, order)


def _from_rows_backward(saved: tuple[Array, Array, ExpertOrder], dout_TD: Array) -> tuple[Array, Array, None]:
    y_PD, weight_TS, order = saved
    slots = weight_TS.shape[1]
    # A gather, where the transpose of the forward pass would be a scatter-add.
    dout_PD = dout_TD[order.pair_P // slots].astype(jnp.float32)
    dy_PD = (dout_PD * weight_TS.reshape(-1)[order.pair_P][:, None]).astype(y_PD.dtype)
    dweight_P = jnp.where(order.used_P, jnp.sum(dout_PD * y_PD.astype(jnp.float32), axis=-1), 0.0)  # by row
    return dy_PD, dweight_P[order.row_TS].astype(weight_TS.dtype), None


from_rows.defvjp(_from_rows_forward, _from_rows_backward)


def _sum_of_slots(y_PD: Array, order: ExpertOrder, weight_TS: Array | None) -> Array:
    """Sum over slots, one at a time: XLA fuses the reads, and no array has T * S * D elements."""
    row_TS = order.row_TS
    # Rows from the sum of the counts on belong to no expert.
    used_TS = row_TS < jnp.sum(order.count_X)
    total_TD = jnp.zeros((row_TS.shape[0], y_PD.shape[1]), jnp.float32)
    for s in range(row_TS.shape[1]):
        y_TD = jnp.where(used_TS[:, s, None], y_PD[row_TS[:, s]].astype(jnp.float32), 0.0)
        total_TD += y_TD if weight_TS is None else y_TD * weight_TS[:, s, None]
    return total_TD.astype(y_PD.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Exchange:
    """Row counts of every (device, expert) pair, equal on all devices along `expert`.

    count_EX: rows that device e sends to expert x, an int32 array.
    """

    count_EX: Any

    @property
    def _devices(self) -> int:
        return self.count_EX.shape[0]

    @property
    def _me(self) -> Array:
        return jax.lax.axis_index("expert")

    @property
    def _first_row_EX(self) -> Array:
        """First row on the expert's device of each (device, expert) block, by expert, then by sender."""
        count_EX = self.count_EX
        # Rows of the same expert that lower-numbered devices send.
        before_EX = jnp.cumsum(count_EX, axis=0) - count_EX
        total_Ex = jnp.sum(count_EX, axis=0).reshape(self._devices, -1)
        # First row of each expert among the experts of its device: cumulated per device, not over all.
        first_X = (jnp.cumsum(total_Ex, axis=1) - total_Ex).reshape(-1)
        return before_EX + first_X[None, :]

    @property
    def group_size(self) -> Int[Array, " Z"]:
        """Rows of each of this device's experts, summed over all devices."""
        mine_EZ = self._mine(self.count_EX)
        return jnp.sum(mine_EZ, axis=0)

    def _mine(self, x_EX: Array) -> Array:
        """Columns of this device's experts."""
        local = x_EX.shape[1] // self._devices
        return jax.lax.dynamic_slice_in_dim(x_EX, self._me * local, local, axis=1)

    def sent(self) -> tuple[Array, Array, Array, Array]:
        """Slices of the all-to-all to the experts: first row here, rows, first row there, rows to come.

        The first three have one entry per expert, by device; the last has one per sending device and local
        expert.
        """
        count_X, first_there_X = self.count_EX[self._me], self._first_row_EX[self._me]
        return jnp.cumsum(count_X) - count_X, count_X, first_there_X, self._mine(self.count_EX).reshape(-1)

    def returned(self) -> tuple[Array, Array, Array, Array]:
        """Slices of the all-to-all back: one entry per receiving device and local expert."""
        count_EX = self.count_EX
        # On the sending device rows lie by expert: where they came from is where they return to.
        first_EX = jnp.cumsum(count_EX, axis=1) - count_EX
        first, count, first_there = (
            self._mine(x).reshape(-1) for x in (self._first_row_EX, count_EX, first_EX)
        )
        return first, count, first_there, count_EX[self._me]


def exchanges_of(count_mX: Sequence[Int[Array, " X"]]) -> list[Exchange]:
    """Gathers the row counts of all devices along `expert`, for each piece of the tokens."""
    # One all-gather for all pieces: 4 bytes per piece and expert.
    count_EmX = jax.lax.all_gather(jnp.stack(count_mX), "expert")
    return [Exchange(count_EmX[:, m]) for m in range(len(count_mX))]


MAX_PIECES, MIN_PIECE_ROWS = 4, 8192
"""Limits of `num_pieces`. With n pieces, one exchange of n in each direction has no matmul beside it. 8192
rows of 2048 bfloat16 elements take 56 us at 450 GB/s over four devices, several times the latency of an
exchange: an estimate, not measured."""


def num_pieces(num_tokens: int, top_k: int) -> int:
    """Number of equal pieces of a layer's tokens: one is exchanged while another is multiplied."""
    max_pieces = max(1, min(MAX_PIECES, num_tokens * top_k // MIN_PIECE_ROWS))
    # `jnp.split` cuts tokens into equal pieces only.
    return max(pieces for pieces in range(1, max_pieces + 1) if num_tokens % pieces == 0)


def buffer_rows(num_pairs: int, top_k: int, *, num_experts: int, expert: int) -> int:
    """Most rows that a device can receive: all tokens of all devices, min(S, X / n) experts each."""
    # num_pairs // top_k tokens per device; a token chooses an expert at most once.
    return expert * num_pairs // top_k * min(top_k, num_experts // expert)


@jax.custom_vjp
def send(x_PD: Float[Array, "P D"], exchange: Exchange, like_R: Array) -> Float[Array, "R D"]:
    """Sends rows to the devices of their experts, where they are sorted by expert; unused rows are zero.

    Args:
      like_R: any array with `buffer_rows` rows.
    """
    return _ragged(x_PD, like_R.shape[0], exchange.sent(), exchange._devices)


@jax.custom_vjp
def send_back(y_RD: Float[Array, "R D"], exchange: Exchange, like_P: Array) -> Float[Array, "P D"]:
    """Returns rows to the devices they came from, the inverse of `send`; rows without an expert are zero."""
    return _ragged(y_RD, like_P.shape[0], exchange.returned(), exchange._devices)


send.defvjp(
    lambda x, exchange, like: (send(x, exchange, like), (exchange, x[:, :0])),
    lambda saved, dx: (send_back(dx, *saved), None, None),
)
send_back.defvjp(
    lambda y, exchange, like: (send_back(y, exchange, like), (exchange, y[:, :0])),
    lambda saved, dy: (send(dy, *saved), None, None),
)


def _ragged(x: Array, num_rows: int, slices: tuple[Array, Array, Array, Array], devices: int) -> Array:
    """Ragged all-to-all; XLA:CPU has none and exchanges blocks of the largest possible size.

    Args:
      x: rows to send, [rows, D].
      num_rows: rows of the result, [num_rows, D]; those that nobody sends are zero.
      slices: four int32 arrays [X], as `Exchange.sent` and `Exchange.returned` give them: first row of each
        slice in x, number of its rows, its first row in the receiver's result, and the numbers of rows that
        arrive here. Each has X / devices neighbours per device: the receiving one in the first three
        arrays, the sending one in the last.
      devices: devices along `expert`.
    """
    first, count, first_there, arriving = slices

    def ragged(x: Array) -> Array:
        output = jnp.zeros((num_rows, *x.shape[1:]), x.dtype)
        return jax.lax.ragged_all_to_all(x, output, first, count, first_there, arriving, axis_name="expert")

    def padded(x: Array) -> Array:
        return _padded(x, num_rows, first, count, first_there, arriving, devices)

    return jax.lax.platform_dependent(x, cpu=padded, default=ragged)


def _padded(
    x: Array, num_rows: int, first: Array, count: Array, first_there: Array, arriving: Array, devices: int
) -> Float[Array, "..."]:
    """Result of the ragged all-to-all by one of equal blocks, each of the largest possible size.

    Device e sends one block to each device, with its slices for that device one behind the other and rows of
    no meaning after them. The receiver moves the rows in use to their places. The arguments are those of
    `_ragged`, its slices one by one.
    """
    # One of x and the result has `buffer_rows` rows: divided by the devices, the most that one sends another.
    block_rows = max(x.shape[0], num_rows) // devices

    def slice_of(count: Array) -> tuple[Array, Array, Array]:
        """Slice of each row of a block, its offset within the slice, and True if the row is in use.

        Args:
          count: rows of each slice, [devices, slices of a device]; all results are [devices, block_rows].
        """
        end = jnp.cumsum(count, axis=1)
        row = jnp.broadcast_to(jnp.arange(block_rows), (devices, block_rows))
        slice_index = jnp.sum(row[:, :, None] >= end[:, None, :], axis=-1)
        is_used = slice_index < count.shape[1]
        slice_index = jnp.minimum(slice_index, count.shape[1] - 1)
        return slice_index, row - jnp.take_along_axis(end - count, slice_index, axis=1), is_used

    first, count, first_there, arriving = (
        a.reshape(devices, -1) for a in (first, count, first_there, arriving)
    )
    slice_index, offset, _ = slice_of(count)
    blocks = x[jnp.take_along_axis(first, slice_index, axis=1) + offset]
    blocks, first_there = (jax.lax.all_to_all(a, "expert", 0, 0, tiled=True) for a in (blocks, first_there))
    slice_index, offset, is_used = slice_of(arriving)
    # Unused rows get the index behind the last, which `mode="drop"` discards.
    row = jnp.where(is_used, jnp.take_along_axis(first_there, slice_index, axis=1) + offset, num_rows)
    return jnp.zeros((num_rows, *x.shape[1:]), x.dtype).at[row].set(blocks, mode="drop")
