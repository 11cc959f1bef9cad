import jax
import jax.numpy as jnp
import numpy as np

from jtrain_kernels.attention import pairs
from jtrain_kernels.attention.api import attention
from jtrain_kernels.attention.reference import attention_reference
from tests.kernels.gradients import agree_with, in_float32, normal

SEGMENTS = np.asarray([[1] * 16, [1] * 7 + [2] * 6 + [0] * 3, [0] * 16], np.int32)
"""Rows: one document; two documents and padding; only padding."""

B, L, N, K, H = 3, 16, 4, 2, 8


def by_pairs(chunk: int, q: jax.Array, k: jax.Array, v: jax.Array, window: int | None = None) -> jax.Array:
    """The two passes as one differentiable op, as `attention` combines them on a TPU."""
    segment = jnp.asarray(SEGMENTS)

    @jax.custom_vjp
    def op(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return pairs.forward(chunk, window, q, k, v, segment, segment)[0]

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        y, lse = pairs.forward(chunk, window, q, k, v, segment, segment)
        return y, (q, k, v, y, lse)

    def backward(kept: tuple[jax.Array, ...], dy: jax.Array) -> tuple[jax.Array, ...]:
        q, k, v, y, lse = kept
        return pairs.backward(chunk, window, q, k, v, segment, segment, y, lse, dy)

    op.defvjp(forward, backward)
    return op(q, k, v)


@in_float32("chunk,window", (4, 6), (4, 5), (1, None), (4, None), (16, None))
def test_pairs_of_chunks_are_the_formula(dtype: str, chunk: int, window: int | None) -> None:
    """Value and the gradients of q, k and v agree, with chunks that a query does not see, and grouped heads."""
    segment = jnp.asarray(SEGMENTS)
    agree_with(
        lambda q, k, v: by_pairs(chunk, q, k, v, window),
        lambda q, k, v: attention_reference(q, k, v, segment, segment, window=window),
        (normal(0, B, L, N, H), normal(1, B, L, K, H), normal(2, B, L, K, H)),
        dtype,
    )


def test_scores_too_large_for_exp_are_fine() -> None:
    """Scores near 10^4, and a row of padding, leave values and gradients finite."""
    q, k, v = (jnp.asarray(normal(i, B, L, n, H)) for i, n in enumerate((N, K, K)))
    value, grads = jax.value_and_grad(lambda *xs: jnp.sum(by_pairs(8, *xs)), argnums=(0, 1, 2))(100 * q, 100 * k, v)
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in grads)


def test_a_tpu_compiles_one_loop_body_whatever_the_length() -> None:
    """The program for a TPU does not grow with the chunks; that for a GPU does."""

    def matmuls(platform: str, length: int) -> int:
        q, k = (jax.ShapeDtypeStruct((1, length, n, H), jnp.bfloat16) for n in (N, K))
        segment = jax.ShapeDtypeStruct((1, length), jnp.int32)

        def loss(q: jax.Array, k: jax.Array, segment: jax.Array) -> jax.Array:
            return jnp.sum(attention(q, k, k, segment, segment, chunk=4).astype(jnp.float32))

        traced = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).trace(q, k, segment)
        lowered = traced.lower(lowering_platforms=(platform,))
        return lowered.as_text().count("stablehlo.dot_general")

    assert matmuls("tpu", 32) == matmuls("tpu", 8) == 7
    assert matmuls("cuda", 32) == 4 * matmuls("cuda", 8) == 56
