"""Llama 4, the text model: chunks, layers without positions, and mixtures of which experts read weighted
inputs.
"""

from typing import Any

from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.families.config_fields import Fields
from jtrain.model.families.decoder import (
    FULL,
    NAMES,
    attention_of,
    attentions_of,
    decoder,
    decoder_fields,
    moe_of,
    renamed,
)
from jtrain.model.families.family import Family, Tensor
from jtrain.model.mlp import MLPSpec
from jtrain.model.rope import QueryTemperature
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer

_CHUNKED = "chunked_attention"


def _read(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", quantization_config=None)
    fields.ignore("router_jitter_noise", "for_llm_compressor")
    num_layers, rope = fields.whole("num_hidden_layers"), fields.rope(theta=500_000.0)
    interval = fields.whole("no_rope_layer_interval", 4)
    # 1 where a layer rotates, in spite of the name; an empty list says nothing.
    rotates = fields.get("no_rope_layers") or [int((y + 1) % interval != 0) for y in range(num_layers)]
    kinds = fields.layer_types(num_layers, [_CHUNKED if rotates[y] else FULL for y in range(num_layers)])
    step = fields.whole("interleave_moe_layer_step", 1)
    experts = set(fields.get("moe_layers", range(step - 1, num_layers, step)))
    chunk_size, qk_norm = fields.nullable("attention_chunk_size", 8192.0), fields.flag("use_qk_norm", True)
    temperature = QueryTemperature(
        fields.number("attn_scale", 0.1), fields.whole("floor_scale", 8192), offset=1
    )
    tuned, bias = fields.flag("attn_temperature_tuning", True), fields.flag("attention_bias")
    moe = MoESpec(
        num_experts=fields.whole("num_local_experts"),
        top_k=fields.whole("num_experts_per_tok", 1),
        normalize_top_k=False,
        shared_experts=1,
        score="sigmoid",
        weight_input=True,
        balance_loss=fields.number("router_aux_loss_coef", 0.001),
    )
    dense = MLPSpec(d_ff=fields.whole("intermediate_size_mlp", 16384))

    def block(layer: int) -> BlockSpec:
        is_rotated, is_chunked = bool(rotates[layer]), kinds[layer] == _CHUNKED and chunk_size is not None
        attention = AttentionSpec(
            rope=rope if is_rotated else None,
            bias="all" if bias else "none",
            qk_norm="unscaled" if qk_norm and is_rotated else "none",
            norm_after_rope=qk_norm and is_rotated,
            chunk_size=int(chunk_size or 0) if is_chunked else None,
            temperature=temperature if tuned and not is_rotated else None,
        )
        return BlockSpec(attention, moe if layer in experts else dense)

    return decoder(fields, block)


def _write(model: Transformer) -> dict[str, Any]:
    mixers = attentions_of(model)
    moe, temperatures = moe_of(model), [mixer.temperature for mixer in mixers if mixer.temperature]
    temperature = temperatures[0] if temperatures else QueryTemperature(0.1, 8192)
    feed_forwards = [block.feed_forward for block in model.blocks]
    dense = next((spec for spec in feed_forwards if isinstance(spec, MLPSpec)), MLPSpec())
    return decoder_fields(model) | {
        "layer_types": [FULL if mixer.chunk_size is None else _CHUNKED for mixer in mixers],
        "attention_chunk_size": next((mixer.chunk_size for mixer in mixers if mixer.chunk_size), None),
        "no_rope_layers": [int(mixer.rope is not None) for mixer in mixers],
        "moe_layers": [y for y, spec in enumerate(feed_forwards) if isinstance(spec, MoESpec)],
        "use_qk_norm": any(mixer.qk_norm == "unscaled" for mixer in mixers),
        "attn_temperature_tuning": bool(temperatures),
        "attn_scale": temperature.beta,
        "floor_scale": temperature.scale,
        "attention_bias": attention_of(model).bias == "all",
        "intermediate_size_mlp": dense.d_ff or model.d_ff,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": moe.balance_loss,
    }


_LAYER = "model.layers.{y}"
_FEED_FORWARD, _ATTENTION = f"{_LAYER}.feed_forward", f"{_LAYER}.self_attn"
_NAMES = {
    "attention.q_DNH": Tensor(f"{_ATTENTION}.q_proj.weight", "NI D"),
    "attention.q_bias_NH": Tensor(f"{_ATTENTION}.q_proj.bias", "NI"),
    "attention.k_DKH": Tensor(f"{_ATTENTION}.k_proj.weight", "KI D"),
    "attention.k_bias_KH": Tensor(f"{_ATTENTION}.k_proj.bias", "KI"),
    "mlp.router_DX": Tensor(f"{_FEED_FORWARD}.router.weight", "X D"),
    "mlp.gate_XDF": Tensor(f"{_FEED_FORWARD}.experts.gate_up_proj", "X D 2F", 0),
    "mlp.up_XDF": Tensor(f"{_FEED_FORWARD}.experts.gate_up_proj", "X D 2F", 1),
    "mlp.down_XFD": Tensor(f"{_FEED_FORWARD}.experts.down_proj", "X F D"),
    "mlp.shared.gate_DF": Tensor(f"{_FEED_FORWARD}.shared_expert.gate_proj.weight", "F D"),
    "mlp.shared.up_DF": Tensor(f"{_FEED_FORWARD}.shared_expert.up_proj.weight", "F D"),
    "mlp.shared.down_FD": Tensor(f"{_FEED_FORWARD}.shared_expert.down_proj.weight", "D F"),
}

LLAMA4 = Family(
    "llama4_text", "Llama4ForCausalLM", _read, _write, renamed(NAMES, mlp="feed_forward") | _NAMES
)
