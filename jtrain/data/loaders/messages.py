"""Messages to and from Source Loaders: requests, documents read, the state of a loader, and errors."""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Int, Int32, Int64, Integer

from jtrain.data.loss_mask import NO_RUNS
from jtrain.data.stream.chunk_reader import Read
from jtrain.data.stream.chunk_stream import WHOLE
from jtrain.data.stream.growing_order import WindowAnchor
from jtrain.errors import UserError


class DataError(UserError):
    """Error that ends the stream; the message names the source and, if one is the cause, the document."""


@dataclasses.dataclass(frozen=True)
class RequestPart:
    """Part of a request to a loader: documents of one source.

    numbers: numbers of the chunks.
    anchor: see `ChunkStream.read`.
    skip: numbers to leave out.
    tag: returned with each run that answers this part, for whoever asked.
    share: (r, m): of a grouped source, only the chunks of groups whose key is r modulo m are read, and the
      answer holds their numbers alone. The m shares of a request answer each number once.
    """

    source: int
    numbers: Int[np.ndarray, " n"]
    anchor: WindowAnchor | None = None
    skip: frozenset[int] = frozenset()
    tag: int = 0
    share: tuple[int, int] = WHOLE

    def split(self, count: int) -> "list[RequestPart]":
        """Splits the part into `count` shares, which together are its own share.

        Each source begins with another one, since many sources have fewer groups in a window than there are
        shares.
        """
        remainder, modulus = self.share
        turns = [(i + self.source) % count for i in range(count)]
        # r modulo m splits into r + m * t modulo m * count, for t below count.
        return [
            dataclasses.replace(self, share=(remainder + modulus * turn, modulus * count)) for turn in turns
        ]

    def each(self) -> "list[RequestPart]":
        """Splits the part into parts of one chunk each."""
        return [dataclasses.replace(self, numbers=self.numbers[i : i + 1]) for i in range(len(self.numbers))]


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
    ignored: Int32[np.ndarray, "runs 3"] = dataclasses.field(default_factory=lambda: NO_RUNS)
    payload: Any = None
    """Handle of the memory of the ids, by which the pool frees it."""
    anchor: WindowAnchor | None = None
    """See `Read`."""
    tag: int = 0
    """See `RequestPart`."""
    lengths: Int64[np.ndarray, " n"] | None = None
    """Tokens of each document, which starts at `starts[i]`; None if the documents are one after another."""

    @property
    def bounds(self) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """Start and end of each document in `ids`."""
        # Documents one after another: each ends where the next one starts.
        if self.lengths is None:
            return self.starts[:-1], self.starts[1:]
        # Ids in a memory map: documents lie anywhere in it.
        return self.starts, self.starts + self.lengths


@dataclasses.dataclass(frozen=True)
class RunHead:
    """Answer to a part of a request: a `Read` without its ids, which travel beside it, and its seconds."""

    numbers: Int[np.ndarray, " n"] | None
    lengths: Int[np.ndarray, " n"]
    ids_bytes: int
    ids_dtype: str
    skipped: tuple[tuple[int, str], ...]
    ignored: Int32[np.ndarray, "runs 3"]
    anchor: WindowAnchor | None
    read_s: float

    @classmethod
    def of(cls, read: Read, read_s: float) -> "RunHead":
        """Returns the head of what a loader has read."""
        ids, other_fields = read.ids, (read.skipped, read.ignored, read.anchor)
        return cls(read.numbers, read.lengths, ids.nbytes, ids.dtype.str, *other_fields, read_s)

    def run(self, part: RequestPart, ids: Integer[np.ndarray, " _"], loader: str) -> ChunkRun:
        """Returns the run that answers `part`, with these ids or the bytes of them."""
        return ChunkRun(
            part.source,
            # None: all documents of the part, none left out and in its order.
            part.numbers if self.numbers is None else self.numbers,
            starts_of(self.lengths),
            # The ids may come as bytes; a view of the right dtype copies nothing.
            ids.view(self.ids_dtype),
            dict(self.skipped),
            self.read_s,
            loader,
            self.ignored,
            anchor=self.anchor,
            tag=part.tag,
        )


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


def starts_of(lengths: Int[np.ndarray, " n"]) -> Int64[np.ndarray, " n_and_end"]:
    """Returns the first token of each document when all are concatenated, then the end of the last one."""
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts
