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

from jtrain.pipeline.published_schedules import make_schedule
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
        """Time of all ticks, each as long as its slowest worker, by the times of F, I and W of a chunk."""
        longest = (
            count * max(f * forward + i * by_input + w * by_weight for f, i, w in work)
            for work, count in self.works.items()
        )
        return sum(longest)

    def bubble(self, forward: float, by_input: float, by_weight: float) -> float:
        """Fraction of the time in which a worker waits, by the times of F, I and W of every chunk."""
        busy = self.microbatches * self.chunks * (forward + by_input + by_weight)
        return 1 - busy / self.makespan(forward, by_input, by_weight)

    def extrapolate(self, second: "TickCounts", times: int) -> "TickCounts":
        """Sizes as far again beyond `second` as `second` is beyond these, `times` times.

        Example: fused 1F1B over 2 stages takes 6 ticks for 4 microbatches and 7 for 5. For 100 that is
        7 + 95 * (7 - 6) = 102.
        """

        def extend(first_size: int, second_size: int) -> int:
            return second_size + times * (second_size - first_size)

        # A kind of tick that only one of the two has starts or ends at 0.
        kinds = dict.fromkeys((*self.works, *second.works))
        works = {work: extend(self.works.get(work, 0), second.works.get(work, 0)) for work in kinds}
        sizes = ("microbatches", "num_inputs", "num_cotangents", "num_stashes")
        new_sizes = {name: extend(getattr(self, name), getattr(second, name)) for name in sizes}
        return dataclasses.replace(second, **new_sizes, works=works)


def count_ticks(grid: TickGrid) -> TickCounts:
    """Counts a packed schedule."""
    schedule = grid.schedule
    exists = grid.numbers != NONE
    is_unsplit_TP = np.zeros(exists.shape[:2], np.int64)
    is_unsplit_TP[exists[:, :, BACKWARD]] = grid.unsplit.ravel()[
        grid.numbers[:, :, BACKWARD][exists[:, :, BACKWARD]]
    ]
    # A worker's work is a number below 12, that of all workers in a tick a set of bits.
    codes = exists[:, :, FORWARD] + 2 * exists[:, :, BACKWARD] + 4 * (exists[:, :, WEIGHT] + is_unsplit_TP)
    # Equal work of several workers is one bit: a tick lasts as long as its slowest worker, however many there
    # are.
    work_bits = np.bitwise_or.reduce(1 << codes, axis=1)
    works = collections.Counter[TickWork]()
    for bits, count in zip(*np.unique(work_bits, return_counts=True), strict=True):
        worker_codes = (code for code in range(1, 12) if bits >> code & 1)
        works[frozenset((code % 2, code // 2 % 2, code // 4) for code in worker_codes)] += int(count)
    inputs, cotangents, stashes = (_peak_alive(schedule, lives, grid.num_ticks) for lives in grid.lives)
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


def _peak_alive(schedule: PipelineSchedule, lives: Lives, num_ticks: int) -> int:
    """Largest number of values that are alive at once on one worker: the slots that they need."""
    if not lives.start.size:
        return 0
    changes = np.zeros((schedule.stages, num_ticks * MOMENTS + 1), np.int64)
    worker = np.array([schedule.worker(stage) for stage in range(schedule.virtual_stages)])[lives.stage]
    np.add.at(changes, (worker, lives.start), 1)
    # + 1, since a value is alive through its last moment.
    np.add.at(changes, (worker, lives.end + 1), -1)
    return int(np.cumsum(changes, axis=1).max())


@functools.cache
def family_counts(name: str, stages: int, microbatches: int, chunks: int, packing: Packing) -> TickCounts:
    """Sizes of a published schedule; `tests/pipeline/test_tick_counts.py` shows where they become lines.

    Raises:
      UserError: the schedule does not exist for these numbers, as `make_schedule`.
    """
    linear_from, step = 2 * stages, stages if name == "interleaved" else 1
    # Too few for the straight part, or a number that the family does not have: counted in full.
    if microbatches <= linear_from + step or microbatches % step:
        return count_ticks(pack(make_schedule(name, stages, microbatches, chunks), packing))
    # Both lie on the straight part; `step` apart, because interleaved schedules have multiples of P only.
    first, second = (
        family_counts(name, stages, count, chunks, packing) for count in (linear_from, linear_from + step)
    )
    return first.extrapolate(second, (microbatches - linear_from) // step - 1)


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

    candidates = [counts_of("single"), counts_of("fused")]
    if candidates[0].splits_backward:  # otherwise it has no W to align
        candidates.append(counts_of("aligned"))
    return min(candidates, key=rank)
