"""Thinned lines keep what a reader must not miss."""

import numpy as np

from jtrain.report.thinning import thin


def test_a_thinned_line_keeps_its_extremes() -> None:
    """A dip or a spike of one sample stays, and so do the first and the last sample; of few samples all stay."""
    x = np.arange(10_000) / 1000
    y = np.full(10_000, 1980.0)
    y[4321], y[6543], y[777] = 345.0, 2600.0, np.nan

    drawn = thin(x, y, buckets=400)

    assert len(drawn) <= 4 * 400
    assert {0, 4321, 6543, 9999} <= set(drawn.tolist())
    assert np.all(np.diff(drawn) > 0)
    assert thin(x[:50], y[:50], buckets=400).tolist() == list(range(50))


def test_buckets_are_of_the_axis_not_of_the_samples() -> None:
    """Nine tenths of the samples lie in the first of ten buckets, and a bucket of gaps keeps one of them."""
    x = np.concatenate([np.linspace(0, 0.9, 900), np.linspace(1, 10, 100)])
    y = np.sin(40 * x)
    y[(x >= 5) & (x < 6)] = np.nan
    drawn = thin(x, y, buckets=10)
    in_first = drawn[x[drawn] < 1]
    assert len(in_first) <= 4
    assert y[in_first].max() == y[:900].max()
    assert y[in_first].min() == y[:900].min()
    gap = drawn[(x[drawn] >= 5) & (x[drawn] < 6)]
    assert 1 <= len(gap) <= 2
    assert np.isnan(y[gap]).all()


def test_samples_at_one_place_are_one_bucket() -> None:
    assert thin(np.zeros(100), np.arange(100.0), buckets=2).tolist() == [0, 99]
