"""The checker: valid schedules pass; what it lets through computes exact gradients, and what it refuses it
names.
"""

import dataclasses
import random
import re

import pytest

from jtrain.errors import UserError
from jtrain.pipeline.checker import check, needed_capacity
from jtrain.pipeline.instructions import make_program
from jtrain.pipeline.published_schedules import PUBLISHED_SCHEDULES, make_schedule
from jtrain.pipeline.schedule import PassKind, PipelineSchedule, StageOp, parse_op
from jtrain.pipeline.ticks import make_ticks
from tests.pipeline.toy import make_toy, random_schedule, run_program, run_table, unpipelined

NAMED = re.compile(r"^schedule \w+, worker \d+, \d+[A-Z_]+\d*: \S")


def test_random_valid_schedules_pass_and_compute_the_gradients() -> None:
    """With the channels that they need, in a random interleaving."""
    rng = random.Random(0)
    for _ in range(30):
        schedule = random_schedule(rng)
        check(schedule, capacity=needed_capacity(schedule))
        toy = make_toy(schedule)
        want = unpipelined(toy)
        assert run_program(make_program(schedule), toy, rng.randrange(1000)).equals(want)


def changed(schedule: PipelineSchedule, rng: random.Random) -> PipelineSchedule:
    """A schedule with one random change: an operation dropped, doubled, moved, swapped, or made another."""
    kinds: tuple[PassKind, ...] = ("F", "I", "W", "B")
    lists = [list(row) for row in schedule.streams]
    row = rng.choice(lists)
    i, j = rng.randrange(len(row)), rng.randrange(len(row))
    match rng.randrange(7):
        case 0:
            del row[i]
        case 1:
            row.insert(j, row[i])
        case 2:
            row.insert(j, row.pop(i))
        case 3:
            row[i], row[j] = row[j], row[i]
        case 4:
            item = row.pop(i)
            rng.choice(lists).append(item)
        case _:
            changes = (
                dict(kind=rng.choice(kinds)),
                dict(microbatch=rng.randrange(9)),
                dict(stage=rng.randrange(9)),
            )
            row[i] = row[i]._replace(**rng.choice(changes))
    return dataclasses.replace(schedule, streams=tuple(map(tuple, lists)))


def test_random_changes_of_schedules_are_refused_or_harmless() -> None:
    """Each refusal names worker and operation; whatever passes gives the gradients, as instructions and as a
    table.
    """
    passed, refusals = 0, list[str]()
    for seed in range(150):
        rng = random.Random(seed)
        schedule = changed(random_schedule(rng), rng)
        try:
            program = check(schedule)
        except UserError as error:
            refusals.append(str(error))
            continue
        toy = make_toy(schedule)
        want = unpipelined(toy)
        assert all(run_program(program, toy, interleaving).equals(want) for interleaving in range(3))
        assert run_table(make_ticks(schedule), toy)[0].equals(want)
        passed += 1
    assert all(map(NAMED.match, refusals))
    assert passed > 10
    assert len(refusals) > 50


def streams(*rows: str, chunks: int = 1) -> PipelineSchedule:
    """A schedule of rows such as `0F0 0B0`, with as many microbatches as they have."""
    parsed = tuple(tuple(parse_op(cell) for cell in row.split()) for row in rows)
    microbatches = 1 + max(op.microbatch for row in parsed for op in row)
    return PipelineSchedule("mine", len(rows), microbatches, chunks, "round_robin", parsed)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("0F0 0B0", "1F0 1B0 1B0"), "worker 1, 1B0: it is there 2 times; each gradient must be added once"),
        (("0F0", "1F0 1B0"), "worker 0, 0B0: it is missing, and so are 0I0 and 0W0"),
        (("0F0 0B0", "1B0"), "worker 1, 1F0: it is missing: every microbatch passes every virtual stage"),
        (("0F0 0B0", "1F0 1I0"), "worker 1, 1W0: it is missing, but 1I0 is there; a split pass needs both"),
        (("0F0 0B0", "1F0 1I0 1W0 1B0"), "worker 1, 1I0: 1B0 has the same gradient; keep one of them"),
        (("0F0 0B0", "1F0 1W0 1I0"), "worker 1, 1W0: it needs 1I0, which comes later on this worker"),
        (("0B0 0F0", "1F0 1B0"), "worker 0, 0B0: it needs 0F0, which comes later"),
        (
            ("0F0 0B0 1F0", "1F0 1B0"),
            r"worker 0, 1F0: virtual stage 1 is held by worker 1; this worker holds \[0\]",
        ),
        (("0F0 0B0", "1F0 1B0 2F0"), "worker 1, 2F0: virtual stage 2 does not exist: there are 2, from 0"),
        (
            ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
            "worker 0, 0RECV_B0: it waits for ever: worker 1 does not send 1SEND_B0 before. Also waiting: "
            "worker 1 at 1RECV_F1",
        ),
    ],
)
def test_invalid_schedules_are_refused_with_worker_operation_and_reason(
    rows: tuple[str, ...], message: str
) -> None:
    """Each kind of fault; what is wrong is named as the user wrote it."""
    with pytest.raises(UserError, match=f"^schedule mine, {message}"):
        check(streams(*rows))


def test_microbatches_and_workers_must_be_those_of_the_schedule() -> None:
    """Numbers that a file cannot get wrong, but a caller can."""
    schedule = make_schedule("1f1b", 2, 4)
    with pytest.raises(UserError, match=r"worker 0, 0F3: there are 3 microbatches, from 0\."):
        check(dataclasses.replace(schedule, microbatches=3))
    with pytest.raises(
        UserError, match=r"has 2 workers, but stages=3\. Give one row of operations per stage"
    ):
        check(dataclasses.replace(schedule, stages=3))


def test_a_deadlock_may_depend_on_the_capacity_of_channels() -> None:
    """The second worker takes the messages in the opposite order: one slot blocks the sender, two do not."""
    schedule = streams("0F0 0F1 0B0 0B1", "1F1 1F0 1B0 1B1")
    with pytest.raises(
        UserError, match=r"0SEND_F1: it waits for ever: its channel to worker 1 holds capacity=1 mess"
    ):
        check(schedule, capacity=1)
    check(schedule, capacity=2)
    assert needed_capacity(schedule) == 2
    with pytest.raises(UserError, match="capacity=0 must be at least 1"):
        check(schedule, capacity=0)


@pytest.mark.parametrize("name", PUBLISHED_SCHEDULES)
def test_every_microbatch_is_sent_once_over_every_border(name: str) -> None:
    """Sends and receives of a published schedule pair up, and local hand-overs need none."""
    schedule = make_schedule(name, 4, 8)
    program = check(schedule)
    borders = [s for s in range(schedule.virtual_stages - 1) if schedule.worker(s) != schedule.worker(s + 1)]
    for kind, step in (("F", 1), ("B", -1)):
        for part in ("SEND", "RECV"):
            stages = [b + (step == -1) if part == "SEND" else b + (step == 1) for b in borders]
            found = sorted(
                (i.stage, i.microbatch) for of in program.workers for i in of if i.kind == f"{part}_{kind}"
            )
            assert found == sorted((stage, m) for stage in stages for m in range(8))
    assert all(isinstance(op, StageOp) for stream in schedule.streams for op in stream)
