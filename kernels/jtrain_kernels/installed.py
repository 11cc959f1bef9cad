"""Optional modules: which of them this process could import."""

import importlib.util


def is_installed(module: str) -> bool:
    """True if the module can be found; that imports its packages, and the module itself is left alone."""
    # find_spec raises if the package of a submodule is absent, so packages come first.
    parts = module.split(".")
    return all(importlib.util.find_spec(".".join(parts[:end])) for end in range(1, len(parts) + 1))
