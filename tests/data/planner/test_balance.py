import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jtrain.data.planner.balance import karmarkar_karp, lpt, spread, tree

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


@given(costs=costs, bins=st.integers(1, 9))
def test_each_item_gets_one_bin_and_lpt_keeps_grahams_bound(costs: np.ndarray, bins: int) -> None:
    for method in (lpt, karmarkar_karp):
        found = method(costs, bins)
        assert found.shape == costs.shape
        assert ((found >= 0) & (found < bins)).all()
    loads = np.bincount(lpt(costs, bins), weights=costs, minlength=bins)
    assert loads.max() <= costs.sum() / bins + costs.max()


@given(costs=costs, bins=st.sampled_from([1, 2, 3, 4]))
def test_equal_counts_are_kept(costs: np.ndarray, bins: int) -> None:
    if len(costs) % bins:
        with pytest.raises(ValueError, match="do not split into"):
            lpt(costs, bins, equal_counts=True)
        return
    for method in (lpt, karmarkar_karp):
        counts = np.bincount(method(costs, bins, equal_counts=True), minlength=bins)
        assert (counts == len(costs) // bins).all()


def test_karmarkar_karp_finds_the_even_split_that_lpt_misses() -> None:
    costs = np.asarray([8, 7, 6, 5, 4], np.int64)
    loads = {m.__name__: np.bincount(m(costs, 2), weights=costs).max() for m in (lpt, karmarkar_karp)}
    assert loads == {"lpt": 17, "karmarkar_karp": 16}


def test_balancing_a_thousand_documents_over_ranks_is_close_to_even() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.76, 1.21, 1024), 16, 8192).astype(np.int64)
    costs = 24576 * lengths + lengths**2
    for method in (lpt, karmarkar_karp):
        loads = np.bincount(method(costs, 64), weights=costs)
        assert loads.max() == costs.max(), "no bin holds more than the one document that nothing can divide"
