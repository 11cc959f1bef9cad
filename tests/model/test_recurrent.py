"""Mixers with a state: documents that share a row, prompts in pieces, and layouts, against one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.errors import UserError
from jtrain.hf.peers.draw import batches
from jtrain.hf.prove import against_one_device
from jtrain.layout.dims import Batch
from jtrain.model.block import BlockSpec
from jtrain.model.kv_cache_decode import empty_cache, extend
from jtrain.model.mixer import MixerSpec
from jtrain.model.recurrent.conv_mixer import ShortConvSpec
from jtrain.model.recurrent.delta_net import DeltaNetSpec
from jtrain.model.recurrent.mamba2 import Mamba2Spec
from jtrain.model.transformer import Transformer
from tests.weights import draw_weights

# Outputs near zero are normalised: with a small epsilon float32 has no digits for the gradients.
SIZES: dict[str, Any] = dict(
    norm_eps=0.01, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=32, vocab_size=64
)
MIXERS: dict[str, MixerSpec] = {
    "delta_net": DeltaNetSpec(num_heads=4, num_key_heads=2, key_dim=8, value_dim=4, max_step=2.0),
    "kda": DeltaNetSpec(4, 4, 8, 8, decay="channel", rank=4, gate="sigmoid"),
    "mamba": Mamba2Spec(4, 8, 8, num_groups=2, norm_groups=2, bias=True, scales=(0.9, 1.1, 0.8, 1.2, 0.7)),
    "mamba of one group": Mamba2Spec(4, 8, 8, norm="before_gate", min_step=0.001),
    "conv": ShortConvSpec(taps=4, bias=True),
}
QUICK_MIXERS = ("mamba", "conv")
"""Mixers of a state and of taps: what the others add is compared by the slow tests."""


def model_of(*mixers: MixerSpec) -> Transformer:
    period = mixers[:1] if len(set(mixers)) == 1 else mixers
    pattern = tuple(BlockSpec(mixer, None) for mixer in period)
    return Transformer(num_layers=len(mixers), **SIZES, pattern=pattern)


def batch_of(token_BL: np.ndarray, segment_BL: np.ndarray) -> Batch:
    position_BL = np.zeros_like(token_BL)
    return Batch(*map(jnp.asarray, (token_BL, token_BL, position_BL, segment_BL)))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK_MIXERS)) for name in MIXERS]
)
def test_documents_of_one_row_know_nothing_of_each_other(name: str) -> None:
    """Logits of each document in a packed row are those of a row of its own; as one document they are not."""
    model = model_of(MIXERS[name])
    params, logits = draw_weights(model.param_infos()), jax.jit(model.logits)
    token_L = np.random.RandomState(0).randint(0, 64, 24).astype(np.int32)
    segment_L = np.repeat(np.array([1, 2, 3, 0], np.int32), [9, 1, 12, 2])

    packed_LV = np.asarray(logits(params, batch_of(token_L[None], segment_L[None])))[0]
    # Each document at the start of a row of its own, and padding after it.
    starts, lengths = (0, 9, 10), (9, 1, 12)
    alone = np.zeros((3, 24), np.int32)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        alone[row, :length] = token_L[start : start + length]
    own_BL = (np.arange(24)[None] < np.array(lengths)[:, None]).astype(np.int32)
    alone_BLV = np.asarray(logits(params, batch_of(alone, own_BL)))
    joined_LV = np.asarray(logits(params, batch_of(token_L[None], np.ones((1, 24), np.int32))))[0]

    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        want_LV = alone_BLV[row, :length]
        np.testing.assert_allclose(packed_LV[start : start + length], want_LV, rtol=1e-5, atol=1e-5)
        if start:
            assert np.abs(joined_LV[start] - want_LV[0]).max() > 1e-3, "tokens before must matter"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK_MIXERS)) for name in MIXERS]
)
def test_a_prompt_in_padded_pieces_is_a_prompt_at_once(name: str) -> None:
    """Logits after pieces of 5, 2 and 1 tokens, padded to 6 and 1, are those of all 8 tokens in one row."""
    model = model_of(MIXERS[name])
    params = draw_weights(model.param_infos())
    token_L = np.random.RandomState(1).randint(0, 64, 8).astype(np.int32)
    want_LV = np.asarray(jax.jit(model.logits)(params, batch_of(token_L[None], np.ones((1, 8), np.int32))))[0]

    step = jax.jit(lambda token, count, cache: extend(model, params, token, count, cache))
    cache, start = empty_cache(model, batch=1, max_len=16, dtype="float32"), 0
    for count, length in ((5, 6), (2, 6), (1, 1)):
        piece = np.full((1, length), 63, np.int32)
        piece[0, :count] = token_L[start : start + count]
        start += count
        got_BV, cache = step(jnp.asarray(piece), jnp.int32(count), cache)
        np.testing.assert_allclose(np.asarray(got_BV)[0], want_LV[start - 1], rtol=1e-5, atol=1e-5)


LAYOUTS: Any = {
    "context 2, tensor 2": (dict(context=2, tensor=2), dict(zero_stage=1, remat="full")),
    "tensor 4 of ZeRO 3": (dict(data=2, tensor=4), dict(zero_stage=3)),
    "stage 2": (dict(stage=2), dict(microbatches=2, zero_stage=0)),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MIXERS)
def test_a_mixer_computes_the_same_on_layouts(name: str, layout: str) -> None:
    """Loss and gradients of the first step of two layers; heads that a layout would cut are refused."""
    model = model_of(MIXERS[name], MIXERS[name])
    arrays = {key: np.asarray(array[:, :64]) for key, array in batches(0, 64)["packed"].items()}

    params = jax.tree.map(jnp.asarray, draw_weights(model.param_infos()))
    checks = list(against_one_device(model, params, arrays, {layout: LAYOUTS[layout]}))

    if name == "delta_net" and layout == "tensor 4 of ZeRO 3":
        assert [check.quantity for check in checks] == ["refused"], checks
        assert "mixer.num_key_heads=2" in checks[0].where
        return
    assert [check.quantity for check in checks] == ["loss", "gradients"], checks
    assert all(check.is_equal for check in checks), checks


def test_heads_that_do_not_divide_are_refused() -> None:
    """Key heads, groups of states, and decays of heads with a rank."""
    with pytest.raises(UserError, match="num_heads=3 is not a multiple of num_key_heads=2"):
        DeltaNetSpec(3, 2, 8, 8)
    with pytest.raises(UserError, match="decay=head with rank=2"):
        DeltaNetSpec(4, 2, 8, 8, rank=2)
    with pytest.raises(UserError, match="num_heads=4 is not a multiple of num_groups=3"):
        Mamba2Spec(4, 8, 8, num_groups=3)
