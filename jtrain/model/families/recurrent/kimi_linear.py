"""Kimi Linear (arXiv:2510.26692) and Ling 3: Kimi Delta Attention, and latent attention without positions or
gated.
"""

import dataclasses
from typing import Any

from jtrain.errors import UserError
from jtrain.model.block import BlockSpec
from jtrain.model.families.config_fields import Fields
from jtrain.model.families.decoder import FULL, NAMES, decoder, mixer_of, mlp_types_of, moe_of, renamed
from jtrain.model.families.family import Family, Names, Tensor
from jtrain.model.families.latent.deepseek import heads_of_keys, latent_fields, latent_in, latent_names
from jtrain.model.families.mixtures.deepseek_experts import names_of_experts
from jtrain.model.families.recurrent.delta_nets import LINEAR, names_of_delta
from jtrain.model.latent_attention import LatentAttentionSpec
from jtrain.model.mlp import MLPSpec
from jtrain.model.recurrent.delta_net import DeltaNetSpec
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer

_IGNORED = ("qk_head_dim", "use_grouped_topk", "num_mtp_layers", "num_nextn_predict_layers")


def _kinds(fields: Fields, full: list[int], dense: int) -> list[tuple[str, str]]:
    """Mixer and feed-forward layer of each layer: from lists, or of the layers with full attention."""
    num_layers = fields.whole("num_hidden_layers")
    mixers = fields.layer_types(num_layers, [FULL if y in full else LINEAR for y in range(num_layers)])
    default = ["dense" if y < dense else "sparse" for y in range(num_layers)]
    return list(zip(mixers, fields.layer_types(num_layers, default, key="mlp_layer_types"), strict=True))


def _moe(fields: Fields, **defaults: Any) -> MoESpec:
    return MoESpec(
        num_experts=fields.whole("num_experts", defaults["experts"]),
        top_k=fields.whole("num_experts_per_token", 8),
        d_ff=fields.whole("moe_intermediate_size", defaults["width"]),
        normalize_top_k=fields.flag("moe_renormalize", True),
        shared_experts=fields.whole("num_shared_experts", 1),
        score="sigmoid",
        correction_bias=True,
        num_groups=fields.whole("num_expert_group", defaults["groups"]),
        top_groups=fields.whole("topk_group", defaults["top_groups"]),
        weight_scale=fields.number("routed_scaling_factor", defaults["scale"]),
        # Its load is balanced by the correction bias.
        balance_loss=0.0,
    )


def _build(
    fields: Fields,
    kinds: list[tuple[str, str]],
    latent: LatentAttentionSpec,
    delta: DeltaNetSpec,
    moe: MoESpec,
) -> Transformer:
    mixers, feed_forwards = {FULL: latent, LINEAR: delta}, {"dense": MLPSpec(), "sparse": moe}
    return decoder(
        fields,
        lambda y: BlockSpec(mixers[kinds[y][0]], feed_forwards[kinds[y][1]]),
        first=[kind for _, kind in kinds].index("sparse"),
        **heads_of_keys(fields, latent),
    )


def _read_kimi(fields: Fields) -> Transformer:
    fields.only(moe_router_activation_func="sigmoid", mla_use_nope=True, moe_layer_freq=1)
    fields.ignore(*_IGNORED)
    # The published form counts layers from 1.
    linear: dict[str, Any] = fields.get("linear_attn_config", {})
    heads = linear.get("num_heads") or fields.whole("linear_num_heads", 32)
    size = linear.get("head_dim") or fields.whole("linear_head_dim", 128)
    taps = linear.get("short_conv_kernel_size") or fields.whole("linear_conv_kernel_dim", 4)
    kda = DeltaNetSpec(heads, heads, size, size, taps, decay="channel", rank=size, gate="sigmoid")
    full = [y - 1 for y in linear.get("full_attn_layers", range(4, fields.whole("num_hidden_layers"), 4))]
    kinds = _kinds(fields, full, fields.whole("first_k_dense_replace", 1))
    latent = dataclasses.replace(latent_in(fields), rope=None)
    moe = _moe(fields, experts=256, width=1024, groups=1, top_groups=1, scale=2.446)
    return _build(fields, kinds, latent, kda, moe)


def _write(model: Transformer) -> dict[str, Any]:
    delta, moe = mixer_of(model, DeltaNetSpec), moe_of(model)
    if delta.decay != "channel":
        raise UserError("a model without Kimi Delta Attention.")
    mixers = [FULL if isinstance(block.mixer, LatentAttentionSpec) else LINEAR for block in model.blocks]
    return (
        latent_fields(model)
        | mlp_types_of(model)
        | {
            "layer_types": mixers,
            "linear_num_heads": delta.num_heads,
            "linear_head_dim": delta.key_dim,
            "linear_conv_kernel_dim": delta.taps,
            "num_experts": moe.num_experts,
            "num_experts_per_token": moe.top_k,
            "moe_intermediate_size": moe.d_ff or model.d_ff,
            "moe_renormalize": moe.normalize_top_k,
            "num_shared_experts": moe.shared_experts,
            "num_expert_group": moe.num_groups,
            "topk_group": moe.top_groups,
            "routed_scaling_factor": moe.weight_scale,
        }
    )


def _read_ling(fields: Fields) -> Transformer:
    fields.ignore(*_IGNORED, "mtp_loss_scaling_factor")
    heads = fields.whole("linear_num_heads", fields.whole("num_attention_heads"))
    size = fields.whole("linear_head_dim", fields.whole("head_dim", 128))
    taps = fields.whole("linear_conv_kernel_dim", fields.whole("short_conv_kernel_size", 4))
    floor = fields.number("kda_lower_bound", -5.0) if fields.flag("kda_safe_gate", True) else None
    delta = DeltaNetSpec(heads, heads, size, size, taps, decay="channel", decay_floor=floor, gate="sigmoid")
    period, num_layers = fields.whole("layer_group_size", 6), fields.whole("num_hidden_layers")
    full = list(range(period - 1, num_layers, period))
    kinds = _kinds(fields, full, fields.whole("first_k_dense_replace", 2))
    latent = latent_in(fields, theta=6e6, gate=True)
    moe = _moe(fields, experts=512, width=768, groups=8, top_groups=4, scale=2.5)
    return _build(fields, kinds, latent, delta, moe)


def _write_ling(model: Transformer) -> dict[str, Any]:
    floor = mixer_of(model, DeltaNetSpec).decay_floor
    safe = {"kda_safe_gate": floor is not None, "kda_lower_bound": -5.0 if floor is None else floor}
    fields = _write(model) | safe
    return {key: value for key, value in fields.items() if key != "q_lora_rank"}


_MOE = "model.layers.{y}.block_sparse_moe"
_DELTA: dict[str, tuple[Any, ...]] = dict(
    q_DOS=("q_proj.weight", "OS D"),
    k_DOS=("k_proj.weight", "OS D"),
    v_DAH=("v_proj.weight", "AH D"),
    step_DA=("b_proj.weight", "A D"),
    decay_bias_AS=("dt_bias", "AS"),
    q_conv__taps_OSW=("q_conv1d.weight", "OS 1 W"),
    k_conv__taps_OSW=("k_conv1d.weight", "OS 1 W"),
    v_conv__taps_AHW=("v_conv1d.weight", "AH 1 W"),
    norm__scale_H=("o_norm.weight", "H"),
)
_KIMI: Names = {
    **latent_names(interleaved=False),
    "mlp.router_DX": Tensor(f"{_MOE}.gate.weight", "X D"),
    "mlp.gate_XDF": Tensor(_MOE + ".experts.{x}.w1.weight", "F D"),
    "mlp.up_XDF": Tensor(_MOE + ".experts.{x}.w3.weight", "F D"),
    "mlp.down_XFD": Tensor(_MOE + ".experts.{x}.w2.weight", "D F"),
    **names_of_experts("block_sparse_moe.gate.e_score_correction_bias", "block_sparse_moe.shared_experts"),
    **names_of_delta(
        "self_attn",
        **_DELTA,
        gate_in_DR=("g_a_proj.weight", "R D"),
        gate_out_RAH=("g_b_proj.weight", "AH R"),
        decay_in_DR=("f_a_proj.weight", "R D"),
        decay_out_RAS=("f_b_proj.weight", "AS R"),
        decay_log_A=("A_log", "1 1 A 1"),
        o_AHD=("o_proj.weight", "D AH"),
    ),
}
_LING: Names = {
    **renamed(NAMES, embed_tokens="word_embeddings"),
    **renamed(latent_names(), self_attn="attention", o_proj="dense"),
    "attention.gate_DN": Tensor("model.layers.{y}.attention.g_proj.weight", "N D"),
    **names_of_experts("mlp.gate.expert_bias"),
    **names_of_delta(
        "attention",
        **_DELTA,
        gate_DAH=("g_proj.weight", "AH D"),
        decay_DAS=("f_proj.weight", "AS D"),
        o_AHD=("dense.weight", "D AH"),
    ),
}
KIMI_LINEAR = Family("kimi_linear", "KimiLinearForCausalLM", _read_kimi, _write, NAMES | _KIMI)
LING = Family("bailing_hybrid", "BailingHybridForCausalLM", _read_ling, _write_ling, _LING)
