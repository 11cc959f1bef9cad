"""Which matrices an adapter takes, what it adds, and the hash of what it freezes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.errors import UserError
from jtrain.model.adapters.base_hash import hash_base, hex_of
from jtrain.model.adapters.lora import LoRA
from jtrain.model.adapters.merge import merge
from jtrain.model.param import at_path
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer
from tests.losses import SIZES
from tests.weights import draw_weights

MODEL = Transformer(**SIZES)
MIXTURE = Transformer(**SIZES, moe=MoESpec(num_experts=4, top_k=2, shared_experts=1))


def targets(model: Transformer, *patterns: str) -> set[str]:
    infos = LoRA(targets=patterns).infos(model.param_infos())
    return {info.path.rpartition("_lora")[0].removeprefix("layers.") for info in infos if info.is_adapter}


def test_patterns_name_matrices_by_the_end_of_their_path() -> None:
    assert targets(MODEL, "q", "v_DKH") == {"attention.q_DNH", "attention.v_DKH"}
    assert targets(MODEL, "mlp.*") == {"mlp.gate_DF", "mlp.up_DF", "mlp.down_FD"}
    assert len(targets(MODEL, "*")) == 7
    # Experts, and the shared one; the router chooses experts and has no adapter.
    assert targets(MIXTURE, "mlp.*") == {
        *(f"mlp.{name}" for name in ("gate_XDF", "up_XDF", "down_XFD")),
        *(f"mlp.shared.{name}" for name in ("gate_DF", "up_DF", "down_FD")),
    }


def test_shapes_are_those_of_inputs_rank_and_outputs() -> None:
    infos = {i.path: i for i in LoRA(rank=3, targets=("q", "o")).infos(MODEL.param_infos())}
    assert infos["layers.attention.q_DNH_lora.A_DR"].shape == (2, 32, 3)
    assert infos["layers.attention.q_DNH_lora.B_RNH"].shape == (2, 3, 4, 8)
    assert infos["layers.attention.o_NHD_lora.A_NHR"].shape == (2, 4, 8, 3)
    assert infos["layers.attention.o_NHD_lora.B_RD"].shape == (2, 3, 32)
    assert infos["layers.attention.q_DNH"].frozen
    assert not infos["layers.attention.q_DNH_lora.A_DR"].frozen


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(targets=("q_proj",)), r"adapter\.targets: 'q_proj' matches no matrix.*There are .*gate.*q"),
        (dict(targets=("gatt",)), r"Did you mean gate\?"),
        (dict(train=("emb",)), r"adapter\.train: 'emb' matches no parameter\. Did you mean embed, unembed\?"),
        (dict(targets=("q",), train=("q",)), r"both name layers\.attention\.q_DNH"),
        (dict(rank=0), r"adapter\.rank=0"),
        (dict(alpha=0.0), r"adapter\.alpha=0\.0"),
        (dict(dropout=1.0), r"adapter\.dropout=1\.0 must be 0 or more, and less than 1\."),
        (dict(targets=()), r"adapter\.targets is empty"),
    ],
    ids=str,
)
def test_mistakes_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        LoRA(**fields).infos(MODEL.param_infos())


def test_the_scale_is_alpha_by_the_rank_or_its_root() -> None:
    assert LoRA(rank=16, alpha=32.0).scale == 2.0
    assert LoRA(rank=16, alpha=32.0, rslora=True).scale == 8.0


def test_a_merge_is_the_base_and_the_product() -> None:
    lora = LoRA(rank=3, alpha=6.0, targets=("o", "down"))
    infos = lora.infos(MIXTURE.param_infos())
    params = draw_weights((dataclasses.replace(info, std=0.5) for info in infos), noise=0.0)
    plain = merge(infos, params, lora.scale, lambda _: "float32")
    pair = at_path(params, "layers.mlp.down_XFD_lora")
    product = np.einsum("yxfr,yxrd->yxfd", *(np.float64(pair[key]) for key in ("A_XFR", "B_XRD")))
    want = np.float64(at_path(params, "layers.mlp.down_XFD")) + 2.0 * product
    np.testing.assert_allclose(at_path(plain, "layers.mlp.down_XFD"), want, atol=1e-6)
    pair = at_path(params, "layers.attention.o_NHD_lora")
    product = np.einsum("ynhr,yrd->ynhd", *(np.float64(pair[key]) for key in ("A_NHR", "B_RD")))
    want = np.float64(at_path(params, "layers.attention.o_NHD")) + 2.0 * product
    np.testing.assert_allclose(at_path(plain, "layers.attention.o_NHD"), want, atol=1e-6)
    assert {info.path for info in MIXTURE.param_infos()} == {
        jax.tree_util.keystr(keys, simple=True, separator=".") for keys, _ in jax.tree.leaves_with_path(plain)
    }


def test_the_hash_is_of_the_frozen_values_in_the_models_order() -> None:
    """The same for layers at other places of a pipeline, and another for a bit, a swap or another dtype."""
    infos = LoRA(rank=2, targets=("q",)).infos(MODEL.param_infos())
    params = draw_weights(infos, noise=0.0)
    first = hex_of(hash_base(infos, params))
    path = "layers.attention.k_DKH"
    key = np.asarray(at_path(params, path))

    def hash_with(value: Any, used: Any = infos) -> str:
        attention = params["layers"]["attention"] | {"k_DKH": jnp.asarray(value)}
        return hex_of(hash_base(used, params | {"layers": params["layers"] | {"attention": attention}}))

    assert hash_with(key) == first
    flipped = key.copy()
    flipped.view(np.uint32)[1, 3, 1, 5] ^= 1
    assert hash_with(flipped) != first
    assert hash_with(key[::-1].copy()) != first
    assert hash_with(key.astype("bfloat16")) != first
    # Places hold layers 1, none and 0.
    placed = tuple(i.placed((1, -1, 0)) if i.path == path else i for i in infos)
    assert hash_with(np.stack([key[1], np.zeros_like(key[0]), key[0]]), placed) == first
    # What is trained does not count.
    attention = params["layers"]["attention"]
    pair = {name: x + 1.0 for name, x in attention["q_DNH_lora"].items()}
    moved = params | {"layers": params["layers"] | {"attention": attention | {"q_DNH_lora": pair}}}
    assert hex_of(hash_base(infos, moved)) == first
