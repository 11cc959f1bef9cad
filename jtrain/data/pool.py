"""The Source Loaders as a constructor sees them: ask for documents, take what has come, give back what is used up."""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jtrain.data.documents import SourceSetup
from jtrain.data.forkserver import Child, Door
from jtrain.data.loader import (
    DOCUMENTS,
    IDENTITY_AT,
    IDLE,
    MEMORY_BYTES,
    NUMBER,
    OPENING,
    READING,
    SINCE_NS,
    SOURCE,
    STATE,
    LoaderSetup,
    Part,
    padded,
)
from jtrain.data.runs import DataError, LoaderState, Run, starts_of
from jtrain.data.slab import Slab
from jtrain.data.source import field_of

IN_FLIGHT = 2
"""Requests a loader holds at a time: it never waits for the next one, and few are lost with it."""

MOST_DEATHS = 2
"""So many loaders may die at one document that they were asked for alone, before it is held to be the cause.

One that hangs there is enough. Both come on top of the first time, when it was asked for among others.
"""

OPENING_TIMES = 10
"""Opening a source may take so many times as long as reading a document: it may list, fetch and index files."""

SLAB_BYTES = 1 << 20
"""A loader's slab to begin with; it grows by half of itself."""


@runtime_checkable
class Pool(Protocol):
    """What a constructor needs of its loaders, wherever they run."""

    def request(self, parts: list[Part], *, first: bool = False) -> None:
        """Asks for documents; `first` before everything that was asked for and is not begun."""
        ...

    def connections(self) -> list[Any]:
        """What to wait on, with `multiprocessing.connection.wait`; empty where nothing is ever waited for."""
        ...

    def collect(self) -> list[Run]:
        """What has come since. Looks after the loaders, too: call it at least once a second.

        Raises:
          DataError: the stream cannot go on.
        """
        ...

    def release(self, run: Run) -> None:
        """Gives back a run's memory; its arrays must not be looked at any more."""
        ...

    def states(self) -> list[LoaderState]: ...

    def place(self, placement: dict[str, tuple[int, ...]]) -> None:
        """Who reads what from now on: loader -> its sources. Starts loaders and lets others go."""
        ...

    def close(self) -> None: ...


@dataclasses.dataclass(eq=False)
class _Request:
    """Goes to one loader: `loader` while there is one of that name, or any that has the first part's source."""

    parts: list[Part]
    loader: str | None

    @property
    def is_one_document(self) -> bool:
        return len(self.parts) == 1 and len(self.parts[0].numbers) == 1


class _Loader:
    """One loader process, from outside."""

    def __init__(self, name: str, child: Child, setups: tuple[SourceSetup, ...], slab: Slab) -> None:
        self.name = name
        self.child = child
        self.slab = slab
        self.in_flight: dict[int, _Request] = {}
        self.sources: set[int] = set()
        self.opened: set[int] = set()
        self.freed: list[int] = []  # places in its slab that it does not know of yet
        self.busy_s = 0.0
        self.retiring = False
        child.connection.send(LoaderSetup(setups))

    def at(self) -> tuple[int, int, int, str, float]:
        """Its watermark: state, source, document, `file:number`, and for how many seconds."""
        header = self.slab.header
        identity = header[IDENTITY_AT:].tobytes().partition(b"\0")[0].decode(errors="replace")
        seconds = (time.monotonic_ns() - int(header[SINCE_NS])) / 1e9
        return int(header[STATE]), int(header[SOURCE]), int(header[NUMBER]), identity, seconds


class ProcessPool:
    """Loader processes, with standbys.

    A loader that dies, or stays at one document for longer than `read_timeout_s`, is replaced by a standby that is
    already up, which is asked for the same documents again: the stream does not notice. A document that took the
    loader with it again and again is the stream's error, or is skipped and counted, as `data.on_bad_record` says.

    Args:
      setups: the sources.
      door: of the forkserver.
      placement: loader name -> its sources, to begin with.
      shadows: standbys.
      read_timeout_s: for one document; opening a source may take ten times as long.
      say: told what a person should know.
      observe: told each run that comes.
    """

    def __init__(
        self,
        setups: tuple[SourceSetup, ...],
        door: Door,
        *,
        placement: dict[str, tuple[int, ...]],
        shadows: int,
        read_timeout_s: float,
        say: Callable[[str], None],
        observe: Callable[[Run], None] = lambda run: None,
    ) -> None:
        self._setups = setups
        self._door = door
        self._observe = observe
        self._read_timeout_s = read_timeout_s
        self._say = say
        self._waiting: collections.deque[_Request] = collections.deque()
        self._loaders: dict[str, _Loader] = {}
        self._skip: dict[int, set[int]] = collections.defaultdict(set)
        self._deaths: collections.Counter[tuple[int, int]] = collections.Counter()
        self._next_request = 0
        self._fruitless = 0  # loaders lost since a run came
        self.place(placement)
        self._shadows = [self._start(f"shadow-{i}") for i in range(shadows)]

    def request(self, parts: list[Part], *, first: bool = False) -> None:
        at_home: dict[int, list[str]] = collections.defaultdict(list)
        for loader in self._loaders.values():
            for source in loader.sources:
                at_home[source].append(loader.name)
        requests: list[_Request] = []
        together: dict[str, _Request] = {}
        for part in parts:
            names = at_home[part.source]
            if len(names) != 1:  # whoever of them is free
                requests.append(_Request([part], None))
            elif names[0] in together:
                together[names[0]].parts.append(part)
            else:
                together[names[0]] = _Request([part], names[0])
                requests.append(together[names[0]])
        if first:
            self._waiting.extendleft(reversed(requests))
        else:
            self._waiting.extend(requests)
        self._hand_out()

    def connections(self) -> list[Connection]:
        return [loader.child.connection for loader in [*self._loaders.values(), *self._shadows]]

    def collect(self) -> list[Run]:
        runs: list[Run] = []
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
                state, *_, seconds = loader.at()
                limit_s = self._read_timeout_s * (OPENING_TIMES if state == OPENING else 1)
                if loader.in_flight and state != IDLE and seconds > limit_s:
                    self._lost(loader, f"has not moved for {limit_s:g} s (data.read_timeout_s)")
                    continue
            if loader.retiring and not loader.in_flight:
                self._end(loader)
                del self._loaders[loader.name]
        for at, shadow in enumerate(self._shadows):
            if shadow.child.connection.poll():  # a standby has nothing to say: this is its end
                self._end(shadow)
                self._say(f"data: standby {shadow.name} died; another one takes its place")
                self._shadows[at] = self._start(shadow.name)
        self._hand_out()
        return runs

    def release(self, run: Run) -> None:
        loader, start = run.place
        loader.freed.append(start)

    def states(self) -> list[LoaderState]:
        found = []
        for loader in self._loaders.values():
            header = loader.slab.header
            waiting = [r for r in self._waiting if r.loader == loader.name or r.parts[0].source in loader.sources]
            queued = len(loader.in_flight) + len(waiting)
            numbers = int(header[MEMORY_BYTES]), int(header[DOCUMENTS]), loader.busy_s
            found.append(LoaderState(loader.name, queued, *numbers, tuple(sorted(loader.sources))))
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
                with contextlib.suppress(ConnectionError):  # it is dead: the next collect finds out
                    loader.child.connection.send(("close", gone))
                loader.opened.discard(gone)
            loader.sources = set(sources)
        self._hand_out()

    def close(self) -> None:
        for loader in [*self._loaders.values(), *self._shadows]:
            self._end(loader)
        self._loaders, self._shadows = {}, []

    def _start(self, name: str) -> _Loader:
        slab = Slab.create(SLAB_BYTES)
        child = self._door.start("loader", f"jtrain-{name}", (slab.descriptor,))
        return _Loader(name, child, self._setups, slab)

    def _end(self, loader: _Loader) -> None:
        loader.child.kill()
        loader.child.close()
        loader.slab.close()

    def _hand_out(self) -> None:
        """Gives waiting requests to loaders that have room: of several that read a source, the first to be free."""
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
                    break  # it is dead: collect finds out, and takes back what is in flight
            self._waiting.extendleft(reversed(left))

    def _take(self, loader: _Loader, answer: tuple[Any, ...], runs: list[Run]) -> None:
        kind, number, *rest = answer
        request = loader.in_flight.pop(number)
        if kind == "failed":
            source, message = rest
            raise DataError(f"{field_of(self._setups[source].name)}: {message}")
        self._fruitless = 0
        (found,) = rest
        for part, (start, ids_bytes, dtype, skipped, seconds) in zip(request.parts, found, strict=True):
            lengths_bytes = len(part.numbers) * 4
            lengths = loader.slab.view(start, lengths_bytes).view(np.int32)
            ids = loader.slab.view(start + padded(lengths_bytes), ids_bytes).view(dtype)
            loader.busy_s += seconds
            run = Run(part.source, part.numbers, starts_of(lengths), ids, dict(skipped), seconds, loader.name)
            run.place = loader, start
            self._observe(run)
            runs.append(run)

    def _lost(self, loader: _Loader, why: str) -> None:
        """Puts a standby in a loader's place."""
        state, source, number, identity, _ = loader.at()
        where = "while it was idle"
        if state == OPENING:
            where = f"opening {field_of(self._setups[source].name)}"
        elif state != IDLE:
            where = f"at {field_of(self._setups[source].name)}, document {number} ({identity})"
        self._end(loader)
        again = list(loader.in_flight.values())  # the first is the one that it was at
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
            self._deaths[source, OPENING] += 1
            if self._deaths[source, OPENING] >= MOST_DEATHS:
                raise DataError(f"a loader {why} {where}, again and again. Look at that source.")
        elif again:  # one document at a time from here on, to know which one it is
            again[:1] = [_Request([one], again[0].loader) for part in again[0].parts for one in part.each()]
        self._fruitless += 1
        if self._fruitless > 5 + len(self._loaders):
            raise DataError(f"{self._fruitless} loaders were lost in a row, the last {where}: it {why}. See stderr.")
        begun_s = time.perf_counter()
        successor = self._shadows.pop(0) if self._shadows else self._start(loader.name)
        was = successor.name
        successor.name, successor.sources, successor.retiring = loader.name, loader.sources, loader.retiring
        self._loaders[loader.name] = successor
        self._waiting.extendleft(reversed(again))
        if was.startswith("shadow"):
            self._shadows.append(self._start(was))
        milliseconds = (time.perf_counter() - begun_s) * 1e3
        self._say(f"data: {loader.name} {why} {where}; {was} took over in {milliseconds:.0f} ms")
