"""Schedules lowered to one table of integers that a single SPMD program scans; `tick_grid.py` says what is in
a tick.

`Ticks.table` is int32 [T, P, len(TickColumn)]; worker p scans table[:, p]. NONE (-1) means that there is nothing
to do. Each worker has three arrays of slots, `num_inputs`, `num_cotangents` and `num_stashes` long, the same
on all workers. One tick, in this order:

1. Embed. If EMBED_MICROBATCH is not NONE (it is the same on all workers), all workers embed the tokens of
   that microbatch. The worker with FORWARD_EMBEDS = 1 writes the result into inputs[FORWARD_INPUT].
2. F. If FORWARD_CHUNK is not NONE: y = chunk FORWARD_CHUNK of inputs[FORWARD_INPUT]. The input stays in its
   slot.
3. Head. If HEAD_MICROBATCH is not NONE (the same on all workers), all workers compute the loss of that
   microbatch from the y of worker `head_worker`, and the gradient of the loss by y. That worker, the only one
   where HEAD_COTANGENT is not NONE, writes the gradient into cotangents[HEAD_COTANGENT].
4. I or B. If BACKWARD_CHUNK is not NONE: dx is the backward pass of that chunk for inputs[BACKWARD_INPUT] and
   cotangents[BACKWARD_COTANGENT]. If BACKWARD_STASH is NONE it is a B, and adds the gradient of the weights
   to the accumulator; otherwise it is an I, and writes what W needs into stashes[BACKWARD_STASH]. Both slots
   that were read are free from here on.
5. W. If WEIGHT_CHUNK is not NONE: adds the gradient of stashes[WEIGHT_STASH] to the accumulator of that
   chunk. The slot is free from here on.
6. Embedding gradient. If EMBED_GRADIENT_MICROBATCH is not NONE (the same on all workers), all workers add the
   gradient of that microbatch's embedding from the dx of worker `embed_worker`.
7. Move. For each hop in `schedule.activation_hops`, y goes that way: where ARRIVING_INPUT_<hop> is not NONE,
   what arrives is written into inputs[that slot]; elsewhere it is dropped. For each hop in
   `schedule.cotangent_hops`, dx goes that way into cotangents[ARRIVING_COTANGENT_<hop>]. As permutes over
   `stage`: DOWN is the chain (p, p + 1), UP is (p, p - 1), LOCAL is none at all, WRAP is the pair (P - 1, 0)
   for activations and (0, P - 1) for cotangents.

Example, 1F1B over P = 2 workers with 2 microbatches, fused:

| tick | worker 0 | worker 1 |
|---|---|---|
| 0 | 0F0 of inputs[0] | |
| 1 | 0F1 of inputs[1] | 1F0 of inputs[0], loss of microbatch 0, 1B0 |
| 2 | 0B0 of inputs[0] and cotangents[0] | 1F1 of inputs[0], loss of microbatch 1, 1B1 |
| 3 | 0B1 of inputs[1] and cotangents[0] | |

In tick 1 EMBED_MICROBATCH is 1 and HEAD_MICROBATCH 0 on both workers. Worker 1 has HEAD_COTANGENT 0 and
BACKWARD_COTANGENT 0: it uses the loss's gradient in the tick that computes it. In step 7 y of worker 0 goes
DOWN into inputs[0] of worker 1 (ARRIVING_INPUT_DOWN 0), which 1B0 has just freed, and dx of worker 1 goes UP
into cotangents[0] of worker 0 (ARRIVING_COTANGENT_UP 0). So worker 0 needs two input slots and worker 1 one.

A slot that is freed in step 4 or 5 may be filled in step 7 of the same tick. In a single packing step 3 may
come after step 5, so that workers that have an I or a W in this tick do not wait in the loss for another
worker's F.
"""

import dataclasses
import enum
import functools
import heapq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jtrain.pipeline.schedule import PipelineSchedule, StageHop, StageOp
from jtrain.pipeline.tick_grid import (
    BACKWARD,
    FORWARD,
    NONE,
    WEIGHT,
    Lives,
    OpNumbers,
    Packing,
    TickGrid,
    pack,
)

SCOPES = ("tick_forward", "tick_backward", "tick_weight")
"""Named scopes of a compiled step, one for each of `TickOps`: a profile tells by them what an op belongs
to."""


class TickOps(NamedTuple):
    """Operations of one worker in one tick, run in this order."""

    forward: StageOp | None = None
    backward: StageOp | None = None
    weight: StageOp | None = None


class TickColumn(enum.IntEnum):
    """Columns of the table. Chunks count from 0 on each worker; slots are indices of its three arrays."""

    EMBED_MICROBATCH = 0
    FORWARD_CHUNK = 1
    FORWARD_MICROBATCH = 2
    FORWARD_INPUT = 3
    FORWARD_EMBEDS = 4
    HEAD_MICROBATCH = 5
    HEAD_COTANGENT = 6
    BACKWARD_CHUNK = 7
    BACKWARD_MICROBATCH = 8
    BACKWARD_INPUT = 9
    BACKWARD_COTANGENT = 10
    BACKWARD_STASH = 11
    EMBED_GRADIENT_MICROBATCH = 12
    WEIGHT_CHUNK = 13
    WEIGHT_STASH = 14
    # Four columns per array, in the order of `StageHop`: `arriving_input` adds the hop to the first.
    ARRIVING_INPUT_DOWN = 15
    ARRIVING_INPUT_UP = 16
    ARRIVING_INPUT_LOCAL = 17
    ARRIVING_INPUT_WRAP = 18
    ARRIVING_COTANGENT_DOWN = 19
    ARRIVING_COTANGENT_UP = 20
    ARRIVING_COTANGENT_LOCAL = 21
    ARRIVING_COTANGENT_WRAP = 22


def arriving_input(hop: StageHop) -> TickColumn:
    """The column of the input slot that is filled over `hop`."""
    return TickColumn(TickColumn.ARRIVING_INPUT_DOWN + hop)


def arriving_cotangent(hop: StageHop) -> TickColumn:
    """The column of the cotangent slot that is filled over `hop`."""
    return TickColumn(TickColumn.ARRIVING_COTANGENT_DOWN + hop)


@dataclasses.dataclass(frozen=True)
class Ticks:
    """A schedule in ticks.

    table: the operations with slots and ways, int32 [T, P, len(TickColumn)]; see the module's documentation.
    inputs, cotangents, stashes: for each worker the largest number of slots in use at once.
    """

    grid: TickGrid
    table: npt.NDArray[np.int32]
    inputs: tuple[int, ...]
    cotangents: tuple[int, ...]
    stashes: tuple[int, ...]

    @property
    def schedule(self) -> PipelineSchedule:
        """The schedule that is packed."""
        return self.grid.schedule

    @property
    def packing(self) -> Packing:
        """The rule by which operations are put into ticks."""
        return self.grid.packing

    @functools.cached_property
    def ops(self) -> tuple[tuple[TickOps, ...], ...]:
        """For each tick and worker, the operations."""
        return tuple(tuple(self._ops(*numbers) for numbers in row) for row in self.grid.numbers.tolist())

    def _ops(self, forward: int, backward: int, weight: int) -> TickOps:
        microbatches, unsplit = self.schedule.microbatches, self.grid.unsplit
        # A number is stage * microbatches + microbatch.
        return TickOps(
            None if forward == NONE else StageOp("F", *divmod(forward, microbatches)),
            None
            if backward == NONE
            else StageOp("B" if unsplit.flat[backward] else "I", *divmod(backward, microbatches)),
            None if weight == NONE else StageOp("W", *divmod(weight, microbatches)),
        )

    @property
    def num_ticks(self) -> int:
        """Number of ticks, T."""
        return self.grid.num_ticks

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


def make_ticks(schedule: PipelineSchedule, packing: Packing = "fused") -> Ticks:
    """Packs a valid schedule (`checker.check`) and lowers it to the table."""
    grid = pack(schedule, packing)
    # Slots first: 14 of the 23 columns of the table are slots.
    inputs, cotangents, stashes = (_assign(schedule, lives) for lives in grid.lives)
    # NONE everywhere, so that a column without work reads as nothing to do.
    table = np.full((grid.num_ticks, schedule.stages, len(TickColumn)), NONE, np.int32)
    _fill_forward(grid, table, inputs.slots, cotangents.slots)
    _fill_backward(grid, table, inputs.slots, cotangents.slots, stashes.slots)
    tick, worker, stage, microbatch = _of_kind(grid, WEIGHT)
    # W has no input and no hop, so it is filled in here.
    table[tick, worker, TickColumn.WEIGHT_CHUNK] = stage // schedule.stages
    table[tick, worker, TickColumn.WEIGHT_STASH] = stashes.slots[stage, microbatch]
    return Ticks(grid, table, inputs.counts, cotangents.counts, stashes.counts)


class _Slots(NamedTuple):
    """Slots of one array: of each value, [virtual stages, microbatches]; and their number on each worker."""

    slots: OpNumbers
    counts: tuple[int, ...]


def _assign(schedule: PipelineSchedule, lives: Lives) -> _Slots:
    """Gives each value the lowest slot of its worker that is free during its lifetime."""
    slots = np.full((schedule.virtual_stages, schedule.microbatches), NONE)
    free_slots: list[list[int]] = [[] for _ in range(schedule.stages)]
    slots_by_end: list[list[tuple[int, int]]] = [[] for _ in range(schedule.stages)]
    counts = [0] * schedule.stages
    values = np.stack([lives.start, lives.end, lives.stage, lives.microbatch], 1)
    # In order of their starts: as for intervals on a line, any free slot then gives the fewest slots.
    for start, end, stage, microbatch in sorted(values.tolist()):
        worker = schedule.worker(stage)
        # Both ends are included, so a slot is free only after the moment at which its value ends.
        while slots_by_end[worker] and slots_by_end[worker][0][0] < start:
            heapq.heappush(free_slots[worker], heapq.heappop(slots_by_end[worker])[1])
        if not free_slots[worker]:
            heapq.heappush(free_slots[worker], counts[worker])
            counts[worker] += 1
        slots[stage, microbatch] = slot = heapq.heappop(free_slots[worker])
        heapq.heappush(slots_by_end[worker], (end, slot))
    return _Slots(slots, tuple(counts))


def _of_kind(grid: TickGrid, kind: int) -> tuple[OpNumbers, OpNumbers, OpNumbers, OpNumbers]:
    """Tick, worker, virtual stage and microbatch of all operations of one kind."""
    tick, worker = np.nonzero(grid.numbers[:, :, kind] != NONE)
    # Numbered as in `Ticks._ops`: stage * microbatches + microbatch.
    stage, microbatch = np.divmod(grid.numbers[tick, worker, kind], grid.schedule.microbatches)
    return tick, worker, stage, microbatch


def _fill_forward(
    grid: TickGrid, table: npt.NDArray[np.int32], inputs: OpNumbers, cotangents: OpNumbers
) -> None:
    """Writes forward passes, embeddings, losses and what arrives of activations."""
    schedule = grid.schedule
    tick, worker, stage, microbatch = _of_kind(grid, FORWARD)
    table[tick, worker, TickColumn.FORWARD_CHUNK] = stage // schedule.stages
    table[tick, worker, TickColumn.FORWARD_MICROBATCH] = microbatch
    table[tick, worker, TickColumn.FORWARD_INPUT] = inputs[stage, microbatch]
    table[tick, worker, TickColumn.FORWARD_EMBEDS] = stage == 0
    is_first, is_last = stage == 0, stage == schedule.virtual_stages - 1
    # On all workers, for the embedding is split over them; so is the head below.
    table[tick[is_first], :, TickColumn.EMBED_MICROBATCH] = microbatch[is_first, None]
    table[tick[is_last], :, TickColumn.HEAD_MICROBATCH] = microbatch[is_last, None]
    # The cotangent of the last virtual stage is the gradient of the loss.
    table[tick[is_last], worker[is_last], TickColumn.HEAD_COTANGENT] = cotangents[-1, microbatch[is_last]]
    for source in range(schedule.virtual_stages - 1):
        hop, is_source = schedule.activation_hop(source), stage == source
        assert hop is not None
        # Filled at the end of the tick (step 7 above): the receiver's input slot of virtual stage source + 1.
        arriving_slots = inputs[source + 1, microbatch[is_source]]
        table[tick[is_source], schedule.worker(source + 1), arriving_input(hop)] = arriving_slots


def _fill_backward(
    grid: TickGrid, table: npt.NDArray[np.int32], inputs: OpNumbers, cotangents: OpNumbers, stashes: OpNumbers
) -> None:
    """Writes backward passes, gradients of embeddings and what arrives of cotangents."""
    schedule = grid.schedule
    tick, worker, stage, microbatch = _of_kind(grid, BACKWARD)
    # Each round of `stages` virtual stages gives every worker one chunk, in either placement.
    table[tick, worker, TickColumn.BACKWARD_CHUNK] = stage // schedule.stages
    table[tick, worker, TickColumn.BACKWARD_MICROBATCH] = microbatch
    table[tick, worker, TickColumn.BACKWARD_INPUT] = inputs[stage, microbatch]
    table[tick, worker, TickColumn.BACKWARD_COTANGENT] = cotangents[stage, microbatch]
    # NONE for a B, which leaves no stash.
    table[tick, worker, TickColumn.BACKWARD_STASH] = stashes[stage, microbatch]
    is_first = stage == 0
    # dx of virtual stage 0 is the gradient of the embedded tokens.
    table[tick[is_first], :, TickColumn.EMBED_GRADIENT_MICROBATCH] = microbatch[is_first, None]
    # From 1 on: virtual stage 0 sends no cotangent.
    for source in range(1, schedule.virtual_stages):
        hop, is_source = schedule.cotangent_hop(source), stage == source
        assert hop is not None
        # At the end of this tick too (step 7): dx becomes the cotangent of virtual stage source - 1.
        arriving_slots = cotangents[source - 1, microbatch[is_source]]
        table[tick[is_source], schedule.worker(source - 1), arriving_cotangent(hop)] = arriving_slots
