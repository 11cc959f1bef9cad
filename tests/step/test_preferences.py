"""Preference losses: formulas, packing and layouts, and what the reference is."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.bench.layout_trials import float64_model
from jtrain.model.adapters.lora import model_infos
from jtrain.model.block import BlockSpec
from jtrain.model.norm import NormSpec
from jtrain.model.param import at_path
from jtrain.step.objective import DPO
from tests.preferences import COLS, LAYOUTS, LORA, SIZES, PreferenceStep, assert_gradients, first_step, pairs

FORMS = (
    DPO(beta=0.3),
    DPO(beta=0.3, form="sigmoid_norm"),
    DPO(beta=0.3, form="ipo"),
    DPO(beta=2.0, form="simpo", reference="none", margin=0.5),
    DPO(beta=0.1, reference="none"),
)


type Exact = tuple[float, np.ndarray, dict[str, np.ndarray]]
"""Loss, margins of the pairs, and gradients by path, of formulas in float64."""


@functools.cache
def exact(objective: DPO) -> Exact:
    """The first step of `tests.preferences` by the formulas of trl 1.16.0 and the reference of `jtrain bench layouts`:
    one text in each row, without code of ours but for the first parameters.
    """
    run = first_step("alone", objective)
    compared = [pair for pair in pairs() if len(pair[1]) and len(pair[2])]
    texts = [(prompt, answer) for prompt, *answers in compared for answer in answers]
    token = np.zeros((len(texts), COLS), np.int32)
    segment, is_learned = np.zeros_like(token), np.zeros(token.shape, bool)
    for row, (prompt, answer) in enumerate(texts):
        end = len(prompt) + len(answer)
        token[row, :end], segment[row, :end] = np.concatenate([prompt, answer]), 1
        is_learned[row, len(prompt) - 1 : end - 1] = True
    position = np.broadcast_to(np.arange(COLS, dtype=np.int32), token.shape)
    batch = dict(token_BL=token, position_BL=position, segment_BL=segment)
    model = float64_model.Model((), (BlockSpec(),), (), NormSpec(), num_routers=0)
    with jax.enable_x64(True), jax.transfer_guard("allow"):
        values = {info.path: np.asarray(at_path(run.params, info.path), np.float64) for info in run.infos}
        base = {info.path: values[info.path] for info in model_infos(run.infos)}

        def scores(weights: dict[str, Any]) -> jax.Array:
            by_token = jax.nn.log_softmax(float64_model.logits_of(model, weights, batch)[0])
            picked = jnp.take_along_axis(by_token, np.roll(token, -1, axis=1)[..., None], axis=-1)[..., 0]
            return jnp.where(is_learned, picked, 0.0).sum(axis=1).reshape(-1, 2)

        def loss(own: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
            weights = {path: value + added(path, own, value.shape) for path, value in base.items()}
            score = scores(weights) - scores(base) if run.has_adapter else scores(own)
            losses, margins = [], []
            for (_, *answers), pair in zip(compared, score, strict=True):
                losses.append(plain_loss(objective, tuple(pair), (len(answers[0]), len(answers[1]))))
                chosen, rejected = (len(a) if objective.form != "sigmoid" else 1 for a in answers)
                margins.append(objective.beta * (pair[0] / chosen - pair[1] / rejected))
            return jnp.stack(losses).mean(), jnp.stack(margins)

        own = {info.path: values[info.path] for info in run.infos if not info.frozen}
        (value, margins), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(own)
        return float(value), np.asarray(margins), {path: np.asarray(g) for path, g in gradients.items()}


def added(path: str, own: dict[str, Any], shape: tuple[int, ...]) -> Any:
    """What an adapter adds to a matrix of all layers; 0 where it has none."""
    pair = [own[name] for name in sorted(own) if name.rpartition(".")[0] == f"{path}_lora"]
    if not pair:
        return 0.0
    down, up = pair
    layers, rank = down.shape[0], down.shape[-1]
    return LORA.scale * (down.reshape(layers, -1, rank) @ up.reshape(layers, rank, -1)).reshape(shape)


def assert_exact(layout: str, objective: DPO) -> None:
    """Loss, gradients and metrics of a layout within 1e-6 of float64."""
    values, moments = first_step(layout, objective).result
    assert values["tokens"] == first_step("alone", objective).result[0]["tokens"]
    loss, margins, want = exact(objective)
    np.testing.assert_allclose(values["loss_nats"], loss, rtol=1e-6)
    # Margins of both signs cancel in their mean.
    np.testing.assert_allclose(values["reward_margin"], margins.mean(), atol=1e-6)
    assert values["accuracy"] == pytest.approx((margins > 0).mean(), rel=1e-6)
    assert 0 < values["accuracy"] < 1, "pairs of both kinds"
    assert_gradients(moments, want)


@pytest.mark.parametrize(
    ("layout", "objective"),
    [
        pytest.param(layout, objective, marks=[pytest.mark.slow] * ((layout, number) != ("all", 0)))
        for layout in LAYOUTS
        for number, objective in enumerate(FORMS)
    ],
)
def test_packed_pairs_have_the_loss_and_gradients_of_texts_in_float64(layout: str, objective: DPO) -> None:
    assert_exact(layout, objective)


def plain_loss(objective: DPO, scores: Any, lengths: tuple[int, int]) -> jax.Array:
    """Loss of a pair as trl 1.16.0 writes it: DPOTrainer's sigmoid, sigmoid_norm and ipo, CPOTrainer's simpo."""
    chosen, rejected = scores
    beta, delta = objective.beta, chosen - rejected
    average = chosen / max(lengths[0], 1) - rejected / max(lengths[1], 1)
    match objective.form:
        case "sigmoid":
            return -jax.nn.log_sigmoid(beta * delta)
        case "sigmoid_norm":
            return -jax.nn.log_sigmoid(beta * average)
        case "ipo":
            return (average - 1 / (2 * beta)) ** 2
        case "simpo":
            return -jax.nn.log_sigmoid(beta * (average - objective.margin / beta))


@pytest.mark.parametrize(
    "objective",
    [pytest.param(o, marks=[pytest.mark.slow] * (number > 0), id=o.form) for number, o in enumerate(FORMS)],
)
def test_pairs_one_a_row_have_the_loss_and_gradients_of_texts_in_float64(objective: DPO) -> None:
    assert_exact("alone", objective)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("alone", "float32"),
        ("all", "float32"),
        pytest.param("packed", "float32", marks=pytest.mark.slow),
        pytest.param("packed", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_the_first_loss_is_ln_2(layout: str, dtype: str) -> None:
    """An adapter that adds nothing yet is its own reference, in one row or many, in any number format."""
    # The steps of the tests above, whose programs are compiled.
    options = {} if dtype == "float32" else dict(compute_dtype=dtype)
    values, gradient = first_step(layout, FORMS[0], **options).first_result
    assert abs(values["loss_nats"] - math.log(2)) < 1e-6
    assert abs(values["reward_margin"]) < 1e-6
    assert max(np.abs(g).max() for g in gradient.values()) > 1e-4, "it moves away from there"


@pytest.mark.slow
def test_a_base_of_blocks_is_its_own_reference() -> None:
    """Numbers of four bits are made from the same blocks in both passes."""
    sizes = SIZES | dict(d_model=256, head_dim=64, d_ff=128)
    values, _ = PreferenceStep("zero 3", FORMS[0], base_dtype="nf4", sizes=sizes).first_result
    assert abs(values["loss_nats"] - math.log(2)) < 1e-6
