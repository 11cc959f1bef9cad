"""View of a step for one modality: the cost of each node, and the bucket or position that it gets."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64, Shaped

from jtrain.data.planner import balance
from jtrain.data.planner.device_tree import ClientPlaceTree
from jtrain.errors import UserError

CostFn = Callable[[Int64[np.ndarray, " pieces"]], Shaped[np.ndarray, " pieces"]]

_COST_SCALE = 1 << 40


class NodeAssignment(NamedTuple):
    """Assignment of the nodes of a view to buckets.

    order: the nodes, bucket by bucket.
    bucket: bucket of each node; None if no axis was given: then equal contiguous parts of `order` are the buckets.
    costs: cost of each node.
    """

    order: Int64[np.ndarray, " nodes"]
    bucket: Int64[np.ndarray, " nodes"] | None
    costs: Float64[np.ndarray, " nodes"]

    def spread(self, ranks: int) -> float:
        """Returns the largest over the mean cost, over `ranks`, or over the buckets if there are any."""
        if self.bucket is None:
            totals = self.costs[self.order].reshape(ranks, -1).sum(axis=1)
        else:
            totals = np.bincount(self.bucket, weights=self.costs, minlength=ranks)
        return float(totals.max() / totals.mean()) if totals.any() else 1.0


class View:
    """View of a step for one modality. Nodes are rows after `Graph.pack`, documents after `Graph.freeze`."""

    def __init__(self, sizes: np.ndarray, node: np.ndarray, num_nodes: int, place: ClientPlaceTree | None) -> None:
        self._sizes, self._node, self._num_nodes, self._place = sizes.astype(np.int64), node, num_nodes, place
        self._buckets: int | None = None
        self._cost: CostFn = lambda size: size
        self._method: balance.Method = "none"
        self._min_gain = 0.0

    def distribute(self, axis: str | None, *, group_size: int = 1) -> "View":
        """Makes one bucket per `group_size` ranks along `axis`; None: one order that suits any number of ranks.

        Raises:
          UserError: there is no such axis, or the number of its ranks is no multiple of `group_size`.
        """
        self._buckets = None
        if axis is not None:
            assert self._place is not None, "distribute(axis) needs a ClientPlaceTree"
            ranks = self._place.count(axis)
            if group_size < 1 or ranks % group_size:
                raise UserError(
                    f"distribute({axis!r}, group_size={group_size}) must divide the {ranks} ranks of {axis!r}."
                )
            self._buckets = ranks // group_size
        return self

    def cost(self, cost_fn: CostFn) -> "View":
        """Sets the cost of a piece as a function of its size; only proportions matter."""
        self._cost = cost_fn
        return self

    def balance(self, method: balance.Method, *, min_gain: float = 0.0) -> "View":
        """Sets the method of balancing. `tree` needs no buckets, and its order is used only if it gains `min_gain`."""
        self._method, self._min_gain = method, min_gain
        return self

    def plan(self) -> NodeAssignment:
        """Computes the assignment of every node."""
        raw = np.asarray(self._cost(self._sizes), np.float64)
        node_cost = np.zeros(self._num_nodes)
        np.add.at(node_cost, self._node, raw)
        top = node_cost.max(initial=0.0)
        costs = np.rint(node_cost * (_COST_SCALE / top)).astype(np.int64) if top > 0 else np.zeros(len(node_cost), int)
        given = np.arange(self._num_nodes)
        if self._buckets is None:
            assert self._method in ("none", "tree"), f"balance({self._method!r}) needs distribute(axis)"
            order = given
            if self._method == "tree" and self._num_nodes and (costs == costs[0]).all():
                order = balance.tree_of_equals(self._num_nodes) if self._min_gain <= 0 else given
            elif self._method == "tree" and self._num_nodes:
                found = balance.tree(costs)
                order = found if _mean_spread(costs) >= _mean_spread(costs[found]) * (1 + self._min_gain) else given
            return NodeAssignment(order, None, node_cost)
        if self._method == "lpt":
            bucket = balance.lpt(costs, self._buckets)
        elif self._method == "karmarkar_karp":
            bucket = balance.karmarkar_karp(costs, self._buckets)
        else:
            order = balance.tree(costs) if self._method == "tree" and self._num_nodes else given
            bucket = np.empty(self._num_nodes, np.int64)
            bucket[order] = given * self._buckets // max(1, self._num_nodes)
        return NodeAssignment(np.argsort(bucket, kind="stable"), bucket, node_cost)


def _mean_spread(costs: np.ndarray) -> float:
    """Returns the mean spread over every possible number of parts, so that no single number of ranks decides."""
    parts = [d for d in range(2, len(costs)) if len(costs) % d == 0]
    return float(np.mean([balance.spread(costs, d) for d in parts])) if parts else 1.0
