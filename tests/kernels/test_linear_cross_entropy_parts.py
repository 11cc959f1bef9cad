from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain_kernels.linear_cross_entropy.parts import NO_COLUMN, linear_cross_entropy_in_parts
from jtrain_kernels.linear_cross_entropy.reference import linear_cross_entropy_reference
from tests.kernels.gradients import agree_with, in_float32, normal

B, L, D, V = 2, 16, 8, 40


def targets() -> np.ndarray:
    """Targets, of which a third and one whole chunk of eight are ignored."""
    target = np.random.default_rng(0).integers(0, V, (B, L), dtype=np.int32)
    target[np.random.default_rng(1).random((B, L)) < 1 / 3] = -1
    target[1, :8] = -1
    return target


def in_parts(
    x: jax.Array,
    w: jax.Array,
    *,
    parts: int,
    chunk: int,
    z_loss: float,
    soft_cap: float | None = None,
    weight_BL: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Loss with the columns distributed over parts in shuffled order; the last part is padded."""
    order = np.random.default_rng(2).permutation(V)
    missing = -V % parts
    column = np.concatenate([order, np.full(missing, NO_COLUMN)]).reshape(parts, -1)
    filled = jnp.concatenate([w[:, order], jnp.full((D, missing), 7, w.dtype)], axis=1)
    given = filled.reshape(D, parts, -1).swapaxes(0, 1)
    # The fetch multiplies the part, so that a skipped fetch shows in the gradient.
    return linear_cross_entropy_in_parts(
        x, given / 2, jnp.asarray(column), jnp.asarray(targets()), fetch=lambda part: part * 2, chunk_tokens=chunk,
        z_loss=z_loss, soft_cap=soft_cap, weight_BL=weight_BL,
    )  # fmt: skip


@in_float32("parts,chunk,z_loss", *((*sizes, z) for z in (0.1, 0.0) for sizes in ((4, 7), (1, 8), (7, 1024))))
def test_the_loss_in_parts_is_that_of_all_logits(dtype: str, parts: int, chunk: int, z_loss: float) -> None:
    """Values and gradients agree, also for parts of different sizes and columns in any order."""
    agree_with(
        lambda x, w: in_parts(x, w, parts=parts, chunk=chunk, z_loss=z_loss)[0],
        lambda x, w: linear_cross_entropy_reference(x, w, jnp.asarray(targets()), z_loss=z_loss)[0],
        (normal(0, B, L, D), normal(1, D, V)),
        dtype,
    )


def test_capped_logits_in_parts_are_all_capped_logits() -> None:
    """Values and gradients, with padding columns at minus infinity, where a cap has no slope."""
    settings: Any = dict(z_loss=0.1, soft_cap=1.5)
    agree_with(
        lambda x, w: in_parts(x, w, parts=4, chunk=7, **settings)[0],
        lambda x, w: linear_cross_entropy_reference(x, w, jnp.asarray(targets()), **settings)[0],
        (normal(0, B, L, D), normal(1, D, V)),
        "float32",
    )


def test_tokens_in_parts_have_weights() -> None:
    """In the sum, and in the gradients of x and of the columns."""
    weights: Any = dict(
        z_loss=0.1, weight_BL=jnp.asarray(np.random.default_rng(3).random((B, L), np.float32))
    )
    agree_with(
        lambda x, w: in_parts(x, w, parts=4, chunk=7, **weights)[0],
        lambda x, w: linear_cross_entropy_reference(x, w, jnp.asarray(targets()), **weights)[0],
        (normal(0, B, L, D), normal(1, D, V)),
        "float32",
    )


def test_the_reported_loss_has_no_z_loss_and_no_gradient() -> None:
    """The second result is the cross entropy alone; only the first is differentiable."""
    x, w = jnp.asarray(normal(0, B, L, D)), jnp.asarray(normal(1, D, V))
    total, nats = in_parts(x, w, parts=3, chunk=8, z_loss=0.1)
    _, want = linear_cross_entropy_reference(x, w, jnp.asarray(targets()))
    np.testing.assert_allclose(nats, want, rtol=1e-6)
    assert total > nats + 1
    assert not np.any(jax.grad(lambda x: in_parts(x, w, parts=3, chunk=8, z_loss=0.1)[1])(x))


def test_without_targets_the_loss_and_gradient_are_zero() -> None:
    """A microbatch of padding adds zero, not nan."""
    x, w = jnp.asarray(normal(0, B, L, D)), jnp.asarray(normal(1, 1, D, V))
    none = jnp.full((B, L), -1)

    def loss(x: jax.Array) -> jax.Array:
        return linear_cross_entropy_in_parts(
            x, w, jnp.arange(V)[None], none, fetch=lambda part: part, chunk_tokens=8, z_loss=1.0
        )[0]

    value, gradient = jax.value_and_grad(loss)(x)
    assert value == 0
    assert not np.any(gradient)
