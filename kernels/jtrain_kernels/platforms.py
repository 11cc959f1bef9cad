"""Code that differs by platform, and traces for a reader, which have one form of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

# Part of the key of JAX's caches, as the target of `registry.on` is.
_is_read = jax.make_user_context(False)


@contextmanager
def for_a_reader() -> Iterator[None]:
    """Context in which code is traced to be read and never run: `by_platform` takes one branch.

    A branch that is traced is also differentiated and transposed, which takes a third of the time of a
    mixture's layer.
    """
    with _is_read(True):
        yield


def by_platform(*arrays: Any, read: str = "default", **branches: Callable[..., Any]) -> Any:
    """`jax.lax.platform_dependent`: the branch of the platform that the program is lowered for.

    Args:
      read: branch for a reader of the trace.
      branches: platform -> what computes the result; `default` is for all others.
    """
    if _is_read.value:
        return branches[read](*arrays)
    return jax.lax.platform_dependent(*arrays, **branches)
