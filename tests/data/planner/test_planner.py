import json
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jtrain.data.mixture.schedule import Constant, Linear, Schedule, Staged
from jtrain.data.planner.planner import EndOfData, NotYet, Planner
from tests.data.planner.planning import content, lognormal, make, of_table, run, specs, tables


@settings(max_examples=40)
@given(table=tables, fields=specs, epochs=st.integers(1, 2))
def test_every_token_of_every_epoch_is_trained_on_once(
    table: list[list[int]], fields: dict[str, Any], epochs: int
) -> None:
    """No token is lost or repeated until the data ends, in every packing and unit; all steps have the same
    shape.
    """
    planner = Planner(make(table, **fields, epochs=epochs), of_table(table))
    state, seen, plans = planner.start(), set(), []
    for _ in range(5000):
        try:
            plan, state = planner.plan(state)
        except EndOfData:
            break
        plans.append(plan)
        pieces = plan.pieces
        assert len(plan.row_cost) == planner.spec.global_batch
        filled = np.zeros(planner.spec.global_batch, int)
        for row, source, document, start, end in zip(*content(plan), strict=True):
            filled[row] += end - start
            new = {(source, document, token) for token in range(start, end)}
            assert not new & seen, "a token twice"
            seen |= new
        assert filled.max() <= planner.spec.seq_len
        assert (np.diff(pieces.row) >= 0).all()
        if fields["unit"] == "rows":
            assert len(np.unique(np.stack([pieces.row, pieces.source]), axis=1).T) == len(
                np.unique(pieces.row)
            )
    else:
        pytest.fail("the data did not end")
    want = {
        (source, document, token)
        for source, lengths in enumerate(table)
        for document, length in enumerate(lengths * epochs)
        for token in range(length)
    }
    assert seen == want
    assert not any(plan.last for plan in plans[:-1])
    assert state.tokens.tolist() == [sum(lengths) * epochs for lengths in table]


@settings(max_examples=40)
@given(table=tables, fields=specs, seed=st.integers(0, 2**32 - 1))
def test_what_is_known_when_does_not_change_the_stream(
    table: list[list[int]], fields: dict[str, Any], seed: int
) -> None:
    """Lengths arrive late and in parts; a plan that must wait changes nothing; earlier states can be planned
    again.
    """
    spec, rng = make(table, **fields), np.random.default_rng(seed)
    whole, _ = run(Planner(spec, of_table(table)), Planner(spec, of_table(table)).start(), 4)
    known = [0] * len(table)

    def lengths(source: int, first: int, count: int) -> np.ndarray:
        if first >= known[source]:
            raise NotYet
        return of_table(table)(source, first, min(count, known[source] - first, int(rng.integers(1, 5))))

    planner = Planner(spec, lengths)
    states = [planner.start()]
    for want in whole:
        while True:
            try:
                plan, after = planner.plan(states[-1])
                break
            except NotYet as not_yet:
                wanted = not_yet.missing
            assert wanted
            for source, first, _ in wanted:
                assert first == known[source]
                known[source] += int(rng.integers(1, 4))
        assert content(plan) == content(want)
        states.append(after)
    assert content(planner.plan(states[1])[0]) == content(whole[1])


def test_the_stream_goes_on_from_its_state_as_if_it_had_not_stopped() -> None:
    """With packing, mixing and balancing, the global batches are the same, row by row."""
    table = lognormal(5)
    for packing in ("concat", "first_fit", "best_fit"):
        spec = make(table, packing=packing, global_batch=16, seq_len=2048, cost_quadratic=1e-4)
        want, _ = run(Planner(spec, of_table(table)), Planner(spec, of_table(table)).start(), 9)
        state, got = Planner(spec, of_table(table)).start(), []
        for _ in range(3):
            planner = Planner(spec, of_table(table))
            state, _ = planner.resume(json.loads(json.dumps(state.to_json(spec.names))))
            plans, state = run(planner, state, 3)
            got += plans
        assert [content(plan) for plan in got] == [content(plan) for plan in want]


SCHEDULES = (
    Constant({"s0": 0.5, "s1": 0.3, "s2": 0.2, "s3": 0.0}),
    Staged(((0, {"s0": 1}), (300, {"s1": 0.7, "s2": 0.3}), (600, {"s0": 0.1, "s3": 0.9}))),
    Linear(((0, {"s0": 0.99, "s1": 0.01}), (1000, {"s0": 0.1, "s1": 0.3, "s2": 0.6}))),
)


@pytest.mark.parametrize(
    ("schedule", "unit", "packing"),
    [
        *(
            pytest.param(
                schedule, "tokens", packing, marks=[pytest.mark.slow] * (index != (packing == "concat") + 1)
            )
            for index, schedule in enumerate(SCHEDULES)
            for packing in ("concat", "best_fit")
        ),
        (SCHEDULES[2], "samples", "concat"),
        pytest.param(SCHEDULES[1], "rows", "concat", marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_shares_drift_by_less_than_a_thousandth_in_1000_steps(
    schedule: Schedule, unit: str, packing: str
) -> None:
    """The test counts tokens, documents or rows itself instead of trusting the planner's drift."""
    table = lognormal(4)
    spec = make(table, schedule, unit=unit, packing=packing, seq_len=2048, global_batch=8)
    planner = Planner(spec, of_table(table))
    state, counted, due, plan = planner.start(), np.zeros(4), np.zeros(4), None
    for step in range(1000):
        before = state
        plan, state = planner.plan(state)
        if unit == "tokens":
            here = plan.tokens_by_source
        elif unit == "rows":
            here = np.bincount(
                plan.pieces.source[np.unique(plan.pieces.row, return_index=True)[1]], minlength=4
            )
        else:
            moved = zip(before.cursors.tolist(), state.cursors.tolist(), strict=True)
            here = np.asarray([(of_table(table)(s, a, b - a) > 0).sum() for s, (a, b) in enumerate(moved)])
        counted += here
        due += schedule.weights(step, spec.names) * here.sum()
    drift = np.abs(counted - due).max() / counted.sum()
    assert drift < 1e-3
    assert plan is not None
    assert plan.drift == pytest.approx(drift, abs=5e-4)
    assert (counted > 0).sum() >= 3


def test_a_zero_weight_source_is_never_read() -> None:
    table = [[10], [10]]
    asked = set()

    def lengths(source: int, first: int, count: int) -> np.ndarray:
        asked.add(source)
        return of_table(table)(source, first, count)

    spec = make(table, Staged(((0, {"s0": 1}), (3, {"s1": 1}))))
    planner = Planner(spec, lengths)
    _, state = run(planner, planner.start(), 3)
    assert asked == {0}
    run(planner, state, 1)
    assert asked == {0, 1}


def test_lookahead_covers_what_the_next_steps_ask_for_and_little_more() -> None:
    """A source whose share rises from 0 is in the lookahead before it is needed."""
    table = lognormal(3)
    spec = make(table, Staged(((0, {"s0": 1, "s1": 1}), (24, {"s2": 1}))), seq_len=2048)
    planner = Planner(spec, of_table(table))
    _, state = run(planner, planner.start(), 20)
    for steps, sources in ((3, {0, 1}), (8, {0, 1, 2})):
        ahead = dict(planner.lookahead(state, steps).tolist())
        assert set(ahead) == sources
        _, after = run(planner, state, steps)
        for source, end in ahead.items():
            used, count = after.cursors[source] - state.cursors[source], end - state.cursors[source]
            assert used <= 1.5 * count + 20
            assert count <= 2 * used + 40, "a share that rises is asked for ahead of time, but not by far"


def test_steps_beyond_what_integers_hold_are_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.seq_len=1048576 \* data\.global_batch=4096 = .* at most"):
        make([[1]], seq_len=1 << 20, global_batch=4096)


@settings(max_examples=20)
@given(heavy=st.integers(1, 10**9), light=st.integers(1, 10**9))
def test_the_most_uneven_weights_still_plan(heavy: int, light: int) -> None:
    assume(heavy != light)
    table = [[10_000_000], [3]]
    spec = make(table, Constant({"s0": heavy, "s1": light}), packing="best_fit")
    plans, state = run(Planner(spec, of_table(table)), Planner(spec, of_table(table)).start(), 5)
    assert min(plan.fill for plan in plans) > 0.7
    assert (state.cursors >= 0).all()
