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
from tests.preferences import LAYOUTS, LORA, Pair, PreferenceStep, first_step, pairs

FORMS = (
    DPO(beta=0.3),
    DPO(beta=0.3, form="sigmoid_norm"),
    DPO(beta=0.3, form="ipo"),
    DPO(beta=2.0, form="simpo", reference="none", margin=0.5),
    DPO(beta=0.1, reference="none"),
)


def assert_same_step(layout: str, objective: DPO) -> None:
    (values, gradient), (expected, want) = first_step(layout, objective), first_step("alone", objective)
    assert values["tokens"] == expected["tokens"]
    np.testing.assert_allclose(values["loss_nats"], expected["loss_nats"], rtol=1e-6)
    # Margins of both signs cancel in their mean.
    np.testing.assert_allclose(values["reward_margin"], expected["reward_margin"], atol=1e-6)
    assert values["accuracy"] == expected["accuracy"]
    total = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in want.values()))
    assert gradient.keys() == want.keys()
    for path, value in want.items():
        difference = np.linalg.norm((gradient[path] - value).ravel().astype(np.float64))
        assert difference < 1e-6 * total, (path, difference / total)


@pytest.mark.parametrize("objective", FORMS, ids=lambda o: f"{o.form}-{o.reference}")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_pairs_have_the_loss_and_gradients_of_pairs_one_by_one(layout: str, objective: DPO) -> None:
    assert_same_step(layout, objective)
