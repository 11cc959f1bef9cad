"""Layers before the pattern, and an unfinished repetition, on stages: equal to one device under every schedule."""

from typing import Any

import pytest

from jtrain.bench.layout_trials.settings import DESCRIBED, DESCRIPTION, defaults, refusal
from jtrain.bench.layout_trials.trial import Lab
from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.mlp import MLPSpec
from jtrain.model.router import MoESpec

EXPERTS = MoESpec(num_experts=4, top_k=2, d_ff=16, balance_loss=1e-2, router_z_loss=1e-3)
DESCRIBED_LAYERS = (
    ("first", (BlockSpec(AttentionSpec(window=9), MLPSpec(d_ff=48)), BlockSpec(None, EXPERTS))),
    (
        "pattern",
        (
            BlockSpec(AttentionSpec(bias="qkv"), EXPERTS, norms="sandwich"),
            BlockSpec(AttentionSpec(rope=None)),
        ),
    ),
    ("num_layers", 2 + 2 * 4 + 1),
    ("tie_embeddings", True),
)
"""Two layers, four repetitions of two, and half of a fifth."""
LAYOUTS: dict[str, Any] = {
    "1f1b": {},
    "zb-h1": {"mesh.tensor": 2, "layout.zero_stage": 3, "mesh.data": 2, "layout.remat": "full"},
    "interleaved": {"pipeline.chunks": 2, "mesh.expert": 2, "layout.zero_stage": 2},
    "dualpipev": {"mesh.context": 2, "layout.context_attention": "ulysses"},
}


@pytest.fixture(scope="module")
def lab() -> Lab:
    """The run on one device, and the float64 reference."""
    return Lab()


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", ["1f1b", *(pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name != "1f1b")]
)
def test_layers_beside_the_repetitions_are_those_of_one_device(lab: Lab, schedule: str) -> None:
    """Losses, gradients, evaluation and parameters of three steps."""
    setting = defaults() | {"model": DESCRIBED, DESCRIPTION: DESCRIBED_LAYERS}
    setting |= {
        "mesh.stage": 2,
        "layout.microbatches": 4,
        "pipeline.schedule": schedule,
        "step.evaluates": True,
    }
    setting |= LAYOUTS[schedule]
    assert refusal(setting) is None
    result = lab.trial(setting, 0)
    assert result.unequal == []
    assert 0 < result.shares["gradient (mu)"] < 1
    assert "evaluation" in result.shares


def test_more_stages_than_repetitions_are_refused_by_their_number() -> None:
    setting = defaults() | {"model": DESCRIBED, DESCRIPTION: DESCRIBED_LAYERS}
    error = refusal(setting | {"mesh.stage": 4, "layout.microbatches": 8, "pipeline.schedule": "zbv"})
    assert "needs at least 8 repetitions of model.pattern, but its 2 blocks fit 4 times" in str(error)
