"""Messages from Source Loaders: documents that were read, the state of a loader, and errors that end the stream."""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Int, Int32, Int64, Integer

from jtrain.data.loss_mask import NO_RUNS
from jtrain.data.stream.growing_order import WindowAnchor
from jtrain.errors import UserError


class DataError(UserError):
    """Error that ends the stream; the message names the source and, if one is the cause, the document."""


@dataclasses.dataclass(eq=False)
class ChunkRun:
    """Documents of one source that a loader has read.

    numbers: numbers of the documents.
    starts, ids: `ids[starts[i]:starts[i + 1]]` are the token ids of document `numbers[i]`; but see `lengths`.
    skipped: number -> `file:number` and reason, for bad documents that were left out.
    read_s: seconds that reading and tokenising took.
    ignored: runs (start, end) of `ids` that are not learned.
    loader: name of the loader.
    """

    source: int
    numbers: Int[np.ndarray, " n"]
    starts: Int64[np.ndarray, " n_or_n_and_end"]
    ids: Integer[np.ndarray, " tokens"]
    skipped: dict[int, str]
    read_s: float
    loader: str
    ignored: Int32[np.ndarray, "runs 2"] = dataclasses.field(default_factory=lambda: NO_RUNS)
    place: Any = None
    """Location of the payload, by which the pool frees it."""
    anchor: WindowAnchor | None = None
    """See `Read`."""
    tag: int = 0
    """See `RequestPart`."""
    lengths: Int64[np.ndarray, " n"] | None = None
    """Tokens of each document, which starts at `starts[i]`; None if the documents are one after another."""

    @property
    def bounds(self) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """Start and end of each document in `ids`."""
        if self.lengths is None:
            return self.starts[:-1], self.starts[1:]
        return self.starts, self.starts + self.lengths


@dataclasses.dataclass(frozen=True)
class LoaderState:
    """State of one loader, for metrics and the autoscaler.

    queued: requests that it has not answered.
    decoded: row groups that it has decoded.
    """

    name: str
    queued: int
    memory_bytes: int
    documents: int
    busy_s: float
    sources: tuple[int, ...]
    decoded: int = 0


def runs_of_bytes(content: bytes) -> Int32[np.ndarray, "runs 2"]:
    """Returns the runs that a message holds as bytes; no bytes stand for no runs."""
    return np.frombuffer(content, np.int32).reshape(-1, 2) if content else NO_RUNS


def starts_of(lengths: Int[np.ndarray, " n"]) -> Int64[np.ndarray, " n_and_end"]:
    """Returns the first token of each document when all are concatenated, then the end of the last one."""
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts
