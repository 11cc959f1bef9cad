"""Source Loader: reads and tokenises documents of one or more sources on request.

A loader opens a source at the first request for it and has no other state: the requests say which documents
to read, in what order and how far ahead. So a loader can be killed, replaced or duplicated at any time, and
the stream of documents stays the same.
"""

import time
from multiprocessing.connection import Connection

import numpy as np
from jaxtyping import Int

from jtrain.data.loaders.messages import RequestPart, RunHead
from jtrain.data.loaders.shared_memory import HEADER_BYTES, SharedMemory
from jtrain.data.sources import retry
from jtrain.data.sources.formats.row_group_cache import shared_cache
from jtrain.data.sources.opening import Opening
from jtrain.data.stream.chunk_reader import Read
from jtrain.data.stream.chunk_stream import ChunkStream
from jtrain.data.stream.source_setup import SourceSetup
from jtrain.runtime.platform import resident_bytes

IDLE, OPENING, READING = range(3)
STATE, SOURCE, NUMBER, RECORD, SINCE_NS, DOCUMENTS, MEMORY_BYTES, DECODED = range(8)
OPENED = slice(8, 12)
"""Words of the header of a loader's shared memory: what the loader is doing, since when (CLOCK_MONOTONIC),
and how much it has done so far. `OPENED`: files and bytes of the source that it is opening, as in
`sources.opening.Opened`."""

IDENTITY_AT, IDENTITY_BYTES = 64, HEADER_BYTES - 64 * 8
"""First header word of the identity of the document being read, `file:number` as UTF-8 with a zero byte at
the end."""


class SourceLoader:
    """The loader, which runs in a process of its own or in the trainer.

    Args:
      opening: told of the files of each source as they are opened.
    """

    def __init__(self, setups: tuple[SourceSetup, ...], opening: Opening | None = None) -> None:
        self._setups = setups
        self._opening = opening
        self._open: dict[int, ChunkStream] = {}

    def documents(self, source: int) -> ChunkStream:
        """Returns a source, opened if it is not open yet; raises what `ChunkStream` raises."""
        if source not in self._open:
            self._open[source] = ChunkStream(self._setups[source], self._opening)
        return self._open[source]

    def close(self, source: int) -> None:
        """Closes a source that other loaders read from now on."""
        if (documents := self._open.pop(source, None)) is not None:
            documents.close()

    @property
    def decoded(self) -> int:
        """Row groups decoded so far."""
        return sum(
            shared_cache(size).decoded for size in {setup.decoded_cache_bytes for setup in self._setups}
        )


class _HeaderOpening(Opening):
    """Opening that tells the pool in the header of the loader's shared memory."""

    def __init__(self, header: Int[np.ndarray, " words"]) -> None:
        super().__init__()
        self._header = header

    def begin(self) -> None:
        self.changed()

    def changed(self) -> None:
        self._header[OPENED] = self.so_far


def serve(connection: Connection, descriptors: list[int]) -> None:
    """Main loop of a loader process: answers requests until the connection closes.

    Requests, pickled: `("read", id, parts)`, `("free", starts)`, `("close", source)`.
    Answers: `("run", id, [(start, RunHead) of each part])`, with the ids at `start` in shared memory; or
    `("failed", source, message)`; before that, for each repeated read, `("again", source, line for the log)`.
    """
    # The first message, sent at the start: a standby knows all sources before it is needed.
    sources: tuple[SourceSetup, ...] = connection.recv()
    shared = SharedMemory(descriptors[0])
    header = shared.header
    identity = np.frombuffer(header, np.uint8)[IDENTITY_AT * 8 :]
    loader = SourceLoader(sources, _HeaderOpening(header))

    def tell(line: str, wait_s: float) -> None:
        # The loader does not hang: its time limit counts from the end of the wait.
        header[SINCE_NS] = time.monotonic_ns() + int(wait_s * 1e9)
        connection.send(("again", int(header[SOURCE]), line))

    retries = retry.Retries(tell)

    def read(part: RequestPart) -> Read:
        header[[SOURCE, NUMBER, RECORD, SINCE_NS]] = part.source, -1, -1, time.monotonic_ns()
        # The state after source and time: the pool must not judge this source by an older time.
        header[STATE], header[OPENED] = OPENING, 0
        documents = loader.documents(part.source)

        def watch(number: int, record: int) -> None:
            name = documents.identity_of(record).encode()[: IDENTITY_BYTES - 1]
            identity[: len(name)] = np.frombuffer(name, np.uint8)
            # The pool reads up to the zero byte; what an earlier, longer name left follows it.
            identity[len(name)] = 0
            header[NUMBER], header[RECORD], header[SINCE_NS] = number, record, time.monotonic_ns()
            # Last, when the words above describe this document.
            header[STATE] = READING

        documents_read = documents.read(
            part.numbers, share=part.share, skip=part.skip, anchor=part.anchor, watch=watch
        )
        header[DOCUMENTS] += len(documents_read.lengths)
        header[DECODED] = loader.decoded
        return documents_read

    while True:
        match connection.recv():
            case ("free", starts):
                for start in starts:
                    shared.free(start)
            case ("close", source):
                loader.close(source)
            case ("read", request, parts):
                source, heads = -1, []
                try:
                    for part in parts:
                        source, begun_s = part.source, time.perf_counter()
                        with retry.report_retries_to(retries):
                            result = read(part)
                        # The ids go through shared memory: only their heads are pickled.
                        start = shared.allocate(result.ids.nbytes)
                        shared.view(start, result.ids.nbytes)[:] = result.ids.view(np.uint8)
                        heads.append((start, RunHead.of(result, time.perf_counter() - begun_s)))
                except (ValueError, OSError) as error:
                    connection.send(("failed", source, str(error)))
                else:
                    # Before the answer, so that the pool's next look has it.
                    header[MEMORY_BYTES] = resident_bytes() or 0
                    connection.send(("run", request, heads))
                header[STATE] = IDLE
