"""Collectives over `tensor` that hide behind matmuls are a layout too: the same weights, losses and gradients."""

from typing import Any

import pytest

from jtrain.layout import LayoutSpec, make_layout
from jtrain.mesh import MeshSpec
from jtrain.model.transformer import Transformer
from tests.step.test_train_step import SIZES, assert_same, on_one_device, trained

PERMUTES = (("all_gather_matmul", "permute"), ("matmul_reduce_scatter", "permute"))
"""Forced, so that no choice of the cost model can leave the plain collectives in their place."""

CASES: list[tuple[dict[str, int], dict[str, Any]]] = [
    (dict(data=2, tensor=4), dict(zero_stage=3, remat="full")),
    (dict(tensor=2), dict(remat="none", microbatches=2)),
]


def test_overlap_over_tensor_is_not_a_model() -> None:
    """Twenty steps give one device's losses, gradients and weights; what is kept by name is kept from the permutes too.

    In float32, within what sums in another order give: the bound is that of every other layout.
    """
    kept = ("attention_q", "attention_k", "attention_v", "mlp_gate")
    got = trained(dict(tensor=2), tensor_overlap=True, kernels=PERMUTES, remat="named", remat_save=kept)
    assert_same(got, on_one_device())


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "layout"), CASES, ids=str)
def test_overlap_over_tensor_is_not_a_model_with_other_layouts(axes: dict[str, int], layout: dict[str, Any]) -> None:
    """Beside ZeRO, remat and accumulation."""
    assert_same(trained(axes, tensor_overlap=True, kernels=PERMUTES, **layout), on_one_device())


def test_overlap_is_refused_where_nothing_could_hide() -> None:
    with pytest.raises(ValueError, match=r"tensor_overlap=True with mesh\.tensor=1: there are no collectives"):
        make_layout(LayoutSpec(tensor_overlap=True), MeshSpec(data=2), Transformer(**SIZES).param_infos())
