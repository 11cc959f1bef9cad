import dataclasses
import io
import json

import pytest
from rich.console import Console

from jtrain.profile.analysis.records import Breakdown
from jtrain.profile.report.compare import Change, ProfileComparison, compare, print_comparison, verdict
from tests.profile import example


def between(a: Breakdown, b: Breakdown) -> ProfileComparison:
    return compare(a, b, a_name="runs/a", b_name="runs/b")


def slower(breakdown: Breakdown, name: str, *, by_s: float, term: str) -> Breakdown:
    """One op takes `by_s` longer in each step and on each device, and so does the step."""
    times = by_s * len(breakdown.steps) * breakdown.num_devices
    ops = [
        dataclasses.replace(op, total_s=op.total_s + times, lost=op.lost | {term: op.lost[term] + times})
        if op.name == name
        else op
        for op in breakdown.ops
    ]
    steps = [
        dataclasses.replace(
            step,
            duration_s=step.duration_s + by_s,
            parts=step.parts | {term: (step.parts[term] or 0.0) + by_s},
        )
        for step in breakdown.steps
    ]
    return dataclasses.replace(breakdown, ops=ops, steps=steps)


def test_the_op_that_got_slower_is_found_with_the_term_that_grew() -> None:
    """A matrix product that takes 40 ms more due to its clock is first in the table; nothing else changes."""
    a = example.breakdown()
    b = slower(a, "gemm_fusion_dot.3", by_s=0.04, term="clocks")

    found = between(a, b)

    first, *others = found.ops
    assert (first.name, first.where) == ("gemm_fusion_dot.3", "layers/mlp, forward")
    assert first.growth_s == pytest.approx(0.04)
    assert first.cause == "clocks +40.00 ms"
    assert all(op.growth_s == 0 for op in others)
    assert found.parts[0].name == "clock loss"
    assert found.parts[0].growth_s == pytest.approx(0.04)
    assert verdict(found) == [
        "A step of B is slower: 1.220 s -> 1.260 s (+3.3%).",
        "Because of clock loss +40.00 ms.",
        "The op that changed most: gemm_fusion_dot.3 (layers/mlp, forward), +40.00 ms: clocks +40.00 ms.",
    ]


def test_the_other_way_round_it_got_faster() -> None:
    """Every change has the opposite sign, also in the summary."""
    a = example.breakdown()
    b = slower(a, "gemm_fusion_dot.3", by_s=0.04, term="clocks")

    there, back = between(a, b), between(b, a)

    assert sorted(op.growth_s for op in there.ops) == sorted(-op.growth_s for op in back.ops)
    assert verdict(back)[0] == "A step of B is faster: 1.260 s -> 1.220 s (-3.2%)."
    assert "gemm_fusion_dot.3 (layers/mlp, forward), -40.00 ms: clocks -40.00 ms" in verdict(back)[2]


def test_longer_windows_and_more_devices_change_nothing() -> None:
    """Seconds are per device and step: three of five steps on two of four devices compare as equal."""
    a = example.breakdown()
    share = 3 * 2 / (5 * 4)
    ops = [dataclasses.replace(op, total_s=op.total_s * share) for op in a.ops]
    b = dataclasses.replace(
        a, steps=[example.step(i, duration_s=1.22) for i in range(3)], num_devices=2, ops=ops
    )

    found = between(a, b)

    assert found.a_s == pytest.approx(found.b_s)
    assert max(abs(op.growth_s) for op in found.ops) < 1e-9


def test_ops_whose_numbers_changed_are_matched_by_stem_phase_and_layer() -> None:
    """A recompiled program renumbers its fusions: 14 of a stem are matched with 13, and a new op is in B
    only.
    """
    a = example.breakdown()
    shifted = [
        dataclasses.replace(op, name=f"fusion.{900 + i}") if op.layer == "layers/norm" else op
        for i, op in enumerate(a.ops)
    ]
    new = dataclasses.replace(a.ops[0], name="all-to-all.1", layer="layers/moe", total_s=2.0)
    b = dataclasses.replace(a, ops=[*shifted[:-1], new])

    found = {op.name: op for op in between(a, b).ops}

    both = found["14 of fusion -> 13 of fusion"]
    assert both.growth_s == pytest.approx(-0.001)
    assert found["all-to-all.1"].cause == "only in B"
    assert found["all-to-all.1"].growth_s == pytest.approx(2.0 / 20)
    assert len(found) == len(a.ops) - 14 + 2


def test_communication_says_whether_more_of_it_is_exposed_or_hidden() -> None:
    """The same bytes take 60 ms longer, all of it exposed."""
    a = example.breakdown()
    row = a.communication[1]
    b = dataclasses.replace(
        a,
        communication=[dataclasses.replace(row, total_s=row.total_s + 0.06, exposed_s=row.exposed_s + 0.06)],
    )

    found = {change.name: change for change in between(a, b).communication}

    assert found["reduce-scatter over data"].cause == "exposed +60.00 ms"
    assert found["all-gather over data"].cause == "only in A"


def test_a_fallen_clock_is_said() -> None:
    """Mean sampled core clocks are reported if they differ by more than 1%."""
    a = example.breakdown()
    b = dataclasses.replace(
        a, clocks=[dataclasses.replace(track, sm_mhz=[1410.0] * 300) for track in a.clocks]
    )
    assert "to 1,410 MHz." in verdict(between(a, b))[-1]


def test_the_table_and_the_json_hold_the_same() -> None:
    """JSON has every op; the terminal leaves out ops that did not change."""
    a = example.breakdown()
    found = between(a, slower(a, "fusion.100", by_s=0.01, term="utilisation"))
    into = io.StringIO()
    print_comparison(found, Console(file=into, width=110))

    values = json.loads(json.dumps(found.to_dict()))
    assert len(values["ops"]) == len(a.ops)
    assert values["says"] == verdict(found)
    assert "ops: 1 of 24; changes below 0.1% of a step are left out" in into.getvalue()
    assert max(map(len, into.getvalue().splitlines())) <= 110


def test_a_cause_points_the_way_of_the_change() -> None:
    """An op that shrank although one term grew is explained by the term that shrank."""
    change = Change("x", "", 0.5, 0.4, {"clocks": 0.02, "utilisation": -0.12})
    assert change.cause == "utilisation -120.0 ms"
