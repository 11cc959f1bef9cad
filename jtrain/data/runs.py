"""What comes back from Source Loaders: runs of documents, how a loader fares, and what ends the stream."""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Int, Int64, Integer


class DataError(ValueError):
    """The stream cannot go on; names the source and, where one is to blame, the document."""


@dataclasses.dataclass(eq=False)
class Run:
    """Documents that a loader has read. `starts[i]:starts[i + 1]` of `ids` is document `numbers[i]`."""

    source: int
    numbers: Int[np.ndarray, " n"]
    starts: Int64[np.ndarray, " n_and_end"]
    ids: Integer[np.ndarray, " tokens"]
    skipped: dict[int, str]
    read_s: float
    loader: str
    place: Any = None
    """Where the payload lies, for whoever gives it back."""


@dataclasses.dataclass(frozen=True)
class LoaderState:
    """One loader, for metrics and the autoscaler. queued: runs asked of it that have not come."""

    name: str
    queued: int
    memory_bytes: int
    documents: int
    busy_s: float
    sources: tuple[int, ...]


def starts_of(lengths: Int[np.ndarray, " n"]) -> Int64[np.ndarray, " n_and_end"]:
    """Where each document starts, one after another; and where the last one ends."""
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts
