"""Schedule of an overlapped collective as data: all that each rank sends, receives and computes, in order.

| op | x | kernel | output of rank r |
|---|---|---|---|
| all_gather_matmul | rows of r, all columns | all rows, columns of r | all rows of `gathered x @ kernel` |
| matmul_reduce_scatter | all rows, columns of r | rows of r | rows of r of `x @ kernel` summed over ranks |

A swizzle gives each piece a tree of ranks, rooted at its owner. Gathering sends the piece from the root down;
reducing adds partial sums from the leaves up to the root. One is the transpose of the other, and both come
from the same tree. A rank takes the pieces in the order in which they can reach it.

| swizzle | tree | pieces per rank |
|---|---|---|
| ring | a chain once around | 1 |
| bidirectional | half of the rows each way around | 2 |
| full_mesh | from the owner to each rank directly, at time t to the t-th after it: for a switch | 1 |

A `Place` names a rank's memory by kind and number. `shard` g holds the rows of x of piece g (when gathering,
the rows of other owners arrive there; when reducing, all are present from the start). `slot` receives a
partial sum from another rank. `accumulator` holds a partial sum that is computed here and then sent. `output`
g holds the rows of piece g of the result.

Example: all_gather_matmul on a ring of 3 ranks, one piece per rank. The program of rank 0 is

    Barrier(peers 1, 2)
    Send(piece 0 to 1)        Compute(piece 0)                      its own rows, there from the start
    Wait(piece 2 from 2)      Send(piece 2 to 1)  Compute(piece 2)  passed on, then multiplied
    Wait(piece 1 from 2)      Compute(piece 1)                      rank 1 owns it: the chain ends here
    Wait("sent") for both sends

matmul_reduce_scatter runs the same chain the other way: rank 0 computes piece 1 into accumulator 0 and sends
it to rank 2 (slot 0 there), adds slot 0 to its part of piece 2 and sends that on (slot 1), and at last adds
slot 1 to its own piece 0. Two slots, because each sum that arrives has one to itself.

Sources: doi:10.1145/3567955.3567959 (decomposition into permutes and matmuls), arXiv:2406.06858 and
  arXiv:2503.20313 (signals per tile, rank swizzles).
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Literal, NamedTuple

from jtrain_kernels.errors import UserError
from jtrain_kernels.overlap.swizzle import Swizzle, Trees, make_trees

type OpName = Literal["all_gather_matmul", "matmul_reduce_scatter"]
"""Op that overlaps communication and matrix products."""

OPS: tuple[OpName, ...] = ("all_gather_matmul", "matmul_reduce_scatter")


class Place(NamedTuple):
    """Memory of one rank for one piece."""

    kind: Literal["shard", "slot", "accumulator", "output"]
    number: int


@dataclasses.dataclass(frozen=True)
class Barrier:
    """Waits until all ranks that this one exchanges pieces with have entered; before, their memory may be in
    use.
    """

    peers: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Send:
    """Starts to copy a piece into a peer's memory, without waiting for the copy.

    Once the piece has arrived, the peer's `Wait(target, "arrived", this rank)` may pass; once `source` has
    been read, this rank's `Wait(source, "sent", peer)` may pass.
    """

    piece: int
    peer: int
    source: Place
    target: Place


@dataclasses.dataclass(frozen=True)
class Wait:
    """Consumes one signal, waiting for it if necessary.

    arrived: the piece that `peer` sent is in `place`.
    sent: the copy from `place` to `peer` has read its source, so the place may be written.
    """

    place: Place
    until: Literal["arrived", "sent"]
    peer: int


@dataclasses.dataclass(frozen=True)
class Compute:
    """`into = x[rows of piece] @ kernel`."""

    piece: int
    into: Place


@dataclasses.dataclass(frozen=True)
class Reduce:
    """`into += slot`."""

    piece: int
    slot: Place
    into: Place


type ScheduleInstruction = Barrier | Send | Wait | Compute | Reduce
"""Instruction of one rank."""


@dataclasses.dataclass(frozen=True)
class OverlapSchedule:
    """One program per rank; the programs of all ranks have the same kinds of instructions in the same order.

    pieces_per_rank: pieces of each shard.
    num_slots, num_accumulators: places of each kind per rank.
    """

    op: OpName
    swizzle: Swizzle
    num_ranks: int
    pieces_per_rank: int
    num_slots: int
    num_accumulators: int
    programs: tuple[tuple[ScheduleInstruction, ...], ...]

    @property
    def num_pieces(self) -> int:
        """Number of pieces of all ranks together."""
        return self.num_ranks * self.pieces_per_rank

    def owner(self, piece: int) -> int:
        """The rank whose shard contains the piece."""
        return piece // self.pieces_per_rank

    def rows(self, piece: int, size: int) -> tuple[int, int]:
        """First row of a piece of a matrix of `size` rows, and one past its last.

        Raises:
          UserError: the rows do not split evenly into pieces.
        """
        rows_per_piece = self.piece_rows(size)
        return piece * rows_per_piece, (piece + 1) * rows_per_piece

    def piece_rows(self, size: int) -> int:
        """Rows of each piece.

        Raises:
          UserError: the rows do not split evenly into pieces.
        """
        if size % self.num_pieces:
            below = size - size % self.num_pieces
            raise UserError(
                f"{self.op}: {size} rows do not split evenly into {self.num_ranks} ranks x "
                f"{self.pieces_per_rank} pieces of the swizzle {self.swizzle}. Nearest sizes that do: "
                f"{below or self.num_pieces}, {below + self.num_pieces}; or take another swizzle: ring has "
                "one piece per rank."
            )
        return size // self.num_pieces


type _Steps = list[list[ScheduleInstruction]]


def _gather(trees: Trees, rank: int) -> _Steps:
    """Passes pieces down the trees: takes each piece as it arrives, sends it on at once, then computes with
    it.
    """
    steps: _Steps = []
    # A group is what can have arrived at one time; the order of groups is the order of arrival.
    for group in trees.by_time(rank):
        step: list[ScheduleInstruction] = []
        for piece in group:
            shard = Place("shard", piece)
            parent = trees.parent(rank, piece)
            if parent is not None:
                step.append(Wait(shard, "arrived", parent))
            # Sends before Compute: the copy travels while this rank multiplies.
            step += [Send(piece, child, shard, shard) for child in trees.children(rank, piece)]
            step.append(Compute(piece, Place("output", piece)))
        steps.append(step)
    return steps


def _slots(trees: Trees) -> dict[tuple[int, int], Place]:
    """(sender, piece) -> slot of its parent in which the partial sum lands: each sum has a slot of its
    own.
    """
    slots: dict[tuple[int, int], Place] = {}
    for receiver in range(trees.num_ranks):
        number = itertools.count()
        # Senders by distance, and their pieces in the order they send them: every receiver numbers its slots
        # alike, so one program with relative ranks describes all of them.
        for sender in sorted(range(trees.num_ranks), key=lambda rank: trees.relative(rank, receiver)):
            # Reversed, because a sum moves from the leaves to the root: the farthest piece leaves first.
            for moment in reversed(trees.by_time(sender)):
                for piece in moment:
                    if trees.parent(sender, piece) == receiver:
                        slots[sender, piece] = Place("slot", next(number))
    return slots


class _Accumulators:
    """Round-robin accumulators: before one is written again, its previous sum must have been sent."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._turn = 0
        self._sent_to: dict[int, int] = {}

    def take(self, peer: int) -> tuple[Place, list[ScheduleInstruction]]:
        """Next accumulator, for a sum that will be sent to `peer`, and the waits that come first."""
        index = self._turn % self._count
        self._turn += 1
        accumulator, previous_peer = Place("accumulator", index), self._sent_to.get(index)
        self._sent_to[index] = peer
        # The first round needs no wait: nothing has been sent from this accumulator yet.
        return accumulator, [] if previous_peer is None else [Wait(accumulator, "sent", previous_peer)]


def _reduce(
    trees: Trees, rank: int, slots: Mapping[tuple[int, int], Place], accumulators: _Accumulators
) -> _Steps:
    """Passes sums up the trees: computes a partial sum while those of others travel, adds them, sends the
    total on.

    A rank's own pieces come last.
    """
    # Latest group first: the pieces that have the longest way to their owner are computed first.
    steps: _Steps = []
    for group in reversed(trees.by_time(rank)):
        step: list[ScheduleInstruction] = []
        for piece in group:
            parent = trees.parent(rank, piece)
            into = Place("output", piece)
            if parent is not None:
                # Only sums that leave need an accumulator; the own piece is summed in the output.
                into, waits = accumulators.take(parent)
                step += waits
            step.append(Compute(piece, into))
            # The reverse of gathering order; float32 sums depend on it, so it is part of the result.
            for child in reversed(trees.children(rank, piece)):
                slot = slots[child, piece]
                step += [Wait(slot, "arrived", child), Reduce(piece, slot, into)]
            if parent is not None:
                # After the last Reduce, as the peer may read a complete sum only.
                step.append(Send(piece, parent, into, slots[rank, piece]))
        steps.append(step)
    return steps


def _complete(trees: Trees, rank: int, steps: _Steps) -> tuple[ScheduleInstruction, ...]:
    """Program of a rank: a barrier, the steps, and waits so that no copy is in flight when the rank
    leaves.
    """
    program = [instruction for step in steps for instruction in step]
    sends = [(i.source, i.peer) for i in program if isinstance(i, Send)]
    drained = [(i.place, i.peer) for i in program if isinstance(i, Wait) and i.until == "sent"]
    # A wait between steps has consumed its send's signal; a second wait for it would hang.
    for copy in drained:
        sends.remove(copy)
    program += [Wait(source, "sent", peer) for source, peer in sends]
    peers = {i.peer for i in program if isinstance(i, Send | Wait)}
    # A single rank exchanges nothing, so it needs no barrier.
    if not peers:
        return tuple(program)
    return (Barrier(tuple(sorted(peers, key=lambda peer: trees.relative(peer, rank)))), *program)


def make_schedule(op: OpName, swizzle: Swizzle, num_ranks: int, *, parts: int = 1) -> OverlapSchedule:
    """Builds the schedule of an op.

    Args:
      parts: number of parts into which each piece is split, for a finer overlap.

    Raises:
      UserError: a count is below 1.
    """
    if num_ranks < 1 or parts < 1:
        raise UserError(f"{op}: num_ranks={num_ranks} and parts={parts} must be at least 1.")
    trees = make_trees(swizzle, num_ranks, parts)
    if op == "all_gather_matmul":
        # Gathered rows land in `shard` places and products in `output`, so nothing else needs memory.
        num_slots = num_accumulators = 0
        steps = [_gather(trees, rank) for rank in range(num_ranks)]
    else:
        slots = _slots(trees)
        num_slots = max((slot.number + 1 for slot in slots.values()), default=0)
        # Two accumulators per piece index: one is sent from while the next one is computed.
        num_accumulators = 0 if num_ranks == 1 else 2 * trees.pieces_per_rank
        steps = [_reduce(trees, rank, slots, _Accumulators(num_accumulators)) for rank in range(num_ranks)]
    programs = tuple(_complete(trees, rank, steps[rank]) for rank in range(num_ranks))
    return OverlapSchedule(
        op, swizzle, num_ranks, trees.pieces_per_rank, num_slots, num_accumulators, programs
    )
