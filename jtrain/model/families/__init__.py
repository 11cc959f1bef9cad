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
    "gemma4",
    "layer_norm_decoders",
    "llama_relatives",
    "granite",
    "cohere",
    "mixtures.sigmoid_scores",
    "latent.deepseek",
    "latent.mistral4",
    "nanochat",
    "recurrent.delta_nets",
    "recurrent.state_spaces",
    "recurrent.kimi_linear",
    "recurrent.olmo_hybrid",
    "recurrent.short_convs",
    "recurrent.nemotron_h",
    "recurrent.falcon_h1",
    "mixtures.llama4",
    "mixtures.gpt_oss",
    "mixtures.flint",
    "mixtures.mimo",
    "granite_swa",
    "mixtures.windowed",
    "mixtures.beam",
)


def _families() -> dict[str, Family]:
    modules = [importlib.import_module(f"{__name__}.{name}") for name in _MODULES]
    families = [value for module in modules for value in vars(module).values() if isinstance(value, Family)]
    return {family.model_type: family for family in families}


FAMILIES = _families()
"""Family by `model_type`. A model that several describe is exported as the first of them."""

_INDEXER = "attention to the keys that an indexer chooses (DSA)"
_LAYERS = "embeddings for each layer, and layers that share keys and values"
LACKING = {
    "axk2": _INDEXER,
    "deepseek_v32": _INDEXER,
    "deepseek_v4": "hyper-connections, and attention to compressed keys",
    "diffllama": "attention as a difference of two softmaxes",
    "doge": "attention masks that follow from the values",
    "gemma3n_text": _LAYERS,
    "gemma4_text": _LAYERS,
    "glm_moe_dsa": _INDEXER,
    "gpt2": "learned positions",
    "gptj": "a bias of the unembedding",
    "hrm_text": "layers that are run several times",
    "hy_v4": f"hyper-connections, and {_INDEXER}",
    "inkling_text": "short convolutions of the residual stream, and relative positions",
    "inkling2_text": "short convolutions of the residual stream, and relative positions",
    "jetmoe": "attention whose heads are experts",
    "lfm3": "short convolutions of a form of their own",
    "longcat_flash": "two attentions a layer, and experts that compute nothing",
    "minimax": "lightning attention",
    "minimax_m3_vl_text": "attention to chosen blocks of keys",
    "modernbert-decoder": "a dense layer before the unembedding, and a bias of it",
    "phi": "a bias of the unembedding",
    "phimoe": "a router that chooses one expert after another (SparseMixer)",
    "zaya": "convolutions of queries and keys, and a router with layers of its own",
}
"""What jtrain lacks for the other causal language models of transformers, by `model_type`."""
