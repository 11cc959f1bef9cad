"""End of the data of one source, of a stage, and of all sources."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jtrain.data.mixture.schedule import Constant, Linear, Schedule, Staged, own_weights
from jtrain.data.planner.planner import EndOfData, Planner
from tests.data.planner.planning import make, of_table, run, specs, tables


@pytest.mark.parametrize("unit", ["tokens", "samples", "rows"])
def test_a_source_at_its_end_leaves_its_share_to_the_others(unit: str) -> None:
    table = [[8] * 10, [8] * 1000, [8] * 1000]
    spec = make(table, Constant({"s0": 0.5, "s1": 0.3, "s2": 0.2}), epochs=1, unit=unit)
    planner = Planner(spec, of_table(table))
    plans, _ = run(planner, planner.start(), 200)
    assert all(plan.fill == 1 for plan in plans)
    tokens = np.sum([plan.tokens_by_source for plan in plans[100:]], axis=0)
    np.testing.assert_allclose(tokens / tokens.sum(), [0, 0.6, 0.4], atol=0.02)


def test_a_source_without_a_token_is_an_error_that_names_it_not_a_hang() -> None:
    table = [[5], [0, 0, 0]]
    planner = Planner(make(table), of_table(table))
    message = (
        r"data\.sources\.s1 has no text to train on: a whole epoch of 3 documents.* "
        r"data\.sources\.s1\.weight=0"
    )
    with pytest.raises(ValueError, match=message):
        planner.plan(planner.start())
    planner = Planner(make(table, own_weights(Constant(), {"s0": 1.0, "s1": 0.0})), of_table(table))
    plan, _ = planner.plan(planner.start())
    assert plan.fill == 1, "what the message says helps"
    planner = Planner(make([[0, 0]], Constant({"data": 1}), names=("data",)), of_table([[0, 0]]))
    with pytest.raises(
        ValueError,
        match=r"^data has no text to train on: a whole epoch of 2 documents .* set data\.path to files",
    ) as caught:
        planner.plan(planner.start())
    assert "weight" not in str(caught.value), "of one source it would leave nothing"


@pytest.mark.parametrize("unit", ["tokens", "samples", "rows"])
@pytest.mark.parametrize(
    "schedule",
    [
        Staged(((0, {"s0": 1}), (100, {"s1": 1, "s0": 1}))),
        Linear(((0, {"s0": 1}), (99, {"s0": 1, "s2": 0}), (199, {"s1": 1}))),
    ],
    ids=["staged", "linear"],
)
def test_data_that_ends_before_a_later_stage_begins_is_an_error_with_its_step(
    schedule: Schedule, unit: str
) -> None:
    """This is an error and not the end of the data, because most of the data was never read."""
    table = [[16] * 50, [16] * 400, [16] * 400]
    spec = make(table, schedule, epochs=1, unit=unit)
    planner = Planner(spec, of_table(table))
    plans, state = run(planner, planner.start(), 13)
    assert [plan.last for plan in plans] == [False] * 13
    message = (
        r"at step 13 every source with weight .* data\.epochs=1: data\.sources\.s0 \(50\)\), while "
        r"data\.sources\.s1, with 400 unread documents, has no weight before step 100\. Give it weight from "
        r"step"
    )
    with pytest.raises(ValueError, match=message):
        planner.plan(state)
    for better in (
        dataclasses.replace(spec, epochs=None),
        dataclasses.replace(spec, schedule=Staged(((0, {"s0": 1}), (13, {"s1": 1})))),
    ):
        again = Planner(better, of_table(table))
        resumed, _ = again.resume(json.loads(json.dumps(state.to_json(spec.names))))
        more, _ = run(again, resumed, 20)
        assert all(plan.fill == 1 for plan in more), "what the message says helps"


@pytest.mark.parametrize("unit", ["tokens", "samples", "rows"])
@pytest.mark.parametrize("documents", [47, 48])
def test_a_stage_that_begins_where_the_one_before_ends_its_data_goes_on(unit: str, documents: int) -> None:
    """The stream also continues if the last step of the first stage is not full."""
    table = [[16] * documents, [16] * 40, [16] * 40]
    planner = Planner(
        make(table, Staged(((0, {"s0": 1}), (12, {"s1": 1}))), epochs=1, unit=unit), of_table(table)
    )
    plans, state = run(planner, planner.start(), 22)
    assert sum(int(plan.tokens_by_source[1]) for plan in plans) == 16 * 40
    assert not any(plan.last for plan in plans[:-1])
    if not plans[-1].last:
        with pytest.raises(EndOfData):  # no step waits for s2, which never has weight
            planner.plan(state)


@settings(max_examples=60)
@given(
    table=tables,
    fields=specs,
    changes=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), max_size=5),
)
def test_what_was_begun_is_trained_on_to_its_end_whatever_the_stages_do(
    table: list[list[int]], fields: dict[str, Any], changes: list[tuple[int, int]]
) -> None:
    """This includes a source without weight by then: its last rows come after the others have ended."""
    num, at, stages = len(table), 0, [(0, {"s0": 1})]
    for steps, source in changes:
        at += steps
        stages.append((at, {f"s{source % num}": 1}))
    planner = Planner(make(table, Staged(tuple(stages)), **fields, epochs=1), of_table(table))
    state, placed = planner.start(), np.zeros(num, np.int64)
    for _ in range(5000):
        try:
            plan, state = planner.plan(state)
        except (EndOfData, ValueError):  # the latter if a later stage uses the remaining documents
            break
        placed += plan.tokens_by_source
        assert plan.pieces.row.max() < planner.spec.global_batch
        if fields["unit"] == "rows":
            pairs = np.stack([plan.pieces.row, plan.pieces.source])
            assert len(np.unique(pairs, axis=1).T) == len(np.unique(plan.pieces.row))
    else:
        pytest.fail("the data did not end")
    assert not len(state.carry)
    begun = zip(table, state.cursors.tolist(), strict=True)
    assert placed.tolist() == [sum(lengths[:cursor]) for lengths, cursor in begun]


def test_rows_of_a_source_that_lost_its_weight_come_last() -> None:
    """Step 0 takes 64 of a document's 100 tokens; then the other source is read alone, then the rest."""
    table = [[100], [16] * 10]
    spec = make(table, Staged(((0, {"s0": 1}), (1, {"s1": 1}))), epochs=1, unit="rows")
    planner = Planner(spec, of_table(table))
    plans, state = run(planner, planner.start(), 5)
    assert [plan.tokens_by_source.tolist() for plan in plans] == [[64, 0], [0, 64], [0, 64], [32, 32], [4, 0]]
    assert [plan.last for plan in plans] == [False] * 4 + [True]
    assert not len(state.carry)


def test_the_end_of_data_is_said() -> None:
    table = [[16, 16, 16, 10]]
    planner = Planner(make(table, epochs=1, global_batch=3), of_table(table))
    plans, state = run(planner, planner.start(), 2)
    assert [plan.last for plan in plans] == [False, True]
    assert [plan.fill for plan in plans] == [1.0, 10 / 48]
    with pytest.raises(EndOfData, match="before step 2"):
        planner.plan(state)
