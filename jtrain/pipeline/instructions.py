"""Instructions of each worker, derived from the computations of a schedule.

A worker that runs on its own (a program per stage) goes through its instructions in order. An instruction is
written like a cell of the CSV, with the names of this table in place of F, I, W, B.

| instruction | meaning | when |
|---|---|---|
| GATHER, DROP | gathers a chunk's weights from their shards; drops them | around F, I and B; a W needs no weights |
| RECV_F, SEND_F | receives the input of a forward pass; sends its result | next to F, if the peer is another worker |
| RECV_B, SEND_B | receives the cotangent of a backward pass; sends its result | next to I and B, likewise |
| F, I, W, B | as in `schedule.py` | as the schedule says |
| FREE_F, FREE_B | frees a chunk's input; frees its cotangent | after I or B |
| FREE_W | frees what W needs | after W |
| REDUCE | reduces the gradient of a chunk over the data-parallel axes | after the last W or B of the chunk |
| UPDATE | updates the weights of a chunk | at the end, since clipping needs all gradients |

Values that wait lie in slots of three arrays per worker: `inputs` (from RECV_F, or from F for embedded
tokens, to FREE_F), `cotangents` (from RECV_B, or from the last F for the gradient of the loss, to FREE_B) and
`stashes` (from I to FREE_W). Each value gets the lowest slot that is free, so the number of slots is the
peak. A value whose next reader is on the same worker goes directly into that reader's slot.

Example, worker 0 of 1F1B over 2 workers with 2 microbatches:

    0GATHER 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0FREE_F0 0FREE_B0
    0RECV_B1 0B1 0DROP 0REDUCE 0FREE_F1 0FREE_B1 0UPDATE

0F0 writes the embedded tokens into inputs[0] and 0F1 into inputs[1]; 0RECV_B0 and 0RECV_B1 both write
cotangents[0], for 0FREE_B0 lies between them: two input slots and one for cotangents.
"""

import collections
import dataclasses
import heapq
from collections.abc import Iterator
from typing import Literal, NamedTuple

from jtrain.pipeline.schedule import PassKind, PipelineSchedule, StageHop

type WorkerInstructionKind = (
    PassKind
    | Literal[
        "GATHER",
        "DROP",
        "RECV_F",
        "SEND_F",
        "RECV_B",
        "SEND_B",
        "FREE_F",
        "FREE_B",
        "FREE_W",
        "REDUCE",
        "UPDATE",
    ]
)
"""Work of a worker: a pass, a message, or memory that is taken and freed."""

type Array = Literal["inputs", "cotangents", "stashes"]
"""One of the three arrays of a worker in whose slots values wait."""

ARRAYS: tuple[Array, ...] = ("inputs", "cotangents", "stashes")


class Value(NamedTuple):
    """Input, cotangent or stash of one virtual stage and microbatch, which waits in a slot."""

    array: Array
    stage: int
    microbatch: int


class WorkerInstruction(NamedTuple):
    """One step of a worker.

    microbatch: None for instructions of a chunk: GATHER, DROP, REDUCE, UPDATE.
    peer: the other worker of a send or receive.
    reads, writes: values that must be there, with their slots, and values that are there afterwards.
    frees: the value that is gone afterwards, with its slot.
    """

    kind: WorkerInstructionKind
    stage: int
    microbatch: int | None = None
    peer: int | None = None
    reads: tuple[tuple[Value, int], ...] = ()
    writes: tuple[tuple[Value, int], ...] = ()
    frees: tuple[Value, int] | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


@dataclasses.dataclass(frozen=True)
class PipelineProgram:
    """Instructions of all workers, with the number of slots of each array and worker."""

    schedule: PipelineSchedule
    workers: tuple[tuple[WorkerInstruction, ...], ...]
    inputs: tuple[int, ...]
    cotangents: tuple[int, ...]
    stashes: tuple[int, ...]


def make_program(schedule: PipelineSchedule) -> PipelineProgram:
    """Derives a schedule's instructions, which keep a chunk's gathered weights from first to last use."""
    workers, peaks = [], []
    for worker in range(schedule.stages):
        without_slots = _with_chunk_work(schedule, worker)
        program, counts = _with_slots(without_slots)
        workers.append(program)
        peaks.append(counts)
    counts = {array: tuple(worker_counts[array] for worker_counts in peaks) for array in ARRAYS}
    return PipelineProgram(schedule, tuple(workers), **counts)


def _pass_instruction(
    schedule: PipelineSchedule,
    kind: WorkerInstructionKind,
    stage: int,
    microbatch: int,
    peer: int | None = None,
) -> WorkerInstruction:
    """An instruction of one microbatch, with what it reads, writes and frees; slots are still 0."""
    input_value, cotangent, stash = ((Value(array, stage, microbatch), 0) for array in ARRAYS)
    instruction = WorkerInstruction(kind, stage, microbatch, peer)
    match kind:
        case "RECV_F" | "RECV_B":
            return instruction._replace(writes=(input_value if kind == "RECV_F" else cotangent,))
        case "FREE_F" | "FREE_B" | "FREE_W":
            return instruction._replace(
                frees={"FREE_F": input_value, "FREE_B": cotangent, "FREE_W": stash}[kind]
            )
        case "W":
            return instruction._replace(reads=(stash,))
        case "F":
            hop = schedule.activation_hop(stage)
            # Virtual stage 0 has no RECV_F: its F embeds the tokens itself.
            writes = [input_value] if stage == 0 else []
            # The last virtual stage computes the loss, and with it its own cotangent.
            if hop is None:
                writes.append(cotangent)
            # No message: the result is the next chunk's input, in the same worker's slots.
            elif hop is StageHop.LOCAL:
                writes.append((Value("inputs", stage + 1, microbatch), 0))
            return instruction._replace(reads=() if stage == 0 else (input_value,), writes=tuple(writes))
        case "I" | "B":
            writes = [stash] if kind == "I" else []
            if schedule.cotangent_hop(stage) is StageHop.LOCAL:
                writes.append((Value("cotangents", stage - 1, microbatch), 0))
            return instruction._replace(reads=(input_value, cotangent), writes=tuple(writes))
        case _:
            return instruction


def _with_messages(schedule: PipelineSchedule, worker: int) -> Iterator[WorkerInstruction]:
    """Computations with their sends, receives and frees; slots are still 0."""
    last = schedule.virtual_stages - 1
    for kind, stage, m in schedule.streams[worker]:
        # W neither receives nor sends: all that it needs is in its stash.
        if kind == "W":
            yield _pass_instruction(schedule, "W", stage, m)
            yield _pass_instruction(schedule, "FREE_W", stage, m)
            continue
        forward = kind == "F"
        # Activations go up the virtual stages, cotangents down.
        source, target = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
        if 0 <= source <= last and (peer := schedule.worker(source)) != worker:
            yield _pass_instruction(schedule, "RECV_F" if forward else "RECV_B", stage, m, peer)
        yield _pass_instruction(schedule, kind, stage, m)
        if 0 <= target <= last and (peer := schedule.worker(target)) != worker:
            yield _pass_instruction(schedule, "SEND_F" if forward else "SEND_B", stage, m, peer)
        # I and B are the last to read the input and the cotangent; a W has its stash.
        if not forward:
            yield _pass_instruction(schedule, "FREE_F", stage, m)
            yield _pass_instruction(schedule, "FREE_B", stage, m)


def _with_chunk_work(schedule: PipelineSchedule, worker: int) -> list[WorkerInstruction]:
    """Adds what is done for a whole chunk: GATHER, DROP, REDUCE, UPDATE."""
    instructions = list(_with_messages(schedule, worker))
    held = [schedule.stage(worker, chunk) for chunk in range(schedule.chunks)]
    before_index: dict[int, list[WorkerInstruction]] = collections.defaultdict(list)
    after_index: dict[int, list[WorkerInstruction]] = collections.defaultdict(list)
    # In the order of virtual stages, so that instructions at one place have a fixed order.
    for stage in sorted(held):
        own_kinds = [
            (index, original.kind) for index, original in enumerate(instructions) if original.stage == stage
        ]
        if uses := [index for index, kind in own_kinds if kind in ("F", "I", "B")]:
            before_index[uses[0]].append(WorkerInstruction("GATHER", stage))
            after_index[uses[-1]].append(WorkerInstruction("DROP", stage))
        if gradients := [index for index, kind in own_kinds if kind in ("W", "B")]:
            # As soon as the gradient is complete, so that the reduction runs beside later work.
            after_index[gradients[-1]].append(WorkerInstruction("REDUCE", stage))
    with_chunk_work = [
        step
        for index, original in enumerate(instructions)
        for step in (*before_index[index], original, *after_index[index])
    ]
    # After every REDUCE: the norm that clips needs all gradients.
    return with_chunk_work + [WorkerInstruction("UPDATE", stage) for stage in held]


def _with_slots(
    instructions: list[WorkerInstruction],
) -> tuple[tuple[WorkerInstruction, ...], dict[Array, int]]:
    """Gives each value the lowest slot that is free; returns the peaks as well."""
    free_slots: dict[Array, list[int]] = {array: [] for array in ARRAYS}
    counts: dict[Array, int] = dict.fromkeys(ARRAYS, 0)
    slots: dict[Value, int] = {}

    # A value keeps its slot, so that its write, its reads and its free agree.
    def slot(value: Value) -> int:
        if value not in slots:
            if not free_slots[value.array]:
                heapq.heappush(free_slots[value.array], counts[value.array])
                counts[value.array] += 1
            slots[value] = heapq.heappop(free_slots[value.array])
        return slots[value]

    with_slots: list[WorkerInstruction] = []
    for instruction in instructions:
        instruction = instruction._replace(
            reads=tuple((value, slot(value)) for value, _ in instruction.reads),
            writes=tuple((value, slot(value)) for value, _ in instruction.writes),
        )
        if instruction.frees is not None:
            value = instruction.frees[0]
            instruction = instruction._replace(frees=(value, slot(value)))
            # Freed after the reads and writes of the same instruction, never for them.
            heapq.heappush(free_slots[value.array], slots[value])
        with_slots.append(instruction)
    return tuple(with_slots), counts
