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

from jtrain_kernels.device import DeviceSpec
from jtrain_kernels.overlap import hopper
from jtrain_kernels.overlap.fabric import Fabric, when
from jtrain_kernels.overlap.gpu_program import OWN, GpuProgram
from jtrain_kernels.overlap.hopper import WARPGROUPS, TileConfig

SENDERS = WARPGROUPS + 1
"""Warpgroups of a sending block; each copies its share of a block of rows."""

BOX_ROWS, BOX_COLUMNS, BOXES, AHEAD = 32, 256, 4, 2
"""A sender's copies: rows and most columns of one; how many are in flight, and how many of them are being read."""


@dataclasses.dataclass(frozen=True)
class OverlapConfig:
    """How a fused kernel is cut.

    tiles: of the matmul; None: `default_tiles`.
    sending_blocks: of the grid; 0 where the schedule has no moves, as for reduce-scatter.
    """

    tiles: TileConfig
    sending_blocks: int = 8


def default_config(program: GpuProgram, sending_blocks: int = 8) -> OverlapConfig:
    """Four stages, or three where partial sums are read back through shared memory as well."""
    return OverlapConfig(TileConfig(stages=3 if program.max_slots else 4), sending_blocks if program.moves[0] else 0)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of one call: what every block computes its tiles from; rows and columns in tiles."""

    rows: int
    columns: int
    steps: int
    width: int
    jobs: int
    moves: int
    arrivals: int

    @property
    def tiles(self) -> int:
        return self.rows * self.columns


def unsupported(
    device: DeviceSpec, program: GpuProgram, m: int, n: int, k: int, dtype: str, config: OverlapConfig
) -> str | None:
    """Why there is no kernel, one sentence; None if there is one.

    Args:
      device: of every rank.
      program: of the op.
      m: rows of x of all ranks together (gathered, or before they are scattered).
      n, k: columns of the result and length of the sum, of one device.
      dtype: of x and the kernel.
      config: see there.
    """
    if m % program.schedule.num_pieces:
        return f"{m} rows do not split into {program.schedule.num_pieces} pieces"
    piece = m // program.schedule.num_pieces
    if reason := hopper.unsupported(device, piece, n, k, dtype, config.tiles):
        return f"of each of the {program.schedule.num_pieces} pieces {reason}" if "m=" in reason else reason
    if program.moves[0] and not 0 < config.sending_blocks < (device.num_cores or 0) // 2:
        return f"sending_blocks={config.sending_blocks} must be above 0 and below half of {device.num_cores} cores"
    return None


def fused(
    program: GpuProgram,
    fabric: Fabric,
    x: jax.Array,
    kernel: jax.Array,
    *,
    device: DeviceSpec,
    config: OverlapConfig | None = None,
) -> jax.Array:
    """One op of a schedule, on one rank's blocks (or, with `Shared`, on all ranks' at once).

    Args:
      program: `gpu_program(make_schedule(...))`.
      fabric: how ranks reach each other.
      x: [rows, k] of this rank: its shard's rows for all-gather-matmul, all rows otherwise.
      kernel: [k, n] of this rank.
      device: whose cores and shared memory the grid is for.
      config: None: `default_config`.

    Returns:
      [rows, n]: all rows, or for reduce-scatter this rank's.

    Raises:
      ValueError: the chip, dtype or shapes have no kernel, with the reason.
    """
    schedule, config = program.schedule, config or default_config(program)
    gathers = schedule.op == "all_gather_matmul"
    (own_rows, k), n = x.shape[-2:], kernel.shape[-1]
    m = own_rows * schedule.num_ranks if gathers else own_rows
    if reason := unsupported(device, program, m, n, k, str(x.dtype), config):
        raise ValueError(f"{schedule.op}: no mosaic_gpu kernel: {reason}. Choose other tiles, or kernels=xla.")
    piece_rows, tiles = schedule.piece_rows(m), config.tiles
    width = k if gathers else n
    sizes = Sizes(
        rows=piece_rows // tiles.tile_m,
        columns=n // tiles.tile_n,
        steps=k // tiles.tile_k,
        width=width,
        jobs=len(program.jobs[0]),
        moves=len(program.moves[0]),
        arrivals=len(program.arrivals[0]),
    )
    out_rows = m // schedule.num_ranks if schedule.op == "matmul_reduce_scatter" else m
    # What peers write: gathered rows, or the partial sums that land here. An array of none would have no address.
    inbox_rows = m if gathers else max(schedule.num_slots, 1) * piece_rows
    blocks, grid = fabric.blocks(device.num_cores or 0)
    body = _Kernel(program, fabric, config, sizes, blocks)
    out, _ = plgpu.kernel(
        body.run,
        out_type=[
            jax.ShapeDtypeStruct(fabric.shape((out_rows, n)), x.dtype),
            jax.ShapeDtypeStruct(fabric.shape((inbox_rows, width)), x.dtype),
        ],
        grid=(grid,),
        grid_names=("block",),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        kernel_name=f"jtrain_{schedule.op}",
    )(x, kernel, *(jnp.asarray(t()) for t in (program.job_table, program.move_table, program.arrival_table)))
    return out


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
class _Kernel:
    """The kernel's body; every method runs on the GPU."""

    program: GpuProgram
    fabric: Fabric
    config: OverlapConfig
    sizes: Sizes
    blocks: int

    @property
    def gathers(self) -> bool:
        return self.program.schedule.op == "all_gather_matmul"

    @property
    def passes_on(self) -> bool:
        return bool(self.sizes.moves)

    def run(self, x: Any, kernel: Any, jobs: Any, moves: Any, arrivals: Any, out: Any, inbox: Any) -> None:
        pieces, sizes = self.program.schedule.num_pieces, self.sizes
        # Of each block of rows of each piece: warpgroups that have delivered their part of it.
        rows_here = pl.get_global(plgpu.SemaphoreType.REGULAR(self.fabric.shape((pieces, sizes.rows))))
        # Of each tile of each slot: the same.
        slots = max(self.program.schedule.num_slots, 1)
        landed = pl.get_global(plgpu.SemaphoreType.REGULAR(self.fabric.shape((slots, sizes.rows, sizes.columns))))
        x, kernel, out_ = (self.fabric.mine(ref) for ref in (x, kernel, out))
        block, senders = self.fabric.block(self.blocks), self.config.sending_blocks

        def compute() -> None:
            self._compute(block - senders, x, kernel, jobs, out_, inbox, rows_here, landed)

        def send() -> None:
            self._send(block, x, moves, arrivals, out, inbox, rows_here)

        if senders:
            when(block < senders, send, compute)
        else:
            compute()

    def _first_row(self, piece: Any) -> Any:
        """Of a piece among this rank's own rows, in tiles."""
        return lax.rem(piece, self.program.schedule.pieces_per_rank) * self.sizes.rows

    def _owner(self, piece: Any) -> Any:
        return lax.div(piece, self.program.schedule.pieces_per_rank)

    # ------------------------------------------------------------------------------------------- computing blocks

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

                @pl.when(self._owner(at.piece) != rank)
                def _wait() -> None:
                    fabric.wait(rows_here, (at.piece, at.row), SENDERS)

        def load(at: _Tile, step: Any, a_smem: Any, b_smem: Any, barrier: Any) -> None:
            def from_own() -> None:
                first = self._first_row(at.piece) if self.gathers else at.piece * sizes.rows
                hopper.load_a(x, first + at.row, step, tiles, a_smem, barrier)

            def from_inbox() -> None:
                hopper.load_a(inbox_mine, at.piece * sizes.rows + at.row, step, tiles, a_smem, barrier)

            if self.gathers:
                when(self._owner(at.piece) == rank, from_own, from_inbox)
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
            where = (at.row, at.column)

            def keep() -> None:
                first = at.piece if self.program.schedule.op != "matmul_reduce_scatter" else lax.rem(
                    at.piece, self.program.schedule.pieces_per_rank
                )
                rows, columns = hopper.piece_of((first * sizes.rows + at.row, at.column), piece, tiles)
                plgpu.copy_smem_to_gmem(smem, out.at[rows, columns])

            def give() -> None:
                rows, columns = hopper.piece_of((at.slot * sizes.rows + where[0], where[1]), piece, tiles)
                plgpu.copy_smem_to_gmem(smem, fabric.of(inbox, at.peer).at[rows, columns])

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

    # --------------------------------------------------------------------------------------------- sending blocks

    def _send(self, block: Any, x: Any, moves: Any, arrivals: Any, out: Any, inbox: Any, rows_here: Any) -> None:
        sizes, fabric = self.sizes, self.fabric
        rank, wg = fabric.rank(), lax.axis_index("wg")
        place = inbox if self.gathers else out
        mine = fabric.mine(place)
        columns = next(c for c in (BOX_COLUMNS, 128, 64) if sizes.width % c == 0)
        rows_of_boxes = self.config.tiles.tile_m // BOX_ROWS
        boxes = rows_of_boxes * (sizes.width // columns)
        share = lax.div(boxes - wg + SENDERS - 1, SENDERS)
        mine_chunks = lax.div(sizes.rows - block + self.config.sending_blocks - 1, self.config.sending_blocks)

        def wait(piece: Any, row: Any, is_own: Any) -> None:
            if self.gathers:  # its own rows are there from the start
                pl.when(~is_own)(lambda: fabric.wait(rows_here, (piece, row), SENDERS))
            else:  # what it sums itself is there tile by tile
                value = jnp.where(is_own, WARPGROUPS * sizes.columns, SENDERS)
                fabric.wait(rows_here, (piece, row), value)

        def body(box_smem: Any, box_barrier: Any) -> None:
            def copy(piece: Any, row: Any, peer: Any, is_own: Any) -> None:
                def box(first: Any, i: Any) -> tuple[Any, Any]:
                    number = wg + i * SENDERS
                    down, across = lax.rem(number, rows_of_boxes), lax.div(number, rows_of_boxes)
                    start = first * self.config.tiles.tile_m + down * BOX_ROWS
                    return pl.ds(start, BOX_ROWS), pl.ds(across * columns, columns)

                there = piece * sizes.rows + row

                def read(i: Any) -> None:
                    at = wg * BOXES + lax.rem(i, BOXES)

                    def copy_from(ref: Any, first: Any) -> None:
                        plgpu.copy_gmem_to_smem(ref.at[box(first, i)], box_smem.at[at], box_barrier.at[at])

                    if self.gathers:
                        own = self._first_row(piece) + row
                        when(is_own, lambda: copy_from(x, own), lambda: copy_from(mine, there))
                    else:
                        copy_from(mine, there)

                @pl.loop(0, jnp.minimum(share, AHEAD))
                def _begin(i: Any) -> None:
                    read(i)

                @pl.loop(0, share)
                def _box(i: Any) -> None:
                    @pl.when(i + AHEAD < share)
                    def _next() -> None:
                        plgpu.wait_smem_to_gmem(BOXES - AHEAD - 1, wait_read_only=True)
                        read(i + AHEAD)

                    at = wg * BOXES + lax.rem(i, BOXES)
                    plgpu.barrier_wait(box_barrier.at[at])
                    plgpu.copy_smem_to_gmem(box_smem.at[at], fabric.of(place, peer).at[box(there, i)])

                plgpu.wait_smem_to_gmem(0)
                fabric.signal(rows_here, (piece, row), peer)

            @pl.loop(0, sizes.moves)
            def _move(turn: Any) -> None:
                piece, peer = moves[rank, turn, 0], moves[rank, turn, 1]
                is_own = self._owner(piece) == rank

                @pl.loop(0, mine_chunks)
                def _rows(i: Any) -> None:
                    row = block + i * self.config.sending_blocks
                    wait(piece, row, is_own)
                    copy(piece, row, peer, is_own)

        pl.run_scoped(
            body,
            box_smem=plgpu.SMEM((SENDERS * BOXES, BOX_ROWS, columns), x.dtype),
            box_barrier=plgpu.Barrier(num_arrivals=1, num_barriers=SENDERS * BOXES),
            collective_axes="wg",
        )
        if not self.gathers:  # nobody computes with what arrives, so it is waited for here

            @pl.loop(0, sizes.arrivals)
            def _arrival(turn: Any) -> None:
                @pl.loop(0, mine_chunks)
                def _rows(i: Any) -> None:
                    row = block + i * self.config.sending_blocks
                    fabric.wait(rows_here, (arrivals[rank, turn], row), SENDERS)
