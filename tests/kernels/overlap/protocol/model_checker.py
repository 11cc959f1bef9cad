"""Model checker: verifies a schedule in every order of events that hardware may choose, for a few ranks.

Values are symbols: the piece, and the ranks whose partial sums are in it. Among orders that differ only in
events that commute, one is checked (`partial_order.py`); checking all of them takes millions of states even
for a few ranks.
"""

import dataclasses
from typing import NamedTuple

from jtrain_kernels.errors import UserError
from jtrain_kernels.overlap.schedule import OverlapSchedule, Place
from tests.kernels.overlap.protocol.partial_order import Commuting
from tests.kernels.overlap.protocol.simulator import Algebra, Event, Fault, ProtocolError, Simulator, State


class Symbol(NamedTuple):
    """Symbolic rows of a piece: rows of x if `ranks` is empty, else rows of the output summed over those
    ranks.
    """

    piece: int
    ranks: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Checked:
    """Result of a schedule that is correct in every order of events.

    states: number of states visited.
    """

    states: int


@dataclasses.dataclass(frozen=True)
class Broken:
    """Result of a schedule that can fail.

    events: a counterexample, the events that lead to the fault, one line each.
    """

    fault: Fault
    why: str
    events: tuple[str, ...]


def check(
    schedule: OverlapSchedule, *, reduced: bool = True, max_states: int = 1_000_000
) -> Checked | Broken:
    """Visits every state of a schedule that can reveal a fault.

    Args:
      reduced: skip orders that differ only in events that commute.

    Raises:
      UserError: there are more than `max_states` states.
    """
    simulator = Simulator(schedule, _algebra())
    commuting = Commuting(simulator)
    start = simulator.start()
    came_from: dict[State, tuple[State, Event] | None] = {start: None}
    waiting = [start]
    while waiting:
        state = waiting.pop()
        events = simulator.events(state)
        last: Event | None = None
        alone = commuting.first(state, events) if reduced else None
        try:
            if not events:
                _check_end(simulator, state)
            for event in events if alone is None else [alone]:
                last = event
                after = simulator.happen(state, event)
                if after not in came_from:
                    came_from[after] = (state, event)
                    waiting.append(after)
        except ProtocolError as error:
            lines = _history(simulator, came_from, state)
            if last is not None:
                lines.append(simulator.describe(state, last))
            return Broken(error.fault, str(error), tuple(lines))
        if len(came_from) > max_states:
            raise UserError(
                f"{schedule.op}, {schedule.swizzle}, {schedule.num_ranks} ranks: more than {max_states} "
                "states. Check fewer ranks or parts, or raise max_states."
            )
    return Checked(len(came_from))


def _check_end(simulator: Simulator[Symbol], state: State) -> None:
    schedule = simulator.schedule
    if not simulator.is_finished(state):
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
            if not gathers and schedule.owner(piece) != rank:
                continue
            found = simulator.value(state, rank, Place("output", piece))
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
    simulator: Simulator[Symbol],
    came_from: dict[State, tuple[State, Event] | None],
    state: State,
) -> list[str]:
    lines: list[str] = []
    before = came_from[state]
    while before is not None:
        lines.append(simulator.describe(*before))
        before = came_from[before[0]]
    return lines[::-1]
