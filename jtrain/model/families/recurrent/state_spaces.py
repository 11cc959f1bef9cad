"""Decoders of Mamba-2 and attention: Mamba-2, Bamba and Granite 4."""

import math
from typing import Any

from jtrain.errors import UserError
from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.families.config_fields import Fields
from jtrain.model.families.decoder import (
    FULL,
    NAMES,
    decoder,
    decoder_fields,
    mixer_of,
    renamed,
)
from jtrain.model.families.family import Family, Names, Tensor
from jtrain.model.families.recurrent.delta_nets import LINEAR, attentions_or_none, kinds_of
from jtrain.model.mlp import MLPSpec
from jtrain.model.recurrent.mamba2 import Mamba2Spec
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer


def mamba_in(fields: Fields, *, heads: int, groups: int, state: int) -> Mamba2Spec:
    """The mixer that fields with the prefix `mamba_` describe."""
    fields.ignore("mamba_chunk_size", "use_mamba_kernels", "num_logits_to_keep", "mamba_ssm_cache_dtype")
    num_heads = fields.whole("mamba_n_heads", heads)
    width = fields.get("mamba_d_ssm") or fields.whole("mamba_expand", 2) * fields.whole("hidden_size")
    head_dim = fields.get("mamba_d_head", "auto")
    fields.whole("mamba_expand", 2)
    return Mamba2Spec(
        num_heads,
        width // num_heads if head_dim == "auto" else head_dim,
        fields.whole("mamba_d_state", state),
        fields.whole("mamba_n_groups", groups),
        taps=fields.whole("mamba_d_conv", 4),
        conv_bias=fields.flag("mamba_conv_bias", True),
        bias=fields.flag("mamba_proj_bias"),
        min_step=_min_step(fields),
    )


def _min_step(fields: Fields) -> float:
    low, high = fields.numbers("time_step_limit", (0.0, math.inf))
    if high != math.inf:
        raise UserError(
            f"config.json: time_step_limit=({low}, {high}) has an upper limit, which is not supported."
        )
    return low


_INFINITY = {"__float__": "Infinity"}
"""Infinity, which JSON does not have, as transformers writes it."""


def mamba_fields(spec: Mamba2Spec, d_model: int) -> dict[str, Any]:
    """Fields that `mamba_in` reads."""
    return {
        "mamba_n_heads": spec.num_heads,
        "mamba_d_head": spec.head_dim,
        "mamba_d_state": spec.state_size,
        "mamba_n_groups": spec.num_groups,
        "mamba_d_conv": spec.taps,
        "mamba_conv_bias": spec.conv_bias,
        "mamba_proj_bias": spec.bias,
        "mamba_expand": spec.num_heads * spec.head_dim // d_model,
        "time_step_limit": [spec.min_step, _INFINITY],
    }


def _read_bamba(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", attention_bias=False, mlp_bias=False, quantization_config=None)
    fields.ignore("z_loss_coefficient")
    mamba = mamba_in(fields, heads=128, groups=1, state=256)
    attention = AttentionSpec(rope=fields.rope(share=0.5))
    with_attention = fields.get("attn_layer_indices", ())
    return decoder(fields, lambda y: BlockSpec(attention if y in with_attention else mamba))


def _write_bamba(model: Transformer) -> dict[str, Any]:
    with_attention = [y for y, kind in enumerate(kinds_of(model)) if kind == FULL]
    extra_fields = {"attn_layer_indices": with_attention, "partial_rotary_factor": 0.5}
    return (
        decoder_fields(model, attentions=attentions_or_none(model))
        | mamba_fields(mixer_of(model, Mamba2Spec), model.d_model)
        | extra_fields
    )


def _read_granite(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", attention_bias=False, quantization_config=None)
    mamba = mamba_in(fields, heads=128, groups=1, state=256)
    positions = fields.get("position_embedding_type")
    rope = fields.rope()
    attention = AttentionSpec(
        rope=rope if positions == "rope" else None, scale=fields.number("attention_multiplier", 1.0)
    )
    num_layers, shared_d_ff = (
        fields.whole("num_hidden_layers"),
        fields.whole("shared_intermediate_size", 1024),
    )
    kinds = fields.layer_types(num_layers, [LINEAR] * num_layers)
    feed_forward: MLPSpec | MoESpec = MLPSpec(d_ff=shared_d_ff)
    top_k, balance_loss = fields.whole("num_experts_per_tok", 2), fields.number("router_aux_loss_coef", 0.001)
    if num_experts := fields.whole("num_local_experts", 8):
        feed_forward = MoESpec(num_experts, top_k, shared_d_ff=shared_d_ff, balance_loss=balance_loss)
    scale = fields.number("residual_multiplier", 1.0)
    return decoder(
        fields,
        lambda y: BlockSpec(mamba if kinds[y] == LINEAR else attention, feed_forward, residual_scale=scale),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1.0),
    )


def _write_granite(model: Transformer) -> dict[str, Any]:
    attention, moe = attentions_or_none(model)[0], model.router
    fields = decoder_fields(model, attentions=attentions_or_none(model)) | mamba_fields(
        mixer_of(model, Mamba2Spec), model.d_model
    )
    spec = model.blocks[0].feed_forward
    shared = moe.shared_d_ff if moe else isinstance(spec, MLPSpec) and spec.d_ff
    return fields | {
        "layer_types": kinds_of(model),
        "position_embedding_type": None if attention.rope is None else "rope",
        "attention_multiplier": attention.scale or 1.0,
        "embedding_multiplier": model.embedding_scale,
        "logits_scaling": 1 / model.logit_scale,
        "residual_multiplier": model.blocks[0].residual_scale,
        "shared_intermediate_size": shared or model.d_ff,
        "num_local_experts": moe.num_experts if moe else 0,
        "num_experts_per_tok": moe.top_k if moe else 2,
        "router_aux_loss_coef": moe.balance_loss if moe else 0.0,
    }


def _read_mamba2(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", quantization_config=None)
    fields.ignore("expand", "chunk_size", "residual_in_fp32", "rescale_prenorm_residual", "time_step_rank")
    fields.ignore("time_step_min", "time_step_max", "time_step_floor")
    mamba = Mamba2Spec(
        fields.whole("num_heads", 128),
        fields.whole("head_dim", 64),
        fields.whole("state_size", 128),
        fields.whole("n_groups", 8),
        taps=fields.whole("conv_kernel", 4),
        conv_bias=fields.flag("use_conv_bias", True),
        bias=fields.flag("use_bias"),
        norm_groups=fields.whole("n_groups", 8),
        min_step=_min_step(fields),
    )
    return Transformer(
        num_layers=fields.whole("num_hidden_layers"),
        d_model=fields.whole("hidden_size"),
        # It has no feed-forward layers.
        d_ff=mamba.num_heads * mamba.head_dim,
        vocab_size=fields.whole("vocab_size"),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        pattern=(BlockSpec(mamba, None),),
        num_heads=mamba.num_heads,
        num_kv_heads=mamba.num_heads,
        head_dim=mamba.head_dim,
    )


def _write_mamba2(model: Transformer) -> dict[str, Any]:
    spec = mixer_of(model, Mamba2Spec)
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.d_model,
        "vocab_size": model.vocab_size,
        "layer_norm_epsilon": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "num_heads": spec.num_heads,
        "head_dim": spec.head_dim,
        "state_size": spec.state_size,
        "n_groups": spec.num_groups,
        "conv_kernel": spec.taps,
        "use_conv_bias": spec.conv_bias,
        "use_bias": spec.bias,
        "expand": spec.num_heads * spec.head_dim // model.d_model,
        "time_step_limit": [spec.min_step, _INFINITY],
    }


def mamba_names(layer: str) -> Names:
    """Names below a mixer."""
    fused, conv = "AH+AH+ZS+ZS+A", "AH+ZS+ZS"
    names: Names = {}
    for part, name in enumerate(("gate_{}AH", "x_{}AH", "b_{}ZS", "c_{}ZS", "step_{}A")):
        names[name.format("D")] = Tensor(f"{layer}.in_proj.weight", f"{fused} D", part)
        names[name.format("bias_")] = Tensor(f"{layer}.in_proj.bias", fused, part)
    for part, (name, letters) in enumerate((("x", "AH"), ("b", "ZS"), ("c", "ZS"))):
        names[f"{name}_conv.taps_{letters}W"] = Tensor(f"{layer}.conv1d.weight", f"{conv} 1 W", part)
        names[f"{name}_conv.bias_{letters}"] = Tensor(f"{layer}.conv1d.bias", conv, part)
    names |= {
        "step_shift_A": Tensor(f"{layer}.dt_bias", "A"),
        "decay_log_A": Tensor(f"{layer}.A_log", "A"),
        "skip_A": Tensor(f"{layer}.D", "A"),
        "norm_scale_AH": Tensor(f"{layer}.norm.weight", "AH"),
        "o_AHD": Tensor(f"{layer}.out_proj.weight", "D AH"),
        "o_bias_D": Tensor(f"{layer}.out_proj.bias", "D"),
    }
    return {f"mamba.{path}": tensor for path, tensor in names.items()}


_MAMBA = mamba_names("model.layers.{y}.mamba")
_MOE = "model.layers.{y}.block_sparse_moe"
_BAMBA = renamed(NAMES, mlp="feed_forward", post_attention_layernorm="pre_ff_layernorm") | {
    "final_norm.scale_D": Tensor("model.final_layernorm.weight", "D"),
}
_GRANITE: Names = {
    "mlp.router_DX": Tensor(f"{_MOE}.router.layer.weight", "X D"),
    "mlp.gate_XDF": Tensor(f"{_MOE}.input_linear.weight", "X F+F D", 0),
    "mlp.up_XDF": Tensor(f"{_MOE}.input_linear.weight", "X F+F D", 1),
    "mlp.down_XFD": Tensor(f"{_MOE}.output_linear.weight", "X D F"),
    **{
        f"{path}{name}": Tensor("model.layers.{y}.shared_mlp." + tensor, dims, part)
        for path in ("mlp.", "mlp.shared.")
        for name, tensor, dims, part in (
            ("gate_DF", "input_linear.weight", "F+F D", 0),
            ("up_DF", "input_linear.weight", "F+F D", 1),
            ("down_FD", "output_linear.weight", "D F", 0),
        )
    },
}
BACKBONE: Names = {
    "embed_VD": Tensor("backbone.embeddings.weight", "V D"),
    "attention_norm.scale_D": Tensor("backbone.layers.{y}.norm.weight", "D"),
    "final_norm.scale_D": Tensor("backbone.norm_f.weight", "D"),
    "unembed_DV": Tensor("lm_head.weight", "V D"),
    **mamba_names("backbone.layers.{y}.mixer"),
}
"""Names of a model whose layers have one branch each."""

BAMBA = Family("bamba", "BambaForCausalLM", _read_bamba, _write_bamba, _BAMBA | _MAMBA)
GRANITE_HYBRID = Family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    _read_granite,
    _write_granite,
    NAMES | _GRANITE | _MAMBA,
)
MAMBA2 = Family("mamba2", "Mamba2ForCausalLM", _read_mamba2, _write_mamba2, BACKBONE)
