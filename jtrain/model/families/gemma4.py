"""Gemma 4 without layers that share keys and values: heads of another size in layers with full attention."""

import dataclasses
from typing import Any

from jtrain.errors import UserError
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
)
from jtrain.model.families.family import Family, Tensor
from jtrain.model.families.gemma import SANDWICH
from jtrain.model.mlp import MLPSpec
from jtrain.model.rope import ProportionalScaling, RopeSpec
from jtrain.model.transformer import Transformer

_HEADS = {"head_dim": "head_dim", "num_key_value_heads": "num_kv_heads"}
"""Fields of `per_layer_config`, and what attention calls them."""


def _read(fields: Fields) -> Transformer:
    fields.only(hidden_activation="gelu_pytorch_tanh", attention_bias=False, quantization_config=None)
    fields.only(attention_k_eq_v=False, num_kv_shared_layers=0, use_double_wide_mlp=False)
    # Of text alone every token sees those before it, unless all see all.
    if (both := fields.get("use_bidirectional_attention", "vision")) != "vision":
        raise UserError(
            f"config.json: use_bidirectional_attention={both!r} is not supported, only 'vision' and null."
        )
    num_layers, window = fields.whole("num_hidden_layers"), fields.whole("sliding_window", 1024)
    kinds = fields.layer_types(num_layers, [WINDOWED if (y + 1) % 6 else FULL for y in range(num_layers)])
    # As in transformers, whatever the list says.
    kinds = (*kinds[:-1], FULL)
    given, size = fields.get("per_layer_config"), fields.whole("global_head_dim", 512)
    by_layer = {str(y): {"head_dim": size} for y in range(num_layers) if kinds[y] == FULL}
    by_layer = by_layer if given is None else given
    if unknown := sorted({key for values in by_layer.values() for key in values} - _HEADS.keys()):
        raise UserError(f"config.json: per_layer_config has {unknown}, only {list(_HEADS)} are supported.")
    full = AttentionSpec(
        rope=fields.rope(theta=1e6, kind=FULL, share=1.0), qk_norm="head", value_norm=True, scale=1.0
    )
    windowed = dataclasses.replace(full, rope=fields.rope(kind=WINDOWED), window=window)

    def block(layer: int) -> BlockSpec:
        heads: dict[str, Any] = {_HEADS[key]: n for key, n in by_layer.get(str(layer), {}).items()}
        attention = dataclasses.replace(windowed if kinds[layer] == WINDOWED else full, **heads)
        return BlockSpec(attention, MLPSpec(activation="gelu_tanh"), norms="sandwich", stream_scale=True)

    scale = fields.whole("hidden_size") ** 0.5
    cap = fields.nullable("final_logit_softcapping", None)
    return decoder(fields, block, tied=True, embedding_scale=scale, logit_soft_cap=cap)


def _write(model: Transformer) -> dict[str, Any]:
    attentions = attentions_of(model)
    fields = decoder_fields(model) | layer_types_of(model)
    for field in ("rope_theta", "rope_scaling", "hidden_act"):
        fields.pop(field, None)
    by_kind = {FULL if mixer.window is None else WINDOWED: mixer.rope or RopeSpec() for mixer in attentions}
    own = {"head_dim": model.head_dim, "num_key_value_heads": model.num_kv_heads}
    return (
        fields
        | own
        | {
            "hidden_activation": "gelu_pytorch_tanh",
            "final_logit_softcapping": model.logit_soft_cap,
            "rope_parameters": {kind: _rope_of(rope) for kind, rope in by_kind.items()},
            "per_layer_config": {
                str(y): heads
                for y, mixer in enumerate(attentions)
                if (
                    heads := {
                        key: n for key, name in _HEADS.items() if (n := getattr(mixer, name)) is not None
                    }
                )
            },
        }
    )


def _rope_of(rope: RopeSpec) -> dict[str, Any]:
    values = {"rope_type": "default", "rope_theta": rope.theta}
    if isinstance(rope.scaling, ProportionalScaling):
        values |= {"rope_type": "proportional", "partial_rotary_factor": rope.scaling.share}
    return values


_SCALE = {"stream_scale": Tensor("model.layers.{y}.layer_scalar", "1")}
GEMMA4_UNIFIED = Family(
    "gemma4_unified_text", "Gemma4UnifiedForCausalLM", _read, _write, NAMES | SANDWICH | _SCALE
)
