"""The Hopper kernels emulated on a CPU: the tile kernel with race detection, the fused ones on virtual ranks."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain_kernels import compat
from jtrain_kernels.overlap.mosaic_gpu.tables import OverlapConfig, gpu_program
from jtrain_kernels.overlap.mosaic_gpu.tile_shapes import TileConfig
from jtrain_kernels.overlap.schedule import OpName, make_schedule
from jtrain_kernels.overlap.swizzle import Swizzle

ROOT = Path(__file__).parents[3]
TILES = TileConfig(tile_m=64, tile_n=32, tile_k=32, stages=2, out_rows=64, out_columns=16, group=2)
"""Tiles small enough for a CPU; each tile is written as one piece, so that tiles alternate between the buffers."""


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    """Clears emulated memory, which remains after a kernel that raised."""
    yield
    compat.reset_interpreters()


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


def test_the_tile_kernel_multiplies_without_a_race() -> None:
    """Work for five tiles on two blocks, so that stages and buffers are reused.

    The tolerance allows one bfloat16 rounding of a float32 sum: half a unit in the last place, 2^-9 of the result.
    """
    from jtrain_kernels.overlap.mosaic_gpu import wgmma_tile

    a, b = normal(0, 128, 96), normal(1, 96, 96)
    got = wgmma_tile.matmul(a, b, num_cores=2, config=TILES, interpret=compat.gpu_interpret())
    want = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8, atol=1e-5)
    assert not compat.gpu_races_found()


def carried_out(op: OpName, swizzle: Swizzle, ranks: int, peers: Any, batch: int = 1, **options: Any) -> Any:
    """Result of the kernel on virtual ranks, and the expected one in float64: [ranks, batch, rows, columns]."""
    from jtrain_kernels.overlap.mosaic_gpu.kernel import fused

    program = gpu_program(make_schedule(op, swizzle, ranks))
    rows = 64 * program.schedule.pieces_per_rank * (1 if op == "all_gather_matmul" else ranks)
    x, kernel = normal(0, ranks, batch, rows, 64), normal(1, ranks, 64, 64)
    senders = 1 if program.moves[0] else 0
    got, inbox = fused(
        program, peers, x, kernel, num_cores=ranks * (1 + senders), config=OverlapConfig(TILES, senders),
        interpret=compat.gpu_interpret(detect_races=False), **options,
    )  # fmt: skip
    x, kernel = np.asarray(x, np.float64), np.asarray(kernel, np.float64)
    if op == "all_gather_matmul":
        gathered = np.concatenate(list(x), axis=1)
        return got, np.einsum("bmk,rkn->rbmn", gathered, kernel), inbox, gathered
    total = np.einsum("rbmk,rkn->bmn", x, kernel)
    return got, np.stack(np.split(total, ranks, axis=1)), inbox, None


@pytest.mark.parametrize(
    ("op", "swizzle", "ranks", "batch"),
    (
        ("all_gather_matmul", "full_mesh", 2, 2),
        ("matmul_reduce_scatter", "full_mesh", 2, 1),
        pytest.param("matmul_reduce_scatter", "ring", 3, 1, marks=pytest.mark.slow),
        pytest.param("all_gather_matmul", "bidirectional", 3, 1, marks=pytest.mark.slow),
        pytest.param("matmul_reduce_scatter", "full_mesh", 4, 2, marks=pytest.mark.slow),
    ),
)
def test_the_fused_kernels_give_the_product_on_virtual_ranks(
    op: OpName, swizzle: Swizzle, ranks: int, batch: int
) -> None:
    """Runs the kernels' own bodies, tables, waits and copies; only counters are emulated, by a cell per warpgroup.

    The case runs in its own process, where XLA has a thread for every warpgroup: a waiting warpgroup occupies its
    thread, and with 8 threads for the 18 warpgroups of three ranks, those that are waited for got none.
    """
    code = f"from tests.kernels.overlap.test_mosaic_gpu import check; check({op!r}, {swizzle!r}, {ranks}, {batch})"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    environment = os.environ | {"PYTHONPATH": paths, "NPROC": "64"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr


def check(op: OpName, swizzle: Swizzle, ranks: int, batch: int) -> None:
    """Compares one case with float64.

    Memory is NaN until it is written, so a tile that is used too early shows. A partial sum is rounded to bfloat16 once
    per hop, by at most 2^-9 of its value, which is about the largest result. The gathered x is x, bit for bit, on every
    rank.
    """
    from jtrain_kernels.overlap.mosaic_gpu.peer_access import EmulatedRanks

    keep = op == "all_gather_matmul"
    got, want, inbox, gathered = carried_out(op, swizzle, ranks, EmulatedRanks(ranks), batch, keep_gathered=keep)
    if keep:
        np.testing.assert_array_equal(np.asarray(inbox, np.float64), np.stack([gathered] * ranks))
    hops = 1 if op == "all_gather_matmul" else ranks
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8, atol=hops * 2**-8 * np.abs(want).max())


def test_a_copy_to_the_wrong_rank_is_seen() -> None:
    """The tests above can fail: rows that are counted but never arrive are NaN in the product."""
    from jtrain_kernels.overlap.mosaic_gpu.peer_access import EmulatedRanks

    class Lost(EmulatedRanks):
        def to_peer(self, copy: Any, ref: Any, peer: jax.Array, offsets: tuple[int, ...]) -> None:
            copy(self.mine(ref))

    got, _, _, _ = carried_out("all_gather_matmul", "full_mesh", 2, Lost(2))
    assert np.isnan(np.asarray(got, np.float32)).any()


def test_shapes_that_do_not_fit_are_refused_before_anything_is_compiled() -> None:
    """The message has the reason and the way out."""
    from jtrain_kernels.overlap.mosaic_gpu import wgmma_tile
    from jtrain_kernels.overlap.mosaic_gpu.kernel import fused
    from jtrain_kernels.overlap.mosaic_gpu.peer_access import VirtualRanks

    program = gpu_program(make_schedule("all_gather_matmul", "full_mesh", 2))
    x, kernel = jnp.zeros((2, 1, 128, 64), jnp.bfloat16), jnp.zeros((2, 64, 100), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"mosaic_gpu all_gather_matmul: n=100 is no multiple.*all_gather_matmul=xla"):
        fused(program, VirtualRanks(2), x, kernel, num_cores=132)
    with pytest.raises(ValueError, match=r"x is bfloat16\(2, 1, 128, 64\) and the kernel float32"):
        fused(program, VirtualRanks(2), x, kernel.astype(jnp.float32), num_cores=132)
    with pytest.raises(ValueError, match=r"mosaic_gpu matmul: m=64 is no multiple of tile_m=128"):
        wgmma_tile.matmul(x[0, 0, :64], kernel[0, :, :64], num_cores=132)
    with pytest.raises(ValueError, match=r"a is bfloat16\[128, 64\] and b float32\[64, 100\]: they do not multiply"):
        wgmma_tile.matmul(x[0, 0], kernel[0].astype(jnp.float32), num_cores=132)


def test_every_config_of_the_tiles_is_within_shared_memory() -> None:
    """Every tiling fits the shared memory of a block, barriers included."""
    from jtrain_kernels.overlap.mosaic_gpu.tile_shapes import CANDIDATES, SHARED_BYTES

    sizes = [dataclasses.replace(tiles, stages=4).shared_bytes(2, 2) for tiles in CANDIDATES]
    assert max(sizes) + 1024 <= SHARED_BYTES
