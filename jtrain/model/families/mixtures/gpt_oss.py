"""gpt-oss (arXiv:2508.10925): attention sinks, windows in every second layer, and experts with biases."""

from typing import Any

from jtrain.errors import UserError
from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.families.config_fields import Fields
from jtrain.model.families.decoder import (
    FULL,
    NAMES,
    SINKS,
    WINDOWED,
    decoder,
    decoder_fields,
    layer_types_of,
    moe_of,
)
from jtrain.model.families.family import Family, Names, Tensor
from jtrain.model.mlp import ClampedSwiGLU
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer


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
