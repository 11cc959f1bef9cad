"""Rows of tokens to their experts and back, in the order of the experts and without any scatter.

A row is a pair of a token and one of its S experts: P = T * S rows, those of an expert next to each other. Over
`expert` each device has X / n experts: rows go to their expert's device by one ragged all-to-all, which puts them in
the order of its experts at once, and their results come back by its inverse. Buffers are for the worst case, in which
one device's experts are chosen by all tokens of all: n * T * min(S, X / n) rows.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Order:
    """Where rows are: int32 arrays, or as a pytree whatever stands for them.

    pair_P: of each row which pair it is, t * S + s. Rows of pairs that go to no expert come last.
    row_TS: of each pair its row.
    count_X: rows of each expert.
    """

    pair_P: Any
    row_TS: Any
    count_X: Any


def order_of(expert_TS: Int[Array, "T S"], num_experts: int) -> Order:
    """Rows by expert, and by token within; an expert of `num_experts` is none."""
    expert_P = expert_TS.reshape(-1)
    pair_P = jnp.argsort(expert_P, stable=True).astype(jnp.int32)
    row_P = jnp.zeros_like(pair_P).at[pair_P].set(jnp.arange(pair_P.size, dtype=jnp.int32), unique_indices=True)
    count_X = jnp.sum(expert_P[:, None] == jnp.arange(num_experts)[None, :], axis=0, dtype=jnp.int32)
    return Order(pair_P, row_P.reshape(expert_TS.shape), count_X)


@jax.custom_vjp
def to_rows(x_TD: Float[Array, "T D"], order: Order) -> Float[Array, "P D"]:
    """Each row's token. A token's gradient is the sum over its rows, in float32."""
    return x_TD[order.pair_P // order.row_TS.shape[1]]


def _to_rows_forward(x_TD: Array, order: Order) -> tuple[Array, Order]:
    return to_rows(x_TD, order), order


def _to_rows_backward(order: Order, dx_PD: Array) -> tuple[Array, None]:
    return _sum_of_slots(dx_PD, order.row_TS, None), None


to_rows.defvjp(_to_rows_forward, _to_rows_backward)


@jax.custom_vjp
def from_rows(y_PD: Float[Array, "P D"], weight_TS: Float[Array, "T S"], order: Order) -> Float[Array, "T D"]:
    """Each token's rows, weighted and added up in float32, in y's dtype."""
    return _sum_of_slots(y_PD, order.row_TS, weight_TS)


def _from_rows_forward(y_PD: Array, weight_TS: Array, order: Order) -> tuple[Array, tuple[Array, Array, Order]]:
    return from_rows(y_PD, weight_TS, order), (y_PD, weight_TS, order)


def _from_rows_backward(saved: tuple[Array, Array, Order], dout_TD: Array) -> tuple[Array, Array, None]:
    y_PD, weight_TS, order = saved
    slots = weight_TS.shape[1]
    dout_PD = dout_TD[order.pair_P // slots].astype(jnp.float32)
    dy_PD = (dout_PD * weight_TS.reshape(-1)[order.pair_P][:, None]).astype(y_PD.dtype)
    dweight_P = jnp.sum(dout_PD * y_PD.astype(jnp.float32), axis=-1)  # by row
    return dy_PD, dweight_P[order.row_TS].astype(weight_TS.dtype), None


from_rows.defvjp(_from_rows_forward, _from_rows_backward)


def _sum_of_slots(y_PD: Array, row_TS: Array, weight_TS: Array | None) -> Array:
    """Slot by slot, so that a fused loop reads the rows and nothing of T * S * D is made."""
    total_TD = jnp.zeros((row_TS.shape[0], y_PD.shape[1]), jnp.float32)
    for s in range(row_TS.shape[1]):
        y_TD = y_PD[row_TS[:, s]].astype(jnp.float32)
        total_TD += y_TD if weight_TS is None else y_TD * weight_TS[:, s, None]
    return total_TD.astype(y_PD.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Exchange:
    """How many rows each device has for each expert, as every device along `expert` knows it.

    count_EX: rows of device e for expert x, an int32 array.
    """

    count_EX: Any

    @property
    def _devices(self) -> int:
        return self.count_EX.shape[0]

    @property
    def _me(self) -> Array:
        return jax.lax.axis_index("expert")

    @property
    def _place_EX(self) -> Array:
        """Where on its expert's device each count's rows begin: by expert, and by the device that they come from."""
        count_EX = self.count_EX
        before_EX = jnp.cumsum(count_EX, axis=0) - count_EX
        total_Ex = jnp.sum(count_EX, axis=0).reshape(self._devices, -1)
        first_X = (jnp.cumsum(total_Ex, axis=1) - total_Ex).reshape(-1)
        return before_EX + first_X[None, :]

    @property
    def group_size(self) -> Int[Array, " Z"]:
        """Rows of each of this device's experts, from all devices."""
        mine_EZ = self._mine(self.count_EX)
        return jnp.sum(mine_EZ, axis=0)

    def _mine(self, x_EX: Array) -> Array:
        """This device's experts' columns."""
        local = x_EX.shape[1] // self._devices
        return jax.lax.dynamic_slice_in_dim(x_EX, self._me * local, local, axis=1)

    def sent(self) -> tuple[Array, Array, Array, Array]:
        """Of each expert, in the order of the devices: first row here, rows, first row there, rows that come here.

        The last is by the device that sends and by this device's experts.
        """
        count_X, place_X = self.count_EX[self._me], self._place_EX[self._me]
        return jnp.cumsum(count_X) - count_X, count_X, place_X, self._mine(self.count_EX).reshape(-1)

    def returned(self) -> tuple[Array, Array, Array, Array]:
        """The same for the way back: by the device that it goes to and by this device's experts."""
        count_EX = self.count_EX
        first_EX = jnp.cumsum(count_EX, axis=1) - count_EX
        first, count, place = (self._mine(x).reshape(-1) for x in (self._place_EX, count_EX, first_EX))
        return first, count, place, count_EX[self._me]


def exchange_of(count_X: Int[Array, " X"]) -> Exchange:
    """Tells all devices along `expert` how many rows each has for whom."""
    return Exchange(jax.lax.all_gather(count_X, "expert"))


def buffer_rows(num_pairs: int, top_k: int, *, num_experts: int, expert: int) -> int:
    """Rows that one device may have at most: of every device all tokens, each for as many experts as are here."""
    return expert * num_pairs // top_k * min(top_k, num_experts // expert)


@jax.custom_vjp
def send(x_PD: Float[Array, "P D"], exchange: Exchange, like_R: Array) -> Float[Array, "R D"]:
    """Rows to their experts' devices; there they are by expert, and what is not used is zero.

    Args:
      like_R: an array of as many rows as may come: `buffer_rows`.
    """
    return _ragged(x_PD, like_R.shape[0], exchange.sent(), exchange._devices)


@jax.custom_vjp
def send_back(y_RD: Float[Array, "R D"], exchange: Exchange, like_P: Array) -> Float[Array, "P D"]:
    """The inverse of `send`: rows of no expert are zero."""
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
    """XLA:CPU has no ragged all-to-all; there every pair of devices exchanges as much as it could at most."""
    first, count, place, coming = slices

    def ragged(x: Array) -> Array:
        out = jnp.zeros((num_rows, *x.shape[1:]), x.dtype)
        return jax.lax.ragged_all_to_all(x, out, first, count, place, coming, axis_name="expert")

    def padded(x: Array) -> Array:
        return _padded(x, num_rows, first, count, place, coming, devices)

    return jax.lax.platform_dependent(x, cpu=padded, default=ragged)


def _padded(
    x: Array, num_rows: int, first: Array, count: Array, place: Array, coming: Array, devices: int
) -> Float[Array, "..."]:
    """The same result by an all-to-all of equal blocks, each as long as any can be."""
    block_rows = max(x.shape[0], num_rows) // devices

    def slice_of(count: Array) -> tuple[Array, Array, Array]:
        """Of each row of a block: its slice, its place in that, and whether it holds anything."""
        end = jnp.cumsum(count, axis=1)
        row = jnp.broadcast_to(jnp.arange(block_rows), (devices, block_rows))
        which = jnp.sum(row[:, :, None] >= end[:, None, :], axis=-1)
        used = which < count.shape[1]
        which = jnp.minimum(which, count.shape[1] - 1)
        return which, row - jnp.take_along_axis(end - count, which, axis=1), used

    first, count, place, coming = (a.reshape(devices, -1) for a in (first, count, place, coming))
    which, offset, _ = slice_of(count)
    blocks = x[jnp.take_along_axis(first, which, axis=1) + offset]
    blocks, place = (jax.lax.all_to_all(a, "expert", 0, 0, tiled=True) for a in (blocks, place))
    which, offset, used = slice_of(coming)
    row = jnp.where(used, jnp.take_along_axis(place, which, axis=1) + offset, num_rows)
    return jnp.zeros((num_rows, *x.shape[1:]), x.dtype).at[row].set(blocks, mode="drop")
