"""Random keys of the first values."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.layout.dims import ParamInfo
from jtrain.model.param import DRAWS, init_param, param_infos
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer


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
        got = init_param(
            info, seed=seed, dtype="float32", layer=None if layer is None else jnp.asarray(layer)
        )
        deviation = np.sqrt(8 * (2.0**32 - 1) / 3)
        np.testing.assert_array_equal(
            np.round(np.asarray(got, np.float64) * deviation), 2 * total - 8 * 0xFFFF
        )


@pytest.mark.parametrize("moe", (None, MoESpec(num_experts=4, top_k=2, shared_experts=2)))
def test_first_weights_have_the_spread_that_keeps_activations_at_any_depth(moe: MoESpec | None) -> None:
    """1 / sqrt(inputs), divided by sqrt(2 Y) where a layer adds to the residual stream; norms are ones."""
    layers, width, hidden, heads, head_dim = 3, 48, 80, 6, 8
    model = Transformer(
        num_layers=layers, d_model=width, num_heads=heads, num_kv_heads=2, head_dim=head_dim, d_ff=hidden,
        vocab_size=64, moe=moe, qk_norm=True, tie_embeddings=False,
    )  # fmt: skip
    inputs = {"o_NHD": heads * head_dim, "down_FD": hidden, "down_XFD": hidden}
    if moe is not None:
        inputs["shared.down_FD"] = moe.shared_experts * hidden
    seen = set()
    for info in param_infos(model):
        value = np.asarray(init_param(info, seed=0, dtype="float32"))
        name = info.path.rpartition(".")[2]
        if "norm" in info.path:
            np.testing.assert_array_equal(value, 1)
            continue
        shared = f"shared.{name}" if ".shared." in info.path else name
        want = inputs.get(shared, width) ** -0.5
        if name.startswith(("o_", "down_")):
            want *= (2 * layers) ** -0.5
        assert value.std() == pytest.approx(want, rel=6 / value.size**0.5), info.path
        assert abs(value.mean()) < 6 * want / value.size**0.5, info.path
        seen.add(name)
    assert len(seen) == (9 if moe is None else 13), seen
