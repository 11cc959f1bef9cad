"""jtrain: train large language models in JAX, from files on disk to a checkpoint that other tools read."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jtrain.train.logprobs import PlacedModel, logprobs
    from jtrain.train.weight_stream import WeightStream

__all__ = ["PlacedModel", "WeightStream", "logprobs"]

_MODULES = {
    "PlacedModel": "jtrain.train.logprobs",
    "WeightStream": "jtrain.train.weight_stream",
    "logprobs": "jtrain.train.logprobs",
}


def __getattr__(name: str) -> Any:
    """Imports a name at its first use: no import of jtrain alone waits for jax."""
    if name in _MODULES:
        return globals().setdefault(name, getattr(importlib.import_module(_MODULES[name]), name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
