"""Decoders of short convolutions and attention: LFM2 and its mixtures (arXiv:2511.23404)."""

from typing import Any

from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.families.config_fields import Fields
from jtrain.model.families.decoder import FULL, NAMES, decoder, decoder_fields, moe_of
from jtrain.model.families.family import Family, Names, Tensor
from jtrain.model.families.recurrent.delta_nets import attentions_or_none
from jtrain.model.mlp import MLPSpec
from jtrain.model.recurrent.conv_mixer import ShortConvSpec
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer

CONV = "conv"
"""Kind of a layer with a convolution, in `layer_types`."""


def _mixers(fields: Fields) -> list[AttentionSpec | ShortConvSpec]:
    fields.only(quantization_config=None)
    num_layers = fields.whole("num_hidden_layers")
    with_attention = fields.get("full_attn_idxs", range(num_layers))
    kinds = fields.layer_types(num_layers, [FULL if y in with_attention else CONV for y in range(num_layers)])
    attention = AttentionSpec(rope=fields.rope(theta=1e6), qk_norm="head")
    conv = ShortConvSpec(fields.whole("conv_L_cache", 3), fields.flag("conv_bias"))
    return [attention if kind == FULL else conv for kind in kinds]


def _settings(fields: Fields) -> dict[str, Any]:
    return dict(eps="norm_eps", tied=fields.flag("tie_embedding", True))


def _read(fields: Fields) -> Transformer:
    mixers, width = _mixers(fields), fields.whole("block_ff_dim", fields.whole("intermediate_size", 12288))
    multiple = fields.whole("block_multiple_of", 256)
    factor = fields.get("block_ffn_dim_multiplier", 1.0)
    if fields.flag("block_auto_adjust_ff_dim", True):
        width = -(-int(factor * int(2 * width / 3)) // multiple) * multiple
    return decoder(fields, lambda y: BlockSpec(mixers[y]), **_settings(fields), width=width)


def _write(model: Transformer) -> dict[str, Any]:
    convs = [block.mixer for block in model.blocks if isinstance(block.mixer, ShortConvSpec)]
    kinds = [FULL if isinstance(block.mixer, AttentionSpec) else CONV for block in model.blocks]
    fields = decoder_fields(model, attentions=attentions_or_none(model), eps="norm_eps") | {
        "layer_types": kinds,
        "conv_L_cache": convs[0].taps if convs else 3,
        "conv_bias": bool(convs and convs[0].bias),
        "block_auto_adjust_ff_dim": False,
    }
    del fields["hidden_act"], fields["attention_dropout"]
    return fields


def _read_moe(fields: Fields) -> Transformer:
    mixers, dense = _mixers(fields), fields.whole("num_dense_layers", 2)
    moe = MoESpec(
        num_experts=fields.whole("num_experts", 32),
        top_k=fields.whole("num_experts_per_tok", 4),
        d_ff=fields.whole("moe_intermediate_size", 1792),
        normalize_top_k=fields.flag("norm_topk_prob", True),
        score="sigmoid",
        correction_bias=fields.flag("use_expert_bias", True),
        weight_scale=fields.number("routed_scaling_factor", 1.0),
        # Its load is balanced by the correction bias.
        balance_loss=0.0,
    )
    return decoder(
        fields, lambda y: BlockSpec(mixers[y], MLPSpec() if y < dense else moe), **_settings(fields)
    )


def _write_moe(model: Transformer) -> dict[str, Any]:
    moe, fields = moe_of(model), _write(model)
    del fields["block_auto_adjust_ff_dim"]
    return fields | {
        "num_dense_layers": sum(isinstance(block.feed_forward, MLPSpec) for block in model.blocks),
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.d_ff or model.d_ff,
        "norm_topk_prob": moe.normalize_top_k,
        "use_expert_bias": moe.correction_bias,
        "routed_scaling_factor": moe.weight_scale,
    }


_LAYER = "model.layers.{y}"
_EXPERT = _LAYER + ".feed_forward.experts.{x}"
_LFM2: Names = {
    "attention_norm.scale_D": Tensor(f"{_LAYER}.operator_norm.weight", "D"),
    "attention.q_norm.scale_H": Tensor(f"{_LAYER}.self_attn.q_layernorm.weight", "H"),
    "attention.k_norm.scale_H": Tensor(f"{_LAYER}.self_attn.k_layernorm.weight", "H"),
    "attention.o_NHD": Tensor(f"{_LAYER}.self_attn.out_proj.weight", "D NH"),
    "conv.before_DA": Tensor(f"{_LAYER}.conv.in_proj.weight", "3A D", 0),
    "conv.before_bias_A": Tensor(f"{_LAYER}.conv.in_proj.bias", "3A", 0),
    "conv.after_DA": Tensor(f"{_LAYER}.conv.in_proj.weight", "3A D", 1),
    "conv.after_bias_A": Tensor(f"{_LAYER}.conv.in_proj.bias", "3A", 1),
    "conv.x_DA": Tensor(f"{_LAYER}.conv.in_proj.weight", "3A D", 2),
    "conv.x_bias_A": Tensor(f"{_LAYER}.conv.in_proj.bias", "3A", 2),
    "conv.conv.taps_AW": Tensor(f"{_LAYER}.conv.conv.weight", "A 1 W"),
    "conv.conv.bias_A": Tensor(f"{_LAYER}.conv.conv.bias", "A"),
    "conv.o_AD": Tensor(f"{_LAYER}.conv.out_proj.weight", "D A"),
    "conv.o_bias_D": Tensor(f"{_LAYER}.conv.out_proj.bias", "D"),
    "mlp_norm.scale_D": Tensor(f"{_LAYER}.ffn_norm.weight", "D"),
    "mlp.gate_DF": Tensor(f"{_LAYER}.feed_forward.w1.weight", "F D"),
    "mlp.up_DF": Tensor(f"{_LAYER}.feed_forward.w3.weight", "F D"),
    "mlp.down_FD": Tensor(f"{_LAYER}.feed_forward.w2.weight", "D F"),
    "mlp.router_DX": Tensor(f"{_LAYER}.feed_forward.gate.weight", "X D"),
    "mlp.router_bias_X": Tensor(f"{_LAYER}.feed_forward.expert_bias", "X"),
    "mlp.gate_XDF": Tensor(f"{_EXPERT}.w1.weight", "F D"),
    "mlp.up_XDF": Tensor(f"{_EXPERT}.w3.weight", "F D"),
    "mlp.down_XFD": Tensor(f"{_EXPERT}.w2.weight", "D F"),
    "final_norm.scale_D": Tensor("model.embedding_norm.weight", "D"),
}
LFM2 = Family("lfm2", "Lfm2ForCausalLM", _read, _write, NAMES | _LFM2)
LFM2_MOE = Family("lfm2_moe", "Lfm2MoeForCausalLM", _read_moe, _write_moe, NAMES | _LFM2)
