"""Detection of recompilations: whether a jitted function was compiled again, and which argument changed."""

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

type Signature = dict[str, tuple[str, ...]]
"""Path of an argument's leaf -> its shape, dtype and sharding, as text."""

BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"
"""jax's event name for the time in which XLA compiled a program or read it from the persistent cache."""


def signature(arguments: Sequence[Any], names: Sequence[str]) -> Signature:
    """Shape, dtype and sharding of every leaf of the arguments, which determine the compiled program.

    Donated arrays still have them.
    """
    import jax

    leaves = {}
    for name, argument in zip(names, arguments, strict=True):
        for path, leaf in jax.tree_util.tree_flatten_with_path(argument)[0]:
            parts = (f"shape {list(np.shape(leaf))}", f"dtype {getattr(leaf, 'dtype', type(leaf).__name__)}")
            # A Python number instead of an array compiles anew, with the same shape and dtype.
            weak = " weakly typed" if getattr(leaf, "weak_type", False) else ""
            sharding_text = _sharding_text(getattr(leaf, "sharding", None))
            leaves[name + jax.tree_util.keystr(path)] = (
                parts[0],
                parts[1] + weak,
                f"sharding {sharding_text}",
            )
    return leaves


def _sharding_text(sharding: Any) -> str:
    """Text of a sharding, such as `P('data',) of data=8, device`; mesh axes of size 1 are left out."""
    import jax

    if not isinstance(sharding, jax.sharding.NamedSharding):
        return "none, on the host" if sharding is None else str(sharding)
    axes = (
        " ".join(f"{axis}={size}" for axis, size in sharding.mesh.shape.items() if size > 1) or "one device"
    )
    return f"{sharding.spec} of {axes}, {sharding.memory_kind}"


def changes(earlier: Signature, later: Signature) -> list[str]:
    """Changed, new and missing leaves, such as `batch.token_BL: shape [8, 64] -> [8, 32]`."""
    leaf_changes = []
    for path in dict.fromkeys([*earlier, *later]):
        old, new = earlier.get(path), later.get(path)
        if old is None or new is None:
            leaf_changes.append(f"{path}: {'gone' if new is None else 'new, ' + ', '.join(new)}")
            continue
        # The new part without its first word: `shape [8, 64] -> [8, 32]`.
        part_changes = [
            f"{old_part} -> {new_part.partition(' ')[2]}"
            for old_part, new_part in zip(old, new, strict=True)
            if old_part != new_part
        ]
        if part_changes:
            leaf_changes.append(f"{path}: {', '.join(part_changes)}")
    return leaf_changes


def count_programs(function: Any) -> int:
    """Programs that a function of `jax.jit` has compiled, of those that it still holds.

    jax tells it by a private name, by which its own tests count compilations; it is read here alone.
    """
    return function._cache_size()


class Compilations:
    """Detects calls of a jitted function that compiled it.

    Checks the size of the function's cache (0.1 us); the arguments are inspected only when it has grown.

    Args:
      function: the result of `jax.jit`.
      names: names of its arguments for messages.
    """

    def __init__(self, function: Any, names: tuple[str, ...]) -> None:
        self.count = 0
        self._function = function
        self._names = names
        self._signature: Signature = {}
        self._size = count_programs(function)

    def called(self, *arguments: Any) -> str | None:
        """Checks for a compilation; call it after each call of the function, with the same arguments.

        Returns:
          A message that names the changed arguments if the function was compiled again, else None.
        """
        size = count_programs(self._function)
        if size == self._size:
            return None
        self._size = size
        self.count += 1
        earlier, self._signature = self._signature, signature(arguments, self._names)
        # The first compilation is the expected one.
        if self.count == 1:
            return None
        leaf_changes = changes(earlier, self._signature)
        suffix = f" and {len(leaf_changes) - 3} more" if len(leaf_changes) > 3 else ""
        description = (
            "; ".join(leaf_changes[:3]) + suffix
            if leaf_changes
            else "no argument, but jax's configuration or context"
        )
        return f"compiled again (program {self.count} of this run), changed: {description}"


class CompileSeconds:
    """Calls `compiled(seconds)` for each program that its own thread compiles inside the `with` block."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self._thread = threading.get_ident()

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        # Listeners are global: other threads, such as a prefetcher's, compile as well.
        if event == BACKEND_COMPILE and threading.get_ident() == self._thread:
            self._compiled(duration_secs)

    def __enter__(self) -> "CompileSeconds":
        import jax

        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        import jax

        with contextlib.suppress(ValueError, AssertionError):  # other code may have cleared all listeners
            jax.monitoring.unregister_event_duration_listener(self._on_event)
