"""OLMo Hybrid: gated delta nets with norms before their branches, and attention with norms after them."""

import dataclasses
from typing import Any

from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.families.config_fields import Fields
from jtrain.model.families.decoder import FULL, NAMES, attention_of, decoder, decoder_fields, mixer_of
from jtrain.model.families.family import Family, Tensor
from jtrain.model.families.olmo import AFTER
from jtrain.model.families.recurrent.delta_nets import delta_fields, delta_in, layer_kinds, names_of_delta
from jtrain.model.recurrent.delta_net import DeltaNetSpec
from jtrain.model.transformer import Transformer


def _read(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", attention_bias=False, quantization_config=None)
    fields.ignore("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max")
    fields.ignore("linear_dt_init_floor")
    heads, d_model = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    key_heads = fields.whole("linear_num_key_heads", heads)
    key_dim = fields.whole("linear_key_head_dim", int(0.75 * d_model / key_heads))
    delta = delta_in(fields, heads=heads, key_heads=key_heads, key_dim=key_dim, value_dim=2 * key_dim)
    max_step = 2.0 if fields.flag("linear_allow_neg_eigval", True) else 1.0
    # An epsilon of its own, whatever rms_norm_eps says.
    delta = dataclasses.replace(delta, max_step=max_step, norm_eps=1e-5)
    parameters = fields.get("rope_parameters") or {}
    has_rope = parameters.get("rope_theta", fields.get("rope_theta")) is not None
    attention = AttentionSpec(rope=fields.rope() if has_rope else None, qk_norm="all")
    fields.ignore("rope_parameters", "rope_scaling")
    kinds = layer_kinds(fields)
    return decoder(
        fields,
        lambda y: BlockSpec(attention, norms="after") if kinds[y] == FULL else BlockSpec(delta),
    )


def _write(model: Transformer) -> dict[str, Any]:
    spec = mixer_of(model, DeltaNetSpec)
    fields = decoder_fields(model) | delta_fields(model) | {"linear_allow_neg_eigval": spec.max_step == 2}
    if attention_of(model).rope is None:
        fields |= {"rope_theta": None, "rope_parameters": None}
    return fields


_NAMES = names_of_delta(
    "linear_attn",
    q_DOS=("q_proj.weight", "OS D"),
    k_DOS=("k_proj.weight", "OS D"),
    v_DAH=("v_proj.weight", "AH D"),
    gate_DAH=("g_proj.weight", "AH D"),
    step_DA=("b_proj.weight", "A D"),
    decay_DA=("a_proj.weight", "A D"),
    q_conv__taps_OSW=("q_conv1d.weight", "OS 1 W"),
    k_conv__taps_OSW=("k_conv1d.weight", "OS 1 W"),
    v_conv__taps_AHW=("v_conv1d.weight", "AH 1 W"),
    norm__scale_H=("o_norm.weight", "H"),
    o_AHD=("o_proj.weight", "D AH"),
)
# Only layers of delta nets have norms before their branches.
_BEFORE = {
    "attention_norm.scale_D": Tensor("model.layers.{y}.attention_layer_norm.weight", "D"),
    "mlp_norm.scale_D": Tensor("model.layers.{y}.feedforward_layer_norm.weight", "D"),
}
OLMO_HYBRID = Family("olmo_hybrid", "OlmoHybridForCausalLM", _read, _write, NAMES | AFTER | _BEFORE | _NAMES)
