"""Synthetic stages in the executor's own loop over ticks: who waits for whom."""

import collections
import threading
from collections.abc import Sequence

from jtrain.pipeline.spec import PipelineSpec
from jtrain.step.pipeline_ticks import ticks_of
from tests.pipeline.resting_stages import Rests, make_step

PATIENCE_S = 60.0
"""A worker that waits this long for one that should work beside it waits in vain; nothing waits in a healthy
run."""


class Meetings:
    """Rests that end when all workers with an operation in the tick are in theirs.

    alone: (tick, worker) that waited in vain; from the first one on nobody waits.
    """

    def __init__(
        self, barriers: dict[int, threading.Barrier], ticks: Sequence[Sequence[tuple[int, str]]]
    ) -> None:
        self.alone: list[tuple[int, int]] = []
        self._barriers, self._ticks = barriers, ticks
        self.done: collections.Counter[int] = collections.Counter()

    def rest(self, kind: str, worker: int) -> None:
        tick, expected = self._ticks[worker][self.done[worker]]
        self.done[worker] += 1
        assert kind == expected
        try:
            if not self.alone:
                self._barriers[tick].wait(PATIENCE_S)
        except threading.BrokenBarrierError:
            self.alone.append((tick, worker))


def test_operations_of_a_tick_run_side_by_side() -> None:
    """F, I and W of different workers in one tick overlap: nobody's loss or message comes between them."""
    meetings: list[Meetings] = []

    def meet(kind: str, worker: int) -> None:
        meetings[0].rest(kind, worker)

    rests = Rests(
        lambda worker: meet("F", worker), lambda worker: meet("I", worker), lambda worker: meet("W", worker)
    )
    layout, step = make_step(rests, 2, PipelineSpec(schedule="zb-h1"))
    ticks = ticks_of(layout)
    assert ticks.packing == "single"
    ops = [[next((op for op in of if op is not None), None) for of in row] for row in ticks.ops]
    mixed = [row for row in ops if len({op.kind for op in row if op is not None}) > 1]
    assert len(mixed) > 4, "ticks in which workers do different things are what this is about"
    barriers = {tick: threading.Barrier(sum(op is not None for op in row)) for tick, row in enumerate(ops)}
    own = [
        [(tick, op.kind) for tick, row in enumerate(ops) if (op := row[worker]) is not None]
        for worker in range(2)
    ]
    meetings.append(Meetings(barriers, own))
    step()
    assert [meetings[0].done[worker] for worker in range(2)] == [3 * 4, 3 * 4]
    assert meetings[0].alone == []
