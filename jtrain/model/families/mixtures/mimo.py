"""MiMo-V2-Flash: sinks in the layers with windows, and values of a size of their own."""

import dataclasses
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
)
from jtrain.model.families.family import Family, Tensor
from jtrain.model.families.mixtures.deepseek_experts import experts_in, experts_written, names_of_experts
from jtrain.model.mlp import MLPSpec
from jtrain.model.transformer import Transformer


def _read_mimo(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", attention_bias=False, quantization_config=None)
    num_layers, window = fields.whole("num_hidden_layers"), fields.whole("sliding_window", 129)
    kinds = fields.layer_types(
        num_layers, [WINDOWED if y and (y + 1) % 6 else FULL for y in range(num_layers)]
    )
    feed_forwards = fields.get("mlp_layer_types", ["dense"] + ["sparse"] * (num_layers - 1))
    full = AttentionSpec(
        rope=fields.rope(theta=5e6, kind=FULL, share=0.334),
        value_head_dim=fields.whole("v_head_dim", 128),
        value_scale=fields.number("attention_value_scale", 1.0),
    )
    windowed = dataclasses.replace(
        full,
        rope=fields.rope(kind=WINDOWED, share=0.334),
        num_kv_heads=2 * fields.whole("num_key_value_heads"),
        window=window,
        sink=True,
    )
    moe = experts_in(fields)
    blocks = [
        BlockSpec(windowed if kind == WINDOWED else full, MLPSpec() if feed_forward == "dense" else moe)
        for kind, feed_forward in zip(kinds, feed_forwards, strict=True)
    ]
    return decoder(fields, lambda y: blocks[y], first=feed_forwards.index("sparse"))


def _write_mimo(model: Transformer) -> dict[str, Any]:
    mixers = attentions_of(model)
    full, local = (
        next((mixer for mixer in mixers if mixer.sink == sink), mixers[0]) for sink in (False, True)
    )
    ropes = {
        kind: {"rope_type": "default", "rope_theta": rope.theta, "partial_rotary_factor": rope.rotated_share}
        for kind, rope in ((FULL, full.rope), (WINDOWED, local.rope))
        if rope is not None
    }
    fields = decoder_fields(model) | layer_types_of(model) | experts_written(model)
    for key in (
        "rope_theta",
        "rope_scaling",
        "partial_rotary_factor",
        "n_shared_experts",
        "first_k_dense_replace",
    ):
        fields.pop(key, None)
    return fields | {
        "rope_parameters": ropes,
        "v_head_dim": full.value_head_dim or model.head_dim,
        "attention_value_scale": full.value_scale,
        "mlp_layer_types": [
            "dense" if isinstance(block.feed_forward, MLPSpec) else "sparse" for block in model.blocks
        ],
    }


_LAYER = "model.layers.{y}"

MIMO_V2_FLASH = Family(
    "mimo_v2_flash",
    "MiMoV2FlashForCausalLM",
    _read_mimo,
    _write_mimo,
    NAMES
    | names_of_experts()
    | {
        "attention.v_DKH": Tensor(f"{_LAYER}.self_attn.v_proj.weight", "KP D"),
        "attention.o_NHD": Tensor(f"{_LAYER}.self_attn.o_proj.weight", "D NP"),
        "attention.sink_N": Tensor(f"{_LAYER}.self_attn.attention_sink_bias", "N"),
    },
)
