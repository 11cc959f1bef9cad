"""Traces of steps on disk, beside XLA's programs: in the folder `traces` of JAX's compilation cache.

A file has the trace of one class of layouts. Its name is a hash of the class, its folder's a hash of the
sources that a trace depends on, so that a changed line of the step is traced again. A file that cannot be
read is traced and written anew. Without a compilation cache, or with one in a bucket, traces are kept in
memory alone.
"""

import contextlib
import dataclasses
import functools
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
    of_jax = jax.config.jax_compilation_cache_dir or os.environ.get("JAX_COMPILATION_CACHE_DIR")
    return None if not of_jax or "://" in of_jax else Path(of_jax) / "traces" / _sources()


def kept[K: Hashable, T](of: K, trace: Callable[[K], T], from_fields: Callable[..., T]) -> T:
    """The trace of a class: from the disk if it is there, else made and written.

    Args:
      of: class of layouts; its `repr` says all of it.
      trace: makes a trace, which is a dataclass; from_fields: makes it of its fields, as JSON has them.
    """
    where = folder()
    if where is None:
        return trace(of)
    file = where / (_hash([repr(of).encode()]) + ".json")
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return from_fields(**json.loads(file.read_text()))
    found = trace(of)
    with contextlib.suppress(OSError):  # a full disk, or no home: the next process traces again
        where.mkdir(parents=True, exist_ok=True)
        _write(file, _text(found))
    return found


def _text(trace: Any) -> str:
    return json.dumps(dataclasses.asdict(trace))


def _write(file: Path, text: str) -> None:
    """Writes a file that other processes may write at the same time: each has a new one of its own and
    renames it.
    """
    number, new = tempfile.mkstemp(dir=file.parent, suffix=".new")
    try:
        with open(number, "w") as opened:
            opened.write(text)
        Path(new).replace(file)
    except BaseException:
        Path(new).unlink(missing_ok=True)
        raise


@functools.cache
def _sources() -> str:
    package = Path(__file__).parents[2]
    roots = [package / name for name in _FOLDERS] + [Path(jtrain_kernels.__file__).parent]
    files = sorted(file for root in roots for file in root.rglob("*.py"))
    contents = [part for file in files for part in (file.name.encode(), file.read_bytes())]
    return _hash([jax.__version__.encode(), *contents])


def _hash(parts: Iterable[Any]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(hashlib.sha256(part).digest())
    return total.hexdigest()[:24]
