"""One call of a fused kernel: its sizes, and where its pieces lie in which array."""

import dataclasses
from typing import Any

from jax import lax

from jtrain_kernels.overlap.fabric import Fabric
from jtrain_kernels.overlap.gpu_program import GpuProgram, OverlapConfig


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of one call: what every block computes its tiles from.

    rows, columns: tiles of a piece; `of_one` of its rows are of one sequence.
    steps: stages of a tile. width: columns of what travels.
    jobs, moves, arrivals: turns of the program's streams.
    """

    rows: int
    of_one: int
    columns: int
    steps: int
    width: int
    jobs: int
    moves: int
    arrivals: int

    @property
    def tiles(self) -> int:
        return self.rows * self.columns

    def row(self, piece: Any, row: Any, pieces: int) -> Any:
        """Where a piece's row of tiles is in an array [sequences, rows of `pieces` pieces], in tiles of rows."""
        sequence, within = lax.div(row, self.of_one), lax.rem(row, self.of_one)
        return (sequence * pieces + piece) * self.of_one + within


@dataclasses.dataclass(frozen=True)
class Call:
    """What every block of a call knows from the start.

    blocks: of one rank.
    """

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

    @property
    def counter_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of each block of rows of each piece, and of each tile of each slot: warpgroups that delivered their part."""
        schedule, sizes = self.program.schedule, self.sizes
        return (schedule.num_pieces, sizes.rows), (max(schedule.num_slots, 1), sizes.rows, sizes.columns)

    def own_row(self, piece: Any, row: Any) -> Any:
        """Of a piece that is this rank's, in an array of only these."""
        each = self.program.schedule.pieces_per_rank
        return self.sizes.row(lax.rem(piece, each), row, each)

    def row(self, piece: Any, row: Any) -> Any:
        """Of any piece, in an array of all."""
        return self.sizes.row(piece, row, self.program.schedule.num_pieces)

    def owner(self, piece: Any) -> Any:
        return lax.div(piece, self.program.schedule.pieces_per_rank)
