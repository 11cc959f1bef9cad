"""Checks that a schedule computes each gradient once and always ends.

`check` refuses a schedule that a user wrote; the message names the worker, the operation and why. It then
derives the instructions and passes their messages: a channel holds the messages of one kind (activations or
cotangents) from one worker to another, at most `capacity` of them. A send waits for room, a receive waits for
its own message (messages carry their virtual stage and microbatch, so they may be taken in any order).

Workers are deterministic, only the sender fills a channel and only the receiver empties it, so whatever can
go on stays possible until it is done. All interleavings therefore end alike, and one of them decides whether
there is a deadlock.
"""

import collections
from collections.abc import Iterable

from jtrain.errors import UserError
from jtrain.pipeline.instructions import PipelineProgram, WorkerInstruction, make_program
from jtrain.pipeline.schedule import PipelineSchedule, StageOp


def check(schedule: PipelineSchedule, *, capacity: int | None = None) -> PipelineProgram:
    """Checks a schedule; returns its program.

    Args:
      capacity: messages that a channel holds; None if it never waits for room, as in lockstep, where what
        arrives has a slot of its own.

    Raises:
      UserError: the first operation or instruction that is wrong, with its worker and why.
    """
    if capacity is not None and capacity < 1:
        raise UserError(
            f"capacity={capacity} must be at least 1: a channel holds a message between send and receive."
        )
    # In this order: each check relies on the ones before it.
    _check_numbers(schedule)
    _check_each_once(schedule)
    _check_order(schedule)
    program = make_program(schedule)
    if stuck := _stuck_workers(program, capacity):
        # The lowest worker that waits; the others are listed, since a deadlock is a ring of them.
        worker, instruction, reason = stuck[0]
        other_waits = ", ".join(
            f"worker {p} at {waiting_instruction}" for p, waiting_instruction, _ in stuck[1:]
        )
        and_others = f" Also waiting: {other_waits}." if other_waits else ""
        raise _refuse(schedule, worker, instruction, f"it waits for ever: {reason}.{and_others}")
    return program


def needed_capacity(schedule: PipelineSchedule) -> int:
    """Smallest capacity of the channels with which a valid schedule ends."""
    program = make_program(schedule)
    # A channel never holds more messages than one step sends.
    max_messages = schedule.microbatches * schedule.chunks
    return next(capacity for capacity in range(1, max_messages + 1) if not _stuck_workers(program, capacity))


def _refuse(schedule: PipelineSchedule, worker: int, subject: object, reason: str) -> UserError:
    return UserError(f"schedule {schedule.name}, worker {worker}, {subject}: {reason}")


def _check_numbers(schedule: PipelineSchedule) -> None:
    """Each operation is of a virtual stage that its worker holds, and of a microbatch that exists."""
    if len(schedule.streams) != schedule.stages:
        raise UserError(
            f"schedule {schedule.name} has {len(schedule.streams)} workers, but stages={schedule.stages}. "
            "Give one row of operations per stage."
        )
    for worker, stream in enumerate(schedule.streams):
        held = [schedule.stage(worker, chunk) for chunk in range(schedule.chunks)]
        for op in stream:
            if op.stage not in held:
                holder = f"does not exist: there are {schedule.virtual_stages}, from 0"
                if op.stage < schedule.virtual_stages:
                    holder = f"is held by worker {schedule.worker(op.stage)}"
                raise _refuse(
                    schedule, worker, op, f"virtual stage {op.stage} {holder}; this worker holds {held}."
                )
            if op.microbatch >= schedule.microbatches:
                reason = f"there are {schedule.microbatches} microbatches, from 0."
                raise _refuse(schedule, worker, op, reason)


def _check_each_once(schedule: PipelineSchedule) -> None:
    """Each virtual stage has one F per microbatch, and one B or one I and one W."""
    for worker, stream in enumerate(schedule.streams):
        op_counts = collections.Counter(stream)
        for op, times in op_counts.items():
            if times > 1:
                raise _refuse(
                    schedule, worker, op, f"it is there {times} times; each gradient must be added once."
                )
        for chunk in range(schedule.chunks):
            stage = schedule.stage(worker, chunk)
            for m in range(schedule.microbatches):
                _check_passes(schedule, worker, op_counts, stage, m)


def _check_passes(
    schedule: PipelineSchedule, worker: int, ops: Iterable[StageOp], stage: int, m: int
) -> None:
    forward, unsplit, by_input, by_weight = (StageOp(kind, stage, m) for kind in ("F", "B", "I", "W"))
    if forward not in ops:
        raise _refuse(
            schedule, worker, forward, "it is missing: every microbatch passes every virtual stage."
        )
    # B is I and W at once: either of them beside it would add the gradient twice.
    if unsplit in ops:
        for half in (by_input, by_weight):
            if half in ops:
                raise _refuse(schedule, worker, half, f"{unsplit} has the same gradient; keep one of them.")
    elif by_input not in ops and by_weight not in ops:
        raise _refuse(schedule, worker, unsplit, f"it is missing, and so are {by_input} and {by_weight}.")
    elif by_input not in ops or by_weight not in ops:
        present, missing = (by_weight, by_input) if by_weight in ops else (by_input, by_weight)
        raise _refuse(
            schedule, worker, missing, f"it is missing, but {present} is there; a split pass needs both."
        )


def _check_order(schedule: PipelineSchedule) -> None:
    """On each worker, whatever an operation needs of the same worker comes before it."""
    for worker, stream in enumerate(schedule.streams):
        position = {op: i for i, op in enumerate(stream)}
        for i, op in enumerate(stream):
            for need in schedule.needs(op):
                # -1: what another worker computes is a message and is checked with the instructions.
                if position.get(need, -1) > i:
                    raise _refuse(schedule, worker, op, f"it needs {need}, which comes later on this worker.")


def _stuck_workers(
    program: PipelineProgram, capacity: int | None
) -> list[tuple[int, WorkerInstruction, str]]:
    """Passes messages until no worker can go on; returns those that wait, with instruction and reason."""
    channels: dict[tuple[int, int, str], set[tuple[int, int | None]]] = collections.defaultdict(set)
    position = [0] * len(program.workers)

    def current(worker: int) -> WorkerInstruction | None:
        instructions = program.workers[worker]
        return instructions[position[worker]] if position[worker] < len(instructions) else None

    def blocked(worker: int, step: WorkerInstruction) -> str | None:
        """Returns the reason why a send or receive must wait; None if it can run."""
        if step.peer is None:
            return None
        # F for activations and B for cotangents: each kind has a channel of its own.
        letter = step.kind[-1]
        if step.kind.startswith("SEND"):
            # Without a capacity a send never waits, so only receives can be stuck.
            if capacity is None or len(channels[worker, step.peer, letter]) < capacity:
                return None
            return f"its channel to worker {step.peer} holds capacity={capacity} messages that are not taken"
        if (_sender(step), step.microbatch) in channels[step.peer, worker, letter]:
            return None
        return f"worker {step.peer} does not send {_sender(step)}SEND_{letter}{step.microbatch} before"

    # Rounds over all workers until none can move: the order of workers does not change the end.
    moved = True
    while moved:
        moved = False
        for worker in range(len(position)):
            while (step := current(worker)) is not None and blocked(worker, step) is None:
                if step.peer is not None and step.kind.startswith("SEND"):
                    channels[worker, step.peer, step.kind[-1]].add((step.stage, step.microbatch))
                elif step.peer is not None:
                    # By its own name: a message is found whatever was sent before it.
                    channels[step.peer, worker, step.kind[-1]].remove((_sender(step), step.microbatch))
                position[worker] += 1
                moved = True
    stuck = ((worker, step) for worker in range(len(position)) if (step := current(worker)) is not None)
    return [(worker, step, blocked(worker, step) or "") for worker, step in stuck]


def _sender(receive: WorkerInstruction) -> int:
    """Virtual stage that computes what a receive takes."""
    return receive.stage - 1 if receive.kind == "RECV_F" else receive.stage + 1
