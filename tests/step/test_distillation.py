"""Distillation in a train step: formula, packing and layouts."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.bench.layout_trials import float64_model
from jtrain.data.constructor.context_order import context_order
from jtrain.errors import UserError
from jtrain.model.block import BlockSpec
from jtrain.model.norm import NormSpec
from jtrain.model.param import at_path
from jtrain.step.objective import Distillation
from jtrain.step.train_step import make_eval_step
from tests.preferences import (
    COLS,
    LAYOUTS,
    VOCAB,
    PreferenceStep,
    assert_gradients,
    first_step,
    pack,
    with_teacher,
)

WHOLE = Distillation(top_k=4)
MIXED = Distillation(top_k=7, share=0.3, mean="per_sample")


@functools.cache
def exact(objective: Distillation) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients of one text in each row by the formula in float64, without code of ours but for the first
    parameters and the made-up teacher.
    """
    run = first_step("alone", objective)
    batch = with_teacher(pack(12, packed=False), objective)
    arrays = dict(token_BL=batch.token_BL, position_BL=batch.position_BL, segment_BL=batch.segment_BL)
    model = float64_model.Model((), (BlockSpec(),), (), NormSpec(), num_routers=0)
    is_target_BL = batch.target_BL >= 0
    with jax.enable_x64(True), jax.transfer_guard("allow"):
        values = {info.path: np.asarray(at_path(run.params, info.path), np.float64) for info in run.infos}
        p_BLI = np.exp(batch.soft.logprob.astype(np.float64))
        row, column = np.indices(batch.token_BL.shape)

        def loss(weights: dict[str, Any]) -> jax.Array:
            q_BLV = jax.nn.softmax(float64_model.logits_of(model, weights, arrays)[0])
            kept_BLJ = q_BLV[row[..., None], column[..., None], batch.soft.id]
            rest_BL = q_BLV.at[row[..., None], column[..., None], batch.soft.id].set(0.0).sum(axis=-1)
            divergence_BL = (p_BLI[..., :-1] * (np.log(p_BLI[..., :-1]) - jnp.log(kept_BLJ))).sum(axis=-1)
            if objective.top_k < VOCAB:
                divergence_BL += p_BLI[..., -1] * (np.log(p_BLI[..., -1]) - jnp.log(rest_BL))
            nats_BL = -jnp.log(q_BLV[row, column, batch.target_BL])
            mixed_BL = objective.share * divergence_BL + (1 - objective.share) * nats_BL
            mixed_BL = jnp.where(is_target_BL, mixed_BL, 0.0)
            if objective.mean == "tokens":
                return mixed_BL.sum() / is_target_BL.sum()
            # Two texts in each row.
            means = [
                mixed_BL[r, s].sum() / count
                for r, segment in enumerate(batch.segment_BL)
                for s in (segment == 1, segment == 2)
                if (count := is_target_BL[r, s].sum())
            ]
            return jnp.stack(means).mean()

        value, gradients = jax.jit(jax.value_and_grad(loss))(values)
        return float(value), {path: np.asarray(g) for path, g in gradients.items()}


@pytest.mark.parametrize(
    ("layout", "objective"),
    [
        pytest.param(
            layout,
            objective,
            marks=[pytest.mark.slow] * ((layout, objective) not in [("all", MIXED), ("stages, all", WHOLE)]),
            id=f"{layout}-{number}",
        )
        for layout in (*LAYOUTS, "alone")
        for number, objective in enumerate((WHOLE, MIXED))
    ],
)
def test_packed_texts_have_the_divergence_and_gradients_of_each_in_float64(
    layout: str, objective: Distillation
) -> None:
    values, moments = first_step(layout, objective).result
    loss, want = exact(objective)
    assert loss > 0.1
    np.testing.assert_allclose(values["loss_nats"], loss, rtol=1e-6)
    assert_gradients(moments, want)


def test_a_share_of_nothing_is_refused() -> None:
    for share in (0.0, -1.0, 1.5, math.nan):
        with pytest.raises(UserError, match=rf"objective\.share={share} must be above 0 and at most 1"):
            Distillation(share=share)
    with pytest.raises(UserError, match=r"objective\.top_k=0 must be at least 1"):
        Distillation(top_k=0)
    assert Distillation(top_k=1, share=1.0).mean == "tokens"


@pytest.mark.parametrize("layout", ["stages, all", pytest.param("all", marks=pytest.mark.slow)])
def test_a_teacher_says_the_same_on_any_layout(layout: str) -> None:
    answers = []
    for name in ("packed", layout):
        run = PreferenceStep(name, WHOLE)
        params = jax.device_put(run.first_state.params, run.shardings.params)
        said = make_eval_step(run.model, run.layout, run.mesh, top_k=4)(params, run.batch)
        column_L = np.argsort(context_order(COLS, run.spec.context, run.layout.context_order))
        answers.append([np.asarray(array)[:, column_L] for array in (said.id, said.logprob)])
    is_token_BL = pack(8, packed=True).segment_BL > 0
    (want_id, want_logprob), (got_id, got_logprob) = answers
    np.testing.assert_array_equal(got_id[is_token_BL], want_id[is_token_BL])
    np.testing.assert_allclose(got_logprob[is_token_BL], want_logprob[is_token_BL], atol=1e-5)
    np.testing.assert_allclose(np.exp(want_logprob[is_token_BL]).sum(axis=-1), 1.0, atol=1e-5)
