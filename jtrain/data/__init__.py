"""Text on disk to packed global batches: a source stage (read, tokenise) and a constructor stage (pack, place)."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jtrain.data.batches import BatchIterator
    from jtrain.data.dataset import TextDataset, open_dataset
    from jtrain.data.feed import Fed, Prefetch, host_rows, prefetch, put_batch, share_batch
    from jtrain.data.formats import BadRecord
    from jtrain.data.schedule import Constant, Custom, Linear, Staged
    from jtrain.data.source import Source
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
    "Linear",
    "PackedText",
    "Prefetch",
    "Source",
    "Staged",
    "TextDataset",
    "Tokenizer",
    "host_rows",
    "make_tokenizer",
    "open_dataset",
    "prefetch",
    "put_batch",
    "share_batch",
]

_MODULES = ("formats", "tokenizer", "source", "schedule", "spec", "batches", "dataset", "feed")


def __getattr__(name: str) -> Any:
    """Imports a name at its first use: `python -m jtrain.data --help` must not wait a second or more for jax."""
    if name in __all__:
        for module in _MODULES:
            found = vars(importlib.import_module(f"jtrain.data.{module}"))
            if name in found and found[name].__module__ == f"jtrain.data.{module}":
                return globals().setdefault(name, found[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
