"""Loader pool without processes: for `data.engine=inline`, and for commands that look at a few documents."""

import dataclasses
import resource
import time
from typing import Any

import numpy as np

from jtrain.data.loaders.loader import SourceLoader
from jtrain.data.loaders.messages import ChunkRun, DataError, LoaderState, RequestPart, RunHead
from jtrain.data.sources import retry
from jtrain.data.sources.source import field_of
from jtrain.data.stream.source_setup import SourceSetup
from jtrain.runtime.platform import resident_bytes

_MEMORY_EVERY_S = 1.0
"""Seconds for which the memory that `states` reports is not asked for again."""

SPARE_DESCRIPTORS = 256
"""Descriptors that are left for everything else, where an open prepared index takes up to three."""


class InlinePool:
    """Pool that reads documents in the caller's thread as soon as they are requested.

    The ids of local prepared indexes are not copied: runs hold their places in a memory map of the index,
    from which rows are filled. Copying them, span by span, took as long as all the rest of a batch.

    Attributes:
      setups: the sources, with `map_ids` where ids are mapped.
    """

    def __init__(self, setups: tuple[SourceSetup, ...]) -> None:
        prepared_sources = [source for source, setup in enumerate(setups) if setup.prepared is not None]
        # Counted before any index is opened: too many would leave no descriptors for sockets and checkpoints.
        if 3 * len(prepared_sources) + SPARE_DESCRIPTORS <= resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
            loader = SourceLoader(setups)
            mapped_sources = {source for source in prepared_sources if loader.documents(source).can_map_ids}
            setups = tuple(
                dataclasses.replace(s, map_ids=source in mapped_sources) for source, s in enumerate(setups)
            )
        self.setups = setups
        self._loader = SourceLoader(setups)
        self._runs: list[ChunkRun] = []
        self._documents = 0
        self._busy_s = 0.0
        self._memory_bytes, self._memory_until_s = 0, 0.0
        self._all_sources = tuple(range(len(setups)))
        self._messages: list[str] = []
        self._reading = ""  # config path of the source that is being read
        self._retries = retry.Retries(self._tell)

    def request(self, parts: list[RequestPart], *, first: bool = False) -> None:
        """Reads the documents; raises DataError if a source cannot be read."""
        for part in parts:
            begun_s = time.perf_counter()
            self._reading = field_of(self.setups[part.source].name)
            try:
                with retry.report_retries_to(self._retries):
                    read = self._loader.documents(part.source).read(
                        part.numbers, share=part.share, anchor=part.anchor
                    )
            except (ValueError, OSError) as error:
                raise DataError(f"{self._reading}: {error}") from error
            run = RunHead.of(read, time.perf_counter() - begun_s).run(part, read.ids, "trainer")
            # A share of a grouped source may hold none of these documents.
            if not len(run.numbers):
                continue
            self._documents += len(run.numbers)
            self._busy_s += run.read_s
            if read.starts is not None:
                # Mapped ids: starts are places in the map of the index, and documents need not be adjacent.
                run.starts, run.lengths = read.starts, read.lengths.astype(np.int64)
            self._runs.append(run)

    @property
    def retries(self) -> int:
        return self._retries.count

    def _tell(self, line: str, wait_s: float) -> None:
        self._messages += [f"data: {self._reading}: {line}"] if line else []

    def take_messages(self) -> list[str]:
        """Returns messages about repeated reads since the last call."""
        messages, self._messages = self._messages, []
        return messages

    def connections(self) -> list[Any]:
        return []

    def collect(self) -> list[ChunkRun]:
        runs, self._runs = self._runs, []
        return runs

    def release(self, run: ChunkRun) -> None:
        pass

    def states(self) -> list[LoaderState]:
        if (now_s := time.monotonic()) > self._memory_until_s:  # asking takes 50 us, and each batch would
            self._memory_bytes, self._memory_until_s = resident_bytes() or 0, now_s + _MEMORY_EVERY_S
        decoded = self._loader.decoded
        return [
            LoaderState(
                "trainer", 0, self._memory_bytes, self._documents, self._busy_s, self._all_sources, decoded
            )
        ]

    def place(self, placement: dict[str, tuple[int, ...]]) -> None:
        pass

    def close(self) -> None:
        # Also sources that were never read: closing those does nothing.
        for source in range(len(self.setups)):
            self._loader.close(source)
