"""Imports modules, the names on stdin; fails if that starts a back end of jax or sets a variable."""

import importlib
import os
import sys

# What these do at import is theirs.
for name in (
    "jax",
    "flax",
    "optax",
    "orbax.checkpoint",
    "grain",
    "fiddle",
    "jax.experimental.pallas.mosaic_gpu",
):
    importlib.import_module(name)
before, modules = dict(os.environ), sys.stdin.read().split()
for name in modules:
    importlib.import_module(name)
from jax._src import xla_bridge  # noqa: E402, after the imports that are checked

assert not xla_bridge.backends_are_initialized()
assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
print(len(modules), "imported")
