"""Patterns of unlike blocks on layouts against one device: every primitive of a block is split over some axis."""

from typing import Any

import numpy as np
import pytest

from jtrain.hf.peers.draw import batches
from jtrain.hf.prove import against_one_device
from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.mlp import MLPSpec
from jtrain.model.norm import NormSpec
from jtrain.model.rope import QueryTemperature, RopeSpec, YarnScaling
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer
from tests.weights import draw_weights

SIZES: dict[str, Any] = dict(d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=32, vocab_size=64)
MOE = MoESpec(
    num_experts=4,
    top_k=2,
    d_ff=16,
    shared_experts=1,
    shared_gate=True,
    score="sigmoid",
    correction_bias=True,
    num_groups=2,
    top_groups=1,
    weight_scale=2.5,
)
YARN = RopeSpec(scaling=YarnScaling(4.0, 16, 1.1), rotated_share=0.5)
GROWING = QueryTemperature(0.5, 16, offset=1)
PATTERN = (
    BlockSpec(
        AttentionSpec(bias="all", qk_norm="all", rope=YARN, scale=0.2, chunk_size=24, temperature=GROWING),
        MOE,
        norms="sandwich",
    ),
    BlockSpec(
        AttentionSpec(rope=None, gate=True, qk_norm="unscaled", soft_cap=1.5, sink=True, value_head_dim=4),
        MLPSpec(activation="gelu_tanh", gated=False, bias=True),
        norms="parallel",
        residual_scale=0.5,
    ),
)
FIRST = (BlockSpec(AttentionSpec(window=8), MLPSpec(d_ff=48), norms="after"),)


@pytest.mark.slow
def test_unlike_blocks_compute_the_same_on_two_layouts() -> None:
    """Loss and gradients of the first step, with layers before, in and after the pattern."""
    model = Transformer(
        num_layers=4,
        **SIZES,
        pattern=PATTERN,
        first=FIRST,
        norm=NormSpec(scale="one_plus"),
        embedding_scale=3.0,
        logit_scale=0.5,
        logit_soft_cap=2.0,
    )
    assert (model.num_periods, len(model.last)) == (1, 1)
    arrays = {name: np.asarray(array[:, :64]) for name, array in batches(0, 64)["packed"].items()}
    layouts: Any = {
        "tensor": (dict(tensor=4), dict(zero_stage=0)),
        "many": (dict(data=2, expert=2, tensor=2), dict(zero_stage=3, remat="full")),
    }
    checks = list(against_one_device(model, draw_weights(model.param_infos()), arrays, layouts))
    assert [check.compared for check in checks] == ["tensor", "tensor", "many", "many"]
    assert all(check.is_equal for check in checks), checks


@pytest.mark.slow
def test_rows_over_devices_have_the_chunks_sinks_and_positions_of_whole_rows() -> None:
    """Loss and gradients with rows split over a ring, and with heads exchanged, against one device."""
    attention = AttentionSpec(chunk_size=24, temperature=GROWING, soft_cap=1.5, sink=True, value_head_dim=4)
    model = Transformer(num_layers=1, **SIZES, pattern=(BlockSpec(attention),), logit_soft_cap=2.0)
    arrays = {name: np.asarray(array[:, :64]) for name, array in batches(0, 64)["packed"].items()}
    layouts: Any = {
        by: (dict(context=2), dict(zero_stage=0, context_attention=by)) for by in ("ring", "ulysses")
    }
    checks = list(against_one_device(model, draw_weights(model.param_infos()), arrays, layouts))
    assert [check.compared for check in checks] == ["ring", "ring", "ulysses", "ulysses"]
    assert all(check.is_equal for check in checks), checks
