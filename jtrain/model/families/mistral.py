"""Mistral, Ministral (arXiv:2310.06825), Ministral 3 and Mixtral (arXiv:2401.04088)."""

from typing import Any

from jtrain.errors import UserError
from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.families.config_fields import Fields
from jtrain.model.families.decoder import (
    FULL,
    NAMES,
    WINDOWED,
    attention_of,
    decoder,
    decoder_fields,
    layer_types_of,
    moe_of,
)
from jtrain.model.families.family import Family, Tensor
from jtrain.model.mlp import MLPSpec
from jtrain.model.rope import QueryTemperature
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer


def _read_mistral(fields: Fields) -> Transformer:
    return _read(fields, MLPSpec(), theta=10_000.0)


def _read(fields: Fields, feed_forward: MLPSpec | MoESpec, *, theta: float) -> Transformer:
    fields.only(hidden_act="silu", quantization_config=None)
    fields.ignore("router_jitter_noise")  # only with the training of transformers
    rope, window = fields.rope(theta=theta), fields.get("sliding_window")
    num_layers = fields.whole("num_hidden_layers")
    kinds = fields.layer_types(num_layers, [FULL if window is None else WINDOWED] * num_layers)
    return decoder(
        fields,
        lambda y: BlockSpec(
            AttentionSpec(rope=rope, window=window if kinds[y] == WINDOWED else None), feed_forward
        ),
    )


def _read_mixtral(fields: Fields) -> Transformer:
    moe = MoESpec(
        num_experts=fields.whole("num_local_experts"),
        top_k=fields.whole("num_experts_per_tok"),
        balance_loss=fields.number("router_aux_loss_coef", 0.001),
    )
    return _read(fields, moe, theta=1e6)


def _read_ministral3(fields: Fields) -> Transformer:
    fields.only(hidden_act="silu", quantization_config=None)
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    beta, scale = (scaling.get(key) for key in ("llama_4_scaling_beta", "original_max_position_embeddings"))
    if beta is None or scale is None:
        raise UserError(
            "config.json: rope_parameters of ministral3 needs llama_4_scaling_beta and "
            "original_max_position_embeddings, which say how queries grow with their position."
        )
    scaling_fields = ("llama_4_scaling_beta", "max_position_embeddings")
    attention = AttentionSpec(
        rope=fields.rope(theta=1e6, beside=scaling_fields),
        window=fields.get("sliding_window"),
        temperature=QueryTemperature(float(beta), int(scale)),
    )
    return decoder(fields, lambda _: BlockSpec(attention))


def _write_ministral3(model: Transformer) -> dict[str, Any]:
    fields, temperature = decoder_fields(model), attention_of(model).temperature
    if temperature is None or not isinstance(fields["rope_scaling"], dict):
        raise UserError("queries of ministral3 grow with their position, beside YaRN.")
    scaling = fields["rope_scaling"] | {"llama_4_scaling_beta": temperature.beta}
    return fields | {"rope_scaling": scaling, "sliding_window": layer_types_of(model)["sliding_window"]}


def _write(model: Transformer) -> dict[str, Any]:
    fields = layer_types_of(model)
    if len(set(fields.pop("layer_types"))) > 1:
        raise UserError("all layers have one window, or none has.")
    return decoder_fields(model) | fields


def _write_mixtral(model: Transformer) -> dict[str, Any]:
    moe = moe_of(model)
    return _write(model) | {
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": moe.balance_loss,
    }


_EXPERT = "model.layers.{y}.block_sparse_moe.experts.{x}"
_MIXTRAL_NAMES = NAMES | {
    "mlp.router_DX": Tensor("model.layers.{y}.block_sparse_moe.gate.weight", "X D"),
    "mlp.gate_XDF": Tensor(f"{_EXPERT}.w1.weight", "F D"),
    "mlp.up_XDF": Tensor(f"{_EXPERT}.w3.weight", "F D"),
    "mlp.down_XFD": Tensor(f"{_EXPERT}.w2.weight", "D F"),
}

MISTRAL = Family("mistral", "MistralForCausalLM", _read_mistral, _write, NAMES)
MINISTRAL = Family(
    "ministral", "MinistralForCausalLM", _read_mistral, lambda m: decoder_fields(m) | layer_types_of(m), NAMES
)
MINISTRAL3 = Family("ministral3", "Ministral3ForCausalLM", _read_ministral3, _write_ministral3, NAMES)
MIXTRAL = Family("mixtral", "MixtralForCausalLM", _read_mixtral, _write_mixtral, _MIXTRAL_NAMES)
