"""Time and memory of a schedule before anything runs, under two clocks.

| clock | who waits for whom | for |
|---|---|---|
| `dataflow` | an operation starts when its worker is free and its inputs are there | stages that run on their own |
| `lockstep` | a tick starts when the neighbours (or all workers) have ended the tick before | one SPMD
program |

The bubble is the fraction of all workers' time in which they compute nothing: 1 - busy / (workers x
makespan). Costs are in any unit of time; with `unit_costs` F, I and W of a chunk take 1 each and B takes 2,
times are whole numbers, and the closed forms of the papers hold exactly.

Example: 1F1B over P = 2 workers with 2 microbatches and unit costs, F = 1 and B = 2,

    time       0   1   2   3   4   5   6   7   8   9
    worker 0   0F0 0F1 .   .   0B0 0B0 .   0B1 0B1
    worker 1   .   1F0 1B0 1B0 1F1 1B1 1B1 .   .

ends at 9. Each worker computes for 6 and waits for (P - 1)(F + B) = 3, so the bubble is 1 - 12 / 18 = 1/3.
"""

import collections
import dataclasses
from typing import Literal, NamedTuple

from jtrain.pipeline.schedule import PipelineSchedule, StageOp
from jtrain.pipeline.ticks import TickOps, Ticks

type Meeting = Literal["neighbours", "all"]
"""Workers that wait for each other at a tick."""


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
        total_time = self.makespan * len(self.workers)
        return (total_time - sum(self.busy)) / total_time

    def in_flight(self) -> tuple[tuple[tuple[float, int], ...], ...]:
        """For each worker (time, chunks and microbatches in flight from then on).

        In flight: from the start of F to the end of W or B.
        """
        return tuple(_in_flight(spans) for spans in self.workers)

    @property
    def peaks(self) -> tuple[int, ...]:
        """For each worker the most chunks and microbatches in flight, papers' measure of memory."""
        return tuple(max(count for _, count in steps) for steps in self.in_flight())


def _in_flight(spans: tuple[Span, ...]) -> tuple[tuple[float, int], ...]:
    changes: collections.Counter[float] = collections.Counter()
    for span in spans:
        if span.op.kind == "F":
            changes[span.start] += 1
        # Not at an I: until its W, the stash is kept.
        elif span.op.kind in "WB":
            changes[span.end] -= 1
    steps: list[tuple[float, int]] = []
    in_flight = 0
    for time in sorted(changes):
        # At one time ends and starts cancel: a freed slot is used again at once.
        in_flight += changes[time]
        steps.append((time, in_flight))
    return tuple(steps)


def dataflow(schedule: PipelineSchedule, costs: Costs) -> PipelineTimeline:
    """The timeline of workers that run on their own, for a valid schedule (`checker.check`)."""
    ends: dict[StageOp, float] = {}
    spans: list[list[Span]] = [[] for _ in schedule.streams]
    has_moved = True
    while has_moved:
        has_moved = False
        for worker, stream in enumerate(schedule.streams):
            own_spans = spans[worker]
            # As far as this worker can go; the outer loop returns when others have moved on.
            while len(own_spans) < len(stream):
                op = stream[len(own_spans)]
                needs = schedule.needs(op)
                if any(need not in ends for need in needs):
                    break
                arrivals = [
                    # A message takes time between two workers only.
                    ends[need] + costs.message * (schedule.worker(need.stage) != worker)
                    for need in needs
                ]
                start = max([own_spans[-1].end if own_spans else 0.0, *arrivals])
                ends[op] = start + costs.of(op)
                own_spans.append(Span(op, start, ends[op]))
                has_moved = True
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
    # A single stage has no neighbour to wait for.
    message = costs.message if stages > 1 else 0.0
    for number, row in enumerate(ticks.ops):
        # In the first tick nothing has to arrive.
        starts = list(ends)
        if number:
            starts = [
                # Chain permutes: p - 1, p and p + 1 must have ended the tick before.
                (max(ends) if meeting == "all" else max(ends[max(0, worker - 1) : worker + 2])) + message
                for worker in range(stages)
            ]
        for worker, ops in enumerate(row):
            ends[worker] = _run_tick(ops, starts[worker], costs, spans[worker])
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
    message_counts: collections.Counter[tuple[int, int]] = collections.Counter()
    for worker, stream in enumerate(schedule.streams):
        for op in stream:
            target = op.stage + 1 if op.kind == "F" else op.stage - 1
            # W sends nothing; the ends of the model have no peer.
            if op.kind != "W" and 0 <= target < schedule.virtual_stages and schedule.worker(target) != worker:
                message_counts[worker, schedule.worker(target)] += 1
    return dict(sorted(message_counts.items()))
