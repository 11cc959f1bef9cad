"""Flint: attention sinks, windows, and a mixture with shared experts and scores by sigmoid."""

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
from jtrain.model.families.mixtures.deepseek_experts import names_of_experts
from jtrain.model.mlp import MLPSpec
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer


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


_LAYER = "model.layers.{y}"

FLINT = Family(
    "flint",
    "FlintForCausalLM",
    _read_flint,
    _write_flint,
    NAMES
    | names_of_experts(shared="mlp.shared_expert")
    | {"attention.sink_N": Tensor(f"{_LAYER}.self_attn.softmax_offset", "N")},
)
