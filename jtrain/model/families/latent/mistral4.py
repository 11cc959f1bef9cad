"""Mistral 4: latent attention whose queries grow with their position, and a softmax over groups of experts."""

import dataclasses
from typing import Any

from jtrain.errors import UserError
from jtrain.model.families.config_fields import Fields
from jtrain.model.families.decoder import NAMES, decoder
from jtrain.model.families.family import Family, Tensor
from jtrain.model.families.latent.deepseek import (
    heads_of_keys,
    latent_fields,
    latent_in,
    latent_names,
    latent_of,
)
from jtrain.model.families.mixtures.deepseek_experts import (
    experts_in,
    experts_written,
    first_dense,
    names_of_experts,
)
from jtrain.model.rope import QueryTemperature
from jtrain.model.transformer import Transformer

_BETA, _SCALE, _SHARE = "llama_4_scaling_beta", "original_max_position_embeddings", "partial_rotary_factor"


def _read(fields: Fields) -> Transformer:
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if scaling.get(_BETA) is None or scaling.get(_SCALE) is None:
        raise UserError(
            f"config.json: rope_parameters of mistral4 needs {_BETA} and {_SCALE}, which say how queries "
            "grow with their position."
        )
    latent = latent_in(fields, beside=(_BETA, "max_position_embeddings", _SHARE))
    share = latent.rope_head_dim / latent.head_dim
    if abs(scaling.get(_SHARE, share) - share) > 1e-9:
        raise UserError(
            f"config.json: rope_parameters.{_SHARE}={scaling[_SHARE]} of mistral4 must be {share}, that of "
            "qk_rope_head_dim in a head."
        )
    temperature = QueryTemperature(float(scaling[_BETA]), int(scaling[_SCALE]))
    latent = dataclasses.replace(latent, temperature=temperature)
    moe = experts_in(fields, scoring_func="softmax", score="softmax", correction_bias=False)
    first = fields.whole("first_k_dense_replace", 0)
    blocks = first_dense(fields, latent, moe, default=0)
    return decoder(fields, blocks, first=first, **heads_of_keys(fields, latent))


def _write(model: Transformer) -> dict[str, Any]:
    fields, latent = latent_fields(model), latent_of(model)
    if latent.temperature is None or not isinstance(fields["rope_scaling"], dict):
        raise UserError("queries of mistral4 grow with their position, beside YaRN.")
    scaling = fields["rope_scaling"] | {_BETA: latent.temperature.beta}
    return fields | experts_written(model) | {"rope_scaling": scaling, "scoring_func": "softmax"}


_EXPERTS = "model.layers.{y}.mlp.experts"
_FUSED = {
    "mlp.gate_XDF": Tensor(f"{_EXPERTS}.gate_up_proj", "X 2F D", 0),
    "mlp.up_XDF": Tensor(f"{_EXPERTS}.gate_up_proj", "X 2F D", 1),
    "mlp.down_XFD": Tensor(f"{_EXPERTS}.down_proj", "X D F"),
}
_NAMES = NAMES | latent_names() | names_of_experts() | _FUSED
MISTRAL4 = Family("mistral4", "Mistral4ForCausalLM", _read, _write, _NAMES)
