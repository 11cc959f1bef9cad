"""The fused Hopper kernels emulated on virtual ranks, with senders that are late, and their gradients.

Every check runs in a process of its own, where XLA has a thread for every warpgroup: a waiting warpgroup
occupies its thread, and with 8 threads for the 18 warpgroups of three ranks, those that are waited for got
none.
"""

import functools
import itertools
import json
import os
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain_kernels import compat
from jtrain_kernels.overlap.mosaic_gpu.tables import OverlapConfig, gpu_program
from jtrain_kernels.overlap.mosaic_gpu.tile_shapes import THREADS, WARPGROUPS, TileConfig
from jtrain_kernels.overlap.schedule import OpName, make_schedule
from jtrain_kernels.overlap.swizzle import Swizzle
from tests.processes import program

ROOT = Path(__file__).parents[3]
TILES = TileConfig(tile_m=64, tile_n=32, tile_k=64, stages=2, out_rows=64, out_columns=16, group=2)
"""Tiles small enough for a CPU; each tile is written as one piece, so that tiles alternate between the
buffers."""
LIMIT_S = 120
"""Time limit of a quick check, of which none takes longer than a few seconds. A deadlock ends here."""


def in_a_process(function: Callable[..., None], *arguments: object, limit_s: int = LIMIT_S) -> None:
    """Calls a function of this file; fails with its error output, or when the limit has passed."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    environment = os.environ | {"PYTHONPATH": paths, "NPROC": "64"}
    done = subprocess.run(
        program(__file__, "call_fabric", function.__name__, json.dumps(arguments)),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=limit_s,
    )
    assert done.returncode == 0, done.stderr


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


late: set[tuple[int, int]] = set()
"""(rank, warpgroup) of the senders whose copies to other ranks are late now; a global, because callbacks read
it."""


def _delay(rank: Any, warpgroup: Any, peer: Any) -> np.ndarray:
    if (int(rank), int(warpgroup)) in late:
        time.sleep(0.5)  # the late sender: longer than any reader takes to the wait that it must not skip
    return np.asarray(peer, np.int32)


def late_ranks(ranks: int) -> Any:
    """`EmulatedRanks` with late senders; made here, as Pallas is imported only in the processes of the
    checks.
    """
    from jtrain_kernels.overlap.mosaic_gpu.peer_access import EmulatedRanks

    class LateRanks(EmulatedRanks):
        def to_peer(self, copy: Any, ref: Any, peer: jax.Array, offsets: tuple[int, ...]) -> None:
            scalar = jax.ShapeDtypeStruct((), jnp.int32)
            copy(ref.at[jax.pure_callback(_delay, scalar, self.rank(), jax.lax.axis_index("wg"), peer)])

    return LateRanks(ranks)


CASES: tuple[tuple[OpName, Swizzle, int, int], ...] = (
    ("all_gather_matmul", "bidirectional", 3, 1),  # several pieces per rank, which are passed on
    ("matmul_reduce_scatter", "full_mesh", 3, 2),  # several slots, several sequences
)
MORE_CASES: tuple[tuple[OpName, Swizzle, int, int], ...] = (
    ("all_gather_matmul", "full_mesh", 2, 2),
    ("all_gather_matmul", "ring", 3, 2),
    ("matmul_reduce_scatter", "ring", 3, 1),
    ("matmul_reduce_scatter", "bidirectional", 3, 2),
    ("matmul_reduce_scatter", "full_mesh", 4, 2),
)


@pytest.mark.parametrize(
    ("op", "swizzle", "ranks", "batch"), (pytest.param(*CASES[0], marks=pytest.mark.slow), CASES[1])
)
def test_the_fused_kernels_give_the_product_although_senders_are_late(
    op: OpName, swizzle: Swizzle, ranks: int, batch: int
) -> None:
    """Runs the kernels' own bodies, tables, waits and copies; only counters are emulated, by a cell per
    warpgroup.

    The last warpgroup of rank 0 is late, so whoever does not wait for all senders of a tile reads NaN.
    """
    in_a_process(check, op, swizzle, ranks, batch, False)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "swizzle", "ranks", "batch"), (*CASES, *MORE_CASES))
def test_the_fused_kernels_give_the_product_whoever_is_late(
    op: OpName, swizzle: Swizzle, ranks: int, batch: int
) -> None:
    """Every warpgroup of every rank is late in turn, then random sets of them."""
    in_a_process(check, op, swizzle, ranks, batch, True, limit_s=10 * LIMIT_S)


def check(op: OpName, swizzle: Swizzle, ranks: int, batch: int, in_turn: bool) -> None:
    """Compares one case with float64.

    Memory is NaN until it is written, so a tile that is used too early shows. A partial sum is rounded to
    bfloat16 once per hop, by at most 2^-9 of its value, which is about the largest result. The gathered x is
    x, bit for bit, on every rank.
    """
    from jtrain_kernels.overlap.mosaic_gpu.kernel import fused

    gathers = op == "all_gather_matmul"
    program = gpu_program(make_schedule(op, swizzle, ranks))
    rows = 64 * program.schedule.pieces_per_rank * (1 if gathers else ranks)
    # Gathered rows of 192 columns are 6 boxes, so that each of the 3 warpgroups of a sending block sends
    # some.
    k, n = (192, 32) if gathers else (64, 64)
    x, kernel = normal(0, ranks, batch, rows, k), normal(1, ranks, k, n)
    senders = 1 if program.moves[0] else 0
    run = jax.jit(
        functools.partial(
            fused, program, late_ranks(ranks), num_cores=ranks * (1 + senders), config=OverlapConfig(TILES, senders),
            interpret=compat.gpu_interpret(detect_races=False), keep_gathered=gathers,
        )
    )  # fmt: skip
    x64, kernel64 = np.asarray(x, np.float64), np.asarray(kernel, np.float64)
    gathered = np.concatenate(list(x64), axis=1)
    if gathers:
        want = np.einsum("bmk,rkn->rbmn", gathered, kernel64)
    else:
        want = np.stack(np.split(np.einsum("rbmk,rkn->bmn", x64, kernel64), ranks, axis=1))

    warpgroups = list(itertools.product(range(ranks), range(THREADS if gathers else WARPGROUPS)))
    draw = random.Random(0)
    sets = [{(0, warpgroups[-1][1])}]  # one alone: were all ranks late, none would be later than its readers
    if in_turn:
        sets = [{one} for one in warpgroups] + [
            set(draw.sample(warpgroups, len(warpgroups) // 2)) for _ in range(3)
        ]
    for who in sets:
        late.clear()
        late.update(who)
        got, inbox = run(x, kernel)
        if gathers:
            np.testing.assert_array_equal(
                np.asarray(inbox, np.float64), np.stack([gathered] * ranks), str(who)
            )
        atol = (1 if gathers else ranks) * 2**-8 * np.abs(want).max()
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8, atol=atol, err_msg=str(who))


def test_the_gradients_of_the_fused_ops_are_those_of_float64() -> None:
    """The custom backward passes, with the kernels that they call, on two virtual ranks."""
    in_a_process(check_gradients)


def check_gradients() -> None:
    """Compares the gradients of both ops with float64; a piece is one tile of the smallest shipped tiling.

    The gradient of x is a product or a sum of two, rounded to bfloat16; the kernel's is a float32 sum rounded
    once.
    """
    from jtrain_kernels.overlap.mosaic_gpu import kernel, op

    ranks, rows, size = 2, 64, 128
    kernel.fused = functools.partial(on_virtual_ranks, kernel.fused)
    plan = op.FusedPlan("t", ranks, "full_mesh", sending_blocks=1, num_cores=2 * ranks)

    def gradients(of: Any, x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
        local = jax.vmap(lambda x, w, dy: jax.vjp(lambda x, w: of(x, w, plan), x, w)[1](dy), axis_name="t")
        return jax.jit(local)(x, w, dy)

    def compare(got: Any, *want: np.ndarray) -> None:
        for one, exact in zip(got, want, strict=True):
            atol = ranks * 2**-8 * np.abs(exact).max()
            np.testing.assert_allclose(np.asarray(one, np.float64), exact, rtol=2**-8, atol=atol)

    few, all_rows = normal(0, ranks, 1, rows, size), normal(1, ranks, 1, ranks * rows, size)
    w = normal(2, ranks, size, size)
    few64, all64, w64 = (np.asarray(a, np.float64) for a in (few, all_rows, w))
    whole = np.concatenate(list(few64), axis=1)  # x or dy of all ranks
    dx = np.einsum("rbmn,rkn->bmk", all64, w64)
    compare(
        gradients(op.all_gather_matmul, few, w, all_rows),
        np.stack(np.split(dx, ranks, axis=1)),
        np.einsum("bmk,rbmn->rkn", whole, all64),
    )
    compare(
        gradients(op.matmul_reduce_scatter, all_rows, w, few),
        np.einsum("bmn,rkn->rbmk", whole, w64),
        np.einsum("rbmk,bmn->rkn", all64, whole),
    )


def on_virtual_ranks(
    fused: Any,
    program: Any,
    peers: Any,
    x: jax.Array,
    kernel: jax.Array,
    *,
    keep_gathered: bool,
    **options: Any,
) -> Any:
    """`fused` for a device of `vmap` over the ranks: all of them become the virtual ranks of one call."""

    @jax.custom_batching.custom_vmap
    def run(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        gathers = program.schedule.op == "all_gather_matmul"
        rows = x.shape[1] * peers.num_ranks if gathers else x.shape[1] // peers.num_ranks
        empty = jnp.zeros((x.shape[0], x.shape[1] * peers.num_ranks, x.shape[2]), x.dtype)
        return jnp.zeros((x.shape[0], rows, kernel.shape[1]), x.dtype), empty if gathers else x[:, :0]

    @run.def_vmap
    def _run(size: int, batched: Any, x: jax.Array, kernel: jax.Array) -> Any:
        assert size == peers.num_ranks
        assert all(batched)
        got, inbox = fused(
            program, late_ranks(size), x, kernel, keep_gathered=keep_gathered,
            interpret=compat.gpu_interpret(detect_races=False), **options,
        )  # fmt: skip
        return (got, inbox if keep_gathered else jnp.full_like(inbox, jnp.nan)), (True, True)

    return run(x, kernel)
