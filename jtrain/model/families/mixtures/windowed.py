"""Mixtures with windows or first dense layers: Trinity (AFMoE), Hunyuan 3, Kolibri, Laguna and Mellum 2."""

import dataclasses
from collections.abc import Callable
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
    mlp_types_of,
    moe_of,
    rope_fields,
)
from jtrain.model.families.family import Family, Names, Tensor
from jtrain.model.families.mixtures.deepseek_experts import names_of_experts
from jtrain.model.mlp import MLPSpec
from jtrain.model.rope import RopeSpec
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer


def _experts(fields: Fields, count: str = "num_experts", **changes: Any) -> MoESpec:
    """The mixture of a config.json with these common names; by default as in DeepSeek-V3."""
    fields.only(hidden_act="silu", quantization_config=None)
    arguments: dict[str, Any] = dict(
        num_experts=fields.whole(count),
        top_k=fields.whole("num_experts_per_tok"),
        d_ff=fields.whole("moe_intermediate_size"),
        score="sigmoid",
        correction_bias=True,
        balance_loss=0.0,
    )
    return MoESpec(**arguments | changes)


def _experts_written(model: Transformer, count: str = "num_experts") -> dict[str, Any]:
    moe = moe_of(model)
    return {
        count: moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.d_ff or model.d_ff,
    }


def _windowed(
    fields: Fields, period: int, attention: Callable[..., AttentionSpec], *, full_rope: bool = False
) -> list[AttentionSpec]:
    """Attention of each layer: one of `period` is full, without positions unless `full_rope`."""
    num_layers, rope = fields.whole("num_hidden_layers"), fields.rope()
    kinds = fields.layer_types(
        num_layers, [WINDOWED if (y + 1) % period else FULL for y in range(num_layers)]
    )
    windowed = attention(rope=rope, window=fields.whole("sliding_window"))
    full = attention(rope=rope if full_rope else None)
    return [windowed if kind == WINDOWED else full for kind in kinds]


def _read_afmoe(fields: Fields) -> Transformer:
    fields.only(attention_bias=False, n_group=1, topk_group=1, score_func="sigmoid", route_norm=True)
    fields.ignore("load_balance_coeff", "num_expert_groups", "num_limited_groups", "use_grouped_mm")
    mixers = _windowed(
        fields,
        fields.whole("global_attn_every_n_layers", 4),
        lambda **options: AttentionSpec(qk_norm="head", gate=True, **options),
    )
    moe = _experts(
        fields,
        shared_experts=fields.whole("num_shared_experts", 2),
        weight_scale=fields.number("route_scale", 1.0),
    )
    dense = fields.whole("num_dense_layers", 1)
    scale = fields.whole("hidden_size") ** 0.5 if fields.flag("mup_enabled") else 1.0
    return decoder(
        fields,
        lambda y: BlockSpec(mixers[y], moe if y >= dense else MLPSpec(), norms="sandwich"),
        first=dense,
        embedding_scale=scale,
    )


def _write_afmoe(model: Transformer) -> dict[str, Any]:
    moe, dense = moe_of(model), mlp_types_of(model)["mlp_layer_types"].index("sparse")
    return (
        decoder_fields(model)
        | layer_types_of(model)
        | _experts_written(model)
        | {
            "num_shared_experts": moe.shared_experts,
            "route_scale": moe.weight_scale,
            "num_dense_layers": dense,
            "mup_enabled": model.embedding_scale != 1,
        }
    )


def _read_hy_v3(fields: Fields) -> Transformer:
    fields.only(mlp_bias=False)
    fields.ignore("enable_moe_fp32_combine")  # of float32, as jtrain adds in every case
    attention = AttentionSpec(
        rope=fields.rope(theta=11_158_840.0),
        bias="all" if fields.flag("attention_bias") else "none",
        qk_norm="head",
    )
    sparse = fields.sparse_layers(fields.whole("num_hidden_layers"), dense=1)
    moe = _experts(
        fields,
        shared_experts=fields.whole("num_shared_experts", 1),
        weight_scale=fields.number("router_scaling_factor", 2.826),
    )
    return decoder(
        fields, lambda y: BlockSpec(attention, moe if sparse[y] else MLPSpec()), first=sparse.index(True)
    )


def _write_hy_v3(model: Transformer) -> dict[str, Any]:
    moe = moe_of(model)
    return (
        decoder_fields(model)
        | _experts_written(model)
        | mlp_types_of(model)
        | {
            "attention_bias": attention_of(model).bias == "all",
            "num_shared_experts": moe.shared_experts,
            "router_scaling_factor": moe.weight_scale,
        }
    )


def _read_kolibri(fields: Fields) -> Transformer:
    count = "num_experts" if fields.get("num_experts") is not None else "num_local_experts"
    mixers = _windowed(fields, 5, lambda **options: AttentionSpec(qk_norm="head", **options))
    moe = _experts(
        fields,
        count,
        normalize_top_k=fields.flag("norm_topk_prob"),
        shared_d_ff=fields.whole("shared_expert_intermediate_size", 512),
        chosen_by="logits",
    )
    return decoder(
        fields, lambda y: BlockSpec(mixers[y], moe, norms="sandwich"), d_ff="moe_intermediate_size"
    )


def _write_kolibri(model: Transformer) -> dict[str, Any]:
    moe = moe_of(model)
    return (
        decoder_fields(model, d_ff="moe_intermediate_size")
        | layer_types_of(model)
        | _experts_written(model)
        | {
            "norm_topk_prob": moe.normalize_top_k,
            "shared_expert_intermediate_size": moe.shared_d_ff
            or moe.shared_experts * (moe.d_ff or model.d_ff),
        }
    )


_DEFAULT_ROPES: dict[str, tuple[float, float]] = {FULL: (500_000.0, 0.5), WINDOWED: (10_000.0, 1.0)}
"""Base and rotated share of the layers of Laguna by their kind; Mellum rotates whole heads."""


def _two_ropes(
    fields: Fields, default: str, attention: Callable[..., AttentionSpec], *, partial: bool
) -> list[AttentionSpec]:
    """Attention of each layer, whose kinds have rotations of their own."""
    num_layers = fields.whole("num_hidden_layers")
    kinds = fields.layer_types(num_layers, [default] * num_layers)
    has_rope_parameters = fields.get("rope_parameters") is not None
    mixers: dict[str, AttentionSpec] = {}
    for kind in dict.fromkeys(kinds):
        theta, share = _DEFAULT_ROPES[kind]
        rope = fields.rope(
            theta=theta, kind=kind, share=share if partial and not has_rope_parameters else 1.0
        )
        window = fields.whole("sliding_window", 1024) if kind == WINDOWED else None
        mixers[kind] = attention(rope=rope, window=window)
    fields.ignore("sliding_window", "rope_theta")
    return [mixers[kind] for kind in kinds]


def two_ropes_written(model: Transformer) -> dict[str, Any]:
    """Fields of windows, and of a rotation for each kind of layer."""
    mixers = [block.mixer for block in model.blocks if isinstance(block.mixer, AttentionSpec)]
    ropes: dict[str, Any] = {}
    for mixer in mixers:
        written = rope_fields(mixer.rope or RopeSpec())
        ropes[FULL if mixer.window is None else WINDOWED] = {
            "rope_type": "default",
            **(written.pop("rope_scaling") or {}),
            **written,
        }
    return layer_types_of(model) | {"rope_parameters": ropes, "rope_theta": None, "rope_scaling": None}


def _read_laguna(fields: Fields) -> Transformer:
    fields.only(moe_apply_router_weight_on_input=False, moe_router_logit_softcapping=0)
    fields.ignore("router_aux_loss_coef")
    bias: Any = "all" if fields.flag("attention_bias") else "none"
    per_head = fields.get("gating", True) in (True, "per-head")

    def attention(**options: Any) -> AttentionSpec:
        gate: Any = dict(gate=True, gate_activation="softplus", gate_per_head=per_head)
        return AttentionSpec(bias=bias, qk_norm="head", **gate, **options)

    mixers = _two_ropes(fields, FULL, attention, partial=True)
    num_layers, num_heads = len(mixers), fields.whole("num_attention_heads")
    heads = fields.get("num_attention_heads_per_layer", [num_heads] * num_layers)
    sparse = fields.sparse_layers(num_layers, dense=1)
    moe = _experts(
        fields,
        shared_d_ff=fields.whole("shared_expert_intermediate_size", 512),
        weight_scale=fields.number("moe_routed_scaling_factor", 1.0),
    )
    return decoder(
        fields,
        lambda y: BlockSpec(_with_heads(mixers[y], heads[y], num_heads), moe if sparse[y] else MLPSpec()),
        first=sparse.index(True),
    )


def _with_heads(mixer: AttentionSpec, count: int, usual: int) -> AttentionSpec:
    return mixer if count == usual else dataclasses.replace(mixer, num_heads=count)


def _write_laguna(model: Transformer) -> dict[str, Any]:
    moe, attention = moe_of(model), attention_of(model)
    mixers = [block.mixer for block in model.blocks if isinstance(block.mixer, AttentionSpec)]
    return (
        decoder_fields(model)
        | two_ropes_written(model)
        | _experts_written(model)
        | mlp_types_of(model)
        | {
            "num_attention_heads_per_layer": [mixer.num_heads or model.num_heads for mixer in mixers],
            "attention_bias": attention.bias == "all",
            "gating": "per-head" if attention.gate_per_head else "per-element",
            "shared_expert_intermediate_size": moe.shared_d_ff
            or moe.shared_experts * (moe.d_ff or model.d_ff),
            "moe_routed_scaling_factor": moe.weight_scale,
        }
    )


def _read_mellum(fields: Fields) -> Transformer:
    fields.ignore("num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types")
    bias: Any = "all" if fields.flag("attention_bias") else "none"
    mixers = _two_ropes(
        fields, FULL, lambda **options: AttentionSpec(bias=bias, qk_norm="head", **options), partial=False
    )
    count = "num_experts" if fields.get("num_experts") is not None else "num_local_experts"
    moe = _experts(
        fields,
        count,
        normalize_top_k=fields.flag("norm_topk_prob", True),
        score="softmax",
        correction_bias=False,
        balance_loss=fields.number("router_aux_loss_coef", 0.001),
    )
    sparse = fields.sparse_layers(len(mixers), dense=0)
    return decoder(
        fields,
        lambda y: BlockSpec(mixers[y], moe if sparse[y] else MLPSpec()),
        first=sparse.index(True),
    )


def _write_mellum(model: Transformer) -> dict[str, Any]:
    moe = moe_of(model)
    return (
        decoder_fields(model)
        | two_ropes_written(model)
        | _experts_written(model, "num_local_experts")
        | mlp_types_of(model)
        | {
            "attention_bias": attention_of(model).bias == "all",
            "norm_topk_prob": moe.normalize_top_k,
            "router_aux_loss_coef": moe.balance_loss,
        }
    )


_LAYER = "model.layers.{y}"
_AFMOE: Names = {
    "attention.gate_DNH": Tensor(f"{_LAYER}.self_attn.gate_proj.weight", "NH D"),
    "attention_post_norm.scale_D": Tensor(f"{_LAYER}.post_attention_layernorm.weight", "D"),
    "mlp_norm.scale_D": Tensor(f"{_LAYER}.pre_mlp_layernorm.weight", "D"),
    "mlp_post_norm.scale_D": Tensor(f"{_LAYER}.post_mlp_layernorm.weight", "D"),
    "mlp.router_DX": Tensor(f"{_LAYER}.mlp.router.gate.weight", "X D"),
}
_KOLIBRI: Names = {
    "attention_post_norm.scale_D": Tensor(f"{_LAYER}.post_attn_norm.weight", "D"),
    "mlp_post_norm.scale_D": Tensor(f"{_LAYER}.post_ffn_norm.weight", "D"),
}
_LAGUNA: Names = {
    "attention.gate_DN": Tensor(f"{_LAYER}.self_attn.g_proj.weight", "N D"),
    "attention.gate_DNH": Tensor(f"{_LAYER}.self_attn.g_proj.weight", "NH D"),
}

AFMOE = Family(
    "afmoe",
    "AfmoeForCausalLM",
    _read_afmoe,
    _write_afmoe,
    NAMES | names_of_experts("mlp.expert_bias") | _AFMOE,
)
HY_V3 = Family(
    "hy_v3",
    "HYV3ForCausalLM",
    _read_hy_v3,
    _write_hy_v3,
    NAMES
    | names_of_experts("mlp.expert_bias", "mlp.shared_mlp")
    | {"mlp.router_DX": _AFMOE["mlp.router_DX"]},
)
KOLIBRI = Family(
    "kolibri1",
    "Kolibri1ForCausalLM",
    _read_kolibri,
    _write_kolibri,
    NAMES | names_of_experts("moe.router.expert_bias") | _KOLIBRI,
)
LAGUNA = Family(
    "laguna",
    "LagunaForCausalLM",
    _read_laguna,
    _write_laguna,
    NAMES | names_of_experts("mlp.experts.e_score_correction_bias", "mlp.shared_expert") | _LAGUNA,
)
MELLUM = Family("mellum", "MellumForCausalLM", _read_mellum, _write_mellum, NAMES)
