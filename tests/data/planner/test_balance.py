import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jtrain.data.planner.balance import balanced_order, spread, tree

costs = st.lists(st.integers(0, 1000), min_size=1, max_size=64).map(lambda c: np.asarray(c, np.int64))


def heavy_tail(rows: int, pieces: int, seed: int) -> np.ndarray:
    """Costs of rows of 8192 tokens of a 7B model: linear and attention."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(5.76, 1.21, (rows, pieces)), 16, 8192)
    lengths *= 8192 / lengths.sum(axis=1, keepdims=True)
    return np.rint((24576 * lengths + lengths**2).sum(axis=1)).astype(np.int64)


@given(costs=costs)
def test_a_tree_is_an_order_of_all_items(costs: np.ndarray) -> None:
    assert sorted(tree(costs).tolist()) == list(range(len(costs)))


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32])
def test_one_order_is_balanced_for_any_number_of_ranks(ranks: int) -> None:
    """The attention-aware cost of a rank is within 5 % of the mean if ranks have at least four rows."""
    before, after = [], []
    for seed in range(20):
        costs = heavy_tail(128, 12, seed)
        before.append(spread(costs, ranks))
        after.append(spread(costs[tree(costs)], ranks))
    assert max(after) <= 1.05
    assert np.mean(after) - 1 < 0.5 * (np.mean(before) - 1), (np.mean(after), np.mean(before))


@pytest.mark.parametrize(("rows", "ranks"), [(48, 16), (48, 8), (96, 32), (60, 4), (60, 15)])
def test_odd_numbers_of_rows_are_balanced_too(rows: int, ranks: int) -> None:
    costs = heavy_tail(rows, 12, 3)
    given_spread = np.mean([spread(np.random.default_rng(i).permutation(costs), ranks) for i in range(20)])
    assert spread(costs[tree(costs)], ranks) - 1 < 0.7 * (given_spread - 1)


@given(costs=costs)
def test_the_balanced_order_is_never_worse_than_the_given_one(costs: np.ndarray) -> None:
    order = balanced_order(costs.astype(float))
    assert sorted(order.tolist()) == list(range(len(costs)))
    ranks = [n for n in range(2, len(costs)) if len(costs) % n == 0]
    assert sum(spread(costs[order], n) for n in ranks) <= sum(spread(costs, n) for n in ranks) + 1e-6


def test_an_order_that_the_tree_cannot_better_is_kept() -> None:
    """As packed, two ranks cost 6 and 6, three cost 5, 3 and 4; in the tree's order 7 and 5, and 6, 3 and
    3.
    """
    costs = np.asarray([4, 1, 1, 2, 2, 2])
    assert costs[tree(costs)].tolist() == [4, 2, 1, 2, 2, 1]
    assert balanced_order(costs.astype(float)).tolist() == list(range(len(costs)))
