"""Published schedules: bubbles and memory equal the closed forms of their papers, and the table in
`published_schedules.py`.
"""

import itertools
from collections.abc import Iterator
from fractions import Fraction

import pytest

from jtrain.errors import UserError
from jtrain.pipeline.checker import check
from jtrain.pipeline.clocks import dataflow, equal_costs, lockstep, unit_costs
from jtrain.pipeline.published_schedules import PUBLISHED_SCHEDULES, make_schedule
from jtrain.pipeline.schedule import PipelineSchedule, StageOp
from jtrain.pipeline.spec import PipelineSpec
from jtrain.pipeline.ticks import make_ticks

SIZES = ((1, 4), (2, 4), (3, 9), (4, 8), (4, 16), (8, 32))
COSTS = ((1.0, 1.0, 1.0), (2.0, 3.0, 1.0), (5.0, 6.0, 4.0), (1.0, 2.0, 1.0))


def waiting(schedule: PipelineSchedule, costs: tuple[float, float, float]) -> float:
    """Time in which the first worker waits, with times of F, I and W per chunk."""
    timeline = dataflow(schedule, equal_costs(schedule, *costs))
    return timeline.makespan - timeline.busy[0]


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_bubbles_of_one_chunk_equal_the_closed_forms(stages: int, microbatches: int) -> None:
    """(P-1)(F+B) for GPipe and 1F1B, (P-1)(F+I-W) for ZB-H1: exactly, for several ratios of F, I and W."""
    for f, i, w in COSTS:
        for name in ("gpipe", "1f1b"):
            assert waiting(make_schedule(name, stages, microbatches), (f, i, w)) == (stages - 1) * (f + i + w)
        assert waiting(make_schedule("zb-h1", stages, microbatches), (f, i, w)) == (stages - 1) * (f + i - w)


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_interleaving_divides_the_bubble_by_the_chunks(chunks: int) -> None:
    """(P-1)(F+B)/v, where a chunk takes 1/v of F and B; the fraction is (P-1)/(vM+P-1)."""
    for stages, microbatches in ((2, 4), (3, 9), (4, 8), (8, 32)):
        schedule = make_schedule("interleaved", stages, microbatches, chunks)
        for f, i, w in COSTS:
            assert waiting(schedule, (f, i, w)) == (stages - 1) * (f + i + w)
        bubble = dataflow(schedule, unit_costs(schedule)).bubble
        assert bubble == float(Fraction(stages - 1, chunks * microbatches + stages - 1))


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_no_worker_of_zbv_waits_between_its_first_and_its_last_operation(
    stages: int, microbatches: int
) -> None:
    """Zero bubble with equal costs: worker p runs without a gap from p to p + 6M, in units of a chunk's F."""
    schedule = make_schedule("zbv", stages, max(microbatches, 2 * stages - 1))
    for p, spans in enumerate(dataflow(schedule, unit_costs(schedule)).workers):
        assert spans[0].start == p
        assert all(a.end == b.start for a, b in itertools.pairwise(spans))
        assert spans[-1].end == p + 6 * schedule.microbatches


def pairs(schedule: PipelineSchedule) -> Iterator[list[list[StageOp]]]:
    """Each worker's operations, where an F right before a B of the other chunk is one group.

    The first such pair of the last worker is not overlapped, to shorten the bubble.
    """
    for worker, stream in enumerate(schedule.streams):
        groups: list[list[StageOp]] = []
        alone = worker == schedule.stages - 1
        for op in stream:
            if op.kind == "B" and groups and groups[-1][-1].kind == "F" and len(groups[-1]) == 1:
                if alone:
                    alone = False
                else:
                    groups[-1].append(op)
                    continue
            groups.append([op])
        yield groups


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 4), (2, 4), (3, 9), (4, 8), (4, 12), (8, 20)])
def test_the_bubble_of_dualpipev_is_that_of_its_authors(stages: int, microbatches: int) -> None:
    """(P-1)(F&B+B-3W) in times of a chunk with F = I = W = 1, and F&B = 3 one piece; (P-1) if F can leave
    early.
    """
    schedule = make_schedule("dualpipev", stages, microbatches)
    costs = unit_costs(schedule)
    done: dict[StageOp, float] = {}
    queues = [iter(groups) for groups in pairs(schedule)]
    heads = [next(queue, None) for queue in queues]
    clock = [0.0] * stages
    while any(heads):
        for p, group in enumerate(heads):
            needs = [need for op in group or () for need in schedule.needs(op)]
            if group and all(need in done for need in needs):
                start = max([clock[p], *(done[need] for need in needs)])
                clock[p] = start + sum(costs.of(op) for op in group)
                done |= dict.fromkeys(group, clock[p])
                heads[p] = next(queues[p], None)
    assert max(clock) - 6 * microbatches == (stages - 1) * (3 + 2 - 3 * 1)
    assert waiting(schedule, COSTS[0]) == stages - 1


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 8), (4, 8), (6, 12)])
def test_microbatches_in_flight_are_those_of_the_papers(stages: int, microbatches: int) -> None:
    """GPipe M, 1F1B P - p, ZB-H1 P everywhere, interleaved vP + P - 1 chunks, ZBV 2P chunks, DualPipeV 2P +
    1.
    """

    def in_flight(name: str) -> tuple[int, ...]:
        schedule = make_schedule(name, stages, microbatches)
        return dataflow(schedule, unit_costs(schedule)).peaks

    assert in_flight("gpipe") == (microbatches,) * stages
    assert in_flight("1f1b") == tuple(stages - p for p in range(stages))
    assert in_flight("zb-h1") == (stages,) * stages
    assert max(in_flight("interleaved")) == 2 * stages + stages - 1
    assert in_flight("zbv") == (2 * stages,) * stages
    assert in_flight("dualpipev") == (2 * stages + 1,) * stages


@pytest.mark.parametrize("name", PUBLISHED_SCHEDULES)
def test_every_published_schedule_is_valid_with_channels_of_one_message(name: str) -> None:
    """The smallest channel is enough, for all sizes."""
    for stages, microbatches in ((1, 2), (2, 4), (4, 8)):
        check(make_schedule(name, stages, microbatches), capacity=1)


REFERENCE = {
    (4, 8): (0.273, 0.400, 0.273, 0.111, 0.289),
    (8, 32): (0.179, 0.351, 0.179, 0.068, 0.260),
    (8, 64): (0.099, 0.304, 0.099, 0.035, 0.231),
}
"""Noted from another program: 1F1B asynchronous, in ticks of one operation, fused; ZB-H1 in such ticks, then
with a forward pass recomputed in I."""


@pytest.mark.parametrize(("stages", "microbatches"), REFERENCE)
def test_the_clocks_agree_with_an_independent_simulation(stages: int, microbatches: int) -> None:
    """To the three digits that were noted; the fused column is (P-1)/(M+P-1) exactly."""
    one, zero = make_schedule("1f1b", stages, microbatches), make_schedule("zb-h1", stages, microbatches)
    remat = equal_costs(zero, 1.0, 2.0, 1.0)
    fused = lockstep(make_ticks(one, "fused"), unit_costs(one)).bubble
    assert fused == float(Fraction(stages - 1, microbatches + stages - 1))
    got = (
        dataflow(one, unit_costs(one)).bubble,
        lockstep(make_ticks(one, "single"), unit_costs(one), meeting="neighbours").bubble,
        fused,
        lockstep(make_ticks(zero, "single"), unit_costs(zero), meeting="neighbours").bubble,
        lockstep(make_ticks(zero, "single"), remat, meeting="neighbours").bubble,
    )
    assert tuple(round(bubble, 3) for bubble in got) == REFERENCE[stages, microbatches]


@pytest.mark.parametrize(
    ("name", "numbers", "message"),
    [
        (
            "zbw",
            (4, 8),
            r"schedule zbw is unknown. Did you mean zbv\? Choose of: gpipe, 1f1b, interleaved, zb-h1, ",
        ),
        (
            "zbv",
            (8, 4),
            r"microbatches=4: schedule zbv over stages=8 needs at least 15. Raise microbatches \(layout",
        ),
        (
            "dualpipev",
            (4, 7),
            r"microbatches=7: schedule dualpipev over stages=4 needs at least 8. .* take .* 1f1b",
        ),
        (
            "interleaved",
            (4, 10),
            r"groups of stages=4. Nearest numbers that fit: 8, 12; or take schedule 1f1b.",
        ),
        ("interleaved", (4, 3), r"groups of stages=4. Nearest numbers that fit: 4; or"),
        ("1f1b", (0, 8), r"stages=0 must be at least 1."),
        ("1f1b", (4, 0), r"microbatches=0 must be at least 1."),
        (
            "1f1b",
            (4, 8, 2),
            r"chunks=2: schedule 1f1b has 1 per worker. Leave chunks out, or take schedule inter",
        ),
        ("zbv", (4, 8, 1), r"chunks=1: schedule zbv has 2 per worker."),
        ("interleaved", (4, 8, 0), r"chunks=0 must be at least 1."),
    ],
)
def test_numbers_without_a_schedule_are_refused(name: str, numbers: tuple[int, ...], message: str) -> None:
    """The way out of each message works: the fallbacks that they name exist for these numbers."""
    with pytest.raises(UserError, match=message):
        make_schedule(name, *numbers)


def test_the_ways_out_of_refusals_are_schedules() -> None:
    """What the messages above name."""
    for name, stages, microbatches in (
        ("zbv", 8, 15),
        ("dualpipev", 4, 8),
        ("interleaved", 4, 4),
        ("1f1b", 8, 1),
    ):
        check(make_schedule(name, stages, microbatches))


@pytest.mark.parametrize(
    ("name", "meant"), [("ZBV", "zbv"), ("ZBH1", "zb-h1"), ("zb_h1", "zb-h1"), ("1F1B", "1f1b")]
)
def test_a_schedule_has_one_spelling_in_a_config_and_on_the_command_line(name: str, meant: str) -> None:
    """Both refuse others with the same hint."""
    with pytest.raises(UserError, match=f"schedule {name} is unknown. Did you mean {meant}"):
        make_schedule(name, 4, 8)
    with pytest.raises(
        UserError, match=f"pipeline.schedule='{name}' is not a schedule: Did you mean {meant}"
    ):
        PipelineSpec(name)
