"""Families that differ from Llama in a few settings: Granite 3 (arXiv:2405.04324), Arcee, Helium, Hunyuan (dense),
ERNIE 4.5, Seed-OSS, Code World Model, Phi-3 (arXiv:2404.14219) and EXAONE 4 (arXiv:2507.11407).
"""

from typing import Any

from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.families.config_fields import Fields
from jtrain.model.families.decoder import (
    FULL,
    NAMES,
    WINDOWED,
    attention_of,
    decoder,
    decoder_fields,
    layer_types_of,
)
from jtrain.model.families.family import Family, Tensor
from jtrain.model.mlp import MLPSpec
from jtrain.model.transformer import Transformer


def _biases(fields: Fields, name: str = "attention_bias", mlp: str = "mlp_bias") -> tuple[Any, bool]:
    return "all" if fields.flag(name) else "none", fields.flag(mlp)


def _biases_written(model: Transformer) -> dict[str, Any]:
    return {
        "attention_bias": attention_of(model).bias == "all",
        "mlp_bias": getattr(model.blocks[0].feed_forward, "bias", False),
    }


def _read_granite(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", quantization_config=None)
    bias, mlp_bias = _biases(fields)
    attention = AttentionSpec(rope=fields.rope(), bias=bias, scale=fields.number("attention_multiplier", 1.0))
    block = BlockSpec(
        attention, MLPSpec(bias=mlp_bias), residual_scale=fields.number("residual_multiplier", 1.0)
    )
    return decoder(
        fields,
        lambda _: block,
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1.0),
    )


def _write_granite(model: Transformer) -> dict[str, Any]:
    return (
        decoder_fields(model)
        | _biases_written(model)
        | {
            "attention_multiplier": attention_of(model).scale,
            "residual_multiplier": model.blocks[0].residual_scale,
            "embedding_multiplier": model.embedding_scale,
            "logits_scaling": 1 / model.logit_scale,
        }
    )


def _read_arcee(fields: Fields) -> Transformer:
    fields.only(hidden_act="relu2", quantization_config=None)
    bias, mlp_bias = _biases(fields)
    mlp = MLPSpec(activation="relu2", gated=False, bias=mlp_bias)
    attention = AttentionSpec(rope=fields.rope(), bias=bias)
    return decoder(fields, lambda _: BlockSpec(attention, mlp))


def _read_helium(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", quantization_config=None)
    bias, mlp_bias = _biases(fields)
    attention = AttentionSpec(rope=fields.rope(theta=100_000.0), bias="qkv" if bias == "all" else "none")
    return decoder(fields, lambda _: BlockSpec(attention, MLPSpec(bias=mlp_bias)))


def _write_helium(model: Transformer) -> dict[str, Any]:
    return (
        decoder_fields(model) | _biases_written(model) | {"attention_bias": attention_of(model).bias == "qkv"}
    )


def _read_hunyuan(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", pretraining_tp=1, quantization_config=None)
    fields.ignore("eod_token_id")
    bias, _ = _biases(fields)
    attention = AttentionSpec(rope=fields.rope(), bias=bias, qk_norm="head", norm_after_rope=True)
    return decoder(fields, lambda _: BlockSpec(attention))


def _read_ernie(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", quantization_config=None)
    bias = fields.flag("use_bias")
    attention = AttentionSpec(rope=fields.rope(theta=500_000.0), bias="all" if bias else "none")
    return decoder(fields, lambda _: BlockSpec(attention, MLPSpec(bias=bias)), tied=True)


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
    return decoder_fields(model) | _biases_written(model) | written | {"residual_dropout": 0.0}


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
_INTERLEAVED = {
    "attention.q_DNH": Tensor("model.layers.{y}.self_attn.q_proj.weight", "NI D"),
    "attention.q_bias_NH": Tensor("model.layers.{y}.self_attn.q_proj.bias", "NI"),
    "attention.k_DKH": Tensor("model.layers.{y}.self_attn.k_proj.weight", "KI D"),
    "attention.k_bias_KH": Tensor("model.layers.{y}.self_attn.k_proj.bias", "KI"),
}

GRANITE = Family("granite", "GraniteForCausalLM", _read_granite, _write_granite, NAMES)
ARCEE = Family(
    "arcee",
    "ArceeForCausalLM",
    _read_arcee,
    lambda m: decoder_fields(m) | _biases_written(m) | {"hidden_act": "relu2"},
    NAMES,
)
HELIUM = Family("helium", "HeliumForCausalLM", _read_helium, _write_helium, NAMES | _INTERLEAVED)
HUNYUAN = Family(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    _read_hunyuan,
    lambda m: decoder_fields(m) | _biases_written(m),
    NAMES | _AFTER_ROPE,
)
ERNIE = Family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    _read_ernie,
    lambda m: decoder_fields(m) | {"use_bias": attention_of(m).bias == "all"},
    NAMES | _INTERLEAVED,
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
