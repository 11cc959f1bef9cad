"""Parameters of one call of a fused kernel: its sizes, and the positions of pieces in its arrays."""

import dataclasses
from typing import Any

from jax import lax

from jtrain_kernels.overlap.mosaic_gpu.peer_access import PeerAccess
from jtrain_kernels.overlap.mosaic_gpu.tables import GpuProgram, OverlapConfig


@dataclasses.dataclass(frozen=True)
class LaunchSizes:
    """Sizes of one call, from which every block computes its tiles.

    rows, columns: rows and columns of tiles in a piece.
    tile_rows_per_sequence: rows of tiles of a piece that belong to one sequence.
    steps: stages of a tile.
    width: columns of the rows that are sent.
    jobs, moves: turns of the program's two streams.
    """

    rows: int
    tile_rows_per_sequence: int
    columns: int
    steps: int
    width: int
    jobs: int
    moves: int

    @property
    def tiles(self) -> int:
        return self.rows * self.columns

    def row(self, piece: Any, row: Any, pieces: int) -> Any:
        """Row of tiles of a piece, as an index in an array [sequences, rows of tiles of `pieces` pieces].

        Example: 2 sequences of 3 pieces, 4 rows of tiles of a piece per sequence. Row 5 of piece 1 is row 1
        of sequence 1: index (1 * 3 + 1) * 4 + 1 = 17.
        """
        sequence, row_in_sequence = (
            lax.div(row, self.tile_rows_per_sequence),
            lax.rem(row, self.tile_rows_per_sequence),
        )
        return (sequence * pieces + piece) * self.tile_rows_per_sequence + row_in_sequence


@dataclasses.dataclass(frozen=True)
class Call:
    """Constants of a call, the same in every block.

    blocks: blocks of one rank.
    """

    program: GpuProgram
    peers: PeerAccess
    config: OverlapConfig
    sizes: LaunchSizes
    blocks: int

    @property
    def gathers(self) -> bool:
        return self.program.schedule.op == "all_gather_matmul"

    @property
    def counter_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the counters of delivered parts: per piece's row of tiles, and per slot's tile."""
        schedule, sizes = self.program.schedule, self.sizes
        # At least one slot: an array without elements would have no address.
        return (schedule.num_pieces, sizes.rows), (max(schedule.num_slots, 1), sizes.rows, sizes.columns)

    def own_row(self, piece: Any, row: Any) -> Any:
        """Index of a row of tiles of one of this rank's pieces, in an array of this rank's pieces only."""
        pieces_per_rank = self.program.schedule.pieces_per_rank
        return self.sizes.row(lax.rem(piece, pieces_per_rank), row, pieces_per_rank)

    def row(self, piece: Any, row: Any) -> Any:
        """Index of a row of tiles of any piece, in an array that holds all pieces."""
        return self.sizes.row(piece, row, self.program.schedule.num_pieces)

    def owner(self, piece: Any) -> Any:
        return lax.div(piece, self.program.schedule.pieces_per_rank)
