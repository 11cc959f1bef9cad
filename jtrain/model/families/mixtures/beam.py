"""Beam: windows with rope, full attention without, and a residual stream whose scale does not grow with
depth.

After branch i, counted from 2, its stream is `sqrt((i - 1) / i) * stream + branch / sqrt(i)`: 1 / sqrt(i)
times the plain sum of the embedding and all branches. Everything that reads it is a norm, so the plain sum
gives the same model, but for the norms' epsilon, which would count i times as much.
"""

from typing import Any

from jtrain.errors import UserError
from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.families.config_fields import Fields
from jtrain.model.families.decoder import (
    FULL,
    NAMES,
    WINDOWED,
    attentions_of,
    decoder,
    decoder_fields,
    layer_types_of,
    mlp_types_of,
    moe_of,
)
from jtrain.model.families.family import Family, Tensor
from jtrain.model.mlp import MLPSpec
from jtrain.model.rope import QueryTemperature
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer

_LARGEST_EPS = 1e-5


def _read(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", quantization_config=None)
    if (eps := fields.number("rms_norm_eps", 1e-6)) > _LARGEST_EPS:
        raise UserError(
            f"config.json: rms_norm_eps={eps} of beam is above {_LARGEST_EPS}: it would show that the "
            "residual stream is not scaled by depth here."
        )
    if (fields.get("rope_parameters") or {}).get(FULL) is not None:
        raise UserError("config.json: rope_parameters.full_attention of beam is not supported, only null.")
    num_layers, window = fields.whole("num_hidden_layers"), fields.whole("sliding_window", 512)
    last = num_layers - 1
    kinds = fields.layer_types(
        num_layers, [WINDOWED if (y + 1) % 6 and y < last else FULL for y in range(num_layers)]
    )
    sparse = fields.sparse_layers(num_layers, dense=min(3, num_layers))
    shared: dict[str, Any] = dict(
        bias="all" if fields.flag("attention_bias") else "none", qk_norm="head", gate=True, gate_bias=True
    )
    local = AttentionSpec(rope=fields.rope(kind=WINDOWED), window=window, **shared)
    temperature = QueryTemperature(0.1, 2048, offset=1, is_power=True)
    full = AttentionSpec(rope=None, temperature=temperature, **shared)
    moe = MoESpec(
        num_experts=fields.whole("num_experts", 256),
        top_k=fields.whole("num_experts_per_tok", 8),
        d_ff=fields.whole("moe_intermediate_size", 2560),
        normalize_top_k=fields.flag("norm_topk_prob", True),
        score="sigmoid",
        correction_bias=True,
        num_groups=fields.whole("n_group", 8),
        top_groups=fields.whole("topk_group", 4),
        weight_scale=fields.number("routed_scaling_factor", 2.5),
        # Its load is balanced by the correction bias.
        balance_loss=0.0,
    )
    return decoder(
        fields,
        lambda y: BlockSpec(
            local if kinds[y] == WINDOWED else full, moe if sparse[y] else MLPSpec(), norms="sandwich"
        ),
        first=sparse.index(True),
        logit_soft_cap=fields.nullable("final_logit_softcapping", 30.0),
    )


def _write(model: Transformer) -> dict[str, Any]:
    attentions, moe = attentions_of(model), moe_of(model)
    theta = next((mixer.rope.theta for mixer in attentions if mixer.rope is not None), 10_000.0)
    fields = decoder_fields(model) | layer_types_of(model) | mlp_types_of(model)
    del fields["rope_theta"], fields["rope_scaling"]
    return fields | {
        "rope_parameters": {WINDOWED: {"rope_type": "default", "rope_theta": theta}, FULL: None},
        "attention_bias": attentions[0].bias == "all",
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.d_ff or model.d_ff,
        "norm_topk_prob": moe.normalize_top_k,
        "n_group": moe.num_groups,
        "topk_group": moe.top_groups,
        "routed_scaling_factor": moe.weight_scale,
        "final_logit_softcapping": model.logit_soft_cap,
    }


_LAYER = "model.layers.{y}"
_NAMES = {
    "attention.gate_DNH": Tensor(f"{_LAYER}.self_attn.gate_proj.weight", "NH D"),
    "attention.gate_bias_N": Tensor(f"{_LAYER}.self_attn.gate_bias", "N"),
    "attention_post_norm.scale_D": Tensor(f"{_LAYER}.post_attention_layernorm.weight", "D"),
    "mlp_norm.scale_D": Tensor(f"{_LAYER}.pre_feedforward_layernorm.weight", "D"),
    "mlp_post_norm.scale_D": Tensor(f"{_LAYER}.post_feedforward_layernorm.weight", "D"),
    "mlp.router_bias_X": Tensor(f"{_LAYER}.mlp.gate.e_score_correction_bias", "X"),
}
BEAM = Family("beam", "BeamForCausalLM", _read, _write, NAMES | _NAMES)
