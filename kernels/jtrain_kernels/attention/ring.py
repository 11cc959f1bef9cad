"""Ring attention over rows split across devices: keys and values travel, queries stay (arXiv:2310.01889).

A row is cut into 2 c parts. Device i of c has parts i and 2c - 1 - i, its early and its late part. Under a
causal mask every device then has the same work at every hop (arXiv:2405.07719 section 3, "zig-zag"): its late
queries see the early keys of every other device, and in addition

| the keys come from | what else is seen |
|---|---|
| an earlier device j < i | its early queries see the early keys |
| a later device j > i | its late queries see the late keys |

These are two blocks without a causal mask and of equal shape for every sender, so one call computes both.

Example: 8192 positions over c = 4 devices: parts of 1024. Device 1 has parts 1 and 6. At hop 1 it has the
keys of device 0 (parts 0 and 7): late queries (6) see part 0, and early queries (1) see part 0; part 7 is
hidden from both. At hop 2 it has those of device 3 (parts 3 and 4): late queries see part 3 and part 4, early
queries see neither.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jtrain_kernels.attention.mask import Mask, Passes
from jtrain_kernels.attention.sinks import sink_gradient, with_sink


@dataclasses.dataclass(frozen=True)
class RingAttention:
    """Configuration of ring attention.

    axis, size: mesh axis of the ring, and its number of devices.
    chunk: queries whose scores exist at a time, for implementations in plain JAX.
    soft_cap: see `Mask`.
    local_passes, hop_passes: passes over a device's own keys, and over the keys that arrive.
    """

    axis: str
    size: int
    chunk: int
    soft_cap: float | None
    local_passes: Passes
    hop_passes: Passes

    @property
    def local(self) -> dict[str, Any]:
        """Settings of a pass over the device's own keys."""
        return dict(mask=Mask(soft_cap=self.soft_cap), chunk=self.chunk)

    @property
    def hop(self) -> dict[str, Any]:
        """Settings of a pass over the keys that arrive."""
        return dict(mask=Mask(causal=False, soft_cap=self.soft_cap), chunk=self.chunk)

    def send[T](self, arrays: T) -> T:
        """Sends this device's arrays to the next device and returns those of the previous one."""
        to_next = [(i, (i + 1) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis, to_next), arrays)

    def earlier(self, distance: Array | int) -> Array:
        """True if arrays that were sent `distance` times come from an earlier device than this one."""
        # After `distance` hops device i has the arrays of i - distance, modulo the size of the ring.
        return jax.lax.axis_index(self.axis) >= distance


type _Result = tuple[Array, Array]
"""y_BLNP and lse_BNL of the queries over some of the keys, float32."""


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def ring_attention(
    q_BLNH: Float[Array, "B L N H"],
    k_BLKH: Float[Array, "B L K H"],
    v_BLKP: Float[Array, "B L K P"],
    segment_BL: Int[Array, "B L"],
    sink_N: Float[Array, " N"] | None,
    ring: RingAttention,
) -> Float[Array, "B L N P"]:
    """Causal attention within segments of this device's queries to the keys of all devices of the ring.

    Every array is this device's early part followed by its late part. A device sends k, v and segments c - 1
    times in each pass, and gradients of k and v, float32, c times in the backward pass, each while a block is
    computed. It holds the keys of two devices at a time. The results that the backward pass needs carry the
    checkpoint name "attention".
    """
    return _vjp_forward(q_BLNH, k_BLKH, v_BLKP, segment_BL, sink_N, ring)[0]


def _vjp_forward(
    q_BLNH: Array,
    k_BLKH: Array,
    v_BLKP: Array,
    segment_BL: Array,
    sink_N: Array | None,
    ring: RingAttention,
) -> tuple[Array, tuple[Array | None, ...]]:
    inputs = q_BLNH, k_BLKH, v_BLKP, segment_BL
    # Sent before this device's own block is computed, which hides the first hop.
    arrived = ring.send(inputs[1:])
    local_result = ring.local_passes.forward(*inputs, segment_BL, **ring.local)

    def hop(total: _Result, keys: tuple[Array, ...], distance: Array | int) -> _Result:
        pair = _Pair(ring.earlier(distance))
        k, v, segment = map(pair.keys, keys)
        # Segments hide keys of other documents; between parts, positions need no further mask.
        queries = pair.queries(q_BLNH), k, v, pair.queries(segment_BL), segment
        return pair.join(total, ring.hop_passes.forward(*queries, **ring.hop))

    def step(carry: tuple[_Result, tuple[Array, ...]], distance: Array) -> tuple[Any, None]:
        total, keys = carry
        arriving = ring.send(keys)  # independent of the block computed meanwhile
        return (hop(total, keys, distance), arriving), None

    total = local_result[0].astype(jnp.float32), local_result[1]
    # Hops 1 to c - 2 in the loop; the last one sends nothing, so it stands after it.
    (total, last), _ = jax.lax.scan(step, (total, arrived), jnp.arange(1, ring.size - 1))
    y_BLNP, lse_BNL = with_sink(*hop(total, last, ring.size - 1), sink_N)
    y_BLNP, lse_BNL = (checkpoint_name(x, "attention") for x in (y_BLNP.astype(q_BLNH.dtype), lse_BNL))
    return y_BLNP, (*inputs, sink_N, y_BLNP, lse_BNL)


def _vjp_backward(
    ring: RingAttention, saved: tuple[Any, ...], dy_BLNP: Array
) -> tuple[Array, Array, Array, None, Array | None]:
    q_BLNH, k_BLKH, v_BLKP, segment_BL, sink_N, y_BLNP, lse_BNL = saved
    arrived = ring.send((k_BLKH, v_BLKP, segment_BL))
    local_gradients = ring.local_passes.backward(
        *saved[:4], segment_BL, y_BLNP, lse_BNL, dy_BLNP, **ring.local
    )
    # Float32 from here on: each hop adds to the sums, and they are rounded once at the end.
    dq, *dkv = (x.astype(jnp.float32) for x in local_gradients)

    def hop(
        dq: Array, dkv: list[Array], keys: tuple[Array, ...], distance: Array | int
    ) -> tuple[Array, list[Array]]:
        pair = _Pair(ring.earlier(distance))
        k, v, segment = map(pair.keys, keys)
        rows = pair.queries(y_BLNP), pair.queries(lse_BNL, axis=2), pair.queries(dy_BLNP)
        queries = pair.queries(q_BLNH), k, v, pair.queries(segment_BL), segment
        # Gradients of keys travel one hop behind the keys: the previous holder sends its sum so far.
        arriving = ring.send(dkv)
        dq_hop, *dkv_hop = ring.hop_passes.backward(*queries, *rows, **ring.hop)
        dkv = [pair.add_to_keys(total, part) for total, part in zip(arriving, dkv_hop, strict=True)]
        return pair.add_to_queries(dq, dq_hop), dkv

    def step(carry: tuple[Array, list[Array], tuple[Array, ...]], distance: Array) -> tuple[Any, None]:
        # The keys of the next hop travel while this hop is computed.
        dq, dkv, keys = carry
        arriving = ring.send(keys)
        return (*hop(dq, dkv, keys, distance), arriving), None

    (dq, dkv, last), _ = jax.lax.scan(step, (dq, dkv, arrived), jnp.arange(1, ring.size - 1))
    dq, dkv = hop(dq, dkv, last, ring.size - 1)
    dk, dv = ring.send(dkv)  # back to the owner of the keys
    dsink_N = sink_gradient(y_BLNP, lse_BNL, dy_BLNP, sink_N)
    return dq.astype(q_BLNH.dtype), dk.astype(k_BLKH.dtype), dv.astype(v_BLKP.dtype), None, dsink_N


ring_attention.defvjp(_vjp_forward, _vjp_backward)


def _early(x: Array, axis: int = 1) -> Array:
    # A device's arrays are its early half followed by its late half.
    return jax.lax.slice_in_dim(x, 0, x.shape[axis] // 2, axis=axis)


def _late(x: Array, axis: int = 1) -> Array:
    return jax.lax.slice_in_dim(x, x.shape[axis] // 2, x.shape[axis], axis=axis)


@dataclasses.dataclass(frozen=True)
class _Pair:
    """The two blocks of a hop, concatenated along B: late queries with early keys, and the block of the table
    above.

    earlier: True if the keys come from an earlier device.
    """

    earlier: Array

    def queries(self, x: Array, axis: int = 1) -> Array:
        """Query-side arrays of both blocks."""
        # Late queries see the early keys at every hop; the second block depends on the sender.
        return jnp.concatenate([_late(x, axis), jnp.where(self.earlier, _early(x, axis), _late(x, axis))])

    def keys(self, x: Array) -> Array:
        """Key-side arrays of both blocks."""
        return jnp.concatenate([_early(x), jnp.where(self.earlier, _early(x), _late(x))])

    def add_to_queries(self, total: Array, gradient: Array) -> Array:
        """Adds `gradient`, of the queries of both blocks, at their positions."""
        first, second = jnp.split(gradient.astype(jnp.float32), 2)
        # The second block belongs to the early or to the late queries; the other half gets zeros.
        early = jnp.where(self.earlier, second, 0.0)
        late = first + jnp.where(self.earlier, 0.0, second)
        return total + jnp.concatenate([early, late], axis=1)

    def add_to_keys(self, total: Array, gradient: Array) -> Array:
        """Adds `gradient`, of the keys of both blocks, at their positions."""
        first, second = jnp.split(gradient.astype(jnp.float32), 2)
        early = first + jnp.where(self.earlier, second, 0.0)
        late = jnp.where(self.earlier, 0.0, second)
        return total + jnp.concatenate([early, late], axis=1)

    def join(self, total: _Result, hop_result: _Result) -> _Result:
        """Combines the result over the keys so far with the result over the keys of this hop."""
        y, lse = total
        (y1, y2), (lse1, lse2) = jnp.split(hop_result[0].astype(jnp.float32), 2), jnp.split(hop_result[1], 2)
        late = _joined((_late(y), _late(lse, 2)), (y1, lse1))
        # The block that does not exist at this hop has no keys: a log-partition of -inf gives it weight 0.
        late = _joined(late, (y2, jnp.where(self.earlier, -jnp.inf, lse2)))
        early = _joined((_early(y), _early(lse, 2)), (y2, jnp.where(self.earlier, lse2, -jnp.inf)))
        return jnp.concatenate([early[0], late[0]], axis=1), jnp.concatenate([early[1], late[1]], axis=2)


def _joined(result: _Result, hop_result: _Result) -> _Result:
    """Result over both sets of keys; `result` has at least one key (arXiv:2112.05682, section 2)."""
    lse_BNL = jnp.logaddexp(result[1], hop_result[1])
    # exp(lse - total) is the share of the softmax's mass on each set of keys.
    first, second = (y * jnp.exp(lse - lse_BNL).swapaxes(1, 2)[..., None] for y, lse in (result, hop_result))
    return first + second, lse_BNL
