import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jtrain.data.sources.shuffle import order_seed, permuted


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


def test_sources_of_equal_size_do_not_march_in_step() -> None:
    assert order_seed(0, "web") != order_seed(0, "code")
    assert order_seed(0, "web") != order_seed(1, "web")
