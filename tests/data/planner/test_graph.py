"""Primitives of the graph on one step: cost, balance, views."""

from typing import Any

import numpy as np
import pytest

from jtrain.data.mixture.draw import Buffers
from jtrain.data.mixture.schedule import Constant
from jtrain.data.planner.device_tree import ClientPlaceTree
from jtrain.data.planner.graph import Graph
from jtrain.data.planner.planner import Planner
from tests.data.planner.planning import lognormal, make, of_table, run


def test_balancing_brings_the_cost_over_ranks_within_5_percent() -> None:
    """The cost is attention-aware (24576 n + n**2, a 7B model), with four rows per rank; the given order is uneven."""
    table = lognormal(20)
    spread = {}
    for balance in (False, True):
        spec = make(table, packing="best_fit", seq_len=8192, global_batch=32, balance=balance,
                    cost_linear=24576.0, cost_quadratic=1.0)  # fmt: skip
        plans, _ = run(Planner(spec, of_table(table)), Planner(spec, of_table(table)).start(), 30)
        spread[balance] = np.mean([[plan.spread(ranks) for plan in plans] for ranks in (2, 4, 8)], axis=1)
    assert (spread[True] <= 1.05).all(), spread
    assert (spread[True] - 1 < 0.3 * (spread[False] - 1)).all(), spread


def test_a_balanced_order_that_gains_too_little_is_not_taken() -> None:
    table = lognormal(2)
    fields: dict[str, Any] = dict(packing="best_fit", seq_len=2048, cost_quadratic=1e-4)
    costs = []
    for gain in (0.0, 10.0):
        spec = make(table, **fields, min_balance_gain=gain)
        costs.append(Planner(spec, of_table(table)).plan(Planner(spec, of_table(table)).start())[0].row_cost.tolist())
    plain = make(table, **fields, balance=False)
    unbalanced = Planner(plain, of_table(table)).plan(Planner(plain, of_table(table)).start())[0].row_cost.tolist()
    assert costs[0] != costs[1] == unbalanced
    assert sorted(costs[0]) == sorted(costs[1])


def test_an_encoder_and_a_backbone_are_balanced_separately() -> None:
    """Images are balanced over all devices, text over `data`: balancing one by the other's cost leaves it uneven."""
    rng = np.random.default_rng(0)
    text = np.clip(rng.lognormal(5.76, 1.21, 512), 16, 8192).astype(np.int32)
    patches = rng.choice([0, 256, 1024, 4096], 512, p=[0.5, 0.3, 0.15, 0.05])
    buffers = Buffers(["a", "b"], [256, 256], 1, lambda s, first, count: text[256 * s + first :][:count])
    shape = {"data": 8, "tensor": 2}
    tree = ClientPlaceTree(shape, np.zeros(16, np.int64), global_batch=8)
    graph = Graph(buffers, place=tree, sizes={"image": lambda source, document: patches[256 * source + document]})
    graph.mix(Constant({"a": 0.75, "b": 0.25}), step=0, unit="samples").freeze(256)
    assert np.bincount(graph.pieces.source).tolist() == [192, 64]
    graph.view("text").distribute("data").cost(lambda n: 24576 * n + n**2).balance("lpt")
    graph.view("image").distribute("world", group_size=2).cost(lambda n: 8192 * n + n**2).balance("karmarkar_karp")
    plan = graph.broadcast_at("tensor").plan()
    encoder, backbone = plan.views["image"], plan.views["text"]
    assert backbone.spread(8) < 1.02
    assert encoder.spread(8) < 1.05
    assert backbone.bucket is not None
    assert encoder._replace(bucket=backbone.bucket).spread(8) > 1.2
    assert plan.fetch_from is not None
    assert plan.fetch_from.tolist() == [i - i % 2 for i in range(16)]


def test_primitives_refuse_what_is_not_there() -> None:
    buffers = Buffers(["a"], [4], 1, lambda s, first, count: np.ones(count, np.int32))
    tree = ClientPlaceTree({"data": 8}, np.zeros(8, np.int64), global_batch=8)
    graph = Graph(buffers, place=tree).mix(Constant({"a": 1}), step=0).freeze(4)
    with pytest.raises(ValueError, match=r"view\('sound'\): no such modality; there are text"):
        graph.view("sound")
    with pytest.raises(ValueError, match=r"distribute\('data', group_size=3\) must divide the 8 ranks of 'data'"):
        graph.distribute("data", group_size=3)
