"""Load balancing: orders the rows of a step so that every rank gets about the same cost."""

import functools

import numpy as np
from jaxtyping import Float64, Int64, Num

_COST_SCALE = 1 << 40
"""Integer that stands for the most expensive row."""

Costs = Int64[np.ndarray, " items"]
"""Costs are integers, so that floating-point rounding cannot assign items differently on another machine."""


def spread(costs: Num[np.ndarray, " items"], bins: int) -> float:
    """Returns the largest over the mean cost of `bins` equal contiguous parts of `costs`; 1 is perfect."""
    parts = costs.reshape(bins, -1).sum(axis=1)
    return float(parts.max() / parts.mean()) if parts.any() else 1.0


def balanced_order(row_cost: Float64[np.ndarray, " rows"]) -> Int64[np.ndarray, " rows"]:
    """Returns the order of `tree` for rows of these costs.

    Returns the given order instead if it is better in the mean over all possible numbers of ranks.
    """
    top = row_cost.max(initial=0.0)
    costs = (
        np.rint(row_cost * (_COST_SCALE / top)).astype(np.int64)
        if top > 0
        else np.zeros(len(row_cost), np.int64)
    )
    # Equal costs are the usual case, and their order is cached.
    if (costs == costs[0]).all():
        return _tree_of_equals(len(costs))
    order = tree(costs)
    # The tree is greedy: for some costs the given order spreads them better.
    return order if _mean_spread(costs[order]) <= _mean_spread(costs) else np.arange(len(costs))


def _mean_spread(costs: Costs) -> float:
    """Returns the mean spread over every possible number of parts."""
    parts = [d for d in range(2, len(costs)) if len(costs) % d == 0]
    return float(np.mean([spread(costs, d) for d in parts])) if parts else 1.0


def tree(costs: Costs) -> Int64[np.ndarray, " items"]:
    """Returns an order whose equal contiguous parts cost nearly the same, for any number of parts.

    The position of a row therefore does not depend on the number of ranks or microbatches, and a run can
    change its layout without changing its batches. The order is built bottom-up: the most expensive item is
    paired with the cheapest, then the pairs are paired the same way, and so on. The odd factors of the number
    of items come first, so that a power-of-two number of parts falls exactly on subtrees.

    Example: costs 9, 5, 4, 1 give the order 0, 3, 1, 2. The pairs (9, 1) and (5, 4) cost 10 and 9; in the
    given order the halves would cost 14 and 5.
    """
    groups, sums = np.arange(len(costs))[:, None], costs
    for factor in sorted(_prime_factors(len(costs)), reverse=True):
        # factor strata of equal size, the most expensive first: each group gets one member of each.
        strata = np.argsort(-sums, kind="stable").reshape(factor, -1)
        members, totals = strata[:1], sums[strata[0]]
        for stratum in strata[1:]:
            # Totals ascend and a stratum's costs descend: the cheapest group meets the most expensive item.
            order = np.argsort(totals, kind="stable")
            members = np.concatenate([members[:, order], stratum[None]])
            totals = totals[order] + sums[stratum]
        # A group of groups becomes one row of item numbers, in the order of its members.
        groups, sums = groups[members.T].reshape(members.shape[1], -1), totals
    return groups[0]


@functools.lru_cache(maxsize=8)
def _tree_of_equals(num_items: int) -> Int64[np.ndarray, " items"]:
    """Returns the order of `tree` for items of equal cost: full rows, as in nearly every step of `concat`."""
    order = tree(np.ones(num_items, np.int64))
    # The cache hands out this array itself.
    order.flags.writeable = False
    return order


def _prime_factors(number: int) -> list[int]:
    factors, factor = [], 2
    while number > 1:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return factors
