"""Schedules of overlapped collectives: their results, and their correctness in every order of events."""

import dataclasses
import itertools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

from jtrain_kernels.overlap.schedule import (
    OPS,
    Barrier,
    Compute,
    OpName,
    OverlapSchedule,
    Place,
    Reduce,
    ScheduleInstruction,
    Send,
    Wait,
    make_schedule,
)
from jtrain_kernels.overlap.swizzle import SWIZZLES, Swizzle
from tests.kernels.overlap.protocol.executor import execute
from tests.kernels.overlap.protocol.model_checker import Broken, Checked, check
from tests.kernels.overlap.protocol.simulator import Fault, ProtocolError


def schedules(num_ranks: int, all_parts: tuple[int, ...] = (1,)) -> list[OverlapSchedule]:
    """All schedules of so many ranks."""
    each = itertools.product(OPS, SWIZZLES, all_parts)
    return [make_schedule(op, swizzle, num_ranks, parts=parts) for op, swizzle, parts in each]


def name(schedule: OverlapSchedule) -> str:
    return f"{schedule.op}-{schedule.swizzle}-{schedule.num_ranks}-{schedule.pieces_per_rank}-{schedule.num_slots}"


SMALL = [*schedules(1), *schedules(2, (1, 2)), *schedules(3)]
FOUR = schedules(4)
"""The fewest ranks that use an accumulator again."""
LARGE = [*schedules(3, (2,)), *schedules(4, (2,))]
LARGE += [make_schedule(op, swizzle, 8) for op in OPS for swizzle in SWIZZLES]


@pytest.mark.parametrize("schedule", SMALL + FOUR, ids=name)
def test_no_order_of_events_breaks_a_schedule(schedule: OverlapSchedule) -> None:
    """Every state is visited: no deadlock, overwritten slot or lost signal."""
    assert isinstance(check(schedule), Checked)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", LARGE, ids=name)
def test_no_order_of_events_breaks_a_large_schedule(schedule: OverlapSchedule) -> None:
    """Every state is visited for more parts and up to eight ranks."""
    assert isinstance(check(schedule), Checked)


@pytest.mark.parametrize("schedule", [s for s in SMALL if s.num_ranks > 1], ids=name)
def test_the_executor_computes_the_matmul(schedule: OverlapSchedule) -> None:
    """Small integers are exact in float32, so the result is the product's, bit for bit, in any order of
    events.
    """
    n, each = schedule.num_ranks, 2 * schedule.pieces_per_rank
    draw = np.random.default_rng(0)
    rows = n * each
    x = draw.integers(-4, 5, (rows, 3 * n)).astype(np.float32)
    kernel = draw.integers(-4, 5, (3 * n, 5)).astype(np.float32)
    if schedule.op == "all_gather_matmul":
        xs, kernels = np.split(x, n), [kernel + rank for rank in range(n)]
        want = [x @ k for k in kernels]
    else:
        xs, kernels = np.split(x, n, axis=1), np.split(kernel, n)
        want = np.split(x @ kernel, n)

    for seed in (0, 1):
        got = execute(schedule, [jnp.asarray(a) for a in xs], [jnp.asarray(a) for a in kernels], seed=seed)
        np.testing.assert_array_equal(np.stack([np.asarray(a) for a in got]), np.stack(want))


@pytest.mark.parametrize("schedule", SMALL + FOUR + LARGE, ids=name)
def test_the_programs_of_all_ranks_have_the_same_form(schedule: OverlapSchedule) -> None:
    """Back ends trace one program and look up what differs between ranks."""
    forms = {tuple(type(i).__name__ for i in program) for program in schedule.programs}
    assert len(forms) == 1


def sends(schedule: OverlapSchedule, rank: int) -> list[Send]:
    return [i for i in schedule.programs[rank] if isinstance(i, Send)]


def test_a_bidirectional_ring_loads_both_directions_alike() -> None:
    """Half of the pieces travel each way, all to neighbours, which takes half of a ring's time."""
    for op in ("all_gather_matmul", "matmul_reduce_scatter"):
        peers = [send.peer for send in sends(make_schedule(op, "bidirectional", 8), 3)]
        assert (peers.count(2), peers.count(4), len(peers)) == (7, 7, 14)


def test_a_full_mesh_never_uses_one_pair_twice_at_a_time() -> None:
    """At every moment each rank receives from one other, so no port of a switch is shared."""
    schedule = make_schedule("matmul_reduce_scatter", "full_mesh", 8)
    for turn in range(7):
        assert {sends(schedule, rank)[turn].peer for rank in range(8)} == set(range(8))


def without(
    schedule: OverlapSchedule, drop: Callable[[ScheduleInstruction], bool], *, rank: int = 0
) -> OverlapSchedule:
    """The schedule without the instructions of one rank's program for which `drop` is true."""
    programs = list(schedule.programs)
    programs[rank] = tuple(i for i in programs[rank] if not drop(i))
    assert programs[rank] != schedule.programs[rank], "something must be dropped"
    return dataclasses.replace(schedule, programs=tuple(programs))


def waits(until: str) -> Callable[[ScheduleInstruction], bool]:
    return lambda i: isinstance(i, Wait) and i.until == until


def is_a(kind: type) -> Callable[[ScheduleInstruction], bool]:
    return lambda i: isinstance(i, kind)


GATHER = make_schedule("all_gather_matmul", "ring", 3)
SCATTER = make_schedule("matmul_reduce_scatter", "ring", 3)

PLANTED = {
    "gather: no wait for what arrives": (without(GATHER, waits("arrived")), {Fault.TOO_EARLY}),
    "gather: no barrier": (without(GATHER, is_a(Barrier)), {Fault.TOO_EARLY}),
    "gather: no wait for what was sent": (
        without(GATHER, waits("sent")),
        {Fault.OVERWRITTEN, Fault.LOST_SIGNAL},
    ),
    "gather: nothing sent": (without(GATHER, is_a(Send)), {Fault.DEADLOCK}),
    "gather: nothing computed": (without(GATHER, is_a(Compute)), {Fault.WRONG_RESULT}),
    "scatter: no wait for what arrives": (without(SCATTER, waits("arrived")), {Fault.TOO_EARLY}),
    "scatter: a sum left out": (without(SCATTER, is_a(Reduce)), {Fault.WRONG_RESULT}),
    "scatter: no barrier": (without(SCATTER, is_a(Barrier)), {Fault.TOO_EARLY}),
}


@pytest.mark.parametrize("planted", PLANTED, ids=str)
def test_a_planted_bug_is_found(planted: str) -> None:
    """Each bug is found with an order of events that leads to it, by the reduced and by the full search.

    The correct schedules pass both searches, so neither reports false faults.
    """
    schedule, faults = PLANTED[planted]
    found = check(schedule)
    assert isinstance(found, Broken)
    assert found.fault in faults
    assert found.events
    assert isinstance(check(schedule, reduced=False), Broken)


def test_an_accumulator_written_before_it_was_sent_is_found() -> None:
    """With four ranks accumulators are used again, so a dropped wait is a fault."""
    schedule = make_schedule("matmul_reduce_scatter", "ring", 4)
    first = next(i for i in schedule.programs[0] if isinstance(i, Wait) and i.until == "sent")
    dropped: list[ScheduleInstruction] = []

    def early(i: ScheduleInstruction) -> bool:
        """True only for the first of the waits for this accumulator; the last one stays."""
        if i == first and not dropped:
            dropped.append(i)
            return True
        return False

    found = check(without(schedule, early))
    assert isinstance(found, Broken)
    assert found.fault in (Fault.OVERWRITTEN, Fault.LOST_SIGNAL)


@pytest.mark.parametrize("schedule", [GATHER, SCATTER], ids=name)
def test_the_shorter_search_is_the_full_one(schedule: OverlapSchedule) -> None:
    """Skipping orders that differ only in commuting events visits far fewer states with the same result."""
    short, full = check(schedule), check(schedule, reduced=False)
    assert isinstance(short, Checked)
    assert isinstance(full, Checked)
    assert short.states * 3 < full.states


def test_a_search_that_is_too_large_says_so() -> None:
    with pytest.raises(ValueError, match=r"more than 100 states\. Check fewer ranks"):
        check(GATHER, reduced=False, max_states=100)


def test_the_executor_fails_where_the_protocol_does() -> None:
    """If a rank never sends, the others wait forever."""
    ones = [jnp.ones((1, 2))] * 3
    with pytest.raises(ProtocolError, match="every rank that has not finished waits"):
        execute(without(GATHER, is_a(Send)), ones, [jnp.ones((2, 2))] * 3)


def test_rows_of_a_piece_follow_its_owner() -> None:
    """Piece 5 of two per rank is the second half of rank 2's shard."""
    schedule = make_schedule("all_gather_matmul", "bidirectional", 4)
    assert (schedule.owner(5), schedule.rows(5, 32)) == (2, (20, 24))
    assert any(Place("shard", 5) == send.source for send in sends(schedule, 2))


@pytest.mark.parametrize(
    ("op", "swizzle", "num_ranks", "more", "message"),
    [
        ("all_gather_matmul", "ring", 0, {}, "num_ranks=0 and parts=1"),
        ("all_gather_matmul", "bidirectional", 4, {"parts": 0}, "parts=0 must be at least 1"),
    ],
)
def test_what_cannot_be_scheduled_is_refused(
    op: OpName, swizzle: Swizzle, num_ranks: int, more: dict[str, object], message: str
) -> None:
    make: Callable[..., OverlapSchedule] = make_schedule
    with pytest.raises(ValueError, match=message):
        make(op, swizzle, num_ranks, **more)


def test_rows_that_do_not_split_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"10 rows do not split evenly into 2 ranks x 2 pieces.*that do: 8, 12"
    ):
        make_schedule("all_gather_matmul", "bidirectional", 2).piece_rows(10)


def test_the_executor_wants_an_array_for_each_rank() -> None:
    with pytest.raises(ValueError, match="1 x and 1 kernels for 3 ranks"):
        execute(GATHER, [jnp.ones((3, 2))], [jnp.ones((2, 2))])
