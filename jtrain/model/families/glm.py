"""GLM-4 and GLM-4.5 to 4.7 (arXiv:2406.12793, 2508.06471)."""

from typing import Any

from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.families.config_fields import Fields
from jtrain.model.families.decoder import INTERLEAVED, NAMES, attention_of, decoder, decoder_fields
from jtrain.model.families.family import Family, Tensor
from jtrain.model.families.mixtures.deepseek_experts import (
    experts_in,
    experts_written,
    first_dense,
    names_of_experts,
)
from jtrain.model.transformer import Transformer


def _attention(fields: Fields, *, bias: bool) -> AttentionSpec:
    fields.only(hidden_act="silu", quantization_config=None)
    has_bias = fields.flag("attention_bias", bias)
    return AttentionSpec(rope=fields.rope(share=0.5), bias="qkv" if has_bias else "none")


def _read_glm(fields: Fields) -> Transformer:
    attention = _attention(fields, bias=True)
    return decoder(fields, lambda _: BlockSpec(attention))


def _read_glm4(fields: Fields) -> Transformer:
    attention = _attention(fields, bias=True)
    return decoder(fields, lambda _: BlockSpec(attention, norms="sandwich"))


def _write(model: Transformer) -> dict[str, Any]:
    return decoder_fields(model) | {"attention_bias": attention_of(model).bias == "qkv"}


_FUSED = {
    "mlp.gate_DF": Tensor("model.layers.{y}.mlp.gate_up_proj.weight", "2F D", 0),
    "mlp.up_DF": Tensor("model.layers.{y}.mlp.gate_up_proj.weight", "2F D", 1),
}
_SANDWICH = {
    "attention_post_norm.scale_D": Tensor("model.layers.{y}.post_self_attn_layernorm.weight", "D"),
    "mlp_post_norm.scale_D": Tensor("model.layers.{y}.post_mlp_layernorm.weight", "D"),
}


def _read_glm4_moe(fields: Fields) -> Transformer:
    fields.ignore("num_nextn_predict_layers", "num_mtp_layers")  # heads beside the model, not read
    attention = _attention(fields, bias=False)
    if fields.flag("use_qk_norm"):
        attention = AttentionSpec(rope=attention.rope, bias=attention.bias, qk_norm="head")
    return decoder(
        fields,
        first_dense(fields, attention, experts_in(fields)),
        first=fields.get("first_k_dense_replace", 1),
    )


def _write_glm4_moe(model: Transformer) -> dict[str, Any]:
    return _write(model) | experts_written(model) | {"use_qk_norm": attention_of(model).qk_norm == "head"}


GLM = Family("glm", "GlmForCausalLM", _read_glm, _write, NAMES | _FUSED | INTERLEAVED)
GLM4 = Family("glm4", "Glm4ForCausalLM", _read_glm4, _write, NAMES | _FUSED | INTERLEAVED | _SANDWICH)
GLM4_MOE = Family(
    "glm4_moe", "Glm4MoeForCausalLM", _read_glm4_moe, _write_glm4_moe, NAMES | names_of_experts()
)
