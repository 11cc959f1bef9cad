"""Interval sets, tested against arrays with one bit per nanosecond."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jtrain.profile.analysis import intervals

LAST = 60
events = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=6)


def edges(drawn: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    start = np.array([first for first, _ in drawn], np.int64)
    return start, start + np.array([length for _, length in drawn], np.int64)


def running(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Number of events that run in each nanosecond."""
    count = np.zeros(LAST, int)
    for start, end in zip(starts, ends, strict=True):
        count[start:end] += 1
    return count


def bits(times: np.ndarray) -> list[bool]:
    assert (times[:, 0] < times[:, 1]).all(), times
    assert (times[1:, 0] > times[:-1, 1]).all(), "pieces that touch are one"
    return (running(times[:, 0], times[:, 1]) > 0).tolist()


@given(events, events)
def test_sets_of_times_are_those_of_single_nanoseconds(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    """Union, intersection, difference, complement and clip agree with one bit per nanosecond, for any
    events.
    """
    a, b = (intervals.union(*edges(drawn)) for drawn in (first, second))
    in_a, in_b = (running(*edges(drawn)) > 0 for drawn in (first, second))
    inside = (np.arange(LAST) >= 5) & (np.arange(LAST) < 40)
    assert bits(a) == in_a.tolist()
    assert intervals.total(a) == in_a.sum()
    assert bits(intervals.join(a, b)) == (in_a | in_b).tolist()
    assert bits(intervals.intersect(a, b)) == (in_a & in_b).tolist()
    assert bits(intervals.subtract(a, b)) == (in_a & ~in_b).tolist()
    assert bits(intervals.clip(a, 5, 40)) == (in_a & inside).tolist()
    assert bits(intervals.complement(a, 5, 40)) == (~in_a & inside).tolist()


@given(events, events)
def test_what_events_share_adds_up_to_their_union(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    """A nanosecond in which k events run is divided by k, with and without `within`."""
    start, end = edges(first)
    other = intervals.union(*edges(second))
    count, counts = running(start, end), running(other[:, 0], other[:, 1]) > 0
    want = [(1 / count[s:e]).sum() for s, e in zip(start, end, strict=True)]
    want_within = [(counts[s:e] / count[s:e]).sum() for s, e in zip(start, end, strict=True)]
    np.testing.assert_allclose(intervals.shares(start, end) * 1e9, want, atol=1e-9)
    np.testing.assert_allclose(intervals.shares(start, end, other) * 1e9, want_within, atol=1e-9)
    assert intervals.shares(start, end).sum() * 1e9 == pytest.approx(
        intervals.total(intervals.union(start, end))
    )
    assert intervals.covered(start, end, other).tolist() == [
        int(counts[s:e].sum()) for s, e in zip(start, end, strict=True)
    ]


def test_times_since_the_epoch_keep_every_nanosecond() -> None:
    """A float64 would round them to 256 ns."""
    now = 1_795_284_144_288_810_791
    start, end = np.array([now, now + 10]), np.array([now + 3, now + 11])
    assert intervals.total(intervals.union(start, end)) == 4
    np.testing.assert_allclose(intervals.shares(start, end), [3e-9, 1e-9])
