"""Tables of a GPU's blocks: results when computing and sending blocks run in any order."""

import dataclasses
import itertools
import random
from typing import Any

import numpy as np
import pytest

from jtrain_kernels.device import from_name
from jtrain_kernels.overlap.api import OPS as REGISTRY_OPS
from jtrain_kernels.overlap.mosaic_gpu import tile_shapes
from jtrain_kernels.overlap.mosaic_gpu.tables import (
    OWN,
    GpuProgram,
    Move,
    default_config,
    gpu_program,
    op_does_not_fit,
)
from jtrain_kernels.overlap.mosaic_gpu.tile_shapes import TileConfig
from jtrain_kernels.overlap.schedule import OPS, OpName, make_schedule
from jtrain_kernels.overlap.swizzle import Swizzle

CASES: tuple[tuple[OpName, Swizzle, int], ...] = tuple(
    itertools.product(OPS, ("full_mesh", "ring", "bidirectional"), (1, 2, 3, 4))
)


class Stuck(Exception):
    """Deadlock: no block can continue."""


def carried_out(program: GpuProgram, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Results of all ranks for one random order of their two streams, and the expected ones, in integers."""
    schedule, rng, order = program.schedule, np.random.default_rng(seed), random.Random(seed)
    n, pieces, gathers = schedule.num_ranks, schedule.num_pieces, schedule.op == "all_gather_matmul"
    x = rng.integers(-4, 5, (pieces, 2, 3) if gathers else (n, pieces, 2, 3))
    kernels = rng.integers(-4, 5, (n, 3, 2))
    out: list[dict[int, np.ndarray]] = [{} for _ in range(n)]
    slots: list[dict[int, np.ndarray]] = [{} for _ in range(n)]
    here = [{g: x[g] for g in range(pieces) if gathers and schedule.owner(g) == rank} for rank in range(n)]
    turns = {(rank, stream): 0 for rank in range(n) for stream in ("job", "move")}

    def job(rank: int) -> bool:
        todo = program.jobs[rank][turns[rank, "job"]]
        if (gathers and todo.piece not in here[rank]) or any(slot not in slots[rank] for slot in todo.slots):
            return False
        rows = here[rank][todo.piece] if gathers else x[rank, todo.piece]
        total = rows @ kernels[rank] + sum(slots[rank][slot] for slot in todo.slots)
        if todo.peer == OWN:
            out[rank][todo.piece] = total
        else:
            assert todo.slot not in slots[todo.peer], "a slot is used once"
            slots[todo.peer][todo.slot] = total
        return True

    def move(rank: int) -> bool:
        todo = program.moves[rank][turns[rank, "move"]]
        if todo.piece not in here[rank]:
            return False
        here[todo.peer][todo.piece] = here[rank][todo.piece]
        return True

    left = {key for key in turns if (program.jobs if key[1] == "job" else program.moves)[key[0]]}
    while left:
        for key in order.sample(sorted(left), len(left)):
            if (job if key[1] == "job" else move)(key[0]):
                turns[key] += 1
                if turns[key] == len((program.jobs if key[1] == "job" else program.moves)[key[0]]):
                    left.remove(key)
                break
        else:
            raise Stuck(left)
    if gathers:
        want = np.einsum("gmk,rkn->rgmn", x, kernels)
    else:
        total = np.einsum("rgmk,rkn->gmn", x, kernels)
        want = total.reshape(n, -1, 2, 2)
    return np.stack([np.stack([out[rank][g] for g in sorted(out[rank])]) for rank in range(n)]), want


@pytest.mark.parametrize(("op", "swizzle", "ranks"), CASES)
def test_the_streams_of_blocks_give_the_product_in_any_order(
    op: OpName, swizzle: Swizzle, ranks: int
) -> None:
    """Integers are exact to the last bit; no order of blocks deadlocks, and every slot is used once."""
    program = gpu_program(make_schedule(op, swizzle, ranks, parts=2))
    for seed in range(5):
        got, want = carried_out(program, seed)
        np.testing.assert_array_equal(got, want)
        assert np.any(want)


def test_a_lost_sum_and_a_lost_move_are_seen() -> None:
    """The test above can fail: it finds a slot that nobody adds, and a piece that is sent to the wrong
    peer.
    """
    reduce = gpu_program(make_schedule("matmul_reduce_scatter", "full_mesh", 3))
    last = dataclasses.replace(reduce.jobs[1][-1], slots=reduce.jobs[1][-1].slots[1:])
    lossy = dataclasses.replace(reduce, jobs=(reduce.jobs[0], (*reduce.jobs[1][:-1], last), reduce.jobs[2]))
    got, want = carried_out(lossy, 0)
    assert np.any(got[1] != want[1])

    ring = gpu_program(make_schedule("all_gather_matmul", "ring", 3))
    lost = (Move(ring.moves[1][0].piece, 0), *ring.moves[1][1:])  # to the wrong peer
    with pytest.raises(Stuck):
        carried_out(dataclasses.replace(ring, moves=(ring.moves[0], lost, ring.moves[2])), 0)


def test_the_tables_hold_what_the_streams_do() -> None:
    """Each rank's row of a table holds its own turns, padded to the widest."""
    scatter = gpu_program(make_schedule("matmul_reduce_scatter", "full_mesh", 4))
    jobs, moves = (
        scatter.job_table(),
        gpu_program(make_schedule("all_gather_matmul", "full_mesh", 4)).move_table(),
    )
    assert jobs.shape == (4, 4, 4 + 3)
    assert moves.shape == (4, 3, 2)
    for rank in range(4):
        own = scatter.jobs[rank][-1]
        assert own.piece == rank
        assert jobs[rank, -1].tolist() == [rank, OWN, OWN, 3, *own.slots]
        assert sorted(moves[rank, :, 1].tolist()) == [peer for peer in range(4) if peer != rank]


def test_keeping_what_was_gathered_adds_moves_of_the_own_pieces_last() -> None:
    """The last moves of each rank are to itself; the other moves do not change."""
    program = gpu_program(make_schedule("all_gather_matmul", "bidirectional", 2))
    kept = program.keeping_own()
    assert [moves[-2:] for moves in kept.moves] == [(Move(0, 0), Move(1, 0)), (Move(2, 1), Move(3, 1))]
    assert [moves[:-2] for moves in kept.moves] == list(program.moves)


@pytest.mark.parametrize(
    ("op", "swizzle", "offsets"),
    (
        ("all_gather_matmul", "full_mesh", (1, 2, 3)),
        ("matmul_reduce_scatter", "ring", (3,)),
        ("all_gather_matmul", "bidirectional", (1, 3)),
        ("all_gather_matmul", "ring", (1,)),
    ),
)
def test_a_rank_knows_how_far_its_peers_are(op: OpName, swizzle: Swizzle, offsets: tuple[int, ...]) -> None:
    """Offsets of peers among four ranks; moves to a rank itself add no offset."""
    program = gpu_program(make_schedule(op, swizzle, 4))
    assert program.offsets == offsets
    assert program.keeping_own().offsets == offsets


@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "sending", "reason"),
    (
        (1025, 1024, 1024, "bfloat16", 8, "1025 rows do not split into 4 pieces"),
        (128, 1024, 1024, "bfloat16", 8, "for each of 4 pieces m=32 is no multiple of tile_m=128"),
        (1024, 96, 1024, "bfloat16", 8, "n=96 is no multiple of tile_n=256"),
        (1024, 1024, 100, "bfloat16", 8, "k=100 is no multiple of tile_k=64"),
        (1024, 1024, 1024, "float32", 8, "operands are float32; wgmma here takes bfloat16 or float16"),
        (
            1024,
            1024,
            1024,
            "bfloat16",
            132,
            "sending_blocks=132 must be above 0 and below the 132 blocks of a rank",
        ),
        (1024, 1024, 1024, "bfloat16", 8, None),
    ),
)
def test_what_does_not_fit_is_said(
    m: int, n: int, k: int, dtype: str, sending: int, reason: str | None
) -> None:
    """The reason is one sentence with the field and both numbers."""
    program = gpu_program(make_schedule("all_gather_matmul", "full_mesh", 4))
    config = default_config(program, m, n, k, sending)
    assert op_does_not_fit(program, m, n, k, dtype, 132, config) == reason


def test_smaller_tiles_are_taken_where_the_large_ones_do_not_fit() -> None:
    """Tiles need columns in multiples of 128 and rows of 64; too much shared memory gives a reason."""
    program = gpu_program(make_schedule("matmul_reduce_scatter", "full_mesh", 4))
    assert default_config(program, 1024, 512, 512).tiles == TileConfig(128, 256, stages=3)
    assert default_config(program, 256, 384, 512).tiles == TileConfig(64, 128, stages=3)
    reason = tile_shapes.does_not_fit(1024, 1024, 1024, "bfloat16", TileConfig(stages=8))
    assert reason is not None
    assert "need 427008 bytes of shared memory, a block has 232448" in reason


@pytest.mark.parametrize(
    ("device", "change", "reason"),
    (
        ("h200", {}, None),
        ("b200", {}, "b200 has no wgmma: this kernel is for Hopper"),
        ("v5p", {}, "v5p has no wgmma"),
        ("gh200", {}, "8 ranks write into each other's memory, but links join 1 gh200"),
        ("h200", {"rows": 100}, "rows do not split|is no multiple of tile_m"),
    ),
)
def test_where_the_kernels_run_and_why_not_elsewhere(
    device: str, change: dict[str, Any], reason: str | None
) -> None:
    """All ops of the registry have the same limits; a predicted cost alone never chooses them."""
    found = [(op, i) for op in REGISTRY_OPS for i in op.implementations if i.name == "mosaic_gpu"]
    assert [op.name for op, _ in found] == list(OPS)
    for op, own in found:
        avals = dict(op.cases["llama8b"])
        if change:
            x: Any = avals["x"]
            avals["x"] = type(x)((1, change["rows"], x.shape[2]), x.dtype)
        got = own.supports(from_name(device), avals)
        if reason is None:
            assert got is None
            assert (own.cost_s(from_name(device), avals) or 0) > 0
            assert own.only_forced is not None
            assert own.configs(from_name(device), avals)[0]["num_cores"] == 132
        else:
            assert got is not None
            assert any(part in got for part in reason.split("|")), got
