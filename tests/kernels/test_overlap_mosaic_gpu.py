"""The Hopper kernels, emulated on a CPU: the tile kernel with races looked for, the fused ones with virtual ranks."""

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
from jtrain_kernels.overlap.gpu_program import OverlapConfig, gpu_program
from jtrain_kernels.overlap.schedule import OpName, make_schedule
from jtrain_kernels.overlap.swizzle import Swizzle
from jtrain_kernels.overlap.tiles import TileConfig

ROOT = Path(__file__).parents[2]
TILES = TileConfig(tile_m=64, tile_n=32, tile_k=32, stages=2, out_rows=64, out_columns=16, group=2)
"""So small that a CPU gets through; one piece of a tile is written at once, so that its two buffers change places."""


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    """A kernel that raised leaves its emulated memory behind."""
    yield
    compat.reset_interpreters()


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


def test_the_tile_kernel_multiplies_without_a_race() -> None:
    """Five tiles' worth of work on two blocks, so that stages and buffers are used again.

    One bfloat16 rounding of a float32 sum: half a unit in the last place, 2^-9 of the result.
    """
    from jtrain_kernels.overlap import hopper

    a, b = normal(0, 128, 96), normal(1, 96, 96)
    got = hopper.matmul(a, b, num_cores=2, config=TILES, interpret=compat.gpu_interpret())
    want = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8, atol=1e-5)
    assert not compat.gpu_races_found()


def carried_out(op: OpName, swizzle: Swizzle, ranks: int, fabric: Any, batch: int = 1, **options: Any) -> Any:
    """What the kernel gives on virtual ranks, and in float64 what it should; arrays [ranks, batch, rows, columns]."""
    from jtrain_kernels.overlap.mosaic_gpu import fused

    program = gpu_program(make_schedule(op, swizzle, ranks))
    rows = 64 * program.schedule.pieces_per_rank * (1 if op == "all_gather_matmul" else ranks)
    x, kernel = normal(0, ranks, batch, rows, 64), normal(1, ranks, 64, 64)
    senders = 1 if program.moves[0] else 0
    got, inbox = fused(
        program, fabric, x, kernel, num_cores=ranks * (1 + senders), config=OverlapConfig(TILES, senders),
        interpret=compat.gpu_interpret(detect_races=False), **options,
    )  # fmt: skip
    x, kernel = np.asarray(x, np.float64), np.asarray(kernel, np.float64)
    if op == "all_gather_matmul":
        gathered = np.concatenate(list(x), axis=1)
        return got, np.einsum("bmk,rkn->rbmn", gathered, kernel), inbox, gathered
    total = np.einsum("rbmk,rkn->bmn", x, kernel)
    scattered = np.stack(np.split(total, ranks, axis=1))
    return got, scattered if op == "matmul_reduce_scatter" else np.stack([total] * ranks), inbox, None


@pytest.mark.parametrize(
    ("op", "swizzle", "ranks", "batch"),
    (
        ("all_gather_matmul", "full_mesh", 2, 2),
        ("matmul_all_reduce", "full_mesh", 2, 1),
        pytest.param("matmul_reduce_scatter", "ring", 3, 1, marks=pytest.mark.slow),
        pytest.param("all_gather_matmul", "bidirectional", 3, 1, marks=pytest.mark.slow),
        pytest.param("matmul_reduce_scatter", "full_mesh", 4, 2, marks=pytest.mark.slow),
        pytest.param("matmul_all_reduce", "ring", 3, 1, marks=pytest.mark.slow),
    ),
)
def test_the_fused_kernels_give_the_product_on_virtual_ranks(
    op: OpName, swizzle: Swizzle, ranks: int, batch: int
) -> None:
    """The kernels' own bodies, tables, waits and copies; only counters are emulated, each by a cell per warpgroup.

    In a process of its own, whose XLA has threads for every warpgroup: one that waits holds its thread, and of three
    ranks' 18 warpgroups on 8 threads those that are waited for got none.
    """
    code = f"from tests.kernels.test_overlap_mosaic_gpu import check; check({op!r}, {swizzle!r}, {ranks}, {batch})"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    environment = os.environ | {"PYTHONPATH": paths, "NPROC": "64"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr


def check(op: OpName, swizzle: Swizzle, ranks: int, batch: int) -> None:
    """Compares one case with float64.

    Memory is NaN until it is written, so a tile that is used before it came shows. A sum that travels is rounded to
    bfloat16 once per hop, by at most 2^-9 of a partial sum, which is of the size of the largest result. What is kept of
    x gathered is x, bit for bit, on every rank.
    """
    from jtrain_kernels.overlap.fabric import Interpreted

    keep = op == "all_gather_matmul"
    got, want, inbox, gathered = carried_out(op, swizzle, ranks, Interpreted(ranks), batch, keep_gathered=keep)
    if keep:
        np.testing.assert_array_equal(np.asarray(inbox, np.float64), np.stack([gathered] * ranks))
    hops = 1 if op == "all_gather_matmul" else ranks
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8, atol=hops * 2**-8 * np.abs(want).max())


def test_a_copy_to_the_wrong_rank_is_seen() -> None:
    """What the tests above are worth: rows that never arrive where they are counted are NaN in the product."""
    from jtrain_kernels.overlap.fabric import Interpreted

    class Lost(Interpreted):
        def to_peer(self, copy: Any, ref: Any, peer: jax.Array, offsets: tuple[int, ...]) -> None:
            copy(self.mine(ref))

    got, _, _, _ = carried_out("all_gather_matmul", "full_mesh", 2, Lost(2))
    assert np.isnan(np.asarray(got, np.float32)).any()


def test_shapes_that_do_not_fit_are_refused_before_anything_is_compiled() -> None:
    """With the reason and the way out."""
    from jtrain_kernels.overlap import hopper
    from jtrain_kernels.overlap.fabric import Shared
    from jtrain_kernels.overlap.mosaic_gpu import fused

    program = gpu_program(make_schedule("all_gather_matmul", "full_mesh", 2))
    x, kernel = jnp.zeros((2, 1, 128, 64), jnp.bfloat16), jnp.zeros((2, 64, 100), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"mosaic_gpu all_gather_matmul: n=100 is no multiple.*all_gather_matmul=xla"):
        fused(program, Shared(2), x, kernel, num_cores=132)
    with pytest.raises(ValueError, match=r"x is bfloat16\(2, 1, 128, 64\) and the kernel float32"):
        fused(program, Shared(2), x, kernel.astype(jnp.float32), num_cores=132)
    with pytest.raises(ValueError, match=r"mosaic_gpu matmul: m=64 is no multiple of tile_m=128"):
        hopper.matmul(x[0, 0, :64], kernel[0, :, :64], num_cores=132)
    with pytest.raises(ValueError, match=r"a is bfloat16\[128, 64\] and b float32\[64, 100\]: they do not multiply"):
        hopper.matmul(x[0, 0], kernel[0].astype(jnp.float32), num_cores=132)


def test_every_config_of_the_tiles_is_within_shared_memory() -> None:
    """What compilers are given: at most what a block has, with the barriers."""
    from jtrain_kernels.overlap.tiles import CANDIDATES, SHARED_BYTES

    sizes = [dataclasses.replace(tiles, stages=4).shared_bytes(2, 2) for tiles in CANDIDATES]
    assert max(sizes) + 1024 <= SHARED_BYTES
