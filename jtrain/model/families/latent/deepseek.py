"""DeepSeek-V2 and V3 (arXiv:2405.04434, 2412.19437), Kimi K2, GLM-4.7-Flash, Youtu-LLM and MiniCPM3: latent
attention.
"""

import dataclasses
from typing import Any

from jtrain.errors import UserError
from jtrain.model.block import BlockSpec
from jtrain.model.families.config_fields import Fields
from jtrain.model.families.decoder import (
    NAMES,
    decoder,
    fields_without_attention,
    moe_of,
    rope_fields,
)
from jtrain.model.families.family import Family, Names, Tensor
from jtrain.model.families.mixtures.deepseek_experts import (
    experts_in,
    experts_written,
    first_dense,
    names_of_experts,
)
from jtrain.model.latent_attention import LatentAttentionSpec
from jtrain.model.mlp import MLPSpec
from jtrain.model.rope import RopeSpec
from jtrain.model.transformer import Transformer


def latent_in(
    fields: Fields, *, theta: float = 10_000.0, beside: tuple[str, ...] = (), **changes: Any
) -> LatentAttentionSpec:
    """The latent attention that a config.json describes.

    Args:
      theta, beside: arguments of `Fields.rope`.
      changes: arguments of `LatentAttentionSpec` that this family has otherwise.
    """
    fields.only(hidden_act="silu", quantization_config=None, pretraining_tp=1, rope_interleave=True)
    nope, rope = fields.whole("qk_nope_head_dim"), fields.whole("qk_rope_head_dim")
    fields.only(qk_head_dim=nope + rope)
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    return LatentAttentionSpec(
        kv_rank=fields.whole("kv_lora_rank"),
        q_rank=fields.get("q_lora_rank"),
        nope_head_dim=nope,
        rope_head_dim=rope,
        value_head_dim=fields.whole("v_head_dim"),
        rope=fields.rope(theta=theta, beside=beside),
        mscale=float(scaling.get("mscale_all_dim") or 0.0),
        bias=fields.flag("attention_bias"),
        **changes,
    )


def heads_of_keys(fields: Fields, latent: LatentAttentionSpec) -> dict[str, Any]:
    """Arguments of `decoder` where each head has keys of its own."""
    num_heads = fields.whole("num_attention_heads")
    fields.only(num_key_value_heads=num_heads)
    return dict(num_kv_heads=num_heads, head_dim=latent.head_dim)


def latent_of(model: Transformer) -> LatentAttentionSpec:
    """The first latent attention of a model.

    Raises:
      UserError: it has none.
    """
    mixers = (block.mixer for block in model.blocks if isinstance(block.mixer, LatentAttentionSpec))
    if (mixer := next(mixers, None)) is None:
        raise UserError("a model without latent attention.")
    return mixer


def latent_fields(model: Transformer) -> dict[str, Any]:
    """Fields of config.json that `decoder` and `latent_in` read."""
    latent = latent_of(model)
    num_heads = latent.num_heads or model.num_heads
    rope = rope_fields(latent.rope or RopeSpec())
    if latent.mscale:
        rope["rope_scaling"] = (rope["rope_scaling"] or {}) | {"mscale_all_dim": latent.mscale}
    return (
        fields_without_attention(model)
        | rope
        | {
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_heads,
            "kv_lora_rank": latent.kv_rank,
            "q_lora_rank": latent.q_rank,
            "qk_nope_head_dim": latent.nope_head_dim,
            "qk_rope_head_dim": latent.rope_head_dim,
            "v_head_dim": latent.value_head_dim,
            "attention_bias": latent.bias,
        }
    )


_ATTENTION = "model.layers.{y}.self_attn"
_LATENT: Names = {
    "attention.q_DNH": Tensor(f"{_ATTENTION}.q_proj.weight", "NI D"),
    "attention.q_DQ": Tensor(f"{_ATTENTION}.q_a_proj.weight", "Q D"),
    "attention.q_bias_Q": Tensor(f"{_ATTENTION}.q_a_proj.bias", "Q"),
    "attention.q_norm.scale_Q": Tensor(f"{_ATTENTION}.q_a_layernorm.weight", "Q"),
    "attention.q_QNH": Tensor(f"{_ATTENTION}.q_b_proj.weight", "NI Q"),
    "attention.kv_DC": Tensor(f"{_ATTENTION}.kv_a_proj_with_mqa.weight", "C+J D", 0),
    "attention.k_DU": Tensor(f"{_ATTENTION}.kv_a_proj_with_mqa.weight", "C+J D", 1),
    "attention.kv_bias_C": Tensor(f"{_ATTENTION}.kv_a_proj_with_mqa.bias", "C+J", 0),
    "attention.k_bias_U": Tensor(f"{_ATTENTION}.kv_a_proj_with_mqa.bias", "C+J", 1),
    "attention.kv_norm.scale_C": Tensor(f"{_ATTENTION}.kv_a_layernorm.weight", "C"),
    "attention.kv_CNE": Tensor(f"{_ATTENTION}.kv_b_proj.weight", "NE C"),
    "attention.o_NPD": Tensor(f"{_ATTENTION}.o_proj.weight", "D NP"),
}


def latent_names(*, interleaved: bool = True) -> Names:
    """Names of latent attention; where not `interleaved`, pairs of a rotation lie half a head apart."""
    if interleaved:
        return _LATENT
    return {
        path: dataclasses.replace(tensor, dims=tensor.dims.replace("I", "H").replace("J", "U"))
        for path, tensor in _LATENT.items()
    }


_NAMES = NAMES | _LATENT


def _read_v2(fields: Fields) -> Transformer:
    # transformers never scales the weights of a token's experts to one.
    fields.only(mlp_bias=False, norm_topk_prob=False)
    latent, method = latent_in(fields), fields.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UserError(
            f"config.json: topk_method={method!r} is not supported, only 'greedy' and 'group_limited_greedy'."
        )
    softmax: dict[str, Any] = dict(
        score="softmax",
        group_score="best",
        correction_bias=False,
        normalize_top_k=False,
        balance_loss=fields.number("aux_loss_alpha", 0.0),
    )
    if method == "greedy":
        fields.ignore("n_group", "topk_group")
        softmax |= dict(num_groups=1, top_groups=1)
    moe = experts_in(fields, scoring_func="softmax", topk_method=method, **softmax)
    blocks = first_dense(fields, latent, moe, default=0)
    return decoder(
        fields, blocks, first=fields.get("first_k_dense_replace", 0), **heads_of_keys(fields, latent)
    )


def _write_v2(model: Transformer) -> dict[str, Any]:
    moe = moe_of(model)
    method = "greedy" if moe.num_groups == 1 else "group_limited_greedy"
    return (
        latent_fields(model)
        | experts_written(model)
        | {"scoring_func": "softmax", "topk_method": method, "norm_topk_prob": False}
        | {"aux_loss_alpha": moe.balance_loss}
    )


def _read_v3(fields: Fields) -> Transformer:
    fields.ignore("num_nextn_predict_layers", "num_mtp_layers")  # heads beside the model, not read
    latent = latent_in(fields)
    blocks = first_dense(fields, latent, experts_in(fields), default=3)
    return decoder(
        fields, blocks, first=fields.get("first_k_dense_replace", 3), **heads_of_keys(fields, latent)
    )


def _write_v3(model: Transformer) -> dict[str, Any]:
    return latent_fields(model) | experts_written(model) | {"num_nextn_predict_layers": 0}


def _read_by_kinds(fields: Fields, *, norms: Any = "before") -> Transformer:
    """The model of a config.json that lists the kinds of feed-forward layers; `norms` are of mixtures."""
    fields.ignore("num_nextn_predict_layers", "num_mtp_layers")
    latent, moe = latent_in(fields), experts_in(fields)
    dense, num_layers = fields.whole("first_k_dense_replace", 1), fields.whole("num_hidden_layers")
    default = ["dense"] * dense + ["sparse"] * (num_layers - dense)
    kinds = fields.layer_types(num_layers, default, key="mlp_layer_types")
    if unknown_kinds := sorted(set(kinds) - {"dense", "sparse"}):
        raise UserError(
            f"config.json: mlp_layer_types has {unknown_kinds}, only 'dense' and 'sparse' are supported."
        )
    blocks = {"dense": BlockSpec(latent, MLPSpec()), "sparse": BlockSpec(latent, moe, norms=norms)}
    first = next((y for y, kind in enumerate(kinds) if kind == "sparse"), 0)
    return decoder(fields, lambda y: blocks[kinds[y]], first=first, **heads_of_keys(fields, latent))


def _write_by_kinds(model: Transformer) -> dict[str, Any]:
    kinds = ["dense" if isinstance(block.feed_forward, MLPSpec) else "sparse" for block in model.blocks]
    return latent_fields(model) | experts_written(model) | {"mlp_layer_types": kinds}


def _read_youtu(fields: Fields) -> Transformer:
    fields.only(mlp_bias=False)
    fields.ignore("embedding_initializer_range")
    latent = latent_in(fields)
    return decoder(fields, lambda _: BlockSpec(latent), tied=True, **heads_of_keys(fields, latent))


def _read_minicpm3(fields: Fields) -> Transformer:
    fields.only(mlp_bias=False)
    latent, d_model = latent_in(fields), fields.whole("hidden_size")
    num_layers = fields.whole("num_hidden_layers")
    scale = fields.number("scale_depth", num_layers**0.5) / num_layers**0.5
    return decoder(
        fields,
        lambda _: BlockSpec(latent, residual_scale=scale),
        tied=True,
        embedding_scale=fields.number("scale_emb", 12.0),
        logit_scale=fields.number("dim_model_base", float(d_model)) / d_model,
        **heads_of_keys(fields, latent),
    )


def _write_minicpm3(model: Transformer) -> dict[str, Any]:
    return latent_fields(model) | {
        "scale_emb": model.embedding_scale,
        "scale_depth": round(model.blocks[0].residual_scale * model.num_layers**0.5, 12),
        "dim_model_base": round(model.logit_scale * model.d_model),
    }


_V3_NAMES = _NAMES | names_of_experts()
DEEPSEEK_V3 = Family("deepseek_v3", "DeepseekV3ForCausalLM", _read_v3, _write_v3, _V3_NAMES)
KIMI_K2 = Family("kimi_k2", "DeepseekV3ForCausalLM", _read_v3, _write_v3, _V3_NAMES)
GLM4_MOE_LITE = Family("glm4_moe_lite", "Glm4MoeLiteForCausalLM", _read_by_kinds, _write_by_kinds, _V3_NAMES)
_POST_MLP: Names = {"mlp_post_norm.scale_D": Tensor("model.layers.{y}.post_mlp_layernorm.weight", "D")}
AXK1 = Family(
    "axk1",
    "AXK1ForCausalLM",
    lambda fields: _read_by_kinds(fields, norms="sandwich_mlp"),
    _write_by_kinds,
    _V3_NAMES | _POST_MLP,
)
DEEPSEEK_V2 = Family("deepseek_v2", "DeepseekV2ForCausalLM", _read_v2, _write_v2, _V3_NAMES)
YOUTU = Family("youtu", "YoutuForCausalLM", _read_youtu, latent_fields, _NAMES)
MINICPM3 = Family(
    "minicpm3",
    "MiniCPM3ForCausalLM",
    _read_minicpm3,
    _write_minicpm3,
    NAMES | latent_names(interleaved=False),
)
