"""Programs of tests that name their lines of source code."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def with_source_lines() -> Iterator[None]:
    """Programs traced in this block name their lines of source code, which conftest.py leaves out of all others."""
    limit = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", 10)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_in_locations_limit", limit)
