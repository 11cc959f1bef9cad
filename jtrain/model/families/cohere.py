"""Cohere's Command R, R7B and A, their mixtures, and the text model of Compass: layer norms without biases,
both branches from one norm, and no positions where attention is full.
"""

from typing import Any

from jtrain.errors import UserError
from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.families.config_fields import Fields
from jtrain.model.families.decoder import (
    FULL,
    INTERLEAVED,
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
from jtrain.model.families.family import Family
from jtrain.model.families.mixtures.deepseek_experts import names_of_experts
from jtrain.model.mlp import MLPSpec
from jtrain.model.norm import NormSpec
from jtrain.model.rope import RopeSpec
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer


def _bias(fields: Fields) -> Any:
    fields.only(hidden_act="silu", use_qk_norm=False, quantization_config=None)
    return "all" if fields.flag("attention_bias") else "none"


def _settings(fields: Fields, scale: float = 0.0625) -> dict[str, Any]:
    return dict(tied=True, norm=NormSpec("layer"), logit_scale=fields.number("logit_scale", scale))


def _read_cohere(fields: Fields) -> Transformer:
    block = BlockSpec(AttentionSpec(rope=fields.rope(), bias=_bias(fields)), norms="parallel_shared")
    return decoder(fields, lambda _: block, eps="layer_norm_eps", **_settings(fields))


def _mixers(fields: Fields, kinds: tuple[str, ...]) -> list[AttentionSpec]:
    """Attention of each layer: rotary positions in a window, or none and all of the document."""
    windowed = AttentionSpec(
        rope=fields.rope(), bias=_bias(fields), window=fields.whole("sliding_window", 4096)
    )
    full = AttentionSpec(rope=None, bias=windowed.bias)
    return [windowed if kind == WINDOWED else full for kind in kinds]


def _kinds(num_layers: int, period: int = 4) -> list[str]:
    return [WINDOWED if (y + 1) % period else FULL for y in range(num_layers)]


def _read_cohere2(fields: Fields) -> Transformer:
    fields.ignore(
        "sliding_window_pattern", "order_of_interleaved_layers", "rotary_pct", "position_embedding_type"
    )
    num_layers = fields.whole("num_hidden_layers")
    mixers = _mixers(fields, fields.layer_types(num_layers, _kinds(num_layers)))
    return decoder(
        fields,
        lambda y: BlockSpec(mixers[y], norms="parallel_shared"),
        eps="layer_norm_eps",
        **_settings(fields),
    )


def _read_moe(fields: Fields) -> Transformer:
    num_layers, dense = fields.whole("num_hidden_layers"), fields.whole("first_k_dense_replace", 0)
    prefix, period = (
        fields.whole("prefix_dense_sliding_window_pattern", 1),
        fields.whole("sliding_window_pattern", 4),
    )
    kinds = fields.layer_types(num_layers, _kinds(dense, prefix) + _kinds(num_layers - dense, period))
    sparse, mixers = fields.sparse_layers(num_layers, dense=dense), _mixers(fields, kinds)
    shared, score = fields.whole("num_shared_experts", 0), fields.get("expert_selection_fn", "softmax")
    averaged = shared and fields.get("shared_expert_combination_strategy", "average") == "average"
    fields.ignore("shared_expert_combination_strategy")
    moe = MoESpec(
        num_experts=fields.whole("num_experts", 8),
        top_k=fields.whole("num_experts_per_tok", 2),
        # A softmax over the chosen experts adds up to one.
        normalize_top_k=fields.flag("norm_topk_prob", True) or score == "softmax",
        shared_experts=shared,
        shared_scale=0.5 if averaged else 1.0,
        score=score,
        weight_scale=0.5 if averaged else 1.0,
        balance_loss=0.0,
    )
    mlp = MLPSpec(d_ff=fields.get("prefix_dense_intermediate_size"))

    def block(layer: int) -> BlockSpec:
        mixer = mixers[layer]
        if not sparse[layer] and prefix == 1:
            rope = fields.rope()  # here also where attention is full
            mixer = AttentionSpec(rope=rope, bias=mixer.bias, window=mixer.window)
        return BlockSpec(mixer, moe if sparse[layer] else mlp, norms="parallel_shared")

    settings = _settings(fields)
    if fields.get("rms_norm_eps") is not None:
        settings["norm"] = NormSpec()
    fields.ignore("layer_norm_eps")
    eps = "layer_norm_eps" if settings["norm"].kind == "layer" else "rms_norm_eps"
    return decoder(fields, block, first=sparse.index(True), eps=eps, **settings)


def _write_moe(model: Transformer) -> dict[str, Any]:
    moe, is_layer = moe_of(model), model.norm.kind == "layer"
    dense = [b for b in model.blocks if isinstance(b.feed_forward, MLPSpec)]
    widths = [b.feed_forward.d_ff for b in dense if isinstance(b.feed_forward, MLPSpec)]
    mixers = [b.mixer for b in dense if isinstance(b.mixer, AttentionSpec)]
    rotated = any(mixer.window is None and mixer.rope is not None for mixer in mixers)
    return (
        decoder_fields(model, eps="layer_norm_eps" if is_layer else "rms_norm_eps")
        | _write_scale(model)
        | layer_types_of(model)
        | mlp_types_of(model)
        | {
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "norm_topk_prob": moe.normalize_top_k,
            "num_shared_experts": moe.shared_experts,
            "shared_expert_combination_strategy": "average" if moe.shared_scale == 0.5 else "sum",
            "expert_selection_fn": moe.score,
            "prefix_dense_intermediate_size": next(iter(widths), None),
            "prefix_dense_sliding_window_pattern": 1 if rotated or not dense else 4,
        }
    )


def _read_compass(fields: Fields) -> Transformer:
    fields.only(pooling=None)
    num_layers, bias = fields.whole("num_hidden_layers"), _bias(fields)
    kinds = fields.layer_types(num_layers, [FULL] * num_layers)
    ropes = fields.get("rope_parameters", {})
    mixers = {
        kind: AttentionSpec(
            # A kind of layer that config.json gives no rotation has none.
            rope=fields.rope(kind=kind) if ropes.get(kind) else None,
            bias=bias,
            window=fields.whole("sliding_window", 4096) if kind == WINDOWED else None,
        )
        for kind in dict.fromkeys(kinds)
    }
    return decoder(
        fields,
        lambda y: BlockSpec(mixers[kinds[y]], norms="parallel_shared"),
        eps="layer_norm_eps",
        **_settings(fields, 1.0),
    )


def _write_compass(model: Transformer) -> dict[str, Any]:
    mixers = [block.mixer for block in model.blocks if isinstance(block.mixer, AttentionSpec)]
    fields = _write_cohere(model) | layer_types_of(model)
    kinds = {FULL if mixer.window is None else WINDOWED: mixer.rope for mixer in mixers}
    if any(rope is not None and rope != RopeSpec(rope.theta) for rope in kinds.values()):
        raise UserError("scaled rotations.")
    del fields["rope_theta"], fields["rope_scaling"]
    return fields | {
        "rope_parameters": {
            kind: None
            if rope is None
            else {"rope_type": "default", "rope_theta": rope_fields(rope)["rope_theta"]}
            for kind, rope in kinds.items()
        }
    }


def _write_scale(model: Transformer) -> dict[str, Any]:
    return {"attention_bias": attention_of(model).bias == "all", "logit_scale": model.logit_scale}


def _write_cohere(model: Transformer) -> dict[str, Any]:
    return decoder_fields(model, eps="layer_norm_eps") | _write_scale(model)


COHERE = Family("cohere", "CohereForCausalLM", _read_cohere, _write_cohere, NAMES | INTERLEAVED)
COHERE2 = Family(
    "cohere2",
    "Cohere2ForCausalLM",
    _read_cohere2,
    lambda m: _write_cohere(m) | layer_types_of(m),
    NAMES | INTERLEAVED,
)
COHERE2_MOE = Family(
    "cohere2_moe",
    "Cohere2MoeForCausalLM",
    _read_moe,
    _write_moe,
    NAMES | INTERLEAVED | names_of_experts(),
)
COMPASS = Family("cohere_compass_text", "CohereCompassForCausalLM", _read_compass, _write_compass, NAMES)
