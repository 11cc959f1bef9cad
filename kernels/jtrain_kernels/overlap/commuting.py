"""Which events need be tried in one order only.

An event commutes if whatever could still happen without it touches nothing that it touches: then every order of events
is as good as one in which it comes next (a persistent set of one event; doi:10.1007/3-540-60761-7, chapter 4). What
could happen without it is found by running the schedule's control, signals and counters, with the event held back: each
signal is taken by one rank in its program's order, so no choice made on the way shuts out anything.
"""

from typing import Any, NamedTuple

from jtrain_kernels.overlap.machine import Event, Machine, State
from jtrain_kernels.overlap.schedule import Barrier, Compute, Place, Reduce, Release, Send, Wait


class _Doing(NamedTuple):
    """A part of the schedule that happens at one moment.

    what: `run` an instruction, by rank and counter; `read` a copy's source or `land` it, by number and 0; `enter`, by
      rank and -1.
    """

    what: str
    who: int
    counter: int


class Commuting:
    """Asked of the states of one schedule."""

    def __init__(self, machine: Machine[Any]) -> None:
        self._machine = machine
        self._programs = machine.schedule.programs
        self._num_ranks = machine.schedule.num_ranks

    def commutes(self, state: State, event: Event) -> bool:
        """Whether `event` may be taken as the only one to come next."""
        doing = self._doing(state, event)
        touched = self._touches(doing)
        if not touched:
            return True
        return not any(_conflict(touched, self._touches(other)) for other in self._without(state, doing))

    def _doing(self, state: State, event: Event) -> _Doing:
        rank = event.where
        if rank >= self._num_ranks:
            number = rank - self._num_ranks
            return _Doing("land" if self._machine.has_been_read(state, number) else "read", number, 0)
        counter = state.counters[rank]
        return _Doing("enter" if counter < 0 else "run", rank, counter)

    def _touches(self, doing: _Doing) -> dict[Any, bool]:
        """Places of ranks, and ranks as they enter -> whether it is changed."""
        if doing.what == "enter":
            return {doing.who: True}
        if doing.what == "run":
            rank, instruction = doing.who, self._programs[doing.who][doing.counter]
            if isinstance(instruction, Compute):
                return {(rank, Place("shard", instruction.piece)): False, (rank, instruction.into): True}
            if isinstance(instruction, Reduce):
                return {(rank, instruction.slot): True, (rank, instruction.into): True}
            return {instruction.peer: False} if isinstance(instruction, Release) else {}
        sender, send = self._machine.sends[doing.who]
        if doing.what == "read":
            return {(sender, send.source): False}
        return {(send.peer, send.target): True, send.peer: False}

    def _without(self, state: State, held: _Doing) -> set[_Doing]:
        """Everything that could happen while `held` does not."""
        machine = self._machine
        counters, signals = list(state.counters), list(state.signals)
        done: set[_Doing] = set()

        def copy(number: int, was_read: bool) -> None:
            sender, send = machine.sends[number]
            if not was_read:
                if (read := _Doing("read", number, 0)) == held:
                    return
                done.add(read)
                signals[machine.signal(sender, send.source, "sent", send.peer)] += 1
            if (land := _Doing("land", number, 0)) != held:
                done.add(land)
                signals[machine.signal(send.peer, send.target, "arrived", sender)] += 1

        def step(rank: int) -> bool:
            counter = counters[rank]
            if counter == len(self._programs[rank]):
                return False
            doing = _Doing("enter" if counter < 0 else "run", rank, counter)
            if doing == held:
                return False
            if counter >= 0:
                instruction = self._programs[rank][counter]
                if isinstance(instruction, Barrier) and any(counters[peer] < 0 for peer in instruction.peers):
                    return False
                if isinstance(instruction, Wait):
                    index = machine.signal(rank, instruction.place, instruction.until, instruction.peer)
                    if not signals[index]:
                        return False
                    signals[index] -= 1
                elif isinstance(instruction, Release):
                    signals[machine.signal(instruction.peer, instruction.slot, "released", rank)] += 1
                elif isinstance(instruction, Send):
                    copy(machine.send_number[rank, counter], False)
            done.add(doing)
            counters[rank] += 1
            return True

        for number in state.flights:
            copy(number, machine.has_been_read(state, number))
        moved = True
        while moved:
            moved = False
            for rank in range(self._num_ranks):
                while step(rank):
                    moved = True
        return done


def _conflict(first: dict[Any, bool], second: dict[Any, bool]) -> bool:
    return any(key in second and (changes or second[key]) for key, changes in first.items())
