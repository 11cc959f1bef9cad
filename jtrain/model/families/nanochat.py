"""nanochat (github.com/karpathy/nanochat): norms without weights, one of them after the embedding."""

import dataclasses
from typing import Any

from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.families.config_fields import Fields
from jtrain.model.families.decoder import NAMES, decoder, decoder_fields
from jtrain.model.families.family import Family, Tensor
from jtrain.model.mlp import MLPSpec
from jtrain.model.norm import NormSpec
from jtrain.model.transformer import Transformer


def _read(fields: Fields) -> Transformer:
    fields.only(hidden_act="relu2", attention_bias=False, quantization_config=None)
    rope = dataclasses.replace(fields.rope(), backwards=True)
    attention = AttentionSpec(rope=rope, qk_norm="unscaled", norm_after_rope=True)
    mlp = MLPSpec(activation="relu2", gated=False)
    return decoder(
        fields,
        lambda _: BlockSpec(attention, mlp),
        norm=NormSpec(scale="none"),
        embedding_norm=True,
        logit_soft_cap=fields.nullable("final_logit_softcapping", 15.0),
    )


def _write(model: Transformer) -> dict[str, Any]:
    return decoder_fields(model) | {
        "hidden_act": "relu2",
        "final_logit_softcapping": model.logit_soft_cap,
    }


NANOCHAT = Family(
    "nanochat",
    "NanoChatForCausalLM",
    _read,
    _write,
    NAMES
    | {
        "mlp.up_DF": Tensor("model.layers.{y}.mlp.fc1.weight", "F D"),
        "mlp.down_FD": Tensor("model.layers.{y}.mlp.fc2.weight", "D F"),
    },
)
