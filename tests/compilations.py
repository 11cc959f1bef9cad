"""What tests ask of compilations: how often a function was compiled, and programs with lines of source code."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax


def count_programs(jitted: Any) -> int:
    """Number of programs that a function of `jax.jit` has compiled, of those that it still holds."""
    # jax tells it by a private name, read here alone.
    return jitted._cache_size()


@contextlib.contextmanager
def with_source_lines() -> Iterator[None]:
    """Programs traced in this block name their lines of source code, which conftest.py leaves out of all others."""
    limit = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", 10)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_in_locations_limit", limit)
