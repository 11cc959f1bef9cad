"""Reference directories, written by make.py and make_moe.py of tests/golden/hf with transformers 5 and 4."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.hf.mapping import from_hf
from jtrain.hf.model_config import model_from_config
from jtrain.hf.model_files import open_tensors, read_config
from jtrain.layout.dims import IGNORE, Batch
from jtrain.model.transformer import Transformer

GOLDEN = Path(__file__).parents[1] / "golden" / "hf"
CASES = ("llama", "llama_tied", "qwen3", "qwen3_moe", "qwen3_moe_v5")


@dataclasses.dataclass(frozen=True)
class Reference:
    """Imported reference directory, and the results that transformers computed with it."""

    folder: Path
    config: dict[str, Any]
    model: Transformer
    params: dict[str, Any]
    tokens: np.ndarray
    logits: np.ndarray
    loss: float
    gradients: dict[str, np.ndarray]

    @property
    def batch(self) -> Batch:
        """Batch in which each row is one document."""
        rows, cols = self.tokens.shape
        target = np.concatenate([self.tokens[:, 1:], np.full((rows, 1), IGNORE, np.int32)], axis=1)
        position = np.tile(np.arange(cols, dtype=np.int32), (rows, 1))
        return jax.tree.map(jnp.asarray, Batch(self.tokens, target, position, np.ones_like(self.tokens)))


@pytest.fixture(params=CASES)
def reference(request: pytest.FixtureRequest) -> Reference:
    return load_reference(request.param)


@pytest.fixture
def llama() -> Reference:
    return load_reference("llama")


@pytest.fixture
def llama_tied() -> Reference:
    return load_reference("llama_tied")


@pytest.fixture(params=["qwen3_moe", "qwen3_moe_v5"])
def qwen3_moe(request: pytest.FixtureRequest) -> Reference:
    return load_reference(request.param)


_models: dict[str, Transformer] = {}


def _one_model(model: Transformer) -> Transformer:
    """One object for all equal models: programs are compiled per object."""
    values = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    return _models.setdefault(repr(values), model)


@functools.cache  # the same model each time, so that tests share its programs
def load_reference(name: str) -> Reference:
    folder = GOLDEN / name
    config = read_config(folder)
    model = _one_model(model_from_config(config))
    with open_tensors(folder) as tensors:
        params = from_hf(tensors, model)
    arrays = dict(np.load(folder / "reference.npz"))
    gradients = {key.removeprefix("grad/"): value for key, value in arrays.items() if key.startswith("grad/")}
    return Reference(
        folder, config, model, params, arrays["tokens"], arrays["logits"], float(arrays["loss"]), gradients
    )
