"""Reads a corpus where jax cannot be imported, and prints its texts; nothing that it does not need is loaded.

python read_without_jax.py FOLDER
"""

import sys

sys.modules["jax"] = None  # pyright: ignore[reportArgumentType]
from pathlib import Path  # noqa: E402, after jax is gone

import numpy as np  # noqa: E402

from jtrain.data.sources.corpus import Corpus  # noqa: E402
from jtrain.data.sources.source import Source  # noqa: E402

folder = sys.argv[1]
corpus = Corpus(Source(path=folder), name="web", cache_dir=Path(folder) / ".cache")
print(sorted(map(str, corpus.read(np.arange(len(corpus))))))
unwanted = {"flax", "orbax", "grain", "fsspec", "tokenizers", "numpy.ma", "pyarrow.compute"} & set(
    sys.modules
)
assert not unwanted, unwanted
