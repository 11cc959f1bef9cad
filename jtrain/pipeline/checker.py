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
    _check_numbers(schedule)
    _check_each_once(schedule)
    _check_order(schedule)
    program = make_program(schedule)
    if waiting := _waiting(program, capacity):
        worker, one, why = waiting[0]
        others = ", ".join(f"worker {p} at {other}" for p, other, _ in waiting[1:])
        also = f" Also waiting: {others}." if others else ""
        raise _refuse(schedule, worker, one, f"it waits for ever: {why}.{also}")
    return program


def needed_capacity(schedule: PipelineSchedule) -> int:
    """Smallest capacity of the channels with which a valid schedule ends."""
    program = make_program(schedule)
    most = schedule.microbatches * schedule.chunks
    return next(capacity for capacity in range(1, most + 1) if not _waiting(program, capacity))


def _refuse(schedule: PipelineSchedule, worker: int, what: object, why: str) -> UserError:
    return UserError(f"schedule {schedule.name}, worker {worker}, {what}: {why}")


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
                why = f"there are {schedule.microbatches} microbatches, from 0."
                raise _refuse(schedule, worker, op, why)


def _check_each_once(schedule: PipelineSchedule) -> None:
    """Each virtual stage has one F per microbatch, and one B or one I and one W."""
    for worker, stream in enumerate(schedule.streams):
        seen = collections.Counter(stream)
        for op, times in seen.items():
            if times > 1:
                raise _refuse(
                    schedule, worker, op, f"it is there {times} times; each gradient must be added once."
                )
        for chunk in range(schedule.chunks):
            stage = schedule.stage(worker, chunk)
            for m in range(schedule.microbatches):
                _check_passes(schedule, worker, seen, stage, m)


def _check_passes(
    schedule: PipelineSchedule, worker: int, seen: Iterable[StageOp], stage: int, m: int
) -> None:
    forward, whole, by_input, by_weight = (StageOp(kind, stage, m) for kind in ("F", "B", "I", "W"))
    if forward not in seen:
        raise _refuse(
            schedule, worker, forward, "it is missing: every microbatch passes every virtual stage."
        )
    if whole in seen:
        for half in (by_input, by_weight):
            if half in seen:
                raise _refuse(schedule, worker, half, f"{whole} has the same gradient; keep one of them.")
    elif by_input not in seen and by_weight not in seen:
        raise _refuse(schedule, worker, whole, f"it is missing, and so are {by_input} and {by_weight}.")
    elif by_input not in seen or by_weight not in seen:
        there, missing = (by_weight, by_input) if by_weight in seen else (by_input, by_weight)
        raise _refuse(
            schedule, worker, missing, f"it is missing, but {there} is there; a split pass needs both."
        )


def _check_order(schedule: PipelineSchedule) -> None:
    """On each worker, whatever an operation needs of the same worker comes before it."""
    for worker, stream in enumerate(schedule.streams):
        place = {op: i for i, op in enumerate(stream)}
        for i, op in enumerate(stream):
            for need in schedule.needs(op):
                if place.get(need, -1) > i:
                    raise _refuse(schedule, worker, op, f"it needs {need}, which comes later on this worker.")


def _waiting(program: PipelineProgram, capacity: int | None) -> list[tuple[int, WorkerInstruction, str]]:
    """Passes messages until nobody can go on; returns each worker that waits, its instruction and what that
    needs.
    """
    channels: dict[tuple[int, int, str], set[tuple[int, int | None]]] = collections.defaultdict(set)
    place = [0] * len(program.workers)

    def current(worker: int) -> WorkerInstruction | None:
        instructions = program.workers[worker]
        return instructions[place[worker]] if place[worker] < len(instructions) else None

    def blocked(worker: int, one: WorkerInstruction) -> str | None:
        """What a send or receive waits for, in words; None if it can run."""
        if one.peer is None:
            return None
        letter = one.kind[-1]
        if one.kind.startswith("SEND"):
            if capacity is None or len(channels[worker, one.peer, letter]) < capacity:
                return None
            return f"its channel to worker {one.peer} holds capacity={capacity} messages that are not taken"
        if (_sender(one), one.microbatch) in channels[one.peer, worker, letter]:
            return None
        return f"worker {one.peer} does not send {_sender(one)}SEND_{letter}{one.microbatch} before"

    moved = True
    while moved:
        moved = False
        for worker in range(len(place)):
            while (one := current(worker)) is not None and blocked(worker, one) is None:
                if one.peer is not None and one.kind.startswith("SEND"):
                    channels[worker, one.peer, one.kind[-1]].add((one.stage, one.microbatch))
                elif one.peer is not None:
                    channels[one.peer, worker, one.kind[-1]].remove((_sender(one), one.microbatch))
                place[worker] += 1
                moved = True
    ends = ((worker, one) for worker in range(len(place)) if (one := current(worker)) is not None)
    return [(worker, one, blocked(worker, one) or "") for worker, one in ends]


def _sender(one: WorkerInstruction) -> int:
    """Virtual stage that computes what a receive takes."""
    return one.stage - 1 if one.kind == "RECV_F" else one.stage + 1
