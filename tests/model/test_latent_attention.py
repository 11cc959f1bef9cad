"""Latent attention: its two forms compute the same, and every layout computes what one device does."""

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
from jtrain.model.latent_attention import LatentAttentionSpec
from jtrain.model.mlp import MLPSpec
from jtrain.model.param import init_params
from jtrain.model.rope import RopeSpec, YarnScaling
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer

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


def drawn(model: Transformer) -> Any:
    """Weights of which none is one or zero."""
    params = init_params(model.param_infos(), seed=1, dtype="float32")
    key = iter(jax.random.split(jax.random.key(0), 200))
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(key), x.shape), params)


@pytest.mark.parametrize("spec", [LATENT, PLAIN], ids=["latent queries", "plain queries"])
def test_the_absorbed_form_computes_what_the_decompressed_one_does(spec: LatentAttentionSpec) -> None:
    """Logits after every chunk from a cache of latents and one key, within 1e-5 of the largest."""
    model = Transformer(num_layers=3, **SIZES, pattern=(BlockSpec(spec),))
    params, batch = drawn(model), 2
    token_BL = jax.random.randint(jax.random.key(1), (batch, 12), 0, 64)
    position_BL = jnp.broadcast_to(jnp.arange(12), token_BL.shape)
    logits_BLV = model.logits(params, Batch(token_BL, token_BL, position_BL, jnp.ones_like(token_BL)))

    cache = empty_cache(model, batch=batch, max_len=16, dtype="float32")
    elements = sum(array.size for array in jax.tree.leaves(cache.layers))
    assert elements == 3 * batch * 16 * (spec.kv_rank + spec.rope_head_dim)
    # The second chunk holds two tokens and two of padding.
    for start, count in ((0, 4), (4, 2), (6, 4), (10, 2)):
        chunk_BL = jnp.zeros((batch, 4), jnp.int32).at[:, :count].set(token_BL[:, start : start + count])
        got_BV, cache = extend(model, params, chunk_BL, jnp.int32(count), cache)
        want_BV = logits_BLV[:, start + count - 1]
        np.testing.assert_allclose(got_BV, want_BV, rtol=0, atol=1e-5 * float(jnp.abs(logits_BLV).max()))


def compare(pattern: tuple[BlockSpec, ...], first: tuple[BlockSpec, ...], layouts: Any) -> None:
    model = Transformer(num_layers=len(first) + 2 * len(pattern), **SIZES, pattern=pattern, first=first)
    arrays = {name: np.asarray(array[:, :64]) for name, array in batches(0, 64)["packed"].items()}
    checks = list(against_one_device(model, jax.tree.map(jnp.asarray, drawn(model)), arrays, layouts))
    assert [check.quantity for check in checks] == ["loss", "gradients"] * len(layouts), checks
    assert all(check.is_equal for check in checks), checks


def test_layouts_of_latent_attention_compute_what_one_device_does() -> None:
    """Heads, latents' positions, ZeRO's parts of latents, and experts, each split over an axis."""
    layouts = {
        "tensor 4": (dict(tensor=4), dict(zero_stage=0)),
        "ZeRO 3": (dict(data=2, expert=2, tensor=2), dict(zero_stage=3, remat="full")),
        "ulysses": (dict(context=2, tensor=2, data=2), dict(zero_stage=2, context_attention="ulysses")),
        "overlap": (dict(tensor=2, data=4), dict(zero_stage=1, tensor_overlap=True)),
    }
    compare((BlockSpec(LATENT, MOE),), (BlockSpec(PLAIN, MLPSpec()),), layouts)


@pytest.mark.slow
def test_rings_and_stages_of_latent_attention_compute_what_one_device_does() -> None:
    """Also where gradients of weights are computed later, from what the products' sites keep."""
    named: Any = dict(remat="named", remat_save=("attention_latent", "attention"))
    layouts = {
        "ring": (dict(context=2, tensor=2, data=2), dict(zero_stage=3, context_attention="ring")),
        "stage": (dict(stage=2, tensor=2), dict(microbatches=2)),
        "stage, ZeRO 3": (dict(stage=2, data=2), dict(microbatches=2, zero_stage=3, **named)),
    }
    compare((BlockSpec(LATENT),), (), layouts)


def test_sizes_that_cannot_be_are_refused_by_name() -> None:
    """An odd number of rotated dims, and a latent of no size."""
    with pytest.raises(UserError, match=r"rope_head_dim=5 is odd.*Set mixer\.rope_head_dim=6"):
        LatentAttentionSpec(kv_rank=8, rope_head_dim=5)
    with pytest.raises(UserError, match=r"kv_rank=0 of latent attention must be at least 1"):
        LatentAttentionSpec(kv_rank=0)
