from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain_kernels.attention.api import attention
from jtrain_kernels.attention.reference import attention_reference
from tests.kernels.gradients import agree_with, in_float32, normal

SEGMENTS = np.asarray([[1] * 16, [1] * 7 + [2] * 6 + [0] * 3, [0] * 16], np.int32)
"""Rows: one document; two documents and padding; only padding."""

B, L, N, K, H = 3, 16, 4, 2, 8


def inputs() -> tuple[np.ndarray, ...]:
    return normal(0, B, L, N, H), normal(1, B, L, K, H), normal(2, B, L, K, H)


@in_float32("chunk", (4,), (7,), (16,), (512,))
def test_attention_is_its_formula_in_any_chunk(dtype: str, chunk: int) -> None:
    """Value and the gradients of q, k and v agree, with documents that end inside a chunk, and grouped
    heads.
    """
    segment = jnp.asarray(SEGMENTS)
    agree_with(
        lambda q, k, v: attention(q, k, v, segment, segment, chunk=chunk),
        lambda q, k, v: attention_reference(q, k, v, segment, segment),
        inputs(),
        dtype,
    )


@in_float32("chunk,window", (4, 2), (4, 6), (7, 5), (16, 3))
def test_a_window_is_its_formula_in_any_chunk(dtype: str, chunk: int, window: int) -> None:
    """Value and gradients agree for windows that end inside a chunk, at its end, several chunks away, or
    never.
    """
    segment = jnp.asarray(SEGMENTS)
    agree_with(
        lambda q, k, v: attention(q, k, v, segment, segment, chunk=chunk, window=window),
        lambda q, k, v: attention_reference(q, k, v, segment, segment, window=window),
        inputs(),
        dtype,
    )


@in_float32("size,chunk", (4, 7), (20, 4))
def test_heads_of_values_may_have_another_size(dtype: str, size: int, chunk: int) -> None:
    """Value and gradients agree with values of smaller and of larger heads than the keys' 8."""
    segment = jnp.asarray(SEGMENTS)
    agree_with(
        lambda q, k, v: attention(q, k, v, segment, segment, chunk=chunk),
        lambda q, k, v: attention_reference(q, k, v, segment, segment),
        (*inputs()[:2], normal(2, B, L, K, size)),
        dtype,
    )


@in_float32("chunk,window", (7, 5), (16, None))
def test_capped_scores_are_their_formula(dtype: str, chunk: int, window: int | None) -> None:
    """Value and gradients agree with a cap that half of the scores come near, with and without a window."""
    segment = jnp.asarray(SEGMENTS)
    agree_with(
        lambda q, k, v: attention(q, k, v, segment, segment, chunk=chunk, window=window, soft_cap=0.7),
        lambda q, k, v: attention_reference(q, k, v, segment, segment, window=window, soft_cap=0.7),
        inputs(),
        dtype,
    )


@in_float32("soft_cap,window", (None, 5), (0.7, None))
def test_sinks_are_their_formula(dtype: str, soft_cap: float | None, window: int | None) -> None:
    """Value and gradients, that of each head's sink among them, with a sink that takes most and one that takes
    little.
    """
    segment, sink_N = jnp.asarray(SEGMENTS), np.asarray([4.0, -3.0, 0.5, 1.0], np.float32)
    agree_with(
        lambda q, k, v, s: attention(
            q, k, v, segment, segment, chunk=7, window=window, soft_cap=soft_cap, sink_N=s
        ),
        lambda q, k, v, s: attention_reference(
            q, k, v, segment, segment, window=window, soft_cap=soft_cap, sink_N=s
        ),
        (*inputs(), sink_N),
        dtype,
    )


@pytest.mark.smoke
def test_a_query_sees_neither_later_tokens_nor_other_documents() -> None:
    """Changing a key and value moves exactly the queries that may see it."""
    q, k, v = (jnp.asarray(x[1:2]) for x in inputs())
    segment = jnp.asarray(SEGMENTS[1:2])

    def run(k: jax.Array, v: jax.Array) -> np.ndarray:
        return np.asarray(attention(q, k, v, segment, segment, chunk=4))

    at = 9  # in the second document, indices 7..12
    moved = np.any(run(k, v) != run(k.at[:, at].add(1.0), v.at[:, at].add(1.0)), axis=(0, 2, 3))
    np.testing.assert_array_equal(np.flatnonzero(moved), [9, 10, 11, 12])


def test_scores_too_large_for_exp_are_fine() -> None:
    """Scores near 10^4, and a row of padding, leave values and gradients finite."""
    q, k, v = (jnp.asarray(x) for x in inputs())
    segment = jnp.asarray(SEGMENTS)
    value, grads = jax.value_and_grad(
        lambda q, k, v: jnp.sum(attention(q, k, v, segment, segment, chunk=8)), argnums=(0, 1, 2)
    )(100 * q, 100 * k, v)
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in grads)


def test_under_remat_the_named_result_is_not_computed_again() -> None:
    """With "attention" saved, the backward pass has one exp per chunk; with nothing saved, three (forward
    again).
    """
    q, k, v = (jnp.asarray(x) for x in inputs())
    segment = jnp.asarray(SEGMENTS)

    def exps(policy: object) -> int:
        def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jnp.sum(attention(q, k, v, segment, segment, chunk=16) ** 2)

        remat = jax.checkpoint(loss, policy=policy)  # type: ignore[arg-type]
        return str(jax.make_jaxpr(jax.grad(remat, argnums=(0, 1, 2)))(q, k, v)).count(" exp ")

    policies = jax.checkpoint_policies
    assert exps(policies.save_only_these_names("attention")) < exps(policies.nothing_saveable)


@pytest.mark.parametrize(
    ("length", "keys", "kv_heads", "sizes", "message"),
    [
        (16, 16, 2, dict(chunk=0), "chunk=0 must be at least 1"),
        (16, 16, 3, dict(chunk=4), "num_heads=4 is no multiple of num_kv_heads=3"),
        (16, 12, 2, dict(chunk=4), "L=16 queries but M=12 keys"),
        (16, 16, 2, dict(chunk=4, window=0), "window=0 must be at least 1, the query's own key"),
        (16, 16, 2, dict(chunk=4, soft_cap=0.0), "soft_cap=0.0 must be above 0. Set None for no cap"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    length: int, keys: int, kv_heads: int, sizes: dict[str, Any], message: str
) -> None:
    """The message has the numbers and sizes that would fit."""
    q, k = jnp.zeros((1, length, 4, 8)), jnp.zeros((1, keys, kv_heads, 8))
    with pytest.raises(ValueError, match=message):
        attention(q, k, k, jnp.ones((1, length), jnp.int32), jnp.ones((1, keys), jnp.int32), **sizes)
