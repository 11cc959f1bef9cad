"""Pool of loader processes of this host, with standbys."""

import contextlib
import itertools
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

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
    SINCE_NS,
    SOURCE,
    STATE,
)
from jtrain.data.loaders.messages import ChunkRun, DataError, LoaderState, RequestPart
from jtrain.data.loaders.pool import LoaderPool, Request
from jtrain.data.loaders.shared_memory import SharedMemory
from jtrain.data.sources.opening import FIRST_LINE_AFTER_S, LINE_EVERY_S, Opened
from jtrain.data.stream.source_setup import SourceSetup

IN_FLIGHT = 2
"""Requests that a loader holds at a time: enough that it never waits for the next one, few enough to lose
with it."""

OPENING_TIMES = 10
"""Ratio of the time limits for opening a source and for reading a document; opening may list, fetch and index
files."""

SHARED_BYTES = 1 << 20
"""Size of a loader's shared memory at first; it grows by half of itself."""


class _LoaderProcess:
    """Loader process, as the pool sees it."""

    def __init__(
        self, name: str, child: Child, setups: tuple[SourceSetup, ...], shared: SharedMemory
    ) -> None:
        self.name = name
        self.child = child
        self.shared = shared
        self.in_flight: dict[Any, Request] = {}
        self.sources: set[int] = set()
        self.opened: set[int] = set()
        # Addresses in `shared` that were given back; the loader has not been told yet.
        self.freed: list[int] = []
        self.busy_s = 0.0
        self.is_retiring = False
        # Start of the opening that the log said last, in ns, and how long it had taken then.
        self.last_line: tuple[int, float] = (0, 0.0)
        child.connection.send(setups)

    def activity(self) -> tuple[int, int, int, str, float]:
        """Returns the loader's state, source, document, its `file:number`, and seconds since that began."""
        header = self.shared.header
        identity = header[IDENTITY_AT:].tobytes().partition(b"\0")[0].decode(errors="replace")
        seconds = (time.monotonic_ns() - int(header[SINCE_NS])) / 1e9
        return int(header[STATE]), int(header[SOURCE]), int(header[NUMBER]), identity, seconds


class ProcessPool(LoaderPool[_LoaderProcess]):
    """Pool of loader processes. A lost one is replaced by a running standby.

    Args:
      setups: the sources.
      forkserver: starts the loader processes.
      placement: initial placement, loader name -> its sources.
      standbys: number of standbys.
      read_timeout_s: time limit for reading one document; opening a source may take ten times as long.
      say: called with messages for the user.
      observe: called with each run of documents that arrives.
    """

    max_deaths = 2

    def __init__(
        self,
        setups: tuple[SourceSetup, ...],
        forkserver: ForkserverClient,
        *,
        placement: dict[str, tuple[int, ...]],
        standbys: int,
        read_timeout_s: float,
        say: Callable[[str], None],
        observe: Callable[[ChunkRun], None] = lambda run: None,
    ) -> None:
        super().__init__(setups, say)
        self._forkserver = forkserver
        self._observe = observe
        self._read_timeout_s = read_timeout_s
        self._loaders: dict[str, _LoaderProcess] = {}
        self._placed_sources: set[int] = set()
        self._number = itertools.count()
        self.place(placement)
        # After the loaders, which are needed first.
        self._standbys = [self._start(f"standby-{i}") for i in range(standbys)]

    def connections(self) -> list[Connection]:
        return [loader.child.connection for loader in [*self._loaders.values(), *self._standbys]]

    def collect(self) -> list[ChunkRun]:
        runs: list[ChunkRun] = []
        for loader in list(self._loaders.values()):
            try:
                # Before the answers: the loader can reuse the memory for the requests that it still holds.
                if loader.freed:
                    loader.child.connection.send(("free", loader.freed))
                    loader.freed = []
                while loader.child.connection.poll():
                    self._take(loader, loader.child.connection.recv(), runs)
            # Answers taken before this error are no longer in flight: only the other requests are repeated.
            except (EOFError, ConnectionError):
                self._replace(loader, "died")
                continue
            else:
                # After the answers were taken: a loader that has answered is not judged by its last document.
                state, source, *_, seconds = loader.activity()
                if loader.in_flight and state == OPENING:
                    self._say_opening(loader, source, seconds)
                limit_s = self._read_timeout_s * (OPENING_TIMES if state == OPENING else 1)
                if loader.in_flight and state != IDLE and seconds > limit_s:
                    self._replace(loader, f"has not moved for {limit_s:g} s (data.read_timeout_s)")
                    continue
            if loader.is_retiring and not loader.in_flight:
                self._end(loader)
                del self._loaders[loader.name]
        for i, standby in enumerate(self._standbys):
            if standby.child.connection.poll():  # a standby sends nothing, so this is its end
                self._end(standby)
                self._say(f"data: standby {standby.name} died; another one takes its place")
                self._standbys[i] = self._start(standby.name)
        self._send_requests()
        return runs

    def release(self, run: ChunkRun) -> None:
        loader, start = run.payload
        loader.freed.append(start)

    def states(self) -> list[LoaderState]:
        states = []
        for loader in self._loaders.values():
            header = loader.shared.header
            unsent = (*self._urgent_requests, *self._normal_requests)
            queued = len(loader.in_flight) + sum(
                request.loader == loader.name or request.parts[0].source in loader.sources
                for request in unsent
            )
            numbers = int(header[MEMORY_BYTES]), int(header[DOCUMENTS]), loader.busy_s
            sources = tuple(sorted(loader.sources))
            states.append(LoaderState(loader.name, queued, *numbers, sources, int(header[DECODED])))
        return states

    def place(self, placement: dict[str, tuple[int, ...]]) -> None:
        for name, loader in self._loaders.items():
            loader.is_retiring = name not in placement
            if loader.is_retiring:
                loader.sources = set()
        for name, sources in placement.items():
            if name not in self._loaders:
                self._loaders[name] = self._start(name)
            loader = self._loaders[name]
            # Open sources hold indexes and decoded row groups, which count as memory of the loader.
            for closed_source in loader.opened - set(sources):
                with contextlib.suppress(ConnectionError):  # it has died: the next collect notices
                    loader.child.connection.send(("close", closed_source))
                loader.opened.discard(closed_source)
            loader.sources = set(sources)
        # Sources that no loader reads now may go to any, see `_loader_for`.
        self._placed_sources = {source for sources in placement.values() for source in sources}
        self._send_requests()

    def close(self) -> None:
        for loader in [*self._loaders.values(), *self._standbys]:
            self._end(loader)
        self._loaders, self._standbys = {}, []

    def _start(self, name: str) -> _LoaderProcess:
        shared = SharedMemory.create(SHARED_BYTES)
        child = self._forkserver.start("loader", f"jtrain-{name}", (shared.descriptor,))
        return _LoaderProcess(name, child, self._setups, shared)

    def _end(self, loader: _LoaderProcess) -> None:
        loader.child.kill()
        loader.child.close()
        loader.shared.close()

    def _requests_for(self, parts: list[RequestPart]) -> list[Request]:
        """Returns a request for each loader with its shares, and one for each part that any may take."""
        requests: list[Request] = []
        by_loader: dict[str, Request] = {}
        for part in parts:
            names = [loader.name for loader in self._loaders.values() if part.source in loader.sources]
            # Only parts of grouped sources are shared out; the first free loader takes another one whole.
            if not names or (len(names) > 1 and not self._setups[part.source].grouped):
                requests.append(Request([part], None))
                continue
            for name, share in zip(names, part.split(len(names)), strict=True):
                if name not in by_loader:
                    by_loader[name] = Request([], name)
                    requests.append(by_loader[name])
                by_loader[name].parts.append(share)
        return requests

    def _send_requests(self) -> None:
        # `collect` calls this every time; without room the queues need no walk.
        if any(len(loader.in_flight) < IN_FLIGHT for loader in self._loaders.values()):
            super()._send_requests()

    def _loader_for(self, request: Request) -> _LoaderProcess | None:
        if request.loader in self._loaders:
            candidates = [self._loaders[request.loader]]
        else:
            source = request.parts[0].source
            candidates = [
                loader
                for loader in self._loaders.values()
                if source in loader.sources or source not in self._placed_sources
            ]
        return next(
            (loader for loader in candidates if not loader.is_retiring and len(loader.in_flight) < IN_FLIGHT),
            None,
        )

    def _send(self, loader: _LoaderProcess, request: Request) -> None:
        number = next(self._number)
        # Before it is sent: a loader that dies meanwhile has it among its requests.
        loader.in_flight[number] = request
        loader.opened |= {part.source for part in request.parts}
        # A loader that has died raises here: `collect` notices, and makes its requests again.
        with contextlib.suppress(ConnectionError):
            loader.child.connection.send(("read", number, request.parts))

    def _take(self, loader: _LoaderProcess, answer: tuple[Any, ...], runs: list[ChunkRun]) -> None:
        match answer:
            case "again", source, line:
                self.retries += 1
                if line:
                    self._say(f"data: {self._field(source)}: {line}")
            case "failed", source, message:
                raise self._source_error(source, message)
            case "run", number, heads:
                for part, (start, head) in zip(self._take_answered(loader, number).parts, heads, strict=True):
                    loader.busy_s += head.read_s
                    if not len(head.lengths):
                        loader.freed.append(start)
                        continue
                    run = head.run(part, loader.shared.view(start, head.ids_bytes), loader.name)
                    run.payload = loader, start
                    self._observe(run)
                    runs.append(run)

    def _say_opening(self, loader: _LoaderProcess, source: int, seconds: float) -> None:
        """Says from time to time how far a loader is that takes long to open a source."""
        begun_ns = int(loader.shared.header[SINCE_NS])
        if seconds < (
            loader.last_line[1] + LINE_EVERY_S if begun_ns == loader.last_line[0] else FIRST_LINE_AFTER_S
        ):
            return
        loader.last_line = begun_ns, seconds
        opened = Opened(*loader.shared.header[OPENED].tolist())
        self._say(opened.line(f"{loader.name} is opening {self._field(source)}", seconds))

    def _replace(self, loader: _LoaderProcess, cause: str) -> None:
        """Replaces a lost loader by a standby."""
        state, source, number, identity, _ = loader.activity()
        activity = "while it was idle"
        if state == OPENING:
            activity = f"opening {self._field(source)}"
        elif state != IDLE:
            activity = f"at {self._field(source)}, document {number} ({identity})"
        self._end(loader)
        self._repeat_requests(
            loader, cause, activity, opening=source if state == OPENING else None, reading=state != IDLE
        )
        # Loaders that die one after another at different places: the machine or the setup is at fault.
        if self._losses_in_a_row > 5 + len(self._loaders):
            raise DataError(
                f"{self._losses_in_a_row} loaders were lost in a row, the last {activity}: it {cause}. See "
                "stderr."
            )
        begun_s = time.perf_counter()
        # A standby runs already and knows the sources; without one, a process is started first.
        successor = self._standbys.pop(0) if self._standbys else self._start(loader.name)
        successor_name = successor.name
        successor.name, successor.sources, successor.is_retiring = (
            loader.name,
            loader.sources,
            loader.is_retiring,
        )
        self._loaders[loader.name] = successor
        if successor_name.startswith("standby"):
            self._standbys.append(self._start(successor_name))
        milliseconds = (time.perf_counter() - begun_s) * 1e3
        self._say(
            f"data: {loader.name} {cause} {activity}; {successor_name} took over in {milliseconds:.0f} ms"
        )
