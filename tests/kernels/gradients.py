"""Comparison that every op's tests share: values and gradients in float32 or bfloat16 against a float64
reference.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
"""Tolerance relative to the largest element."""

dtypes = pytest.mark.parametrize("dtype", TOLERANCE)


def in_float32(names: str, *cases: tuple[Any, ...]) -> pytest.MarkDecorator:
    """Parametrises `dtype` and `names`: every case in float32, and the first in bfloat16; the others there
    are slow.

    Chunks, windows and devices are the same code in both dtypes, and float32 has the tighter tolerance.
    """
    params = [
        pytest.param(dtype, *case, marks=[pytest.mark.slow] * (dtype != "float32" and i > 0))
        for dtype in TOLERANCE
        for i, case in enumerate(cases)
    ]
    return pytest.mark.parametrize(("dtype", *names.split(",")), params)


def normal(seed: int, *shape: int) -> np.ndarray:
    """Standard normal float32 numbers that are exact in bfloat16, so that both dtypes compute with the same
    input.
    """
    x = np.random.default_rng(seed).standard_normal(shape)
    return np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32))


def agree_with(
    op: Callable[..., Any], reference: Callable[..., Any], inputs: tuple[np.ndarray, ...], dtype: str
) -> None:
    """Asserts that `op` under jit gives the reference's result and gradients with respect to all inputs.

    `op` computes with inputs of `dtype`; the reference with float64, and not a trace of our code.
    """

    def scalar(fn: Callable[..., Any], weight: Any) -> Callable[..., Any]:
        return lambda *xs: (lambda y: (jnp.sum(y * weight.astype(y.dtype)), y))(fn(*xs))

    with jax.enable_x64(True):
        xs = tuple(jnp.asarray(x, jnp.float64) for x in inputs)
        shape = jax.eval_shape(reference, *xs).shape
        weight = normal(99, *shape)  # a sum alone would hide a gradient that is merely constant
        argnums = tuple(range(len(xs)))
        (_, want), want_grads = jax.value_and_grad(
            scalar(reference, jnp.asarray(weight)), argnums, has_aux=True
        )(*xs)
        want, want_grads = np.asarray(want), [np.asarray(g) for g in want_grads]
    xs = tuple(jnp.asarray(x, dtype) for x in inputs)
    run = jax.jit(jax.value_and_grad(scalar(op, jnp.asarray(weight)), argnums, has_aux=True))
    (_, got), got_grads = run(*xs)
    for name, a, b in zip(
        ("value", *(f"gradient {i}" for i in argnums)), (got, *got_grads), (want, *want_grads), strict=True
    ):
        scale = np.abs(b).max()
        assert scale > 1e-3, f"{name}: all but zero, so equality would prove nothing"
        np.testing.assert_allclose(
            np.asarray(a, np.float64) / scale, b / scale, atol=TOLERANCE[dtype], err_msg=name
        )
        assert a.dtype == jnp.dtype(dtype) or a.dtype == jnp.float32, name
