"""All-gather-matmul and matmul-reduce-scatter as one Hopper kernel each, from the schedule.

A persistent grid is split in two. Computing blocks execute the schedule's jobs tile by tile
(`wgmma_tile.multiply`): they wait for the rows of x that a tile needs, add the partial sums that arrived for
it in registers, and write the sum straight into the memory of the rank that the schedule names. Sending
blocks copy gathered rows onwards with TMA through shared memory and increment a counter at the receiver, one
counter per block of rows. A rank thus computes with one block of rows while the next ones are in flight, at
the granularity of a tile.

Peers' memory is symmetric memory, which XLA allocates. XLA starts no rank before all are ready, which
replaces the schedule's opening barrier. Sums over ranks are rounded to x's dtype each time they are sent, and
added in the schedule's order: the same bits in every run.

Sources: arXiv:2406.06858 (FLUX: fuse at the tile, write from the epilogue), arXiv:2503.20313 (TileLink:
  counters per
tile, separate blocks for copies), JAX's `pallas/ops/gpu/collective_matmul_mgpu.py`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jtrain_kernels.errors import UserError
from jtrain_kernels.overlap.mosaic_gpu import wgmma_tile
from jtrain_kernels.overlap.mosaic_gpu.launch_params import Call, LaunchSizes
from jtrain_kernels.overlap.mosaic_gpu.peer_access import PeerAccess, when
from jtrain_kernels.overlap.mosaic_gpu.send_blocks import SENDERS, send
from jtrain_kernels.overlap.mosaic_gpu.tables import (
    OWN,
    GpuProgram,
    OverlapConfig,
    default_config,
    op_does_not_fit,
)
from jtrain_kernels.overlap.mosaic_gpu.tile_shapes import THREADS, WARPGROUPS


def fused(
    program: GpuProgram,
    peers: PeerAccess,
    x: jax.Array,
    kernel: jax.Array,
    *,
    num_cores: int,
    config: OverlapConfig | None = None,
    keep_gathered: bool = False,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs a schedule's op on one rank (or, with `VirtualRanks`, on all ranks at once).

    Args:
      program: `gpu_program(make_schedule(...))`.
      peers: access to the memory and counters of other ranks.
      x: [sequences, rows, k] of this rank: its shard's rows for all-gather-matmul, all rows otherwise.
      kernel: [k, n] of this rank.
      num_cores: cores of the device, a Hopper chip: the maximum number of blocks. No live device is queried.
      config: tiles and sending blocks; None means `default_config`.
      keep_gathered: for all-gather-matmul: also copies this rank's own rows next to the rows that arrive.
      interpret: `plgpu.InterpretGPUParams()` runs the kernel on a CPU, together with `EmulatedRanks`.

    Returns:
      The result [sequences, rows, n] (all rows, or for reduce-scatter this rank's), and the array into which
      other ranks wrote: with `keep_gathered` the gathered x.

    Raises:
      UserError: the tiles do not fit the shapes or the dtype; the message has the reason.
    """
    schedule = program.schedule
    gathers = schedule.op == "all_gather_matmul"
    (batch, own_rows, k), n = x.shape[-3:], kernel.shape[-1]
    m = own_rows * schedule.num_ranks if gathers else own_rows
    if kernel.shape[-2] != k or kernel.dtype != x.dtype:
        raise UserError(
            f"x is {x.dtype}{x.shape} and the kernel {kernel.dtype}{kernel.shape}: they do not multiply."
        )
    blocks, grid = peers.blocks(num_cores)
    config = config or default_config(program, m, n, k)
    if reason := op_does_not_fit(program, m, n, k, str(x.dtype), blocks, config):
        raise UserError(
            f"mosaic_gpu {schedule.op}: {reason}. Choose other tiles, or kernels.{schedule.op}=xla."
        )
    of_one, tiles = schedule.piece_rows(m) // config.tiles.tile_m, config.tiles
    width = k if gathers else n
    if keep_gathered:
        program = program.keeping_own()
    sizes = LaunchSizes(
        rows=batch * of_one,
        of_one=of_one,
        columns=n // tiles.tile_n,
        steps=k // tiles.tile_k,
        width=width,
        jobs=len(program.jobs[0]),
        moves=len(program.moves[0]),
    )
    out_rows = m // schedule.num_ranks if schedule.op == "matmul_reduce_scatter" else m
    # Peers write gathered rows or partial sums here. An array without elements would have no address.
    inbox_rows = batch * (m if gathers else max(schedule.num_slots, 1) * of_one * tiles.tile_m)
    body = _Kernel(program, peers, config, sizes, blocks)
    tables = [jnp.asarray(make()) for make in (program.job_table, program.move_table)]
    flat = x.reshape(*x.shape[:-3], batch * own_rows, k)
    out, inbox = plgpu.kernel(
        body.run,
        out_type=[
            jax.ShapeDtypeStruct(peers.shape((batch * out_rows, n)), x.dtype),
            jax.ShapeDtypeStruct(peers.shape((inbox_rows, width)), x.dtype),
        ],
        **peers.grid(grid),
        num_threads=THREADS,
        thread_name="wg",
        kernel_name=f"jtrain_{schedule.op}",
        interpret=interpret,
    )(flat, kernel, *tables, *peers.counter_inputs(grid, *body.counter_shapes))
    inbox = inbox.reshape(*x.shape[:-3], batch, -1, width)
    return out.reshape(*x.shape[:-3], batch, out_rows, n), inbox


@dataclasses.dataclass(frozen=True)
class _Tile:
    """One tile of a job, as a block reads it from the job table."""

    turn: Any
    piece: Any
    peer: Any
    slot: Any
    row: Any  # within the piece, in tiles
    column: Any


@dataclasses.dataclass(frozen=True)
class _Kernel(Call):
    """Body of the kernel; every method runs on the GPU."""

    def run(self, x: Any, kernel: Any, jobs: Any, moves: Any, *rest: Any) -> None:
        *given, out, inbox = rest
        shapes = self.counter_shapes
        rows_here, landed = (
            self.peers.counters(s, g) for s, g in zip(shapes, given or (None, None), strict=True)
        )
        x, kernel, out_ = (self.peers.mine(ref) for ref in (x, kernel, out))
        block, senders = self.peers.block(self.blocks), self.config.sending_blocks

        def compute() -> None:
            self._compute(block - senders, x, kernel, jobs, out_, inbox, rows_here, landed)

        def pass_on() -> None:
            send(self, block, x, moves, inbox, rows_here)

        if senders:
            when(block < senders, pass_on, compute)
        else:
            compute()

    def _compute(
        self, block: Any, x: Any, kernel: Any, jobs: Any, out: Any, inbox: Any, rows_here: Any, landed: Any
    ) -> None:
        sizes, tiles, peers = self.sizes, self.config.tiles, self.peers
        workers = self.blocks - self.config.sending_blocks
        total = sizes.jobs * sizes.tiles
        share = lax.div(total - block + workers - 1, workers)
        rank, wg = peers.rank(), lax.axis_index("wg")
        inbox_mine = peers.mine(inbox)

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
                    peers.wait(rows_here, (at.piece, at.row), SENDERS)

        def load(at: _Tile, step: Any, a_smem: Any, b_smem: Any, barrier: Any) -> None:
            def from_own() -> None:
                row = self.own_row(at.piece, at.row) if self.gathers else self.row(at.piece, at.row)
                wgmma_tile.load_a(x, row, step, tiles, a_smem, barrier)

            def from_inbox() -> None:
                wgmma_tile.load_a(inbox_mine, self.row(at.piece, at.row), step, tiles, a_smem, barrier)

            if self.gathers:
                when(self.owner(at.piece) == rank, from_own, from_inbox)
            else:
                from_own()
            wgmma_tile.load_b(kernel, at.column, step, tiles, b_smem, barrier)

        def delivered(at: _Tile) -> None:
            """Signals the receiver of a tile, once all its writes have completed."""
            if self.gathers:
                return

            @pl.when(at.peer != OWN)
            def _to_peer() -> None:
                peers.signal(landed, (at.slot, at.row, at.column), at.peer)

        def before_store(i: Any, at: _Tile) -> None:
            # TMA got the previous tile before this tile's product began, so its writes are done and waiting
            # is free.
            plgpu.wait_smem_to_gmem(0)

            @pl.when(i > 0)
            def _() -> None:
                delivered(tile(i - 1))

            if self.program.max_slots:

                @pl.loop(0, jobs[rank, at.turn, 3])
                def _wait(j: Any) -> None:
                    peers.wait(landed, (jobs[rank, at.turn, 4 + j], at.row, at.column), WARPGROUPS)

        def store(at: _Tile, piece: tuple[Any, Any], smem: Any) -> None:
            def keep() -> None:
                row = self.row(at.piece, at.row) if self.gathers else self.own_row(at.piece, at.row)
                plgpu.copy_smem_to_gmem(smem, out.at[wgmma_tile.piece_of((row, at.column), piece, tiles)])

            def give() -> None:
                where = wgmma_tile.piece_of((at.slot * sizes.rows + at.row, at.column), piece, tiles)

                def copy(ref: Any) -> None:
                    plgpu.copy_smem_to_gmem(smem, ref.at[where])

                peers.to_peer(copy, inbox, at.peer, self.program.offsets)

            if self.gathers:
                keep()
            else:
                when(at.peer == OWN, keep, give)

        def body(in_smem: Any = None, in_barrier: Any = None, **smem: Any) -> None:
            def add(at: _Tile, piece: tuple[Any, Any], sums: Any) -> Any:
                def one(j: Any, sums: Any) -> Any:
                    first = jobs[rank, at.turn, 4 + j] * sizes.rows + at.row
                    rows, columns = wgmma_tile.piece_of((first, at.column), piece, tiles)
                    plgpu.commit_smem()  # all threads have read the previous contents
                    plgpu.copy_gmem_to_smem(inbox_mine.at[rows, columns], in_smem.at[wg], in_barrier.at[wg])
                    plgpu.barrier_wait(in_barrier.at[wg])
                    return sums + in_smem[wg].astype(jnp.float32)

                return lax.fori_loop(0, jobs[rank, at.turn, 3], one, sums)

            do = wgmma_tile.TileSteps(
                tile=tile, load=load, store=store, ready=ready, before_store=before_store
            )
            if in_smem is not None:
                do = dataclasses.replace(do, add=add)
            wgmma_tile.multiply(do, share, sizes.steps, tiles, **smem)
            plgpu.wait_smem_to_gmem(0)

            @pl.when((wg < WARPGROUPS) & (share > 0))
            def _last() -> None:
                delivered(tile(share - 1))

        dtype = x.dtype
        extra: dict[str, Any] = {}
        if self.program.max_slots:
            layout = wgmma_tile.transforms(tiles.out_columns, jnp.dtype(dtype).itemsize)
            extra["in_smem"] = plgpu.SMEM(
                (WARPGROUPS, tiles.out_rows, tiles.out_columns), dtype, transforms=layout
            )
            extra["in_barrier"] = plgpu.Barrier(num_arrivals=1, num_barriers=WARPGROUPS)
        pl.run_scoped(body, **wgmma_tile.scratch(tiles, dtype, dtype), **extra, collective_axes="wg")
