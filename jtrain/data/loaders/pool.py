"""Pools of Source Loaders, as a constructor uses them: request documents, collect those read, release their memory."""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jtrain.data.loaders.forkserver import Child, ForkserverClient
from jtrain.data.loaders.loader import (
    DECODED,
    DOCUMENTS,
    IDENTITY_AT,
    IDLE,
    MEMORY_BYTES,
    NUMBER,
    OPENED,
    OPENING,
    READING,
    SINCE_NS,
    SOURCE,
    STATE,
    LoaderSetup,
    RequestPart,
    padded,
)
from jtrain.data.loaders.messages import ChunkRun, DataError, LoaderState, runs_of_bytes, starts_of
from jtrain.data.loaders.shared_memory import SharedMemory
from jtrain.data.sources.opening import SAID_AFTER_S, SAID_EVERY_S, Opened
from jtrain.data.sources.source import field_of
from jtrain.data.stream.source_setup import SourceSetup

IN_FLIGHT = 2
"""Requests that a loader holds at a time: enough that it never waits for the next one, few enough to lose with it."""

MOST_DEATHS = 2
"""Number of loaders that must die while reading the same document alone before the document counts as the cause.

A single loader that hangs there is enough. The first death or hang, in a request for several documents, is not counted.
"""

OPENING_TIMES = 10
"""Ratio of the time limits for opening a source and for reading a document; opening may list, fetch and index files."""

_OPENING = -1
"""In place of a document's number: deaths while a source was opened, or a row group decoded, and none since read."""

SHARED_BYTES = 1 << 20
"""Size of a loader's shared memory at first; it grows by half of itself."""


@runtime_checkable
class Pool(Protocol):
    """Interface between a constructor and its loaders, wherever these run."""

    @property
    def retries(self) -> int:
        """Number of reads that were repeated since the pool began."""
        ...

    def request(self, parts: list[RequestPart], *, first: bool = False) -> None:
        """Requests documents; with `first` they go before all requests that no loader has begun.

        A part of a grouped source may be answered in several runs, whose numbers are together those of the part, or of
        its share.
        """
        ...

    def connections(self) -> list[Any]:
        """Returns connections to wait on with `multiprocessing.connection.wait`; none for a pool without processes."""
        ...

    def collect(self) -> list[ChunkRun]:
        """Returns the documents read since the last call and replaces lost loaders; call it at least once a second.

        Raises:
          DataError: the stream cannot continue.
        """
        ...

    def release(self, run: ChunkRun) -> None:
        """Frees the memory of a run; its arrays must not be used afterwards."""
        ...

    def states(self) -> list[LoaderState]: ...

    def place(self, placement: dict[str, tuple[int, ...]]) -> None:
        """Sets the placement, loader -> its sources, from now on; starts new loaders and retires those left out."""
        ...

    def close(self) -> None: ...


@dataclasses.dataclass(eq=False)
class _Request:
    """Request to one loader: to `loader` if there is one of that name, otherwise to any that reads the first source."""

    parts: list[RequestPart]
    loader: str | None

    @property
    def is_one_document(self) -> bool:
        return len(self.parts) == 1 and len(self.parts[0].numbers) == 1


class _Loader:
    """Loader process, as the pool sees it."""

    def __init__(self, name: str, child: Child, setups: tuple[SourceSetup, ...], shared: SharedMemory) -> None:
        self.name = name
        self.child = child
        self.shared = shared
        self.in_flight: dict[int, _Request] = {}
        self.sources: set[int] = set()
        self.opened: set[int] = set()
        self.freed: list[int] = []  # places in `shared` that were given back; the loader has not been told yet
        self.busy_s = 0.0
        self.retiring = False
        self.said: tuple[int, float] = (
            0,
            0.0,
        )  # start of the opening that the log said last, in ns, and how long it had taken then
        child.connection.send(LoaderSetup(setups))

    def at(self) -> tuple[int, int, int, str, float]:
        """Returns what the loader is doing: state, source, document, `file:number`, and seconds since that began."""
        header = self.shared.header
        identity = header[IDENTITY_AT:].tobytes().partition(b"\0")[0].decode(errors="replace")
        seconds = (time.monotonic_ns() - int(header[SINCE_NS])) / 1e9
        return int(header[STATE]), int(header[SOURCE]), int(header[NUMBER]), identity, seconds


class ProcessPool:
    """Pool of loader processes with standbys.

    A loader that dies, or that spends more than `read_timeout_s` on one document, is replaced by a running standby,
    which gets the same requests: the stream of documents stays the same. If loaders are lost at the same document again
    and again, the stream ends with an error, or skips and counts the document, according to `data.on_bad_record`.

    Args:
      setups: the sources.
      forkserver: starts the loader processes.
      placement: initial placement, loader name -> its sources.
      shadows: number of standbys.
      read_timeout_s: time limit for reading one document; opening a source may take ten times as long.
      say: called with messages for the user.
      observe: called with each run of documents that arrives.
    """

    def __init__(
        self,
        setups: tuple[SourceSetup, ...],
        forkserver: ForkserverClient,
        *,
        placement: dict[str, tuple[int, ...]],
        shadows: int,
        read_timeout_s: float,
        say: Callable[[str], None],
        observe: Callable[[ChunkRun], None] = lambda run: None,
    ) -> None:
        self._setups = setups
        self._forkserver = forkserver
        self._observe = observe
        self._read_timeout_s = read_timeout_s
        self._say = say
        self._waiting: collections.deque[_Request] = collections.deque()
        self._loaders: dict[str, _Loader] = {}
        self._skip: dict[int, set[int]] = collections.defaultdict(set)
        self._deaths: collections.Counter[tuple[int, int]] = collections.Counter()
        self._next_request = 0
        self.retries = 0
        self._fruitless = 0  # loaders lost since documents last arrived
        self.place(placement)
        self._standbys = [self._start(f"shadow-{i}") for i in range(shadows)]

    def request(self, parts: list[RequestPart], *, first: bool = False) -> None:
        at_home: dict[int, list[str]] = collections.defaultdict(list)
        for loader in self._loaders.values():
            for source in loader.sources:
                at_home[source].append(loader.name)
        requests: list[_Request] = []
        together: dict[str, _Request] = {}
        for part in parts:
            names = at_home[part.source]
            if not names or (len(names) > 1 and not self._setups[part.source].grouped):  # the first that is free
                requests.append(_Request([part], None))
                continue
            for name, share in zip(names, part.split(len(names)), strict=True):
                if name not in together:
                    together[name] = _Request([], name)
                    requests.append(together[name])
                together[name].parts.append(share)
        if first:
            self._waiting.extendleft(reversed(requests))
        else:
            self._waiting.extend(requests)
        self._hand_out()

    def connections(self) -> list[Connection]:
        return [loader.child.connection for loader in [*self._loaders.values(), *self._standbys]]

    def collect(self) -> list[ChunkRun]:
        runs: list[ChunkRun] = []
        for loader in list(self._loaders.values()):
            try:
                if loader.freed:
                    loader.child.connection.send(("free", loader.freed))
                    loader.freed = []
                while loader.child.connection.poll():
                    self._take(loader, loader.child.connection.recv(), runs)
            except (EOFError, ConnectionError):
                self._lost(loader, "died")
                continue
            else:
                state, source, *_, seconds = loader.at()
                if loader.in_flight and state == OPENING:
                    self._say_opening(loader, source, seconds)
                limit_s = self._read_timeout_s * (OPENING_TIMES if state == OPENING else 1)
                if loader.in_flight and state != IDLE and seconds > limit_s:
                    self._lost(loader, f"has not moved for {limit_s:g} s (data.read_timeout_s)")
                    continue
            if loader.retiring and not loader.in_flight:
                self._end(loader)
                del self._loaders[loader.name]
        for at, standby in enumerate(self._standbys):
            if standby.child.connection.poll():  # a standby sends nothing, so this is its end
                self._end(standby)
                self._say(f"data: standby {standby.name} died; another one takes its place")
                self._standbys[at] = self._start(standby.name)
        self._hand_out()
        return runs

    def release(self, run: ChunkRun) -> None:
        loader, start = run.place
        loader.freed.append(start)

    def states(self) -> list[LoaderState]:
        found = []
        for loader in self._loaders.values():
            header = loader.shared.header
            waiting = [r for r in self._waiting if r.loader == loader.name or r.parts[0].source in loader.sources]
            queued = len(loader.in_flight) + len(waiting)
            numbers = int(header[MEMORY_BYTES]), int(header[DOCUMENTS]), loader.busy_s
            sources = tuple(sorted(loader.sources))
            found.append(LoaderState(loader.name, queued, *numbers, sources, int(header[DECODED])))
        return found

    def place(self, placement: dict[str, tuple[int, ...]]) -> None:
        for name, loader in self._loaders.items():
            loader.retiring = name not in placement
            if loader.retiring:
                loader.sources = set()
        for name, sources in placement.items():
            if name not in self._loaders:
                self._loaders[name] = self._start(name)
            loader = self._loaders[name]
            for gone in loader.opened - set(sources):
                with contextlib.suppress(ConnectionError):  # it has died: the next collect notices
                    loader.child.connection.send(("close", gone))
                loader.opened.discard(gone)
            loader.sources = set(sources)
        self._hand_out()

    def close(self) -> None:
        for loader in [*self._loaders.values(), *self._standbys]:
            self._end(loader)
        self._loaders, self._standbys = {}, []

    def _start(self, name: str) -> _Loader:
        shared = SharedMemory.create(SHARED_BYTES)
        child = self._forkserver.start("loader", f"jtrain-{name}", (shared.descriptor,))
        return _Loader(name, child, self._setups, shared)

    def _end(self, loader: _Loader) -> None:
        loader.child.kill()
        loader.child.close()
        loader.shared.close()

    def _hand_out(self) -> None:
        """Sends waiting requests to loaders with room; if several read a source, to the first that is free."""
        if not self._waiting or all(len(loader.in_flight) >= IN_FLIGHT for loader in self._loaders.values()):
            return
        placed = {source for loader in self._loaders.values() for source in loader.sources}
        for loader in self._loaders.values():
            if loader.retiring:
                continue
            left: collections.deque[_Request] = collections.deque()
            while self._waiting and len(loader.in_flight) < IN_FLIGHT:
                request = self._waiting.popleft()
                if request.loader is not None and request.loader in self._loaders:
                    mine = request.loader == loader.name
                else:
                    mine = request.parts[0].source in loader.sources or request.parts[0].source not in placed
                if not mine:
                    left.append(request)
                    continue
                self._next_request += 1
                loader.in_flight[self._next_request] = request
                loader.opened |= {part.source for part in request.parts}
                parts = [
                    dataclasses.replace(p, skip=frozenset(self._skip[p.source])) if p.source in self._skip else p
                    for p in request.parts
                ]
                try:
                    loader.child.connection.send(("read", self._next_request, parts))
                except ConnectionError:
                    break  # it has died: collect notices, and requeues its requests
            self._waiting.extendleft(reversed(left))

    def _take(self, loader: _Loader, answer: tuple[Any, ...], runs: list[ChunkRun]) -> None:
        if answer[0] == "again":
            _, source, line = answer
            self.retries += 1
            if line:
                self._say(f"data: {field_of(self._setups[source].name)}: {line}")
            return
        kind, number, *rest = answer
        request = loader.in_flight.pop(number)
        if kind == "failed":
            source, message = rest
            raise DataError(f"{field_of(self._setups[source].name)}: {message}")
        self._fruitless = 0
        (found,) = rest
        for part, (start, ids_bytes, dtype, skipped, seconds, anchor, ignored, read) in zip(
            request.parts, found, strict=True
        ):
            loader.busy_s += seconds
            self._deaths.pop((part.source, _OPENING), None)
            numbers = part.numbers if read is None else read
            if not len(numbers):
                loader.freed.append(start)
                continue
            lengths_bytes = len(numbers) * 4
            lengths = loader.shared.view(start, lengths_bytes).view(np.int32)
            ids = loader.shared.view(start + padded(lengths_bytes), ids_bytes).view(dtype)
            run = ChunkRun(part.source, numbers, starts_of(lengths), ids, dict(skipped), seconds, loader.name)
            run.ignored, run.place, run.anchor = runs_of_bytes(ignored), (loader, start), anchor
            run.tag = part.tag
            self._observe(run)
            runs.append(run)

    def _say_opening(self, loader: _Loader, source: int, seconds: float) -> None:
        """Says from time to time how far a loader is that takes long to open a source."""
        begun_ns = int(loader.shared.header[SINCE_NS])
        if seconds < (loader.said[1] + SAID_EVERY_S if begun_ns == loader.said[0] else SAID_AFTER_S):
            return
        loader.said = begun_ns, seconds
        opened = Opened(*loader.shared.header[OPENED].tolist())
        self._say(opened.line(f"{loader.name} is opening {field_of(self._setups[source].name)}", seconds))

    def _lost(self, loader: _Loader, why: str) -> None:
        """Replaces a lost loader by a standby and requeues its requests."""
        state, source, number, identity, _ = loader.at()
        where = "while it was idle"
        if state == OPENING:
            where = f"opening {field_of(self._setups[source].name)}"
        elif state != IDLE:
            where = f"at {field_of(self._setups[source].name)}, document {number} ({identity})"
        self._end(loader)
        again = list(loader.in_flight.values())  # the first is the one that it was reading
        loader.in_flight = {}
        if again and state == READING and again[0].is_one_document:
            self._deaths[source, number] += 1
            hung = why != "died"
            if hung or self._deaths[source, number] >= MOST_DEATHS:
                if self._setups[source].on_bad_record == "fail":
                    raise DataError(
                        f"a loader {why} {where}, again and again. Mend or remove that file, "
                        + ("raise data.read_timeout_s, " if hung else "")
                        + "or set data.on_bad_record='skip' to leave the document out and count it."
                    )
                self._say(f"data: {where.removeprefix('at ')} is left out: its loader {why}, again and again")
                self._skip[source].add(number)
        elif again and state == OPENING:
            self._deaths[source, _OPENING] += 1
            if self._deaths[source, _OPENING] >= MOST_DEATHS:
                raise DataError(f"a loader {why} {where}, again and again. Check that source.")
        elif again:  # from here on one document at a time, to find the one that is the cause
            again[:1] = [_Request([one], again[0].loader) for part in again[0].parts for one in part.each()]
        self._fruitless += 1
        if self._fruitless > 5 + len(self._loaders):
            raise DataError(f"{self._fruitless} loaders were lost in a row, the last {where}: it {why}. See stderr.")
        begun_s = time.perf_counter()
        successor = self._standbys.pop(0) if self._standbys else self._start(loader.name)
        was = successor.name
        successor.name, successor.sources, successor.retiring = loader.name, loader.sources, loader.retiring
        self._loaders[loader.name] = successor
        self._waiting.extendleft(reversed(again))
        if was.startswith("shadow"):
            self._standbys.append(self._start(was))
        milliseconds = (time.perf_counter() - begun_s) * 1e3
        self._say(f"data: {loader.name} {why} {where}; {was} took over in {milliseconds:.0f} ms")
