"""Sizes of a schedule in ticks: all that a plan needs of it, without the table.

In the middle of a published schedule every worker does the same again and again, so all sizes are straight
lines in the number of microbatches from two per stage on. They are counted for two numbers of microbatches
there and continued, which is exact, and as fast for 100,000 microbatches as for 100.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from jtrain.pipeline.families import make_schedule
from jtrain.pipeline.schedule import PipelineSchedule, StageHop
from jtrain.pipeline.tick_grid import BACKWARD, FORWARD, MOMENTS, NONE, WEIGHT, Lives, Packing, TickGrid, pack

type TickWork = frozenset[tuple[int, int, int]]
"""What the workers do in one tick: of each that works the number of F, of I and of W, where B is an I and a
W."""


@dataclasses.dataclass(frozen=True)
class TickCounts:
    """Sizes of a schedule in ticks.

    activation_hops, cotangent_hops: ways that activations and cotangents take.
    num_inputs, num_cotangents, num_stashes: slots of every worker; see `jtrain.pipeline.ticks`.
    works: number of ticks of each kind.
    """

    stages: int
    microbatches: int
    chunks: int
    splits_backward: bool
    activation_hops: tuple[StageHop, ...]
    cotangent_hops: tuple[StageHop, ...]
    packing: Packing
    num_inputs: int
    num_cotangents: int
    num_stashes: int
    works: dict[TickWork, int]

    @property
    def num_ticks(self) -> int:
        """Number of ticks."""
        return sum(self.works.values())

    def makespan(self, forward: float, by_input: float, by_weight: float) -> float:
        """Time of all ticks if each takes as long as its slowest worker, by those of F, I and W of every
        chunk.
        """
        longest = (
            count * max(f * forward + i * by_input + w * by_weight for f, i, w in work)
            for work, count in self.works.items()
        )
        return sum(longest)

    def bubble(self, forward: float, by_input: float, by_weight: float) -> float:
        """Fraction of the time in which a worker waits, by the times of F, I and W of every chunk."""
        busy = self.microbatches * self.chunks * (forward + by_input + by_weight)
        return 1 - busy / self.makespan(forward, by_input, by_weight)

    def later(self, other: "TickCounts", times: int) -> "TickCounts":
        """The sizes as far again beyond `other` as `other` is beyond these, `times` times."""

        def line(here: int, there: int) -> int:
            return there + times * (there - here)

        kinds = dict.fromkeys((*self.works, *other.works))
        works = {work: line(self.works.get(work, 0), other.works.get(work, 0)) for work in kinds}
        sizes = ("microbatches", "num_inputs", "num_cotangents", "num_stashes")
        more = {name: line(getattr(self, name), getattr(other, name)) for name in sizes}
        return dataclasses.replace(other, **more, works=works)


def count_ticks(grid: TickGrid) -> TickCounts:
    """Counts a packed schedule."""
    schedule = grid.schedule
    there = grid.numbers != NONE
    whole = np.zeros(there.shape[:2], np.int64)
    whole[there[:, :, BACKWARD]] = grid.whole.ravel()[grid.numbers[:, :, BACKWARD][there[:, :, BACKWARD]]]
    # A worker's work is a number below 12, that of all workers in a tick a set of bits.
    codes = there[:, :, FORWARD] + 2 * there[:, :, BACKWARD] + 4 * (there[:, :, WEIGHT] + whole)
    ticks = np.bitwise_or.reduce(1 << codes, axis=1)
    works = collections.Counter[TickWork]()
    for bits, count in zip(*np.unique(ticks, return_counts=True), strict=True):
        each = (code for code in range(1, 12) if bits >> code & 1)
        works[frozenset((code % 2, code // 2 % 2, code // 4) for code in each)] += int(count)
    inputs, cotangents, stashes = (_most_alive(schedule, lives, grid.num_ticks) for lives in grid.lives)
    return TickCounts(
        schedule.stages,
        schedule.microbatches,
        schedule.chunks,
        schedule.splits_backward,
        schedule.activation_hops,
        schedule.cotangent_hops,
        grid.packing,
        inputs,
        cotangents,
        stashes,
        dict(works),
    )


def _most_alive(schedule: PipelineSchedule, lives: Lives, num_ticks: int) -> int:
    """Largest number of values that are alive at once on one worker: the slots that they need."""
    if not lives.start.size:
        return 0
    changes = np.zeros((schedule.stages, num_ticks * MOMENTS + 1), np.int64)
    worker = np.array([schedule.worker(stage) for stage in range(schedule.virtual_stages)])[lives.stage]
    np.add.at(changes, (worker, lives.start), 1)
    np.add.at(changes, (worker, lives.end + 1), -1)
    return int(np.cumsum(changes, axis=1).max())


@functools.cache
def family_counts(name: str, stages: int, microbatches: int, chunks: int, packing: Packing) -> TickCounts:
    """Sizes of a published schedule; see `tests/pipeline/test_tick_counts.py` for where they become straight
    lines.

    Raises:
      UserError: the schedule does not exist for these numbers, as `make_schedule`.
    """
    settled, step = 2 * stages, stages if name == "interleaved" else 1
    if microbatches <= settled + step or microbatches % step:
        return count_ticks(pack(make_schedule(name, stages, microbatches, chunks), packing))
    first, second = (family_counts(name, stages, of, chunks, packing) for of in (settled, settled + step))
    return first.later(second, (microbatches - settled) // step - 1)


def shortest(
    counts_of: Callable[[Packing], TickCounts], forward: float, by_input: float, by_weight: float
) -> TickCounts:
    """The packing that takes the least time; among equals the one with the fewest slots, then ticks.

    Args:
      forward, by_input, by_weight: times of F, I and W of every chunk.
    """

    def rank(counts: TickCounts) -> tuple[float, int, int]:
        slots = counts.num_inputs + counts.num_cotangents + counts.num_stashes
        return counts.makespan(forward, by_input, by_weight), slots, counts.num_ticks

    found = [counts_of("single"), counts_of("fused")]
    if found[0].splits_backward:  # otherwise it has no W to align
        found.append(counts_of("aligned"))
    return min(found, key=rank)
