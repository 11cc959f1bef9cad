import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jtrain.data.sources.shuffle import ShuffleOrder, order_seed, permuted

GROUP_STARTS = np.cumsum([0, *[50] * 6, 1, *[50] * 6])
GROUP_BYTES = np.asarray([5000] * 6 + [0] + [5000] * 6)


def order(seed: int = 3, window_bytes: int = 20_000) -> ShuffleOrder:
    """Returns the order of two Parquet files of six row groups with a text file between them."""
    return ShuffleOrder(601, seed=seed, group_starts=GROUP_STARTS, group_bytes=GROUP_BYTES, window_bytes=window_bytes)


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_a_permutation_puts_every_number_in_one_place(size: int, key: int) -> None:
    assert sorted(permuted(np.arange(size), size, np.uint64(key)).tolist()) == list(range(size))


def test_a_permutation_of_a_trillion_numbers_stays_inside_and_does_not_repeat() -> None:
    found = permuted(np.arange(100_000), 10**12, np.uint64(7))
    assert found.min() >= 0
    assert found.max() < 10**12
    assert len(set(found.tolist())) == 100_000
    assert abs(found.mean() / 10**12 - 0.5) < 0.01


def test_neighbours_do_not_stay_neighbours() -> None:
    """The serial correlation of a good shuffle is that of noise, 1 / sqrt(n)."""
    found = permuted(np.arange(20_000), 20_000, np.uint64(1)).astype(float)
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(found, np.arange(20_000))[0, 1]) < 0.03


@pytest.mark.parametrize("window_bytes", [20_000, 1 << 30])
def test_each_epoch_is_another_permutation(window_bytes: int) -> None:
    everything = order(window_bytes=window_bytes).records(np.arange(3 * 601)).reshape(3, 601)
    other = order(seed=4, window_bytes=window_bytes).records(np.arange(601))
    for epoch in everything:
        assert sorted(epoch.tolist()) == list(range(601))
    assert len({tuple(epoch.tolist()) for epoch in [*everything, other]}) == 4


@pytest.mark.parametrize("window_bytes", [20_000, 1 << 30])
def test_documents_may_be_asked_for_one_by_one_and_in_any_order(window_bytes: int) -> None:
    """The order must not depend on which process reads which documents when."""
    numbers = np.random.default_rng(0).permutation(np.arange(500, 1300))
    together = order(window_bytes=window_bytes).records(numbers)
    alone = [order(window_bytes=window_bytes).records(numbers[i : i + 1])[0] for i in range(0, 800, 40)]
    assert together[::40].tolist() == alone


def test_a_window_touches_few_row_groups_and_mixes_them() -> None:
    records = order().records(np.arange(601))
    group = np.searchsorted(GROUP_STARTS, records, side="right")
    runs = [len(set(group[i : i + 50].tolist())) for i in range(0, 550, 50)]
    assert max(runs) <= 10, "two neighbouring windows of at most five groups"
    assert min(runs) >= 2
    everywhere = order(window_bytes=1 << 30).records(np.arange(50))
    assert np.std(everywhere) > 100, "what fits into one window is shuffled as a whole"


def test_sources_of_equal_size_do_not_march_in_step() -> None:
    assert order_seed(0, "web") != order_seed(0, "code")
    assert order_seed(0, "web") != order_seed(1, "web")
