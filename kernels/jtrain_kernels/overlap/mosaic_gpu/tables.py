"""Tables of a fused GPU kernel: a schedule split into the work of computing and of sending blocks.

On a GPU a rank is not one program but a grid of blocks. A schedule's program is split into two streams, each
in the schedule's order. They synchronise through counters in memory, one per row of tiles or per tile:

| stream | made of | waits for |
|---|---|---|
| jobs (computing blocks) | Compute with the Reduces and the Send of the same sum | its rows and slots |
| moves (sending blocks) | Sends of gathered rows | its rows |

A job keeps its sum in registers from the first product to the send, so the schedule's accumulators need no
memory here and nobody waits for "sent".

Example: matmul_reduce_scatter on a ring of 3 ranks; the job table of rank 0 has the rows

    piece  peer  slot  slots
        1     2     0  none   computed here first, into slot 0 of rank 2
        2     2     1  0      plus what arrived in slot 0, into slot 1 of rank 2
        0    -1    -1  1      plus slot 1: its own piece, into the output

and there are no moves. all_gather_matmul on that ring has jobs for the pieces 0, 2, 1 without slots, and the
moves 0 -> 1 and 2 -> 1: each piece is passed on once, but piece 1, which has come all the way around.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np

from jtrain_kernels.overlap.mosaic_gpu.tile_shapes import CANDIDATES, DTYPES, TileConfig, does_not_fit
from jtrain_kernels.overlap.schedule import Barrier, Compute, OverlapSchedule, Place, Reduce, Send, Wait

OWN = -1
"""Stands for a peer if the sum stays in this rank's output."""


@dataclasses.dataclass(frozen=True)
class PieceJob:
    """Computes `x[rows of piece] @ kernel` plus the sums in `slots`, into `slot` of `peer` or this rank's
    output.
    """

    piece: int
    slots: tuple[int, ...] = ()
    peer: int = OWN
    slot: int = OWN


@dataclasses.dataclass(frozen=True)
class Move:
    """Copies a piece, as soon as it has arrived, into the same place of a peer."""

    piece: int
    peer: int


@dataclasses.dataclass(frozen=True)
class GpuProgram:
    """Streams of every rank; all ranks have equally many jobs and equally many moves.

    jobs, moves: [rank][turn].
    """

    schedule: OverlapSchedule
    jobs: tuple[tuple[PieceJob, ...], ...]
    moves: tuple[tuple[Move, ...], ...]

    @property
    def max_slots(self) -> int:
        """Maximum number of slots that a job adds."""
        return max(len(job.slots) for jobs in self.jobs for job in jobs)

    @property
    def offsets(self) -> tuple[int, ...]:
        """(peer - rank) % num_ranks for all peers that a rank writes to."""
        size = self.schedule.num_ranks
        both = zip(self.jobs, self.moves, strict=True)
        peers = (
            (rank, turn.peer) for rank, streams in enumerate(both) for stream in streams for turn in stream
        )
        # Moves of `keeping_own` go to the rank itself and need no peer; OWN is no rank.
        return tuple(sorted({(peer - rank) % size for rank, peer in peers if peer not in (OWN, rank)}))

    def keeping_own(self) -> "GpuProgram":
        """Program that ends with moves of each rank's own pieces to itself: the gathered x is one array."""
        pieces_per_rank = self.schedule.pieces_per_rank
        # Last, so that no peer waits for a copy that only this rank needs.
        moves = tuple(
            (
                *moves,
                *(Move(piece, rank) for piece in range(rank * pieces_per_rank, (rank + 1) * pieces_per_rank)),
            )
            for rank, moves in enumerate(self.moves)
        )
        return dataclasses.replace(self, moves=moves)

    def job_table(self) -> np.ndarray:
        """Table int32 [rank, turn, 4 + max_slots]: piece, peer, slot of the peer, number of slots, slots."""
        max_slots = self.max_slots
        return _table(
            # Rows of equal length: unused slots are 0, and the kernel reads only as many as the count says.
            (
                (j.piece, j.peer, j.slot, len(j.slots), *j.slots, *(0,) * (max_slots - len(j.slots)))
                for j in jobs
            )
            for jobs in self.jobs
        )

    def move_table(self) -> np.ndarray:
        """Table int32 [rank, turn, 2]: piece, peer. At least one turn, which is unused if there is no
        move.
        """
        # An array without elements has no address; with 0 moves nobody reads this row.
        return _table(((m.piece, m.peer) for m in moves or (Move(0, 0),)) for moves in self.moves)


def _table(ranks: Iterable[Iterable[tuple[int, ...]]]) -> np.ndarray:
    return np.asarray([list(turns) for turns in ranks], np.int32)


def gpu_program(schedule: OverlapSchedule) -> GpuProgram:
    """Splits a schedule into the two streams of every rank."""
    streams = [_streams(schedule, rank) for rank in range(schedule.num_ranks)]
    # Tables have one row per rank and a fixed number of turns, and the kernel is compiled once for all.
    jobs, moves = tuple(jobs for jobs, _ in streams), tuple(moves for _, moves in streams)
    for stream in (jobs, moves):
        assert len({len(turns) for turns in stream}) == 1, "one kernel runs on every rank"
    return GpuProgram(schedule, jobs, moves)


def _streams(schedule: OverlapSchedule, rank: int) -> tuple[tuple[PieceJob, ...], tuple[Move, ...]]:
    jobs: list[PieceJob] = []
    moves: list[Move] = []
    sums: dict[Place, int] = {}  # place of a sum -> index of its job
    for instruction in schedule.programs[rank]:
        match instruction:
            case Barrier():
                pass  # XLA launches no kernel that uses peers' memory before all peers are ready
            case Wait():
                pass  # jobs and moves wait for the rows and slots that they read; for "sent" see the module
            case Compute(piece, into):
                # The job starts at its product; Reduces and the Send of the same sum are folded in.
                sums[into] = len(jobs)
                jobs.append(PieceJob(piece))
            case Reduce(_, slot, into):
                job = jobs[sums[into]]
                jobs[sums[into]] = dataclasses.replace(job, slots=(*job.slots, slot.number))
            # A send from an accumulator ends the job; a send from a shard is a move.
            case Send(_, peer, source, target) if source.kind == "accumulator":
                job_index = sums.pop(source)
                jobs[job_index] = dataclasses.replace(jobs[job_index], peer=peer, slot=target.number)
            case Send(piece, peer, _, _):
                moves.append(Move(piece, peer))
    return tuple(jobs), tuple(moves)


@dataclasses.dataclass(frozen=True)
class OverlapConfig:
    """Tiling of a fused kernel.

    tiles: tiles of the matmul.
    sending_blocks: blocks of a rank that send; 0 where the schedule has no moves, as for reduce-scatter.
    """

    tiles: TileConfig
    sending_blocks: int = 8


def default_config(program: GpuProgram, m: int, n: int, k: int, sending_blocks: int = 8) -> OverlapConfig:
    """Largest tiles that fit; three stages instead of four where partial sums are read through shared memory.

    Args:
      program: program of the op.
      m: rows of one sequence, of all ranks together.
      n, k: columns of the result and contracted size, of one device.
      sending_blocks: number of sending blocks if the schedule has moves.
    """
    # Three stages leave room in shared memory for the tile of partial sums.
    stages, rows = (3 if program.max_slots else 4), m // program.schedule.num_pieces
    candidates = [dataclasses.replace(tiles, stages=stages) for tiles in CANDIDATES]
    fits = [tiles for tiles in candidates if does_not_fit(rows, n, k, DTYPES[0], tiles) is None]
    # If none fits, the first is returned for the error message of `op_does_not_fit`.
    return OverlapConfig((fits or candidates)[0], sending_blocks if program.moves[0] else 0)


def op_does_not_fit(
    program: GpuProgram, m: int, n: int, k: int, dtype: str, num_cores: int, config: OverlapConfig
) -> str | None:
    """Reason why a tiling does not fit an op, one sentence; None if it fits.

    Args:
      program: program of the op.
      m: rows of one sequence, of all ranks together (gathered, or before they are scattered).
      n, k: columns of the result and contracted size, of one device.
      dtype: dtype of x and the kernel.
      num_cores: cores of one rank.
      config: the tiling.
    """
    pieces = program.schedule.num_pieces
    if m % pieces:
        return f"{m} rows do not split into {pieces} pieces"
    if reason := does_not_fit(m // pieces, n, k, dtype, config.tiles):
        return f"for each of {pieces} pieces {reason}" if reason.startswith("m=") else reason
    # At least one block must be left to multiply.
    if program.moves[0] and not 0 < config.sending_blocks < num_cores:
        return (
            f"sending_blocks={config.sending_blocks} must be above 0 and below the {num_cores} blocks of "
            "a rank"
        )
    return None
