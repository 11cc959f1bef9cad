"""Gemma 1 to 3 (arXiv:2403.08295, 2408.00118, 2503.19786) and VaultGemma (arXiv:2510.15001)."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.families.config_fields import Fields
from jtrain.model.families.decoder import (
    FULL,
    NAMES,
    WINDOWED,
    attention_of,
    attentions_of,
    decoder,
    decoder_fields,
    layer_types_of,
    rope_fields,
)
from jtrain.model.families.family import Family, Tensor
from jtrain.model.mlp import MLPSpec
from jtrain.model.norm import NormSpec
from jtrain.model.rope import RopeSpec
from jtrain.model.transformer import Transformer

_MLP = MLPSpec(activation="gelu_tanh")


def _settings(fields: Fields) -> dict[str, Any]:
    fields.only(attention_bias=False, use_bidirectional_attention=False, quantization_config=None)
    scale = fields.whole("hidden_size") ** 0.5
    return dict(tied=True, norm=NormSpec(scale="one_plus"), embedding_scale=scale)


def _read_gemma(fields: Fields) -> Transformer:
    # transformers computes with the approximation also where config.json says `gelu`.
    fields.ignore("hidden_act", "hidden_activation")
    attention = AttentionSpec(rope=fields.rope())
    return decoder(fields, lambda _: BlockSpec(attention, _MLP), **_settings(fields))


def _capped(norms: Literal["before", "sandwich"]) -> Callable[[Fields], Transformer]:
    """Reading of a config.json with soft-caps of scores and logits, and every other layer with a window."""

    def read(fields: Fields) -> Transformer:
        fields.only(hidden_activation="gelu_pytorch_tanh")
        fields.ignore("hidden_act", "cache_implementation")
        num_layers, window = fields.whole("num_hidden_layers"), fields.whole("sliding_window", 4096)
        kinds = fields.layer_types(num_layers, [FULL if y % 2 else WINDOWED for y in range(num_layers)])
        full = AttentionSpec(
            rope=fields.rope(),
            scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
            soft_cap=fields.nullable("attn_logit_softcapping", 50.0),
        )
        windowed = dataclasses.replace(full, window=window)
        return decoder(
            fields,
            lambda y: BlockSpec(windowed if kinds[y] == WINDOWED else full, _MLP, norms=norms),
            logit_soft_cap=fields.nullable("final_logit_softcapping", 30.0),
            **_settings(fields),
        )

    return read


def _write_capped(model: Transformer) -> dict[str, Any]:
    attention = attention_of(model)
    return (
        decoder_fields(model)
        | layer_types_of(model)
        | {
            "query_pre_attn_scalar": round((attention.scale or 1.0) ** -2, 6),
            "hidden_activation": "gelu_pytorch_tanh",
            "attn_logit_softcapping": attention.soft_cap,
            "final_logit_softcapping": model.logit_soft_cap,
        }
    )


def _read_gemma3(fields: Fields) -> Transformer:
    fields.only(hidden_activation="gelu_pytorch_tanh")
    # transformers' attention of Gemma 3 does not apply its own soft-cap.
    fields.ignore("hidden_act", "cache_implementation", "_sliding_window_pattern", "attn_logit_softcapping")
    num_layers, window = fields.whole("num_hidden_layers"), fields.whole("sliding_window", 4096)
    period = fields.whole("sliding_window_pattern", 6)
    kinds = fields.layer_types(
        num_layers, [WINDOWED if (y + 1) % period else FULL for y in range(num_layers)]
    )
    scale = fields.number("query_pre_attn_scalar", 256.0) ** -0.5
    full = AttentionSpec(rope=fields.rope(theta=1e6, kind=FULL), qk_norm="head", scale=scale)
    local = fields.number("rope_local_base_freq", 10_000.0)
    rope = fields.rope(theta=local, kind=WINDOWED, unscaled=True, theta_field=None)
    windowed = AttentionSpec(rope=rope, qk_norm="head", scale=scale, window=window)
    return decoder(
        fields,
        lambda y: BlockSpec(windowed if kinds[y] == WINDOWED else full, _MLP, norms="sandwich"),
        logit_soft_cap=fields.nullable("final_logit_softcapping", None),
        **_settings(fields),
    )


def _write_gemma3(model: Transformer) -> dict[str, Any]:
    mixers = attentions_of(model)
    full = next((mixer for mixer in mixers if mixer.window is None), mixers[0])
    local = next((mixer for mixer in mixers if mixer.window is not None), mixers[0])
    return (
        decoder_fields(model)
        | layer_types_of(model)
        | rope_fields(full.rope or RopeSpec())
        | {
            "rope_local_base_freq": (local.rope or RopeSpec()).theta,
            "query_pre_attn_scalar": round((full.scale or 1.0) ** -2, 6),
            "hidden_activation": "gelu_pytorch_tanh",
            "final_logit_softcapping": model.logit_soft_cap,
        }
    )


SANDWICH = {
    "attention_post_norm.scale_D": Tensor("model.layers.{y}.post_attention_layernorm.weight", "D"),
    "mlp_norm.scale_D": Tensor("model.layers.{y}.pre_feedforward_layernorm.weight", "D"),
    "mlp_post_norm.scale_D": Tensor("model.layers.{y}.post_feedforward_layernorm.weight", "D"),
}
"""Names of norms around both branches."""

GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    _read_gemma,
    lambda m: decoder_fields(m) | {"hidden_act": "gelu_pytorch_tanh"},
    NAMES,
)
GEMMA2 = Family("gemma2", "Gemma2ForCausalLM", _capped("sandwich"), _write_capped, NAMES | SANDWICH)
VAULTGEMMA = Family(
    "vaultgemma",
    "VaultGemmaForCausalLM",
    _capped("before"),
    _write_capped,
    NAMES | {"mlp_norm.scale_D": SANDWICH["mlp_norm.scale_D"]},
)
GEMMA3 = Family("gemma3_text", "Gemma3ForCausalLM", _read_gemma3, _write_gemma3, NAMES | SANDWICH)
