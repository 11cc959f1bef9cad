"""How often a jitted function was compiled: jax tells it by a private name, read here alone."""

from typing import Any


def count_programs(jitted: Any) -> int:
    """Number of programs that a function of `jax.jit` has compiled, of those that it still holds."""
    return jitted._cache_size()
