"""Simulator of a schedule: executes its instructions one event at a time, in any order that hardware may
choose.

Ranks run in parallel. A copy has two events of its own: its source is read, then it lands; both happen at any
time after the `Send`. The caller chooses the type of values: arrays for the executor, symbols for the model
checker.
"""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

from jtrain_kernels.overlap.schedule import (
    Barrier,
    Compute,
    OverlapSchedule,
    Place,
    Reduce,
    ScheduleInstruction,
    Send,
    Wait,
)


class Fault(enum.Enum):
    """Faults of a protocol."""

    DEADLOCK = "every rank that has not finished waits"
    OVERWRITTEN = "a place was written that still held something needed"
    TOO_EARLY = "a place was read, or a rank's memory written, before it was ready"
    LOST_SIGNAL = "a signal was never taken, or came to a rank that had left"
    WRONG_RESULT = "an output is not what it should be"


class ProtocolError(Exception):
    """A schedule fails in some order of events."""

    def __init__(self, fault: Fault, what: str) -> None:
        super().__init__(f"{fault.value}: {what}")
        self.fault = fault


@dataclasses.dataclass(frozen=True)
class Algebra[V]:
    """Operations on values.

    shard: (rank, piece) -> rows of x that the rank has from the start.
    compute: (rank, piece, rows of x that arrived, or None where the rank's own x has them) -> rows of the
      output.
    add: sum of two partial sums.
    """

    shard: Callable[[int, int], V]
    compute: Callable[[int, int, V | None], V]
    add: Callable[[V, V], V]


type _Signal = tuple[int, Place, str, int]
"""(rank that waits, place, until, peer), the fields of its `Wait`."""


class State(NamedTuple):
    """State of all ranks; hashable if values are.

    counters: index of each rank's next instruction; -1 before the rank has entered.
    memory: value in each place of each rank, and the value that each copy in flight has read; None where
      empty.
    signals: signals that were given and not yet taken.
    flights: numbers of the copies in flight.
    """

    counters: tuple[int, ...]
    memory: tuple[Any, ...]
    signals: tuple[int, ...]
    flights: frozenset[int]


class Event(NamedTuple):
    """Possible next event; `where` is a rank, or num_ranks plus the number of a copy."""

    where: int


class Simulator[V]:
    """Transition system of one schedule.

    sends: (rank, send) of every copy; the index is the number of the copy.
    send_number: (rank, counter of the send) -> number of the copy.
    """

    def __init__(self, schedule: OverlapSchedule, algebra: Algebra[V]) -> None:
        self.schedule = schedule
        self._algebra = algebra
        self._gathers = schedule.op == "all_gather_matmul"
        self._programs = schedule.programs
        self._num_ranks = schedule.num_ranks
        self.sends: list[tuple[int, Send]] = []
        self.send_number: dict[tuple[int, int], int] = {}  # (rank, counter) -> number of the copy
        # A place, or the number of a copy -> index in memory.
        self._cell: dict[tuple[int, Place] | int, int] = {}
        self._signal: dict[_Signal, int] = {}
        for rank, program in enumerate(self._programs):
            for counter, instruction in enumerate(program):
                self._number(rank, counter, instruction)

    def _number(self, rank: int, counter: int, instruction: ScheduleInstruction) -> None:
        """Assigns an index to every place and signal that the instruction touches."""
        places: list[tuple[int, Place]] = []
        signals: list[_Signal] = []
        if isinstance(instruction, Wait):
            signals.append((rank, instruction.place, instruction.until, instruction.peer))
        elif isinstance(instruction, Send):
            number = self.send_number[rank, counter] = len(self.sends)
            self.sends.append((rank, instruction))
            self._cell[number] = len(self._cell)
            places += [(rank, instruction.source), (instruction.peer, instruction.target)]
            signals.append((rank, instruction.source, "sent", instruction.peer))
            signals.append((instruction.peer, instruction.target, "arrived", rank))
        elif isinstance(instruction, Compute):
            places += [(rank, Place("shard", instruction.piece)), (rank, instruction.into)]
        elif isinstance(instruction, Reduce):
            places += [(rank, instruction.slot), (rank, instruction.into)]
        for place in places:
            self._cell.setdefault(place, len(self._cell))
        for signal in signals:
            self._signal.setdefault(signal, len(self._signal))

    def start(self) -> State:
        """Initial state, before any rank has entered."""
        memory: list[V | None] = [None] * len(self._cell)
        if self._gathers:
            for piece in range(self.schedule.num_pieces):
                rank = self.schedule.owner(piece)
                if (rank, Place("shard", piece)) in self._cell:
                    memory[self._cell[rank, Place("shard", piece)]] = self._algebra.shard(rank, piece)
        return State((-1,) * self._num_ranks, tuple(memory), (0,) * len(self._signal), frozenset())

    def value(self, state: State, rank: int, place: Place) -> V | None:
        """Value in a place of a rank; None where empty."""
        cell = self._cell.get((rank, place))
        return None if cell is None else state.memory[cell]

    def is_finished(self, state: State) -> bool:
        """True if all ranks have left and no copy is in flight.

        Raises:
          ProtocolError: all have finished, but some signal was never taken.
        """
        if state.flights or not all(self._has_left(state, rank) for rank in range(self._num_ranks)):
            return False
        for (rank, place, until, peer), index in self._signal.items():
            if state.signals[index]:
                raise ProtocolError(
                    Fault.LOST_SIGNAL, f"rank {rank} never took `{until}` of {_name(place)}, {peer=}"
                )
        return True

    def events(self, state: State) -> list[Event]:
        """All events that may happen next."""
        found: list[Event] = []
        for rank, counter in enumerate(state.counters):
            if counter < 0:
                found.append(Event(rank))
            elif not self._has_left(state, rank):
                instruction = self._programs[rank][counter]
                if self._may_run(state, rank, instruction):
                    found.append(Event(rank))
        return found + [Event(self._num_ranks + number) for number in sorted(state.flights)]

    def signal(self, rank: int, place: Place, until: str, peer: int) -> int:
        """Index in `State.signals` of the signal that `rank` waits for."""
        return self._signal[rank, place, until, peer]

    def has_been_read(self, state: State, number: int) -> bool:
        """True if the source of a copy in flight has been read."""
        return state.memory[self._cell[number]] is not None

    def describe(self, state: State, event: Event) -> str:
        """Description of an event, one line."""
        rank = event.where
        if rank >= self._num_ranks:
            number = rank - self._num_ranks
            sender, send = self.sends[number]
            at = "landed" if self.has_been_read(state, number) else "source read"
            return f"{at}: {send}, sent by rank {sender}"
        counter = state.counters[rank]
        return f"rank {rank}: {'enters' if counter < 0 else self._programs[rank][counter]}"

    def happen(self, state: State, event: Event) -> State:
        """State after an event.

        Raises:
          ProtocolError: the event is a fault in this state.
        """
        rank = event.where
        if rank >= self._num_ranks:
            return self._fly(state, rank - self._num_ranks)
        counter = state.counters[rank]
        return self._advance(state if counter < 0 else self._run(state, rank, counter), rank)

    def _has_left(self, state: State, rank: int) -> bool:
        return state.counters[rank] == len(self._programs[rank])

    def _may_run(self, state: State, rank: int, instruction: ScheduleInstruction) -> bool:
        if isinstance(instruction, Wait):
            return (
                state.signals[self.signal(rank, instruction.place, instruction.until, instruction.peer)] > 0
            )
        if isinstance(instruction, Barrier):
            return all(state.counters[peer] >= 0 for peer in instruction.peers)
        return True

    def _run(self, state: State, rank: int, counter: int) -> State:
        instruction = self._programs[rank][counter]
        if isinstance(instruction, Wait):
            return self._signalled(state, (rank, instruction.place, instruction.until, instruction.peer), -1)
        if isinstance(instruction, Send):
            return state._replace(flights=state.flights | {self.send_number[rank, counter]})
        if isinstance(instruction, Compute):
            x = self._read(state, rank, Place("shard", instruction.piece)) if self._gathers else None
            return self._write(
                state, rank, instruction.into, self._algebra.compute(rank, instruction.piece, x)
            )
        if isinstance(instruction, Reduce):
            arrived = self._read(state, rank, instruction.slot)
            total = self._algebra.add(self._read(state, rank, instruction.into), arrived)
            state = self._put(state, self._cell[rank, instruction.slot], None)
            return self._write(state, rank, instruction.into, total)
        return state

    def _advance(self, state: State, rank: int) -> State:
        counters = list(state.counters)
        counters[rank] += 1
        state = state._replace(counters=tuple(counters))
        if self._has_left(state, rank):
            for number in state.flights:
                sender, send = self.sends[number]
                if sender == rank and not self.has_been_read(state, number):
                    what = f"rank {rank} left while {_name(send.source)} was still to be read"
                    raise ProtocolError(Fault.OVERWRITTEN, what)
        return state

    def _fly(self, state: State, number: int) -> State:
        sender, send = self.sends[number]
        wire = state.memory[self._cell[number]]
        if wire is None:
            state = self._put(state, self._cell[number], self._read(state, sender, send.source))
            return self._signalled(state, (sender, send.source, "sent", send.peer), 1)
        self._check_present(state, send.peer, f"piece {send.piece} from rank {sender}")
        if self.value(state, send.peer, send.target) is not None:
            what = f"{_name(send.target)} of rank {send.peer} by piece {send.piece} from rank {sender}"
            raise ProtocolError(Fault.OVERWRITTEN, what)
        state = self._write(state, send.peer, send.target, wire)
        state = self._put(state, self._cell[number], None)._replace(flights=state.flights - {number})
        return self._signalled(state, (send.peer, send.target, "arrived", sender), 1)

    def _check_present(self, state: State, rank: int, what: str) -> None:
        if state.counters[rank] < 0:
            raise ProtocolError(Fault.TOO_EARLY, f"{what} came before rank {rank} had entered")
        if self._has_left(state, rank):
            raise ProtocolError(Fault.LOST_SIGNAL, f"{what} came after rank {rank} had left")

    def _read(self, state: State, rank: int, place: Place) -> V:
        value = state.memory[self._cell[rank, place]]
        if value is None:
            raise ProtocolError(Fault.TOO_EARLY, f"{_name(place)} of rank {rank} was empty when it was read")
        return value

    def _write(self, state: State, rank: int, place: Place, value: V) -> State:
        for number in state.flights:
            sender, send = self.sends[number]
            if sender == rank and send.source == place and not self.has_been_read(state, number):
                what = f"{_name(place)} of rank {rank} was written before it was sent to rank {send.peer}"
                raise ProtocolError(Fault.OVERWRITTEN, what)
        return self._put(state, self._cell[rank, place], value)

    def _put(self, state: State, cell: int, value: V | None) -> State:
        return state._replace(memory=(*state.memory[:cell], value, *state.memory[cell + 1 :]))

    def _signalled(self, state: State, signal: _Signal, change: int) -> State:
        signals = list(state.signals)
        signals[self._signal[signal]] += change
        return state._replace(signals=tuple(signals))


def _name(place: Place) -> str:
    return f"{place.kind} {place.number}"
