"""Tables of ticks: an interpreter that follows their documentation gets exact gradients in the slots that
they say.
"""

import random

import numpy as np
import pytest

from jtrain.pipeline.published_schedules import PUBLISHED_SCHEDULES, make_schedule
from jtrain.pipeline.schedule import PipelineSchedule, StageHop
from jtrain.pipeline.tick_grid import PACKINGS, Packing
from jtrain.pipeline.ticks import TickColumn, make_ticks
from tests.pipeline.toy import make_toy, random_schedule, run_table, unpipelined

SIZES = ((1, 2), (2, 4), (3, 6), (4, 12))


def check_table(schedule: PipelineSchedule, packing: Packing) -> None:
    """The table gives the gradients of the unpipelined toy, and fills exactly the slots that it declares."""
    ticks, toy = make_ticks(schedule, packing), make_toy(schedule)
    want = unpipelined(toy)
    assert (want.weights != 0).all(), "gradients of zero would prove nothing"
    got, peaks = run_table(ticks, toy)
    assert got.equals(want)
    assert peaks == {"inputs": ticks.inputs, "cotangents": ticks.cotangents, "stashes": ticks.stashes}
    assert ticks.table.dtype == np.int32
    assert ticks.table.shape == (ticks.num_ticks, schedule.stages, len(TickColumn))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("name", PUBLISHED_SCHEDULES)
def test_every_schedule_in_every_packing_is_the_unpipelined_run(name: str, packing: Packing) -> None:
    """To the last bit, with the peaks that the table declares."""
    for stages, microbatches in SIZES:
        check_table(make_schedule(name, stages, microbatches), packing)


def test_random_schedules_in_any_packing_are_the_unpipelined_run() -> None:
    """Any valid order, also with chunks, a V, and backward passes of which only some are split."""
    for seed in range(40):
        check_table(random_schedule(random.Random(seed)), PACKINGS[seed % len(PACKINGS)])


def test_a_wrong_slot_would_be_found() -> None:
    """The guard of the tests above: one changed entry of the table gives another gradient or an assertion."""
    ticks = make_ticks(make_schedule("interleaved", 3, 6))
    toy = make_toy(ticks.schedule)
    want, wrong = unpipelined(toy), 0
    fields = (
        TickColumn.FORWARD_INPUT,
        TickColumn.BACKWARD_INPUT,
        TickColumn.ARRIVING_INPUT_WRAP,
        TickColumn.BACKWARD_CHUNK,
    )
    for field in fields:
        tick, worker = np.argwhere(ticks.table[:, :, field] >= 0)[3]
        before = ticks.table[tick, worker, field]
        ticks.table[tick, worker, field] = (
            (before + 1) % 2 if field == TickColumn.BACKWARD_CHUNK else before + 1
        )
        try:
            wrong += not run_table(ticks, toy)[0].equals(want)
        except AssertionError:
            wrong += 1
        ticks.table[tick, worker, field] = before
    assert wrong == len(fields)
    assert run_table(ticks, toy)[0].equals(want)


def test_fused_1f1b_holds_one_forward_and_one_backward_pass_in_a_tick() -> None:
    """M + 2P - 2 ticks, 2 (P - p) - 1 inputs on worker p: 7 for 4 stages, where 1F1B on its own keeps 4."""
    ticks = make_ticks(make_schedule("1f1b", 4, 8))
    assert ticks.num_ticks == 8 + 2 * 4 - 2
    assert ticks.inputs == (7, 5, 3, 1)
    assert ticks.cotangents == (1, 1, 1, 1)
    full = [tick for tick in ticks.ops if all(ops.forward and ops.backward for ops in tick)]
    assert len(full) == 8 - 2 * 4 + 2, "from the first B of the first worker to its last F"


def test_slots_do_not_grow_with_microbatches_except_for_gpipe() -> None:
    """1F1B's memory is flat in M; GPipe's is M."""
    for name in PUBLISHED_SCHEDULES:
        peaks = [make_ticks(make_schedule(name, 4, m)).num_inputs for m in (8, 16, 32)]
        assert peaks == ([8, 16, 32] if name == "gpipe" else [peaks[0]] * 3), name


def test_gpipe_stays_gpipe() -> None:
    """Packing lets no backward pass overtake a forward pass of the stream."""
    ticks = make_ticks(make_schedule("gpipe", 4, 8))
    for worker in range(4):
        forward = [t for t, row in enumerate(ticks.ops) if row[worker].forward]
        backward = [t for t, row in enumerate(ticks.ops) if row[worker].backward]
        assert forward[-1] <= backward[0]


@pytest.mark.parametrize(
    ("name", "hops"),
    [
        ("1f1b", (StageHop.DOWN,)),
        ("interleaved", (StageHop.DOWN, StageHop.WRAP)),
        ("zbv", (StageHop.DOWN, StageHop.UP, StageHop.LOCAL)),
        ("dualpipev", (StageHop.DOWN, StageHop.UP, StageHop.LOCAL)),
    ],
)
def test_only_chains_and_a_single_pair_are_needed(name: str, hops: tuple[StageHop, ...]) -> None:
    """No schedule needs a cyclic permute; cotangents go the opposite ways."""
    ticks = make_ticks(make_schedule(name, 4, 8))
    assert ticks.schedule.activation_hops == hops
    opposite = {StageHop.DOWN: StageHop.UP, StageHop.UP: StageHop.DOWN}
    assert set(ticks.schedule.cotangent_hops) == {opposite.get(hop, hop) for hop in hops}


def test_aligned_weights_shorten_the_lockstep() -> None:
    """All workers do W in the same ticks: exactly as many ticks have a W as there are microbatches."""
    schedule = make_schedule("zb-h1", 4, 8)
    with_weight = {
        packing: sum(any(ops.weight for ops in row) for row in make_ticks(schedule, packing).ops)
        for packing in ("fused", "aligned")
    }
    assert with_weight == {"fused": 8 + 4 - 1, "aligned": 8}
