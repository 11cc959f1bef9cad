"""Llama 2 and 3 (arXiv:2307.09288, 2407.21783)."""

from typing import Any

from jtrain.errors import UserError
from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.families.config_fields import Fields
from jtrain.model.families.decoder import FULL, NAMES, attention_of, decoder, decoder_fields
from jtrain.model.families.family import Family
from jtrain.model.mlp import MLPSpec
from jtrain.model.transformer import Transformer


def _read(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", pretraining_tp=1, quantization_config=None)
    bias, mlp = "all" if fields.flag("attention_bias") else "none", MLPSpec(bias=fields.flag("mlp_bias"))
    rope = fields.rope()
    if kinds := sorted(set(fields.get("layer_types", ())) - {FULL}):
        raise UserError(f"config.json: layer_types has {', '.join(kinds)}; Llama has only {FULL}.")
    return decoder(fields, lambda _: BlockSpec(AttentionSpec(rope=rope, bias=bias), mlp))


def _write(model: Transformer) -> dict[str, Any]:
    if model.d_model % model.num_heads:
        raise UserError(
            f"model.d_model={model.d_model} is not a multiple of model.num_heads={model.num_heads}, which "
            "transformers refuses for Llama. Only models with qk_norm (Qwen3) can be exported with such a "
            "shape."
        )
    return decoder_fields(model) | {
        "attention_bias": attention_of(model).bias == "all",
        "mlp_bias": getattr(model.blocks[0].feed_forward, "bias", False),
        "pretraining_tp": 1,
    }


LLAMA = Family("llama", "LlamaForCausalLM", _read, _write, NAMES)
