"""Decoders of gated delta nets and attention: Qwen3-Next and Qwen3.5."""

from collections.abc import Callable
from typing import Any

from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.families.config_fields import Fields
from jtrain.model.families.decoder import FULL, NAMES, attention_of, decoder, decoder_fields, mixer_of, moe_of
from jtrain.model.families.family import Family, Names, Tensor
from jtrain.model.families.qwen import experts_by_layer, num_experts
from jtrain.model.mlp import MLPSpec
from jtrain.model.norm import NormSpec
from jtrain.model.recurrent.delta_net import DeltaNetSpec
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer

LINEAR = "linear_attention"
"""Kind of a layer with a state, in `layer_types`."""


def layer_kinds(fields: Fields, period: int = 4) -> tuple[str, ...]:
    """Kind of each layer; by default attention ends each period."""
    num_layers = fields.whole("num_hidden_layers")
    default = [LINEAR if (y + 1) % period else FULL for y in range(num_layers)]
    return fields.layer_types(num_layers, default)


def kinds_of(model: Transformer) -> list[str]:
    """`layer_types` of a model."""
    return [FULL if isinstance(block.mixer, AttentionSpec) else LINEAR for block in model.blocks]


def attentions_or_none(model: Transformer) -> list[AttentionSpec]:
    """The grouped-query attention of each layer that has one; a plain one where no layer has."""
    mixers = [block.mixer for block in model.blocks if isinstance(block.mixer, AttentionSpec)]
    return mixers or [AttentionSpec()]


def delta_in(fields: Fields, *, heads: int, key_heads: int, key_dim: int, value_dim: int) -> DeltaNetSpec:
    """The delta net that a config.json describes, with what it has where a field is missing."""
    return DeltaNetSpec(
        num_heads=fields.whole("linear_num_value_heads", heads),
        num_key_heads=fields.whole("linear_num_key_heads", key_heads),
        key_dim=fields.whole("linear_key_head_dim", key_dim),
        value_dim=fields.whole("linear_value_head_dim", value_dim),
        taps=fields.whole("linear_conv_kernel_dim", 4),
    )


def delta_fields(model: Transformer) -> dict[str, Any]:
    """Fields that `delta_in` and `layer_kinds` read."""
    spec = mixer_of(model, DeltaNetSpec)
    return {
        "layer_types": kinds_of(model),
        "linear_num_value_heads": spec.num_heads,
        "linear_num_key_heads": spec.num_key_heads,
        "linear_key_head_dim": spec.key_dim,
        "linear_value_head_dim": spec.value_dim,
        "linear_conv_kernel_dim": spec.taps,
    }


def _read_qwen(fields: Fields, feed_forward: Callable[[int], MLPSpec | MoESpec], **sizes: Any) -> Transformer:
    fields.only(hidden_act="silu", quantization_config=None)
    # Of text alone, all three positions are the same, however the frequencies are divided among them.
    rope = fields.rope(share=0.25, beside=("mrope_section", "mrope_interleaved"))
    bias = "all" if fields.flag("attention_bias") else "none"
    attention = AttentionSpec(rope=rope, bias=bias, qk_norm="head", gate=True)
    delta = delta_in(fields, heads=32, key_heads=16, key_dim=128, value_dim=128)
    kinds = layer_kinds(fields, fields.whole("full_attention_interval", 4))
    fields.whole("head_dim")
    return decoder(
        fields,
        lambda y: BlockSpec(attention if kinds[y] == FULL else delta, feed_forward(y)),
        norm=NormSpec(scale="one_plus"),
        **sizes,
    )


def _moe(fields: Fields, *, normalize: bool) -> MoESpec:
    return MoESpec(
        num_experts=num_experts(fields),
        top_k=fields.whole("num_experts_per_tok"),
        d_ff=fields.whole("moe_intermediate_size"),
        normalize_top_k=normalize,
        shared_d_ff=fields.whole("shared_expert_intermediate_size"),
        shared_gate=True,
        # That of transformers is computed over a batch instead of a sequence, and is top_k times larger.
        balance_loss=fields.number("router_aux_loss_coef", 0.001),
    )


def _read_next(fields: Fields) -> Transformer:
    moe, has_experts = _moe(fields, normalize=fields.flag("norm_topk_prob", True)), experts_by_layer(fields)
    return _read_qwen(fields, lambda y: moe if has_experts[y] else MLPSpec())


def _read_moe(fields: Fields) -> Transformer:
    moe = _moe(fields, normalize=True)
    return _read_qwen(fields, lambda _: moe, d_ff="moe_intermediate_size")


def _write_qwen(model: Transformer) -> dict[str, Any]:
    attention = attention_of(model)
    return decoder_fields(model) | delta_fields(model) | {"attention_bias": attention.bias == "all"}


def _write_experts(model: Transformer) -> dict[str, Any]:
    moe = moe_of(model)
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.d_ff or model.d_ff,
        "shared_expert_intermediate_size": moe.shared_d_ff,
        "router_aux_loss_coef": moe.balance_loss,
    }


def _write_next(model: Transformer) -> dict[str, Any]:
    dense = [y for y, block in enumerate(model.blocks) if isinstance(block.feed_forward, MLPSpec)]
    extra_fields = {"mlp_only_layers": dense, "decoder_sparse_step": 1}
    return (
        _write_qwen(model)
        | _write_experts(model)
        | extra_fields
        | {"norm_topk_prob": moe_of(model).normalize_top_k}
    )


def _write_moe(model: Transformer) -> dict[str, Any]:
    fields = _write_qwen(model) | _write_experts(model)
    del fields["intermediate_size"]
    return fields


def names_of_delta(mixer: str, **tensors: tuple[Any, ...]) -> Names:
    """Names below a mixer, from (name, dimensions, part) by the parameter's."""
    tensors = {"decay_log_A": ("A_log", "A"), "decay_bias_A": ("dt_bias", "A")} | tensors
    layer = "model.layers.{y}." + mixer
    return {
        f"delta_net.{path.replace('__', '.')}": Tensor(f"{layer}.{name}", *rest)
        for path, (name, *rest) in tensors.items()
    }


_CONV = ("conv1d.weight", "OS+OS+AH 1 W")
_QWEN: dict[str, tuple[Any, ...]] = dict(
    q_conv__taps_OSW=(*_CONV, 0),
    k_conv__taps_OSW=(*_CONV, 1),
    v_conv__taps_AHW=(*_CONV, 2),
    norm__scale_H=("norm.weight", "H"),
    o_AHD=("out_proj.weight", "D AH"),
)
_GATED = {
    "attention.q_DNH": Tensor("model.layers.{y}.self_attn.q_proj.weight", "N2H D", 0),
    "attention.gate_DNH": Tensor("model.layers.{y}.self_attn.q_proj.weight", "N2H D", 1),
}
_SHARED = {
    "mlp.shared_gate_D": Tensor("model.layers.{y}.mlp.shared_expert_gate.weight", "1 D"),
    "mlp.shared.gate_DF": Tensor("model.layers.{y}.mlp.shared_expert.gate_proj.weight", "F D"),
    "mlp.shared.up_DF": Tensor("model.layers.{y}.mlp.shared_expert.up_proj.weight", "F D"),
    "mlp.shared.down_FD": Tensor("model.layers.{y}.mlp.shared_expert.down_proj.weight", "D F"),
}
_FUSED, _FUSED_GATES = ("in_proj_qkvz.weight", "O(S+S+GH+GH) D"), ("in_proj_ba.weight", "O2G D")
_NEXT = names_of_delta(
    "linear_attn",
    q_DOS=(*_FUSED, 0),
    k_DOS=(*_FUSED, 1),
    v_DAH=(*_FUSED, 2),
    gate_DAH=(*_FUSED, 3),
    step_DA=(*_FUSED_GATES, 0),
    decay_DA=(*_FUSED_GATES, 1),
    **_QWEN,
)
_QKV = ("in_proj_qkv.weight", "OS+OS+AH D")
_QWEN35 = names_of_delta(
    "linear_attn",
    q_DOS=(*_QKV, 0),
    k_DOS=(*_QKV, 1),
    v_DAH=(*_QKV, 2),
    gate_DAH=("in_proj_z.weight", "AH D"),
    step_DA=("in_proj_b.weight", "A D"),
    decay_DA=("in_proj_a.weight", "A D"),
    **_QWEN,
)

QWEN3_NEXT = Family(
    "qwen3_next", "Qwen3NextForCausalLM", _read_next, _write_next, NAMES | _GATED | _SHARED | _NEXT
)
QWEN3_5 = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    lambda fields: _read_qwen(fields, lambda _: MLPSpec()),
    _write_qwen,
    NAMES | _GATED | _QWEN35,
)
QWEN3_5_MOE = Family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    _read_moe,
    _write_moe,
    NAMES | _GATED | _SHARED | _QWEN35,
)
