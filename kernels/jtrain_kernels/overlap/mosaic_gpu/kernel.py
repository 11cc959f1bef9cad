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
  counters per tile, separate blocks for copies), JAX's `pallas/ops/gpu/collective_matmul_mgpu.py`.

Example: matmul-reduce-scatter over a ring of 3 ranks, 3072 rows, N = 512, tiles 128 x 256. A piece of 1024
rows is 8 x 2 tiles, so 3 jobs are 48 tiles. With 132 blocks, block 17 has tile 17 only: job 17 // 16 = 1,
tile 1 of 16. On rank 0 job 1 is piece 2 plus slot 0 for peer 2: the block waits until the counter of slot 0
at that tile is 2 (two warpgroups wrote it), adds the tile from the inbox, writes the sum into slot 1 of rank
2 and signals there.
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
    # `blocks` is one rank's share; virtual ranks divide the chip, and the grid holds all of them.
    blocks, grid = peers.blocks(num_cores)
    config = config or default_config(program, m, n, k)
    if reason := op_does_not_fit(program, m, n, k, str(x.dtype), blocks, config):
        raise UserError(
            f"mosaic_gpu {schedule.op}: {reason}. Choose other tiles, or kernels.{schedule.op}=xla."
        )
    tile_rows_per_sequence, tiles = schedule.piece_rows(m) // config.tiles.tile_m, config.tiles
    # What travels: rows of x when gathering, rows of the result when scattering.
    width = k if gathers else n
    if keep_gathered:
        # After the check above: the additional moves go to this rank itself and need no peer.
        program = program.keeping_own()
    sizes = LaunchSizes(
        rows=batch * tile_rows_per_sequence,
        tile_rows_per_sequence=tile_rows_per_sequence,
        columns=n // tiles.tile_n,
        steps=k // tiles.tile_k,
        width=width,
        jobs=len(program.jobs[0]),
        moves=len(program.moves[0]),
    )
    out_rows = m // schedule.num_ranks if schedule.op == "matmul_reduce_scatter" else m
    # Peers write gathered rows or partial sums here. An array without elements would have no address.
    inbox_rows = batch * (
        m if gathers else max(schedule.num_slots, 1) * tile_rows_per_sequence * tiles.tile_m
    )
    body = _Kernel(program, peers, config, sizes, blocks)
    # Tables are inputs, not constants: one compiled kernel serves every rank, which reads its own row.
    tables = [jnp.asarray(make()) for make in (program.job_table, program.move_table)]
    # Sequences and rows become one dimension, since a tile never crosses a sequence (LaunchSizes.row).
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
        # Tests and profiles count the kernel by this name.
        kernel_name=f"jtrain_{schedule.op}",
        interpret=interpret,
    )(flat, kernel, *tables, *peers.counter_inputs(grid, *body.counter_shapes))
    inbox = inbox.reshape(*x.shape[:-3], batch, -1, width)
    return out.reshape(*x.shape[:-3], batch, out_rows, n), inbox


@dataclasses.dataclass(frozen=True)
class _Tile:
    """One tile of a job, as a block reads it from the job table."""

    turn: Any  # number of the job in the rank's stream
    piece: Any  # block of rows of the schedule
    peer: Any  # rank that gets the sum; OWN if it stays here
    slot: Any  # of the peer's inbox
    row: Any  # within the piece, in tiles
    column: Any  # in tiles


@dataclasses.dataclass(frozen=True)
class _Kernel(Call):
    """Body of the kernel; every method runs on the GPU."""

    def run(self, x: Any, kernel: Any, jobs: Any, moves: Any, *rest: Any) -> None:
        # Counters come as inputs only under emulation; on a GPU they are semaphores and the list is empty.
        *counter_arrays, out, inbox = rest
        shapes = self.counter_shapes
        arrived_rows, arrived_tiles = (
            self.peers.counters(s, g) for s, g in zip(shapes, counter_arrays or (None, None), strict=True)
        )
        # `inbox` stays whole: a send needs the part of a peer, so each use picks its part itself.
        x, kernel, out_ = (self.peers.mine(ref) for ref in (x, kernel, out))
        block, senders = self.peers.block(self.blocks), self.config.sending_blocks

        def compute() -> None:
            self._compute(block - senders, x, kernel, jobs, out_, inbox, arrived_rows, arrived_tiles)

        def pass_on() -> None:
            send(self, block, x, moves, inbox, arrived_rows)

        if senders:
            # The first `senders` blocks of a rank only copy; the others count from 0 for the tiles.
            when(block < senders, pass_on, compute)
        else:
            compute()

    def _compute(
        self,
        block: Any,
        x: Any,
        kernel: Any,
        jobs: Any,
        out: Any,
        inbox: Any,
        arrived_rows: Any,
        arrived_tiles: Any,
    ) -> None:
        sizes, tiles, peers = self.sizes, self.config.tiles, self.peers
        workers = self.blocks - self.config.sending_blocks
        total = sizes.jobs * sizes.tiles
        # This block's tiles are block, block + workers, ...: ceil((total - block) / workers).
        share = lax.div(total - block + workers - 1, workers)
        rank, wg = peers.rank(), lax.axis_index("wg")
        inbox_mine = peers.mine(inbox)

        def tile_of(i: Any) -> _Tile:
            linear = block + i * workers
            turn = lax.div(linear, sizes.tiles)
            tile_index = lax.rem(linear, sizes.tiles)
            # In snake order tiles that run at one time are neighbours, so L2 serves their operands.
            row, column = plgpu.planar_snake(tile_index, (sizes.rows, sizes.columns), 0, tiles.group)
            # Fields 0 to 2 of the job table; 3 is the number of slots, which start at 4.
            piece, peer, slot = (jobs[rank, turn, field] for field in range(3))
            return _Tile(turn, piece, peer, slot, row, column)

        def wait_operands(tile: _Tile) -> None:
            if self.gathers:
                # A row that arrives is complete when each sending warpgroup has signalled.
                @pl.when(self.owner(tile.piece) != rank)
                def _wait() -> None:
                    peers.wait(arrived_rows, (tile.piece, tile.row), SENDERS)

        def load(tile: _Tile, step: Any, a_smem: Any, b_smem: Any, barrier: Any) -> None:
            def from_own() -> None:
                row = self.own_row(tile.piece, tile.row) if self.gathers else self.row(tile.piece, tile.row)
                wgmma_tile.load_a(x, row, step, tiles, a_smem, barrier)

            def from_inbox() -> None:
                wgmma_tile.load_a(inbox_mine, self.row(tile.piece, tile.row), step, tiles, a_smem, barrier)

            # Own rows are read in place; those of peers from the inbox, where the sending blocks put them.
            if self.gathers:
                when(self.owner(tile.piece) == rank, from_own, from_inbox)
            else:
                from_own()
            wgmma_tile.load_b(kernel, tile.column, step, tiles, b_smem, barrier)

        def delivered(tile: _Tile) -> None:
            """Signals the receiver of a tile, once all its writes have completed."""
            # A gathering kernel's result stays here; its rows are signalled by the sending blocks.
            if self.gathers:
                return

            @pl.when(tile.peer != OWN)
            def _to_peer() -> None:
                peers.signal(arrived_tiles, (tile.slot, tile.row, tile.column), tile.peer)

        def before_store(i: Any, tile: _Tile) -> None:
            # TMA got the previous tile before this tile's product began, so its writes are done and waiting
            # is free.
            plgpu.wait_smem_to_gmem(0)

            @pl.when(i > 0)
            def _() -> None:
                delivered(tile_of(i - 1))

            # Only now, after the product: partial sums travel while this rank multiplies.
            if self.program.max_slots:

                @pl.loop(0, jobs[rank, tile.turn, 3])
                def _wait(j: Any) -> None:
                    peers.wait(
                        arrived_tiles, (jobs[rank, tile.turn, 4 + j], tile.row, tile.column), WARPGROUPS
                    )

        # `corner`: first row and column of what a warpgroup writes at once, in elements within the tile.
        def store(tile: _Tile, corner: tuple[Any, Any], smem: Any) -> None:
            def keep() -> None:
                """Writes into this rank's result."""
                row = self.row(tile.piece, tile.row) if self.gathers else self.own_row(tile.piece, tile.row)
                plgpu.copy_smem_to_gmem(smem, out.at[wgmma_tile.piece_of((row, tile.column), corner, tiles)])

            def give() -> None:
                """Writes a partial sum into the inbox of the rank `tile.peer`, at the slot `tile.slot`."""
                # In rows of tiles: a slot has room for one piece of the schedule, `sizes.rows` of them.
                target_slices = wgmma_tile.piece_of(
                    (tile.slot * sizes.rows + tile.row, tile.column), corner, tiles
                )

                def copy(ref: Any) -> None:
                    plgpu.copy_smem_to_gmem(smem, ref.at[target_slices])

                peers.to_peer(copy, inbox, tile.peer, self.program.offsets)

            if self.gathers:
                keep()
            else:
                when(tile.peer == OWN, keep, give)

        def body(in_smem: Any = None, in_barrier: Any = None, **smem: Any) -> None:
            def add(tile: _Tile, corner: tuple[Any, Any], sums: Any) -> Any:
                def add_slot(j: Any, sums: Any) -> Any:
                    # Same layout as in `give`, seen from the receiver.
                    first = jobs[rank, tile.turn, 4 + j] * sizes.rows + tile.row
                    rows, columns = wgmma_tile.piece_of((first, tile.column), corner, tiles)
                    plgpu.commit_smem()  # all threads have read the previous contents
                    plgpu.copy_gmem_to_smem(inbox_mine.at[rows, columns], in_smem.at[wg], in_barrier.at[wg])
                    plgpu.barrier_wait(in_barrier.at[wg])
                    return sums + in_smem[wg].astype(jnp.float32)

                return lax.fori_loop(0, jobs[rank, tile.turn, 3], add_slot, sums)

            callbacks = wgmma_tile.TileSteps(
                tile=tile_of, load=load, store=store, wait_operands=wait_operands, before_store=before_store
            )
            # Without `add` the epilogue has no branch and no shared memory for sums.
            if in_smem is not None:
                callbacks = dataclasses.replace(callbacks, add=add)
            wgmma_tile.multiply(callbacks, share, sizes.steps, tiles, **smem)
            # The last tile has no successor whose `before_store` would signal it.
            plgpu.wait_smem_to_gmem(0)

            @pl.when((wg < WARPGROUPS) & (share > 0))
            def _last() -> None:
                delivered(tile_of(share - 1))

        dtype = x.dtype
        extra: dict[str, Any] = {}
        # These buffers take the room of a stage: default_config has 3 stages with slots, 4 without.
        if self.program.max_slots:
            layout = wgmma_tile.transforms(tiles.out_columns, jnp.dtype(dtype).itemsize)
            extra["in_smem"] = plgpu.SMEM(
                (WARPGROUPS, tiles.out_rows, tiles.out_columns), dtype, transforms=layout
            )
            extra["in_barrier"] = plgpu.Barrier(num_arrivals=1, num_barriers=WARPGROUPS)
        pl.run_scoped(body, **wgmma_tile.scratch(tiles, dtype, dtype), **extra, collective_axes="wg")
