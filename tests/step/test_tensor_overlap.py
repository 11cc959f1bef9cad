"""Collectives over `tensor` that hide behind matmuls are a layout too: the same weights, losses and
gradients.
"""

from typing import Any

import pytest

from jtrain.layout.batch_split import check_batch
from jtrain.layout.layout import LayoutSpec, make_layout
from jtrain.layout.mesh import MeshSpec
from jtrain.layout.precision import PrecisionSpec
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer
from tests.step.test_train_step import SIZES, assert_same, on_one_device, trained

PERMUTES = (("all_gather_matmul", "permute"), ("matmul_reduce_scatter", "permute"))
"""Forced, so that no choice of the cost model can leave the plain collectives in their place."""

CASES: list[tuple[dict[str, int], dict[str, Any]]] = [
    (dict(data=2, tensor=4), dict(zero_stage=3, remat="full")),
    (dict(tensor=2), dict(remat="none", microbatches=2)),
]


@pytest.mark.slow
def test_overlap_over_tensor_is_not_a_model() -> None:
    """Twenty steps give one device's losses, gradients and weights; what is kept by name is kept from the
    permutes too.

    In float32, within what sums in another order give: the bound is that of every other layout.
    """
    kept = ("attention_q", "attention_k", "attention_v", "mlp_gate")
    got = trained(dict(tensor=2), tensor_overlap=True, kernels=PERMUTES, remat="named", remat_save=kept)
    assert_same(got, on_one_device())


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "layout"), CASES, ids=str)
def test_overlap_over_tensor_is_not_a_model_with_other_layouts(
    axes: dict[str, int], layout: dict[str, Any]
) -> None:
    """Beside ZeRO, remat and accumulation."""
    assert_same(trained(axes, tensor_overlap=True, kernels=PERMUTES, **layout), on_one_device())


def test_groups_of_sequences_are_not_a_model() -> None:
    """The same in two groups that a layer computes side by side, with plain collectives, recomputing all but
    names.
    """
    kept = ("attention_q", "attention_k", "attention_v", "mlp_gate")
    got = trained(dict(tensor=2), sequence_groups=2, remat="named", remat_save=kept)
    assert_same(got, on_one_device())


GROUPS: list[tuple[dict[str, int], dict[str, Any]]] = [
    (dict(data=2, tensor=2), dict(zero_stage=3, sequence_groups=4, remat="full")),
    (dict(context=2, tensor=2), dict(sequence_groups=8, microbatches=2)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "layout"), GROUPS, ids=str)
def test_groups_of_sequences_are_not_a_model_with_other_layouts(
    axes: dict[str, int], layout: dict[str, Any]
) -> None:
    """Beside ZeRO, remat, accumulation and attention over `context`."""
    assert_same(trained(axes, **layout), on_one_device())


REFUSED: list[tuple[dict[str, Any], MeshSpec, dict[str, Any], str]] = [
    (dict(sequence_groups=2), MeshSpec(data=2), {}, "there are no collectives over `tensor`"),
    (
        dict(sequence_groups=2, tensor_overlap=True),
        MeshSpec(tensor=2),
        {},
        "the same collectives another way",
    ),
    (
        dict(sequence_groups=2),
        MeshSpec(tensor=2),
        dict(matmul_dtype="fp8_current"),
        "8-bit matmuls have one scale",
    ),
    (
        dict(sequence_groups=2),
        MeshSpec(tensor=2),
        dict(moe=MoESpec(num_experts=4, top_k=2)),
        "a router balances all",
    ),
]


@pytest.mark.parametrize(("layout", "mesh", "other", "message"), REFUSED, ids=lambda value: str(value)[:20])
def test_groups_are_refused_where_they_cannot_be(
    layout: dict[str, Any], mesh: MeshSpec, other: dict[str, Any], message: str
) -> None:
    """And the way out that the message names works."""
    precision = PrecisionSpec(**other) if "matmul_dtype" in other else PrecisionSpec()
    infos = Transformer(**SIZES | ({} if "matmul_dtype" in other else other)).param_infos()
    with pytest.raises(
        ValueError, match=rf"sequence_groups=2 with .*{message}.*Set layout\.sequence_groups=1"
    ):
        make_layout(LayoutSpec(**layout), mesh, infos, precision=precision)
    make_layout(LayoutSpec(**{**layout, "sequence_groups": 1}), mesh, infos, precision=precision)


def test_groups_that_do_not_divide_a_devices_sequences_are_refused() -> None:
    """12 sequences over two microbatches are 6 at a time."""
    with pytest.raises(ValueError, match="sequence_groups=4 does not divide the 6 sequences"):
        check_batch(
            LayoutSpec(sequence_groups=4, microbatches=2), MeshSpec(tensor=2), global_batch=12, seq_len=8
        )
    assert (
        check_batch(LayoutSpec(sequence_groups=3, microbatches=2), MeshSpec(), global_batch=12, seq_len=8)
        == 6
    )
    with pytest.raises(ValueError, match=r"layout\.sequence_groups=0 must be at least 1"):
        LayoutSpec(sequence_groups=0)


def test_overlap_is_refused_where_nothing_could_hide() -> None:
    with pytest.raises(
        ValueError, match=r"tensor_overlap=True with mesh\.tensor=1: there are no collectives"
    ):
        make_layout(LayoutSpec(tensor_overlap=True), MeshSpec(data=2), Transformer(**SIZES).param_infos())
