"""Conversion between config.json and `Transformer`.

Each field that changes the function that a model computes is either read or refused by name. Fields that
transformers does not read for these architectures are ignored.
"""

from collections.abc import Mapping
from typing import Any

from jtrain.errors import UserError
from jtrain.model.rope import Llama3Scaling, RopeSpec
from jtrain.model.router import MoESpec
from jtrain.model.transformer import Transformer

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
"""model_type -> required class in `architectures`."""

_ONLY: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "hidden_act": ("silu",),
    "pretraining_tp": (1, None),
    "quantization_config": (None,),
    "partial_rotary_factor": (1, None),
    "decoder_sparse_step": (1, None),
}
"""Field -> values that match jtrain's model; the first one is also the default of a missing field."""

_SIZES = {
    "num_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "num_heads": "num_attention_heads",
    "d_ff": "intermediate_size",
    "vocab_size": "vocab_size",
}

_EXPERTS = {
    "num_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "normalize_top_k": "norm_topk_prob",
    "balance_loss": "router_aux_loss_coef",
}
"""Fields of `MoESpec` -> keys of config.json.

The balancing loss of transformers is computed over a batch instead of a sequence, and is `top_k` times
larger."""

_NUM_EXPERTS = ("num_experts", "num_local_experts")
"""Spellings of one setting: transformers 4 reads and writes the first; transformers 5 writes the second,
reads both."""

_ONE_EXPERT = "moe_intermediate_size"
"""Hidden width of one expert. `intermediate_size` belongs to dense layers, which the supported mixtures do
not have."""

_COMPARED = {
    **_SIZES,
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "rope": "rope_theta and rope_scaling, or rope_parameters",
    "norm_eps": "rms_norm_eps",
    "qk_norm": "model_type",
    "tie_embeddings": "tie_word_embeddings",
}
"""Fields of the model that determine its function -> keys of config.json."""


def model_from_config(config: Mapping[str, Any]) -> Transformer:
    """Builds the model that a config.json describes, in the form of transformers 4 or 5.

    Raises:
      UserError: an unsupported architecture or feature; names the field and its value.
    """
    try:
        return _model(config)
    except UserError:
        raise
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(
            f"config.json: a field has a value of another type or size than transformers writes ({error}). "
            "Download or export it again."
        ) from error


def _model(config: Mapping[str, Any]) -> Transformer:
    model_type = config.get("model_type")
    if model_type not in tuple(ARCHITECTURES):
        raise UserError(f"config.json: model_type={model_type!r} is not one of {', '.join(ARCHITECTURES)}.")
    # LlamaForSequenceClassification has model_type llama, too.
    classes = config.get("architectures") or [ARCHITECTURES[model_type]]
    if list(classes) != [ARCHITECTURES[model_type]]:
        raise UserError(
            f"config.json: architectures={classes} is not [{ARCHITECTURES[model_type]!r}]: only causal "
            "language models can be imported."
        )
    # Refused first: a field that changes the function must not be ignored.
    _check_only(config)
    _check_full_attention(config)
    moe = _moe(config) if model_type == "qwen3_moe" else None
    sizes = {field: _required(config, key) for field, key in _sizes(model_type).items()}
    num_heads = sizes["num_heads"]
    if model_type == "llama":
        num_kv_heads = config.get("num_key_value_heads") or num_heads
        # A Llama without head_dim divides its width, as transformers does.
        head_dim = config.get("head_dim") or sizes["d_model"] // num_heads
    else:  # Qwen3's defaults belong to one model size, so a value is required
        num_kv_heads, head_dim = _required(config, "num_key_value_heads"), _required(config, "head_dim")
    return Transformer(
        **sizes,
        moe=moe,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=_rope(config),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        # Qwen3 normalises queries and keys; Llama does not.
        qk_norm=model_type != "llama",
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def config_from_model(
    model: Transformer,
    *,
    dtype: str,
    max_seq_len: int,
    begin_id: int | None,
    end_id: int | None,
) -> dict[str, Any]:
    """Contents of config.json for a model, in the form of transformers 4, which transformers 5 also reads.

    Args:
      dtype: dtype of the tensors, `float32` or `bfloat16`.
      max_seq_len: length of the longest sequence in training. With scaled rotary frequencies, config.json has
        the length that they are scaled to, if it is larger.
      begin_id, end_id: token ids that begin and end a document.

    Raises:
      UserError: transformers refuses the shape of the model.
    """
    model_type = _model_type(model)
    if model_type == "llama" and model.d_model % model.num_heads:
        raise UserError(
            f"model.d_model={model.d_model} is not a multiple of model.num_heads={model.num_heads}, which "
            "transformers refuses for Llama. Only models with qk_norm (Qwen3) can be exported with such a "
            "shape."
        )
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        **{key: getattr(model, field) for field, key in _sizes(model_type).items()},
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "rope_theta": model.rope.theta,
        "rope_scaling": None,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "max_position_embeddings": max_seq_len,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": begin_id,
        "eos_token_id": end_id,
        "torch_dtype": dtype,
    }
    # Qwen3 has a sliding window field; None disables it.
    if model_type != "llama":
        config |= {"use_sliding_window": False, "sliding_window": None}
        if model.moe is not None:
            config |= {key: getattr(model.moe, field) for field, key in _EXPERTS.items()}
            config |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "intermediate_size": model.d_ff}
    else:
        config |= {"mlp_bias": False, "pretraining_tp": 1}
    if (scaling := model.rope.scaling) is not None:
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_seq_len,
        }
        # The length that the scaled frequencies were made for, if the run trained on shorter sequences.
        scaled_seq_len = int(scaling.factor * scaling.original_seq_len)
        config["max_position_embeddings"] = max(max_seq_len, scaled_seq_len)
    return config


def model_differences(theirs: Transformer, ours: Transformer) -> list[str]:
    """Differences between two models: one line per field that changes the function they compute."""
    lines: list[str] = []
    for field, key in _COMPARED.items():
        theirs_value, ours_value = getattr(theirs, field), getattr(ours, field)
        if theirs_value != ours_value:
            lines.append(f"model.{field}: {theirs_value} there ({key}), {ours_value} here")
    if (theirs.moe is None) != (ours.moe is None):
        lines.append(f"model.moe: {theirs.moe} there (model_type), {ours.moe} here")
    elif theirs.moe is not None and ours.moe is not None:
        for field, key in (("shared_experts", "model_type"), *_EXPERTS.items()):
            theirs_value, ours_value = getattr(theirs.moe, field), getattr(ours.moe, field)
            # Loss coefficients change how a model trains, not what it computes.
            if theirs_value != ours_value and not field.endswith("_loss"):
                lines.append(f"model.moe.{field}: {theirs_value} there ({key}), {ours_value} here")
    return lines


def _model_type(model: Transformer) -> str:
    """Hugging Face `model_type` of a model.

    Raises:
      UserError: the model matches no supported architecture.
    """
    if model.moe is None:
        return "qwen3" if model.qk_norm else "llama"
    if model.moe.shared_experts or not model.qk_norm:
        raise UserError(
            f"model.moe.shared_experts={model.moe.shared_experts} with model.qk_norm={model.qk_norm}: of "
            "mixtures only Qwen3-MoE can be exported, which has no shared expert and normalises queries and "
            "keys. Set model.moe.shared_experts=0 and model.qk_norm=True, or keep the checkpoint."
        )
    return "qwen3_moe"


def _sizes(model_type: str) -> dict[str, str]:
    return _SIZES | ({"d_ff": _ONE_EXPERT} if model_type == "qwen3_moe" else {})


def _moe(config: Mapping[str, Any]) -> MoESpec:
    if dense := config.get("mlp_only_layers"):
        raise UserError(
            f"config.json: mlp_only_layers={dense} is not supported: every layer must be a mixture of "
            "experts."
        )
    return MoESpec(
        num_experts=_num_experts(config),
        top_k=_required(config, "num_experts_per_tok"),
        normalize_top_k=bool(config.get("norm_topk_prob", False)),
        balance_loss=float(config.get("router_aux_loss_coef", 0.001)),
    )


def _num_experts(config: Mapping[str, Any]) -> int:
    """Number of experts, from `num_experts` (transformers 4) or `num_local_experts` (transformers 5)."""
    # Where neither is set, the error names the first.
    keys = [key for key in _NUM_EXPERTS if config.get(key) is not None] or [_NUM_EXPERTS[0]]
    counts = [_required(config, key) for key in keys]
    if len(set(counts)) > 1:
        raise UserError(
            f"config.json: num_experts={counts[0]} but num_local_experts={counts[1]}. transformers 4 reads "
            "the first and transformers 5 the second, as one setting. Delete the wrong one from config.json."
        )
    return counts[0]


def _required(config: Mapping[str, Any], key: str) -> Any:
    value = config.get(key)
    # bool is a subclass of int.
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"config.json: {key}={value!r} must be a whole number.")
    return value


def _check_only(config: Mapping[str, Any]) -> None:
    for key, allowed in _ONLY.items():
        value = config.get(key, allowed[0])
        if value not in allowed:
            raise UserError(f"config.json: {key}={value!r} is not supported, only {allowed[0]!r}.")


def _check_full_attention(config: Mapping[str, Any]) -> None:
    window = config.get("sliding_window")
    if config["model_type"] != "llama" and config.get("use_sliding_window") and window is not None:
        raise UserError(
            f"config.json: use_sliding_window=True (sliding_window={window}) is not supported: every layer "
            "of jtrain's model attends to the whole document."
        )
    # Newer config.json files list a kind per layer.
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise UserError(
            f"config.json: layer_types has {', '.join(sorted(kinds))}; only full_attention is supported."
        )


def _rope(config: Mapping[str, Any]) -> RopeSpec:
    """Rotary settings from `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`
    (transformers 4).
    """
    # transformers 5 looks in the same order, so a config.json describes the same model there.
    source = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    parameters: Mapping[str, Any] = config.get(source) or {}
    theta = float(parameters.get("rope_theta", config.get("rope_theta", 10_000.0)))
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    # A rotary factor below 1 rotates part of each head, which jtrain does not do.
    if (rotary_share := parameters.get("partial_rotary_factor", 1)) not in (1, None):
        raise UserError(
            f"config.json: {source}.partial_rotary_factor={rotary_share} is not supported, only 1."
        )
    if rope_type == "default":
        return RopeSpec(theta)
    if rope_type != "llama3":
        raise UserError(
            f"config.json: {source}.rope_type={rope_type!r} is not supported, only 'default' and 'llama3'."
        )
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if missing := [key for key in keys if key not in parameters]:
        raise UserError(f"config.json: {source} of type llama3 has no {', '.join(missing)}.")
    factor, low, high, original = (parameters[key] for key in keys)
    return RopeSpec(theta, Llama3Scaling(float(factor), float(low), float(high), int(original)))
