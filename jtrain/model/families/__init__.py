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
