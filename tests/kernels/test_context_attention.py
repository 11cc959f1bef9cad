"""Attention over rows split over devices is attention over whole rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jtrain_kernels.attention.context import RowSplit, context_attention
from jtrain_kernels.attention.reference import attention_reference
from tests.kernels.gradients import agree_with, normal

B, L, N, K, H = 3, 32, 4, 2, 8
SEGMENTS = np.asarray([[1] * 32, [1] * 7 + [2] * 18 + [3] * 4 + [0] * 3, [0] * 32], np.int32)
"""Rows: one document; three documents (one of them on every device) and padding; only padding."""

SPLITS = [
    RowSplit(2, "ring"),
    RowSplit(4, "ring"),
    RowSplit(4, "ulysses", "zigzag"),
    RowSplit(2, "ulysses", "contiguous"),
]


def order_of(split: RowSplit, length: int) -> np.ndarray:
    """Positions of the whole row on each device in turn, as the split itself gives them."""
    mesh = mesh_of(split)
    positions = jax.shard_map(
        lambda: split.position_L(length // split.size), mesh=mesh, in_specs=(), out_specs=P("context")
    )
    return np.asarray(positions())


def mesh_of(split: RowSplit) -> Mesh:
    return Mesh(np.asarray(jax.devices()[: split.size]), ("context",), axis_types=(AxisType.Auto,))


def over_devices(
    split: RowSplit,
    segment: np.ndarray = SEGMENTS,
    chunk: int = 16,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: int = 0,
) -> Callable[..., jax.Array]:
    """Attention of whole rows in text order, computed over the devices of a split."""
    order = order_of(split, segment.shape[1])
    local = jax.shard_map(
        lambda q, k, v, segment, *sink: context_attention(
            q,
            k,
            v,
            segment,
            split=split,
            chunk=chunk,
            window=window,
            soft_cap=soft_cap,
            sink_N=sink[0] if sink else None,
        ),
        mesh=mesh_of(split),
        in_specs=(*(P(None, "context"),) * 4, *(P(),) * sinks),
        out_specs=P(None, "context"),
        check_vma=False,
    )

    def run(q: jax.Array, k: jax.Array, v: jax.Array, *sink: jax.Array) -> jax.Array:
        y = local(q[:, order], k[:, order], v[:, order], jnp.asarray(segment[:, order]), *sink)
        return y[:, np.argsort(order)]

    return run


def inputs(num_heads: int = N, num_kv_heads: int = K) -> tuple[np.ndarray, ...]:
    return normal(0, B, L, num_heads, H), normal(1, B, L, num_kv_heads, H), normal(2, B, L, num_kv_heads, H)


@pytest.mark.parametrize(
    ("split", "dtype"),
    [
        pytest.param(SPLITS[0], "float32", marks=pytest.mark.slow),
        *((split, "float32") for split in SPLITS[1:]),
        (RowSplit(4, "ring"), "bfloat16"),
    ],
    ids=str,
)
def test_split_rows_are_whole_rows(split: RowSplit, dtype: str) -> None:
    """Value and gradients of q, k and v are those of float64, with documents that end anywhere, and grouped
    heads.

    The tolerances are those of attention on one device: partial results are combined in float32, and in
    bfloat16 each of the 4 is rounded once, by 2^-9 of itself.
    """
    segment = jnp.asarray(SEGMENTS)
    agree_with(
        over_devices(split), lambda q, k, v: attention_reference(q, k, v, segment, segment), inputs(), dtype
    )


@pytest.mark.parametrize("split", (RowSplit(2, "ring"), RowSplit(2, "ulysses")), ids=str)
def test_heads_of_values_may_have_another_size(split: RowSplit) -> None:
    """Value and gradients of a ring's blocks, and of exchanged heads, with values of heads of 12 and keys of 8."""
    segment = jnp.asarray(SEGMENTS)
    agree_with(
        over_devices(split),
        lambda q, k, v: attention_reference(q, k, v, segment, segment),
        (*inputs()[:2], normal(2, B, L, K, 12)),
        "float32",
    )


@pytest.mark.parametrize("split", (RowSplit(2, "ring"), RowSplit(4, "ulysses")), ids=str)
def test_caps_and_sinks_join_all_devices_keys(split: RowSplit) -> None:
    """Value and gradients of q, k, v and the sinks, each of whose heads all devices or one of them compute."""
    segment, sink_N = jnp.asarray(SEGMENTS), np.asarray([4.0, -3.0, 0.5, 1.0], np.float32)
    agree_with(
        over_devices(split, soft_cap=0.7, sinks=1),
        lambda q, k, v, s: attention_reference(q, k, v, segment, segment, soft_cap=0.7, sink_N=s),
        (*inputs(), sink_N),
        "float32",
    )


def test_a_device_has_an_early_and_a_late_part() -> None:
    """The order of positions is the one in which the data plane distributes columns."""
    from jtrain.data.constructor.context_order import context_order

    for split in SPLITS:
        np.testing.assert_array_equal(order_of(split, L), context_order(L, split.size, split.order))


def test_a_query_sees_neither_later_tokens_nor_other_documents() -> None:
    """Changing a key and value moves exactly the queries that may see it, on whichever device they are."""
    run = jax.jit(over_devices(RowSplit(4)))
    q, k, v = (jnp.asarray(x) for x in inputs())
    at = 9  # in the second document of the second row, indices 7..24
    before, after = run(q, k, v), run(q, k.at[1, at].add(1.0), v.at[1, at].add(1.0))
    moved = np.any(np.asarray(before) != np.asarray(after), axis=(2, 3))
    assert not moved[[0, 2]].any()
    np.testing.assert_array_equal(np.flatnonzero(moved[1]), np.arange(9, 25))


def test_scores_too_large_for_exp_are_fine() -> None:
    """Scores near 10^4, rows of padding and blocks without any key leave values and gradients finite."""
    run = over_devices(RowSplit(4))
    q, k, v = (jnp.asarray(x) for x in inputs())
    value, grads = jax.jit(jax.value_and_grad(lambda q, k, v: jnp.sum(run(q, k, v)), argnums=(0, 1, 2)))(
        100 * q, 100 * k, v
    )
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in grads)


def test_more_devices_than_key_heads_share_them() -> None:
    """Ulysses with 2 key heads over 4 devices puts each head on two devices and adds its gradients."""
    split = RowSplit(4, "ulysses")
    segment = jnp.asarray(SEGMENTS)
    agree_with(
        over_devices(split),
        lambda q, k, v: attention_reference(q, k, v, segment, segment),
        inputs(8, 2),
        "float32",
    )


def test_a_window_reaches_over_devices() -> None:
    """Ulysses supports windows, because its devices have whole rows; a ring refuses them."""
    segment = jnp.asarray(SEGMENTS)
    agree_with(
        over_devices(RowSplit(2, "ulysses"), window=9),
        lambda q, k, v: attention_reference(q, k, v, segment, segment, window=9),
        inputs(),
        "float32",
    )
    with pytest.raises(ValueError, match=r"window=9 with layout\.context_attention=ring.*Set .*=ulysses"):
        over_devices(RowSplit(2), window=9)(*map(jnp.asarray, inputs()))


def test_under_remat_the_named_result_is_not_computed_again() -> None:
    """With "attention" saved, the backward pass sends keys around once more; with nothing saved, twice
    more.
    """
    run = over_devices(RowSplit(2))
    q, k, v = (jnp.asarray(x) for x in inputs())

    def hops(policy: Any) -> int:
        remat = jax.checkpoint(lambda q, k, v: jnp.sum(run(q, k, v) ** 2), policy=policy)
        return str(jax.make_jaxpr(jax.grad(remat, argnums=(0, 1, 2)))(q, k, v)).count("ppermute")

    policies = jax.checkpoint_policies
    assert hops(policies.save_only_these_names("attention")) < hops(policies.nothing_saveable)


@pytest.mark.parametrize(
    ("length", "heads", "split", "message"),
    [
        (6, 4, RowSplit(2), "L=3 positions, which zig-zag cannot halve. .*multiple of 2 . mesh.context = 4"),
        (32, 6, RowSplit(4, "ulysses"), "6 query heads and 2 key heads .*do not divide over mesh.context=4"),
    ],
)
def test_what_does_not_divide_is_refused(length: int, heads: int, split: RowSplit, message: str) -> None:
    """The message has the numbers and the way out."""
    q, k = jnp.zeros((1, length, heads, H)), jnp.zeros((1, length, 2, H))
    run = over_devices(split, np.ones((1, length), np.int32))
    with pytest.raises(ValueError, match=message):
        run(q, k, k)


def test_a_ring_in_the_order_of_the_text_is_refused() -> None:
    """In text order the last device of a ring would have most of the work."""
    with pytest.raises(ValueError, match=r"ring with data\.context_order=contiguous"):
        RowSplit(2, "ring", "contiguous")
