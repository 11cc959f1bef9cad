"""Families with attention sinks and windows: gpt-oss (arXiv:2508.10925), Granite (dense and mixture), Flint
and MiMo-V2-Flash.
"""

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
    attention_of,
    attentions_of,
    decoder,
    decoder_fields,
    layer_types_of,
    moe_of,
)
from jtrain.model.families.family import Family, Names, Tensor
from jtrain.model.families.mixtures.deepseek_experts import experts_in, experts_written, names_of_experts
from jtrain.model.mlp import ClampedSwiGLU, MLPSpec
from jtrain.model.rope import RopeSpec
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer


def _granite(fields: Fields, feed_forward: MLPSpec | MoESpec, *, tied: bool) -> Transformer:
    fields.only(hidden_act="silu", quantization_config=None)
    num_layers, window = fields.whole("num_hidden_layers"), fields.get("sliding_window", 128)
    kinds = fields.layer_types(num_layers, [WINDOWED if y % 4 else FULL for y in range(num_layers)])
    rope, bias = fields.rope(), "all" if fields.flag("attention_bias") else "none"
    # Of each layer; 0 for a layer without positions.
    thetas = fields.get("layer_rope_theta", [rope.theta] * num_layers)

    def block(layer: int) -> BlockSpec:
        attention = AttentionSpec(
            rope=RopeSpec(thetas[layer], rope.scaling) if thetas[layer] else None,
            bias=bias,
            scale=fields.number("attention_multiplier", 1.0),
            window=window if kinds[layer] == WINDOWED else None,
            sink=True,
        )
        return BlockSpec(attention, feed_forward, residual_scale=fields.number("residual_multiplier", 1.0))

    return decoder(
        fields,
        block,
        tied=tied,
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1.0),
    )


def _read_granite(fields: Fields) -> Transformer:
    return _granite(fields, MLPSpec(bias=fields.flag("mlp_bias")), tied=True)


def _read_granite_moe(fields: Fields) -> Transformer:
    moe = MoESpec(
        num_experts=fields.whole("num_local_experts"),
        top_k=fields.whole("num_experts_per_tok"),
        shared_d_ff=fields.get("shared_intermediate_size") or None,
        balance_loss=fields.number("router_aux_loss_coef", 0.001),
    )
    return _granite(fields, moe, tied=False)


def _write(model: Transformer) -> dict[str, Any]:
    mixers = attentions_of(model)
    return (
        decoder_fields(model)
        | layer_types_of(model)
        | {
            "layer_rope_theta": [mixer.rope.theta if mixer.rope else 0 for mixer in mixers],
            "attention_bias": attention_of(model).bias == "all",
            "attention_multiplier": attention_of(model).scale,
            "residual_multiplier": model.blocks[0].residual_scale,
            "embedding_multiplier": model.embedding_scale,
            "logits_scaling": 1 / model.logit_scale,
        }
    )


def _write_granite(model: Transformer) -> dict[str, Any]:
    return _write(model) | {"mlp_bias": getattr(model.blocks[0].feed_forward, "bias", False)}


def _write_granite_moe(model: Transformer) -> dict[str, Any]:
    moe = moe_of(model)
    return _write(model) | {
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": moe.balance_loss,
        "shared_intermediate_size": moe.shared_d_ff or 0,
    }


def _read_flint(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", quantization_config=None)
    num_layers, window = fields.whole("num_hidden_layers"), fields.whole("sliding_window", 513)
    full = {0, 1, num_layers - 1} | set(range(1, num_layers, 4))
    kinds = fields.layer_types(num_layers, [FULL if y in full else WINDOWED for y in range(num_layers)])
    rope, bias = fields.rope(), "all" if fields.flag("attention_bias") else "none"
    dense, step = set(fields.get("mlp_only_layers", (0, 1))), fields.whole("decoder_sparse_step", 1)
    moe = MoESpec(
        num_experts=fields.whole("num_experts"),
        top_k=fields.whole("num_experts_per_tok"),
        d_ff=fields.whole("moe_intermediate_size"),
        normalize_top_k=fields.flag("norm_topk_prob", True),
        shared_d_ff=fields.whole("shared_expert_intermediate_size"),
        score="sigmoid",
        balance_loss=fields.number("router_aux_loss_coef", 0.0005),
    )

    def block(layer: int) -> BlockSpec:
        windowed = kinds[layer] == WINDOWED
        attention = AttentionSpec(
            # Full attention has no positions.
            rope=rope if windowed else None,
            bias=bias,
            qk_norm="head",
            window=window if windowed else None,
            sink=True,
        )
        return BlockSpec(attention, MLPSpec() if layer in dense or (layer + 1) % step else moe)

    return decoder(fields, block)


def _write_flint(model: Transformer) -> dict[str, Any]:
    feed_forwards = [block.feed_forward for block in model.blocks]
    fields = {
        "attention_bias": attention_of(model).bias == "all",
        "mlp_only_layers": [y for y, spec in enumerate(feed_forwards) if isinstance(spec, MLPSpec)],
        "decoder_sparse_step": 1,
    }
    if (moe := model.router) is not None:
        fields |= {
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.d_ff,
            "norm_topk_prob": moe.normalize_top_k,
            "shared_expert_intermediate_size": moe.shared_d_ff,
            "router_aux_loss_coef": moe.balance_loss,
        }
    else:
        # Sizes of a mixture that no layer has.
        fields |= dict.fromkeys(("num_experts", "num_experts_per_tok"), 2)
        fields |= dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 8)
    return decoder_fields(model) | layer_types_of(model) | fields


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


def _read_gpt_oss(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", attention_bias=True)
    # Fields of the first release, which repeat others.
    fields.ignore("experts_per_token", "initial_context_length")
    quantized = fields.get("quantization_config", {})
    if quantized and quantized.get("quant_method") != "mxfp4":
        raise UserError(f"config.json: quantization_config={quantized} is not supported, only mxfp4.")
    num_layers, rope = fields.whole("num_hidden_layers"), fields.rope(theta=150_000.0)
    kinds = fields.layer_types(num_layers, [FULL if y % 2 else WINDOWED for y in range(num_layers)])
    window = fields.whole("sliding_window", 128)
    moe = MoESpec(
        num_experts=fields.whole("num_local_experts", 128),
        top_k=fields.whole("num_experts_per_tok", 4),
        activation=ClampedSwiGLU(fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0)),
        bias=True,
        balance_loss=fields.number("router_aux_loss_coef", 0.9),
    )

    def block(layer: int) -> BlockSpec:
        layer_window = window if kinds[layer] == WINDOWED else None
        return BlockSpec(AttentionSpec(rope=rope, bias="all", sink=True, window=layer_window), moe)

    return decoder(fields, block)


def _write_gpt_oss(model: Transformer) -> dict[str, Any]:
    moe = moe_of(model)
    if not isinstance(moe.activation, ClampedSwiGLU):
        raise UserError(f"model.moe.activation={moe.activation}.")
    return (
        decoder_fields(model)
        | layer_types_of(model)
        | {
            "attention_bias": True,
            "num_local_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "swiglu_alpha": moe.activation.alpha,
            "swiglu_limit": moe.activation.limit,
            "router_aux_loss_coef": moe.balance_loss,
        }
    )


_LAYER = "model.layers.{y}"
SINKS = {"attention.sink_N": Tensor(f"{_LAYER}.self_attn.sinks", "N")}
"""Name of the sinks of a layer."""

_EXPERTS = {
    "mlp.router_DX": Tensor(f"{_LAYER}.block_sparse_moe.router.weight", "X D"),
    "mlp.gate_XDF": Tensor(f"{_LAYER}.block_sparse_moe.experts.gate_up_proj", "X 2F D", 0),
    "mlp.up_XDF": Tensor(f"{_LAYER}.block_sparse_moe.experts.gate_up_proj", "X 2F D", 1),
    "mlp.down_XFD": Tensor(f"{_LAYER}.block_sparse_moe.experts.down_proj", "X D F"),
}

_GPT_OSS: Names = {
    "mlp.router_DX": Tensor(f"{_LAYER}.mlp.router.weight", "X D"),
    "mlp.router_offset_X": Tensor(f"{_LAYER}.mlp.router.bias", "X"),
    # Gate and up alternate.
    "mlp.gate_XDF": Tensor(f"{_LAYER}.mlp.experts.gate_up_proj", "X D F2", 0),
    "mlp.up_XDF": Tensor(f"{_LAYER}.mlp.experts.gate_up_proj", "X D F2", 1),
    "mlp.gate_bias_XF": Tensor(f"{_LAYER}.mlp.experts.gate_up_proj_bias", "X F2", 0),
    "mlp.up_bias_XF": Tensor(f"{_LAYER}.mlp.experts.gate_up_proj_bias", "X F2", 1),
    "mlp.down_XFD": Tensor(f"{_LAYER}.mlp.experts.down_proj", "X F D"),
    "mlp.down_bias_XD": Tensor(f"{_LAYER}.mlp.experts.down_proj_bias", "X D"),
}

GPT_OSS = Family("gpt_oss", "GptOssForCausalLM", _read_gpt_oss, _write_gpt_oss, NAMES | SINKS | _GPT_OSS)
FLINT = Family(
    "flint",
    "FlintForCausalLM",
    _read_flint,
    _write_flint,
    NAMES
    | names_of_experts(shared="mlp.shared_expert")
    | {"attention.sink_N": Tensor(f"{_LAYER}.self_attn.softmax_offset", "N")},
)
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
GRANITE_SWA = Family("granite_swa", "GraniteSWAForCausalLM", _read_granite, _write_granite, NAMES | SINKS)
GRANITEMOE_SWA = Family(
    "granitemoe_swa",
    "GraniteMoeSWAForCausalLM",
    _read_granite_moe,
    _write_granite_moe,
    NAMES | SINKS | _EXPERTS,
)
