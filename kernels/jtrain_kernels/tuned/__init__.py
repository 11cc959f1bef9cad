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


NEAR = 4
"""Largest factor between a dimension and that of a measured shape whose result is used for it."""


def nearest(entries: Mapping[tuple[str, str, str], Entry], op: str, avals: Mapping[str, Any]) -> Entry | None:
    """Entry measured for these arguments, else for the nearest shape; None if none is near.

    Dtypes and static arguments must be equal. The distance is the sum over dimensions of |log2| of their ratio.
    """
    if (exact := entries.get(key(op, avals))) is not None:
        return exact
    found = [
        (distance, entry.bucket, entry)
        for entry in entries.values()
        if entry.op == op and entry.dtype == dtype(avals) and (distance := _distance(entry.bucket, avals)) is not None
    ]
    return min(found, key=lambda one: one[:2])[2] if found else None


def _distance(measured: str, avals: Mapping[str, Any]) -> float | None:
    """Distance from a bucket to that of the arguments; None if other than sizes differ, or one by more than `NEAR`."""
    ours, theirs = (dict(part.split("=", 1) for part in text.split(" ")) for text in (bucket(avals), measured))
    if ours.keys() != theirs.keys():
        return None
    total = 0.0
    for name, text in ours.items():
        if not hasattr(avals[name], "shape"):
            if text != theirs[name]:
                return None
            continue
        sizes, others = text.split("x"), theirs[name].split("x")
        if text == theirs[name]:
            continue
        if len(sizes) != len(others) or not all(size.isdigit() and int(size) for size in (*sizes, *others)):
            return None
        ratios = [abs(math.log2(int(size) / int(other))) for size, other in zip(sizes, others, strict=True)]
        if max(ratios) > math.log2(NEAR):
            return None
        total += sum(ratios)
    return total


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
