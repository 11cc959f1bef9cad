"""Values of fields that a config.json leaves out, where transformers' class has another than most have.

A field that is null has no value here: that is a value of its own. tests/hf/test_model_config.py checks some
of them; all were compared with transformers 5.23 for each field of each small config of tests/families.
"""

from collections.abc import Mapping
from typing import Any

_CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

_GEMMA4_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}

MISSING: Mapping[str, Mapping[str, Any]] = {
    "arcee": {"rms_norm_eps": 1e-5},
    "bailing_hybrid": {"num_key_value_heads": 32},
    "beam": {"head_dim": 128, "num_key_value_heads": 8},
    "cohere": {"layer_norm_eps": 1e-5, "rope_theta": 5e5},
    "cohere2": {"layer_norm_eps": 1e-5},
    "cwm": {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_parameters": _CWM_ROPE},
    "dots1": {"num_key_value_heads": 32, "norm_topk_prob": False, "sliding_window": 4096},
    "ernie4_5": {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1e-5},
    "exaone4": {"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096},
    "exaone_moe": {"num_key_value_heads": 32, "rms_norm_eps": 1e-5},
    "falcon": {"layer_norm_epsilon": 1e-5},
    "gemma": {"head_dim": 256, "num_key_value_heads": 16},
    "gemma3_text": {"head_dim": 256},
    "gemma4_unified_text": {"head_dim": 256, "num_key_value_heads": 4, "rope_parameters": _GEMMA4_ROPES},
    "glm": {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7},
    "glm4": {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7},
    "glm4_moe": {"num_key_value_heads": 8, "n_shared_experts": 1, "rms_norm_eps": 1e-5},
    "gpt_neox": {"layer_norm_eps": 1e-5},
    "helium": {"head_dim": 128, "num_key_value_heads": 20, "rms_norm_eps": 1e-8},
    "hunyuan_v1_dense": {"rms_norm_eps": 1e-5},
    "kimi_linear": {"num_key_value_heads": 32, "rms_norm_eps": 1e-5},
    "minimax_m2": {"head_dim": 128, "num_key_value_heads": 8},
    "hunyuan_v1_moe": {"rms_norm_eps": 1e-5},
    "ministral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mistral4": {"num_key_value_heads": 32},
    "mixtral": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    "olmo2": {"rms_norm_eps": 1e-5},
    "olmo3": {"rms_norm_eps": 1e-5},
    "olmoe": {"rms_norm_eps": 1e-5},
    "phi3": {"rms_norm_eps": 1e-5},
    "qwen2": {"num_key_value_heads": 32},
    "seed_oss": {"head_dim": 128, "num_key_value_heads": 8},
    "solar_open": {"head_dim": 128, "num_key_value_heads": 8, "n_shared_experts": 1, "rms_norm_eps": 1e-5},
    "stablelm": {"layer_norm_eps": 1e-5, "num_key_value_heads": 32},
    "starcoder2": {"norm_epsilon": 1e-5, "num_key_value_heads": 2},
}
"""Values by `model_type` and field."""
