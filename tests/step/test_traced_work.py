"""What is read off a jaxpr, on functions of a few lines."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from jtrain.step.description.traced_work import TracedWork, traced_work

MESH = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))


def work_of(function: Callable[..., Any], *shapes: tuple[int, ...]) -> TracedWork:
    """What a function does on two devices; every device has the whole of each argument."""
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    mapped = jax.shard_map(function, mesh=MESH, in_specs=P(), out_specs=P(), check_vma=False)
    return traced_work(jax.make_jaxpr(mapped)(*arguments))


def through_a_product(w: jax.Array, x: jax.Array) -> jax.Array:
    product = jnp.sin(lax.psum(x, "x")) @ w
    return jnp.sin(lax.psum(jnp.cos(product), "x")).sum()


def through_a_collective(w: jax.Array, x: jax.Array) -> jax.Array:
    twice = lax.psum(jnp.sin(lax.psum(x, "x")), "x")
    return jnp.sin(jnp.sin(twice) @ w).sum()


@pytest.mark.parametrize(
    ("layer", "want"), ((through_a_product, [True, False]), (through_a_collective, [True, True]))
)
def test_a_repeated_collective_knows_if_a_repeated_product_reads_it(
    layer: Callable[..., jax.Array], want: list[bool]
) -> None:
    """Directly or by way of another collective; what no product reads may wait until its gradient is
    needed.
    """
    work = work_of(jax.grad(jax.checkpoint(layer)), (8, 8), (4, 8))
    assert [one.repeats_products for one in work.collectives if one.when == "again"] == want
    assert [product.when for product in work.products].count("again") == 1


@pytest.mark.parametrize(("rows", "room"), ((16, 48), (48, 16)))
def test_of_a_ragged_exchange_the_rows_that_are_no_padding_count(rows: int, room: int) -> None:
    """On the way to the experts the result has room to spare, and on the way back the operand."""

    def exchange(x: jax.Array) -> jax.Array:
        count = jnp.full(2, 4, jnp.int32)
        return lax.ragged_all_to_all(x, jnp.zeros((room, 8)), count, count, count, count, axis_name="x")

    (one,) = work_of(exchange, (rows, 8)).collectives
    assert (one.kind, one.dims) == ("ragged-all-to-all", (16, 8))
