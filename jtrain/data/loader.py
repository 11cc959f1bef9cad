"""A Source Loader: reads and tokenises documents of one or more sources, for whoever asks.

It opens a source at the first request for it and keeps nothing else: which documents, in what order and how far ahead
is the asker's business. So it can be killed, replaced or doubled at any time, and the stream is the same.
"""

import dataclasses
import os
import time
from multiprocessing.connection import Connection

import numpy as np
from jaxtyping import Int

from jtrain.data.documents import Documents, Read, SourceSetup
from jtrain.data.slab import HEADER_BYTES, Slab

IDLE, OPENING, READING = range(3)
STATE, SOURCE, NUMBER, RECORD, SINCE_NS, DOCUMENTS, MEMORY_BYTES = range(7)
"""Words of a loader's slab header, its watermark: what it is at, since when (CLOCK_MONOTONIC), and how much it did."""

IDENTITY_AT, IDENTITY_BYTES = 64, HEADER_BYTES - 64 * 8
"""The header word from which on `file:number` of the document being read stands, as UTF-8 ended by a zero byte."""


@dataclasses.dataclass(frozen=True)
class LoaderSetup:
    """What a loader process is told first."""

    sources: tuple[SourceSetup, ...]


class SourceLoader:
    """The loader itself, wherever it runs: in a process of its own, as a Ray actor, or in the trainer."""

    def __init__(self, setups: tuple[SourceSetup, ...]) -> None:
        self._setups = setups
        self._open: dict[int, Documents] = {}

    def documents(self, source: int) -> Documents:
        """The source, opened if it is not yet. Raises as `Documents`."""
        if source not in self._open:
            self._open[source] = Documents(self._setups[source])
        return self._open[source]

    def close(self, source: int) -> None:
        """Lets go of a source that others read from now on."""
        if (documents := self._open.pop(source, None)) is not None:
            documents.close()


@dataclasses.dataclass(frozen=True)
class Part:
    """Documents of one source that are asked for.

    records: which records they are, where the asker knows; looked up otherwise.
    skip: numbers to leave out.
    """

    source: int
    numbers: Int[np.ndarray, " n"]
    records: Int[np.ndarray, " n"] | None = None
    skip: frozenset[int] = frozenset()

    def each(self) -> "list[Part]":
        """The same documents one by one."""
        records = [None] * len(self.numbers) if self.records is None else self.records[:, None]
        return [
            dataclasses.replace(self, numbers=self.numbers[i : i + 1], records=records[i])
            for i in range(len(self.numbers))
        ]


def serve(connection: Connection, descriptors: list[int]) -> None:
    """A loader process's life: answers requests until the connection ends.

    Requests, pickled: `("read", id, parts)`, `("free", starts)`, `("close", source)`. Answers: `("run", id, [(start,
    bytes of ids, dtype of ids, skipped, seconds) of each part])`, where the payload is in the slab from `start` on, the
    lengths before the ids; or `("failed", id, source, message)`.
    """
    setup: LoaderSetup = connection.recv()
    slab = Slab(descriptors[0])
    header = slab.header
    identity = np.frombuffer(header, np.uint8)[IDENTITY_AT * 8 :]
    loader = SourceLoader(setup.sources)

    def read(part: Part) -> Read:
        header[[SOURCE, NUMBER, RECORD, SINCE_NS]] = part.source, -1, -1, time.monotonic_ns()
        header[STATE] = OPENING
        documents = loader.documents(part.source)

        def watch(number: int, record: int) -> None:
            name = documents.identity_of(record).encode()[: IDENTITY_BYTES - 1]
            identity[: len(name)] = np.frombuffer(name, np.uint8)
            identity[len(name)] = 0
            header[NUMBER], header[RECORD], header[SINCE_NS] = number, record, time.monotonic_ns()
            header[STATE] = READING

        found = documents.read(part.numbers, records=part.records, skip=part.skip, watch=watch)
        header[DOCUMENTS] += len(part.numbers)
        return found

    while True:
        match connection.recv():
            case ("free", starts):
                for start in starts:
                    slab.free(start)
            case ("close", source):
                loader.close(source)
            case ("read", request, parts):
                source, found = -1, []
                try:
                    for part in parts:
                        source, begun_s = part.source, time.perf_counter()
                        done = read(part)
                        lengths_bytes = padded(done.lengths.nbytes)
                        start = slab.allocate(lengths_bytes + done.ids.nbytes)
                        slab.view(start, done.lengths.nbytes)[:] = done.lengths.view(np.uint8)
                        slab.view(start + lengths_bytes, done.ids.nbytes)[:] = done.ids.view(np.uint8)
                        seconds = time.perf_counter() - begun_s
                        found.append((start, done.ids.nbytes, done.ids.dtype.str, done.skipped, seconds))
                except (ValueError, OSError) as error:
                    connection.send(("failed", request, source, str(error)))
                else:
                    header[MEMORY_BYTES] = resident_bytes()
                    connection.send(("run", request, found))
                header[STATE] = IDLE


def padded(size_bytes: int) -> int:
    """Up to a multiple of 8, so that the array behind is aligned."""
    return -(-size_bytes // 8) * 8


def resident_bytes() -> int:
    """Memory of this process that is in RAM, shared pages included; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
