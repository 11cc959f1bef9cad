"""A schedule as the tables that a fused GPU kernel reads: what its computing blocks do, and what its others send.

On a GPU a rank is not one program but a grid of blocks. A schedule's program falls apart into two streams, each in the
schedule's own order; what one needs of the other goes through counters in memory, one per block of rows or tile:

| stream | made of | waits for |
|---|---|---|
| jobs (computing blocks) | Compute with the Reduces and the Send of the same sum | rows and slots that came |
| moves (sending blocks) | Sends of what lies in memory: gathered rows, finished output | the same, or a job |

A job keeps its sum in registers from the first product to the send, so the schedule's accumulators take no memory here
and nobody waits for "sent". A slot is used once per call, so nothing is released either.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np

from jtrain_kernels.overlap.schedule import Barrier, Compute, Place, Reduce, Schedule, Send, Wait
from jtrain_kernels.overlap.tiles import CANDIDATES, DTYPES, TileConfig, does_not_fit

OWN = -1
"""In place of a peer: the sum stays here, in the output."""


@dataclasses.dataclass(frozen=True)
class Job:
    """`x[rows of piece] @ kernel`, plus what landed in `slots`, to `slot` of `peer` or to the own output."""

    piece: int
    slots: tuple[int, ...] = ()
    peer: int = OWN
    slot: int = OWN


@dataclasses.dataclass(frozen=True)
class Move:
    """Copies a piece, as soon as it is here, into the same place of a peer."""

    piece: int
    peer: int


@dataclasses.dataclass(frozen=True)
class GpuProgram:
    """Of every rank; all ranks have as many of each.

    jobs, moves: [rank][turn].
    arrivals: [rank] -> pieces that the rank receives by moves, in order.
    """

    schedule: Schedule
    jobs: tuple[tuple[Job, ...], ...]
    moves: tuple[tuple[Move, ...], ...]
    arrivals: tuple[tuple[int, ...], ...]

    @property
    def max_slots(self) -> int:
        """Most sums that a job adds."""
        return max(len(job.slots) for jobs in self.jobs for job in jobs)

    @property
    def offsets(self) -> tuple[int, ...]:
        """How far after a rank, around, those are that it writes to."""
        size = self.schedule.num_ranks
        both = zip(self.jobs, self.moves, strict=True)
        peers = ((rank, turn.peer) for rank, streams in enumerate(both) for stream in streams for turn in stream)
        return tuple(sorted({(peer - rank) % size for rank, peer in peers if peer not in (OWN, rank)}))

    def keeping_own(self) -> "GpuProgram":
        """With moves of each rank's own pieces to itself, after all others: what was gathered lies in one place."""
        each = self.schedule.pieces_per_rank
        moves = tuple(
            (*moves, *(Move(piece, rank) for piece in range(rank * each, (rank + 1) * each)))
            for rank, moves in enumerate(self.moves)
        )
        return dataclasses.replace(self, moves=moves)

    def job_table(self) -> np.ndarray:
        """int32 [rank, turn, 4 + max_slots]: piece, peer, slot there, number of slots, slots."""
        wide = self.max_slots
        return _table(
            ((j.piece, j.peer, j.slot, len(j.slots), *j.slots, *(0,) * (wide - len(j.slots))) for j in jobs)
            for jobs in self.jobs
        )

    def move_table(self) -> np.ndarray:
        """int32 [rank, turn, 2]: piece, peer. At least one turn, which nobody reads if there is no move."""
        return _table(((m.piece, m.peer) for m in moves or (Move(0, 0),)) for moves in self.moves)

    def arrival_table(self) -> np.ndarray:
        """int32 [rank, turn]: piece. At least one turn."""
        return np.asarray([pieces or (0,) for pieces in self.arrivals], np.int32)


def _table(ranks: Iterable[Iterable[tuple[int, ...]]]) -> np.ndarray:
    return np.asarray([list(turns) for turns in ranks], np.int32)


def gpu_program(schedule: Schedule) -> GpuProgram:
    """The two streams of every rank.

    Raises:
      ValueError: the schedule uses a slot twice.
    """
    if any(isinstance(i, Wait) and i.until == "released" for program in schedule.programs for i in program):
        raise ValueError(
            f"{schedule.op}: the schedule uses slots again, for which a GPU's blocks do not wait. Make it with "
            "slot_rounds=None."
        )
    streams = [_streams(schedule, rank) for rank in range(schedule.num_ranks)]
    jobs, moves, arrivals = (tuple(s[i] for s in streams) for i in range(3))
    program = GpuProgram(schedule, jobs, moves, arrivals)  # pyright: ignore[reportArgumentType]
    for stream in (jobs, moves, arrivals):
        assert len({len(turns) for turns in stream}) == 1, "one kernel runs on every rank"
    return program


def _streams(schedule: Schedule, rank: int) -> tuple[tuple[Job, ...], tuple[Move, ...], tuple[int, ...]]:
    jobs: list[Job] = []
    moves: list[Move] = []
    arrivals: list[int] = []
    sums: dict[Place, int] = {}  # where a sum is -> its job
    for instruction in schedule.programs[rank]:
        match instruction:
            case Barrier():
                pass  # XLA launches no kernel that reaches into peers' memory before all of them are there
            case Wait(place, "arrived", _) if place.kind != "slot":
                arrivals.append(place.number)
            case Wait():
                pass  # a slot's is the Reduce's after it; of "sent", see above
            case Compute(piece, into):
                sums[into] = len(jobs)
                jobs.append(Job(piece))
            case Reduce(_, slot, into):
                job = jobs[sums[into]]
                jobs[sums[into]] = dataclasses.replace(job, slots=(*job.slots, slot.number))
            case Send(_, peer, source, target) if source.kind == "accumulator":
                at = sums.pop(source)
                jobs[at] = dataclasses.replace(jobs[at], peer=peer, slot=target.number)
            case Send(piece, peer, _, _):
                moves.append(Move(piece, peer))
            case _:
                raise AssertionError(instruction)
    return tuple(jobs), tuple(moves), tuple(arrivals)


@dataclasses.dataclass(frozen=True)
class OverlapConfig:
    """How a fused kernel is cut.

    tiles: of the matmul.
    sending_blocks: of the grid; 0 where the schedule has no moves, as for reduce-scatter.
    """

    tiles: TileConfig
    sending_blocks: int = 8


def default_config(program: GpuProgram, m: int, n: int, k: int, sending_blocks: int = 8) -> OverlapConfig:
    """The largest tiles that fit; three stages instead of four where partial sums come back through shared memory.

    Args:
      program: of the op.
      m: rows of one sequence, of all ranks together.
      n, k: columns of the result and length of the sum, of one device.
      sending_blocks: where the schedule has moves.
    """
    stages, rows = (3 if program.max_slots else 4), m // program.schedule.num_pieces
    found = [dataclasses.replace(tiles, stages=stages) for tiles in CANDIDATES]
    fits = [tiles for tiles in found if does_not_fit(rows, n, k, DTYPES[0], tiles) is None]
    return OverlapConfig((fits or found)[0], sending_blocks if program.moves[0] else 0)


def op_does_not_fit(
    program: GpuProgram, m: int, n: int, k: int, dtype: str, num_cores: int, config: OverlapConfig
) -> str | None:
    """Why a cut does not fit an op, one sentence; None if it does.

    Args:
      program: of the op.
      m: rows of one sequence, of all ranks together (gathered, or before they are scattered).
      n, k: columns of the result and length of the sum, of one device.
      dtype: of x and the kernel.
      num_cores: of one rank.
      config: see there.
    """
    pieces = program.schedule.num_pieces
    if m % pieces:
        return f"{m} rows do not split into {pieces} pieces"
    if reason := does_not_fit(m // pieces, n, k, dtype, config.tiles):
        return f"each of {pieces} pieces has {reason}" if reason.startswith("m=") else reason
    if program.moves[0] and not 0 < config.sending_blocks < num_cores:
        return f"sending_blocks={config.sending_blocks} must be above 0 and below the {num_cores} blocks of a rank"
    return None
