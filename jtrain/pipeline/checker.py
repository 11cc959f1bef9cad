"""Checks that a schedule, and the instructions of its workers, compute each gradient once and always end.

`check` refuses a schedule that a user wrote; the message names the worker, the operation and why. It then derives the
instructions and runs `check_program` on them, which models memory slots and messages:

- a channel holds the messages of one kind (activations or cotangents) from one worker to another. It holds at most
  `capacity` of them; a send waits for room, a receive waits for its own message (messages carry their virtual stage and
  microbatch, so they may be taken in any order);
- a slot holds one value, from the instruction that writes it until it is freed.

Workers are deterministic, only the sender fills a channel and only the receiver empties it, so whatever can go on stays
possible until it is done. All interleavings therefore end alike, and one of them decides whether there is a deadlock.
"""

import collections
from collections.abc import Iterable

from jtrain.errors import UserError
from jtrain.pipeline.instructions import Program, Touched, Value, WorkerInstruction, make_program, touched
from jtrain.pipeline.schedule import PipelineSchedule, StageOp


def check(schedule: PipelineSchedule, *, capacity: int | None = None) -> Program:
    """Checks a schedule; returns its program, gathered once per step.

    Args:
      capacity: messages that a channel holds; None if it never waits for room, as in lockstep, where what arrives has
        a slot of its own.

    Raises:
      UserError: the first operation or instruction that is wrong, with its worker and why.
    """
    _check_numbers(schedule)
    _check_each_once(schedule)
    _check_order(schedule)
    program = make_program(schedule)
    check_program(program, capacity=capacity)
    return program


def needed_capacity(schedule: PipelineSchedule) -> int:
    """Smallest capacity of the channels with which a valid schedule ends."""
    program = make_program(schedule)
    low, high = 1, schedule.microbatches * schedule.chunks
    while low < high:
        middle = (low + high) // 2
        try:
            check_program(program, capacity=middle)
        except UserError:
            low = middle + 1
        else:
            high = middle
    return low


def _refuse(schedule: PipelineSchedule, worker: int, what: object, why: str) -> UserError:
    return UserError(f"schedule {schedule.name}, worker {worker}, {what}: {why}")


def _check_numbers(schedule: PipelineSchedule) -> None:
    """Each operation is of a virtual stage that its worker holds, and of a microbatch that exists."""
    if len(schedule.streams) != schedule.stages:
        raise UserError(
            f"schedule {schedule.name} has {len(schedule.streams)} workers, but stages={schedule.stages}. Give one row "
            "of operations per stage."
        )
    for worker, stream in enumerate(schedule.streams):
        held = [schedule.stage(worker, chunk) for chunk in range(schedule.chunks)]
        for op in stream:
            if op.stage not in held:
                holder = f"does not exist: there are {schedule.virtual_stages}, from 0"
                if op.stage < schedule.virtual_stages:
                    holder = f"is held by worker {schedule.worker(op.stage)}"
                raise _refuse(schedule, worker, op, f"virtual stage {op.stage} {holder}; this worker holds {held}.")
            if op.microbatch >= schedule.microbatches:
                why = f"there are {schedule.microbatches} microbatches, from 0."
                raise _refuse(schedule, worker, op, why)


def _check_each_once(schedule: PipelineSchedule) -> None:
    """Each virtual stage has one F per microbatch, and one B or one I and one W."""
    for worker, stream in enumerate(schedule.streams):
        seen = collections.Counter(stream)
        for op, times in seen.items():
            if times > 1:
                raise _refuse(schedule, worker, op, f"it is there {times} times; each gradient must be added once.")
        for chunk in range(schedule.chunks):
            stage = schedule.stage(worker, chunk)
            for m in range(schedule.microbatches):
                _check_passes(schedule, worker, seen, stage, m)


def _check_passes(schedule: PipelineSchedule, worker: int, seen: Iterable[StageOp], stage: int, m: int) -> None:
    forward, whole, by_input, by_weight = (StageOp(kind, stage, m) for kind in ("F", "B", "I", "W"))
    if forward not in seen:
        raise _refuse(schedule, worker, forward, "it is missing: every microbatch passes every virtual stage.")
    if whole in seen:
        for half in (by_input, by_weight):
            if half in seen:
                raise _refuse(schedule, worker, half, f"{whole} has the same gradient; keep one of them.")
    elif by_input not in seen and by_weight not in seen:
        raise _refuse(schedule, worker, whole, f"it is missing, and so are {by_input} and {by_weight}.")
    elif by_input not in seen or by_weight not in seen:
        there, missing = (by_weight, by_input) if by_weight in seen else (by_input, by_weight)
        raise _refuse(schedule, worker, missing, f"it is missing, but {there} is there; a split pass needs both.")


def _check_order(schedule: PipelineSchedule) -> None:
    """On each worker, whatever an operation needs of the same worker comes before it."""
    for worker, stream in enumerate(schedule.streams):
        place = {op: i for i, op in enumerate(stream)}
        for i, op in enumerate(stream):
            for need in schedule.needs(op):
                if place.get(need, -1) > i:
                    raise _refuse(schedule, worker, op, f"it needs {need}, which comes later on this worker.")


def _words(value: Value) -> str:
    """Names a value, such as `the input of 2, microbatch 0`."""
    what = {"inputs": "input", "cotangents": "cotangent", "stashes": "stash"}[value.array]
    return f"the {what} of virtual stage {value.stage}, microbatch {value.microbatch}"


class _Machine:
    """State of all workers while their instructions run.

    values: per worker, (array, slot) -> the value in it. done: instructions that have run.
    """

    def __init__(self, program: Program, capacity: int | None) -> None:
        self.schedule = program.schedule
        self.program = program
        self.capacity = capacity
        self.next = [0] * len(program.workers)
        self.values: list[dict[tuple[str, int], Value]] = [{} for _ in program.workers]
        self.channels: dict[tuple[int, int, str], set[tuple[int, int]]] = collections.defaultdict(set)
        self.sent: set[tuple[str, int, int]] = set()
        self.gathered: set[int] = set()
        self.outputs: dict[tuple[int, str], StageOp] = {}
        self.gradients: collections.Counter[int] = collections.Counter()
        self.reduced: set[int] = set()
        self.updated: set[int] = set()
        self.done: set[StageOp] = set()

    def run(self) -> None:
        """Runs until nobody can go on.

        Raises:
          UserError: an instruction is wrong, or workers wait for ever.
        """
        moved = True
        while moved:
            moved = False
            for worker in range(len(self.next)):
                while (one := self.current(worker)) is not None and self._waits(worker, one) is None:
                    self._run_one(worker, one)
                    self.next[worker] += 1
                    moved = True
        for worker in range(len(self.next)):
            if (one := self.current(worker)) is not None:
                why = self._waits(worker, one)
                raise _refuse(self.schedule, worker, one, f"it waits for ever: {why}.{self._others(worker)}")

    def _others(self, worker: int) -> str:
        waiting = [f"worker {p} at {one}" for p in range(len(self.next)) if p != worker and (one := self.current(p))]
        return f" Also waiting: {', '.join(waiting)}." if waiting else ""

    def current(self, worker: int) -> WorkerInstruction | None:
        """The instruction that a worker runs next; None at its end."""
        program = self.program.workers[worker]
        return program[self.next[worker]] if self.next[worker] < len(program) else None

    def _waits(self, worker: int, one: WorkerInstruction) -> str | None:
        """Returns what a send or receive waits for, in words; None if it can run."""
        if one.kind in ("SEND_F", "SEND_B"):
            assert one.peer is not None
            held = self.channels[worker, one.peer, one.kind[-1]]
            if self.capacity is not None and len(held) >= self.capacity:
                return f"its channel to worker {one.peer} holds capacity={self.capacity} messages that are not taken"
        if one.kind in ("RECV_F", "RECV_B"):
            assert one.peer is not None
            sender = one.stage - 1 if one.kind == "RECV_F" else one.stage + 1
            if (sender, one.microbatch) not in self.channels[one.peer, worker, one.kind[-1]]:
                return f"worker {one.peer} does not send {sender}SEND_{one.kind[-1]}{one.microbatch} before"
        return None

    def _refuse(self, worker: int, one: WorkerInstruction, why: str) -> UserError:
        return _refuse(self.schedule, worker, one, why)

    def _run_one(self, worker: int, one: WorkerInstruction) -> None:
        values = self.values[worker]
        self._check_form(worker, one)
        for value, slot in one.reads:
            if values.get((value.array, slot)) != value:
                holds = values.get((value.array, slot))
                why = "is empty" if holds is None else f"holds {_words(holds)}"
                raise self._refuse(
                    worker, one, f"slot {slot} of {value.array} {why}: not yet written, already freed, or overwritten."
                )
        if one.kind in ("F", "I", "B") and one.stage not in self.gathered:
            raise self._refuse(worker, one, "the weights of its chunk are not gathered.")
        self._communicate(worker, one)
        self._compute(worker, one)
        for value, slot in one.writes:
            if (holds := values.get((value.array, slot))) is not None:
                raise self._refuse(
                    worker, one, f"slot {slot} of {value.array} still holds {_words(holds)}, which is not freed yet."
                )
            values[value.array, slot] = value
        if one.frees is not None:
            value, slot = one.frees
            if values.get((value.array, slot)) != value:
                raise self._refuse(
                    worker, one, f"slot {slot} of {value.array} does not hold it: freed twice, or never written."
                )
            del values[value.array, slot]

    def _check_form(self, worker: int, one: WorkerInstruction) -> None:
        """The instruction is of a chunk of this worker, and touches the values that one of its kind does."""
        if self.schedule.worker(one.stage) != worker:
            raise self._refuse(
                worker, one, f"virtual stage {one.stage} is held by worker {self.schedule.worker(one.stage)}."
            )
        want = Touched() if one.microbatch is None else touched(self.schedule, one.kind, one.stage, one.microbatch)
        reads, writes = (tuple(value for value, _ in found) for found in (one.reads, one.writes))
        if (reads, writes, one.frees and one.frees[0]) != want:
            listed = [", ".join(map(_words, values)) or "nothing" for values in (want.reads, want.writes)]
            frees = "nothing" if want.frees is None else _words(want.frees)
            raise self._refuse(worker, one, f"it should read {listed[0]}; write {listed[1]}; free {frees}.")

    def _communicate(self, worker: int, one: WorkerInstruction) -> None:
        if one.peer is None or one.microbatch is None:
            return
        letter = one.kind[-1]
        if one.kind.startswith("SEND"):
            result = self.outputs.get((worker, letter))
            if result is None or (result.stage, result.microbatch) != (one.stage, one.microbatch):
                raise self._refuse(
                    worker, one, "there is no result to send: not yet computed, or another result took its place."
                )
            if (letter, one.stage, one.microbatch) in self.sent:
                raise self._refuse(worker, one, "it was sent before.")
            self.sent.add((letter, one.stage, one.microbatch))
            self.channels[worker, one.peer, letter].add((one.stage, one.microbatch))
        else:
            sender = one.stage - 1 if letter == "F" else one.stage + 1
            self.channels[one.peer, worker, letter].remove((sender, one.microbatch))

    def _compute(self, worker: int, one: WorkerInstruction) -> None:
        if one.kind in ("F", "I", "W", "B"):
            assert one.microbatch is not None
            op = StageOp(one.kind, one.stage, one.microbatch)
            if op in self.done:
                raise self._refuse(worker, one, "it ran before; each gradient must be added once.")
            self.done.add(op)
            # A worker holds one activation and one cotangent that are not sent yet: the results of its last passes.
            if one.kind != "W":
                self.outputs[worker, "F" if one.kind == "F" else "B"] = op
        if one.kind in ("W", "B"):
            if one.stage in self.reduced:
                raise self._refuse(worker, one, "the gradient of its chunk is already reduced.")
            self.gradients[one.stage] += 1
        elif one.kind == "GATHER":
            if one.stage in self.gathered:
                raise self._refuse(worker, one, "the weights of its chunk are already gathered.")
            self.gathered.add(one.stage)
        elif one.kind == "DROP":
            if one.stage not in self.gathered:
                raise self._refuse(worker, one, "the weights of its chunk are not gathered.")
            self.gathered.remove(one.stage)
        elif one.kind == "REDUCE":
            if self.gradients[one.stage] != self.schedule.microbatches:
                missing = self.schedule.microbatches - self.gradients[one.stage]
                raise self._refuse(
                    worker, one, f"{missing} microbatches of its chunk have no gradient yet, or it is reduced twice."
                )
            self.gradients[one.stage] = 0
            self.reduced.add(one.stage)
        elif one.kind == "UPDATE":
            if one.stage not in self.reduced or one.stage in self.updated:
                raise self._refuse(
                    worker, one, "the gradient of its chunk is not reduced, or the chunk is already updated."
                )
            self.updated.add(one.stage)


def check_program(program: Program, *, capacity: int | None = None) -> None:
    """Runs the instructions of all workers in a model of memory and messages.

    Raises:
      UserError: an instruction that reads what is not there, writes over a value, sends nothing, waits for ever, adds a
        gradient twice, or is missing; or a value that is never freed.
    """
    if capacity is not None and capacity < 1:
        raise UserError(f"capacity={capacity} must be at least 1: a channel holds a message between send and receive.")
    machine = _Machine(program, capacity)
    machine.run()
    schedule = program.schedule
    for (sender, receiver, letter), held in machine.channels.items():
        for stage, m in sorted(held):
            why = f"worker {receiver} never receives it."
            raise _refuse(schedule, sender, f"{stage}SEND_{letter}{m}", why)
    for worker, values in enumerate(machine.values):
        for value in values.values():
            free = {"inputs": "FREE_F", "cotangents": "FREE_B", "stashes": "FREE_W"}[value.array]
            why = f"it is missing: the slot of {value.array} is never freed."
            raise _refuse(schedule, worker, f"{value.stage}{free}{value.microbatch}", why)
    for stage in range(schedule.virtual_stages):
        worker = schedule.worker(stage)
        if stage not in machine.updated:
            raise _refuse(schedule, worker, f"{stage}UPDATE", "it is missing: the chunk keeps its old weights.")
        if stage in machine.gathered:
            raise _refuse(schedule, worker, f"{stage}DROP", "it is missing: the gathered weights are kept for ever.")
        for m in range(schedule.microbatches):
            if StageOp("F", stage, m) not in machine.done:
                raise _refuse(schedule, worker, f"{stage}F{m}", "it is missing.")
