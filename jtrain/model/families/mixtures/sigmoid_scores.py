"""Further mixtures of experts: dots.llm1 (arXiv:2506.05767), MiniMax-M2, Solar Open and EXAONE MoE."""

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
)
from jtrain.model.families.family import Family, Tensor
from jtrain.model.families.mixtures.deepseek_experts import experts_in, experts_written, names_of_experts
from jtrain.model.mlp import MLPSpec
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer


def _read_dots1(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", quantization_config=None)
    num_layers, moe = fields.whole("num_hidden_layers"), experts_in(fields)
    bias, rope = "all" if fields.flag("attention_bias") else "none", fields.rope()
    dense, begin = fields.whole("first_k_dense_replace", 0), fields.whole("max_window_layers", 62)
    window = fields.get("sliding_window")
    default = [WINDOWED if window is not None and y >= begin else FULL for y in range(num_layers)]
    kinds = fields.layer_types(num_layers, default)

    def block(layer: int) -> BlockSpec:
        window_here = window if kinds[layer] == WINDOWED else None
        attention = AttentionSpec(rope=rope, bias=bias, qk_norm="head", window=window_here)
        return BlockSpec(attention, MLPSpec() if layer < dense else moe)

    return decoder(fields, block, first=dense)


def _write_dots1(model: Transformer) -> dict[str, Any]:
    bias = {"attention_bias": attention_of(model).bias == "all"}
    return decoder_fields(model) | layer_types_of(model) | experts_written(model) | bias


def _read_minimax_m2(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", quantization_config=None)
    fields.ignore("router_jitter_noise", "router_aux_loss_coef", "rotary_dim")
    # As published: what transformers' class always does, and layers that it does not load.
    fields.only(use_qk_norm=True, qk_norm_type="per_layer", use_routing_bias=True, scoring_func="sigmoid")
    fields.only(shared_intermediate_size=0)
    fields.ignore("use_mtp", "num_mtp_modules", "mtp_transformer_layers")
    share = fields.whole("rotary_dim", fields.whole("head_dim", 128)) / fields.whole("head_dim", 128)
    attention = AttentionSpec(rope=fields.rope(theta=5e6, share=share), qk_norm="all")
    moe = MoESpec(
        num_experts=fields.whole("num_local_experts"),
        top_k=fields.whole("num_experts_per_tok"),
        score="sigmoid",
        correction_bias=True,
        balance_loss=0.0,
    )
    return decoder(fields, lambda _: BlockSpec(attention, moe))


def _write_minimax_m2(model: Transformer) -> dict[str, Any]:
    moe = moe_of(model)
    return decoder_fields(model) | {
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
    }


_MINIMAX = "model.layers.{y}.block_sparse_moe"
_MINIMAX_NAMES = {
    "attention.q_norm.scale_NH": Tensor("model.layers.{y}.self_attn.q_norm.weight", "NH"),
    "mlp.router_DX": Tensor(f"{_MINIMAX}.gate.weight", "X D"),
    "mlp.router_bias_X": Tensor(f"{_MINIMAX}.e_score_correction_bias", "X"),
    "mlp.gate_XDF": Tensor(_MINIMAX + ".experts.{x}.w1.weight", "F D"),
    "mlp.up_XDF": Tensor(_MINIMAX + ".experts.{x}.w3.weight", "F D"),
    "mlp.down_XFD": Tensor(_MINIMAX + ".experts.{x}.w2.weight", "D F"),
}


def _read_solar(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", attention_bias=False, quantization_config=None)
    fields.ignore("intermediate_size", "first_k_dense_replace", "use_qk_norm")
    attention = AttentionSpec(rope=fields.rope(theta=1e6, share=1.0))
    moe = experts_in(fields, d_ff=None)
    return decoder(fields, lambda _: BlockSpec(attention, moe), d_ff="moe_intermediate_size")


def _write_solar(model: Transformer) -> dict[str, Any]:
    fields = decoder_fields(model, d_ff="moe_intermediate_size") | experts_written(model)
    return {key: value for key, value in fields.items() if key != "first_k_dense_replace"}


def _read_exaone_moe(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", quantization_config=None)
    num_layers, window = fields.whole("num_hidden_layers"), fields.get("sliding_window", 4096)
    period = fields.get("sliding_window_pattern", 4)
    default = [WINDOWED if (y + 1) % period else FULL for y in range(num_layers)]
    kinds, rope = fields.layer_types(num_layers, default), fields.rope()
    experts = fields.sparse_layers(num_layers, dense=fields.whole("first_k_dense_replace", 1))
    moe = MoESpec(
        num_experts=fields.whole("num_experts"),
        top_k=fields.whole("num_experts_per_tok"),
        d_ff=fields.whole("moe_intermediate_size"),
        normalize_top_k=fields.flag("norm_topk_prob", True),
        shared_experts=fields.whole("num_shared_experts", 1),
        score="sigmoid",
        correction_bias=True,
        num_groups=fields.whole("n_group", 1),
        top_groups=fields.whole("topk_group", 1),
        weight_scale=fields.number("routed_scaling_factor", 2.5),
        balance_loss=0.0,
    )

    def block(layer: int) -> BlockSpec:
        windowed = kinds[layer] == WINDOWED
        attention = AttentionSpec(
            rope=rope if windowed else None, qk_norm="head", window=window if windowed else None
        )
        return BlockSpec(attention, moe if experts[layer] else MLPSpec())

    return decoder(fields, block, first=experts.index(True))


def _write_exaone_moe(model: Transformer) -> dict[str, Any]:
    moe, fields = moe_of(model), experts_written(model)
    del fields["n_routed_experts"], fields["n_shared_experts"]
    return (
        decoder_fields(model)
        | layer_types_of(model)
        | fields
        | mlp_types_of(model)
        | {
            "num_experts": moe.num_experts,
            "num_shared_experts": moe.shared_experts,
        }
    )


DOTS1 = Family("dots1", "Dots1ForCausalLM", _read_dots1, _write_dots1, NAMES | names_of_experts())
MINIMAX_M2 = Family(
    "minimax_m2", "MiniMaxM2ForCausalLM", _read_minimax_m2, _write_minimax_m2, NAMES | _MINIMAX_NAMES
)
SOLAR_OPEN = Family(
    "solar_open", "SolarOpenForCausalLM", _read_solar, _write_solar, NAMES | names_of_experts()
)
EXAONE_MOE = Family(
    "exaone_moe",
    "ExaoneMoeForCausalLM",
    _read_exaone_moe,
    _write_exaone_moe,
    NAMES | names_of_experts("mlp.e_score_correction_bias"),
)
