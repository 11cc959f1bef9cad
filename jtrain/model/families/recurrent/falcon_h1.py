"""Falcon-H1 (arXiv:2507.22448): attention and Mamba-2 beside each other in every layer."""

import dataclasses
from typing import Any

from jtrain.errors import UserError
from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.families.config_fields import Fields
from jtrain.model.families.decoder import NAMES, decoder, decoder_fields, renamed
from jtrain.model.families.family import Family, Tensor
from jtrain.model.families.recurrent.state_spaces import mamba_fields, mamba_in, mamba_names
from jtrain.model.mlp import MLPSpec
from jtrain.model.recurrent.mamba2 import Mamba2Spec
from jtrain.model.recurrent.parallel import ParallelSpec
from jtrain.model.transformer import Transformer


def _rounded(number: float) -> float:
    """Twelve digits, so that what is written in another form is read as the same number."""
    return float(f"{number:.12g}")


def _read(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", attention_bias=False, mlp_bias=False, quantization_config=None)
    mamba = mamba_in(fields, heads=128, groups=1, state=256)
    fields.only(projectors_bias=mamba.bias)
    before_gate = fields.flag("mamba_norm_before_gate", True)
    scale = fields.number("ssm_in_multiplier", 1.0)
    mamba = dataclasses.replace(
        mamba,
        norm=("before_gate" if before_gate else "gated") if fields.flag("mamba_rms_norm") else "none",
        norm_groups=mamba.num_groups,
        scales=tuple(_rounded(scale * s) for s in fields.numbers("ssm_multipliers", [1.0] * 5)),
    )
    # Products of queries and keys, and values, are linear in the input's multiplier.
    size = fields.whole("head_dim", fields.whole("hidden_size") // fields.whole("num_attention_heads"))
    of_input = fields.number("attention_in_multiplier", 1.0)
    key_scale = fields.number("key_multiplier", 1.0) * of_input**2
    attention = AttentionSpec(rope=fields.rope(), scale=_rounded(key_scale * size**-0.5))
    scales = (
        fields.number("ssm_out_multiplier", 1.0),
        fields.number("attention_out_multiplier", 1.0) * of_input,
    )
    gate_scale, out_scale = fields.numbers("mlp_multipliers", (1.0, 1.0))
    mixer = ParallelSpec((mamba, attention), tuple(map(_rounded, scales)))
    return decoder(
        fields,
        lambda _: BlockSpec(mixer, MLPSpec(gate_scale=gate_scale, out_scale=out_scale)),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=fields.number("lm_head_multiplier", 1.0),
    )


def _write(model: Transformer) -> dict[str, Any]:
    block = model.blocks[0]
    if not isinstance(block.mixer, ParallelSpec) or not isinstance(block.feed_forward, MLPSpec):
        raise UserError("a model without attention and Mamba-2 in parallel.")
    mamba, attention = block.mixer.mixers
    if not isinstance(mamba, Mamba2Spec) or not isinstance(attention, AttentionSpec):
        raise UserError("a model of other mixers in parallel.")
    size = attention.head_dim or model.head_dim
    return (
        decoder_fields(model, attentions=[attention])
        | mamba_fields(mamba, model.d_model)
        | {
            "mamba_d_ssm": mamba.num_heads * mamba.head_dim,
            "mamba_rms_norm": mamba.norm != "none",
            "mamba_norm_before_gate": mamba.norm != "gated",
            "projectors_bias": mamba.bias,
            "ssm_multipliers": list(mamba.scales),
            "ssm_out_multiplier": block.mixer.scales[0],
            "attention_out_multiplier": block.mixer.scales[1],
            "key_multiplier": (attention.scale or size**-0.5) * size**0.5,
            "mlp_multipliers": [block.feed_forward.gate_scale, block.feed_forward.out_scale],
            "embedding_multiplier": model.embedding_scale,
            "lm_head_multiplier": model.logit_scale,
        }
    )


_NAMES = renamed(NAMES, mlp="feed_forward", post_attention_layernorm="pre_ff_layernorm") | {
    "final_norm.scale_D": Tensor("model.final_layernorm.weight", "D")
}
FALCON_H1 = Family(
    "falcon_h1",
    "FalconH1ForCausalLM",
    _read,
    _write,
    {
        path.replace("attention.", "mixers.attention.", 1) if path.startswith("attention.") else path: tensor
        for path, tensor in _NAMES.items()
    }
    | {f"mixers.{path}": tensor for path, tensor in mamba_names("model.layers.{y}.mamba").items()},
)
