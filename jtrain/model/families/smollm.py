"""SmolLM3: every fourth layer has no positions (huggingface.co/blog/smollm3)."""

from typing import Any

from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.families.config_fields import Fields
from jtrain.model.families.decoder import (
    FULL,
    NAMES,
    WINDOWED,
    attention_of,
    attentions_of,
    decoder,
    decoder_fields,
    layer_types_of,
)
from jtrain.model.families.family import Family
from jtrain.model.mlp import MLPSpec
from jtrain.model.transformer import Transformer


def _read(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", quantization_config=None)
    rope, num_layers = fields.rope(theta=2e6), fields.whole("num_hidden_layers")
    interval = fields.whole("no_rope_layer_interval", 4)
    # 1 where a layer rotates, in spite of the name.
    rotates = fields.get("no_rope_layers", [int((y + 1) % interval != 0) for y in range(num_layers)])
    window = fields.get("sliding_window") if fields.flag("use_sliding_window") else None
    fields.ignore("sliding_window")
    kinds = fields.layer_types(
        num_layers, [FULL if window is None or rotates[y] else WINDOWED for y in range(num_layers)]
    )
    bias = "all" if fields.flag("attention_bias") else "none"
    mlp = MLPSpec(bias=fields.flag("mlp_bias"))
    return decoder(
        fields,
        lambda y: BlockSpec(
            AttentionSpec(
                rope=rope if rotates[y] else None, bias=bias, window=window if kinds[y] == WINDOWED else None
            ),
            mlp,
        ),
        tied=True,
    )


def _write(model: Transformer) -> dict[str, Any]:
    mixers = attentions_of(model)
    fields = layer_types_of(model)
    return (
        decoder_fields(model)
        | fields
        | {
            "no_rope_layers": [int(mixer.rope is not None) for mixer in mixers],
            "use_sliding_window": fields["sliding_window"] is not None,
            "attention_bias": attention_of(model).bias == "all",
            "mlp_bias": isinstance(f := model.blocks[0].feed_forward, MLPSpec) and f.bias,
        }
    )


SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", _read, _write, NAMES)
