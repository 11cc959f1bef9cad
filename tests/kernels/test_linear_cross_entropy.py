from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.kernel_bytes import GIB, loss_temp_bytes, split_loss_bytes
from jtrain_kernels.device import DEVICES
from jtrain_kernels.linear_cross_entropy.api import linear_cross_entropy, token_cross_entropy
from jtrain_kernels.linear_cross_entropy.chunking import best_chunk
from jtrain_kernels.linear_cross_entropy.reference import linear_cross_entropy_reference
from tests.kernels.gradients import agree_with, in_float32, normal

B, L, D, V = 2, 16, 8, 40


def targets() -> np.ndarray:
    """Targets, of which a third and one whole chunk of eight are ignored."""
    target = np.random.default_rng(0).integers(0, V, (B, L), dtype=np.int32)
    target[np.random.default_rng(1).random((B, L)) < 1 / 3] = -1
    target[1, :8] = -1
    return target


@in_float32("chunk,z_loss", *((chunk, z_loss) for z_loss in (0.1, 0.0) for chunk in (7, 1, 8, 1024)))
def test_the_loss_and_its_gradients_are_those_of_all_logits(dtype: str, chunk: int, z_loss: float) -> None:
    """The result is the same for any chunk size, with ignored targets, and gradients scale with the loss's
    factor.
    """
    target = jnp.asarray(targets())
    agree_with(
        lambda x, w: linear_cross_entropy(x, w, target, chunk_tokens=chunk, z_loss=z_loss)[0],
        lambda x, w: linear_cross_entropy_reference(x, w, target, z_loss=z_loss)[0],
        (normal(0, B, L, D), normal(1, D, V)),
        dtype,
    )


@in_float32("chunk,cap", (7, 1.5), (1024, 30.0))
def test_capped_logits_have_the_loss_and_gradients_of_their_formula(
    dtype: str, chunk: int, cap: float
) -> None:
    """With a cap that logits come near, and one that they do not; each token's nats add up to the loss."""
    target, x, w = jnp.asarray(targets()), normal(0, B, L, D), normal(1, D, V)
    agree_with(
        lambda x, w: linear_cross_entropy(x, w, target, chunk_tokens=chunk, z_loss=0.1, soft_cap=cap)[0],
        lambda x, w: linear_cross_entropy_reference(x, w, target, z_loss=0.1, soft_cap=cap)[0],
        (x, w),
        dtype,
    )
    x, w = jnp.asarray(x), jnp.asarray(w)
    nats = linear_cross_entropy_reference(x, w, target, soft_cap=cap)[1]
    assert abs(nats - linear_cross_entropy_reference(x, w, target)[1]) > 1e-3 * nats
    got = token_cross_entropy(x, w, target, chunk_tokens=chunk, soft_cap=cap)
    np.testing.assert_allclose(got.sum(), nats, rtol=1e-6)


def test_tokens_have_weights_in_both_sums_and_in_the_gradients() -> None:
    """Also where chunks cut rows; a token of weight 0 is as one without a target."""
    target, weight = jnp.asarray(targets()), np.random.default_rng(3).random((B, L), np.float32)
    weight[:, ::3] = 0
    weights: Any = dict(z_loss=0.1, weight_BL=jnp.asarray(weight))
    x, w = normal(0, B, L, D), normal(1, D, V)
    agree_with(
        lambda x, w: linear_cross_entropy(x, w, target, chunk_tokens=7, **weights)[0],
        lambda x, w: linear_cross_entropy_reference(x, w, target, **weights)[0],
        (x, w),
        "float32",
    )
    nats = linear_cross_entropy(jnp.asarray(x), jnp.asarray(w), target, chunk_tokens=7, **weights)[1]
    want = linear_cross_entropy_reference(jnp.asarray(x), jnp.asarray(w), target, **weights)[1]
    np.testing.assert_allclose(nats, want, rtol=1e-6)


def test_the_reported_loss_has_no_z_loss_and_no_gradient() -> None:
    """The second result is the cross entropy alone; only the first is differentiable."""
    x, w, target = jnp.asarray(normal(0, B, L, D)), jnp.asarray(normal(1, D, V)), jnp.asarray(targets())
    total, nats = linear_cross_entropy(x, w, target, chunk_tokens=8, z_loss=0.1)
    _, want = linear_cross_entropy_reference(x, w, target)
    np.testing.assert_allclose(nats, want, rtol=1e-6)
    assert total > nats + 1
    gradient = jax.grad(lambda x: linear_cross_entropy(x, w, target, chunk_tokens=8)[1])(x)
    assert not np.any(gradient)


def test_without_targets_the_loss_and_gradient_are_zero() -> None:
    """A microbatch of padding adds zero, not nan."""
    x, w = jnp.asarray(normal(0, B, L, D)), jnp.asarray(normal(1, D, V))
    none = jnp.full((B, L), -1)
    value, gradient = jax.value_and_grad(
        lambda x: linear_cross_entropy(x, w, none, chunk_tokens=8, z_loss=1.0)[0]
    )(x)
    assert value == 0
    assert not np.any(gradient)


def test_the_gradient_takes_three_matmuls_and_the_loss_one() -> None:
    """Nothing is recomputed, and evaluation computes no gradient."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, 64, 8), (8, 40))]
    target = jax.ShapeDtypeStruct((1, 64), jnp.int32)

    def loss(x: jax.Array, w: jax.Array, t: jax.Array) -> jax.Array:
        return linear_cross_entropy(x, w, t, chunk_tokens=16)[0]

    def matmuls(fn: object) -> int:
        lowered = jax.jit(fn).trace(*shapes, target).lower(lowering_platforms=("tpu",))  # type: ignore[arg-type]
        return lowered.as_text().count("stablehlo.dot_general")

    assert matmuls(loss) == 1
    assert matmuls(jax.grad(loss, argnums=(0, 1))) == 3


def test_a_chunk_of_no_tokens_is_refused() -> None:
    """The message has the numbers and a size that fits."""
    x, w = jnp.zeros((2, 9, 4)), jnp.zeros((4, 8))
    with pytest.raises(ValueError, match="chunk_tokens=0 must be at least 1"):
        linear_cross_entropy(x, w, jnp.zeros((2, 9), jnp.int32), chunk_tokens=0)


@pytest.mark.aot
@pytest.mark.parametrize("chip", ["h200", pytest.param("v5p", marks=pytest.mark.slow)])
def test_on_an_accelerator_the_logits_are_never_whole(chip: str) -> None:
    """Compiled at 16384 x 4096 x 128256: at most 3 GiB of temporaries, where all logits would be more than
    10.
    """

    def chunked(x: jax.Array, w: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        return linear_cross_entropy(x, w, t, chunk_tokens=1024)

    assert loss_temp_bytes(chunked, chip, "bfloat16") <= 3 * GIB
    assert loss_temp_bytes(linear_cross_entropy_reference, chip, "bfloat16") > 10 * GIB


@pytest.mark.aot
def test_on_an_h200_loss_and_gradient_take_two_gib() -> None:
    """Compiled by the H200's compiler at 16384 x 4096 x 128256, in the chunks that are predicted to be best.

    A bfloat16 gradient is summed in float32 too, which makes D * V * 4 = 1.96 GiB a temporary: 2.25 with a
    chunk's.
    """
    chunk, _ = best_chunk(DEVICES["h200"], tokens=16384, d_model=4096, vocab=128256)

    def chunked(x: jax.Array, w: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        return linear_cross_entropy(x, w, t, chunk_tokens=chunk)

    assert loss_temp_bytes(chunked, "h200", "float32") <= 2 * GIB
    assert loss_temp_bytes(chunked, "h200", "bfloat16") <= 2.25 * GIB


@pytest.mark.aot
def test_eight_h200_share_the_vocabulary() -> None:
    """Each device has an eighth of the logits and of the gradient, and sends at most a quarter of gathering's
    bytes.
    """
    temp, sent = split_loss_bytes("h200:8", 8)
    assert temp <= 1.5 * GIB
    assert 0 < sent < 0.25 * 2 * 4096 * 128256 * 2 * 7 / 8
