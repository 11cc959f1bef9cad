"""Traces of steps on disk, beside XLA's programs: in the folder `traces` of JAX's compilation cache.

A file has the trace of one class of layouts. Its name is a hash of the class, its folder's a hash of the
sources that a trace depends on, so that a changed line of the step is traced again. A file that cannot be
read is traced and written anew. Without a compilation cache, or with one in a bucket, traces are kept in
memory alone.
"""

import contextlib
import dataclasses
import functools
import gc
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any

import jax

import jtrain_kernels

_FOLDERS = ("layout", "model", "optim", "pipeline", "step")
"""Folders of jtrain that a trace depends on, besides the kernels and jax itself."""


def folder() -> Path | None:
    """Folder of the traces of these sources; None if there is none."""
    jax_folder = jax.config.jax_compilation_cache_dir or os.environ.get("JAX_COMPILATION_CACHE_DIR")
    return None if not jax_folder or "://" in jax_folder else Path(jax_folder) / "traces" / _sources()


def cached_trace[K: Hashable, T](
    layout_class: K, trace: Callable[[K], T], from_fields: Callable[..., T]
) -> T:
    """The trace of a class: from the disk if it is there, else made and written.

    Args:
      layout_class: class of layouts; its `repr` says all of it.
      trace: makes a trace, which is a dataclass; from_fields: makes it of its fields, as JSON has them.
    """
    trace_folder = folder()
    if trace_folder is None:
        return _without_collections(trace, layout_class)
    file = trace_folder / (_hash([repr(layout_class).encode()]) + ".json")
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return from_fields(**json.loads(file.read_text()))
    new_trace = _without_collections(trace, layout_class)
    with contextlib.suppress(OSError):  # a full disk, or no home: the next process traces again
        trace_folder.mkdir(parents=True, exist_ok=True)
        write_trace(file, text_of(new_trace))
    return new_trace


def _without_collections[K, T](trace: Callable[[K], T], layout_class: K) -> T:
    """A trace made without collecting garbage: tracing makes many objects and few cycles."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return trace(layout_class)
    finally:
        if collects:
            gc.enable()


def text_of(trace: Any) -> str:
    """Returns a trace as JSON."""
    return json.dumps(dataclasses.asdict(trace))


def write_trace(file: Path, text: str) -> None:
    """Writes a file that other processes may write at the same time: each has a new one of its own and
    renames it.
    """
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, suffix=".new")
    try:
        with open(descriptor, "w") as stream:
            stream.write(text)
        Path(temporary).replace(file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@functools.cache
def _sources() -> str:
    package = Path(__file__).parents[2]
    roots = [package / name for name in _FOLDERS] + [Path(jtrain_kernels.__file__).parent]
    files = sorted(file for root in roots for file in root.rglob("*.py"))
    # The jax version counts too: another one may trace the same sources differently.
    contents = [part for file in files for part in (file.name.encode(), file.read_bytes())]
    return _hash([jax.__version__.encode(), *contents])


def _hash(parts: Iterable[Any]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(hashlib.sha256(part).digest())
    return total.hexdigest()[:24]
