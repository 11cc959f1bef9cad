"""Pipeline schedule as data: the order in which each worker computes its parts of the model for each
microbatch.

The layers of a model are cut into virtual stages, numbered 0 (next to the embedding) to `virtual_stages - 1`
(next to the loss). A worker is one index of the mesh axis `stage`, and holds `chunks` virtual stages:

| placement | virtual stages of worker p of P | used by |
|---|---|---|
| round_robin | p, p + P, p + 2P, ...: chunk c is virtual stage c * P + p | GPipe, 1F1B, ZB-H1, interleaved 1F1B |
| v | p and 2P - 1 - p: down the workers, then up again | ZBV, DualPipeV |

A user writes compute operations only. Sends, receives, frees, gathers, reductions, updates and buffer slots
follow from them (`instructions.py`, `ticks.py`). An operation is written as in torchtitan's CSV files,
virtual stage, kind and microbatch: `0F0`, `2I0`, `2W0`, `3B1`.

| kind | computes | needs | gives |
|---|---|---|---|
| F | forward pass | the activation of virtual stage - 1, or the embedded tokens | an activation, or the loss |
| I | backward pass by input | F, and the cotangent of virtual stage + 1 or the loss | a cotangent, what W needs |
| W | backward pass by weight | I of the same virtual stage and microbatch | a gradient of the weights |
| B | I and W at once | as I | a cotangent and a gradient |

This package imports neither jax nor a model.
"""

import dataclasses
import enum
import functools
import re
from collections.abc import Callable
from typing import Literal, NamedTuple, cast

from jtrain.errors import UserError

type PassKind = Literal["F", "I", "W", "B"]
"""Forward pass, gradient of inputs, gradient of weights, or both gradients at once."""

type ChunkPlacement = Literal["round_robin", "v"]
"""Order in which chunks of layers go to workers: 0 1 0 1, or 0 1 1 0."""

_CELL = re.compile(r"(\d+)([FIWB])(\d+)")


class StageOp(NamedTuple):
    """One computation: `kind` for one virtual stage and one microbatch."""

    kind: PassKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def parse_op(text: str) -> StageOp:
    """The operation of a cell such as `2I0`.

    Raises:
      UserError: the text is not an operation.
    """
    match = _CELL.fullmatch(text)
    if match is None:
        raise UserError(
            f"{text!r} is not an operation. Write virtual stage, F, I, W or B, and microbatch, as in 2I0."
        )
    return StageOp(cast(PassKind, match[2]), int(match[1]), int(match[3]))


class StageHop(enum.IntEnum):
    """Way from the worker of one virtual stage to that of the next or previous one.

    DOWN: to worker p + 1; UP: to worker p - 1. As permutes, both are chains over all workers.
    LOCAL: both virtual stages are of one worker (the turning point of placement v, or one worker alone).
    WRAP: between the last worker and the first (round_robin). As a permute, it is one pair: activations go
      from the last worker to the first, cotangents from the first to the last. With two workers it is an UP
      or a DOWN.
    """

    DOWN = 0
    UP = 1
    LOCAL = 2
    WRAP = 3


@dataclasses.dataclass(frozen=True)
class PipelineSchedule:
    """Order of the computations of each worker.

    name: the schedule's name in messages and pictures.
    stages: number of workers, the size of the mesh axis `stage`.
    microbatches: number of microbatches of one step.
    chunks: virtual stages per worker.
    streams: for each worker its operations, in order. Nothing is checked here: see `checker.check`.
    """

    name: str
    stages: int
    microbatches: int
    chunks: int
    placement: ChunkPlacement
    streams: tuple[tuple[StageOp, ...], ...]

    @property
    def virtual_stages(self) -> int:
        """Number of virtual stages of all workers together."""
        return self.stages * self.chunks

    def worker(self, stage: int) -> int:
        """The worker that holds a virtual stage."""
        return self._workers[stage]

    def chunk(self, stage: int) -> int:
        """Number of a virtual stage on its worker, from 0."""
        # Holds for both placements: in a V, too, chunk 1 has the virtual stages from P on.
        return stage // self.stages

    def stage(self, worker: int, chunk: int) -> int:
        """The virtual stage that is chunk `chunk` of `worker`."""
        return stage_of(worker, chunk, self.stages, self.placement)

    def needs(self, op: StageOp) -> tuple[StageOp, ...]:
        """Operations whose results `op` uses, as far as this schedule has them."""
        # A schedule has I or B, and evaluation neither: what it lacks cannot be waited for.
        return tuple(need for need in self._possible_needs(op) if need in self._ops)

    def activation_hop(self, stage: int) -> StageHop | None:
        """Way of the activation that virtual stage `stage` computes; None for the last one."""
        return None if stage == self.virtual_stages - 1 else self._hop(stage, stage + 1)

    def cotangent_hop(self, stage: int) -> StageHop | None:
        """Way of the cotangent that virtual stage `stage` computes; None for the first one."""
        return None if stage == 0 else self._hop(stage, stage - 1)

    @functools.cached_property
    def activation_hops(self) -> tuple[StageHop, ...]:
        """Ways that activations take."""
        return self._used_hops(self.activation_hop)

    @functools.cached_property
    def cotangent_hops(self) -> tuple[StageHop, ...]:
        """Ways that cotangents take; none if there are forward passes only."""
        return self._used_hops(self.cotangent_hop) if self.trains else ()

    def _used_hops(self, hop_of: Callable[[int], StageHop | None]) -> tuple[StageHop, ...]:
        used_hops = {hop_of(stage) for stage in range(self.virtual_stages)}
        # A set has no order, and the order of the hops is part of the program.
        return tuple(hop for hop in StageHop if hop in used_hops)

    @functools.cached_property
    def trains(self) -> bool:
        """False if there are forward passes only."""
        return any(op.kind != "F" for stream in self.streams for op in stream)

    @property
    def forward_only(self) -> "PipelineSchedule":
        """The forward passes alone, for evaluation."""
        streams = tuple(tuple(op for op in stream if op.kind == "F") for stream in self.streams)
        return dataclasses.replace(self, streams=streams)

    @functools.cached_property
    def splits_backward(self) -> bool:
        """True if some backward passes are split into I and W."""
        return any(op.kind == "W" for stream in self.streams for op in stream)

    def _hop(self, source: int, target: int) -> StageHop:
        a, b = self.worker(source), self.worker(target)
        return (
            # Neighbours first: with two workers, worker 1 to worker 0 is an UP and no WRAP.
            StageHop.LOCAL
            if a == b
            else StageHop.DOWN
            if b == a + 1
            else StageHop.UP
            if b == a - 1
            else StageHop.WRAP
        )

    def _possible_needs(self, op: StageOp) -> tuple[StageOp, ...]:
        kind, stage, microbatch = op
        if kind == "W":
            return (StageOp("I", stage, microbatch),)
        # Virtual stage 0 needs none: what its F would need is in no schedule and is filtered by `needs`.
        if kind == "F":
            return (StageOp("F", stage - 1, microbatch),)
        # The next virtual stage has one of the two: `needs` drops the other.
        next_backward = (StageOp("I", stage + 1, microbatch), StageOp("B", stage + 1, microbatch))
        return (StageOp("F", stage, microbatch), *next_backward)

    @functools.cached_property
    def _workers(self) -> tuple[int, ...]:
        return tuple(worker_of(stage, self.stages, self.placement) for stage in range(self.virtual_stages))

    @functools.cached_property
    def _ops(self) -> frozenset[StageOp]:
        return frozenset(op for stream in self.streams for op in stream)


def worker_of(stage: int, stages: int, placement: ChunkPlacement) -> int:
    """The worker that holds a virtual stage, of `stages` workers."""
    # On the way up the V comes back: with 4 workers virtual stage 5 is on worker 2.
    return 2 * stages - 1 - stage if placement == "v" and stage >= stages else stage % stages


def stage_of(worker: int, chunk: int, stages: int, placement: ChunkPlacement) -> int:
    """The virtual stage that is chunk `chunk` of `worker`, of `stages` workers."""
    # Chunk 1 of worker p is the p-th virtual stage from the end, counted from 0.
    return 2 * stages - 1 - worker if placement == "v" and chunk else chunk * stages + worker
