"""Random keys of the first values."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.layout.dims import ParamInfo
from jtrain.model.param import DRAWS, init_param


@pytest.mark.parametrize("seed", (0, 7, 2**32 - 1))
def test_values_are_drawn_with_jaxs_keys_of_seed_path_layer_and_draw(seed: int) -> None:
    """Eight 16-bit halves of the words that JAX draws are the sum behind each value."""
    stack = ParamInfo("layers.mlp.up_DF", (3, 4, 5), "YDF", "normal", 1.0)
    alone = ParamInfo("embed_VD", (4, 5), "VD", "normal", 1.0)
    for info, layer in ((alone, None), (stack, 0), (stack, 2)):
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(info.path.encode()))
        if layer is not None:
            key = jax.random.fold_in(key, layer)
        words = np.stack([jax.random.bits(jax.random.fold_in(key, draw), (4, 5)) for draw in range(DRAWS)])
        total = words.view(np.uint16).reshape(DRAWS, 4, 5, 2).astype(np.int64).sum(axis=(0, 3))
        got = init_param(info, seed=seed, dtype="float32", layer=None if layer is None else jnp.asarray(layer))
        deviation = np.sqrt(8 * (2.0**32 - 1) / 3)
        np.testing.assert_array_equal(np.round(np.asarray(got, np.float64) * deviation), 2 * total - 8 * 0xFFFF)
