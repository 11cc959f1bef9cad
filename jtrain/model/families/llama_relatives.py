"""Families that differ from Llama in a few settings: Arcee, Helium, Hunyuan (dense),
ERNIE 4.5, Seed-OSS, Code World Model, Phi-3 (arXiv:2404.14219) and EXAONE 4 (arXiv:2507.11407).
"""

from typing import Any

from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.families.config_fields import Fields
from jtrain.model.families.decoder import (
    ACTIVATIONS,
    FULL,
    INTERLEAVED,
    NAMES,
    WINDOWED,
    attention_of,
    biases_in,
    biases_written,
    decoder,
    decoder_fields,
    layer_types_of,
    mlp_types_of,
    moe_of,
)
from jtrain.model.families.family import Family, Tensor
from jtrain.model.families.mixtures.deepseek_experts import names_of_experts
from jtrain.model.mlp import MLPSpec
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer


def _read_arcee(fields: Fields) -> Transformer:
    fields.only(hidden_act="relu2", quantization_config=None)
    bias, mlp_bias = biases_in(fields)
    mlp = MLPSpec(activation="relu2", gated=False, bias=mlp_bias)
    attention = AttentionSpec(rope=fields.rope(), bias=bias)
    return decoder(fields, lambda _: BlockSpec(attention, mlp))


def _read_helium(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", quantization_config=None)
    bias, mlp_bias = biases_in(fields)
    attention = AttentionSpec(rope=fields.rope(theta=100_000.0), bias="qkv" if bias == "all" else "none")
    return decoder(fields, lambda _: BlockSpec(attention, MLPSpec(bias=mlp_bias)))


def _write_helium(model: Transformer) -> dict[str, Any]:
    return (
        decoder_fields(model) | biases_written(model) | {"attention_bias": attention_of(model).bias == "qkv"}
    )


def _read_hunyuan(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", pretraining_tp=1, quantization_config=None)
    fields.ignore("eod_token_id")
    bias, _ = biases_in(fields)
    attention = AttentionSpec(rope=fields.rope(), bias=bias, qk_norm="head", norm_after_rope=True)
    return decoder(fields, lambda _: BlockSpec(attention))


def _read_hunyuan_moe(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", pretraining_tp=1, quantization_config=None)
    fields.ignore("eod_token_id")
    bias, _ = biases_in(fields)
    attention = AttentionSpec(rope=fields.rope(), bias=bias, qk_norm="head", norm_after_rope=True)
    experts: Any = dict(num_experts=fields.whole("num_experts"), top_k=fields.whole("moe_topk"))
    moe = MoESpec(**experts, shared_experts=1, balance_loss=0.0)
    return decoder(fields, lambda _: BlockSpec(attention, moe))


def _write_hunyuan_moe(model: Transformer) -> dict[str, Any]:
    moe, bias = moe_of(model), attention_of(model).bias == "all"
    experts = {"num_experts": moe.num_experts, "moe_topk": moe.top_k}
    return decoder_fields(model) | experts | {"attention_bias": bias}


def _read_ernie(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", quantization_config=None)
    bias = fields.flag("use_bias")
    attention = AttentionSpec(rope=fields.rope(theta=500_000.0), bias="all" if bias else "none")
    return decoder(fields, lambda _: BlockSpec(attention, MLPSpec(bias=bias)), tied=True)


def _read_ernie_moe(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", use_bias=False, quantization_config=None)
    fields.ignore("moe_norm_min")  # a guard against a division by zero
    num_layers, begin = fields.whole("num_hidden_layers"), fields.whole("moe_layer_start_index", 1)
    end, step = fields.whole("moe_layer_end_index", -1), fields.whole("moe_layer_interval", 1)
    end = num_layers - 1 if end == -1 else end
    sparse = [(y + 1) % step == 0 and begin <= y <= end for y in range(num_layers)]
    attention = AttentionSpec(rope=fields.rope(theta=500_000.0))
    moe = MoESpec(
        num_experts=fields.whole("moe_num_experts", 64),
        top_k=fields.whole("moe_k", 6),
        d_ff=fields.whole("moe_intermediate_size", 1536),
        shared_experts=fields.whole("moe_num_shared_experts", 2),
        correction_bias=True,
        balance_loss=fields.number("router_aux_loss_coef", 0.001),
    )
    return decoder(
        fields,
        lambda y: BlockSpec(attention, moe if sparse[y] else MLPSpec()),
        first=sparse.index(True),
        tied=True,
    )


def _write_ernie_moe(model: Transformer) -> dict[str, Any]:
    moe, kinds = moe_of(model), mlp_types_of(model)["mlp_layer_types"]
    return decoder_fields(model) | {
        "moe_num_experts": moe.num_experts,
        "moe_k": moe.top_k,
        "moe_intermediate_size": moe.d_ff or model.d_ff,
        "moe_num_shared_experts": moe.shared_experts,
        "moe_layer_start_index": kinds.index("sparse"),
        "moe_layer_end_index": len(kinds) - 1 - kinds[::-1].index("sparse"),
        "router_aux_loss_coef": moe.balance_loss,
    }


def _read_apertus(fields: Fields) -> Transformer:
    fields.only(hidden_act="xielu", quantization_config=None)
    attention = AttentionSpec(rope=fields.rope(theta=12e6), bias=biases_in(fields)[0], qk_norm="head")
    mlp = MLPSpec(activation="xielu", gated=False)
    return decoder(fields, lambda _: BlockSpec(attention, mlp))


def _read_bitnet(fields: Fields) -> Transformer:
    # Published weights of two bits are packed; those in bfloat16 are not.
    fields.only(quantization_config=None)
    attention = AttentionSpec(rope=fields.rope(theta=500_000.0), bias=biases_in(fields)[0], output_norm=True)
    mlp = MLPSpec(activation=ACTIVATIONS[fields.get("hidden_act", "relu2")], inner_norm=True)
    return decoder(fields, lambda _: BlockSpec(attention, mlp))


_BITNET = {
    "attention.output_norm.scale_NH": Tensor("model.layers.{y}.self_attn.attn_sub_norm.weight", "NH"),
    "mlp.inner_scale_F": Tensor("model.layers.{y}.mlp.ffn_sub_norm.weight", "F"),
}

_XIELU = "model.layers.{y}.mlp.act_fn"
_APERTUS = {
    "attention_norm.scale_D": Tensor("model.layers.{y}.attention_layernorm.weight", "D"),
    "mlp_norm.scale_D": Tensor("model.layers.{y}.feedforward_layernorm.weight", "D"),
    "mlp.xielu_positive": Tensor(f"{_XIELU}.alpha_p", "1"),
    "mlp.xielu_negative": Tensor(f"{_XIELU}.alpha_n", "1"),
    "mlp.xielu_linear": Tensor(f"{_XIELU}.beta", ""),
    "mlp.xielu_edge": Tensor(f"{_XIELU}.eps", ""),
}


def _read_seed(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", pretraining_tp=1, quantization_config=None)
    # Dropout of the training of transformers.
    fields.ignore("residual_dropout", "attention_dropout")
    bias, out_bias = fields.flag("attention_bias", True), fields.flag("attention_out_bias")
    attention = AttentionSpec(rope=fields.rope(), bias="all" if out_bias else "qkv" if bias else "none")
    mlp = MLPSpec(bias=fields.flag("mlp_bias"))
    return decoder(fields, lambda _: BlockSpec(attention, mlp))


def _write_seed(model: Transformer) -> dict[str, Any]:
    bias = attention_of(model).bias
    written = {"attention_bias": bias != "none", "attention_out_bias": bias == "all"}
    return decoder_fields(model) | biases_written(model) | written | {"residual_dropout": 0.0}


def _read_cwm(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", pretraining_tp=1, mlp_bias=False, quantization_config=None)
    num_layers, window = fields.whole("num_hidden_layers"), fields.whole("sliding_window", 8192)
    kinds = fields.layer_types(num_layers, [WINDOWED if y % 4 else FULL for y in range(num_layers)])
    rope = fields.rope(theta=1e6)
    return decoder(
        fields,
        lambda y: BlockSpec(AttentionSpec(rope=rope, window=window if kinds[y] == WINDOWED else None)),
    )


def _read_phi3(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", resid_pdrop=0, embd_pdrop=0, quantization_config=None)
    # transformers' Phi-3 reads the original length beside the scaling, and only for `longrope`.
    fields.ignore("original_max_position_embeddings")
    attention = AttentionSpec(rope=fields.rope(share=1.0), window=fields.get("sliding_window"))
    return decoder(fields, lambda _: BlockSpec(attention))


_QKV = "model.layers.{y}.self_attn.qkv_proj.weight"
_FUSED = {
    "attention.q_DNH": Tensor(_QKV, "NH+KH+KH D", 0),
    "attention.k_DKH": Tensor(_QKV, "NH+KH+KH D", 1),
    "attention.v_DKH": Tensor(_QKV, "NH+KH+KH D", 2),
    "mlp.gate_DF": Tensor("model.layers.{y}.mlp.gate_up_proj.weight", "2F D", 0),
    "mlp.up_DF": Tensor("model.layers.{y}.mlp.gate_up_proj.weight", "2F D", 1),
}


def _read_exaone4(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", quantization_config=None)
    num_layers, window = fields.whole("num_hidden_layers"), fields.get("sliding_window")
    period = fields.get("sliding_window_pattern", 4) if window is not None else 0
    fields.ignore("sliding_window_pattern")
    default = [WINDOWED if period and (y + 1) % period else FULL for y in range(num_layers)]
    kinds, rope = fields.layer_types(num_layers, default), fields.rope()

    def block(layer: int) -> BlockSpec:
        windowed = kinds[layer] == WINDOWED
        # Full attention has no positions where other layers have windows.
        layer_rope = rope if windowed or window is None else None
        attention = AttentionSpec(rope=layer_rope, qk_norm="head", window=window if windowed else None)
        return BlockSpec(attention, norms="after")

    return decoder(fields, block)


_AFTER = {
    "attention_post_norm.scale_D": Tensor("model.layers.{y}.post_attention_layernorm.weight", "D"),
    "mlp_post_norm.scale_D": Tensor("model.layers.{y}.post_feedforward_layernorm.weight", "D"),
}
_AFTER_ROPE = {
    "attention.q_norm.scale_H": Tensor("model.layers.{y}.self_attn.query_layernorm.weight", "H"),
    "attention.k_norm.scale_H": Tensor("model.layers.{y}.self_attn.key_layernorm.weight", "H"),
}

ARCEE = Family(
    "arcee",
    "ArceeForCausalLM",
    _read_arcee,
    lambda m: decoder_fields(m) | biases_written(m) | {"hidden_act": "relu2"},
    NAMES,
)
HELIUM = Family("helium", "HeliumForCausalLM", _read_helium, _write_helium, NAMES | INTERLEAVED)
HUNYUAN = Family(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    _read_hunyuan,
    lambda m: decoder_fields(m) | biases_written(m),
    NAMES | _AFTER_ROPE,
)
HUNYUAN_MOE = Family(
    "hunyuan_v1_moe",
    "HunYuanMoEV1ForCausalLM",
    _read_hunyuan_moe,
    _write_hunyuan_moe,
    NAMES
    | _AFTER_ROPE
    | names_of_experts(shared="mlp.shared_mlp")
    | {"mlp.router_DX": Tensor("model.layers.{y}.mlp.gate.wg.weight", "X D")},
)
ERNIE = Family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    _read_ernie,
    lambda m: decoder_fields(m) | {"use_bias": attention_of(m).bias == "all"},
    NAMES | INTERLEAVED,
)
ERNIE_MOE = Family(
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    _read_ernie_moe,
    _write_ernie_moe,
    NAMES
    | INTERLEAVED
    | names_of_experts()
    | {"mlp.router_bias_X": Tensor("model.layers.{y}.mlp.moe_statics.e_score_correction_bias", "1 X")},
)
APERTUS = Family(
    "apertus",
    "ApertusForCausalLM",
    _read_apertus,
    lambda m: decoder_fields(m) | {"hidden_act": "xielu", "attention_bias": attention_of(m).bias == "all"},
    NAMES | _APERTUS,
)
BITNET = Family(
    "bitnet",
    "BitNetForCausalLM",
    _read_bitnet,
    lambda m: decoder_fields(m) | {"hidden_act": "relu2", "attention_bias": attention_of(m).bias == "all"},
    NAMES | _BITNET,
)
SEED_OSS = Family("seed_oss", "SeedOssForCausalLM", _read_seed, _write_seed, NAMES)
CWM = Family("cwm", "CwmForCausalLM", _read_cwm, lambda m: decoder_fields(m) | layer_types_of(m), NAMES)
PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    _read_phi3,
    lambda m: decoder_fields(m) | {"sliding_window": layer_types_of(m)["sliding_window"]},
    NAMES | _FUSED,
)
EXAONE4 = Family(
    "exaone4",
    "Exaone4ForCausalLM",
    _read_exaone4,
    lambda m: decoder_fields(m) | layer_types_of(m),
    NAMES | _AFTER,
)
