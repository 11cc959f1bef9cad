"""Schedules packed into ticks, and lowered to one table of integers that a single SPMD program scans.

In one SPMD program over the mesh axis `stage`, every permute is a meeting of workers. A tick is what happens between
two meetings, so it should hold as much as it can: with one operation per tick, 1F1B waits for 40 % of the time over 4
stages and 8 microbatches; with one forward and one backward pass per tick for 27 %, its closed form (P-1)/(M+P-1).

| packing | in one tick, per worker | order |
|---|---|---|
| single | one operation | that of the stream |
| fused | at most one F, one I or B, one W | each kind in the order of the stream, as early as it can be |
| aligned | as fused | as fused, but all workers do their k-th W in the same tick |

A fused packing lets forward passes overtake backward passes of the stream, never the reverse, so GPipe stays GPipe. It
keeps more inputs than the stream would with workers that run on their own: 1F1B 2 (P - p) - 1 on worker p, not P - p.
In an aligned packing the fewest ticks contain a W, for a stash that lives longer.

## What an executor does with the table

`Ticks.table` is int32 [T, P, len(Field)]; worker p scans table[:, p]. NONE (-1) means that there is nothing to do.
Each worker has three arrays of slots, `num_inputs`, `num_cotangents` and `num_stashes` long, the same on all workers.
One tick, in this order:

1. Embed. If EMBED_MICROBATCH is not NONE (it is the same on all workers), all workers embed the tokens of that
   microbatch. The worker with FORWARD_EMBEDS = 1 writes the result into inputs[FORWARD_INPUT].
2. F. If FORWARD_CHUNK is not NONE: y = chunk FORWARD_CHUNK of inputs[FORWARD_INPUT]. The input stays in its slot.
3. Head. If HEAD_MICROBATCH is not NONE (the same on all workers), all workers compute the loss of that microbatch from
   the y of worker `head_worker`, and the gradient of the loss by y. That worker, the only one where HEAD_COTANGENT is
   not NONE, writes the gradient into cotangents[HEAD_COTANGENT].
4. I or B. If BACKWARD_CHUNK is not NONE: dx is the backward pass of that chunk for inputs[BACKWARD_INPUT] and
   cotangents[BACKWARD_COTANGENT]. If BACKWARD_STASH is NONE it is a B, and adds the gradient of the weights to the
   accumulator; otherwise it is an I, and writes what W needs into stashes[BACKWARD_STASH]. Both slots that were read
   are free from here on.
5. W. If WEIGHT_CHUNK is not NONE: adds the gradient of stashes[WEIGHT_STASH] to the accumulator of that chunk. The
   slot is free from here on.
6. Embedding gradient. If EMBED_GRADIENT_MICROBATCH is not NONE (the same on all workers), all workers add the gradient
   of that microbatch's embedding from the dx of worker `embed_worker`.
7. Move. For each hop in `activation_hops`, y goes that way: where ARRIVING_INPUT_<hop> is not NONE, what arrives is
   written into inputs[that slot]; elsewhere it is dropped. For each hop in `cotangent_hops`, dx goes that way into
   cotangents[ARRIVING_COTANGENT_<hop>]. As permutes over `stage`: DOWN is the chain (p, p + 1), UP is (p, p - 1), LOCAL
   is none at all, WRAP is the pair (P - 1, 0) for activations and (0, P - 1) for cotangents. FORWARD_TO and BACKWARD_TO
   have the hop for the sender; an executor of chains does not need them, since receivers drop the rest.

A slot that is freed in step 4 or 5 may be filled in step 7 of the same tick. In a single packing step 3 may come after
step 5, so that workers that have an I or a W in this tick do not wait in the loss for another worker's F.
"""

import dataclasses
import enum
import heapq
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from jtrain.pipeline.schedule import PipelineSchedule, StageHop, StageOp

type Packing = Literal["single", "fused", "aligned"]
PACKINGS: tuple[Packing, ...] = ("single", "fused", "aligned")

SCOPES = ("tick_forward", "tick_backward", "tick_weight")
"""Named scopes of a compiled step, one for each of `TickOps`: a profile tells by them what an op belongs to."""

NONE = -1
"""Value of a field of the table when there is nothing to do."""


class TickOps(NamedTuple):
    """Operations of one worker in one tick, run in this order."""

    forward: StageOp | None = None
    backward: StageOp | None = None
    weight: StageOp | None = None


class Field(enum.IntEnum):
    """Columns of the table. Chunks are numbers on the worker, slots are indices of one of its three arrays."""

    EMBED_MICROBATCH = 0
    FORWARD_CHUNK = 1
    FORWARD_MICROBATCH = 2
    FORWARD_INPUT = 3
    FORWARD_EMBEDS = 4
    FORWARD_TO = 5
    HEAD_MICROBATCH = 6
    HEAD_COTANGENT = 7
    BACKWARD_CHUNK = 8
    BACKWARD_MICROBATCH = 9
    BACKWARD_INPUT = 10
    BACKWARD_COTANGENT = 11
    BACKWARD_STASH = 12
    BACKWARD_TO = 13
    EMBED_GRADIENT_MICROBATCH = 14
    WEIGHT_CHUNK = 15
    WEIGHT_MICROBATCH = 16
    WEIGHT_STASH = 17
    ARRIVING_INPUT_DOWN = 18
    ARRIVING_INPUT_UP = 19
    ARRIVING_INPUT_LOCAL = 20
    ARRIVING_INPUT_WRAP = 21
    ARRIVING_COTANGENT_DOWN = 22
    ARRIVING_COTANGENT_UP = 23
    ARRIVING_COTANGENT_LOCAL = 24
    ARRIVING_COTANGENT_WRAP = 25


def arriving_input(hop: StageHop) -> Field:
    """The column of the input slot that is filled over `hop`."""
    return Field(Field.ARRIVING_INPUT_DOWN + hop)


def arriving_cotangent(hop: StageHop) -> Field:
    """The column of the cotangent slot that is filled over `hop`."""
    return Field(Field.ARRIVING_COTANGENT_DOWN + hop)


@dataclasses.dataclass(frozen=True)
class Ticks:
    """A schedule in ticks.

    ops: for each tick and worker, the operations.
    table: the same with slots and ways, int32 [T, P, len(Field)]; see the module's documentation.
    inputs, cotangents, stashes: for each worker the largest number of slots in use at once.
    """

    schedule: PipelineSchedule
    packing: Packing
    ops: tuple[tuple[TickOps, ...], ...]
    table: npt.NDArray[np.int32]
    inputs: tuple[int, ...]
    cotangents: tuple[int, ...]
    stashes: tuple[int, ...]

    @property
    def num_ticks(self) -> int:
        """Number of ticks, T."""
        return len(self.ops)

    @property
    def num_inputs(self) -> int:
        """Input slots of every worker."""
        return max(self.inputs)

    @property
    def num_cotangents(self) -> int:
        """Cotangent slots of every worker."""
        return max(self.cotangents)

    @property
    def num_stashes(self) -> int:
        """Slots of every worker for what W needs; 0 if no backward pass is split."""
        return max(self.stashes)

    @property
    def embed_worker(self) -> int:
        """The worker of the first virtual stage."""
        return self.schedule.worker(0)

    @property
    def head_worker(self) -> int:
        """The worker of the last virtual stage."""
        return self.schedule.worker(self.schedule.virtual_stages - 1)

    @property
    def activation_hops(self) -> tuple[StageHop, ...]:
        """Ways that activations take in some tick."""
        return tuple(hop for hop in StageHop if (self.table[:, :, arriving_input(hop)] != NONE).any())

    @property
    def cotangent_hops(self) -> tuple[StageHop, ...]:
        """Ways that cotangents take in some tick."""
        return tuple(hop for hop in StageHop if (self.table[:, :, arriving_cotangent(hop)] != NONE).any())


def make_ticks(schedule: PipelineSchedule, packing: Packing = "fused") -> Ticks:
    """Packs a valid schedule (`checker.check`) and lowers it to the table."""
    packed = _aligned(schedule) if packing == "aligned" else _pack(schedule, fused=packing == "fused")
    return _lower(schedule, packing, packed)


type _Grid = list[list[TickOps]]


class _Worker:
    """Operations of one worker that are still to be packed, by kind."""

    def __init__(self, schedule: PipelineSchedule, worker: int) -> None:
        stream = schedule.streams[worker]
        self.stream = stream
        self.forward = [op for op in stream if op.kind == "F"]
        self.backward = [op for op in stream if op.kind in "IB"]
        self.weight = [op for op in stream if op.kind == "W"]
        # Backward pass -> number of forward passes that come before it in the stream.
        self.after: dict[StageOp, int] = {}
        seen = 0
        for op in stream:
            seen += op.kind == "F"
            if op.kind in "IB":
                self.after[op] = seen
        self.f = self.b = self.w = self.next = 0


def _pack(schedule: PipelineSchedule, *, fused: bool, weights: bool = True) -> _Grid:
    """Packs tick by tick; each worker takes what is ready when the tick starts."""
    workers = [_Worker(schedule, p) for p in range(schedule.stages)]
    left = sum(op.kind != "W" or weights for stream in schedule.streams for op in stream)
    done: dict[StageOp, int] = {}  # operation -> its tick
    grid: _Grid = []
    while left:
        tick = len(grid)
        row = [(_fused if fused else _single)(schedule, worker, done, tick, weights=weights) for worker in workers]
        for op in _ops(row):
            done[op] = tick
            left -= 1
        assert any(_ops(row)), f"{schedule.name} cannot go on after tick {tick}: check it first"
        grid.append(row)
    return grid


def _ops(row: list[TickOps]) -> Iterator[StageOp]:
    """All operations of one tick."""
    return (op for ops in row for op in ops if op is not None)


def _single(
    schedule: PipelineSchedule, worker: _Worker, done: dict[StageOp, int], tick: int, *, weights: bool
) -> TickOps:
    """The next operation of the stream, if it is ready."""
    del tick, weights
    if worker.next == len(worker.stream):
        return TickOps()
    op = worker.stream[worker.next]
    if not all(need in done for need in schedule.needs(op)):
        return TickOps()
    worker.next += 1
    return TickOps(forward=op) if op.kind == "F" else TickOps(weight=op) if op.kind == "W" else TickOps(backward=op)


def _fused(
    schedule: PipelineSchedule, worker: _Worker, done: dict[StageOp, int], tick: int, *, weights: bool
) -> TickOps:
    """The next forward pass, backward pass and W that are ready; a pass may use what was just computed here."""
    forward = backward = weight = None
    if worker.f < len(worker.forward):
        op = worker.forward[worker.f]
        if all(need in done for need in schedule.needs(op)):
            forward, worker.f = op, worker.f + 1
    if worker.b < len(worker.backward):
        op = worker.backward[worker.b]
        if worker.f >= worker.after[op] and all(need in done or need == forward for need in schedule.needs(op)):
            backward, worker.b = op, worker.b + 1
    if weights and worker.w < len(worker.weight):
        op = worker.weight[worker.w]
        if all(need in done or need == backward for need in schedule.needs(op)):
            weight, worker.w = op, worker.w + 1
    return TickOps(forward, backward, weight)


def _aligned(schedule: PipelineSchedule) -> _Grid:
    """Fused ticks in which all workers do their k-th W at once, as early as the last of them can."""
    grid = _pack(schedule, fused=True, weights=False)
    when = {op: tick for tick, row in enumerate(grid) for op in _ops(row)}
    weights = [[op for op in stream if op.kind == "W"] for stream in schedule.streams]
    tick = -1
    for k in range(max(map(len, weights))):
        ready = [when[StageOp("I", of[k].stage, of[k].microbatch)] for of in weights if k < len(of)]
        tick = max(tick + 1, *ready)
        while tick >= len(grid):
            grid.append([TickOps()] * schedule.stages)
        grid[tick] = [
            ops._replace(weight=weights[p][k]) if k < len(weights[p]) else ops for p, ops in enumerate(grid[tick])
        ]
    return grid


# Moments of a tick, in order: the positions of lifetimes are tick * _MOMENTS + moment.
_EMBED, _FORWARD, _HEAD, _BACKWARD, _WEIGHT, _MOVE = range(6)
_MOMENTS = 6


class _Slots:
    """Slots of one array of one worker: each value gets the lowest slot that is free during its lifetime."""

    def __init__(self) -> None:
        self._lives: list[tuple[int, int, StageOp]] = []

    def add(self, value: StageOp, start: int, end: int) -> None:
        """Adds a value that is alive from moment `start` to moment `end`, both included."""
        assert start <= end, value
        self._lives.append((start, end, value))

    def assign(self) -> tuple[dict[StageOp, int], int]:
        """The slot of each value, and the number of slots, which is the largest number of values alive at once."""
        free: list[int] = []
        ending: list[tuple[int, int]] = []
        found: dict[StageOp, int] = {}
        count = 0
        for start, end, value in sorted(self._lives):
            while ending and ending[0][0] < start:
                heapq.heappush(free, heapq.heappop(ending)[1])
            if not free:
                heapq.heappush(free, count)
                count += 1
            found[value] = slot = heapq.heappop(free)
            heapq.heappush(ending, (end, slot))
        return found, count


def _lower(schedule: PipelineSchedule, packing: Packing, grid: _Grid) -> Ticks:
    """Assigns slots and writes the table."""
    when = {op: tick * _MOMENTS for tick, row in enumerate(grid) for op in _ops(row)}
    last = schedule.virtual_stages - 1
    inputs, cotangents, stashes = ([_Slots() for _ in range(schedule.stages)] for _ in range(3))
    for p, stream in enumerate(schedule.streams):
        for op in stream:
            kind, stage, m = op
            if kind in "IB":
                arrived = when[StageOp("F", stage - 1, m)] + _MOVE if stage else when[StageOp("F", stage, m)] + _EMBED
                inputs[p].add(StageOp("F", stage, m), arrived, when[op] + _BACKWARD)
                arrived = _cotangent_arrival(when, stage, m) if stage < last else when[StageOp("F", stage, m)] + _HEAD
                cotangents[p].add(op, arrived, when[op] + _BACKWARD)
            elif kind == "F" and not schedule.trains:
                arrived = when[StageOp("F", stage - 1, m)] + _MOVE if stage else when[op] + _EMBED
                inputs[p].add(op, arrived, when[op] + _FORWARD)
            elif kind == "W":
                stashes[p].add(op, when[StageOp("I", stage, m)] + _BACKWARD, when[op] + _WEIGHT)
    slots = [[array.assign() for array in arrays] for arrays in (inputs, cotangents, stashes)]
    of: list[dict[StageOp, int]] = [{op: slot for found, _ in array for op, slot in found.items()} for array in slots]
    table = np.full((len(grid), schedule.stages, len(Field)), NONE, np.int32)
    for tick, row in enumerate(grid):
        for p, ops in enumerate(row):
            _fill(schedule, table[tick], p, ops, *of)
    peaks = [tuple(count for _, count in array) for array in slots]
    return Ticks(schedule, packing, tuple(map(tuple, grid)), table, *peaks)


def _cotangent_arrival(when: dict[StageOp, int], stage: int, microbatch: int) -> int:
    """Moment at which the cotangent for a virtual stage that is not the last arrives."""
    after = [StageOp("I", stage + 1, microbatch), StageOp("B", stage + 1, microbatch)]
    return next(when[op] for op in after if op in when) + _MOVE


def _fill(
    schedule: PipelineSchedule,
    row: npt.NDArray[np.int32],
    p: int,
    ops: TickOps,
    inputs: dict[StageOp, int],
    cotangents: dict[StageOp, int],
    stashes: dict[StageOp, int],
) -> None:
    """Writes the operations of worker p in one tick into that tick's row [P, len(Field)], and where results arrive."""
    mine = row[p]
    if (op := ops.forward) is not None:
        mine[Field.FORWARD_CHUNK] = schedule.chunk(op.stage)
        mine[Field.FORWARD_MICROBATCH] = op.microbatch
        mine[Field.FORWARD_INPUT] = inputs[op]
        mine[Field.FORWARD_EMBEDS] = int(op.stage == 0)
        if op.stage == 0:
            row[:, Field.EMBED_MICROBATCH] = op.microbatch
        hop = schedule.activation_hop(op.stage)
        if hop is None:
            row[:, Field.HEAD_MICROBATCH] = op.microbatch
            if schedule.trains:
                mine[Field.HEAD_COTANGENT] = _either(cotangents, op.stage, op.microbatch)
        else:
            mine[Field.FORWARD_TO] = hop
            after = StageOp("F", op.stage + 1, op.microbatch)
            row[schedule.worker(after.stage), arriving_input(hop)] = inputs[after]
    if (op := ops.backward) is not None:
        mine[Field.BACKWARD_CHUNK] = schedule.chunk(op.stage)
        mine[Field.BACKWARD_MICROBATCH] = op.microbatch
        mine[Field.BACKWARD_INPUT] = inputs[StageOp("F", op.stage, op.microbatch)]
        mine[Field.BACKWARD_COTANGENT] = cotangents[op]
        if op.kind == "I":
            mine[Field.BACKWARD_STASH] = stashes[StageOp("W", op.stage, op.microbatch)]
        hop = schedule.cotangent_hop(op.stage)
        if hop is None:
            row[:, Field.EMBED_GRADIENT_MICROBATCH] = op.microbatch
        else:
            mine[Field.BACKWARD_TO] = hop
            target = row[schedule.worker(op.stage - 1)]
            target[arriving_cotangent(hop)] = _either(cotangents, op.stage - 1, op.microbatch)
    if (op := ops.weight) is not None:
        mine[Field.WEIGHT_CHUNK] = schedule.chunk(op.stage)
        mine[Field.WEIGHT_MICROBATCH] = op.microbatch
        mine[Field.WEIGHT_STASH] = stashes[op]


def _either(cotangents: dict[StageOp, int], stage: int, microbatch: int) -> int:
    """Slot of the cotangent for a virtual stage, whether its backward pass is an I or a B."""
    return next(cotangents[op] for kind in ("I", "B") if (op := StageOp(kind, stage, microbatch)) in cotangents)
