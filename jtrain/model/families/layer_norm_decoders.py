"""Families with layer norms: GPT-NeoX and Pythia (arXiv:2204.06745, 2304.01373), StarCoder2
(arXiv:2402.19173), Nemotron-4 (arXiv:2402.16819), StableLM 2 (arXiv:2402.17834) and Falcon
(arXiv:2311.16867).
"""

from typing import Any

from jtrain.errors import UserError
from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.families.config_fields import Fields
from jtrain.model.families.decoder import (
    ACTIVATIONS,
    NAMES,
    attention_of,
    biases_written,
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
    names = [name for name, kind in ACTIVATIONS.items() if kind == feed_forward.activation]
    if not names:
        raise UserError(f"feed_forward.activation={feed_forward.activation}.")
    return names[0]


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


def _read_jais2(fields: Fields) -> Transformer:
    fields.only(quantization_config=None)
    bias, mlp_bias = fields.flag("attention_bias", True), fields.flag("mlp_bias", True)
    mlp = MLPSpec(activation=ACTIVATIONS[fields.get("hidden_act", "relu2")], gated=False, bias=mlp_bias)
    attention = AttentionSpec(rope=fields.rope(), bias="all" if bias else "none")
    return decoder(fields, lambda _: BlockSpec(attention, mlp), eps="layer_norm_eps", norm=_LAYER_NORM)


def _write_jais2(model: Transformer) -> dict[str, Any]:
    fields = decoder_fields(model, eps="layer_norm_eps") | biases_written(model)
    return fields | {"hidden_act": _activation(model)}


def _read_persimmon(fields: Fields) -> Transformer:
    fields.only(hidden_dropout=0, quantization_config=None)
    norm = "head" if fields.flag("qk_layernorm", True) else "none"
    attention = AttentionSpec(rope=fields.rope(share=0.5), bias="all", qk_norm=norm)
    mlp = MLPSpec(activation=ACTIVATIONS[fields.get("hidden_act", "relu2")], gated=False, bias=True)
    return decoder(fields, lambda _: BlockSpec(attention, mlp), eps="layer_norm_eps", norm=_LAYER_NORM)


def _write_persimmon(model: Transformer) -> dict[str, Any]:
    return decoder_fields(model, eps="layer_norm_eps") | {
        "hidden_act": _activation(model),
        "qk_layernorm": attention_of(model).qk_norm == "head",
    }


def _read_falcon(fields: Fields) -> Transformer:
    # The other forms of its fused projection have another order of heads.
    fields.only(alibi=False, new_decoder_architecture=False, multi_query=True, parallel_attn=True)
    fields.only(hidden_dropout=0, quantization_config=None)
    fields.ignore("num_kv_heads", "num_ln_in_parallel_attn")
    bias, width = fields.flag("bias"), fields.whole("ffn_hidden_size", 4 * fields.whole("hidden_size"))
    mlp = MLPSpec(activation=ACTIVATIONS[fields.get("activation", "gelu")], gated=False, bias=bias)
    attention = AttentionSpec(rope=fields.rope(), bias="all" if bias else "none")
    return decoder(
        fields,
        lambda _: BlockSpec(attention, mlp, norms="parallel_shared"),
        eps="layer_norm_epsilon",
        norm=_LAYER_NORM,
        tied=True,
        width=width,
        num_kv_heads=1,
    )


def _write_falcon(model: Transformer) -> dict[str, Any]:
    fields = decoder_fields(model, eps="layer_norm_epsilon", d_ff="ffn_hidden_size")
    for field in ("hidden_act", "num_key_value_heads", "head_dim"):
        del fields[field]
    return fields | {"activation": _activation(model), "bias": attention_of(model).bias == "all"}


_FALCON = "transformer.h.{y}"
_FALCON_QKV = f"{_FALCON}.self_attention.query_key_value"
_FALCON_NAMES = {
    "embed_VD": Tensor("transformer.word_embeddings.weight", "V D"),
    "attention_norm.scale_D": Tensor(f"{_FALCON}.input_layernorm.weight", "D"),
    "attention_norm.bias_D": Tensor(f"{_FALCON}.input_layernorm.bias", "D"),
    "attention.q_DNH": Tensor(f"{_FALCON_QKV}.weight", "NH+KH+KH D", 0),
    "attention.k_DKH": Tensor(f"{_FALCON_QKV}.weight", "NH+KH+KH D", 1),
    "attention.v_DKH": Tensor(f"{_FALCON_QKV}.weight", "NH+KH+KH D", 2),
    "attention.q_bias_NH": Tensor(f"{_FALCON_QKV}.bias", "NH+KH+KH", 0),
    "attention.k_bias_KH": Tensor(f"{_FALCON_QKV}.bias", "NH+KH+KH", 1),
    "attention.v_bias_KH": Tensor(f"{_FALCON_QKV}.bias", "NH+KH+KH", 2),
    "attention.o_NHD": Tensor(f"{_FALCON}.self_attention.dense.weight", "D NH"),
    "attention.o_bias_D": Tensor(f"{_FALCON}.self_attention.dense.bias", "D"),
    "mlp.up_DF": Tensor(f"{_FALCON}.mlp.dense_h_to_4h.weight", "F D"),
    "mlp.up_bias_F": Tensor(f"{_FALCON}.mlp.dense_h_to_4h.bias", "F"),
    "mlp.down_FD": Tensor(f"{_FALCON}.mlp.dense_4h_to_h.weight", "D F"),
    "mlp.down_bias_D": Tensor(f"{_FALCON}.mlp.dense_4h_to_h.bias", "D"),
    "final_norm.scale_D": Tensor("transformer.ln_f.weight", "D"),
    "final_norm.bias_D": Tensor("transformer.ln_f.bias", "D"),
    "unembed_DV": NAMES["unembed_DV"],
}


def _like_neox(name: str) -> str:
    name = name.replace("gpt_neox.layers", "model.layers").replace(".attention.", ".self_attn.")
    return name.replace("gpt_neox.final_layer_norm", "model.final_layernorm")


_PERSIMMON_LAYER = "model.layers.{y}.self_attn"
_PERSIMMON_NAMES = {
    path: Tensor(_like_neox(tensor.name), tensor.dims, tensor.part) for path, tensor in _NEOX_NAMES.items()
} | {
    "embed_VD": NAMES["embed_VD"],
    "unembed_DV": NAMES["unembed_DV"],
    "attention.q_norm.scale_H": Tensor(f"{_PERSIMMON_LAYER}.q_layernorm.weight", "H"),
    "attention.q_norm.bias_H": Tensor(f"{_PERSIMMON_LAYER}.q_layernorm.bias", "H"),
    "attention.k_norm.scale_H": Tensor(f"{_PERSIMMON_LAYER}.k_layernorm.weight", "H"),
    "attention.k_norm.bias_H": Tensor(f"{_PERSIMMON_LAYER}.k_layernorm.bias", "H"),
}

JAIS2 = Family("jais2", "Jais2ForCausalLM", _read_jais2, _write_jais2, NAMES)
PERSIMMON = Family("persimmon", "PersimmonForCausalLM", _read_persimmon, _write_persimmon, _PERSIMMON_NAMES)
NEOX = Family("gpt_neox", "GPTNeoXForCausalLM", _read_neox, _write_neox, _NEOX_NAMES)
STARCODER2 = Family(
    "starcoder2", "Starcoder2ForCausalLM", _read_starcoder2, _write_starcoder2, NAMES | _UNGATED
)
NEMOTRON = Family("nemotron", "NemotronForCausalLM", _read_nemotron, _write_nemotron, NAMES)
FALCON = Family("falcon", "FalconForCausalLM", _read_falcon, _write_falcon, _FALCON_NAMES)
STABLELM = Family("stablelm", "StableLmForCausalLM", _read_stablelm, _write_stablelm, NAMES)
