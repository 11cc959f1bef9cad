"""An exhaustive check of a schedule: every order of events that hardware may choose, for a few ranks.

Values are symbols: which piece, and the partial sums of which ranks. Of orders that differ only in events that commute
one is looked at (`commuting`), or all, which a few ranks already make millions.
"""

import dataclasses
from typing import NamedTuple

from jtrain_kernels.overlap.commuting import Commuting
from jtrain_kernels.overlap.machine import Algebra, Event, Fault, Machine, ProtocolError, State
from jtrain_kernels.overlap.schedule import Place, Schedule


class Symbol(NamedTuple):
    """Rows of x of a piece where `ranks` is empty, else the partial sums of those ranks of these rows of the output."""

    piece: int
    ranks: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Checked:
    """A schedule that can go wrong in no order of events.

    states: how many were visited.
    """

    states: int


@dataclasses.dataclass(frozen=True)
class Broken:
    """A schedule that can go wrong.

    events: an order of events that ends in the fault, one line each.
    """

    fault: Fault
    why: str
    events: tuple[str, ...]


def check(schedule: Schedule, *, reduced: bool = True, max_states: int = 1_000_000) -> Checked | Broken:
    """Visits every state of a schedule that can matter.

    Args:
      reduced: leave out orders that differ only in events that commute.

    Raises:
      ValueError: there are more than `max_states`.
    """
    machine = Machine(schedule, _algebra())
    commuting = Commuting(machine)
    start = machine.start()
    came_from: dict[State, tuple[State, Event] | None] = {start: None}
    waiting = [start]
    while waiting:
        state = waiting.pop()
        events = machine.events(state)
        last: Event | None = None
        alone = commuting.first(state, events) if reduced else None
        try:
            if not events:
                _check_end(machine, state)
            for event in events if alone is None else [alone]:
                last = event
                after = machine.happen(state, event)
                if after not in came_from:
                    came_from[after] = (state, event)
                    waiting.append(after)
        except ProtocolError as error:
            lines = _history(machine, came_from, state)
            if last is not None:
                lines.append(machine.describe(state, last))
            return Broken(error.fault, str(error), tuple(lines))
        if len(came_from) > max_states:
            raise ValueError(
                f"{schedule.op}, {schedule.swizzle}, {schedule.num_ranks} ranks: more than {max_states} states. Check "
                "fewer ranks or parts, or raise max_states."
            )
    return Checked(len(came_from))


def _check_end(machine: Machine[Symbol], state: State) -> None:
    schedule = machine.schedule
    if not machine.is_finished(state):
        stuck = [
            f"rank {rank} at {program[counter]}"
            for rank, (program, counter) in enumerate(zip(schedule.programs, state.counters, strict=True))
            if counter < len(program)
        ]
        raise ProtocolError(Fault.DEADLOCK, "; ".join(stuck))
    gathers = schedule.op == "all_gather_matmul"
    for rank in range(schedule.num_ranks):
        ranks = frozenset({rank}) if gathers else frozenset(range(schedule.num_ranks))
        for piece in range(schedule.num_pieces):
            if schedule.op == "matmul_reduce_scatter" and schedule.owner(piece) != rank:
                continue
            found = machine.value(state, rank, Place("output", piece))
            if found != Symbol(piece, ranks):
                raise ProtocolError(Fault.WRONG_RESULT, f"output {piece} of rank {rank} is {found}")


def _algebra() -> Algebra[Symbol]:
    def compute(rank: int, piece: int, x: Symbol | None) -> Symbol:
        if x is not None and x != Symbol(piece, frozenset()):
            raise ProtocolError(Fault.WRONG_RESULT, f"rank {rank} took {x} for the rows of piece {piece}")
        return Symbol(piece, frozenset({rank}))

    def add(a: Symbol, b: Symbol) -> Symbol:
        if a.piece != b.piece or a.ranks & b.ranks:
            raise ProtocolError(Fault.WRONG_RESULT, f"{a} and {b} were added")
        return Symbol(a.piece, a.ranks | b.ranks)

    return Algebra(lambda rank, piece: Symbol(piece, frozenset()), compute, add)


def _history(
    machine: Machine[Symbol],
    came_from: dict[State, tuple[State, Event] | None],
    state: State,
) -> list[str]:
    lines: list[str] = []
    before = came_from[state]
    while before is not None:
        lines.append(machine.describe(*before))
        before = came_from[before[0]]
    return lines[::-1]
