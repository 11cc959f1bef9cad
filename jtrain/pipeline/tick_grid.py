"""Operations of a schedule packed into ticks: who computes what between two meetings of an SPMD program.

In one SPMD program over the mesh axis `stage`, every permute is a meeting of workers. A tick is what happens
between two meetings, so it should hold as much as it can: with one operation per tick, 1F1B waits for 40 % of
the time over 4 stages and 8 microbatches; with one forward and one backward pass per tick for 27 %, its
closed form (P-1)/(M+P-1).

| packing | in one tick, per worker | order |
|---|---|---|
| single | one operation | that of the stream |
| fused | at most one F, one I or B, one W | each kind in the order of the stream, as early as it can be |
| aligned | as fused | as fused, but all workers do their k-th W in the same tick |

A fused packing lets forward passes overtake backward passes of the stream, never the reverse, so GPipe stays
GPipe. It keeps more inputs than the stream would with workers that run on their own: 1F1B 2 (P - p) - 1 on
worker p, not P - p. In an aligned packing the fewest ticks contain a W, for a stash that lives longer.

Operations are numbers here, (kind * virtual stages + stage) * microbatches + microbatch, because all workers
of a tick are computed at once in arrays: a search packs hundreds of schedules.
"""

import dataclasses
import functools
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from jtrain.pipeline.schedule import PipelineSchedule

type Packing = Literal["single", "fused", "aligned"]
PACKINGS: tuple[Packing, ...] = ("single", "fused", "aligned")

type OpNumbers = npt.NDArray[np.int64]

NONE = -1
"""Number of an operation or a slot where there is none."""

FORWARD, BACKWARD, WEIGHT = range(3)
"""Kinds of an operation, in the order of a tick: F; I or B; W."""

_KINDS = {"F": FORWARD, "I": BACKWARD, "B": BACKWARD, "W": WEIGHT}

# Moments of a tick, in order: lifetimes are counted in tick * MOMENTS + moment.
_EMBED, _FORWARD, _HEAD, _BACKWARD, _WEIGHT, _MOVE = range(6)
MOMENTS = 6


@dataclasses.dataclass(frozen=True)
class Lives:
    """Values that wait in one array of slots: of each its virtual stage and microbatch, and when it is alive.

    start, end: first and last moment, both included.
    """

    stage: OpNumbers
    microbatch: OpNumbers
    start: OpNumbers
    end: OpNumbers


@dataclasses.dataclass(frozen=True)
class TickGrid:
    """A schedule in ticks.

    numbers: [T, P, 3], for each tick, worker and kind the operation, as stage * microbatches + microbatch, or
      NONE.
    whole: [virtual stages, microbatches], True if the backward pass is a B.
    """

    schedule: PipelineSchedule
    packing: Packing
    numbers: OpNumbers
    whole: npt.NDArray[np.bool_]

    @property
    def num_ticks(self) -> int:
        """Number of ticks, T."""
        return len(self.numbers)

    @functools.cached_property
    def when(self) -> OpNumbers:
        """Tick of each operation, [kinds, virtual stages, microbatches]; NONE if it does not exist."""
        return _when(self.numbers, self.whole.size).reshape(3, *self.whole.shape)

    @functools.cached_property
    def lives(self) -> tuple[Lives, Lives, Lives]:
        """Values of the three arrays of slots: inputs, cotangents, stashes."""
        forward, backward, weight = (ticks * MOMENTS for ticks in self.when)
        arrives = np.concatenate([forward[:1] + _EMBED, forward[:-1] + _MOVE])
        if not self.schedule.trains:
            nothing = np.zeros_like(self.whole)
            inputs = _lives(~nothing, arrives, forward + _FORWARD)
            return inputs, _lives(nothing, arrives, arrives), _lives(nothing, arrives, arrives)
        of_loss = np.concatenate([backward[1:] + _MOVE, forward[-1:] + _HEAD])
        return (
            _lives(np.ones_like(self.whole), arrives, backward + _BACKWARD),
            _lives(np.ones_like(self.whole), of_loss, backward + _BACKWARD),
            _lives(~self.whole, backward + _BACKWARD, weight + _WEIGHT),
        )


def _when(grid: OpNumbers, size: int) -> OpNumbers:
    """Tick of each operation, [kinds, virtual stages * microbatches]."""
    found = np.full((3, size), NONE)
    tick, _, kind = np.nonzero(grid != NONE)
    found[kind, grid[grid != NONE]] = tick
    return found


def _lives(there: npt.NDArray[np.bool_], start: OpNumbers, end: OpNumbers) -> Lives:
    stage, microbatch = np.nonzero(there)
    return Lives(stage, microbatch, start[there], end[there])


def pack(schedule: PipelineSchedule, packing: Packing) -> TickGrid:
    """Packs a valid schedule (`checker.check`); each worker takes what is ready when the tick starts."""
    streams = _Streams(schedule)
    if packing == "aligned":
        grid = _aligned(streams)
    else:
        grid = streams.in_grid(_single(streams) if packing == "single" else _fused(streams, weights=True))
    return TickGrid(schedule, packing, grid, streams.whole)


class _Streams:
    """Streams of all workers as numbers, with what each operation needs.

    first, second: for each number the two operations that must be done before it.
    never, always: numbers that are never and always done, for the ends of streams and for needs that there
      are not.
    """

    def __init__(self, schedule: PipelineSchedule) -> None:
        shape = schedule.virtual_stages, schedule.microbatches
        size = schedule.virtual_stages * schedule.microbatches
        self.schedule, self.size, self.never, self.always = schedule, size, 3 * size, 3 * size + 1
        self.streams: list[OpNumbers] = [
            np.array([_KINDS[kind] * size + stage * shape[1] + m for kind, stage, m in stream], np.int64)
            for stream in schedule.streams
        ]
        self.whole = np.zeros(shape, np.bool_)
        for stream in schedule.streams:
            for kind, stage, m in stream:
                if kind == "B":
                    self.whole[stage, m] = True
        forward, backward, _ = np.arange(3 * size).reshape(3, *shape)
        nothing = np.full((1, shape[1]), self.always)
        first = [nothing, forward[:-1], forward, backward]
        second = [np.repeat(nothing, shape[0], 0), backward[1:], nothing, np.repeat(nothing, shape[0], 0)]
        ends = [self.never, self.always]
        self.first, self.second = (
            np.concatenate([np.concatenate(of).ravel(), ends]) for of in (first, second)
        )

    def done(self) -> npt.NDArray[np.bool_]:
        """For each number whether it is done before the first tick: those that the schedule does not have."""
        found = np.ones(3 * self.size + 2, np.bool_)
        for stream in self.streams:
            found[stream] = False
        found[self.never] = False
        return found

    def of_kind(self, kind: int) -> list[OpNumbers]:
        """For each worker its operations of one kind, in order."""
        return [stream[stream // self.size == kind] for stream in self.streams]

    def padded(self, streams: list[OpNumbers], end: int | None = None) -> OpNumbers:
        """Rows of equal length, each with at least one `end` (default: `never`) after its last number."""
        rows = np.full((len(streams), 1 + max(map(len, streams))), self.never if end is None else end)
        for row, stream in zip(rows, streams, strict=True):
            row[: len(stream)] = stream
        return rows

    def in_grid(self, ticks: list[OpNumbers]) -> OpNumbers:
        """The grid of a packing, from the numbers of the operations in each tick, [workers] or [workers,
        kinds].
        """
        found = np.stack(ticks).reshape(len(ticks), len(self.streams), -1)
        grid = np.full((len(ticks), len(self.streams), 3), NONE)
        tick, worker, place = np.nonzero(found != NONE)
        taken = found[tick, worker, place]
        grid[tick, worker, taken // self.size] = taken % self.size
        return grid


def _single(streams: _Streams) -> list[OpNumbers]:
    """The next operation of each stream, if it is ready."""
    rows, done, workers = streams.padded(streams.streams), streams.done(), np.arange(len(streams.streams))
    place = np.zeros_like(workers)
    ticks: list[OpNumbers] = []
    while True:
        ops = rows[workers, place]
        ready = done[streams.first[ops]] & done[streams.second[ops]]
        if not ready.any():
            break
        ticks.append(np.where(ready, ops, NONE))
        done[ops[ready]] = True
        place += ready
    _check_all_done(streams, len(ticks), done)
    return ticks


def _fused(streams: _Streams, *, weights: bool) -> list[OpNumbers]:
    """The next forward pass, backward pass and W that are ready; a pass may use what was just computed
    there.
    """
    done, workers = streams.done(), np.arange(len(streams.streams))
    by_kind = [streams.of_kind(kind) for kind in (FORWARD, BACKWARD, WEIGHT)]
    if not weights:
        done[2 * streams.size : 3 * streams.size] = True
        by_kind[WEIGHT] = [of[:0] for of in by_kind[WEIGHT]]
    forward, backward, weight = map(streams.padded, by_kind)
    # For each backward pass the number of forward passes that come before it in the stream.
    after = streams.padded(
        [np.cumsum(s < streams.size)[s // streams.size == BACKWARD] for s in streams.streams], 0
    )
    f, b, w = (np.zeros_like(workers) for _ in range(3))
    ticks: list[OpNumbers] = []
    while True:
        ops = np.stack([forward[workers, f], backward[workers, b], weight[workers, w]], 1)
        of_forward, of_backward, _ = ops.T
        runs: Any = np.empty(ops.shape, np.bool_)
        needed = streams.first[ops]
        runs[:, FORWARD] = done[needed[:, FORWARD]]
        f += runs[:, FORWARD]
        just = runs[:, FORWARD] & (needed[:, BACKWARD] == of_forward)
        runs[:, BACKWARD] = (done[needed[:, BACKWARD]] | just) & done[streams.second[of_backward]]
        runs[:, BACKWARD] &= f >= after[workers, b]
        b += runs[:, BACKWARD]
        runs[:, WEIGHT] = done[needed[:, WEIGHT]] | (runs[:, BACKWARD] & (needed[:, WEIGHT] == of_backward))
        w += runs[:, WEIGHT]
        if not runs.any():
            break
        ticks.append(np.where(runs, ops, NONE))
        done[ops[runs]] = True
    _check_all_done(streams, len(ticks), done)
    return ticks


def _check_all_done(streams: _Streams, num_ticks: int, done: npt.NDArray[np.bool_]) -> None:
    assert done[: streams.never].all(), (
        f"{streams.schedule.name} cannot go on after tick {num_ticks}: check it first"
    )


def _aligned(streams: _Streams) -> OpNumbers:
    """Fused ticks in which all workers do their k-th W at once, as early as the last of them can."""
    grid = streams.in_grid(_fused(streams, weights=False))
    weights = streams.padded(streams.of_kind(WEIGHT))[:, :-1]
    there = weights != streams.never
    ready = np.append(_when(grid, streams.size), [NONE, NONE])[streams.first[weights]]
    order = np.arange(weights.shape[1])
    # W number k is after number k - 1, and not before the last I that it needs.
    at = np.maximum.accumulate(ready.max(0) - order) + order
    more = max(0, int(at.max(initial=NONE)) + 1 - len(grid))
    grid = np.concatenate([grid, np.full((more, *grid.shape[1:]), NONE)])
    worker, k = np.nonzero(there)
    grid[at[k], worker, WEIGHT] = weights[there] - WEIGHT * streams.size
    return grid
