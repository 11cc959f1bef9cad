"""Kimi Linear (arXiv:2510.26692): Kimi Delta Attention, and latent attention without positions."""

from typing import Any

from jtrain.errors import UserError
from jtrain.model.block import BlockSpec
from jtrain.model.families.config_fields import Fields
from jtrain.model.families.decoder import FULL, NAMES, decoder, fields_without_attention, mixer_of, moe_of
from jtrain.model.families.deepseek_experts import names_of_experts
from jtrain.model.families.delta_nets import LINEAR, names_of_delta
from jtrain.model.families.family import Family, Names, Tensor
from jtrain.model.latent_attention import LatentAttentionSpec
from jtrain.model.mlp import MLPSpec
from jtrain.model.recurrent.delta_net import DeltaNetSpec
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer

_IGNORED = ("rope_theta", "rope_scaling", "rope_parameters", "qk_head_dim", "use_grouped_topk")


def _kinds(fields: Fields, linear: dict[str, Any]) -> list[tuple[str, str]]:
    """Mixer and feed-forward layer of each layer, from lists or from the published form, which counts from 1."""
    num_layers, dense = fields.whole("num_hidden_layers"), fields.whole("first_k_dense_replace", 1)
    full = linear.get("full_attn_layers", [y + 1 for y in range(4, num_layers, 4)])
    mixers = fields.layer_types(num_layers, [FULL if y + 1 in full else LINEAR for y in range(num_layers)])
    default = ["dense" if y < dense else "sparse" for y in range(num_layers)]
    return list(zip(mixers, fields.layer_types(num_layers, default, key="mlp_layer_types"), strict=True))


def _read(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", attention_bias=False, pretraining_tp=1, quantization_config=None)
    fields.only(moe_router_activation_func="sigmoid", mla_use_nope=True, moe_layer_freq=1)
    fields.only(num_nextn_predict_layers=0)
    fields.ignore(*_IGNORED)
    linear = fields.get("linear_attn_config", {})
    heads = linear.get("num_heads") or fields.whole("linear_num_heads", 32)
    size = linear.get("head_dim") or fields.whole("linear_head_dim", 128)
    taps = linear.get("short_conv_kernel_size") or fields.whole("linear_conv_kernel_dim", 4)
    kda = DeltaNetSpec(heads, heads, size, size, taps, decay="channel", rank=size, gate="sigmoid")
    latent = LatentAttentionSpec(
        kv_rank=fields.whole("kv_lora_rank", 512),
        q_rank=fields.get("q_lora_rank"),
        nope_head_dim=fields.whole("qk_nope_head_dim", 128),
        rope_head_dim=fields.whole("qk_rope_head_dim", 64),
        value_head_dim=fields.whole("v_head_dim", 128),
        rope=None,
    )
    moe = MoESpec(
        num_experts=fields.whole("num_experts", 256),
        top_k=fields.whole("num_experts_per_token", 8),
        d_ff=fields.whole("moe_intermediate_size", 1024),
        normalize_top_k=fields.flag("moe_renormalize", True),
        shared_experts=fields.whole("num_shared_experts", 1),
        score="sigmoid",
        correction_bias=True,
        num_groups=fields.whole("num_expert_group", 1),
        top_groups=fields.whole("topk_group", 1),
        weight_scale=fields.number("routed_scaling_factor", 2.446),
        # Its load is balanced by the correction bias.
        balance_loss=0.0,
    )
    kinds, num_heads = _kinds(fields, linear), fields.whole("num_attention_heads")
    fields.only(num_key_value_heads=num_heads)
    mixers, feed_forwards = {FULL: latent, LINEAR: kda}, {"dense": MLPSpec(), "sparse": moe}
    return decoder(
        fields,
        lambda y: BlockSpec(mixers[kinds[y][0]], feed_forwards[kinds[y][1]]),
        first=[kind for _, kind in kinds].index("sparse"),
        num_kv_heads=num_heads,
        head_dim=latent.head_dim,
    )


def _write(model: Transformer) -> dict[str, Any]:
    kda, latent, moe = mixer_of(model, DeltaNetSpec), mixer_of(model, LatentAttentionSpec), moe_of(model)
    if kda.decay != "channel":
        raise UserError("a model without Kimi Delta Attention.")
    dense = [isinstance(block.feed_forward, MLPSpec) for block in model.blocks]
    num_heads = latent.num_heads or model.num_heads
    return fields_without_attention(model) | {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "layer_types": [FULL if isinstance(b.mixer, LatentAttentionSpec) else LINEAR for b in model.blocks],
        "mlp_layer_types": ["dense" if is_dense else "sparse" for is_dense in dense],
        "linear_num_heads": kda.num_heads,
        "linear_head_dim": kda.key_dim,
        "linear_conv_kernel_dim": kda.taps,
        "kv_lora_rank": latent.kv_rank,
        "q_lora_rank": latent.q_rank,
        "qk_nope_head_dim": latent.nope_head_dim,
        "qk_rope_head_dim": latent.rope_head_dim,
        "v_head_dim": latent.value_head_dim,
        "num_experts": moe.num_experts,
        "num_experts_per_token": moe.top_k,
        "moe_intermediate_size": moe.d_ff or model.d_ff,
        "moe_renormalize": moe.normalize_top_k,
        "num_shared_experts": moe.shared_experts,
        "num_expert_group": moe.num_groups,
        "topk_group": moe.top_groups,
        "routed_scaling_factor": moe.weight_scale,
    }


_MIXER, _MOE = "model.layers.{y}.self_attn", "model.layers.{y}.block_sparse_moe"
_NAMES: Names = {
    "attention.q_DNH": Tensor(f"{_MIXER}.q_proj.weight", "NH D"),
    "attention.q_DQ": Tensor(f"{_MIXER}.q_a_proj.weight", "Q D"),
    "attention.q_norm.scale_Q": Tensor(f"{_MIXER}.q_a_layernorm.weight", "Q"),
    "attention.q_QNH": Tensor(f"{_MIXER}.q_b_proj.weight", "NH Q"),
    "attention.kv_DC": Tensor(f"{_MIXER}.kv_a_proj_with_mqa.weight", "C+U D", 0),
    "attention.k_DU": Tensor(f"{_MIXER}.kv_a_proj_with_mqa.weight", "C+U D", 1),
    "attention.kv_norm.scale_C": Tensor(f"{_MIXER}.kv_a_layernorm.weight", "C"),
    "attention.kv_CNE": Tensor(f"{_MIXER}.kv_b_proj.weight", "NE C"),
    "attention.o_NPD": Tensor(f"{_MIXER}.o_proj.weight", "D NP"),
    "mlp.router_DX": Tensor(f"{_MOE}.gate.weight", "X D"),
    "mlp.gate_XDF": Tensor(_MOE + ".experts.{x}.w1.weight", "F D"),
    "mlp.up_XDF": Tensor(_MOE + ".experts.{x}.w3.weight", "F D"),
    "mlp.down_XFD": Tensor(_MOE + ".experts.{x}.w2.weight", "D F"),
    **names_of_experts("block_sparse_moe.gate.e_score_correction_bias", "block_sparse_moe.shared_experts"),
    **names_of_delta(
        "self_attn",
        q_DOS=("q_proj.weight", "OS D"),
        k_DOS=("k_proj.weight", "OS D"),
        v_DAH=("v_proj.weight", "AH D"),
        step_DA=("b_proj.weight", "A D"),
        gate_in_DR=("g_a_proj.weight", "R D"),
        gate_out_RAH=("g_b_proj.weight", "AH R"),
        decay_in_DR=("f_a_proj.weight", "R D"),
        decay_out_RAS=("f_b_proj.weight", "AS R"),
        decay_log_A=("A_log", "1 1 A 1"),
        decay_bias_AS=("dt_bias", "AS"),
        q_conv__taps_OSW=("q_conv1d.weight", "OS 1 W"),
        k_conv__taps_OSW=("k_conv1d.weight", "OS 1 W"),
        v_conv__taps_AHW=("v_conv1d.weight", "AH 1 W"),
        norm__scale_H=("o_norm.weight", "H"),
        o_AHD=("o_proj.weight", "D AH"),
    ),
}
KIMI_LINEAR = Family("kimi_linear", "KimiLinearForCausalLM", _read, _write, NAMES | _NAMES)
