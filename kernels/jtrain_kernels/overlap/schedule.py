"""What every rank of an overlapped collective does, as data: who sends what to whom, and what is computed meanwhile.

A matrix's rows are split into one shard per rank, and each shard into pieces, the unit that is sent, computed and
added. A piece is known by one number, `owner * pieces_per_rank + index`, and is the rows `Schedule.rows` says.

| op | x | kernel | output of rank r |
|---|---|---|---|
| all_gather_matmul | rows of r, all columns | some columns of all its own | all rows: `gathered x @ kernel` |
| matmul_reduce_scatter | all rows, columns of r | rows of r | rows of r of `x @ kernel` summed over ranks |
| matmul_all_reduce | all rows, columns of r | rows of r | all rows of that sum |

A swizzle gives each piece a tree of ranks, rooted at its owner. Gathering sends it from the root down, reducing adds up
from the leaves to the root: one is the other's transpose, and both come from the same tree. In which order a rank takes
the pieces follows from when they can reach it.

| swizzle | tree | pieces per rank |
|---|---|---|
| ring | a chain once around | 1 |
| bidirectional | half of the rows each way around | 2 |
| full_mesh | the owner to each directly, at time t the t-th after it: a switch joins all with all | 1 |
| torus | around one dimension, then from each rank there along the next; both ways, from each dimension | 2 x dims |

Memory of a rank, by name and number (`Place`): `shard` g holds the rows of x of piece g (gathering: those of other
owners arrive; reducing: all are there); `slot` is where a partial sum from another rank lands; `accumulator` is where
one is computed before it leaves; `output` g is the rows of piece g of the result.

Sources: doi:10.1145/3567955.3567959 (decomposition into permutes and matmuls), arXiv:2406.06858 and arXiv:2503.20313
(signals per tile, rank swizzles).
"""

import dataclasses
import itertools
from typing import Literal, NamedTuple

from jtrain_kernels.overlap.swizzle import Swizzle, Trees, make_trees

type OpName = Literal["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]
OPS: tuple[OpName, ...] = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


class Place(NamedTuple):
    """A piece's worth of memory of one rank."""

    kind: Literal["shard", "slot", "accumulator", "output"]
    number: int


@dataclasses.dataclass(frozen=True)
class Barrier:
    """Waits until all ranks that this one exchanges pieces with are here: before, their memory may be in other use."""

    peers: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Send:
    """Begins to copy a piece into a peer's memory and goes on.

    When it is there the peer's `Wait(target, "arrived", this rank)` may pass; when `source` has been read, this rank's
    `Wait(source, "sent", peer)` may.
    """

    piece: int
    peer: int
    source: Place
    target: Place


@dataclasses.dataclass(frozen=True)
class Wait:
    """Takes one signal, waiting for it if need be.

    arrived: what `peer` sent is in `place`.
    sent: what went from `place` to `peer` has been read, so the place may be written.
    released: `peer` no longer needs what lies in `place`, a slot of its own.
    """

    place: Place
    until: Literal["arrived", "sent", "released"]
    peer: int


@dataclasses.dataclass(frozen=True)
class Compute:
    """`into = x[rows of piece] @ kernel`: the tiles of the output that these rows are."""

    piece: int
    into: Place


@dataclasses.dataclass(frozen=True)
class Reduce:
    """`into += slot`."""

    piece: int
    slot: Place
    into: Place


@dataclasses.dataclass(frozen=True)
class Release:
    """Tells `peer`, which filled this rank's `slot`, that it may fill it again."""

    slot: Place
    peer: int


type Instruction = Barrier | Send | Wait | Compute | Reduce | Release


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One program per rank; programs of all ranks have the same kinds of instructions in the same order.

    pieces_per_rank: pieces of each shard.
    num_slots, num_accumulators: of each rank.
    """

    op: OpName
    swizzle: Swizzle
    num_ranks: int
    pieces_per_rank: int
    num_slots: int
    num_accumulators: int
    programs: tuple[tuple[Instruction, ...], ...]

    @property
    def num_pieces(self) -> int:
        """Of all ranks together."""
        return self.num_ranks * self.pieces_per_rank

    def owner(self, piece: int) -> int:
        """The rank whose shard it is."""
        return piece // self.pieces_per_rank

    def rows(self, piece: int, size: int) -> tuple[int, int]:
        """First row of a piece of a matrix of `size` rows, and one past its last.

        Raises:
          ValueError: the rows do not split evenly into pieces.
        """
        each = self.piece_rows(size)
        return piece * each, (piece + 1) * each

    def piece_rows(self, size: int) -> int:
        """Rows of each piece.

        Raises:
          ValueError: the rows do not split evenly into pieces.
        """
        if size % self.num_pieces:
            below = size - size % self.num_pieces
            raise ValueError(
                f"{self.op}: {size} rows do not split evenly into {self.num_ranks} ranks x {self.pieces_per_rank} "
                f"pieces of the swizzle {self.swizzle}. Nearest sizes that do: {below or self.num_pieces}, "
                f"{below + self.num_pieces}; or take another swizzle: ring has one piece per rank."
            )
        return size // self.num_pieces


type _Steps = list[list[Instruction]]


def _gather(trees: Trees, rank: int, pieces: list[int], kind: Literal["shard", "output"], compute: bool) -> _Steps:
    """Down the trees: take each piece as it arrives, pass it on at once, then compute with it."""
    steps: _Steps = []
    for group in trees.by_time(rank, pieces):
        step: list[Instruction] = []
        for piece in group:
            place = Place(kind, piece)
            parent = trees.parent(rank, piece)
            if parent is not None:
                step.append(Wait(place, "arrived", parent))
            step += [Send(piece, child, place, place) for child in trees.children(rank, piece)]
            if compute:
                step.append(Compute(piece, Place("output", piece)))
        steps.append(step)
    return steps


class _Mailboxes:
    """Which slot of its parent each partial sum lands in.

    groups: pieces in the order in which they are reduced.
    rounds: of how many successive moments the partial sums have slots of their own, for each pair of ranks.
    """

    def __init__(self, trees: Trees, groups: list[list[int]], rounds: int | None) -> None:
        self.num_slots = 0
        self._slot: dict[tuple[int, int], int] = {}  # (sender, piece) -> slot of its parent
        self._reuses: set[tuple[int, int]] = set()  # of those, which find a slot that was filled before
        self._reused: set[tuple[int, int]] = set()  # which of them another follows in the same slot
        for receiver in range(trees.num_ranks):
            used = 0
            for sender in sorted(range(trees.num_ranks), key=lambda rank: trees.grid.relative(rank, receiver)):
                moments = [step for pieces in groups for step in reversed(trees.by_time(sender, pieces))]
                sent = [[piece for piece in step if trees.parent(sender, piece) == receiver] for step in moments]
                sent = [step for step in sent if step]
                width = max(map(len, sent), default=0)
                count = len(sent) if rounds is None else min(rounds, len(sent))
                last: dict[int, int] = {}  # slot -> the piece that it held last
                for turn, step in enumerate(sent):
                    for index, piece in enumerate(step):
                        slot = used + turn % count * width + index
                        self._slot[sender, piece] = slot
                        if slot in last:
                            self._reuses.add((sender, piece))
                            self._reused.add((sender, last[slot]))
                        last[slot] = piece
                used += count * width
            self.num_slots = max(self.num_slots, used)

    def slot(self, sender: int, piece: int) -> Place:
        return Place("slot", self._slot[sender, piece])

    def is_second_use(self, sender: int, piece: int) -> bool:
        return (sender, piece) in self._reuses

    def is_used_after(self, sender: int, piece: int) -> bool:
        return (sender, piece) in self._reused


class _Accumulators:
    """Accumulators taken in turn; one that was sent is waited for before it is written again."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._turn = 0
        self._sent_to: dict[int, int] = {}

    def take(self, peer: int) -> tuple[Place, list[Instruction]]:
        """One whose sum will go to `peer`, and what has to be waited for before."""
        index = self._turn % self._count
        self._turn += 1
        place, before = Place("accumulator", index), self._sent_to.get(index)
        self._sent_to[index] = peer
        return place, [] if before is None else [Wait(place, "sent", before)]


def _reduce(trees: Trees, rank: int, pieces: list[int], mailboxes: _Mailboxes, accumulators: _Accumulators) -> _Steps:
    """Up the trees: compute a partial sum while those of others travel, add them, pass it on. Own pieces come last."""
    steps: _Steps = []
    for group in reversed(trees.by_time(rank, pieces)):
        step: list[Instruction] = []
        for piece in group:
            parent = trees.parent(rank, piece)
            into = Place("output", piece)
            if parent is not None:
                into, before = accumulators.take(parent)
                step += before
            step.append(Compute(piece, into))
            for child in reversed(trees.children(rank, piece)):
                slot = mailboxes.slot(child, piece)
                step += [Wait(slot, "arrived", child), Reduce(piece, slot, into)]
                if mailboxes.is_used_after(child, piece):
                    step.append(Release(slot, child))
            if parent is not None:
                target = mailboxes.slot(rank, piece)
                if mailboxes.is_second_use(rank, piece):
                    step.append(Wait(target, "released", parent))
                step.append(Send(piece, parent, into, target))
        steps.append(step)
    return steps


def _merged(first: _Steps, second: _Steps) -> _Steps:
    """Step by step, so that both are under way at the same time."""
    return [a + b for a, b in itertools.zip_longest(first, second, fillvalue=[])]


def _complete(trees: Trees, rank: int, steps: _Steps) -> tuple[Instruction, ...]:
    """With a barrier before, and after it what makes sure that nothing is under way when the rank leaves."""
    program = [instruction for step in steps for instruction in step]
    sends = [(i.source, i.peer) for i in program if isinstance(i, Send)]
    waited = [(i.place, i.peer) for i in program if isinstance(i, Wait) and i.until == "sent"]
    for place in waited:
        sends.remove(place)
    program += [Wait(place, "sent", peer) for place, peer in sends]
    peers = {i.peer for i in program if isinstance(i, Send | Wait)}
    if not peers:
        return tuple(program)
    return (Barrier(tuple(sorted(peers, key=lambda peer: trees.grid.relative(peer, rank)))), *program)


def make_schedule(
    op: OpName,
    swizzle: Swizzle,
    num_ranks: int,
    *,
    torus: tuple[int, ...] = (),
    parts: int = 1,
    slot_rounds: int | None = None,
) -> Schedule:
    """The schedule of an op.

    Args:
      torus: sizes of the torus's dimensions, the last one's neighbours being ranks r and r + 1; only of that swizzle.
      parts: each piece is split into so many, for a finer overlap. An all-reduce sums one part while it gathers the
        one before, so with one part its gathering is not hidden.
      slot_rounds: partial sums that a peer sends one after the other land in so many slots in turn, and it waits until
        one is released. None: each has a slot of its own, and none is ever waited for.

    Raises:
      ValueError: sizes of the torus that do not hold the ranks; a count below 1; a torus with
        slots of one round.
    """
    if num_ranks < 1 or parts < 1 or (slot_rounds is not None and slot_rounds < 1):
        raise ValueError(
            f"{op}: num_ranks={num_ranks}, parts={parts} and slot_rounds={slot_rounds} must be at least 1."
        )
    if swizzle == "torus" and slot_rounds == 1:
        raise ValueError(
            f"{op}: slot_rounds=1 deadlocks on a torus, where what two rings bring meets: each waits for the other's "
            "slot. Set slot_rounds to 2 or more, or to None."
        )
    trees = make_trees(swizzle, num_ranks, torus, parts)
    by_part = [trees.pieces(part) for part in range(parts)]
    everything = sorted(piece for pieces in by_part for piece in pieces)
    gathers = op == "all_gather_matmul"
    groups = by_part if op == "matmul_all_reduce" else [everything]
    mailboxes = _Mailboxes(trees, [] if gathers else groups, slot_rounds)
    num_accumulators = 0 if gathers or num_ranks == 1 else 2 * trees.pieces_per_rank
    programs: list[tuple[Instruction, ...]] = []
    for rank in range(num_ranks):
        if gathers:
            steps = _gather(trees, rank, everything, "shard", compute=True)
        else:
            accumulators = _Accumulators(num_accumulators)
            steps, gathering = [], []
            for pieces in groups:
                steps += _merged(_reduce(trees, rank, pieces, mailboxes, accumulators), gathering)
                if op == "matmul_all_reduce":
                    gathering = _gather(trees, rank, pieces, "output", compute=False)
            steps += gathering
        programs.append(_complete(trees, rank, steps))
    return Schedule(
        op, swizzle, num_ranks, trees.pieces_per_rank, mailboxes.num_slots, num_accumulators, tuple(programs)
    )
