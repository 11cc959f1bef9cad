"""OLMo 1 to 3 (arXiv:2402.00838, 2501.00656), OLMoE (arXiv:2409.02060) and FlexOlmo (arXiv:2507.07024)."""

from typing import Any

from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.families.config_fields import Fields
from jtrain.model.families.decoder import (
    FULL,
    NAMES,
    WINDOWED,
    attentions_of,
    decoder,
    decoder_fields,
    layer_types_of,
    moe_of,
    rope_fields,
)
from jtrain.model.families.family import Family, Tensor
from jtrain.model.norm import NormSpec
from jtrain.model.rope import RopeSpec
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer


def _common(fields: Fields) -> None:
    fields.only(hidden_act="silu", attention_bias=False, clip_qkv=None, quantization_config=None)


def _read_olmo(fields: Fields) -> Transformer:
    _common(fields)
    rope = fields.rope()
    norm = NormSpec("layer", "none")
    return decoder(fields, lambda _: BlockSpec(AttentionSpec(rope=rope)), norm=norm, norm_eps=1e-5)


def _read_olmo2(fields: Fields) -> Transformer:
    _common(fields)
    attention = AttentionSpec(rope=fields.rope(), qk_norm="all")
    return decoder(fields, lambda _: BlockSpec(attention, norms="after"))


def _read_olmo3(fields: Fields) -> Transformer:
    _common(fields)
    num_layers, window = fields.whole("num_hidden_layers"), fields.whole("sliding_window", 4096)
    kinds = fields.layer_types(num_layers, [WINDOWED if (y + 1) % 4 else FULL for y in range(num_layers)])
    full = AttentionSpec(rope=fields.rope(theta=500_000.0, kind=FULL), qk_norm="all")
    # Only full attention is stretched to longer contexts, by the form of transformers 4.
    rope = fields.rope(theta=500_000.0, kind=WINDOWED, unscaled=True)
    windowed = AttentionSpec(rope=rope, qk_norm="all", window=window)
    return decoder(fields, lambda y: BlockSpec(windowed if kinds[y] == WINDOWED else full, norms="after"))


def _write_olmo3(model: Transformer) -> dict[str, Any]:
    mixers = attentions_of(model)
    full = next((mixer for mixer in mixers if mixer.window is None), mixers[0])
    return decoder_fields(model) | layer_types_of(model) | rope_fields(full.rope or RopeSpec())


def _experts(fields: Fields) -> MoESpec:
    return MoESpec(
        num_experts=fields.whole("num_experts"),
        top_k=fields.whole("num_experts_per_tok"),
        normalize_top_k=fields.flag("norm_topk_prob"),
        balance_loss=fields.number("router_aux_loss_coef", 0.01),
    )


def _read_olmoe(fields: Fields) -> Transformer:
    _common(fields)
    attention, moe = AttentionSpec(rope=fields.rope(), qk_norm="all"), _experts(fields)
    return decoder(fields, lambda _: BlockSpec(attention, moe))


def _read_flex_olmo(fields: Fields) -> Transformer:
    _common(fields)
    attention, moe = AttentionSpec(rope=fields.rope(theta=500_000.0), qk_norm="all"), _experts(fields)
    return decoder(fields, lambda _: BlockSpec(attention, moe, norms="after"))


def _write_experts(model: Transformer) -> dict[str, Any]:
    moe = moe_of(model)
    return decoder_fields(model) | {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": moe.normalize_top_k,
        "router_aux_loss_coef": moe.balance_loss,
    }


AFTER = {
    "attention_post_norm.scale_D": Tensor("model.layers.{y}.post_attention_layernorm.weight", "D"),
    "mlp_post_norm.scale_D": Tensor("model.layers.{y}.post_feedforward_layernorm.weight", "D"),
}
"""Names of norms after the branches."""

OLMO = Family("olmo", "OlmoForCausalLM", _read_olmo, decoder_fields, NAMES)
OLMO2 = Family("olmo2", "Olmo2ForCausalLM", _read_olmo2, decoder_fields, NAMES | AFTER)
OLMO3 = Family("olmo3", "Olmo3ForCausalLM", _read_olmo3, _write_olmo3, NAMES | AFTER)
OLMOE = Family("olmoe", "OlmoeForCausalLM", _read_olmoe, _write_experts, NAMES)
FLEX_OLMO = Family("flex_olmo", "FlexOlmoForCausalLM", _read_flex_olmo, _write_experts, NAMES | AFTER)
