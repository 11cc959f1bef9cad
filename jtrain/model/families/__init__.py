"""Model families: each reads the config.json of one `model_type`, and names the tensors of its checkpoints."""

from jtrain.model.families.family import Family
from jtrain.model.families.llama import LLAMA
from jtrain.model.families.qwen import QWEN2, QWEN3, QWEN3_MOE

FAMILIES: dict[str, Family] = {family.model_type: family for family in (LLAMA, QWEN3, QWEN3_MOE, QWEN2)}
"""Family by `model_type`. A model that several describe is exported as the first of them."""
