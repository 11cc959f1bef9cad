"""What is measured of every step, at microseconds each: times, compilations, this process's memory, who is slow."""

import contextlib
import os
import threading
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)
RECENT_STEPS = 1000
"""Steps that percentiles are over: enough for a 99th, and forgotten within minutes to hours."""

BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"
"""What jax calls the time in which XLA compiled a program, or took it from the persistent cache."""


class StepTimes:
    """The times of the last `RECENT_STEPS` steps."""

    def __init__(self) -> None:
        self._seconds = np.zeros(RECENT_STEPS)
        self._count = 0

    def add(self, seconds: float) -> None:
        """One more step."""
        self._seconds[self._count % RECENT_STEPS] = seconds
        self._count += 1

    def percentiles(self) -> tuple[float, ...] | None:
        """Seconds at `PERCENTILES`; None before the first step."""
        if not self._count:
            return None
        return tuple(float(x) for x in np.percentile(self._seconds[: min(self._count, RECENT_STEPS)], PERCENTILES))


type Signature = dict[str, tuple[str, ...]]
"""Path of a leaf of the arguments -> its shape, dtype and sharding, as text."""


def signature(arguments: Sequence[Any], names: Sequence[str]) -> Signature:
    """What a jitted function is compiled for, leaf by leaf. Donated arrays still know theirs."""
    import jax

    leaves = {}
    for name, argument in zip(names, arguments, strict=True):
        for path, leaf in jax.tree_util.tree_flatten_with_path(argument)[0]:
            parts = (f"shape {list(np.shape(leaf))}", f"dtype {getattr(leaf, 'dtype', type(leaf).__name__)}")
            weak = " weakly typed" if getattr(leaf, "weak_type", False) else ""
            where = _where(getattr(leaf, "sharding", None))
            leaves[name + jax.tree_util.keystr(path)] = (parts[0], parts[1] + weak, f"sharding {where}")
    return leaves


def _where(sharding: Any) -> str:
    """`P('data',) of data=8, device`: what a sharding is, without the mesh axes of one device."""
    import jax

    if not isinstance(sharding, jax.sharding.NamedSharding):
        return "none, on the host" if sharding is None else str(sharding)
    axes = " ".join(f"{axis}={size}" for axis, size in sharding.mesh.shape.items() if size > 1) or "one device"
    return f"{sharding.spec} of {axes}, {sharding.memory_kind}"


def changes(before: Signature, after: Signature) -> list[str]:
    """`batch.token_BL: shape [8, 64] -> [8, 32]` for each leaf that is another; the leaves that came or went."""
    found = []
    for path in dict.fromkeys([*before, *after]):
        old, new = before.get(path), after.get(path)
        if old is None or new is None:
            found.append(f"{path}: {'gone' if new is None else 'new, ' + ', '.join(new)}")
            continue
        differs = [f"{a} -> {b.partition(' ')[2]}" for a, b in zip(old, new, strict=True) if a != b]
        if differs:
            found.append(f"{path}: {', '.join(differs)}")
    return found


class Compilations:
    """Calls a jitted function and notices when that compiled it.

    A look at the size of its cache costs 0.1 us; the arguments are only read when it has grown.

    Args:
      function: what `jax.jit` has returned; `_cache_size` is what jax's own tests count its compilations by.
      names: what to call its arguments.
    """

    def __init__(self, function: Any, names: tuple[str, ...]) -> None:
        self.count = 0
        self._function = function
        self._names = names
        self._known: Signature = {}
        self._size = function._cache_size()

    def __call__(self, *arguments: Any) -> tuple[Any, str | None]:
        """What the function returns, and, if it was compiled again, what of the arguments has changed."""
        returned = self._function(*arguments)
        size = self._function._cache_size()
        if size == self._size:
            return returned, None
        self._size = size
        self.count += 1
        before, self._known = self._known, signature(arguments, self._names)
        if self.count == 1:
            return returned, None
        found = changes(before, self._known)
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        said = "; ".join(found[:3]) + more if found else "no argument; jax's configuration or context has"
        return returned, f"compiled again (program {self.count} of this run), changed: {said}"


class CompileSeconds:
    """While it is entered, hands on how long each program took to compile on the thread that made it."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self._thread = threading.get_ident()

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == BACKEND_COMPILE and threading.get_ident() == self._thread:
            self._compiled(duration_secs)

    def __enter__(self) -> "CompileSeconds":
        import jax

        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        import jax

        with contextlib.suppress(ValueError, AssertionError):  # somebody has cleared all listeners
            jax.monitoring.unregister_event_duration_listener(self._on_event)


def host_rss_mib() -> float | None:
    """Memory of this process that is resident now, shared pages included; None where /proc does not say."""
    file = Path("/proc/self/statm")
    if not file.exists():
        return None
    return int(file.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def host_scores(own_s: Sequence[float], step_s: float) -> dict[str, float]:
    """How quick each host is, 1 as quick as the quickest: the share of a step that would be left, were it so.

    Steps take equally long everywhere, as each waits for the slowest; so hosts are compared by what they do themselves.

    Args:
      own_s: of each host, seconds per step that it does not wait for its devices.
      step_s: seconds per step.
    """
    best = min(own_s)
    return {f"host {index}": max(0.0, 1.0 - (own - best) / step_s) for index, own in enumerate(own_s)}


def device_scores(mhz: Sequence[float | None]) -> dict[str, float]:
    """Each device's clock over the quickest one's; those that do not say are left out."""
    known = {index: value for index, value in enumerate(mhz) if value is not None}
    best = max(known.values(), default=0.0)
    return {f"device {index}": value / best for index, value in known.items() if best > 0}


def everywhere(values: Sequence[float | None]) -> np.ndarray:
    """[processes, values] of what every process has passed, unknown ones as NaN; free with one process.

    Every process must call this at the same steps with as many values.
    """
    import jax

    here = np.asarray([np.nan if value is None else value for value in values], np.float32)
    if jax.process_count() == 1:
        return here[None]
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(here))
