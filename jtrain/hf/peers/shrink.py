"""Shrinks a config.json to a few layers of small width, by the meaning of its fields; knows no family.

Every rule is about a field that many families share under one name. A field that no rule knows keeps its
value.
"""

import math

WIDTH, VOCABULARY, POSITIONS, WINDOW = 64, 128, 256, 16
FIRST_TOKEN = 4
"""Smallest drawn id, as in draw.py: special tokens are below, because torch leaves out the gradient of
padding.
"""
MOST_LAYERS = 8
"""Longest head and period that are kept whole; of longer patterns one layer of each kind is kept."""

EQUAL = {
    ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"): WIDTH,
    ("intermediate_size", "ffn_hidden_size", "ffn_dim", "dense_intermediate_size"): 96,
    ("prefix_dense_intermediate_size", "intermediate_size_mlp"): 80,
    ("moe_intermediate_size", "expert_ffn_hidden_size"): 32,
    ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"): 48,
    ("shared_intermediate_size", "shared_experts_intermediate_size"): 48,
    ("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"): VOCABULARY,
    ("q_lora_rank", "moe_latent_size"): 48,
    ("kv_lora_rank", "o_lora_rank", "router_hidden_size", "attention_sink_rank"): 32,
    ("qk_nope_head_dim", "v_head_dim", "linear_key_head_dim", "linear_head_dim", "index_head_dim"): 16,
    ("qk_rope_head_dim",): 8,
    ("qk_head_dim",): 24,
    ("linear_num_heads", "index_n_heads"): 4,
    ("mamba_n_heads", "mamba_num_heads"): 8,
    ("mamba_d_head", "mamba_head_dim"): 16,
    ("mamba_d_state", "ssm_state_size", "state_size", "hidden_size_per_layer_input", "laurel_rank"): 16,
    ("mamba_d_ssm",): 128,
    ("mamba_chunk_size", "chunk_size", "block_size"): 32,
    ("global_head_dim",): 64,
    ("time_step_rank", "mamba_dt_rank"): 4,
    ("hc_lowrank", "d_rel", "gated_norm_rank", "block_multiple_of"): 16,
    ("lru_width",): WIDTH,
    ("num_nextn_predict_layers", "num_mtp_layers"): 0,
}
"""Fields -> value, where the field has a value that is not 0."""

AT_MOST = {
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"): 8,
    ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts", "top_k"): 3,
    (
        "n_shared_experts",
        "num_shared_experts",
        "moe_num_shared_experts",
        "n_groups",
        "mamba_n_groups",
        "o_groups",
    ): 2,
    ("zero_expert_num",): 4,
    (
        "sliding_window",
        "sliding_window_size",
        "local_attention",
        "attention_window_size",
        "window_size",
    ): WINDOW,
    ("attention_chunk_size", "index_topk", "floor_scale", "log_scaling_n_floor", "rel_extent"): 32,
    ("original_max_position_embeddings", "index_block_size"): 32,
    ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length"): POSITIONS,
}
"""Fields -> largest value."""

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "swa_num_attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "swa_num_key_value_heads")
LEADING = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
"""Fields with the number of first layers that differ from the others."""
INTERVALS = (
    "decoder_sparse_step",
    "moe_layer_interval",
    "full_attention_interval",
    "attn_layer_period",
    "expert_layer_period",
    "interleave_moe_layer_step",
)
ZEROED = ("dropout", "pdrop", "layerdrop", "jitter", "aux_loss", "z_loss")
"""Parts of names of fields that add randomness, or losses that are no cross entropy: set to 0."""


def shrink(config: dict, full: dict) -> dict:
    """Returns `config` with the fields that make a model large set to small values.

    Args:
      config: as in config.json; fields may be missing.
      full: the same with every field, as transformers completes it.
    """
    changes = {}
    for rules, pick in ((EQUAL, lambda value, size: size), (AT_MOST, min)):
        for fields, size in rules.items():
            changes |= {field: pick(full[field], size) for field in fields if _is_size(full.get(field))}
    changes |= _heads(full) | _groups(full) | _layers(config, full)
    for field, value in full.items():
        if isinstance(value, float) and any(part in field for part in ZEROED):
            changes[field] = 0.0
        if field.endswith("token_id") and value is not None:
            changes[field] = 1 if isinstance(value, list) or value >= FIRST_TOKEN else value
    if "linear_conv_kernel_dim" in full:
        # The output of a delta rule is near zero where its query meets no key; its norm divides by it. With
        # 1e-6, transformers' own gradients in float32 are 4e-4 from those in float64; with this, 1e-6.
        changes["rms_norm_eps"] = 0.01
    out = {**config, **changes}
    for field in ("rope_scaling", "rope_parameters"):
        if isinstance(out.get(field), dict):
            out[field] = _rope(out[field], out)
    for field in ("quantization_config", "torch_dtype", "id2label", "label2id", "transformers_version"):
        out.pop(field, None)
    return out | {"dtype": "float32"}


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _heads(full: dict) -> dict:
    """Four heads of 16, or of 32 where the heads together are not as wide as the model."""
    changes = {}
    for heads_field in HEADS:
        heads = full.get(heads_field)
        if not _is_size(heads):
            continue
        is_state_space = heads_field == "num_heads" and "state_size" in full
        changes[heads_field] = 8 if is_state_space else 4
        kv_field = (
            KV_HEADS[3] if heads_field.startswith("swa") else next((f for f in KV_HEADS if f in full), None)
        )
        if kv_field and _is_size(full.get(kv_field)):
            count = full[kv_field]
            changes[kv_field] = 4 if count == heads else 1 if count == 1 else 2
        dim_field = "swa_head_dim" if heads_field.startswith("swa") else "head_dim"
        if _is_size(full.get(dim_field)):
            changes[dim_field] = _head_dim(full[dim_field], heads, full, is_state_space)
    for key, value in (("linear_num_key_heads", "linear_num_value_heads"),):
        if _is_size(full.get(key)):
            changes |= {key: 4 if full[key] == full[value] else 2, value: 4}
    if _is_size(full.get("linear_value_head_dim")):
        changes["linear_value_head_dim"] = (
            16 if full["linear_value_head_dim"] == full["linear_key_head_dim"] else 32
        )
    if _is_size(full.get("rotary_dim")) and _is_size(full.get("head_dim")):
        changes["rotary_dim"] = changes["head_dim"] * full["rotary_dim"] // full["head_dim"]
    elif _is_size(full.get("rotary_dim")):
        changes["rotary_dim"] = 8
    return changes


def _head_dim(size: int, heads: int, full: dict, is_state_space: bool) -> int:
    width = next(full[field] for field in ("hidden_size", "n_embd", "d_model") if field in full)
    # Some classes keep the rotated part, or the whole, of a query under this name too.
    for field, small in (("qk_rope_head_dim", 8), ("qk_head_dim", 24)):
        if full.get(field) == size:
            return small
    return 16 if is_state_space or size * heads == width else 32


def _groups(full: dict) -> dict:
    """Groups of experts: four, two of which are chosen, where there are several."""
    changes = {}
    for field in ("n_group", "num_expert_group"):
        if _is_size(full.get(field)) and full[field] > 1:
            changes[field] = 4
            if _is_size(full.get("topk_group")):
                changes["topk_group"] = 2 if full["topk_group"] < full[field] else 4
    return changes


def _layers(config: dict, full: dict) -> dict:
    """The number of layers and every list by layer: the first layers that differ, and one whole period."""
    layers_field = next((field for field in LAYERS if _is_size(full.get(field))), None)
    pattern = full.get("layers_block_type")
    if layers_field is None and not pattern:
        return {}
    count = full[layers_field] if layers_field else len(pattern)
    lists = {f: v for f, v in full.items() if isinstance(v, list) and v and not f.endswith("token_id")}
    by_index = {f: v for f, v in lists.items() if _is_index_list(v, count)}
    by_layer = {f: v for f, v in lists.items() if len(v) == count and f not in by_index}
    kinds = [
        (
            *(repr(v[i]) for v in by_layer.values()),
            *(i in v for v in by_index.values()),
            *(i >= full[f] for f in LEADING if isinstance(full.get(f), int)),
            repr(_of_layer(full.get("per_layer_config"), i)),
        )
        for i in range(count)
    ]
    steps = [full[f] for f in INTERVALS if _is_size(full.get(f))]
    rows = _rows(kinds, math.lcm(1, *steps))
    changes = {field: len(rows) for field in LAYERS if field == layers_field or _is_size(config.get(field))}
    # Lists that the class derives by itself are left to it, since the file that is proved lacks them too.
    is_prefix = rows == list(range(len(rows)))
    changes |= {f: [v[i] for i in rows] for f, v in by_layer.items() if f in config or not is_prefix}
    letters = {
        f: v for f, v in config.items() if f.endswith("pattern") and isinstance(v, str) and len(v) == count
    }
    changes |= {f: "".join(v[i] for i in rows) for f, v in letters.items()}
    changes |= {f: [k for k, i in enumerate(rows) if i in v] for f, v in by_index.items() if f in config}
    changes |= {f: sum(i < full[f] for i in rows) for f in LEADING if _is_size(full.get(f))}
    if full.get("per_layer_config"):
        settings = {str(k): _of_layer(full["per_layer_config"], i) for k, i in enumerate(rows)}
        changes["per_layer_config"] = {k: _small_layer(v, full) for k, v in settings.items() if v}
    if _is_size(full.get("moe_layer_end_index")):
        changes["moe_layer_end_index"] = len(rows) - 1
    if _is_size(full.get("num_kv_shared_layers")):
        changes["num_kv_shared_layers"] = min(full["num_kv_shared_layers"], len(rows) // 2)
    if _is_size(full.get("max_window_layers")):
        changes["max_window_layers"] = min(full["max_window_layers"], len(rows) // 2)
    return changes


def _of_layer(settings: dict | None, layer: int) -> dict:
    """Fields of one layer that differ from the others', whose keys are numbers of layers."""
    return next((v for k, v in (settings or {}).items() if int(k) == layer), {})


def _small_layer(settings: dict, full: dict) -> dict:
    """Fields of one layer, shrunk: heads twice as wide where they are wider than the others'."""
    sizes = {"head_dim": 64 if settings.get("head_dim", 0) > (full.get("head_dim") or 0) else 32}
    is_grouped = settings.get("num_key_value_heads") != settings.get("num_attention_heads")
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2 if is_grouped else 4}
    rules = {field: size for fields, size in (*EQUAL.items(), *AT_MOST.items()) for field in fields} | sizes
    return {field: rules.get(field, value) if _is_size(value) else value for field, value in settings.items()}


def _is_index_list(values: list, count: int) -> bool:
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return False
    return values == sorted(set(values)) and values[0] >= 0 and values[-1] < count and len(values) > 2


def _rows(kinds: list, step: int) -> list[int]:
    """Layers to keep: those before the pattern begins, and one period of it."""
    count = len(kinds)
    options = [
        (head + period, period)
        for head in range(count)
        for period in range(step, count - head + 1, step)
        if all(kinds[i] == kinds[i - period] for i in range(head + period, count))
    ]
    length = min(options, default=(count, count))[0]
    if length <= MOST_LAYERS:
        return list(range(min(count, max(2, length))))
    first = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]]
    return first if len(first) > 1 else list(range(2))


def _rope(rope: dict, config: dict) -> dict:
    """Rotary settings for few positions: `original_max_position_embeddings`, and factors by frequency."""
    out = dict(rope)
    for field, value in rope.items():
        if isinstance(value, dict):
            out[field] = _rope(value, config)
        elif field == "original_max_position_embeddings" and _is_size(value):
            out[field] = min(value, 32)
        elif field in ("long_factor", "short_factor"):
            head_dim = config.get("head_dim") or WIDTH // 4
            out[field] = value[: int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2]
    return out
