"""Latent attention: its two forms compute the same, and every layout computes what one device does."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.errors import UserError
from jtrain.hf.model_config import model_from_config
from jtrain.hf.peers.draw import batches
from jtrain.hf.prove import against_one_device
from jtrain.layout.dims import Batch
from jtrain.layout.layout import OffloadSpec
from jtrain.model.block import BlockSpec
from jtrain.model.kv_cache_decode import empty_cache, extend
from jtrain.model.latent_attention import LatentAttentionSpec
from jtrain.model.mlp import MLPSpec
from jtrain.model.rope import RopeSpec, YarnScaling
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer
from tests.weights import draw_weights

SIZES: dict[str, Any] = dict(d_model=32, num_heads=4, num_kv_heads=4, head_dim=12, d_ff=32, vocab_size=64)
YARN = RopeSpec(scaling=YarnScaling(4.0, 16, 1.0))
LATENT = LatentAttentionSpec(
    kv_rank=16,
    q_rank=24,
    nope_head_dim=8,
    rope_head_dim=4,
    value_head_dim=6,
    rope=YARN,
    mscale=1.0,
    bias=True,
)
PLAIN = LatentAttentionSpec(kv_rank=8, nope_head_dim=8, rope_head_dim=4, value_head_dim=16, rope=None)
MOE = MoESpec(num_experts=4, top_k=2, d_ff=16, score="sigmoid", correction_bias=True, shared_experts=1)


@pytest.mark.parametrize(
    "spec", [pytest.param(LATENT, marks=pytest.mark.slow), PLAIN], ids=["latent queries", "plain queries"]
)
def test_the_absorbed_form_computes_what_the_decompressed_one_does(spec: LatentAttentionSpec) -> None:
    """Logits after every chunk from a cache of latents and one key, within 1e-5 of the largest."""
    model = Transformer(num_layers=3, **SIZES, pattern=(BlockSpec(spec),))
    params, batch = draw_weights(model.param_infos()), 2
    token_BL = jax.random.randint(jax.random.key(1), (batch, 12), 0, 64)
    position_BL = jnp.broadcast_to(jnp.arange(12), token_BL.shape)
    rows = Batch(token_BL, token_BL, position_BL, jnp.ones_like(token_BL))
    logits_BLV = jax.jit(model.logits)(params, rows)

    extend_once = jax.jit(extend, static_argnums=0)
    cache = empty_cache(model, batch=batch, max_len=16, dtype="float32")
    elements = sum(array.size for array in jax.tree.leaves(cache.layers))
    assert elements == 3 * batch * 16 * (spec.kv_rank + spec.rope_head_dim)
    # The second chunk holds two tokens and two of padding.
    for start, count in ((0, 4), (4, 2), (6, 4), (10, 2)):
        chunk_BL = jnp.zeros((batch, 4), jnp.int32).at[:, :count].set(token_BL[:, start : start + count])
        got_BV, cache = extend_once(model, params, chunk_BL, jnp.int32(count), cache)
        want_BV = logits_BLV[:, start + count - 1]
        np.testing.assert_allclose(got_BV, want_BV, rtol=0, atol=1e-5 * float(jnp.abs(logits_BLV).max()))


def compare(pattern: tuple[BlockSpec, ...], first: tuple[BlockSpec, ...], layouts: Any) -> None:
    model = Transformer(num_layers=len(first) + 2 * len(pattern), **SIZES, pattern=pattern, first=first)
    arrays = {name: np.asarray(array[:, :64]) for name, array in batches(0, 64)["packed"].items()}
    checks = list(against_one_device(model, draw_weights(model.param_infos()), arrays, layouts))
    assert [check.quantity for check in checks] == ["loss", "gradients"] * len(layouts), checks
    assert all(check.is_equal for check in checks), checks


@pytest.mark.slow
def test_layouts_of_latent_attention_compute_what_one_device_does() -> None:
    """Heads, latents' positions, ZeRO's parts of latents, and experts, each split over an axis."""
    layouts = {
        "tensor 4": (dict(tensor=4), dict(zero_stage=0)),
        "ZeRO 3": (dict(data=2, expert=2, tensor=2), dict(zero_stage=3, remat="full")),
    }
    compare((BlockSpec(LATENT, MOE),), (BlockSpec(PLAIN, MLPSpec()),), layouts)


@pytest.mark.slow
def test_rings_stages_and_offloads_of_latent_attention_compute_what_one_device_does() -> None:
    """Also where gradients of weights are computed later, from what the products' sites keep."""
    named: Any = dict(remat="named", remat_save=("attention_latent", "attention"))
    layouts = {
        "ulysses": (dict(context=2, tensor=2, data=2), dict(zero_stage=2, context_attention="ulysses")),
        "overlap": (dict(tensor=2, data=4), dict(zero_stage=1, tensor_overlap=True)),
        "ring": (dict(context=2, tensor=2, data=2), dict(zero_stage=3, context_attention="ring")),
        "stage": (dict(stage=2, tensor=2), dict(microbatches=2)),
        "offload": (dict(data=2), dict(zero_stage=3, offload=OffloadSpec(params=1.0, activations=1.0))),
        "stage, ZeRO 3": (dict(stage=2, data=2), dict(microbatches=2, zero_stage=3, **named)),
    }
    compare((BlockSpec(LATENT),), (), layouts)


DEEPSEEK_V3: dict[str, Any] = dict(
    model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"], vocab_size=129_280, hidden_size=7168,
    intermediate_size=18_432, moe_intermediate_size=2048, num_hidden_layers=61, num_attention_heads=128,
    num_key_value_heads=128, n_shared_experts=1, n_routed_experts=256, ep_size=1, routed_scaling_factor=2.5,
    kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64, v_head_dim=128, qk_nope_head_dim=128,
    topk_method="noaux_tc", n_group=8, topk_group=4, num_experts_per_tok=8, moe_layer_freq=1,
    first_k_dense_replace=3, norm_topk_prob=True, scoring_func="sigmoid", aux_loss_alpha=0.001, seq_aux=True,
    num_nextn_predict_layers=1, hidden_act="silu", rms_norm_eps=1e-6, rope_theta=10_000, pretraining_tp=1,
    rope_scaling=dict(type="yarn", beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0,
                      original_max_position_embeddings=4096),
    attention_bias=False, attention_dropout=0.0, max_position_embeddings=163_840, tie_word_embeddings=False,
)  # fmt: skip
"""config.json of deepseek-ai/DeepSeek-V3, without its 8-bit weights."""
KIMI_K2 = DEEPSEEK_V3 | dict(
    model_type="kimi_k2", vocab_size=163_840, num_attention_heads=64, num_key_value_heads=64,
    n_routed_experts=384, routed_scaling_factor=2.827, n_group=1, topk_group=1, first_k_dense_replace=1,
    num_nextn_predict_layers=0, rope_theta=50_000.0,
    rope_scaling=DEEPSEEK_V3["rope_scaling"] | dict(factor=32.0, beta_fast=1.0),
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "parameters", "active"),
    [
        pytest.param(DEEPSEEK_V3, 671_026_419_200, 37.6e9, id="DeepSeek-V3"),  # 671B, 37B active
        pytest.param(KIMI_K2, 1_026_408_232_448, 32.9e9, id="Kimi K2"),  # 1T, 32B active
    ],
)
def test_published_models_have_their_published_parameters(
    config: dict[str, Any], parameters: int, active: float
) -> None:
    """To the last one, without the heads of later tokens; what a token uses includes both embeddings."""
    model = model_from_config(config)
    infos = model.param_infos()
    assert sum(info.size for info in infos) == parameters
    assert sum(info.active_size for info in infos) == pytest.approx(active, rel=2e-3)
    latent = model.blocks[-1].mixer
    assert isinstance(latent, LatentAttentionSpec)
    sharper = 0.1 * math.log(config["rope_scaling"]["factor"]) + 1
    assert latent.scale == pytest.approx(sharper**2 / 192**0.5)


def test_sizes_that_cannot_be_are_refused_by_name() -> None:
    """An odd number of rotated dims, and a latent of no size."""
    with pytest.raises(UserError, match=r"rope_head_dim=5 is odd.*Set mixer\.rope_head_dim=6"):
        LatentAttentionSpec(kv_rank=8, rope_head_dim=5)
    with pytest.raises(UserError, match=r"kv_rank=0 of latent attention must be at least 1"):
        LatentAttentionSpec(kv_rank=0)
