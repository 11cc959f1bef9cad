"""Documents read without a loader process: for `data.engine=inline`, and wherever a few are looked at."""

import time
from typing import Any

from jtrain.data.documents import SourceSetup
from jtrain.data.loader import Part, SourceLoader, resident_bytes
from jtrain.data.runs import DataError, LoaderState, Run, starts_of
from jtrain.data.source import field_of


class InlinePool:
    """No loader process at all: reads when asked, in the caller's thread."""

    def __init__(self, setups: tuple[SourceSetup, ...]) -> None:
        self._setups = setups
        self._loader = SourceLoader(setups)
        self._ready: list[Run] = []
        self._documents = 0
        self._busy_s = 0.0

    def request(self, parts: list[Part], *, first: bool = False) -> None:
        """Reads. Raises DataError."""
        for part in parts:
            begun_s = time.perf_counter()
            try:
                read = self._loader.documents(part.source).read(part.numbers, records=part.records)
            except (ValueError, OSError) as error:
                raise DataError(f"{field_of(self._setups[part.source].name)}: {error}") from error
            seconds = time.perf_counter() - begun_s
            self._documents += len(part.numbers)
            self._busy_s += seconds
            skipped = dict(read.skipped)
            self._ready.append(
                Run(part.source, part.numbers, starts_of(read.lengths), read.ids, skipped, seconds, "trainer")
            )

    def connections(self) -> list[Any]:
        return []

    def collect(self) -> list[Run]:
        ready, self._ready = self._ready, []
        return ready

    def release(self, run: Run) -> None:
        pass

    def states(self) -> list[LoaderState]:
        everything = tuple(range(len(self._setups)))
        return [LoaderState("trainer", 0, resident_bytes(), self._documents, self._busy_s, everything)]

    def place(self, placement: dict[str, tuple[int, ...]]) -> None:
        pass

    def close(self) -> None:
        for source in range(len(self._setups)):
            self._loader.close(source)
