"""All-gather-matmul, matmul-reduce-scatter and matmul-all-reduce as one Hopper kernel each, from the schedule.

A persistent grid is split in two. Computing blocks take the schedule's jobs tile by tile (`hopper.multiply`): they wait
for the rows of x that a tile needs, add the partial sums that landed for it in registers, and write the sum straight
into the memory of the rank that the schedule names. Sending blocks copy what is passed on as it is (gathered rows,
finished output) with TMA through shared memory, and count up at the receiver, one counter per block of rows. A rank
thus computes with a block of rows while the next ones are on their way, at the grain of one tile.

Peers' memory is symmetric memory, which XLA allocates; it lets no rank start before all are there, so the schedule's
opening barrier is its own. Sums of ranks are rounded to x's dtype each time they travel, and added in the schedule's
order: the same bits in every run.

Sources: arXiv:2406.06858 (FLUX: fuse at the tile, write from the epilogue), arXiv:2503.20313 (TileLink: counters per
tile, blocks apart for copies), JAX's `pallas/ops/gpu/collective_matmul_mgpu.py`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jtrain_kernels.overlap import hopper
from jtrain_kernels.overlap.fabric import Fabric, when
from jtrain_kernels.overlap.gpu_call import Call, Sizes
from jtrain_kernels.overlap.gpu_program import OWN, GpuProgram, OverlapConfig, default_config, op_does_not_fit
from jtrain_kernels.overlap.sending import SENDERS, send
from jtrain_kernels.overlap.tiles import THREADS, WARPGROUPS


def fused(
    program: GpuProgram,
    fabric: Fabric,
    x: jax.Array,
    kernel: jax.Array,
    *,
    num_cores: int,
    config: OverlapConfig | None = None,
    keep_gathered: bool = False,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """One op of a schedule, on one rank's blocks (or, with `Shared`, on all ranks' at once).

    Args:
      program: `gpu_program(make_schedule(...))`.
      fabric: how ranks reach each other.
      x: [sequences, rows, k] of this rank: its shard's rows for all-gather-matmul, all rows otherwise.
      kernel: [k, n] of this rank.
      num_cores: of the device, a Hopper chip: the most blocks of the grid. No live device is asked.
      config: None: `default_config`.
      keep_gathered: of all-gather-matmul: also copies this rank's own rows to where the others' arrive.
      interpret: `plgpu.InterpretGPUParams()` runs it on a CPU; with the fabric `Interpreted`.

    Returns:
      [sequences, rows, n]: all rows, or for reduce-scatter this rank's. And what arrived from other ranks: with
      `keep_gathered` the gathered x.

    Raises:
      ValueError: the cut does not fit the shapes or the dtype, with the reason.
    """
    schedule = program.schedule
    gathers = schedule.op == "all_gather_matmul"
    (batch, own_rows, k), n = x.shape[-3:], kernel.shape[-1]
    m = own_rows * schedule.num_ranks if gathers else own_rows
    if kernel.shape[-2] != k or kernel.dtype != x.dtype:
        raise ValueError(f"x is {x.dtype}{x.shape} and the kernel {kernel.dtype}{kernel.shape}: they do not multiply.")
    blocks, grid = fabric.blocks(num_cores)
    config = config or default_config(program, m, n, k)
    if reason := op_does_not_fit(program, m, n, k, str(x.dtype), blocks, config):
        raise ValueError(f"mosaic_gpu {schedule.op}: {reason}. Choose other tiles, or kernels.{schedule.op}=xla.")
    of_one, tiles = schedule.piece_rows(m) // config.tiles.tile_m, config.tiles
    width = k if gathers else n
    if keep_gathered:
        program = program.keeping_own()
    sizes = Sizes(
        rows=batch * of_one,
        of_one=of_one,
        columns=n // tiles.tile_n,
        steps=k // tiles.tile_k,
        width=width,
        jobs=len(program.jobs[0]),
        moves=len(program.moves[0]),
        arrivals=len(program.arrivals[0]),
    )
    out_rows = m // schedule.num_ranks if schedule.op == "matmul_reduce_scatter" else m
    # What peers write: gathered rows, or the partial sums that land here. An array of none would have no address.
    inbox_rows = batch * (m if gathers else max(schedule.num_slots, 1) * of_one * tiles.tile_m)
    body = _Kernel(program, fabric, config, sizes, blocks)
    tables = [jnp.asarray(make()) for make in (program.job_table, program.move_table, program.arrival_table)]
    flat = x.reshape(*x.shape[:-3], batch * own_rows, k)
    out, inbox = plgpu.kernel(
        body.run,
        out_type=[
            jax.ShapeDtypeStruct(fabric.shape((batch * out_rows, n)), x.dtype),
            jax.ShapeDtypeStruct(fabric.shape((inbox_rows, width)), x.dtype),
        ],
        **fabric.grid(grid),
        num_threads=THREADS,
        thread_name="wg",
        kernel_name=f"jtrain_{schedule.op}",
        interpret=interpret,
    )(flat, kernel, *tables, *fabric.counter_inputs(grid, *body.counter_shapes))
    inbox = inbox.reshape(*x.shape[:-3], batch, -1, width)
    return out.reshape(*x.shape[:-3], batch, out_rows, n), inbox


@dataclasses.dataclass(frozen=True)
class _Tile:
    """One tile of a job, as its block reads it from the table."""

    turn: Any
    piece: Any
    peer: Any
    slot: Any
    row: Any  # within the piece, in tiles
    column: Any


@dataclasses.dataclass(frozen=True)
class _Kernel(Call):
    """The kernel's body; every method runs on the GPU."""

    def run(self, x: Any, kernel: Any, jobs: Any, moves: Any, arrivals: Any, *rest: Any) -> None:
        *given, out, inbox = rest
        shapes = self.counter_shapes
        rows_here, landed = (self.fabric.counters(s, g) for s, g in zip(shapes, given or (None, None), strict=True))
        x, kernel, out_ = (self.fabric.mine(ref) for ref in (x, kernel, out))
        block, senders = self.fabric.block(self.blocks), self.config.sending_blocks

        def compute() -> None:
            self._compute(block - senders, x, kernel, jobs, out_, inbox, rows_here, landed)

        def pass_on() -> None:
            send(self, block, x, moves, arrivals, out, inbox, rows_here)

        if senders:
            when(block < senders, pass_on, compute)
        else:
            compute()

    def _compute(
        self, block: Any, x: Any, kernel: Any, jobs: Any, out: Any, inbox: Any, rows_here: Any, landed: Any
    ) -> None:
        sizes, tiles, fabric = self.sizes, self.config.tiles, self.fabric
        workers = self.blocks - self.config.sending_blocks
        total = sizes.jobs * sizes.tiles
        share = lax.div(total - block + workers - 1, workers)
        rank, wg = fabric.rank(), lax.axis_index("wg")
        inbox_mine = fabric.mine(inbox)

        def tile(i: Any) -> _Tile:
            linear = block + i * workers
            turn = lax.div(linear, sizes.tiles)
            within = lax.rem(linear, sizes.tiles)
            row, column = plgpu.planar_snake(within, (sizes.rows, sizes.columns), 0, tiles.group)
            piece, peer, slot = (jobs[rank, turn, field] for field in range(3))
            return _Tile(turn, piece, peer, slot, row, column)

        def ready(at: _Tile) -> None:
            if self.gathers:

                @pl.when(self.owner(at.piece) != rank)
                def _wait() -> None:
                    fabric.wait(rows_here, (at.piece, at.row), SENDERS)

        def load(at: _Tile, step: Any, a_smem: Any, b_smem: Any, barrier: Any) -> None:
            def from_own() -> None:
                row = self.own_row(at.piece, at.row) if self.gathers else self.row(at.piece, at.row)
                hopper.load_a(x, row, step, tiles, a_smem, barrier)

            def from_inbox() -> None:
                hopper.load_a(inbox_mine, self.row(at.piece, at.row), step, tiles, a_smem, barrier)

            if self.gathers:
                when(self.owner(at.piece) == rank, from_own, from_inbox)
            else:
                from_own()
            hopper.load_b(kernel, at.column, step, tiles, b_smem, barrier)

        def delivered(at: _Tile) -> None:
            """Counts a tile that has left, once nothing of it is under way any more."""
            if self.gathers:
                return
            there, here = (at.slot, at.row, at.column), (at.piece, at.row)

            @pl.when(at.peer != OWN)
            def _to_peer() -> None:
                fabric.signal(landed, there, at.peer)

            if self.passes_on:

                @pl.when(at.peer == OWN)
                def _to_senders() -> None:
                    fabric.signal_self(rows_here, here)

        def before_store(i: Any, at: _Tile) -> None:
            # The tile before this one was handed to TMA a whole product ago: its writes are done, waiting is free.
            plgpu.wait_smem_to_gmem(0)

            @pl.when(i > 0)
            def _() -> None:
                delivered(tile(i - 1))

            if self.program.max_slots:

                @pl.loop(0, jobs[rank, at.turn, 3])
                def _wait(j: Any) -> None:
                    fabric.wait(landed, (jobs[rank, at.turn, 4 + j], at.row, at.column), WARPGROUPS)

        def store(at: _Tile, piece: tuple[Any, Any], smem: Any) -> None:
            scatters = self.program.schedule.op == "matmul_reduce_scatter"

            def keep() -> None:
                row = self.own_row(at.piece, at.row) if scatters else self.row(at.piece, at.row)
                plgpu.copy_smem_to_gmem(smem, out.at[hopper.piece_of((row, at.column), piece, tiles)])

            def give() -> None:
                where = hopper.piece_of((at.slot * sizes.rows + at.row, at.column), piece, tiles)

                def copy(ref: Any) -> None:
                    plgpu.copy_smem_to_gmem(smem, ref.at[where])

                fabric.to_peer(copy, inbox, at.peer, self.program.offsets)

            if self.gathers:
                keep()
            else:
                when(at.peer == OWN, keep, give)

        def body(in_smem: Any = None, in_barrier: Any = None, **smem: Any) -> None:
            def add(at: _Tile, piece: tuple[Any, Any], sums: Any) -> Any:
                def one(j: Any, sums: Any) -> Any:
                    first = jobs[rank, at.turn, 4 + j] * sizes.rows + at.row
                    rows, columns = hopper.piece_of((first, at.column), piece, tiles)
                    plgpu.commit_smem()  # all have read what was there before
                    plgpu.copy_gmem_to_smem(inbox_mine.at[rows, columns], in_smem.at[wg], in_barrier.at[wg])
                    plgpu.barrier_wait(in_barrier.at[wg])
                    return sums + in_smem[wg].astype(jnp.float32)

                return lax.fori_loop(0, jobs[rank, at.turn, 3], one, sums)

            do = hopper.Steps(tile=tile, load=load, store=store, ready=ready, before_store=before_store)
            if in_smem is not None:
                do = dataclasses.replace(do, add=add)
            hopper.multiply(do, share, sizes.steps, tiles, **smem)
            plgpu.wait_smem_to_gmem(0)

            @pl.when((wg < WARPGROUPS) & (share > 0))
            def _last() -> None:
                delivered(tile(share - 1))

        dtype = x.dtype
        extra: dict[str, Any] = {}
        if self.program.max_slots:
            layout = hopper.transforms(tiles.out_columns, jnp.dtype(dtype).itemsize)
            extra["in_smem"] = plgpu.SMEM((WARPGROUPS, tiles.out_rows, tiles.out_columns), dtype, transforms=layout)
            extra["in_barrier"] = plgpu.Barrier(num_arrivals=1, num_barriers=WARPGROUPS)
        pl.run_scoped(body, **hopper.scratch(tiles, dtype, dtype), **extra, collective_axes="wg")
