"""The tile kernel for Hopper emulated on a CPU with race detection, and what the fused kernels refuse."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain_kernels import compat
from jtrain_kernels.overlap.mosaic_gpu.tables import gpu_program
from jtrain_kernels.overlap.mosaic_gpu.tile_shapes import TileConfig
from jtrain_kernels.overlap.schedule import make_schedule

TILES = TileConfig(tile_m=64, tile_n=32, tile_k=32, stages=2, out_rows=64, out_columns=16, group=2)
"""Tiles small enough for a CPU; each tile is written as one piece, so that tiles alternate between the
buffers."""


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    """Clears emulated memory, which remains after a kernel that raised."""
    yield
    compat.reset_interpreters()


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


def test_the_tile_kernel_multiplies_without_a_race() -> None:
    """Work for five tiles on two blocks, so that stages and buffers are reused.

    The tolerance allows one bfloat16 rounding of a float32 sum: half a unit in the last place, 2^-9 of the
    result. Each of the 48 copies has a TMA thread of its own: of two copies that share one, the emulator
    takes the older for done as soon as the newer is, and misses races.
    """
    from jtrain_kernels.overlap.mosaic_gpu import wgmma_tile

    a, b = normal(0, 128, 96), normal(1, 96, 96)
    interpret = compat.gpu_interpret(num_tma_threads_per_device=64)
    got = wgmma_tile.matmul(a, b, num_cores=2, config=TILES, interpret=interpret)
    want = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8, atol=1e-5)
    assert not compat.gpu_races_found()


def test_shapes_that_do_not_fit_are_refused_before_anything_is_compiled() -> None:
    """The message has the reason and the way out."""
    from jtrain_kernels.overlap.mosaic_gpu import wgmma_tile
    from jtrain_kernels.overlap.mosaic_gpu.kernel import fused
    from jtrain_kernels.overlap.mosaic_gpu.peer_access import VirtualRanks

    program = gpu_program(make_schedule("all_gather_matmul", "full_mesh", 2))
    x, kernel = jnp.zeros((2, 1, 128, 64), jnp.bfloat16), jnp.zeros((2, 64, 100), jnp.bfloat16)
    with pytest.raises(
        ValueError, match=r"mosaic_gpu all_gather_matmul: n=100 is no multiple.*all_gather_matmul=xla"
    ):
        fused(program, VirtualRanks(2), x, kernel, num_cores=132)
    with pytest.raises(ValueError, match=r"x is bfloat16\(2, 1, 128, 64\) and the kernel float32"):
        fused(program, VirtualRanks(2), x, kernel.astype(jnp.float32), num_cores=132)
    with pytest.raises(ValueError, match=r"mosaic_gpu matmul: m=64 is no multiple of tile_m=128"):
        wgmma_tile.matmul(x[0, 0, :64], kernel[0, :, :64], num_cores=132)
    with pytest.raises(
        ValueError, match=r"a is bfloat16\[128, 64\] and b float32\[64, 100\]: they do not multiply"
    ):
        wgmma_tile.matmul(x[0, 0], kernel[0].astype(jnp.float32), num_cores=132)


def test_every_config_of_the_tiles_is_within_shared_memory() -> None:
    """Every tiling fits the shared memory of a block, barriers included."""
    from jtrain_kernels.overlap.mosaic_gpu.tile_shapes import CANDIDATES, SHARED_BYTES

    sizes = [dataclasses.replace(tiles, stages=4).shared_bytes(2, 2) for tiles in CANDIDATES]
    assert max(sizes) + 1024 <= SHARED_BYTES
