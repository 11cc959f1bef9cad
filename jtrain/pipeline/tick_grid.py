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

Example, ZB-H1 over 2 workers with 3 microbatches: 10 ticks of one operation; fused 5 ticks,

    worker 0:  0F0 | 0F1         | 0F2 0I0 0W0 | 0I1 0W1     | 0I2 0W2
    worker 1:      | 1F0 1I0 1W0 | 1F1 1I1 1W1 | 1F2 1I2 1W2 |

Aligned, worker 1 does its W one tick later, when worker 0 has one as well: 3 ticks contain a W instead of 4.
With 2 virtual stages and 3 microbatches 1I2 is operation (1 * 2 + 1) * 3 + 2 = 11.
"""

import dataclasses
import functools
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from jtrain.pipeline.schedule import PipelineSchedule

type Packing = Literal["single", "fused", "aligned"]
"""Rule by which operations share a tick."""

PACKINGS: tuple[Packing, ...] = ("single", "fused", "aligned")

type OpNumbers = npt.NDArray[np.int64]
"""Numbers of operations, int64; `NONE` where there is none."""

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
    unsplit: [virtual stages, microbatches], True if the backward pass is a B.
    """

    schedule: PipelineSchedule
    packing: Packing
    numbers: OpNumbers
    unsplit: npt.NDArray[np.bool_]

    @property
    def num_ticks(self) -> int:
        """Number of ticks, T."""
        return len(self.numbers)

    @functools.cached_property
    def tick_of(self) -> OpNumbers:
        """Tick of each operation, [kinds, virtual stages, microbatches]; NONE if it does not exist."""
        return _tick_of_ops(self.numbers, self.unsplit.size).reshape(3, *self.unsplit.shape)

    @functools.cached_property
    def lives(self) -> tuple[Lives, Lives, Lives]:
        """Values of the three arrays of slots: inputs, cotangents, stashes."""
        # Moments also order what happens within one tick.
        forward, backward, weight = (ticks * MOMENTS for ticks in self.tick_of)
        # An input appears by embedding in its own tick, or by a move at the end of the sender's tick.
        arrives = np.concatenate([forward[:1] + _EMBED, forward[:-1] + _MOVE])
        # Without backward passes an input lives until its F, and nothing else waits.
        if not self.schedule.trains:
            no_values = np.zeros_like(self.unsplit)
            inputs = _lives(~no_values, arrives, forward + _FORWARD)
            return inputs, _lives(no_values, arrives, arrives), _lives(no_values, arrives, arrives)
        cotangent_start = np.concatenate([backward[1:] + _MOVE, forward[-1:] + _HEAD])
        return (
            _lives(np.ones_like(self.unsplit), arrives, backward + _BACKWARD),
            _lives(np.ones_like(self.unsplit), cotangent_start, backward + _BACKWARD),
            _lives(~self.unsplit, backward + _BACKWARD, weight + _WEIGHT),
        )


def _tick_of_ops(grid: OpNumbers, size: int) -> OpNumbers:
    """Tick of each operation, [kinds, virtual stages * microbatches]."""
    tick_by_op = np.full((3, size), NONE)
    tick, _, kind = np.nonzero(grid != NONE)
    tick_by_op[kind, grid[grid != NONE]] = tick
    return tick_by_op


def _lives(exists: npt.NDArray[np.bool_], start: OpNumbers, end: OpNumbers) -> Lives:
    stage, microbatch = np.nonzero(exists)
    return Lives(stage, microbatch, start[exists], end[exists])


def pack(schedule: PipelineSchedule, packing: Packing) -> TickGrid:
    """Packs a valid schedule (`checker.check`); each worker takes what is ready when the tick starts."""
    streams = _Streams(schedule)
    if packing == "aligned":
        grid = _aligned(streams)
    else:
        grid = streams.in_grid(_single(streams) if packing == "single" else _fused(streams, weights=True))
    return TickGrid(schedule, packing, grid, streams.unsplit)


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
            np.array(
                [_KINDS[kind] * size + stage * shape[1] + microbatch for kind, stage, microbatch in stream],
                np.int64,
            )
            for stream in schedule.streams
        ]
        self.unsplit = np.zeros(shape, np.bool_)
        for stream in schedule.streams:
            for kind, stage, microbatch in stream:
                if kind == "B":
                    self.unsplit[stage, microbatch] = True
        forward, backward, _ = np.arange(3 * size).reshape(3, *shape)
        no_need = np.full((1, shape[1]), self.always)
        # By kind: F of virtual stage 0 needs nothing, any other F the F before it; I or B its F; W its I.
        first = [no_need, forward[:-1], forward, backward]
        second = [np.repeat(no_need, shape[0], 0), backward[1:], no_need, np.repeat(no_need, shape[0], 0)]
        end_markers = [self.never, self.always]
        # Two more numbers at the end, so that indexing with `never` and `always` stays in bounds.
        self.first, self.second = (
            np.concatenate([np.concatenate(parts).ravel(), end_markers]) for parts in (first, second)
        )

    def initially_done(self) -> npt.NDArray[np.bool_]:
        """True for each number that is done before the first tick: those that the schedule does not have."""
        is_done = np.ones(3 * self.size + 2, np.bool_)
        for stream in self.streams:
            is_done[stream] = False
        # Two numbers are in no stream: `always` keeps its True, `never` must not.
        is_done[self.never] = False
        return is_done

    def of_kind(self, kind: int) -> list[OpNumbers]:
        """For each worker its operations of one kind, in order."""
        return [stream[stream // self.size == kind] for stream in self.streams]

    def pad_rows(self, streams: list[OpNumbers], end: int | None = None) -> OpNumbers:
        """Rows of equal length, each with at least one `end` (default: `never`) after its last number."""
        rows = np.full((len(streams), 1 + max(map(len, streams))), self.never if end is None else end)
        for row, stream in zip(rows, streams, strict=True):
            row[: len(stream)] = stream
        return rows

    def in_grid(self, ticks: list[OpNumbers]) -> OpNumbers:
        """Grid of a packing, from the numbers of each tick's operations, [workers] or [workers, kinds]."""
        numbers_TPK = np.stack(ticks).reshape(len(ticks), len(self.streams), -1)
        grid = np.full((len(ticks), len(self.streams), 3), NONE)
        tick, worker, column = np.nonzero(numbers_TPK != NONE)
        ops = numbers_TPK[tick, worker, column]
        grid[tick, worker, ops // self.size] = ops % self.size
        return grid


def _single(streams: _Streams) -> list[OpNumbers]:
    """The next operation of each stream, if it is ready."""
    rows, is_done = streams.pad_rows(streams.streams), streams.initially_done()
    workers = np.arange(len(streams.streams))
    position = np.zeros_like(workers)
    ticks: list[OpNumbers] = []
    while True:
        ops = rows[workers, position]
        is_ready = is_done[streams.first[ops]] & is_done[streams.second[ops]]
        if not is_ready.any():
            break
        # Marked done after all workers were asked: what a tick computes is ready for others in the next.
        ticks.append(np.where(is_ready, ops, NONE))
        is_done[ops[is_ready]] = True
        position += is_ready
    _check_all_done(streams, len(ticks), is_done)
    return ticks


def _fused(streams: _Streams, *, weights: bool) -> list[OpNumbers]:
    """Next F, backward pass and W of each worker, if ready; they may use each other's results."""
    is_done, workers = streams.initially_done(), np.arange(len(streams.streams))
    by_kind = [streams.of_kind(kind) for kind in (FORWARD, BACKWARD, WEIGHT)]
    # `_aligned` places the W itself; here they count as done and as not there.
    if not weights:
        is_done[2 * streams.size : 3 * streams.size] = True
        by_kind[WEIGHT] = [ops[:0] for ops in by_kind[WEIGHT]]
    forward, backward, weight = map(streams.pad_rows, by_kind)
    # For each backward pass the number of forward passes that come before it in the stream.
    forwards_before = streams.pad_rows(
        [np.cumsum(stream < streams.size)[stream // streams.size == BACKWARD] for stream in streams.streams],
        0,
    )
    f, b, w = (np.zeros_like(workers) for _ in range(3))
    ticks: list[OpNumbers] = []
    while True:
        ops = np.stack([forward[workers, f], backward[workers, b], weight[workers, w]], 1)
        forward_ops, backward_ops, _ = ops.T
        will_run: Any = np.empty(ops.shape, np.bool_)
        needs = streams.first[ops]
        will_run[:, FORWARD] = is_done[needs[:, FORWARD]]
        f += will_run[:, FORWARD]
        # On the last virtual stage F and its B may share a tick: the loss lies between them.
        is_same_tick = will_run[:, FORWARD] & (needs[:, BACKWARD] == forward_ops)
        will_run[:, BACKWARD] = (is_done[needs[:, BACKWARD]] | is_same_tick) & is_done[
            streams.second[backward_ops]
        ]
        # No backward pass overtakes a forward pass of its stream: GPipe would become 1F1B.
        will_run[:, BACKWARD] &= f >= forwards_before[workers, b]
        b += will_run[:, BACKWARD]
        will_run[:, WEIGHT] = is_done[needs[:, WEIGHT]] | (
            will_run[:, BACKWARD] & (needs[:, WEIGHT] == backward_ops)
        )
        w += will_run[:, WEIGHT]
        if not will_run.any():
            break
        ticks.append(np.where(will_run, ops, NONE))
        is_done[ops[will_run]] = True
    _check_all_done(streams, len(ticks), is_done)
    return ticks


def _check_all_done(streams: _Streams, num_ticks: int, is_done: npt.NDArray[np.bool_]) -> None:
    assert is_done[: streams.never].all(), (
        f"{streams.schedule.name} cannot go on after tick {num_ticks}: check it first"
    )


def _aligned(streams: _Streams) -> OpNumbers:
    """Fused ticks in which all workers do their k-th W at once, as early as the last of them can."""
    grid = streams.in_grid(_fused(streams, weights=False))
    # Without the end mark; rows of workers with fewer W are padded with `never`.
    weights = streams.pad_rows(streams.of_kind(WEIGHT))[:, :-1]
    exists = weights != streams.never
    # Two entries for `never` and `always`, as in `first`.
    # The I that each W needs: a W may follow it in the same tick.
    ready_tick = np.append(_tick_of_ops(grid, streams.size), [NONE, NONE])[streams.first[weights]]
    order = np.arange(weights.shape[1])
    # W number k is after number k - 1, and not before the last I that it needs.
    weight_tick = np.maximum.accumulate(ready_tick.max(0) - order) + order
    # The last W may come after the last tick of F and I.
    num_added = max(0, int(weight_tick.max(initial=NONE)) + 1 - len(grid))
    grid = np.concatenate([grid, np.full((num_added, *grid.shape[1:]), NONE)])
    worker, k = np.nonzero(exists)
    # Streams count over all kinds, a grid within its kind.
    grid[weight_tick[k], worker, WEIGHT] = weights[exists] - WEIGHT * streams.size
    return grid
