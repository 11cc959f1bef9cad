"""Families compute what transformers computes: logits, loss and the gradient of every tensor, rows of one
document and rows of several, in float32.

The golden arrays are made by tests/families/peers/make.py, where every document went through transformers
alone.
"""

import functools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jtrain.errors import UserError
from jtrain.hf.mapping import from_hf
from jtrain.hf.model_config import family_in, model_from_config
from jtrain.hf.peers.draw import batches, draw, summary
from jtrain.hf.prove import PEER, SMALL, compute
from jtrain.hf.selection import select
from jtrain.model.families import FAMILIES, LACKING
from jtrain.model.transformer import Transformer

HERE = Path(__file__).parent
CONFIGS: dict[str, dict[str, Any]] = json.loads((HERE / "configs.json").read_text())
NOT_YET = (HERE / "not_yet.txt").read_text().split()
"""Cases that jtrain cannot import; a family that is added leaves this list."""
QUICK = ("llama_llama3", "qwen3", "qwen3_moe")
SIGMAS = 5
"""A projection onto a random direction is off by at most so many times the length of what is off."""


def build(name: str) -> Transformer | None:
    try:
        return model_from_config(CONFIGS[name])
    except UserError:
        return None


@functools.cache
def golden(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(HERE / "golden" / f"{name}.npz"))


def test_the_families_that_are_missing_are_those_on_the_list() -> None:
    """Every config is imported, or refused by a UserError and listed in not_yet.txt; all have arrays."""
    assert sorted(name for name in CONFIGS if build(name) is None) == sorted(NOT_YET)
    assert {path.stem for path in (HERE / "golden").iterdir()} == set(CONFIGS)


def test_every_missing_family_names_what_it_lacks() -> None:
    """No family is on both lists, and each type of not_yet.txt whose family is missing is on one."""
    assert not FAMILIES.keys() & LACKING.keys()
    assert {CONFIGS[name]["model_type"] for name in NOT_YET} - FAMILIES.keys() == LACKING.keys()
    with pytest.raises(
        UserError, match="model_type='gpt2' needs learned positions, which jtrain does not have"
    ):
        select(CONFIGS["gpt2"])


def test_the_docs_list_every_family() -> None:
    """And none that is not there."""
    text = (HERE.parents[1] / "docs" / "models.md").read_text()
    listed = text[text.index("## Families") : text.index("Each is one reading")]
    assert sorted(re.findall(r"`([a-z0-9_]+)`", listed)) == sorted([*FAMILIES, "export", "model_type"])


@functools.cache
def results(name: str) -> dict[str, dict[str, np.ndarray]]:
    """What jtrain computes for both batches of a case, as the golden arrays have it."""
    model = build(name)
    assert model is not None
    recipe = json.loads(golden(name)["recipe"].item())
    tensors = {
        key: functools.partial(draw, key, tuple(shape), center, scale)
        for key, (shape, center, scale) in recipe.items()
    }
    family = family_in(CONFIGS[name])
    params = from_hf(tensors, model, dtype="float32", family=family)

    with_gradient = json.loads(golden(name)["names"].item())
    out: dict[str, dict[str, np.ndarray]] = {}
    for label, computed in compute(model, family, params, batches(0, model.vocab_size)).items():
        # Buffers like a router's correction bias are saved, and have no gradient.
        assert set(computed.gradients) - set(with_gradient) == set(recipe) - set(with_gradient)
        gradients = {key: computed.gradients[key] for key in with_gradient}
        out[label] = summary(computed.logits_BLV, computed.loss, gradients)
    return out


SUPPORTED = [name for name in CONFIGS if name not in NOT_YET]


@pytest.mark.parametrize("label", ["unpacked", "packed"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in SUPPORTED]
)
def test_a_family_computes_what_transformers_computes(name: str, label: str) -> None:
    """Loss, logits and gradients agree within 1e-5, relative to the largest logit and a gradient's norm."""
    got = results(name)[label]
    want = {key: golden(name)[f"{label}/{key}"] for key in got}
    assert want["logits"].std() > 0.01, "flat logits would agree with anything"
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=PEER)
    for key in ("logits", "projected"):
        np.testing.assert_allclose(
            got[key], want[key], rtol=0, atol=PEER * np.abs(want[key]).max(), err_msg=key
        )
    norms = want["gradients"][:, 0]
    # Sums that cancel have no more digits than the largest of their terms.
    bound = PEER * np.maximum(norms, SMALL * np.linalg.norm(norms))
    difference = np.abs(got["gradients"] - want["gradients"]) / bound[:, None]
    names = np.array(json.loads(golden(name)["names"].item()))
    assert np.all(difference[:, 0] <= 1), names[difference[:, 0] > 1]
    assert np.all(difference[:, 1:] <= SIGMAS), names[(difference[:, 1:] > SIGMAS).any(axis=1)]
