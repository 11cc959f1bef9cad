"""Granite 3 and its mixtures (arXiv:2405.04324), and HyperCLOVA X SEED (arXiv:2506.22403), which scale what
each part adds.
"""

from typing import Any

from jtrain.errors import UserError
from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.families.config_fields import Fields
from jtrain.model.families.decoder import (
    NAMES,
    attention_of,
    biases_in,
    biases_written,
    decoder,
    decoder_fields,
    moe_of,
)
from jtrain.model.families.family import Family, Names, Tensor
from jtrain.model.mlp import MLPSpec
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer


def _attention(fields: Fields, scale: float = 1.0) -> AttentionSpec:
    bias, _ = biases_in(fields)
    return AttentionSpec(rope=fields.rope(), bias=bias, scale=fields.number("attention_multiplier", scale))


def _model(fields: Fields, block: BlockSpec, *, logit_scale: float) -> Transformer:
    fields.only(hidden_act="silu", quantization_config=None)
    return decoder(
        fields,
        lambda _: block,
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=logit_scale,
    )


def _read_granite(fields: Fields) -> Transformer:
    block = BlockSpec(
        _attention(fields),
        MLPSpec(bias=biases_in(fields)[1]),
        residual_scale=fields.number("residual_multiplier", 1.0),
    )
    return _model(fields, block, logit_scale=1 / fields.number("logits_scaling", 1.0))


def _write_granite(model: Transformer) -> dict[str, Any]:
    if (scale := attention_of(model).scale) is None:
        raise UserError("attention without a scale of its own.")
    multipliers = {
        "attention_multiplier": scale,
        "residual_multiplier": model.blocks[0].residual_scale,
        "embedding_multiplier": model.embedding_scale,
        "logits_scaling": 1 / model.logit_scale,
    }
    return decoder_fields(model) | biases_written(model) | multipliers


def _read_hyperclovax(fields: Fields) -> Transformer:
    head_dim = fields.whole("head_dim", fields.whole("hidden_size") // fields.whole("num_attention_heads"))
    block = BlockSpec(
        _attention(fields, head_dim**-0.5),
        MLPSpec(bias=biases_in(fields)[1]),
        norms="sandwich" if fields.flag("use_post_norm", True) else "before",
        residual_scale=fields.number("residual_multiplier", 1.0),
    )
    # Granite divides by it.
    return _model(fields, block, logit_scale=fields.number("logits_scaling", 1.0))


def _write_hyperclovax(model: Transformer) -> dict[str, Any]:
    return _write_granite(model) | {
        "logits_scaling": model.logit_scale,
        "use_post_norm": model.blocks[0].norms == "sandwich",
    }


def _read_moe(fields: Fields) -> Transformer:
    shared = fields.whole("shared_intermediate_size", 0)
    moe = MoESpec(
        num_experts=fields.whole("num_local_experts", 8),
        top_k=fields.whole("num_experts_per_tok", 2),
        # 0 is none.
        shared_d_ff=shared or None,
        balance_loss=fields.number("router_aux_loss_coef", 0.001),
    )
    block = BlockSpec(_attention(fields), moe, residual_scale=fields.number("residual_multiplier", 1.0))
    return _model(fields, block, logit_scale=1 / fields.number("logits_scaling", 1.0))


def _write_moe(model: Transformer) -> dict[str, Any]:
    moe, fields = moe_of(model), _write_granite(model)
    del fields["mlp_bias"]
    return fields | {
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": moe.balance_loss,
    }


def _write_moe_shared(model: Transformer) -> dict[str, Any]:
    return _write_moe(model) | {"shared_intermediate_size": moe_of(model).shared_d_ff or 0}


_LAYER = "model.layers.{y}"
_EXPERTS: Names = {
    "mlp.router_DX": Tensor(f"{_LAYER}.block_sparse_moe.router.layer.weight", "X D"),
    "mlp.gate_XDF": Tensor(f"{_LAYER}.block_sparse_moe.input_linear.weight", "X 2F D", 0),
    "mlp.up_XDF": Tensor(f"{_LAYER}.block_sparse_moe.input_linear.weight", "X 2F D", 1),
    "mlp.down_XFD": Tensor(f"{_LAYER}.block_sparse_moe.output_linear.weight", "X D F"),
    "mlp.shared.gate_DF": Tensor(f"{_LAYER}.shared_mlp.input_linear.weight", "2F D", 0),
    "mlp.shared.up_DF": Tensor(f"{_LAYER}.shared_mlp.input_linear.weight", "2F D", 1),
    "mlp.shared.down_FD": Tensor(f"{_LAYER}.shared_mlp.output_linear.weight", "D F"),
}
_POST_NORMS: Names = {
    "attention_post_norm.scale_D": Tensor(f"{_LAYER}.post_norm1.weight", "D"),
    "mlp_post_norm.scale_D": Tensor(f"{_LAYER}.post_norm2.weight", "D"),
}

GRANITE = Family("granite", "GraniteForCausalLM", _read_granite, _write_granite, NAMES)
GRANITE_MOE = Family("granitemoe", "GraniteMoeForCausalLM", _read_moe, _write_moe, NAMES | _EXPERTS)
GRANITE_MOE_SHARED = Family(
    "granitemoeshared", "GraniteMoeSharedForCausalLM", _read_moe, _write_moe_shared, NAMES | _EXPERTS
)
HYPERCLOVAX = Family(
    "hyperclovax", "HyperCLOVAXForCausalLM", _read_hyperclovax, _write_hyperclovax, NAMES | _POST_NORMS
)
