"""Model families: each reads the config.json of one `model_type`, and names the tensors of its checkpoints."""

import importlib

from jtrain.model.families.family import Family

_MODULES = (
    "llama",
    "qwen",
    "mistral",
    "smollm",
    "olmo",
    "glm",
    "gemma",
    "layer_norm_decoders",
    "llama_relatives",
    "granite",
    "cohere",
    "mixtures.sigmoid_scores",
    "deepseek",
    "nanochat",
    "delta_nets",
    "state_spaces",
    "short_convs",
    "nemotron_h",
    "falcon_h1",
    "mixtures.llama4",
    "mixtures.sinks",
    "mixtures.windowed",
)


def _families() -> dict[str, Family]:
    modules = [importlib.import_module(f"{__name__}.{name}") for name in _MODULES]
    found = [value for module in modules for value in vars(module).values() if isinstance(value, Family)]
    return {family.model_type: family for family in found}


FAMILIES = _families()
"""Family by `model_type`. A model that several describe is exported as the first of them."""

_INDEXER = "attention to the keys that an indexer chooses (DSA)"
_LAYERS = "embeddings for each layer, and layers that share keys and values"
LACKING = {
    "axk2": _INDEXER,
    "bailing_hybrid": "a form of delta attention of its own",
    "beam": "residual streams that are scaled by depth",
    "deepseek_v32": _INDEXER,
    "deepseek_v4": "hyper-connections, and attention to compressed keys",
    "diffllama": "attention as a difference of two softmaxes",
    "doge": "attention masks that follow from the values",
    "falcon": "a table of names for its fused queries, keys and values",
    "gemma3n_text": _LAYERS,
    "gemma4_text": _LAYERS,
    "gemma4_unified_text": "layers that share keys and values",
    "glm_moe_dsa": _INDEXER,
    "gpt2": "learned positions",
    "gptj": "a bias of the unembedding",
    "hrm_text": "layers that are run several times",
    "hy_v4": f"hyper-connections, and {_INDEXER}",
    "inkling_text": "short convolutions of the residual stream, and relative positions",
    "inkling2_text": "short convolutions of the residual stream, and relative positions",
    "jetmoe": "attention whose heads are experts",
    "kimi_linear": "a table of names for its delta nets (the mixers themselves are there)",
    "lfm3": "short convolutions of a form of their own",
    "longcat_flash": "two attentions a layer, and experts that compute nothing",
    "minimax": "lightning attention",
    "minimax_m3_vl_text": "attention to chosen blocks of keys",
    "modernbert-decoder": "a dense layer before the unembedding, and a bias of it",
    "olmo_hybrid": "the form of its delta nets: with the one that is there, logits are 3e-2 off",
    "phi": "a bias of the unembedding",
    "phimoe": "a router that chooses one expert after another (SparseMixer)",
    "zaya": "convolutions of queries and keys, and a router with layers of its own",
}
"""What jtrain lacks for the other causal language models of transformers, by `model_type`."""
