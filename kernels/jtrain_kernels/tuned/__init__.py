"""What was measured on live devices: one JSON file per device, entries keyed by (op, shape bucket, dtype)."""

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
    """The fastest that was measured.

    bucket: of the arguments, see `bucket`.
    dtype: of the arguments, see `dtype`.
    seconds: of one call.
    measured: when and with what versions.
    """

    op: str
    bucket: str
    dtype: str
    implementation: str
    config: Mapping[str, int]
    seconds: float
    measured: str


def bucket(avals: Mapping[str, Any]) -> str:
    """Arguments that share an entry: each dimension up to the next power of two, statics as they are.

    `chunk=512 k=4x4096x8x128 q=4x4096x32x128`.
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
    """By what an entry for these arguments is found."""
    return op, bucket(avals), dtype(avals)


@functools.cache
def load(device: str) -> Mapping[tuple[str, str, str], Entry]:
    """The entries that are committed for a device."""
    return read(FOLDER / f"{device}.json")


def read(file: Path) -> Mapping[tuple[str, str, str], Entry]:
    """The entries of a file; none where there is no file."""
    if not file.exists():
        return {}
    entries = [Entry(**fields) for fields in json.loads(file.read_text())]
    return {(e.op, e.bucket, e.dtype): e for e in entries}


def write(file: Path, entries: Iterable[Entry]) -> None:
    """Adds entries to a file, in the place of older ones for the same arguments."""
    known = dict(read(file)) | {(e.op, e.bucket, e.dtype): e for e in entries}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps([dataclasses.asdict(known[k]) for k in sorted(known)], indent=1) + "\n")
