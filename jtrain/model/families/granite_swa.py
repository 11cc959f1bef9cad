"""Granite with attention sinks and windows, dense and as a mixture; granite.py has Granite 3."""

from typing import Any

from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.families.config_fields import Fields
from jtrain.model.families.decoder import (
    FULL,
    NAMES,
    SINKS,
    WINDOWED,
    attention_of,
    attentions_of,
    decoder,
    decoder_fields,
    layer_types_of,
    moe_of,
)
from jtrain.model.families.family import Family, Tensor
from jtrain.model.mlp import MLPSpec
from jtrain.model.rope import RopeSpec
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer


def _granite(fields: Fields, feed_forward: MLPSpec | MoESpec, *, tied: bool) -> Transformer:
    fields.only(hidden_act="silu", quantization_config=None)
    num_layers, window = fields.whole("num_hidden_layers"), fields.get("sliding_window", 128)
    kinds = fields.layer_types(num_layers, [WINDOWED if y % 4 else FULL for y in range(num_layers)])
    rope, bias = fields.rope(), "all" if fields.flag("attention_bias") else "none"
    # Of each layer; 0 for a layer without positions.
    thetas = fields.get("layer_rope_theta", [rope.theta] * num_layers)

    def block(layer: int) -> BlockSpec:
        attention = AttentionSpec(
            rope=RopeSpec(thetas[layer], rope.scaling) if thetas[layer] else None,
            bias=bias,
            scale=fields.number("attention_multiplier", 1.0),
            window=window if kinds[layer] == WINDOWED else None,
            sink=True,
        )
        return BlockSpec(attention, feed_forward, residual_scale=fields.number("residual_multiplier", 1.0))

    return decoder(
        fields,
        block,
        tied=tied,
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1.0),
    )


def _read_granite(fields: Fields) -> Transformer:
    return _granite(fields, MLPSpec(bias=fields.flag("mlp_bias")), tied=True)


def _read_granite_moe(fields: Fields) -> Transformer:
    moe = MoESpec(
        num_experts=fields.whole("num_local_experts"),
        top_k=fields.whole("num_experts_per_tok"),
        shared_d_ff=fields.get("shared_intermediate_size") or None,
        balance_loss=fields.number("router_aux_loss_coef", 0.001),
    )
    return _granite(fields, moe, tied=False)


def _write(model: Transformer) -> dict[str, Any]:
    mixers = attentions_of(model)
    return (
        decoder_fields(model)
        | layer_types_of(model)
        | {
            "layer_rope_theta": [mixer.rope.theta if mixer.rope else 0 for mixer in mixers],
            "attention_bias": attention_of(model).bias == "all",
            "attention_multiplier": attention_of(model).scale,
            "residual_multiplier": model.blocks[0].residual_scale,
            "embedding_multiplier": model.embedding_scale,
            "logits_scaling": 1 / model.logit_scale,
        }
    )


def _write_granite(model: Transformer) -> dict[str, Any]:
    return _write(model) | {"mlp_bias": getattr(model.blocks[0].feed_forward, "bias", False)}


def _write_granite_moe(model: Transformer) -> dict[str, Any]:
    moe = moe_of(model)
    return _write(model) | {
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": moe.balance_loss,
        "shared_intermediate_size": moe.shared_d_ff or 0,
    }


_LAYER = "model.layers.{y}"

_EXPERTS = {
    "mlp.router_DX": Tensor(f"{_LAYER}.block_sparse_moe.router.weight", "X D"),
    "mlp.gate_XDF": Tensor(f"{_LAYER}.block_sparse_moe.experts.gate_up_proj", "X 2F D", 0),
    "mlp.up_XDF": Tensor(f"{_LAYER}.block_sparse_moe.experts.gate_up_proj", "X 2F D", 1),
    "mlp.down_XFD": Tensor(f"{_LAYER}.block_sparse_moe.experts.down_proj", "X D F"),
}

GRANITE_SWA = Family("granite_swa", "GraniteSWAForCausalLM", _read_granite, _write_granite, NAMES | SINKS)
GRANITEMOE_SWA = Family(
    "granitemoe_swa",
    "GraniteMoeSWAForCausalLM",
    _read_granite_moe,
    _write_granite_moe,
    NAMES | SINKS | _EXPERTS,
)
