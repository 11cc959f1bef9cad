"""Imported weights compute what transformers computed with them: logits, loss and gradients, all in
float32.
"""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from jtrain.hf.mapping import to_hf
from jtrain.model.forward_placement import single_device
from jtrain.model.rope import RopeSpec
from jtrain.model.router import route
from jtrain.model.transformer import Transformer
from tests.hf.conftest import CASES

LOGITS_ATOL = 1e-4
GRADIENT_RTOL = 1e-3


@functools.partial(jax.jit, static_argnums=0)  # one program per model, which several tests run
def _logits(model: Transformer, params: dict[str, Any], batch: Any) -> jax.Array:
    return model.logits(params, batch)


def logits_of(model: Transformer, params: dict[str, Any], batch: Any) -> np.ndarray:
    return np.asarray(_logits(model, params, batch))


def test_logits_equal_those_of_transformers(reference: Any) -> None:
    """Every logit agrees within 1e-4, also at positions beyond the original length of the rotary scaling."""
    assert reference.logits.std() > 1, "flat logits would agree with anything"
    np.testing.assert_allclose(
        logits_of(reference.model, reference.params, reference.batch),
        reference.logits,
        rtol=0,
        atol=LOGITS_ATOL,
    )


@pytest.mark.parametrize(
    "reference", [pytest.param(name, marks=[pytest.mark.slow] * (name == "qwen3_moe_v5")) for name in CASES],
    indirect=True,
)  # fmt: skip
def test_loss_and_gradients_equal_those_of_transformers(reference: Any) -> None:
    """The mean loss agrees within 1e-5 and each gradient within 1e-3 of its norm, mapped as in an export."""
    batch, model = reference.batch, reference.model
    num_targets = batch.target_BL.shape[0] * (batch.target_BL.shape[1] - 1)

    def loss(params: dict[str, Any]) -> jax.Array:
        return model.loss(params, batch, single_device("float32"))[0] / num_targets

    value, grads = jax.jit(jax.value_and_grad(loss))(reference.params)
    np.testing.assert_allclose(float(value), reference.loss, rtol=1e-5)
    got = dict(to_hf(grads, model, dtype="float32"))
    assert set(got) == set(reference.gradients)
    for name, want in reference.gradients.items():
        norm = np.linalg.norm(want)
        assert norm > 1e-3, f"{name}: a vanishing gradient proves nothing"
        assert np.linalg.norm(got[name] - want) < GRADIENT_RTOL * norm, name


def test_the_reference_sees_the_rope_scaling(llama: Any) -> None:
    """Logits without the scaling differ far more than the tolerance, so the parity test covers it."""
    scaling = llama.model.rope.scaling
    assert scaling is not None
    assert scaling.original_seq_len < llama.tokens.shape[1]
    plain = with_rope(llama.model, RopeSpec(llama.model.rope.theta))
    assert np.abs(logits_of(plain, llama.params, llama.batch) - llama.logits).max() > 0.1
    # All three ranges are in play: kept, blended and divided frequencies.
    ratio = plain.rope.frequencies(plain.head_dim) / llama.model.rope.frequencies(plain.head_dim)
    assert np.any(np.isclose(ratio, 1))
    assert np.any(np.isclose(ratio, scaling.factor))
    assert np.any((ratio > 1.01) & (ratio < scaling.factor - 0.01))


@pytest.mark.parametrize(("path", "axis"), [("q_DNH", 2), ("k_DKH", 2), ("v_DKH", 2), ("o_NHD", 1)])
def test_the_reference_sees_the_order_of_heads(llama: Any, path: str, axis: int) -> None:
    """Swapping two heads in one matrix changes the logits."""
    attention = dict(llama.params["layers"]["attention"])
    attention[path] = np.flip(attention[path], axis)
    params = {**llama.params, "layers": {**llama.params["layers"], "attention": attention}}
    assert np.abs(logits_of(llama.model, params, llama.batch) - llama.logits).max() > 0.1


def test_the_routers_logits_choose_and_balance_as_in_transformers(qwen3_moe: Any) -> None:
    """The load-balancing loss of transformers is `top_k` times jtrain's per token, for every layer and
    row.
    """
    arrays = np.load(qwen3_moe.folder / "reference.npz")
    spec, logits_YBLX = qwen3_moe.model.moe, arrays["router_logits"]
    assert np.ptp(arrays["balance"]) > 0.1
    for logits_BLX, balance_B in zip(logits_YBLX, arrays["balance"], strict=True):
        for logits_LX, want in zip(logits_BLX, balance_B, strict=True):
            valid = np.ones((1, len(logits_LX)), bool)
            losses = route(jax.numpy.asarray(logits_LX[None]), jax.numpy.asarray(valid), spec)[1]
            np.testing.assert_allclose(float(losses.balance) / len(logits_LX) * spec.top_k, want, rtol=1e-5)


def with_rope(model: Transformer, rope: RopeSpec) -> Transformer:
    return Transformer(
        num_layers=model.num_layers,
        d_model=model.d_model,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        d_ff=model.d_ff,
        vocab_size=model.vocab_size,
        rope=rope,
        norm_eps=model.norm_eps,
    )
