"""Set operations on time intervals: union, intersection, complement. All times are int64 nanoseconds.

A set is an array [K, 2] of sorted, disjoint intervals: start and end of each. Events are arrays of starts and
ends in any order.
"""

import numpy as np

type Set = np.ndarray
"""Disjoint intervals [start, end) in ascending order, (n, 2), int64."""

EMPTY = np.zeros((0, 2), np.int64)


def union(starts: np.ndarray, ends: np.ndarray) -> Set:
    """The times at which at least one event runs."""
    # An op of no duration would make an interval of no length, which is no set of times.
    keep = ends > starts
    starts, ends = starts[keep], ends[keep]
    if not len(starts):
        return EMPTY
    order = np.argsort(starts, kind="stable")
    # reach: the latest end so far. A start beyond it opens a new interval.
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    new = np.concatenate([[True], starts[1:] > reach[:-1]])
    # The last event of an interval is the one before the next interval's first.
    last = np.concatenate([np.flatnonzero(new)[1:] - 1, [len(starts) - 1]])
    return np.stack([starts[new], reach[last]], axis=1).astype(np.int64)


def total(times: Set) -> int:
    """Nanoseconds in the set."""
    return int((times[:, 1] - times[:, 0]).sum())


def join(*sets: Set) -> Set:
    """Union of the sets."""
    # EMPTY, because concatenate needs one array at least.
    both = np.concatenate([EMPTY, *sets])
    return union(both[:, 0], both[:, 1])


def complement(times: Set, start: int, end: int) -> Set:
    """The times within start..end that are not in the set."""
    inside = clip(times, start, end)
    # The gaps between intervals: from each end to the next start; union drops the empty ones.
    edges = np.concatenate([[start], inside.ravel(), [end]]).reshape(-1, 2)
    return union(edges[:, 0], edges[:, 1])


def clip(times: Set, start: int, end: int) -> Set:
    """The times of the set within start..end."""
    cut = np.clip(times, start, end)
    return cut[cut[:, 1] > cut[:, 0]]


def intersect(a: Set, b: Set) -> Set:
    """The times that are in both sets."""
    if not len(a) or not len(b):
        return EMPTY
    # De Morgan: what is in both is outside of neither.
    start, end = int(min(a[0, 0], b[0, 0])), int(max(a[-1, 1], b[-1, 1]))
    return complement(join(complement(a, start, end), complement(b, start, end)), start, end)


def subtract(a: Set, b: Set) -> Set:
    """The times of `a` that are not in `b`."""
    return intersect(a, complement(b, int(a[0, 0]), int(a[-1, 1]))) if len(a) else EMPTY


def covered(starts: np.ndarray, ends: np.ndarray, times: Set) -> np.ndarray:
    """Nanoseconds of each event that lie within the set `times`."""
    # prefix_ns[k]: nanoseconds in the first k intervals.
    prefix_ns = np.concatenate([[0], np.cumsum(times[:, 1] - times[:, 0])])

    def covered_until(moment: np.ndarray) -> np.ndarray:
        index = np.searchsorted(times[:, 0], moment, side="right")
        inside = np.zeros(len(moment), np.int64)
        # Before the first interval there is nothing to cut.
        has_interval = index > 0
        piece = times[index[has_interval] - 1]
        # A moment within interval k - 1 has not had all of it yet: the difference is negative.
        inside[has_interval] = np.minimum(moment[has_interval], piece[:, 1]) - piece[:, 1]
        return prefix_ns[index] + inside

    return covered_until(ends) - covered_until(starts)


def shares(starts: np.ndarray, ends: np.ndarray, within: Set | None = None) -> np.ndarray:
    """Seconds of each event; time in which k events run is divided by k, so the results sum to their union.

    Events from 0 to 4 s and from 2 to 6 s have 2 s alone and half of 2 s together: 3 s each, of a union of
    6 s. Within 3 to 5 s the first has 0.5 s and the second 1.5 s.

    Args:
      within: count only these times; None counts all.
    """
    edges, position = np.unique(np.concatenate([starts, ends]), return_inverse=True)
    running = np.zeros(len(edges), np.int64)
    # add.at, because several events may start or end at one moment.
    np.add.at(running, position[: len(starts)], 1)
    np.add.at(running, position[len(starts) :], -1)
    # Events that run between each pair of neighbouring edges.
    active = np.cumsum(running)[:-1]
    lengths = np.diff(edges) if within is None else covered(edges[:-1], edges[1:], within)
    until = np.concatenate([[0.0], np.cumsum(lengths * (active > 0) / np.maximum(active, 1))])
    return (until[position[len(starts) :]] - until[position[: len(starts)]]) * 1e-9
