"""Correction biases that follow the load of experts: counts, steps, and equality on layouts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.config.run import EvalSpec, Run, validate
from jtrain.data import PackedText
from jtrain.errors import UserError
from jtrain.hf.peers.draw import batches
from jtrain.layout.layout import LayoutSpec
from jtrain.layout.mesh import MeshSpec
from jtrain.layout.precision import PrecisionSpec
from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.mlp import MLPSpec
from jtrain.model.router import MoESpec, route
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW
from jtrain.step_comparison.comparable_run import ComparableRun
from tests.weights import draw_weights

RATE = 2.0**-10  # exact in float32, and too small for experts to change sides within two steps
MOE = MoESpec(
    num_experts=4,
    top_k=2,
    d_ff=16,
    score="sigmoid",
    correction_bias=True,
    bias_update_rate=RATE,
    balance_loss=0.0,
)
BIAS = "layers.mlp.router_bias_X"
FLOAT32: Any = dict(
    param_dtype="float32", compute_dtype="float32", reduce_dtype="float32", grad_accum_dtype="float32"
)


def test_the_gradient_of_the_bias_is_the_load_without_padding() -> None:
    """Tokens of each expert, as numpy sorts scores plus bias; not their weights, and none of a place without
    work.
    """
    random = np.random.RandomState(0)
    logits_BLX, valid_BL = random.randn(2, 6, 4).astype(np.float32), random.rand(2, 6) < 0.6
    bias_X = np.array([0.3, 0.0, -0.2, 0.1], np.float32)

    def load(bias_X: Any, share: float) -> Any:
        losses = route(jnp.asarray(logits_BLX), jnp.asarray(valid_BL), MOE, bias_X=bias_X)[1]
        return losses.load * share

    choice_BLX = 1 / (1 + np.exp(-logits_BLX)) + bias_X
    chosen = np.argsort(-choice_BLX, axis=-1)[..., :2][valid_BL]
    want = np.bincount(chosen.ravel(), minlength=4)
    assert 0 < valid_BL.sum() < valid_BL.size
    assert len(set(want)) > 1
    np.testing.assert_array_equal(jax.grad(load)(jnp.asarray(bias_X), 0.01), want)
    np.testing.assert_array_equal(jax.grad(load)(jnp.asarray(bias_X), 0.0), 0)


def run_of(axes: dict[str, int], fields: dict[str, Any], **precision: str) -> Run:
    return Run(
        seed=0,
        num_steps=2,
        mesh=MeshSpec(**{"data": 1, **axes}),
        layout=LayoutSpec(**{"zero_stage": 0, **fields}),
        precision=PrecisionSpec(**FLOAT32 | precision),
        model=Transformer(
            num_layers=3, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=32, vocab_size=64, moe=MOE
        ),
        optimizer=AdamW(peak_lr=1e-3, warmup_steps=1),
        data=PackedText(path="stdlib", seq_len=128, global_batch=4),
        eval=EvalSpec(every_steps=None),
    )


LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "data, expert, microbatches": (dict(data=2, expert=2), dict(zero_stage=2)),
    "context, tensor": (dict(context=2, tensor=2), dict(zero_stage=3, remat="full")),
    "stage": (dict(stage=2), dict(microbatches=4)),  # of 3 layers: one place holds an identity layer
}


@pytest.mark.slow
def test_biases_are_the_same_on_every_layout() -> None:
    """After two steps each has moved by whole steps of the rate, and not one differs."""
    packed = {name: np.asarray(array) for name, array in batches(0, 64)["packed"].items()}
    comparable = ComparableRun(run_of({}, {}))
    state = comparable.first_state()
    want = comparable.train([packed, packed], state)
    steps = want.last[BIAS] / RATE
    np.testing.assert_array_equal(steps, np.round(steps))
    assert set(np.abs(steps).ravel()) - {0.0}, "no bias has moved"
    # Loads are no gradients: they are in no norm and no moment.
    assert want.norms[0] < 10
    assert not np.any(want.moments[f"mu {BIAS}"])
    for name, (axes, fields) in LAYOUTS.items():
        got = ComparableRun(run_of(axes, fields)).train([packed, packed], state)
        np.testing.assert_array_equal(got.last[BIAS], want.last[BIAS], err_msg=name)
        np.testing.assert_allclose(got.losses, want.losses, rtol=1e-5, err_msg=name)


def test_a_rate_needs_a_bias_and_float32() -> None:
    """A count that rounds, and a step that is lost, are refused."""
    with pytest.raises(UserError, match=r"correction_bias=False\. Set correction_bias=True"):
        MoESpec(num_experts=4, top_k=2, bias_update_rate=1e-3)
    with pytest.raises(
        UserError, match=r"bias_update_rate=0\.0009765625 with precision\.param_dtype=bfloat16"
    ):
        validate(run_of({}, {}, param_dtype="bfloat16"))


@pytest.mark.slow
def test_experts_with_biases_compute_the_same_on_layouts() -> None:
    """Clamped gates and biases of experts, of which every device along `expert` and `tensor` has a part."""
    from jtrain.hf.prove import against_one_device
    from jtrain.model.mlp import ClampedSwiGLU

    moe = MoESpec(num_experts=4, top_k=2, d_ff=16, activation=ClampedSwiGLU(1.7, 0.5), bias=True)
    gate: Any = dict(gate=True, gate_activation="softplus", gate_per_head=True)
    model = Transformer(
        num_layers=2,
        d_model=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        d_ff=32,
        vocab_size=64,
        pattern=(
            BlockSpec(AttentionSpec(**gate), moe),
            BlockSpec(
                AttentionSpec(output_norm=True), MLPSpec(activation="xielu", gated=False, inner_norm=True)
            ),
        ),
    )
    params = draw_weights(model.param_infos())
    packed = {name: np.asarray(array[:, :64]) for name, array in batches(0, 64)["packed"].items()}
    layouts: Any = {
        "tensor, expert": (dict(expert=2, tensor=2), dict(zero_stage=1)),
        "context, data": (dict(data=2, context=2), dict(zero_stage=3)),
    }
    checks = list(against_one_device(model, params, packed, layouts))
    assert len(checks) == 4
    assert all(check.difference is not None and check.is_equal for check in checks), checks
