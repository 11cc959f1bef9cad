"""Parts that most families share: fields of config.json, names of tensors, and layers that repeat."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jtrain.errors import UserError
from jtrain.model.attention import AttentionSpec
from jtrain.model.block import BlockSpec
from jtrain.model.families.config_fields import Fields
from jtrain.model.families.family import Names, Tensor
from jtrain.model.mixer import MixerSpec
from jtrain.model.mlp import MLPSpec, Pointwise
from jtrain.model.rope import Llama3Scaling, RopeSpec, YarnScaling
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer

ACTIVATIONS: Mapping[str, Pointwise] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
"""Activations of transformers."""

WINDOWED, FULL = "sliding_attention", "full_attention"
"""Kinds of layers in `layer_types`."""


def decoder(
    fields: Fields,
    block: Callable[[int], BlockSpec],
    *,
    first: int = 0,
    d_ff: str = "intermediate_size",
    eps: str = "rms_norm_eps",
    tied: bool = False,
    width: int | None = None,
    num_layers: int | None = None,
    **settings: Any,
) -> Transformer:
    """The model of a config.json with the usual names of sizes.

    Args:
      block: description of each layer, by its number.
      first: layers before the pattern that repeats.
      d_ff, eps: fields of the hidden width, and of the norms' epsilon.
      width, num_layers: the hidden width and the number of layers, where they are no fields.
      tied: default of `tie_word_embeddings`.
      settings: further arguments of `Transformer`.
    """
    num_layers, d_model = num_layers or fields.whole("num_hidden_layers"), fields.whole("hidden_size")
    num_heads = fields.whole("num_attention_heads")
    sizes: dict[str, Any] = dict(
        num_layers=num_layers,
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=fields.whole("num_key_value_heads", num_heads),
        head_dim=fields.whole("head_dim", d_model // num_heads),
        d_ff=width or fields.whole(d_ff),
        vocab_size=fields.whole("vocab_size"),
        norm_eps=fields.number(eps, 1e-6),
        tie_embeddings=fields.flag("tie_word_embeddings", tied),
    )
    blocks = [block(layer) for layer in range(num_layers)]
    # Its dropout is for training only, and jtrain has none.
    fields.only(attention_dropout=0)
    return Transformer(**sizes | _pattern(blocks, first) | settings)


def _pattern(blocks: list[BlockSpec], first: int) -> dict[str, Any]:
    """Arguments of `Transformer` for these layers: flat ones where all are alike and plain."""
    repeated = blocks[first:]
    # The shortest period: a loop over it compiles least.
    period = next(
        (n for n in range(1, len(repeated)) if repeated[n:] == repeated[:-n]), max(1, len(repeated))
    )
    pattern = tuple(repeated[:period])
    if first == 0 and len(pattern) == 1 and (flat := _flat(pattern[0])) is not None:
        return flat
    return dict(pattern=pattern, first=tuple(blocks[:first]))


def _flat(block: BlockSpec) -> dict[str, Any] | None:
    """The arguments of `Transformer` that describe a block without a pattern; None if they cannot."""
    mixer, feed_forward = block.mixer, block.feed_forward
    if not isinstance(mixer, AttentionSpec) or mixer.rope is None:
        return None
    flat: dict[str, Any] = dict(
        rope=mixer.rope,
        qk_norm=mixer.qk_norm == "head",
        moe=feed_forward if isinstance(feed_forward, MoESpec) else None,
    )
    plain = BlockSpec(AttentionSpec(rope=mixer.rope, qk_norm=mixer.qk_norm), flat["moe"] or MLPSpec())
    return flat if plain == block and mixer.qk_norm in ("head", "none") else None


def attentions_of(model: Transformer) -> list[AttentionSpec]:
    """The grouped-query attention of each layer that has one.

    Raises:
      UserError: none has.
    """
    mixers = [block.mixer for block in model.blocks if isinstance(block.mixer, AttentionSpec)]
    if not mixers:
        raise UserError("a model without grouped-query attention.")
    return mixers


def attention_of(model: Transformer) -> AttentionSpec:
    """The first attention of a model, without its window."""
    return dataclasses.replace(attentions_of(model)[0], window=None)


def mixer_of[Spec: MixerSpec](model: Transformer, kind: type[Spec]) -> Spec:
    """The first mixer of a kind.

    Raises:
      UserError: the model has none.
    """
    for block in model.blocks:
        if isinstance(block.mixer, kind):
            return block.mixer
    raise UserError(f"a model without {kind.name}.")


def moe_of(model: Transformer) -> MoESpec:
    """The mixture of a model.

    Raises:
      UserError: it is dense.
    """
    if model.router is None:
        raise UserError("a model without experts.")
    return model.router


def decoder_fields(
    model: Transformer,
    *,
    attentions: list[AttentionSpec] | None = None,
    d_ff: str = "intermediate_size",
    eps: str = "rms_norm_eps",
) -> dict[str, Any]:
    """Fields of config.json that `decoder` reads, and those of the rope of the first attention that has one.

    Args:
      attentions: in place of the model's own, for a family whose models may have none.
    """
    attentions = attentions or attentions_of(model)
    num_heads, num_kv_heads, head_dim = attentions[0].head_sizes(model.sizes)
    rope = next((mixer.rope for mixer in attentions if mixer.rope is not None), RopeSpec())
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim}
    return fields_without_attention(model, d_ff=d_ff, eps=eps) | heads | rope_fields(rope)


def fields_without_attention(
    model: Transformer, *, d_ff: str = "intermediate_size", eps: str = "rms_norm_eps"
) -> dict[str, Any]:
    """Fields of config.json that `decoder` reads, but for those of heads."""
    return {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.d_model,
        d_ff: model.d_ff,
        "vocab_size": model.vocab_size,
        eps: model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
    }


def rope_fields(rope: RopeSpec) -> dict[str, Any]:
    """Fields of config.json in the form of transformers 4, which 5 reads as well."""
    fields: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": None}
    if rope.rotated_share != 1:
        fields["partial_rotary_factor"] = rope.rotated_share
    match rope.scaling:
        case None:
            return fields
        case Llama3Scaling() as scaling:
            fields["rope_scaling"] = {"rope_type": "llama3", **dataclasses.asdict(scaling)}
        case YarnScaling() as scaling:
            fields["rope_scaling"] = {"rope_type": "yarn", **dataclasses.asdict(scaling)}
        case scaling:
            fields["rope_scaling"] = {"rope_type": "linear", **dataclasses.asdict(scaling)}
    if "original_seq_len" in (values := fields["rope_scaling"]):
        values["original_max_position_embeddings"] = values.pop("original_seq_len")
    return fields


def layer_types_of(model: Transformer) -> dict[str, Any]:
    """`layer_types` and `sliding_window` of a model whose layers have one window or none."""
    windows = [mixer.window for mixer in attentions_of(model)]
    return {
        "layer_types": [FULL if window is None else WINDOWED for window in windows],
        "sliding_window": next((window for window in windows if window is not None), None),
    }


def mlp_types_of(model: Transformer) -> dict[str, Any]:
    """`mlp_layer_types` of a model: `sparse` for layers with a mixture of experts."""
    dense = [isinstance(block.feed_forward, MLPSpec) for block in model.blocks]
    return {"mlp_layer_types": ["dense" if is_dense else "sparse" for is_dense in dense]}


def biases_in(fields: Fields) -> tuple[Literal["none", "all"], bool]:
    """Biases of attention and of feed-forward layers, from `attention_bias` and `mlp_bias`."""
    return "all" if fields.flag("attention_bias") else "none", fields.flag("mlp_bias")


def biases_written(model: Transformer) -> dict[str, Any]:
    """Fields that `biases_in` reads."""
    mlp = next((b.feed_forward for b in model.blocks if isinstance(b.feed_forward, MLPSpec)), MLPSpec())
    return {"attention_bias": attention_of(model).bias == "all", "mlp_bias": mlp.bias}


SINKS: Names = {"attention.sink_N": Tensor("model.layers.{y}.self_attn.sinks", "N")}
"""Name of the sinks of a layer, in families that have them."""

NAMES: Names = {
    "embed_VD": Tensor("model.embed_tokens.weight", "V D"),
    "attention_norm.scale_D": Tensor("model.layers.{y}.input_layernorm.weight", "D"),
    "attention_norm.bias_D": Tensor("model.layers.{y}.input_layernorm.bias", "D"),
    "attention.q_DNH": Tensor("model.layers.{y}.self_attn.q_proj.weight", "NH D"),
    "attention.q_bias_NH": Tensor("model.layers.{y}.self_attn.q_proj.bias", "NH"),
    "attention.k_DKH": Tensor("model.layers.{y}.self_attn.k_proj.weight", "KH D"),
    "attention.k_bias_KH": Tensor("model.layers.{y}.self_attn.k_proj.bias", "KH"),
    "attention.v_DKH": Tensor("model.layers.{y}.self_attn.v_proj.weight", "KH D"),
    "attention.v_bias_KH": Tensor("model.layers.{y}.self_attn.v_proj.bias", "KH"),
    "attention.o_NHD": Tensor("model.layers.{y}.self_attn.o_proj.weight", "D NH"),
    "attention.o_bias_D": Tensor("model.layers.{y}.self_attn.o_proj.bias", "D"),
    "attention.q_norm.scale_H": Tensor("model.layers.{y}.self_attn.q_norm.weight", "H"),
    "attention.k_norm.scale_H": Tensor("model.layers.{y}.self_attn.k_norm.weight", "H"),
    "attention.q_norm.scale_NH": Tensor("model.layers.{y}.self_attn.q_norm.weight", "NH"),
    "attention.k_norm.scale_KH": Tensor("model.layers.{y}.self_attn.k_norm.weight", "KH"),
    "mlp_norm.scale_D": Tensor("model.layers.{y}.post_attention_layernorm.weight", "D"),
    "mlp_norm.bias_D": Tensor("model.layers.{y}.post_attention_layernorm.bias", "D"),
    "mlp.gate_DF": Tensor("model.layers.{y}.mlp.gate_proj.weight", "F D"),
    "mlp.gate_bias_F": Tensor("model.layers.{y}.mlp.gate_proj.bias", "F"),
    "mlp.up_DF": Tensor("model.layers.{y}.mlp.up_proj.weight", "F D"),
    "mlp.up_bias_F": Tensor("model.layers.{y}.mlp.up_proj.bias", "F"),
    "mlp.down_FD": Tensor("model.layers.{y}.mlp.down_proj.weight", "D F"),
    "mlp.down_bias_D": Tensor("model.layers.{y}.mlp.down_proj.bias", "D"),
    "mlp.router_DX": Tensor("model.layers.{y}.mlp.gate.weight", "X D"),
    "mlp.gate_XDF": Tensor("model.layers.{y}.mlp.experts.{x}.gate_proj.weight", "F D"),
    "mlp.up_XDF": Tensor("model.layers.{y}.mlp.experts.{x}.up_proj.weight", "F D"),
    "mlp.down_XFD": Tensor("model.layers.{y}.mlp.experts.{x}.down_proj.weight", "D F"),
    "final_norm.scale_D": Tensor("model.norm.weight", "D"),
    "final_norm.bias_D": Tensor("model.norm.bias", "D"),
    "unembed_DV": Tensor("lm_head.weight", "V D"),
}
"""Tensors by the names that Llama gave them, and most families after it."""


INTERLEAVED: Names = {
    "attention.q_DNH": Tensor("model.layers.{y}.self_attn.q_proj.weight", "NI D"),
    "attention.q_bias_NH": Tensor("model.layers.{y}.self_attn.q_proj.bias", "NI"),
    "attention.k_DKH": Tensor("model.layers.{y}.self_attn.k_proj.weight", "KI D"),
    "attention.k_bias_KH": Tensor("model.layers.{y}.self_attn.k_proj.bias", "KI"),
}
"""Queries and keys where the pairs of a rotation lie side by side."""


def renamed(names: Names, **changes: str) -> dict[str, Tensor]:
    """Names with parts replaced: `renamed(NAMES, mlp="feed_forward")` changes `.mlp.` to `.feed_forward.`."""

    def rename(name: str) -> str:
        for old, new in changes.items():
            name = name.replace(f".{old}.", f".{new}.")
        return name

    return {path: dataclasses.replace(tensor, name=rename(tensor.name)) for path, tensor in names.items()}
