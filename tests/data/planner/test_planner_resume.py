"""State of the planner: its contents, and what may change when a run resumes from it."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jtrain.data.mixture.schedule import Constant
from jtrain.data.planner.planner import Planner, PlannerState
from tests.data.planner.planning import content, lognormal, make, of_table, run, specs, tables


@settings(max_examples=40)
@given(table=tables, fields=specs, stops=st.lists(st.integers(0, 5), max_size=4))
def test_resuming_any_number_of_times_goes_on_as_if_unbroken(
    table: list[list[int]], fields: dict[str, Any], stops: list[int]
) -> None:
    spec = make(table, **fields)
    whole, _ = run(Planner(spec, of_table(table)), Planner(spec, of_table(table)).start(), sum(stops))
    state, broken = Planner(spec, of_table(table)).start(), []
    for steps in stops:
        planner = Planner(spec, of_table(table))
        state, lines = planner.resume(json.loads(json.dumps(state.to_json(spec.names))))
        assert lines == []
        plans, state = run(planner, state, steps)
        broken += plans
    assert [content(plan) for plan in broken] == [content(plan) for plan in whole]


def test_a_mixture_changed_on_resume_is_logged_and_followed() -> None:
    table = lognormal(2)
    old = make(table, Constant({"s0": 0.5, "s1": 0.5}), seq_len=2048)
    planner = Planner(old, of_table(table))
    _, state = run(planner, planner.start(), 50)
    new = dataclasses.replace(old, schedule=Constant({"s0": 0.9, "s1": 0.1}))
    state, lines = Planner(new, of_table(table)).resume(state.to_json(old.names))
    assert lines == [
        "step 50: the mixture was 'constant: s0 0.5, s1 0.5', from this step on it is 'constant: s0 0.9, s1 "
        "0.1'",
        "step 50: s0 0.5000 -> 0.9000",
        "step 50: s1 0.5000 -> 0.1000",
    ]
    plans, state = run(Planner(new, of_table(table)), state, 200)
    tokens = np.sum([plan.tokens_by_source for plan in plans], axis=0)
    np.testing.assert_allclose(tokens / tokens.sum(), [0.9, 0.1], atol=0.01)
    assert [step for step, _, _ in state.history] == [0, 50]
    _, lines = Planner(new, of_table(table)).resume(state.to_json(old.names))
    assert lines == []


def test_a_unit_changed_on_resume_is_logged_by_its_field() -> None:
    table = lognormal(2)
    old = make(table, seq_len=2048)
    planner = Planner(old, of_table(table))
    _, state = run(planner, planner.start(), 5)
    new = dataclasses.replace(old, unit="samples")
    state, lines = Planner(new, of_table(table)).resume(state.to_json(old.names))
    assert lines == ["step 5: data.mixture_unit tokens -> samples; drift is counted from this step on"]
    assert state.units == 0


def test_sources_may_come_go_and_change_places_on_resume() -> None:
    table = lognormal(3)
    spec = make(table, seq_len=2048)
    planner = Planner(spec, of_table(table))
    _, state = run(planner, planner.start(), 20)
    names = ("s2", "new", "s0")
    after, lines = PlannerState.from_json(state.to_json(spec.names), names)
    assert after.cursors.tolist() == [state.cursors[2], 0, state.cursors[0]]
    assert lines[0] == "step 20: source new is new; it begins at its first document"
    assert lines[1].startswith(f"step 20: source s1 is gone, after {state.tokens[1]:,} tokens; ")
    kept = state.carry[state.carry[:, 0] != 1]
    np.testing.assert_array_equal(after.carry[:, 0], np.asarray([2, -1, 0])[kept[:, 0]])
    np.testing.assert_array_equal(after.carry[:, 1:], kept[:, 1:])


@pytest.mark.parametrize("packing", ["first_fit", "best_fit"])
def test_packing_and_batch_may_change_on_resume_without_losing_a_token(packing: str) -> None:
    table = [[3, 40, 7, 100, 1, 0, 12] * 3]
    old = make(table, packing="concat", epochs=1)
    planner = Planner(old, of_table(table))
    plans, state = run(planner, planner.start(), 2)
    new = dataclasses.replace(old, packing=packing, global_batch=2)
    planner = Planner(new, of_table(table))
    state, _ = planner.resume(state.to_json(old.names))
    while not plans[-1].last:
        plan, state = planner.plan(state)
        plans.append(plan)
    assert sum(int(plan.tokens_by_source.sum()) for plan in plans) == sum(table[0])


def test_state_of_306_sources_is_kilobytes() -> None:
    table = lognormal(306, 500)
    for packing, most in (("concat", 20_000), ("best_fit", 25_000)):
        spec = make(table, packing=packing, seq_len=8192, global_batch=64)
        planner = Planner(spec, of_table(table))
        _, state = run(planner, planner.start(), 20)
        assert len(json.dumps(state.to_json(spec.names))) < most
