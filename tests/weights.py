"""Random weights for tests, drawn in numpy: eager jax would compile a program for every shape."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jtrain.layout.dims import ParamInfo
from jtrain.model.param import map_params


def draw_weights(infos: Iterable[ParamInfo], *, seed: int = 0, noise: float = 0.1) -> Any:
    """Weights in float32 of which none is one or zero: as a run draws them, and `noise` times normal numbers."""
    rng = np.random.default_rng(seed)

    def draw(info: ParamInfo) -> Any:
        assert info.layer_order is None, "identity layers are zero"
        std = info.std if info.init == "normal" else 0.0
        mean = {"normal": info.mean, "ones": 1.0, "constant": info.init_value}.get(info.init, 0.0)
        value = mean + std * rng.standard_normal(info.shape) + noise * rng.standard_normal(info.shape)
        return jnp.asarray(value.astype(np.float32))

    return map_params(draw, tuple(infos))
