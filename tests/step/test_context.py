"""The config and the plan know attention over `context`: what cannot be is refused, what is sent is
predicted.
"""

from typing import Any

import pytest

from jtrain.config.load import load_config
from jtrain.layout.mesh import MeshSpec
from jtrain.model.transformer import Transformer
from tests.layouts import layout_from
from tests.step.test_collectives import SIZES, compiled, layout_of, predicted

RING, ULYSSES = dict(context_attention="ring"), dict(context_attention="ulysses")


@pytest.mark.parametrize(
    ("axes", "layout"),
    [
        pytest.param(dict(data=2, context=4), layout_of(3, 2) | RING, marks=pytest.mark.slow),
        pytest.param(dict(context=4), layout_of(0, 1, remat="full") | RING, marks=pytest.mark.slow),
        pytest.param(
            dict(context=2, tensor=2),
            layout_of(0, 2, remat="named", remat_save=("attention",)) | RING,
            marks=pytest.mark.slow,
        ),
        (dict(data=2, context=2), layout_of(3, 1) | ULYSSES),
        pytest.param(dict(context=4), layout_of(1, 2) | RING, marks=pytest.mark.slow),
        pytest.param(dict(data=2, context=4), layout_of(2, 2) | RING, marks=pytest.mark.slow),
        pytest.param(dict(context=4), layout_of(0, 1) | ULYSSES, marks=pytest.mark.slow),
        pytest.param(
            dict(context=2, tensor=2), layout_of(0, 2, remat="full") | ULYSSES, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_compiled_collectives_are_the_closed_form(axes: dict[str, int], layout: dict[str, Any]) -> None:
    """A ring's hops in both passes, and again where attention is recomputed; of Ulysses the exchanges of
    heads.
    """
    got = compiled(axes, SIZES, **layout)
    assert got == predicted(axes, SIZES, **layout)
    kind = "collective-permute" if layout["context_attention"] == "ring" else "all-to-all"
    assert any(key[0] == kind and key[1] == ("context",) for key in got)


@pytest.mark.parametrize(
    ("axes", "layout", "order", "message"),
    [
        (
            dict(context=2),
            RING,
            "contiguous",
            r"ring with data\.context_order=contiguous: .*Set data\.context_order=zig",
        ),
        (dict(context=8), ULYSSES, "zigzag", r"mesh\.context=8 devices .*num_heads=4 is 4, and .*change it"),
        (dict(context=4, tensor=2), ULYSSES, "zigzag", r"model\.num_heads=4 / mesh\.tensor=2 is 2"),
    ],
    ids=str,
)
def test_attention_that_cannot_be_split_is_refused(
    axes: dict[str, int], layout: dict[str, Any], order: Any, message: str
) -> None:
    """When the layout is made, with the fields, the numbers and the way out."""
    with pytest.raises(ValueError, match=message):
        layout_from(layout, MeshSpec(**axes), Transformer(**SIZES).param_infos(), context_order=order)


def test_an_unknown_way_is_refused() -> None:
    """With the two that there are."""
    with pytest.raises(
        ValueError, match=r"layout\.context_attention='star' must be one of 'ring', 'ulysses'"
    ):
        load_config("tiny", sets=("layout.context_attention=star",))
