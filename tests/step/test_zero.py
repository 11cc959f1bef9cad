"""Collectives along the dimensions of a torus are the one collective over all devices."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jtrain.layout.layout import Layout, LayoutSpec, make_layout
from jtrain.layout.mesh import ZERO_AXES, MeshSpec, make_mesh
from jtrain.plan.compile.compiled_step import topology_devices
from jtrain.step.torus_collectives import along_torus, gather_shards, scatter_shards, torus_rings

RINGS = ((2, 4), (4, 2), (2, 2, 2))


def laid_out(axes: dict[str, int], rings: tuple[int, ...]) -> tuple[Layout, Mesh]:
    spec = MeshSpec(**axes)
    layout = dataclasses.replace(make_layout(LayoutSpec(), spec, ()), rings=rings)
    return layout, make_mesh(spec, jax.devices())


def on_each(mesh: Mesh, fn: Any, given: P, found: P) -> Any:
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=given, out_specs=found, check_vma=False))


@pytest.mark.parametrize(
    ("axes", "rings"),
    [
        *((dict(data=8), rings) for rings in RINGS),
        (dict(data=2, context=4), ()),
        (dict(data=4, context=2), (2, 4)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dim", (0, 1))
def test_rings_gather_and_scatter_what_one_collective_does(
    axes: dict[str, int], rings: tuple[int, ...], dim: int
) -> None:
    """Bit for bit, in the order of the devices, whichever dimension is split; sums of integers, so they are
    exact.

    Shards lie along `data` and `context` together, and rings may cross the border between the two.
    """
    layout, mesh = laid_out(axes, rings)
    split = P(ZERO_AXES, None) if dim == 0 else P(None, ZERO_AXES)
    x = np.random.default_rng(0).integers(-99, 99, (16, 24)).astype(np.float32)
    got = on_each(mesh, lambda x: gather_shards(layout, x, dim), split, P())(x)
    np.testing.assert_array_equal(got, x)

    terms = np.random.default_rng(1).integers(-99, 99, (8, 16, 24)).astype(np.float32)
    got = on_each(mesh, lambda x: scatter_shards(layout, x[0], dim), P(ZERO_AXES, None, None), split)(terms)
    np.testing.assert_array_equal(got, terms.sum(axis=0))
    assert len(np.unique(terms.sum(axis=0))) > 99, "or a wrong order would not show"


def places(*shape: int) -> np.ndarray:
    """Coordinates of a torus, the last changing fastest."""
    return np.stack(np.unravel_index(np.arange(np.prod(shape)), shape), axis=-1)


def test_rings_are_read_off_the_devices_coordinates() -> None:
    """In any order of the dimensions; two cores of a chip are the innermost one."""
    torus = places(4, 2, 8)
    assert torus_rings(torus) == (4, 2, 8)
    assert torus_rings(torus[:, ::-1]) == (4, 2, 8)
    assert torus_rings(places(4, 4, 1, 2)) == (4, 4, 2)
    assert torus_rings(places(8, 1, 1)) == (8,)
    snake = torus.reshape(4, 2, 8, 3).copy()
    snake[1::2] = snake[1::2, :, ::-1]
    assert torus_rings(snake.reshape(64, 3)) == (64,), "devices out of order are one ring"
    assert torus_rings(torus[:-1]) == (63,)


def test_without_a_torus_one_collective_stays_one() -> None:
    """CPUs and GPUs; and rings that were set are left alone."""
    spec = MeshSpec(data=8)
    layout = make_layout(LayoutSpec(), spec, ())
    mesh = make_mesh(spec, jax.devices())
    assert along_torus(layout, mesh).rings == ()
    assert along_torus(dataclasses.replace(layout, rings=(2, 4)), mesh).rings == (2, 4)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("topology", "axes", "rings"),
    (
        ("v5p:4x4x8", dict(data=128), (4, 4, 8)),
        ("v5p:4x4x8", dict(replica=4, data=32), (4, 8)),
        ("v5p:4x4x8", dict(data=16, context=8), (4, 4, 8)),
        ("v6e:16x16", dict(data=256), (16, 16)),
        ("v5p:2x2x1", dict(data=4), (2, 2)),
    ),
)
def test_a_mesh_of_tpus_lies_along_their_torus(
    topology: str, axes: dict[str, int], rings: tuple[int, ...]
) -> None:
    """As JAX arranges devices."""
    spec = MeshSpec(**axes)
    mesh = make_mesh(spec, topology_devices(topology))
    assert along_torus(make_layout(LayoutSpec(), spec, ()), mesh).rings == rings
