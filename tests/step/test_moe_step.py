"""A mixture of experts is the same model on any layout: losses, gradients, weights; experts split, tokens
exchanged.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jtrain.layout.dims import Batch, ParamInfo
from jtrain.layout.layout import LayoutSpec, OffloadSpec, make_layout
from jtrain.layout.mesh import ZERO_AXES, MeshSpec
from jtrain.model import expert_dispatch
from jtrain.model.kv_cache_decode import empty_cache, extend
from jtrain.model.param import map_params
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer
from tests.step.test_train_step import SIZES, Trained, assert_same, trained

MOE = MoESpec(num_experts=8, top_k=2, shared_experts=1, balance_loss=1e-2, router_z_loss=1e-3)
EXPERTS: dict[str, Any] = SIZES | dict(d_model=16, d_ff=16, num_heads=4, moe=MOE)
MESHES = (dict(context=2, expert=2), pytest.param(dict(data=2, expert=2, tensor=2), marks=pytest.mark.slow))
MORE_MESHES = (
    dict(expert=4),
    dict(data=2, expert=2, tensor=2),
    dict(data=2, expert=4),
    dict(replica=2, expert=2, tensor=2),
    dict(expert=2, tensor=4),
    dict(data=8),
    dict(expert=8),
    dict(context=4, expert=2),
    dict(data=2, context=2, tensor=2),
    dict(expert=2, tensor=2),
    dict(context=2, expert=2, tensor=2),
)


@functools.cache
def on_one_device() -> Trained:
    want = trained({}, sizes=EXPERTS)
    assert want.losses[-1] < want.losses[0] - 0.1, "the loss must move, or equality below proves nothing"
    return want


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts the few tokens of these tests into as many pieces as a layer may have."""
    monkeypatch.setattr(expert_dispatch, "MIN_PIECE_ROWS", 1)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_the_layout_is_not_a_mixture(axes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty steps give one device's losses, gradients and weights, wherever the experts are.

    In two pieces: a program of four, which the slow tests have, compiles twice as long.
    """
    monkeypatch.setattr(expert_dispatch, "MIN_PIECE_ROWS", 1)
    monkeypatch.setattr(expert_dispatch, "MAX_PIECES", 2)
    assert_same(trained(axes, sizes=EXPERTS, zero_stage=3), on_one_device())


@pytest.mark.slow
@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("axes", MORE_MESHES, ids=str)
def test_the_layout_is_not_a_mixture_on_more_meshes(axes: dict[str, int]) -> None:
    """The same with every ZeRO stage, accumulated or not, with and without remat."""
    case = MORE_MESHES.index(axes)
    remat = ("none", "full")[case // 2 % 2]
    got = trained(axes, sizes=EXPERTS, zero_stage=case % 4, microbatches=1 + case % 2, remat=remat)
    assert_same(got, on_one_device())


@pytest.mark.slow
def test_experts_stream_from_host_memory() -> None:
    """Their parameters and activations there, layer by layer: the same run."""
    offload = OffloadSpec(params=1.0, activations=1.0)
    got = trained(dict(expert=2, tensor=2), sizes=EXPERTS, zero_stage=0, remat="full", offload=offload)
    assert_same(got, on_one_device())


def test_axes_that_do_not_split_the_experts_are_refused() -> None:
    """Their number, and a dense model that has none."""
    model = Transformer(**EXPERTS)
    with pytest.raises(
        ValueError, match=r"model\.moe\.num_experts=8 does not split evenly over mesh axes expert=3"
    ):
        make_layout(LayoutSpec(), MeshSpec(expert=3), model.param_infos())
    with pytest.raises(ValueError, match=r"mesh\.expert=2: this model has no experts"):
        make_layout(LayoutSpec(), MeshSpec(expert=2), Transformer(**SIZES).param_infos())


def test_a_router_is_whole_and_its_experts_are_split() -> None:
    """Over `expert` before anything else; `data` and `context` still shard the width, `tensor` the hidden
    width.
    """
    model = Transformer(**EXPERTS)
    axes: Any = dict(data=2, expert=2, tensor=2)
    layout = make_layout(LayoutSpec(zero_stage=3), MeshSpec(**axes), model.param_infos())
    of = {p.info.path: p.param_partition for p in layout.params}
    assert of["layers.mlp.gate_XDF"] == P(None, "expert", ZERO_AXES, "tensor")
    assert of["layers.mlp.down_XFD"] == P(None, "expert", "tensor", ZERO_AXES)
    assert of["layers.mlp.router_DX"] == P(None, ZERO_AXES, None)
    assert of["layers.mlp.shared.gate_DF"] == P(None, ZERO_AXES, "tensor")


def test_cached_logits_of_a_mixture_are_those_of_the_full_forward() -> None:
    """Prompts cut into chunks, their padding routed to nobody's harm."""
    model = Transformer(**EXPERTS)
    rng = np.random.default_rng(0)

    def draw(info: ParamInfo) -> jax.Array:
        scale = 3 * info.std * rng.standard_normal(info.shape) if info.is_matrix else np.ones(info.shape)
        return jnp.asarray(scale, jnp.float32)

    params = map_params(draw, model.param_infos())
    ids = rng.integers(1, 64, 13).astype(np.int32)
    token_BL = jnp.asarray(ids)[None]
    position_BL = jnp.arange(13, dtype=jnp.int32)[None]
    batch = Batch(token_BL, token_BL, position_BL, jnp.ones_like(token_BL))
    want = np.asarray(jax.jit(lambda p: model.logits(p, batch))(params))[0]
    cache, done = empty_cache(model, batch=1, max_len=24, dtype="float32"), 0
    for count in (5, 1, 7):
        chunk = np.full((1, 8), 60, np.int32)
        chunk[0, :count] = ids[done : done + count]
        logits_BV, cache = jax.jit(extend, static_argnums=0)(
            model, params, jnp.asarray(chunk), jnp.int32(count), cache
        )
        done += count
        np.testing.assert_allclose(logits_BV[0], want[done - 1], rtol=1e-4, atol=1e-4)
    assert np.ptp(want) > 1
