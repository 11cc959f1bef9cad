"""Families with layer norms: GPT-NeoX and Pythia (arXiv:2204.06745, 2304.01373), StarCoder2 (arXiv:2402.19173),
Cohere's Command R, Nemotron-4 (arXiv:2402.16819) and StableLM 2 (arXiv:2402.17834).
"""

from typing import Any

from jtrain.errors import UserError
from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.families.config_fields import Fields
from jtrain.model.families.decoder import (
    ACTIVATIONS,
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
from jtrain.model.norm import NormSpec
from jtrain.model.transformer import Transformer

_LAYER_NORM = NormSpec("layer", bias=True)


def _activation(model: Transformer) -> str:
    feed_forward = model.blocks[0].feed_forward
    if not isinstance(feed_forward, MLPSpec):
        raise UserError("a model with experts.")
    return next(name for name, kind in ACTIVATIONS.items() if kind == feed_forward.activation)


def _read_neox(fields: Fields) -> Transformer:
    fields.only(hidden_dropout=0, attention_bias=True, quantization_config=None)
    fields.ignore("classifier_dropout", "rotary_emb_base")
    rope = fields.rope(
        theta=fields.number("rotary_emb_base", 10_000.0), share=fields.number("rotary_pct", 0.25)
    )
    mlp = MLPSpec(activation=ACTIVATIONS[fields.get("hidden_act", "gelu")], gated=False, bias=True)
    norms = "parallel" if fields.flag("use_parallel_residual", True) else "before"
    block = BlockSpec(AttentionSpec(rope=rope, bias="all"), mlp, norms=norms)
    return decoder(fields, lambda _: block, eps="layer_norm_eps", norm=_LAYER_NORM)


def _write_neox(model: Transformer) -> dict[str, Any]:
    return decoder_fields(model, eps="layer_norm_eps") | {
        "hidden_act": _activation(model),
        "use_parallel_residual": model.blocks[0].norms == "parallel",
        "attention_bias": True,
    }


_NEOX = "gpt_neox.layers.{y}"
_QKV = f"{_NEOX}.attention.query_key_value"
_NEOX_NAMES = {
    "embed_VD": Tensor("gpt_neox.embed_in.weight", "V D"),
    "attention_norm.scale_D": Tensor(f"{_NEOX}.input_layernorm.weight", "D"),
    "attention_norm.bias_D": Tensor(f"{_NEOX}.input_layernorm.bias", "D"),
    "attention.q_DNH": Tensor(f"{_QKV}.weight", "N3H D", 0),
    "attention.k_DKH": Tensor(f"{_QKV}.weight", "K3H D", 1),
    "attention.v_DKH": Tensor(f"{_QKV}.weight", "K3H D", 2),
    "attention.q_bias_NH": Tensor(f"{_QKV}.bias", "N3H", 0),
    "attention.k_bias_KH": Tensor(f"{_QKV}.bias", "K3H", 1),
    "attention.v_bias_KH": Tensor(f"{_QKV}.bias", "K3H", 2),
    "attention.o_NHD": Tensor(f"{_NEOX}.attention.dense.weight", "D NH"),
    "attention.o_bias_D": Tensor(f"{_NEOX}.attention.dense.bias", "D"),
    "mlp_norm.scale_D": Tensor(f"{_NEOX}.post_attention_layernorm.weight", "D"),
    "mlp_norm.bias_D": Tensor(f"{_NEOX}.post_attention_layernorm.bias", "D"),
    "mlp.up_DF": Tensor(f"{_NEOX}.mlp.dense_h_to_4h.weight", "F D"),
    "mlp.up_bias_F": Tensor(f"{_NEOX}.mlp.dense_h_to_4h.bias", "F"),
    "mlp.down_FD": Tensor(f"{_NEOX}.mlp.dense_4h_to_h.weight", "D F"),
    "mlp.down_bias_D": Tensor(f"{_NEOX}.mlp.dense_4h_to_h.bias", "D"),
    "final_norm.scale_D": Tensor("gpt_neox.final_layer_norm.weight", "D"),
    "final_norm.bias_D": Tensor("gpt_neox.final_layer_norm.bias", "D"),
    "unembed_DV": Tensor("embed_out.weight", "V D"),
}


def _read_starcoder2(fields: Fields) -> Transformer:
    fields.only(residual_dropout=0, embedding_dropout=0, use_bias=True, quantization_config=None)
    mlp = MLPSpec(
        activation=ACTIVATIONS[fields.get("hidden_act", "gelu_pytorch_tanh")], gated=False, bias=True
    )
    attention = AttentionSpec(rope=fields.rope(), bias="all", window=fields.get("sliding_window"))
    return decoder(
        fields, lambda _: BlockSpec(attention, mlp), eps="norm_epsilon", norm=_LAYER_NORM, tied=True
    )


def _write_starcoder2(model: Transformer) -> dict[str, Any]:
    windows = {"sliding_window": layer_types_of(model)["sliding_window"]}
    return decoder_fields(model, eps="norm_epsilon") | windows | {"hidden_act": _activation(model)}


_UNGATED = {
    "mlp.up_DF": Tensor("model.layers.{y}.mlp.c_fc.weight", "F D"),
    "mlp.up_bias_F": Tensor("model.layers.{y}.mlp.c_fc.bias", "F"),
    "mlp.down_FD": Tensor("model.layers.{y}.mlp.c_proj.weight", "D F"),
    "mlp.down_bias_D": Tensor("model.layers.{y}.mlp.c_proj.bias", "D"),
}


def _read_nemotron(fields: Fields) -> Transformer:
    bias, mlp_bias = fields.flag("attention_bias"), fields.flag("mlp_bias")
    fields.only(quantization_config=None)
    mlp = MLPSpec(activation=ACTIVATIONS[fields.get("hidden_act", "relu2")], gated=False, bias=mlp_bias)
    attention = AttentionSpec(rope=fields.rope(share=0.5), bias="all" if bias else "none")
    norm = NormSpec("layer", "one_plus", bias=True)
    return decoder(fields, lambda _: BlockSpec(attention, mlp), eps="norm_eps", norm=norm)


def _write_nemotron(model: Transformer) -> dict[str, Any]:
    return decoder_fields(model, eps="norm_eps") | {
        "hidden_act": _activation(model),
        "attention_bias": attention_of(model).bias == "all",
        "mlp_bias": getattr(model.blocks[0].feed_forward, "bias", False),
    }


def _read_stablelm(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", hidden_dropout=0, qk_layernorm=False, quantization_config=None)
    attention = AttentionSpec(
        rope=fields.rope(share=0.25), bias="qkv" if fields.flag("use_qkv_bias") else "none"
    )
    norms = "parallel_shared" if fields.flag("use_parallel_residual") else "before"
    return decoder(
        fields, lambda _: BlockSpec(attention, norms=norms), eps="layer_norm_eps", norm=_LAYER_NORM
    )


def _write_stablelm(model: Transformer) -> dict[str, Any]:
    return decoder_fields(model, eps="layer_norm_eps") | {
        "use_qkv_bias": attention_of(model).bias == "qkv",
        "use_parallel_residual": model.blocks[0].norms == "parallel_shared",
    }


def _read_cohere(fields: Fields) -> Transformer:
    attention = _cohere_attention(fields)
    return decoder(
        fields,
        lambda _: BlockSpec(attention, norms="parallel_shared"),
        eps="layer_norm_eps",
        tied=True,
        norm=NormSpec("layer"),
        logit_scale=fields.number("logit_scale", 0.0625),
    )


def _cohere_attention(fields: Fields) -> AttentionSpec:
    fields.only(hidden_act="silu", use_qk_norm=False, quantization_config=None)
    return AttentionSpec(rope=fields.rope(), bias="all" if fields.flag("attention_bias") else "none")


def _read_cohere2(fields: Fields) -> Transformer:
    fields.ignore(
        "sliding_window_pattern", "order_of_interleaved_layers", "rotary_pct", "position_embedding_type"
    )
    attention, num_layers = _cohere_attention(fields), fields.whole("num_hidden_layers")
    kinds = fields.layer_types(num_layers, [WINDOWED if (y + 1) % 4 else FULL for y in range(num_layers)])
    window = fields.whole("sliding_window", 4096)
    windowed = AttentionSpec(rope=attention.rope, bias=attention.bias, window=window)
    full = AttentionSpec(rope=None, bias=attention.bias)
    return decoder(
        fields,
        lambda y: BlockSpec(windowed if kinds[y] == WINDOWED else full, norms="parallel_shared"),
        eps="layer_norm_eps",
        tied=True,
        norm=NormSpec("layer"),
        logit_scale=fields.number("logit_scale", 0.0625),
    )


def _write_cohere(model: Transformer) -> dict[str, Any]:
    return decoder_fields(model, eps="layer_norm_eps") | {
        "attention_bias": attention_of(model).bias == "all",
        "logit_scale": model.logit_scale,
    }


_INTERLEAVED = {
    "attention.q_DNH": Tensor("model.layers.{y}.self_attn.q_proj.weight", "NI D"),
    "attention.q_bias_NH": Tensor("model.layers.{y}.self_attn.q_proj.bias", "NI"),
    "attention.k_DKH": Tensor("model.layers.{y}.self_attn.k_proj.weight", "KI D"),
    "attention.k_bias_KH": Tensor("model.layers.{y}.self_attn.k_proj.bias", "KI"),
}

NEOX = Family("gpt_neox", "GPTNeoXForCausalLM", _read_neox, _write_neox, _NEOX_NAMES)
STARCODER2 = Family(
    "starcoder2", "Starcoder2ForCausalLM", _read_starcoder2, _write_starcoder2, NAMES | _UNGATED
)
NEMOTRON = Family("nemotron", "NemotronForCausalLM", _read_nemotron, _write_nemotron, NAMES)
STABLELM = Family("stablelm", "StableLmForCausalLM", _read_stablelm, _write_stablelm, NAMES)
COHERE = Family("cohere", "CohereForCausalLM", _read_cohere, _write_cohere, NAMES | _INTERLEAVED)
COHERE2 = Family(
    "cohere2",
    "Cohere2ForCausalLM",
    _read_cohere2,
    lambda m: _write_cohere(m) | layer_types_of(m),
    NAMES | _INTERLEAVED,
)
