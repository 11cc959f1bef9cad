"""Qwen2 and 2.5 (arXiv:2407.10671), Qwen3 and its mixtures (arXiv:2505.09388)."""

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
    decoder,
    decoder_fields,
    layer_types_of,
    moe_of,
)
from jtrain.model.families.family import Family, Names, Tensor
from jtrain.model.mlp import MLPSpec
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer


def _windows(fields: Fields) -> list[int | None]:
    """Window of each layer: in use only if config.json says so, from layer `max_window_layers` on."""
    num_layers, window = fields.whole("num_hidden_layers"), fields.get("sliding_window", 4096)
    begin, in_use = fields.get("max_window_layers", 28), fields.flag("use_sliding_window")
    begin = begin if in_use else num_layers
    kinds = fields.layer_types(num_layers, [WINDOWED if y >= begin else FULL for y in range(num_layers)])
    return [window if kind == WINDOWED else None for kind in kinds]


def _window_fields(model: Transformer) -> dict[str, Any]:
    fields = layer_types_of(model)
    if (window := fields["sliding_window"]) is None:
        return {"use_sliding_window": False, "sliding_window": None}
    begin = fields["layer_types"].index(WINDOWED)
    return fields | {"use_sliding_window": True, "sliding_window": window, "max_window_layers": begin}


def _read_qwen2(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", quantization_config=None)
    rope, windows = fields.rope(), _windows(fields)
    return decoder(fields, lambda y: BlockSpec(AttentionSpec(rope=rope, bias="qkv", window=windows[y])))


def _read_qwen3(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", quantization_config=None)
    rope, windows, bias = fields.rope(), _windows(fields), "all" if fields.flag("attention_bias") else "none"
    # transformers' defaults belong to one size of model.
    fields.whole("num_key_value_heads")
    fields.whole("head_dim")
    return decoder(
        fields, lambda y: BlockSpec(AttentionSpec(rope=rope, bias=bias, qk_norm="head", window=windows[y]))
    )


def num_experts(fields: Fields) -> int:
    """Reads `num_experts` (transformers 4) or `num_local_experts` (5), which are one setting."""
    keys = [key for key in ("num_experts", "num_local_experts") if fields.get(key) is not None] or [
        "num_experts"
    ]
    counts = [fields.whole(key) for key in keys]
    if len(set(counts)) > 1:
        raise UserError(
            f"config.json: num_experts={counts[0]} but num_local_experts={counts[1]}. transformers 4 reads "
            "the first and transformers 5 the second, as one setting. Delete the wrong one from config.json."
        )
    return counts[0]


def experts_by_layer(fields: Fields) -> list[bool]:
    """True for each layer with a mixture of experts."""
    dense, step = set(fields.get("mlp_only_layers", ())), fields.whole("decoder_sparse_step", 1)
    return [y not in dense and (y + 1) % step == 0 for y in range(fields.whole("num_hidden_layers"))]


def _read_qwen3_moe(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", quantization_config=None)
    rope, windows, bias = fields.rope(), _windows(fields), "all" if fields.flag("attention_bias") else "none"
    fields.whole("num_key_value_heads")
    fields.whole("head_dim")
    moe = MoESpec(
        num_experts=num_experts(fields),
        top_k=fields.whole("num_experts_per_tok"),
        normalize_top_k=fields.flag("norm_topk_prob"),
        # That of transformers is computed over a batch instead of a sequence, and is top_k times larger.
        balance_loss=fields.number("router_aux_loss_coef", 0.001),
    )
    experts = experts_by_layer(fields)
    dense_layer = MLPSpec(d_ff=fields.get("intermediate_size"))
    return decoder(
        fields,
        lambda y: BlockSpec(
            AttentionSpec(rope=rope, bias=bias, qk_norm="head", window=windows[y]),
            moe if experts[y] else dense_layer,
        ),
        d_ff="moe_intermediate_size",
    )


def _write_qwen3_moe(model: Transformer) -> dict[str, Any]:
    moe = moe_of(model)
    dense = [y for y, block in enumerate(model.blocks) if isinstance(block.feed_forward, MLPSpec)]
    widths = [b.feed_forward.d_ff for b in model.blocks if isinstance(b.feed_forward, MLPSpec)]
    return (
        decoder_fields(model, d_ff="moe_intermediate_size")
        | _window_fields(model)
        | {
            "attention_bias": attention_of(model).bias == "all",
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "norm_topk_prob": moe.normalize_top_k,
            "router_aux_loss_coef": moe.balance_loss,
            "decoder_sparse_step": 1,
            "mlp_only_layers": dense,
            "intermediate_size": next(iter(widths), None) or model.d_ff,
        }
    )


def _read_qwen2_moe(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", quantization_config=None)
    num_layers, window = fields.whole("num_hidden_layers"), fields.get("sliding_window", 4096)
    begin = fields.get("max_window_layers", 28)
    begin = begin if fields.flag("use_sliding_window") else 0
    default = [WINDOWED if y < begin and y % 2 == 0 else FULL for y in range(num_layers)]
    kinds, rope = fields.layer_types(num_layers, default), fields.rope()
    moe = MoESpec(
        num_experts=fields.whole("num_experts", 60),
        top_k=fields.whole("num_experts_per_tok", 4),
        normalize_top_k=fields.flag("norm_topk_prob"),
        shared_d_ff=fields.whole("shared_expert_intermediate_size", 5632),
        shared_gate=True,
        balance_loss=fields.number("router_aux_loss_coef", 0.001),
    )
    dense, step = set(fields.get("mlp_only_layers", ())), fields.whole("decoder_sparse_step", 1)
    mlp, bias = MLPSpec(d_ff=fields.get("intermediate_size")), fields.flag("qkv_bias", True)

    def block(layer: int) -> BlockSpec:
        attention = AttentionSpec(
            rope=rope, bias="qkv" if bias else "none", window=window if kinds[layer] == WINDOWED else None
        )
        return BlockSpec(attention, moe if layer not in dense and (layer + 1) % step == 0 else mlp)

    return decoder(fields, block, d_ff="moe_intermediate_size")


def _write_qwen2_moe(model: Transformer) -> dict[str, Any]:
    moe, fields = moe_of(model), _write_qwen3_moe(model)
    del fields["attention_bias"]
    shared = moe.shared_d_ff or moe.shared_experts * (moe.d_ff or model.d_ff)
    qkv_bias = attention_of(model).bias == "qkv"
    return fields | {"qkv_bias": qkv_bias, "shared_expert_intermediate_size": shared}


_SHARED: Names = {
    "mlp.shared.gate_DF": Tensor("model.layers.{y}.mlp.shared_expert.gate_proj.weight", "F D"),
    "mlp.shared.up_DF": Tensor("model.layers.{y}.mlp.shared_expert.up_proj.weight", "F D"),
    "mlp.shared.down_FD": Tensor("model.layers.{y}.mlp.shared_expert.down_proj.weight", "D F"),
    "mlp.shared_gate_D": Tensor("model.layers.{y}.mlp.shared_expert_gate.weight", "1 D"),
}

QWEN2 = Family(
    "qwen2", "Qwen2ForCausalLM", _read_qwen2, lambda m: decoder_fields(m) | _window_fields(m), NAMES
)
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    _read_qwen3,
    lambda m: decoder_fields(m) | _window_fields(m) | {"attention_bias": attention_of(m).bias == "all"},
    NAMES,
)
QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", _read_qwen3_moe, _write_qwen3_moe, NAMES)
QWEN2_MOE = Family("qwen2_moe", "Qwen2MoeForCausalLM", _read_qwen2_moe, _write_qwen2_moe, NAMES | _SHARED)
