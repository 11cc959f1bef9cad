"""A mixture of experts is the same model on any layout: losses, gradients, weights; experts split, tokens exchanged."""

import functools
from typing import Any

import numpy as np
import pytest

from jtrain.model.router import MoESpec
from tests.test_step import SIZES, Trained, assert_same, trained

MOE = MoESpec(num_experts=8, top_k=2, shared_experts=1, balance_loss=1e-2, router_z_loss=1e-3)
EXPERTS: dict[str, Any] = SIZES | dict(d_ff=32, moe=MOE)
MESHES = (
    dict(expert=4),
    dict(data=2, expert=4),
    dict(expert=2, tensor=2),
    dict(data=2, expert=2, tensor=2),
    dict(replica=2, expert=2, tensor=2),
    dict(data=8),
    dict(expert=8),
)


@functools.cache
def on_one_device() -> Trained:
    want = trained({}, sizes=EXPERTS)
    assert want.losses[-1] < want.losses[0] - 0.1, "the loss must move, or equality below proves nothing"
    return want


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_the_layout_is_not_a_mixture(axes: dict[str, int]) -> None:
    """Twenty steps give one device's losses, gradients and weights, wherever the experts are."""
    case = MESHES.index(axes)
    got = trained(axes, sizes=EXPERTS, zero_stage=case % 4, microbatches=1 + case % 2, remat=("none", "full")[case // 2 % 2])
    assert_same(got, on_one_device())
