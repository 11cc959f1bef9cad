"""A schedule as the tables that a fused GPU kernel reads: what its computing blocks do, and what its others send.

On a GPU a rank is not one program but a grid of blocks. A schedule's program falls apart into two streams, each in the
schedule's own order; what one needs of the other goes through counters in memory, one per block of rows or tile:

| stream | made of | waits for |
|---|---|---|
| jobs (computing blocks) | Compute with the Reduces and the Send of the same sum | rows that arrived, slots that landed |
| moves (sending blocks) | Sends of what lies in memory: gathered rows, finished output | the same, or a job of its own |

A job keeps its sum in registers from the first product to the send, so the schedule's accumulators take no memory here
and nobody waits for "sent". A slot is used once per call, so nothing is released either.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np

from jtrain_kernels.overlap.schedule import Barrier, Compute, Place, Reduce, Schedule, Send, Wait

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
            "slots_per_channel=None."
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
