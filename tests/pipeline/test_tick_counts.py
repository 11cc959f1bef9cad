"""Sizes of a schedule in ticks: those of its table, and straight lines in the number of microbatches."""

from collections.abc import Iterable, Iterator

import pytest

from jtrain.errors import UserError
from jtrain.pipeline.clocks import equal_costs, lockstep
from jtrain.pipeline.published_schedules import PUBLISHED_SCHEDULES, make_schedule
from jtrain.pipeline.schedule import PipelineSchedule
from jtrain.pipeline.tick_counts import count_ticks, family_counts, shortest
from jtrain.pipeline.tick_grid import PACKINGS, Packing, pack
from jtrain.pipeline.ticks import make_ticks

COSTS = ((1.0, 1.0, 1.0), (2.0, 3.0, 1.0), (1.0, 2.0, 1.0))


def chunks_of(name: str) -> tuple[int, ...]:
    return (2, 3, 4) if name == "interleaved" else (2,) if name in ("zbv", "dualpipev") else (1,)


def schedules(stages: int, microbatches: int) -> Iterator[PipelineSchedule]:
    """All that exist for these numbers."""
    for name in PUBLISHED_SCHEDULES:
        for chunks in chunks_of(name):
            try:
                yield make_schedule(name, stages, microbatches, chunks)
            except UserError:
                continue


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 2), (2, 4), (3, 9), (4, 8), (5, 15)])
def test_counts_are_those_of_the_table(stages: int, microbatches: int) -> None:
    """Slots, ticks, hops and the lockstep clock, for every schedule, packing and ratio of costs."""
    for schedule in schedules(stages, microbatches):
        for packing in PACKINGS:
            counts, ticks = count_ticks(pack(schedule, packing)), make_ticks(schedule, packing)
            slots = counts.num_inputs, counts.num_cotangents, counts.num_stashes
            assert slots == (ticks.num_inputs, ticks.num_cotangents, ticks.num_stashes)
            assert counts.num_ticks == ticks.num_ticks == len(ticks.table)
            for costs in COSTS:
                clock = lockstep(ticks, equal_costs(schedule, *costs))
                assert counts.makespan(*costs) == clock.makespan
                assert counts.bubble(*costs) == pytest.approx(clock.bubble, abs=1e-12)


def check_lines(stages: int, numbers: Iterable[int]) -> int:
    """Compares sizes that are continued with those that are counted, for these microbatches; returns how
    many.
    """
    compared = 0
    for microbatches in numbers:
        for schedule in schedules(stages, microbatches):
            for packing in PACKINGS:
                shape = schedule.name, stages, microbatches, schedule.chunks
                assert family_counts(*shape, packing) == count_ticks(pack(schedule, packing)), (
                    shape,
                    packing,
                )
                compared += 1
    return compared


def test_sizes_are_straight_lines_from_two_microbatches_per_stage_on() -> None:
    """All that a plan reads, to the last tick."""
    assert sum(check_lines(stages, range(2 * stages, 4 * stages + 4)) for stages in (1, 2, 3)) > 150


@pytest.mark.slow
@pytest.mark.parametrize("stages", range(4, 11))
def test_sizes_of_longer_pipelines_are_straight_lines_too(stages: int) -> None:
    """Up to 8 microbatches per stage: all multiples of the stages, and numbers between."""
    between = range(2 * stages + 2, 8 * stages, 7)
    assert check_lines(stages, sorted({*between, *range(2 * stages, 8 * stages + 1, stages)})) > 100


@pytest.mark.slow
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("name", PUBLISHED_SCHEDULES)
def test_sizes_of_the_longest_pipelines_of_a_search_are_straight_lines_too(
    name: str, packing: Packing
) -> None:
    """64 stages, 16 microbatches in each."""
    shape = name, 64, 1024, chunks_of(name)[0]
    assert family_counts(*shape, packing) == count_ticks(pack(make_schedule(*shape), packing))


def test_a_hundred_thousand_microbatches_are_counted() -> None:
    """By 1F1B's closed forms: M + 2P - 2 ticks, 2P - 1 inputs, and a bubble of (P-1)/(M+P-1)."""
    counts = family_counts("1f1b", 8, 100_000, 1, "fused")
    assert (counts.num_ticks, counts.num_inputs) == (100_014, 15)
    assert counts.bubble(1.0, 1.0, 1.0) == pytest.approx(7 / 100_007, rel=1e-9)
    with pytest.raises(
        UserError, match="microbatches=100001: schedule interleaved runs them in groups of stages=8"
    ):
        family_counts("interleaved", 8, 100_001, 2, "fused")


def test_the_best_packing_depends_on_the_costs() -> None:
    """ZB-H1: ticks of one operation if F = I = W; with a recomputed forward pass, aligned W."""

    def best(name: str, *costs: float) -> str:
        return shortest(lambda packing: count_ticks(pack(make_schedule(name, 4, 8), packing)), *costs).packing

    assert best("zb-h1", 1.0, 1.0, 1.0) == "single"
    assert best("zb-h1", 1.0, 2.0, 1.0) == "aligned"
    assert best("1f1b", 1.0, 1.0, 1.0) == "fused"
