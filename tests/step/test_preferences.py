"""Preference losses: formulas, packing and layouts, and what the reference is."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jtrain.layout.dims import Batch
from jtrain.model.adapters.lora import model_infos
from jtrain.model.adapters.merge import merge
from jtrain.model.param import at_path, map_params
from jtrain.step.objective import DPO
from tests.preferences import LAYOUTS, LORA, SIZES, PreferenceStep, first_step, pairs

FORMS = (
    DPO(beta=0.3),
    DPO(beta=0.3, form="sigmoid_norm"),
    DPO(beta=0.3, form="ipo"),
    DPO(beta=2.0, form="simpo", reference="none", margin=0.5),
    DPO(beta=0.1, reference="none"),
)


def assert_same_step(layout: str, objective: DPO) -> None:
    values, gradient = first_step(layout, objective).result
    expected, want = first_step("alone", objective).result
    assert values["tokens"] == expected["tokens"]
    np.testing.assert_allclose(values["loss_nats"], expected["loss_nats"], rtol=1e-6)
    # Margins of both signs cancel in their mean.
    np.testing.assert_allclose(values["reward_margin"], expected["reward_margin"], atol=1e-6)
    assert values["accuracy"] == pytest.approx(expected["accuracy"], rel=1e-6)
    total = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in want.values()))
    rounded = first_step("alone", objective).rounded

    def furthest(other: dict[str, np.ndarray]) -> float:
        return max(
            float(np.linalg.norm((other[path] - value).ravel().astype(np.float64)))
            for path, value in want.items()
        )

    assert gradient.keys() == want.keys()
    # Sums in another order may change as much as one rounding of the parameters, about 1e-6: more than the bar on some
    # processors. Each of the two runs may be off by it.
    assert furthest(gradient) < max(1e-6 * total, 2 * furthest(rounded)), furthest(gradient) / total
    assert furthest(rounded) < 2e-6 * total


@pytest.mark.parametrize(
    ("layout", "objective"),
    [
        pytest.param(layout, objective, marks=[pytest.mark.slow] * ((layout, number) != ("all", 0)))
        for layout in LAYOUTS
        for number, objective in enumerate(FORMS)
    ],
)
def test_packed_pairs_have_the_loss_and_gradients_of_pairs_one_by_one(layout: str, objective: DPO) -> None:
    assert_same_step(layout, objective)


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
def test_loss_and_gradients_are_those_of_plain_jax_one_pair_at_a_time(objective: DPO) -> None:
    run = first_step("alone", objective)
    params, infos = run.params, run.infos
    trained_infos = tuple(info for info in infos if not info.frozen)

    def log_p(weights: Any, prompt: np.ndarray, answer: np.ndarray) -> jax.Array:
        ids = jnp.concatenate([prompt, answer])[None]
        ones = jnp.ones_like(ids)
        batch = Batch(ids, ids, jnp.arange(ids.shape[1], dtype=jnp.int32)[None], ones)
        by_token = jax.nn.log_softmax(run.model.logits(weights, batch)[0])
        first = len(prompt) - 1
        return by_token[jnp.arange(first, first + len(answer)), answer].sum()

    def loss(own: Any) -> tuple[jax.Array, Any]:
        everything = map_params(
            lambda info: jnp.asarray(at_path(params if info.frozen else own, info.path)), infos
        )
        weights, base = everything, None
        if run.has_adapter:
            weights = merge(infos, everything, LORA.scale, lambda _: "float32")
            base = map_params(lambda info: jnp.asarray(at_path(params, info.path)), model_infos(infos))
        losses, margins = [], []
        for prompt, *answers in pairs():
            if not all(map(len, answers)):
                continue
            scores = [
                log_p(weights, prompt, a) - (0.0 if base is None else log_p(base, prompt, a)) for a in answers
            ]
            losses.append(plain_loss(objective, scores, (len(answers[0]), len(answers[1]))))
            per_token = [len(a) if objective.form != "sigmoid" else 1 for a in answers]
            margins.append(objective.beta * (scores[0] / per_token[0] - scores[1] / per_token[1]))
        return jnp.stack(losses).mean(), jnp.stack(margins)

    own = map_params(lambda _, value: jnp.asarray(value), trained_infos, params)
    (value, margins), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(own)
    values, moments = run.result
    np.testing.assert_allclose(values["loss_nats"], value, rtol=1e-6)
    np.testing.assert_allclose(values["reward_margin"], margins.mean(), atol=1e-5)
    assert values["accuracy"] == pytest.approx((margins > 0).mean())
    assert 0 < values["accuracy"] < 1, "pairs of both kinds"
    want: dict[str, Any] = flatten_dict(gradient, sep=".")
    total = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in want.values()))
    assert want.keys() == moments.keys()
    for path, expected in want.items():
        expected = np.asarray(expected, np.float64)
        difference = np.linalg.norm((moments[path] / 0.1 - expected).ravel())
        assert difference < 1e-5 * total, (path, difference / total)
        assert np.linalg.norm(expected) > 1e-4 * total, path


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("packed", "float32"),
        pytest.param("packed", "bfloat16", marks=pytest.mark.slow),
        pytest.param("alone", "float32", marks=pytest.mark.slow),
        pytest.param("all", "float32", marks=pytest.mark.slow),
    ],
)
def test_the_first_loss_is_ln_2(layout: str, dtype: str) -> None:
    """An adapter that adds nothing yet is its own reference, in one row or many, in any number format."""
    values, gradient = first_step(layout, DPO(beta=0.3), started=False, compute_dtype=dtype).result
    assert abs(values["loss_nats"] - math.log(2)) < 1e-6
    assert abs(values["reward_margin"]) < 1e-6
    assert max(np.abs(g).max() for g in gradient.values()) > 1e-4, "it moves away from there"


@pytest.mark.slow
def test_a_base_of_blocks_is_its_own_reference() -> None:
    """Numbers of four bits are made from the same blocks in both passes."""
    sizes = SIZES | dict(d_model=256, head_dim=64, d_ff=128)
    values, _ = PreferenceStep("zero 3", DPO(beta=0.3), started=False, base_dtype="nf4", sizes=sizes).result
    assert abs(values["loss_nats"] - math.log(2)) < 1e-6
