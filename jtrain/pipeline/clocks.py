"""Time and memory of a schedule before anything runs, under two clocks.

| clock | who waits for whom | for |
|---|---|---|
| `dataflow` | an operation starts when its worker is free and its inputs are there | stages that run on their own |
| `lockstep` | a tick starts when the neighbours (or all workers) have ended the tick before | one SPMD program |

The bubble is the fraction of all workers' time in which they compute nothing: 1 - busy / (workers x
makespan). Costs are in any unit of time; with `unit_costs` F, I and W of a chunk take 1 each and B takes 2,
times are whole numbers, and the closed forms of the papers hold exactly.
"""

import collections
import dataclasses
from typing import Literal, NamedTuple

from jtrain.pipeline.schedule import PipelineSchedule, StageOp
from jtrain.pipeline.ticks import TickOps, Ticks

type Meeting = Literal["neighbours", "all"]


@dataclasses.dataclass(frozen=True)
class Costs:
    """Times of the operations, per virtual stage, and of a message between two workers.

    A B takes what I and W take. Where the forward pass is recomputed, its time is part of I.
    """

    forward: tuple[float, ...]
    by_input: tuple[float, ...]
    by_weight: tuple[float, ...]
    message: float = 0.0

    def of(self, op: StageOp) -> float:
        """Time of an operation."""
        match op.kind:
            case "F":
                return self.forward[op.stage]
            case "I":
                return self.by_input[op.stage]
            case "W":
                return self.by_weight[op.stage]
            case "B":
                return self.by_input[op.stage] + self.by_weight[op.stage]


def equal_costs(
    schedule: PipelineSchedule, forward: float, by_input: float, by_weight: float, message: float = 0.0
) -> Costs:
    """Costs that are the same for all virtual stages."""
    n = schedule.virtual_stages
    return Costs((forward,) * n, (by_input,) * n, (by_weight,) * n, message)


def unit_costs(schedule: PipelineSchedule) -> Costs:
    """F, I and W of a chunk take 1, messages nothing."""
    return equal_costs(schedule, 1.0, 1.0, 1.0)


class Span(NamedTuple):
    """An operation in time."""

    op: StageOp
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class PipelineTimeline:
    """For each worker its operations in time, in order."""

    workers: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """Time at which the last operation ends; the first starts at 0."""
        return max(span.end for spans in self.workers for span in spans)

    @property
    def busy(self) -> tuple[float, ...]:
        """For each worker the time in which it computes."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.workers)

    @property
    def bubble(self) -> float:
        """Fraction of all workers' time in which they compute nothing."""
        everything = self.makespan * len(self.workers)
        return (everything - sum(self.busy)) / everything

    def in_flight(self) -> tuple[tuple[tuple[float, int], ...], ...]:
        """For each worker (time, chunks and microbatches in flight from then on), from the first F to the
        end.

        In flight: from the start of F to the end of W or B.
        """
        return tuple(_in_flight(spans) for spans in self.workers)

    @property
    def peaks(self) -> tuple[int, ...]:
        """For each worker the most chunks and microbatches in flight at once, as papers give a schedule's
        memory.
        """
        return tuple(max(count for _, count in kept) for kept in self.in_flight())


def _in_flight(spans: tuple[Span, ...]) -> tuple[tuple[float, int], ...]:
    changes: collections.Counter[float] = collections.Counter()
    for span in spans:
        if span.op.kind == "F":
            changes[span.start] += 1
        elif span.op.kind in "WB":
            changes[span.end] -= 1
    found: list[tuple[float, int]] = []
    now = 0
    for time in sorted(changes):
        now += changes[time]
        found.append((time, now))
    return tuple(found)


def dataflow(schedule: PipelineSchedule, costs: Costs) -> PipelineTimeline:
    """The timeline of workers that run on their own, for a valid schedule (`checker.check`)."""
    ends: dict[StageOp, float] = {}
    spans: list[list[Span]] = [[] for _ in schedule.streams]
    moved = True
    while moved:
        moved = False
        for worker, stream in enumerate(schedule.streams):
            mine = spans[worker]
            while len(mine) < len(stream):
                op = stream[len(mine)]
                needs = schedule.needs(op)
                if any(need not in ends for need in needs):
                    break
                ready = [
                    ends[need] + costs.message * (schedule.worker(need.stage) != worker) for need in needs
                ]
                start = max([mine[-1].end if mine else 0.0, *ready])
                ends[op] = start + costs.of(op)
                mine.append(Span(op, start, ends[op]))
                moved = True
    assert len(ends) == sum(map(len, schedule.streams)), f"{schedule.name} ends in a deadlock: check it first"
    return PipelineTimeline(tuple(map(tuple, spans)))


def lockstep(ticks: Ticks, costs: Costs, *, meeting: Meeting = "all") -> PipelineTimeline:
    """The timeline of one SPMD program that permutes after each tick.

    Args:
      meeting: `all` if every tick ends with a collective over all stages, so that a tick takes as long as its
        slowest worker; `neighbours` if it ends with chain permutes alone, so that a worker waits for the two
        beside it. Then a message takes `costs.message` in every tick.
    """
    stages = ticks.schedule.stages
    ends: list[float] = [0.0] * stages
    spans: list[list[Span]] = [[] for _ in range(stages)]
    message = costs.message if stages > 1 else 0.0
    for number, row in enumerate(ticks.ops):
        starts = list(ends)
        if number:
            starts = [
                (max(ends) if meeting == "all" else max(ends[max(0, p - 1) : p + 2])) + message
                for p in range(stages)
            ]
        for p, ops in enumerate(row):
            ends[p] = _run_tick(ops, starts[p], costs, spans[p])
    return PipelineTimeline(tuple(map(tuple, spans)))


def _run_tick(ops: TickOps, start: float, costs: Costs, spans: list[Span]) -> float:
    """Adds the operations of one worker in one tick; returns when they end."""
    for op in ops:
        if op is not None:
            spans.append(Span(op, start, start + costs.of(op)))
            start = spans[-1].end
    return start


def messages(schedule: PipelineSchedule) -> dict[tuple[int, int], int]:
    """(sender, receiver) -> messages of one step, each an activation or a cotangent of one microbatch."""
    found: collections.Counter[tuple[int, int]] = collections.Counter()
    for worker, stream in enumerate(schedule.streams):
        for op in stream:
            target = op.stage + 1 if op.kind == "F" else op.stage - 1
            if op.kind != "W" and 0 <= target < schedule.virtual_stages and schedule.worker(target) != worker:
                found[worker, schedule.worker(target)] += 1
    return dict(sorted(found.items()))
