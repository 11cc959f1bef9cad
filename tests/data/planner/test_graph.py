"""Cost, balance and filling of the rows of one step."""

import numpy as np
import pytest

from jtrain.data.mixture.schedule import Constant
from jtrain.data.planner.balance import spread
from jtrain.data.planner.planner import LoadingPlan, Planner
from tests.data.planner.planning import lognormal, make, of_table, run


def test_balancing_brings_the_cost_over_ranks_within_5_percent() -> None:
    """The cost is attention-aware (24576 n + n**2, a 7B model), with four rows per rank; the given order is
    uneven.
    """
    table = lognormal(20)
    found = {}
    for balance in (False, True):
        spec = make(table, packing="best_fit", seq_len=8192, global_batch=32, balance=balance,
                    cost_linear=24576.0, cost_quadratic=1.0)  # fmt: skip
        plans, _ = run(Planner(spec, of_table(table)), Planner(spec, of_table(table)).start(), 30)
        found[balance] = np.mean(
            [[spread(plan.row_cost, ranks) for plan in plans] for ranks in (2, 4, 8)], axis=1
        )
    assert (found[True] <= 1.05).all(), found
    assert (found[True] - 1 < 0.3 * (found[False] - 1)).all(), found


def test_balancing_orders_the_rows_and_changes_nothing_in_them() -> None:
    """The rows of each plan are the same, in another order, and the cost of each row is that of its
    pieces.
    """
    table = lognormal(2)

    def rows_of(plan: LoadingPlan) -> list[tuple[float, list[list[int]]]]:
        pieces, found = plan.pieces, []
        for row in range(8):
            spans = np.stack([pieces.source, pieces.document, pieces.start, pieces.end])[:, pieces.row == row]
            length = spans[3] - spans[2]
            assert plan.row_cost[row] == (2 * length + 3 * length**2).sum()
            found.append((plan.row_cost[row], spans.tolist()))
        return found

    plain, balanced = (
        Planner(
            make(table, packing="best_fit", seq_len=2048, global_batch=8, balance=balance,
                 cost_linear=2.0, cost_quadratic=3.0),
            of_table(table),
        )
        for balance in (False, True)
    )  # fmt: skip
    plans = zip(run(plain, plain.start(), 5)[0], run(balanced, balanced.start(), 5)[0], strict=True)
    for given, ordered in ((rows_of(one), rows_of(other)) for one, other in plans):
        assert given != ordered
        assert sorted(given) == sorted(ordered)


@pytest.mark.parametrize("packing", ("concat", "first_fit", "best_fit"))
def test_rows_of_one_source_are_filled_from_as_many_documents_as_they_hold(packing: str) -> None:
    """Documents of one or two tokens fill any row, also the last of a source, for which more documents are
    fetched.
    """
    drawn = np.random.default_rng(0)
    table = [drawn.integers(1, 3, 4000).tolist() for _ in range(3)]
    spec = make(table, Constant({"s0": 0.5, "s1": 0.3, "s2": 0.2}), unit="rows", packing=packing)
    planner = Planner(spec, of_table(table))
    plans, _ = run(planner, planner.start(), 60)
    assert [plan.fill for plan in plans] == [1.0] * 60
    rows = np.sum([plan.tokens_by_source for plan in plans], axis=0) / spec.seq_len
    np.testing.assert_array_equal(rows, [120, 72, 48])
