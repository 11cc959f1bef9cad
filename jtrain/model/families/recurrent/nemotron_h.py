"""Nemotron-H (arXiv:2504.03624) and Nemotron 3: layers of one branch each, in the order of a list."""

from typing import Any

from jtrain.errors import UserError
from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.families.config_fields import Fields
from jtrain.model.families.decoder import ACTIVATIONS, FULL, decoder, decoder_fields, mixer_of, moe_of
from jtrain.model.families.family import Family, Names, Tensor
from jtrain.model.families.mixtures.deepseek_experts import experts_in
from jtrain.model.families.recurrent.delta_nets import LINEAR, attentions_or_none
from jtrain.model.families.recurrent.state_spaces import BACKBONE
from jtrain.model.mlp import MLPSpec
from jtrain.model.recurrent.mamba2 import Mamba2Spec
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer

MLP, MOE = "mlp", "moe"
"""Kinds of layers that do not mix positions."""

_LETTERS = {"M": LINEAR, "E": MOE, "*": FULL, "-": MLP}
"""Kinds in `hybrid_override_pattern`, the older form of the list."""

_IGNORED = (
    *("expand", "chunk_size", "residual_in_fp32", "rescale_prenorm_residual", "use_mamba_kernels"),
    *("mamba_ssm_cache_dtype", "mtp_layers_block_type", "mtp_hybrid_override_pattern", "num_logits_to_keep"),
    *("time_step_max", "time_step_floor", "time_step_limit", "mamba_proj_bias", "num_hidden_layers"),
    *("moe_shared_expert_overlap", "rope_theta", "rope_scaling", "partial_rotary_factor"),
)


def _kinds(fields: Fields) -> list[str]:
    letters = fields.get("hybrid_override_pattern", "ME*-")
    if unknown := set(letters) - set(_LETTERS):
        raise UserError(
            f"config.json: hybrid_override_pattern has {', '.join(sorted(unknown))}, but only "
            f"{', '.join(_LETTERS)} are supported."
        )
    return list(fields.get("layers_block_type", [_LETTERS[letter] for letter in letters]))


def _read(fields: Fields) -> Transformer:
    fields.only(attention_bias=False, mlp_bias=False, hidden_dropout=0, moe_latent_size=None)
    fields.only(num_nextn_predict_layers=0, mamba_hidden_act="silu", sliding_window=None, use_bias=False)
    fields.only(quantization_config=None)
    fields.ignore(*_IGNORED)
    groups, activation = fields.whole("n_groups", 8), ACTIVATIONS[fields.get("mlp_hidden_act", "relu2")]
    mamba = Mamba2Spec(
        fields.whole("mamba_num_heads", 128),
        fields.whole("mamba_head_dim", 64),
        fields.whole("ssm_state_size", 128),
        groups,
        taps=fields.whole("conv_kernel", 4),
        conv_bias=fields.flag("use_conv_bias", True),
        norm_groups=groups,
        # The one limit that transformers applies, whatever time_step_limit says.
        min_step=fields.number("time_step_min", 0.001),
    )
    shared = fields.whole("moe_shared_expert_intermediate_size", 7688)
    unit: dict[str, Any] = dict(activation=activation, gated=False)
    moe = experts_in(fields, shared_experts=0, shared_d_ff=shared, **unit)
    block_by_kind = {
        LINEAR: BlockSpec(mamba, None),
        FULL: BlockSpec(AttentionSpec(rope=None), None),
        MLP: BlockSpec(None, MLPSpec(**unit)),
        MOE: BlockSpec(None, moe),
    }
    kinds = _kinds(fields)
    return decoder(fields, lambda y: block_by_kind[kinds[y]], num_layers=len(kinds), eps="layer_norm_epsilon")


def _kind(block: BlockSpec) -> str:
    if isinstance(block.mixer, Mamba2Spec):
        return LINEAR
    if isinstance(block.mixer, AttentionSpec):
        return FULL
    return MOE if isinstance(block.feed_forward, MoESpec) else MLP


def _write(model: Transformer) -> dict[str, Any]:
    spec, moe = mixer_of(model, Mamba2Spec), moe_of(model)
    fields = decoder_fields(model, attentions=attentions_or_none(model), eps="layer_norm_epsilon")
    for name in ("hidden_act", "num_hidden_layers", "rope_theta", "rope_scaling"):
        del fields[name]
    names: dict[Any, str] = {activation: name for name, activation in ACTIVATIONS.items()}
    return fields | {
        "layers_block_type": [_kind(block) for block in model.blocks],
        "mlp_hidden_act": names[moe.activation],
        "mamba_num_heads": spec.num_heads,
        "mamba_head_dim": spec.head_dim,
        "ssm_state_size": spec.state_size,
        "n_groups": spec.num_groups,
        "conv_kernel": spec.taps,
        "use_conv_bias": spec.conv_bias,
        "expand": spec.num_heads * spec.head_dim // model.d_model,
        "time_step_min": spec.min_step,
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.d_ff or model.d_ff,
        "moe_shared_expert_intermediate_size": moe.shared_d_ff,
        "norm_topk_prob": moe.normalize_top_k,
        "n_group": moe.num_groups,
        "topk_group": moe.top_groups,
        "routed_scaling_factor": moe.weight_scale,
    }


_LAYER = "backbone.layers.{y}.mixer"
_NAMES: Names = {
    "mlp_norm.scale_D": Tensor("backbone.layers.{y}.norm.weight", "D"),
    "attention.q_DNH": Tensor(f"{_LAYER}.q_proj.weight", "NH D"),
    "attention.k_DKH": Tensor(f"{_LAYER}.k_proj.weight", "KH D"),
    "attention.v_DKH": Tensor(f"{_LAYER}.v_proj.weight", "KH D"),
    "attention.o_NHD": Tensor(f"{_LAYER}.o_proj.weight", "D NH"),
    "mlp.up_DF": Tensor(f"{_LAYER}.up_proj.weight", "F D"),
    "mlp.down_FD": Tensor(f"{_LAYER}.down_proj.weight", "D F"),
    "mlp.router_DX": Tensor(f"{_LAYER}.gate.weight", "X D"),
    "mlp.router_bias_X": Tensor(f"{_LAYER}.gate.e_score_correction_bias", "X"),
    "mlp.up_XDF": Tensor(_LAYER + ".experts.{x}.up_proj.weight", "F D"),
    "mlp.down_XFD": Tensor(_LAYER + ".experts.{x}.down_proj.weight", "D F"),
    "mlp.shared.up_DF": Tensor(f"{_LAYER}.shared_experts.up_proj.weight", "F D"),
    "mlp.shared.down_FD": Tensor(f"{_LAYER}.shared_experts.down_proj.weight", "D F"),
}
NEMOTRON_H = Family("nemotron_h", "NemotronHForCausalLM", _read, _write, BACKBONE | _NAMES)
