"""Tuning results measured on live devices: one JSON file per device, with entries keyed by (op, bucket, dtype)."""

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Entry:
    """Fastest implementation that was measured for an op and a bucket of arguments.

    bucket: bucket of the arguments, see `bucket`.
    dtype: dtypes of the arguments, see `dtype`.
    seconds: time of one call.
    measured: date and versions of the measurement.
    """

    op: str
    bucket: str
    dtype: str
    implementation: str
    config: Mapping[str, int]
    seconds: float
    measured: str


def bucket(avals: Mapping[str, Any]) -> str:
    """Key of arguments that share an entry: dimensions rounded up to powers of two, static arguments unchanged.

    Example: `chunk=512 k=4x4096x8x128 q=4x4096x32x128`.
    """

    def one(value: Any) -> str:
        if not hasattr(value, "shape"):
            return str(value)
        return "x".join(str(2 ** math.ceil(math.log2(size)) if size else 0) for size in value.shape) or "scalar"

    return " ".join(f"{name}={one(value)}" for name, value in sorted(avals.items()))


def dtype(avals: Mapping[str, Any]) -> str:
    """Dtypes of the arrays, each once, in the order of the arguments' names."""
    return " ".join(dict.fromkeys(str(x.dtype) for _, x in sorted(avals.items()) if hasattr(x, "dtype")))


def key(op: str, avals: Mapping[str, Any]) -> tuple[str, str, str]:
    """Key of the entry for these arguments."""
    return op, bucket(avals), dtype(avals)


@functools.cache
def load(device: str) -> Mapping[tuple[str, str, str], Entry]:
    """Entries committed for a device."""
    return read(FOLDER / f"{device}.json")


def read(file: Path) -> Mapping[tuple[str, str, str], Entry]:
    """Entries of a file; empty if the file does not exist."""
    if not file.exists():
        return {}
    entries = [Entry(**fields) for fields in json.loads(file.read_text())]
    return {(e.op, e.bucket, e.dtype): e for e in entries}


def write(file: Path, entries: Iterable[Entry]) -> None:
    """Adds entries to a file; they replace older ones for the same arguments."""
    known = dict(read(file)) | {(e.op, e.bucket, e.dtype): e for e in entries}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps([dataclasses.asdict(known[k]) for k in sorted(known)], indent=1) + "\n")
