"""The two clocks, the memory over time and the messages of schedules."""

import itertools

import pytest

from jtrain.pipeline.clocks import (
    Costs,
    dataflow,
    equal_costs,
    lockstep,
    messages,
    unit_costs,
)
from jtrain.pipeline.published_schedules import PUBLISHED_SCHEDULES, make_schedule
from jtrain.pipeline.tick_grid import PACKINGS
from jtrain.pipeline.ticks import make_ticks


def test_a_tick_takes_as_long_as_its_slowest_worker() -> None:
    """By hand, 1F1B of 2 stages and 2 microbatches: ticks F, F|FB, B|FB, B take 1, 3, 3, 2."""
    schedule = make_schedule("1f1b", 2, 2)
    ticks = make_ticks(schedule, "fused")
    kinds = [["".join(op.kind for op in ops if op) for ops in row] for row in ticks.ops]
    assert kinds == [["F", ""], ["F", "FB"], ["B", "FB"], ["B", ""]]
    timeline = lockstep(ticks, unit_costs(schedule))
    assert timeline.makespan == 1 + 3 + 3 + 2
    assert timeline.busy == (6, 6)
    assert timeline.bubble == (18 - 12) / 18
    starts = {str(span.op): span.start for spans in timeline.workers for span in spans}
    assert starts == {"0F0": 0, "0F1": 1, "1F0": 1, "1B0": 2, "0B0": 4, "1F1": 4, "1B1": 5, "0B1": 7}


def test_neighbours_wait_less_than_all_but_never_less_than_dataflow() -> None:
    """The order of the clocks, for every schedule and packing, with costs that are not equal."""
    strict = 0
    for name in PUBLISHED_SCHEDULES:
        schedule = make_schedule(name, 4, 8)
        costs = equal_costs(schedule, 1.0, 2.0, 1.0)
        alone = dataflow(schedule, costs).makespan
        for packing in PACKINGS:
            ticks = make_ticks(schedule, packing)
            all_wait = lockstep(ticks, costs).makespan
            few_wait = lockstep(ticks, costs, meeting="neighbours").makespan
            assert few_wait <= all_wait
            strict += few_wait < all_wait
            if packing == "single":
                assert alone <= few_wait, "the same order of operations, with more waiting"
    assert strict > 0


def test_a_slow_worker_delays_one_more_neighbour_in_every_tick() -> None:
    """Forward passes of 10 on worker 0: worker 3's first, in tick 3, waits for the first of them alone, then
    1 + 1.
    """
    ticks = make_ticks(make_schedule("gpipe", 4, 4), "single")
    costs = Costs(forward=(10.0, 1.0, 1.0, 1.0), by_input=(1.0,) * 4, by_weight=(1.0,) * 4)
    assert lockstep(ticks, costs, meeting="neighbours").workers[3][0].start == 10 + 1 + 1
    assert lockstep(ticks, costs, meeting="all").workers[3][0].start == 10 + 10 + 10
    # Worker 0 is slowed down by worker 1 in turn, not by those behind it.
    costs = Costs(forward=(1.0, 1.0, 1.0, 10.0), by_input=(1.0,) * 4, by_weight=(1.0,) * 4)
    ends = [
        span.end for span in lockstep(ticks, costs, meeting="neighbours").workers[0] if span.op.kind == "F"
    ]
    assert ends == [1, 2, 3, 4]


def test_messages_delay_workers() -> None:
    """Dataflow: the first message arrives later; lockstep: every tick after the first is later."""
    schedule = make_schedule("gpipe", 3, 4)
    free, slow = unit_costs(schedule), equal_costs(schedule, 1.0, 1.0, 1.0, message=0.5)
    assert (
        dataflow(schedule, slow).workers[2][0].start == dataflow(schedule, free).workers[2][0].start + 2 * 0.5
    )
    ticks = make_ticks(schedule, "fused")
    assert lockstep(ticks, slow).makespan == lockstep(ticks, free).makespan + 0.5 * (ticks.num_ticks - 1)
    alone = make_schedule("1f1b", 1, 4)
    assert lockstep(make_ticks(alone), equal_costs(alone, 1.0, 1.0, 1.0, message=9.0)).makespan == 12


@pytest.mark.parametrize("name", PUBLISHED_SCHEDULES)
def test_memory_over_time_has_the_peak_of_the_instructions(name: str) -> None:
    """Counted along each worker's stream; and ends with nothing."""
    schedule = make_schedule(name, 4, 8)
    timeline = dataflow(schedule, unit_costs(schedule))
    added = {"F": 1, "I": 0, "W": -1, "B": -1}
    streams = (itertools.accumulate(added[op.kind] for op in stream) for stream in schedule.streams)
    assert timeline.peaks == tuple(map(max, streams))
    assert all(worker[-1][1] == 0 for worker in timeline.in_flight())


def test_messages_are_counted_per_pair_of_workers() -> None:
    """1F1B sends M each way; a V twice that, except at its turn, which is local; round robin wraps around."""
    assert messages(make_schedule("1f1b", 3, 4)) == {(0, 1): 4, (1, 0): 4, (1, 2): 4, (2, 1): 4}
    assert messages(make_schedule("zbv", 3, 6)) == {(0, 1): 12, (1, 0): 12, (1, 2): 12, (2, 1): 12}
    wrapped = messages(make_schedule("interleaved", 3, 3))
    assert wrapped == {(0, 1): 6, (1, 0): 6, (1, 2): 6, (2, 1): 6, (2, 0): 3, (0, 2): 3}
    assert messages(make_schedule("gpipe", 1, 4)) == {}
