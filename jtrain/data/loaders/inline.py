"""Loader pool without processes: for `data.engine=inline`, and for commands that look at a few documents."""

import time
from typing import Any

from jtrain.data.chunk_stream import SourceSetup
from jtrain.data.loaders.loader import RequestPart, SourceLoader
from jtrain.data.loaders.messages import ChunkRun, DataError, LoaderState, starts_of
from jtrain.data.sources import retry
from jtrain.data.sources.source import field_of
from jtrain.runtime.resident_memory import resident_bytes


class InlinePool:
    """Pool that reads documents in the caller's thread as soon as they are requested."""

    def __init__(self, setups: tuple[SourceSetup, ...]) -> None:
        self._setups = setups
        self._loader = SourceLoader(setups)
        self._ready: list[ChunkRun] = []
        self._documents = 0
        self._busy_s = 0.0
        self._said: list[str] = []
        self._reading = ""  # config path of the source that is being read
        self._retries = retry.Retries(self._tell)

    def request(self, parts: list[RequestPart], *, first: bool = False) -> None:
        """Reads the documents; raises DataError if a source cannot be read."""
        for part in parts:
            begun_s = time.perf_counter()
            self._reading = field_of(self._setups[part.source].name)
            try:
                with retry.heard(self._retries):
                    read = self._loader.documents(part.source).read(part.numbers, share=part.share, anchor=part.anchor)
            except (ValueError, OSError) as error:
                raise DataError(f"{self._reading}: {error}") from error
            seconds = time.perf_counter() - begun_s
            numbers = part.numbers if read.numbers is None else read.numbers
            if not len(numbers):
                continue
            self._documents += len(numbers)
            self._busy_s += seconds
            skipped = dict(read.skipped)
            starts = starts_of(read.lengths)
            run = ChunkRun(part.source, numbers, starts, read.ids, skipped, seconds, "trainer", read.ignored)
            run.anchor, run.tag = read.anchor, part.tag
            self._ready.append(run)

    @property
    def retries(self) -> int:
        return self._retries.count

    def _tell(self, line: str, wait_s: float) -> None:
        self._said += [f"data: {self._reading}: {line}"] if line else []

    def said(self) -> list[str]:
        """Returns messages about repeated reads since the last call."""
        said, self._said = self._said, []
        return said

    def connections(self) -> list[Any]:
        return []

    def collect(self) -> list[ChunkRun]:
        ready, self._ready = self._ready, []
        return ready

    def release(self, run: ChunkRun) -> None:
        pass

    def states(self) -> list[LoaderState]:
        everything = tuple(range(len(self._setups)))
        return [
            LoaderState(
                "trainer", 0, resident_bytes() or 0, self._documents, self._busy_s, everything, self._loader.decoded
            )
        ]

    def place(self, placement: dict[str, tuple[int, ...]]) -> None:
        pass

    def close(self) -> None:
        for source in range(len(self._setups)):
            self._loader.close(source)
