from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain_kernels.linear.api import linear
from jtrain_kernels.linear.reference import linear_reference
from tests.kernels.gradients import agree_with, dtypes, normal

shapes = pytest.mark.parametrize(
    ("x", "kernel", "num_in"),
    [((2, 8, 4), (4, 6), 1), ((2, 8, 6), (6, 4), 1), ((2, 8, 4), (4, 3, 5), 1), ((2, 8, 3, 5), (3, 5, 4), 2)],
    ids=["widens", "narrows", "to heads", "from heads"],
)


@pytest.mark.smoke
@dtypes
@shapes
def test_linear_contracts_the_last_dimensions(
    dtype: str, x: tuple[int, ...], kernel: tuple[int, ...], num_in: int
) -> None:
    """Value and both gradients agree, whichever operand the CPU transposes."""
    agree_with(
        lambda x, w: linear(x, w, num_in),
        lambda x, w: linear_reference(x, w, num_in),
        (normal(0, *x), normal(1, *kernel)),
        dtype,
    )


def test_a_float32_kernel_under_bfloat16_activations_gets_a_float32_gradient() -> None:
    """The gradient has more than bfloat16's 8 bits, so it was not rounded on its way."""
    x, w = jnp.asarray(normal(0, 64, 8), jnp.bfloat16), jnp.asarray(normal(1, 8, 4))
    y, vjp = jax.vjp(linear, x, w)
    dx, dw = vjp(jnp.asarray(normal(2, 64, 4), jnp.bfloat16))
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    assert np.any(np.asarray(dw) != np.asarray(dw.astype(jnp.bfloat16), np.float32))


def test_the_kernel_gradient_is_exact_through_the_cpus_transpose() -> None:
    """Multiplying by the identity does not round bfloat16 numbers: small integers stay exact."""
    x = np.random.default_rng(0).integers(-8, 8, (64, 16))
    dy = np.random.default_rng(1).integers(-8, 8, (64, 24))
    _, vjp = jax.vjp(linear, jnp.asarray(x, jnp.bfloat16), jnp.zeros((16, 24), jnp.float32))
    np.testing.assert_array_equal(vjp(jnp.asarray(dy, jnp.bfloat16))[1], x.T @ dy)


@shapes
def test_a_tpu_multiplies_arrays_as_they_are(
    x: tuple[int, ...], kernel: tuple[int, ...], num_in: int
) -> None:
    """There is no reshape in what a TPU compiles, which would copy the activations. A GPU's program has
    some.
    """
    given, weight = normal(0, *x), normal(1, *kernel)

    def both(x: jax.Array, w: jax.Array) -> Any:
        y, vjp = jax.vjp(lambda x, w: linear(x, w, num_in), x, w)
        return vjp(y)

    traced = jax.jit(both).trace(given, weight)
    count = {
        p: traced.lower(lowering_platforms=(p,)).as_text().count("stablehlo.reshape") for p in ("cuda", "tpu")
    }
    assert count["tpu"] == 0 < count["cuda"], count


def test_only_the_cpu_multiplies_by_the_identity() -> None:
    """Lowered for a TPU or a GPU, the backward pass has two matmuls (the third, of the value, is not
    needed).
    """

    def backward(x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.vjp(linear, x, w)[1](dy)

    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((64, 16), (16, 24), (64, 24))]
    traced = jax.jit(backward).trace(*shapes)
    count = {
        p: traced.lower(lowering_platforms=(p,)).as_text().count("dot_general")
        for p in ("cpu", "cuda", "tpu")
    }
    assert count["cpu"] == count["tpu"] + 1, count
    assert count["cuda"] == count["tpu"], count


def test_dimensions_that_do_not_meet_are_refused() -> None:
    """Dimensions are neither broadcast nor reshaped."""
    with pytest.raises(ValueError, match=r"last 1 dimensions of x \(2, 3\).*\(4, 5\)"):
        linear(jnp.zeros((2, 3)), jnp.zeros((4, 5)))
