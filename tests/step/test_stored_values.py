"""What of a jaxpr is in memory, on functions of a few lines."""

import collections
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jtrain.model import ops
from jtrain.step.description.stored_values import StoredValues
from jtrain.step.description.traced_work import TracedWork, traced_work

ROWS, WIDTH = 32, 8
BYTES = ROWS * WIDTH * 4
"""Bytes of an array of [rows, width] in float32."""

X, W = (ROWS, WIDTH), (WIDTH, WIDTH)


def work_of(function: Callable[..., Any], *shapes: tuple[int, ...], dtype: Any = jnp.float32) -> TracedWork:
    return traced_work(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)))


def passed_bytes(work: TracedWork) -> int:
    """Bytes that passes over memory read and write."""
    return sum(
        math.prod(trips) * math.prod(work.arrays[n].shape) * work.arrays[n].dtype.itemsize
        for (trips, _), numbers in StoredValues(work).passes()
        for n in numbers
    )


def between_products(x: jax.Array, w: jax.Array) -> jax.Array:
    return (jnp.sin(x @ w) * 2 + 1) @ w


def norm(x: jax.Array, w: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True))).astype(x.dtype) @ w


def read_again(x: jax.Array, w: jax.Array) -> jax.Array:
    stream = x + jnp.sin(x @ w)
    return stream + jnp.sin(stream @ w)


def sum_of_products(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w + x @ (w + 1)


def half_of_rows(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sin(x[: ROWS // 2]) @ w


def rows_taken_twice(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sin(x[jnp.arange(2 * ROWS) // 2]) @ w


def in_a_loop(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, length=5)[0]


@pytest.mark.parametrize(
    ("function", "arrays"),
    [
        (between_products, 2),  # however many operations there are
        (norm, 2),  # a row is read once
        (read_again, 3 + 3),  # the second sum reads the first, which was stored for the product
        (sum_of_products, 1),  # the second product reads the result of the first
        (half_of_rows, 1),
        (rows_taken_twice, 4),  # as often as they are taken
        (in_a_loop, 5 * 2),
    ],
)
def test_passes_read_and_write_each_array_once(function: Callable[..., jax.Array], arrays: int) -> None:
    """Besides products, and in arrays of [rows, width]; the sum of two weights is small."""
    weights = 2 * WIDTH * WIDTH * 4 if function is sum_of_products else 0
    rows = 2 * 2 * ROWS * 4 * 2 if function is rows_taken_twice else 0
    found = passed_bytes(work_of(function, X, W)) - weights
    assert arrays * BYTES <= found <= arrays * BYTES + rows


def test_8_bits_are_read_as_they_are() -> None:
    """A product reads the rounded operand, whatever dtype it is multiplied in; the rounding reads 4 bytes and
    writes one.
    """

    def rounded(x: jax.Array, w: jax.Array) -> jax.Array:
        return (x.astype(jnp.float8_e4m3fn).astype(jnp.float32) * 0.5) @ w

    assert passed_bytes(work_of(rounded, X, W)) == BYTES + BYTES // 4


def test_an_array_lives_until_it_is_read_last() -> None:
    """In a turn of a loop: what it carries from the start, a product's result until the last reader of it."""

    def turn(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
        first = carry @ w
        second = first @ w
        return jnp.sin(second) * first, None

    w = jnp.ones(W)
    work = work_of(lambda x: jax.lax.scan(turn, x, length=3)[0], X)
    values, (loop,) = StoredValues(work), work.loops
    steps = values.steps_of(loop)
    ranges = values.live_ranges(steps, loop)
    products = [position for position, step in enumerate(steps) if step.name == "dot_general"]
    first, second = (steps[position].results[0] for position in products)
    assert len(products) == 2
    assert ranges[loop.carried[0]] == (0, products[0])
    assert ranges[first][0] == products[0]
    assert ranges[first][1] == ranges[second][1] > products[1]


def test_attentions_kernel_is_one_step() -> None:
    """In both passes, whatever computes it."""
    shapes = [(2, 16, heads, 8) for heads in (4, 2, 2)]
    segment = jnp.zeros((2, 16), jnp.int32)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(ops.attention(q, k, v, segment, segment, chunk=16))

    work = work_of(jax.grad(attend, argnums=(0, 1, 2)), *shapes)
    kernels = [step for step in StoredValues(work).steps if step.name == "attention"]
    calls = collections.Counter(step.attention for step in kernels if len(step.reads) > 2)
    assert calls == {ops.ATTENTION_FORWARD: 1, ops.ATTENTION_BACKWARD: 1}
    assert [len(step.results) for step in kernels if step.attention == ops.ATTENTION_BACKWARD] == [3]
