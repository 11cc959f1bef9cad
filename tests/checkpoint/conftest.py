"""Fixtures: a small TrainState on any layout."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.layout.mesh import MeshSpec, make_mesh
from jtrain.model.param import map_params
from jtrain.model.transformer import Transformer
from jtrain.optim import AdamW, Muon, build
from jtrain.step.state import TrainState, abstract_state
from tests.layouts import layout_from

SMALL: dict[str, Any] = {
    "num_layers": 2,
    "d_model": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "d_ff": 128,
    "vocab_size": 256,
}


def _like(axes: dict[str, int], *, optimizer: AdamW | Muon | None = None, **fields: Any) -> TrainState:
    """Returns shapes, dtypes and shardings of the small model's state; `fields`: of the model or
    LayoutSpec.
    """
    model = Transformer(
        **(SMALL | {key: fields.pop(key) for key in (*SMALL, "tie_embeddings") if key in fields})
    )
    spec = MeshSpec(**axes)
    layout = layout_from(fields, spec, model.param_infos())
    infos = map_params(lambda info: info, model.param_infos())
    built = build(optimizer or AdamW(peak_lr=1e-3, warmup_steps=2), num_steps=20, params=infos)
    return abstract_state(layout, built, make_mesh(spec, jax.devices()[: spec.size]))


def _fill(like: Any, step: int) -> Any:
    """Returns arrays for `like` whose bits are a function of `step`, including denormals, infinities and
    NaNs.
    """
    rng = np.random.default_rng(step)

    def leaf(x: jax.ShapeDtypeStruct) -> jax.Array:
        if x.dtype == jnp.int32:
            return jax.device_put(np.full(x.shape, step, np.int32), x.sharding)
        bits = rng.integers(0, 2 ** (8 * x.dtype.itemsize), x.shape, f"uint{8 * x.dtype.itemsize}")
        return jax.device_put(bits.view(x.dtype), x.sharding)

    return jax.tree.map(leaf, like)


def _bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.fixture
def make_like() -> Callable[..., TrainState]:
    """Returns a function from mesh axes and fields of model, layout, optimizer to a TrainState of
    ShapeDtypeStruct.
    """
    return _like


@pytest.fixture
def fill() -> Callable[[Any, int], Any]:
    """Returns a function that makes arrays of random bits for shapes and shardings, the same for the same
    step.
    """
    return _fill


@pytest.fixture
def bits_of() -> Callable[[Any], list[bytes]]:
    """Returns a function that gives the bytes of every leaf, for comparisons that treat NaNs as equal."""
    return _bits
