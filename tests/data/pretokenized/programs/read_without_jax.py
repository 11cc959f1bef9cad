"""Reads all of an index where jax cannot be imported; prints how many descriptors it leaves open.

python read_without_jax.py INDEX
"""

import importlib
import os
import sys

sys.modules["jax"] = None  # pyright: ignore[reportArgumentType]
from pathlib import Path  # noqa: E402, after jax is gone

import numpy as np  # noqa: E402

from jtrain.data.pretokenized.reader import PreparedIndex  # noqa: E402

importlib.import_module("jtrain.data.pretokenized.build")  # needs no jax either
before = len(os.listdir("/proc/self/fd"))
index = PreparedIndex(Path(sys.argv[1]))
index.read(np.arange(len(index)))
print(len(os.listdir("/proc/self/fd")) - before)
