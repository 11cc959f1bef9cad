"""Load balancing: assigns items to ranks so that every rank gets about the same cost."""

import functools
import heapq
from typing import Literal

import numpy as np
from jaxtyping import Int64, Num

from jtrain.errors import UserError

Method = Literal["none", "tree", "lpt", "karmarkar_karp"]

Costs = Int64[np.ndarray, " items"]
"""Costs are integers, so that floating-point rounding cannot assign items differently on another machine."""


def spread(costs: Num[np.ndarray, " items"], bins: int) -> float:
    """Returns the largest over the mean cost of `bins` equal contiguous parts of `costs`; 1 is perfect."""
    parts = costs.reshape(bins, -1).sum(axis=1)
    return float(parts.max() / parts.mean()) if parts.any() else 1.0


def tree(costs: Costs) -> Int64[np.ndarray, " items"]:
    """Returns an order of the items whose equal contiguous parts cost nearly the same, for any number of parts.

    The position of a row therefore does not depend on the number of ranks or microbatches, and a run can change its
    layout without changing its batches. The order is built bottom-up: the most expensive item is paired with the
    cheapest, then the pairs are paired the same way, and so on. The odd factors of the number of items come first, so
    that a power-of-two number of parts falls exactly on subtrees.
    """
    groups, sums = np.arange(len(costs))[:, None], costs
    for factor in sorted(_prime_factors(len(costs)), reverse=True):
        strata = np.argsort(-sums, kind="stable").reshape(factor, -1)
        members, totals = strata[:1], sums[strata[0]]
        for stratum in strata[1:]:  # joins the most expensive group so far with the cheapest item of the next
            order = np.argsort(totals, kind="stable")
            members = np.concatenate([members[:, order], stratum[None]])
            totals = totals[order] + sums[stratum]
        groups, sums = groups[members.T].reshape(members.shape[1], -1), totals
    return groups[0]


@functools.lru_cache(maxsize=8)
def tree_of_equals(num_items: int) -> Int64[np.ndarray, " items"]:
    """Returns the order of `tree` for items of equal cost: full rows, whose order is asked for at every step."""
    found = tree(np.ones(num_items, np.int64))
    found.flags.writeable = False
    return found


def _prime_factors(number: int) -> list[int]:
    found, factor = [], 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return found


def lpt(costs: Costs, bins: int, *, equal_counts: bool = False) -> Int64[np.ndarray, " items"]:
    """Returns the bin of each item: longest processing time first, always to the least full bin (Graham 1969).

    equal_counts: puts the same number of items into each bin; the number of items must be a multiple of `bins`.
    """
    most = _per_bin(len(costs), bins) if equal_counts else len(costs)
    found, held = np.empty(len(costs), np.int64), [0] * bins
    heap = [(0, number) for number in range(bins)]
    values = costs.tolist()
    for item in np.argsort(-costs, kind="stable").tolist():
        total, number = heap[0]
        found[item] = number
        held[number] += 1
        if held[number] < most:
            heapq.heapreplace(heap, (total + values[item], number))
        else:
            heapq.heappop(heap)
    return found


def karmarkar_karp(costs: Costs, bins: int, *, equal_counts: bool = False) -> Int64[np.ndarray, " items"]:
    """Returns the bin of each item by differencing: joins the two most uneven partial solutions, full bins to empty.

    Takes the same arguments as `lpt`. The bins are more even by a few parts in a thousand, for 30 times the time with
    64 bins.
    """
    values = costs.tolist()
    order = np.argsort(-costs, kind="stable").tolist()
    if not order:
        return np.empty(0, np.int64)
    group = bins if equal_counts and _per_bin(len(costs), bins) else 1
    heap = []
    for at in range(0, len(order), group):
        items = order[at : at + group]
        sums = [values[item] for item in items] + [0] * (bins - len(items))  # descending
        heap.append((sums[-1] - sums[0], at, sums, [[item] for item in items] + [[] for _ in range(bins - len(items))]))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, at, sums, parts = heapq.heappop(heap)
        _, _, more_sums, more_parts = heap[0]
        joined = sorted(
            ((a + b, i) for i, (a, b) in enumerate(zip(sums, reversed(more_sums), strict=True))),
            key=lambda pair: (-pair[0], pair[1]),
        )
        both = [[*parts[i], *more_parts[bins - 1 - i]] for _, i in joined]
        heapq.heapreplace(heap, (joined[-1][0] - joined[0][0], at, [total for total, _ in joined], both))
    found = np.empty(len(costs), np.int64)
    for number, items in enumerate(heap[0][3]):
        found[items] = number
    return found


def _per_bin(items: int, bins: int) -> int:
    if items % bins:
        raise UserError(f"{items} items do not split into {bins} parts of equal size.")
    return items // bins
