"""Makes the golden arrays of every family with torch and transformers; the tests that read them need neither.

    PYTHON_WITH_TORCH tests/families/make.py [--full FOLDER] [NAME]...      # tests/golden/hf/setup.sh makes the Python

Each case is a `model_type` of transformers with its default config, shrunk by jtrain/hf/peers/shrink.py, and the
fields below set so that what a family can do shows: multipliers that are not 1, biases, several groups of experts.
configs.json gets its config.json; golden/NAME.npz what transformers computes with weights that follow from the names
of the tensors (`draw` in jtrain/hf/peers/reference.py): the mean loss of both batches, logits of a few positions, and
of every position and every gradient what a number of fixed random directions see of it. With --full FOLDER the whole
directory with config.json, model.safetensors and reference.npz is left in FOLDER/NAME. Made with torch 2.13.0 and
transformers 5.23.0.
"""

import argparse
import json
import sys
import tempfile
import traceback
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "jtrain" / "hf" / "peers"))

import reference  # noqa: E402: of the folder above
import torch  # noqa: E402: no dependency of jtrain's tests
from draw import summary  # noqa: E402

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}
DOTS = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "num_hidden_layers": 3,
    "layer_types": None,
}

FIRST: dict[str, tuple[str, dict]] = {
    name: (name, {})
    for name in [
        "llama",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "mistral",
        "mixtral",
        "smollm3",
        "olmo2",
        "olmo3",
        "gemma2",
        "gemma3_text",
        "glm4",
        "gpt_oss",
        "gpt_neox",
        "gpt2",
        "nanochat",
        "minimax_m2",
        "ministral3",
        "cohere2",
        "phi3",
        "starcoder2",
        "exaone4",
        "seed_oss",
        "arcee",
        "apertus",
        "ernie4_5",
    ]
} | {
    "glm4_moe": ("glm4_moe", {"use_qk_norm": True, "attention_bias": True}),
    "deepseek_v3": ("deepseek_v3", {}),
    "granite": ("granite", MULTIPLIERS),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 32}),
    "dots1": ("dots1", DOTS),
}
"""Families that come first, by case: model_type and fields."""

VARIANTS: dict[str, tuple[str, dict]] = {
    "llama_llama3": (
        "llama",
        {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "num_key_value_heads": 2},
    ),
    "llama_linear": ("llama", {"rope_parameters": LINEAR, "num_key_value_heads": 1, "head_dim": 32}),
    "llama_yarn": ("llama", {"rope_parameters": YARN}),
    "hunyuan_v1_dense_dynamic": (
        "hunyuan_v1_dense",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "dynamic",
                "alpha": 1000.0,
                "factor": 1.0,
                "rope_theta": 10000.0,
            },
        },
    ),
    "llama_bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2_window": (
        "qwen2",
        {"use_sliding_window": True, "layer_types": None, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen3_moe_dense": (
        "qwen3_moe",
        {"mlp_only_layers": [0], "num_hidden_layers": 3, "norm_topk_prob": True, "attention_bias": True},
    ),
    "glm4_moe_plain": ("glm4_moe", {}),
    "deepseek_v3_yarn": (
        "deepseek_v3",
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}},
    ),
    "deepseek_v3_no_q_lora": ("deepseek_v3", {"q_lora_rank": None}),
    "gpt_neox_serial": ("gpt_neox", {"use_parallel_residual": False}),
    "gemma3_text_capped": ("gemma3_text", {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
}
"""Cases that set fields which the defaults of a class leave alone."""

LATER = [
    "afmoe",
    "axk1",
    "axk2",
    "bailing_hybrid",
    "beam",
    "bitnet",
    "cohere2_moe",
    "cohere_compass_text",
    "cwm",
    "deepseek_v2",
    "deepseek_v32",
    "deepseek_v4",
    "doge",
    "dots3_note_text",
    "exaone_moe",
    "falcon_h1",
    "flex_olmo",
    "flint",
    "gemma3n_text",
    "gemma4_text",
    "gemma4_unified_text",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "granite_swa",
    "granitemoe_swa",
    "granitemoehybrid",
    "hrm_text",
    "hy_v3",
    "hy_v4",
    "hyperclovax",
    "inkling_text",
    "inkling2_text",
    "jais2",
    "kimi_linear",
    "kolibri1",
    "laguna",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "llama4_text",
    "longcat_flash",
    "mellum",
    "mimo_v2_flash",
    "minicpm3",
    "minimax",
    "minimax_m3_vl_text",
    "ministral",
    "modernbert-decoder",
    "olmo_hybrid",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "qwen4_exp_text",
    "solar_open",
    "vaultgemma",
    "youtu",
    "zaya",
    "qwen2_moe",
    "olmo",
    "olmoe",
    "gemma",
    "phi",
    "phimoe",
    "glm",
    "granitemoe",
    "granitemoeshared",
    "cohere",
    "ernie4_5_moe",
    "hunyuan_v1_moe",
    "nemotron",
    "nemotron_h",
    "stablelm",
    "bamba",
    "helium",
    "mamba2",
    "jetmoe",
    "gptj",
    "falcon",
    "persimmon",
    "diffllama",
]
"""Every other causal model_type of the years since 2025, and older ones that are trained still."""

FIELDS: dict[str, dict] = {
    "granite_swa": MULTIPLIERS,
    "granitemoe_swa": MULTIPLIERS,
    "granitemoehybrid": MULTIPLIERS,
    "granitemoe": MULTIPLIERS,
    "granitemoeshared": MULTIPLIERS,
    "hyperclovax": MULTIPLIERS,
    "afmoe": {"mup_enabled": True},
    "falcon_h1": {
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.5,
        "key_multiplier": 0.7,
        "attention_in_multiplier": 0.8,
        "attention_out_multiplier": 1.2,
        "ssm_in_multiplier": 1.1,
        "ssm_out_multiplier": 0.6,
        "mlp_multipliers": [0.9, 0.7],
        "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
    },
    "deepseek_v2": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.5,
    },
    "cohere_compass_text": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 50000.0},
        },
    },
    "ministral": {"head_dim": 32},
    "llama4_text": {"interleave_moe_layer_step": 2},
}
"""Fields of the later cases that differ from the default."""

CASES = FIRST | VARIANTS | {name: (name, FIELDS.get(name, {})) for name in LATER}


def golden(folder: Path) -> dict[str, np.ndarray]:
    """The arrays of one golden file."""
    full = np.load(folder / "reference.npz")
    out = {"recipe": np.array((folder / "recipe.json").read_text())}
    for label in ("unpacked", "packed"):
        prefix = f"{label}/grad/"
        grads = {key.removeprefix(prefix): full[key] for key in full if key.startswith(prefix)}
        arrays = summary(full[f"{label}/logits"], full[f"{label}/loss"], grads)
        out |= {"names": np.array(json.dumps(sorted(grads)))}
        out |= {f"{label}/{key}": value for key, value in arrays.items()}
    return out


def main() -> None:
    """Makes the cases named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--full", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    configs_path = HERE / "configs.json"
    failed = {}
    for name in args.names or CASES:
        kind, fields = CASES[name]
        with tempfile.TemporaryDirectory() as scratch:
            folder = args.full / name if args.full else Path(scratch)
            try:
                facts = reference.write_reference(reference.small_config(kind, fields), folder, 0)
                arrays = golden(folder)
            except Exception as error:  # the other cases are made all the same
                failed[name] = f"{type(error).__name__}: {error}"
                print(f"{name}: FAILED {failed[name][:300]}", flush=True)
                (HERE / f"golden/{name}.npz").unlink(missing_ok=True)
                traceback.print_exc()
                continue
            configs = json.loads(configs_path.read_text()) if configs_path.is_file() else {}
            configs[name] = json.loads((folder / "config.json").read_text())
            configs_path.write_text(json.dumps(configs, indent=1, sort_keys=True) + "\n")
            np.savez_compressed(HERE / "golden" / f"{name}.npz", **arrays)
        print(f"{name}: {json.dumps(facts)}", flush=True)
    sys.exit(f"{len(failed)} failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
