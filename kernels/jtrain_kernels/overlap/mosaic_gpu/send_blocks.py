"""The sending blocks of a fused kernel: they pass gathered rows on as they are.

Example: rows of 4096 bfloat16 numbers, tiles of 128 rows. A box is 32 rows x 256 columns, 16 KiB; a row of
tiles is 4 x 16 = 64 boxes, of which the three warpgroups copy 22, 21 and 21. With four buffers each they take
192 of the 227 KiB of shared memory. The receiver's counter of the row is complete at 3, one signal per
warpgroup.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jtrain_kernels.overlap.mosaic_gpu.launch_params import Call
from jtrain_kernels.overlap.mosaic_gpu.peer_access import when
from jtrain_kernels.overlap.mosaic_gpu.tile_shapes import THREADS

SENDERS = THREADS
"""Warpgroups of a sending block; each copies its share of a row of tiles."""

BOX_ROWS, BOX_COLUMNS, BOXES, AHEAD = 32, 256, 4, 2
"""Copies of a sender: rows and maximum columns of one box, boxes in flight, and boxes that are being read."""


def send(call: Call, block: Any, x: Any, moves: Any, inbox: Any, arrived_rows: Any) -> None:
    """Executes this block's share of the moves: in every move, each `sending_blocks`-th row of tiles from
    `block` on.

    Args:
      call: constants of the call.
      block: index among the sending blocks of this rank.
      x: this rank's rows.
      moves: move table of the program.
      inbox: gathered rows of all ranks.
      arrived_rows: counters of arrived rows, one per row of tiles of each piece.
    """
    sizes, peers = call.sizes, call.peers
    rank, wg = peers.rank(), lax.axis_index("wg")
    mine = peers.mine(inbox)
    # The widest box that divides the rows: TMA takes at most 256 elements per dimension.
    columns = next(c for c in (BOX_COLUMNS, 128, 64) if sizes.width % c == 0)
    rows_of_boxes = call.config.tiles.tile_m // BOX_ROWS
    boxes = rows_of_boxes * (sizes.width // columns)
    # Warpgroups share a row of tiles box by box: ceil((boxes - wg) / SENDERS) each.
    share = lax.div(boxes - wg + SENDERS - 1, SENDERS)
    # Blocks share the rows of tiles of a piece in the same way.
    mine_chunks = lax.div(sizes.rows - block + call.config.sending_blocks - 1, call.config.sending_blocks)

    def body(box_smem: Any, box_barrier: Any) -> None:
        def copy(piece: Any, row: Any, peer: Any, is_own: Any) -> None:
            def box(first: Any, i: Any) -> tuple[Any, Any]:
                number = wg + i * SENDERS
                # Down first: consecutive boxes are other rows of the same columns.
                down, across = lax.rem(number, rows_of_boxes), lax.div(number, rows_of_boxes)
                start = first * call.config.tiles.tile_m + down * BOX_ROWS
                return pl.ds(start, BOX_ROWS), pl.ds(across * columns, columns)

            inbox_row = call.row(piece, row)

            def read(i: Any) -> None:
                buffer = wg * BOXES + lax.rem(i, BOXES)

                def copy_from(ref: Any, first: Any) -> None:
                    plgpu.copy_gmem_to_smem(
                        ref.at[box(first, i)], box_smem.at[buffer], box_barrier.at[buffer]
                    )

                shard_row = call.own_row(piece, row)
                # A piece that this rank passes on was gathered into the inbox by its predecessor.
                when(is_own, lambda: copy_from(x, shard_row), lambda: copy_from(mine, inbox_row))

            # AHEAD reads are in flight before the first box is written.
            @pl.loop(0, jnp.minimum(share, AHEAD))
            def _begin(i: Any) -> None:
                read(i)

            @pl.loop(0, share)
            def _box(i: Any) -> None:
                @pl.when(i + AHEAD < share)
                def _next() -> None:
                    # The buffer that is read next must have been written out: at most BOXES - AHEAD - 1
                    # younger writes may remain.
                    plgpu.wait_smem_to_gmem(BOXES - AHEAD - 1, wait_read_only=True)
                    read(i + AHEAD)

                buffer = wg * BOXES + lax.rem(i, BOXES)
                plgpu.barrier_wait(box_barrier.at[buffer])

                def copy_to(ref: Any) -> None:
                    plgpu.copy_smem_to_gmem(box_smem.at[buffer], ref.at[box(inbox_row, i)])

                pl.when(peer == rank)(lambda: copy_to(mine))  # only with keep_gathered
                pl.when(peer != rank)(lambda: peers.to_peer(copy_to, inbox, peer, call.program.offsets))

            # Signal after the writes: the peer reads the rows as soon as its counter is full.
            plgpu.wait_smem_to_gmem(0)

            @pl.when(peer != rank)
            def _arrived() -> None:
                peers.signal(arrived_rows, (piece, row), peer)

        @pl.loop(0, sizes.moves)
        def _move(turn: Any) -> None:
            piece, peer = moves[rank, turn, 0], moves[rank, turn, 1]
            is_own = call.owner(piece) == rank

            # A block has every sending_blocks-th row of tiles, so the first rows of a piece go out first.
            @pl.loop(0, mine_chunks)
            def _rows(i: Any) -> None:
                row = block + i * call.config.sending_blocks
                # This rank's own rows are there from the start.
                pl.when(~is_own)(lambda: peers.wait(arrived_rows, (piece, row), SENDERS))
                copy(piece, row, peer, is_own)

    pl.run_scoped(
        body,
        # Buffers of all three warpgroups side by side; `buffer` above picks one.
        box_smem=plgpu.SMEM((SENDERS * BOXES, BOX_ROWS, columns), x.dtype),
        box_barrier=plgpu.Barrier(num_arrivals=1, num_barriers=SENDERS * BOXES),
        collective_axes="wg",
    )
