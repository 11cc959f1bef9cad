"""Data pipeline from text to packed batches: loaders read and tokenise, constructors plan and pack."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jtrain.data.dataset import TextDataset, open_dataset
    from jtrain.data.held_out import HeldOutSet, open_sets
    from jtrain.data.mixture.schedule import Constant, Custom, Linear, Staged
    from jtrain.data.plane.iterator import BatchIterator
    from jtrain.data.plane.prefetch import Fed, Prefetch, place_tree, put_batch, share_batch
    from jtrain.data.sources.formats import BadRecord
    from jtrain.data.sources.source import Source
    from jtrain.data.spec import PackedText
    from jtrain.data.tokenizer import ByteTokenizer, HFTokenizer, Tokenizer, make_tokenizer

__all__ = [
    "BadRecord",
    "BatchIterator",
    "ByteTokenizer",
    "Constant",
    "Custom",
    "Fed",
    "HFTokenizer",
    "HeldOutSet",
    "Linear",
    "PackedText",
    "Prefetch",
    "Source",
    "Staged",
    "TextDataset",
    "Tokenizer",
    "make_tokenizer",
    "open_dataset",
    "open_sets",
    "place_tree",
    "put_batch",
    "share_batch",
]

_MODULES = (
    "sources.formats",
    "tokenizer",
    "sources.source",
    "mixture.schedule",
    "spec",
    "plane.iterator",
    "held_out",
    "dataset",
    "plane.prefetch",
)


def __getattr__(name: str) -> Any:
    """Imports a name at its first use: `python -m jtrain.data --help` does not wait over a second for jax."""
    if name in __all__:
        for module in _MODULES:
            module_names = vars(importlib.import_module(f"jtrain.data.{module}"))
            # __module__ tells where it is defined: several modules import the same names.
            if name in module_names and module_names[name].__module__ == f"jtrain.data.{module}":
                return globals().setdefault(name, module_names[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
