"""Partial-order reduction: finds events that the model checker needs to try in one order only.

An event commutes if nothing that could still happen without it touches the same places. Every order of events
is then equivalent to one in which that event comes next (a persistent set of one event;
doi:10.1007/3-540-60761-7, chapter 4). To find everything that could happen without the event, the schedule's
control flow (signals and counters) runs with the event held back. Each signal is taken by one rank in the
order of its program, so no choice on the way excludes another.

Example: gathering on a ring of 2 ranks, when both have entered. Rank 0 may run `Send(piece 0)`, which starts
a copy and touches no place: it commutes, and the model checker tries it next and nothing else. In a program
without `Wait`, rank 0 could run `Compute(piece 1)` while the copy of piece 1 could still land: one reads the
place that the other changes, so both orders would be tried. The `Wait` leaves one order.
"""

from typing import Any, NamedTuple

from jtrain_kernels.overlap.schedule import Barrier, Compute, Place, Reduce, Send, Wait
from tests.kernels.overlap.protocol.simulator import Event, Simulator, State


class _Step(NamedTuple):
    """A step of the schedule that happens at one moment.

    kind: `run` (an instruction), `read` (the source of a copy), `land` (a copy) or `enter` (a rank).
    actor: rank for `run` and `enter`, number of the copy for `read` and `land`.
    counter: index of the instruction for `run`, 0 for `read` and `land`, -1 for `enter`.
    """

    kind: str
    actor: int
    counter: int


class Commuting:
    """Finds commuting events in the states of one schedule."""

    def __init__(self, simulator: Simulator[Any]) -> None:
        self._simulator = simulator
        self._programs = simulator.schedule.programs
        self._num_ranks = simulator.schedule.num_ranks
        self._touched: dict[_Step, dict[Any, bool]] = {}

    def first(self, state: State, events: list[Event]) -> Event | None:
        """One of the events that commute; None if there is no such event."""
        next_steps = {event: self._next_step(state, event) for event in events}
        for event in events:  # events that touch nothing need no search
            if not self._touches(next_steps[event]):
                return event
        # The search below walks the whole rest of the schedule, so cheap events go first.
        for event in events:
            if not self._meets(state, next_steps[event]):
                return event
        return None

    def _meets(self, state: State, held: _Step) -> bool:
        """True if a step that could happen without `held` conflicts with it."""
        run = _Run(self._simulator, state, held)
        touched = self._touches(held)
        return any(_conflict(touched, self._touches(possible_step)) for possible_step in run.everything())

    def _next_step(self, state: State, event: Event) -> _Step:
        rank = event.where
        # Numbers from num_ranks on are copies; a copy is read first and lands later.
        if rank >= self._num_ranks:
            number = rank - self._num_ranks
            return _Step("land" if self._simulator.has_been_read(state, number) else "read", number, 0)
        counter = state.counters[rank]
        return _Step("enter" if counter < 0 else "run", rank, counter)

    def _touches(self, step: _Step) -> dict[Any, bool]:
        # Cached per step: it depends on the program alone, and the checker asks in every state.
        """Places (rank, place), and ranks that enter -> True if the step changes them."""
        if step not in self._touched:
            self._touched[step] = self._find_touched(step)
        return self._touched[step]

    def _find_touched(self, step: _Step) -> dict[Any, bool]:
        if step.kind == "enter":
            return {step.actor: True}
        if step.kind == "run":
            rank, instruction = step.actor, self._programs[step.actor][step.counter]
            if isinstance(instruction, Compute):
                return {(rank, Place("shard", instruction.piece)): False, (rank, instruction.into): True}
            if isinstance(instruction, Reduce):
                return {(rank, instruction.slot): True, (rank, instruction.into): True}
            return {}
        sender, send = self._simulator.sends[step.actor]
        if step.kind == "read":
            return {(sender, send.source): False}
        # A landing depends on its receiver having entered, so it conflicts with that rank's `enter`.
        return {(send.peer, send.target): True, send.peer: False}


class _Run:
    """Run of the schedule's signals and counters without the step `held`."""

    def __init__(self, simulator: Simulator[Any], state: State, held: _Step) -> None:
        self._simulator = simulator
        self._programs = simulator.schedule.programs
        self._held = held
        self._state = state
        self._counters, self._signals = list(state.counters), list(state.signals)
        self._done: list[_Step] = []

    def everything(self) -> list[_Step]:
        """All steps that could happen while `held` does not."""
        for number in self._state.flights:
            self._copy(number, self._simulator.has_been_read(self._state, number))
        has_moved = True
        # Rounds over all ranks until none can move: a signal of a later rank may free an earlier one.
        while has_moved:
            has_moved = False
            for rank in range(len(self._programs)):
                while self._step(rank):
                    has_moved = True
        return self._done

    def _copy(self, number: int, was_read: bool) -> None:
        sender, send = self._simulator.sends[number]
        # A copy that has not been read still has both events ahead of it, and the sender's "sent" signal.
        if not was_read:
            read = _Step("read", number, 0)
            if read == self._held:
                return
            self._done.append(read)
            self._signals[self._simulator.signal(sender, send.source, "sent", send.peer)] += 1
        # If the landing is held, its receiver never gets "arrived", and nothing after that Wait can happen.
        land = _Step("land", number, 0)
        if land != self._held:
            self._done.append(land)
            self._signals[self._simulator.signal(send.peer, send.target, "arrived", sender)] += 1

    def _step(self, rank: int) -> bool:
        """Runs one instruction of a rank; False if the rank cannot go on."""
        counter = self._counters[rank]
        if counter == len(self._programs[rank]):
            return False
        step = _Step("enter" if counter < 0 else "run", rank, counter)
        if step == self._held:
            return False
        if counter >= 0:
            instruction = self._programs[rank][counter]
            if isinstance(instruction, Barrier) and any(
                self._counters[peer] < 0 for peer in instruction.peers
            ):
                return False
            # Taking the signal is the only choice, since each signal has one taker.
            if isinstance(instruction, Wait):
                index = self._simulator.signal(rank, instruction.place, instruction.until, instruction.peer)
                if not self._signals[index]:
                    return False
                self._signals[index] -= 1
            elif isinstance(instruction, Send):
                self._copy(self._simulator.send_number[rank, counter], False)
        self._done.append(step)
        self._counters[rank] += 1
        return True


def _conflict(first: dict[Any, bool], second: dict[Any, bool]) -> bool:
    return any(key in second and (changes or second[key]) for key, changes in first.items())
