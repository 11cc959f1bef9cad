"""Pool of loader processes of this host, with standbys; it finds the document that no loader survives."""

import collections
import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from jtrain.data.loaders.forkserver import ForkserverClient
from jtrain.data.loaders.loader import DECODED, DOCUMENTS, IDLE, MEMORY_BYTES, OPENED, OPENING, SINCE_NS
from jtrain.data.loaders.loader_process import LoaderProcess, Request
from jtrain.data.loaders.messages import ChunkRun, DataError, LoaderState, RequestPart
from jtrain.data.loaders.shared_memory import SharedMemory
from jtrain.data.sources.opening import FIRST_LINE_AFTER_S, LINE_EVERY_S, Opened
from jtrain.data.sources.source import field_of
from jtrain.data.stream.source_setup import SourceSetup

IN_FLIGHT = 2
"""Requests that a loader holds at a time: enough that it never waits for the next one, few enough to lose
with it."""

OPENING_TIMES = 10
"""Ratio of the time limits for opening a source and for reading a document; opening may list, fetch and index
files."""

SHARED_BYTES = 1 << 20
"""Size of a loader's shared memory at first; it grows by half of itself."""

MAX_DEATHS = 2
"""Loaders that must die while reading the same document alone before it counts as the cause.

A single loader that hangs there is enough. The first death or hang, in a request for several documents, is
not counted.
"""

_OPENING_SOURCE = -1
"""Stands for a document's number where loaders were lost before reading one: opening or decoding a source."""


class ProcessPool:
    """Pool of loader processes.

    A loader that dies, or that spends more than `data.read_timeout_s` on one document, is replaced by a
    running standby, and its requests are made again: the stream of documents stays the same. The documents of
    the request that it was reading are then read one at a time. If loaders are lost at the same document
    again and again, the stream ends with an error, or skips and counts the document, according to
    `data.on_bad_record`.

    Args:
      setups: the sources.
      forkserver: starts the loader processes.
      placement: initial placement, loader name -> its sources.
      standbys: number of standbys.
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
        standbys: int,
        read_timeout_s: float,
        say: Callable[[str], None],
        observe: Callable[[ChunkRun], None] = lambda run: None,
    ) -> None:
        self.retries = 0
        self._setups = setups
        self._say = say
        self._forkserver = forkserver
        self._observe = observe
        self._read_timeout_s = read_timeout_s
        self.loaders: dict[str, LoaderProcess] = {}
        self._placed_sources: set[int] = set()
        self._number = itertools.count()
        self._urgent_requests: collections.deque[Request] = collections.deque()
        self._normal_requests: collections.deque[Request] = collections.deque()
        self._skip: dict[int, set[int]] = collections.defaultdict(set)
        self._deaths: collections.Counter[tuple[int, int]] = collections.Counter()
        self._losses_in_a_row = 0  # loaders lost since documents last arrived
        self.place(placement)
        # After the loaders, which are needed first.
        self._standbys = [self._start(f"standby-{i}") for i in range(standbys)]

    def request(self, parts: list[RequestPart], *, first: bool = False) -> None:
        (self._urgent_requests if first else self._normal_requests).extend(self._requests_for(parts))
        self._send_requests()

    def connections(self) -> list[Connection]:
        return [loader.child.connection for loader in [*self.loaders.values(), *self._standbys]]

    def collect(self) -> list[ChunkRun]:
        runs: list[ChunkRun] = []
        for loader in list(self.loaders.values()):
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
                del self.loaders[loader.name]
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
        for loader in self.loaders.values():
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
        for name, loader in self.loaders.items():
            # A retiring loader answers what it was asked, and ends in `collect`.
            loader.is_retiring = name not in placement
            if loader.is_retiring:
                loader.sources = set()
        for name, sources in placement.items():
            if name not in self.loaders:
                self.loaders[name] = self._start(name)
            loader = self.loaders[name]
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
        for loader in [*self.loaders.values(), *self._standbys]:
            self._end(loader)
        self.loaders, self._standbys = {}, []

    def _start(self, name: str) -> LoaderProcess:
        shared = SharedMemory.create(SHARED_BYTES)
        child = self._forkserver.start("loader", f"jtrain-{name}", (shared.descriptor,))
        return LoaderProcess(name, child, self._setups, shared)

    def _end(self, loader: LoaderProcess) -> None:
        loader.child.kill()
        loader.child.close()
        loader.shared.close()

    def _requests_for(self, parts: list[RequestPart]) -> list[Request]:
        """Returns a request for each loader with its shares, and one for each part that any may take."""
        requests: list[Request] = []
        by_loader: dict[str, Request] = {}
        for part in parts:
            names = [loader.name for loader in self.loaders.values() if part.source in loader.sources]
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
        """Sends the requests for which there is a loader with room, the urgent ones first."""
        # `collect` calls this every time; without room the queues need no walk.
        if all(len(loader.in_flight) >= IN_FLIGHT for loader in self.loaders.values()):
            return
        for queue in (self._urgent_requests, self._normal_requests):
            # Each request once: those without a loader rotate to the end, in their order.
            for _ in range(len(queue)):
                request = queue.popleft()
                if (loader := self._loader_for(request)) is None:
                    queue.append(request)
                    continue
                request.parts = [self._mark_skipped(part) for part in request.parts]
                self._send(loader, request)

    def _mark_skipped(self, part: RequestPart) -> RequestPart:
        if part.source not in self._skip:
            return part
        skip = self._skip[part.source].intersection(part.numbers.tolist())
        return dataclasses.replace(part, skip=part.skip | skip)

    def _loader_for(self, request: Request) -> LoaderProcess | None:
        """Returns a loader with room that answers a request; None if there is none now."""
        # A request for a loader that is gone may go to any that reads the source.
        if request.loader in self.loaders:
            candidates = [self.loaders[request.loader]]
        else:
            source = request.parts[0].source
            candidates = [
                loader
                for loader in self.loaders.values()
                if source in loader.sources or source not in self._placed_sources
            ]
        return next(
            (loader for loader in candidates if not loader.is_retiring and len(loader.in_flight) < IN_FLIGHT),
            None,
        )

    def _send(self, loader: LoaderProcess, request: Request) -> None:
        number = next(self._number)
        # Before it is sent: a loader that dies meanwhile has it among its requests.
        loader.in_flight[number] = request
        loader.opened |= {part.source for part in request.parts}
        # A loader that has died raises here: `collect` notices, and makes its requests again.
        with contextlib.suppress(ConnectionError):
            loader.child.connection.send(("read", number, request.parts))

    def _take(self, loader: LoaderProcess, answer: tuple[Any, ...], runs: list[ChunkRun]) -> None:
        match answer:
            case "again", source, line:
                self.retries += 1
                if line:
                    self._say(f"data: {self._field(source)}: {line}")
            case "failed", source, message:
                raise DataError(f"{self._field(source)}: {message}")
            case "run", number, heads:
                self._losses_in_a_row = 0
                for part, (start, head) in zip(loader.in_flight.pop(number).parts, heads, strict=True):
                    # The source could be opened: only losses in a row at the opening end the stream.
                    self._deaths.pop((part.source, _OPENING_SOURCE), None)
                    loader.busy_s += head.read_s
                    # A share of a grouped source may have no group of this part.
                    if not len(head.lengths):
                        loader.freed.append(start)
                        continue
                    run = head.run(part, loader.shared.view(start, head.ids_bytes), loader.name)
                    run.payload = loader, start
                    self._observe(run)
                    runs.append(run)

    def _say_opening(self, loader: LoaderProcess, source: int, seconds: float) -> None:
        """Says from time to time how far a loader is that takes long to open a source."""
        begun_ns = int(loader.shared.header[SINCE_NS])
        if seconds < (
            loader.last_line[1] + LINE_EVERY_S if begun_ns == loader.last_line[0] else FIRST_LINE_AFTER_S
        ):
            return
        loader.last_line = begun_ns, seconds
        opened = Opened(*loader.shared.header[OPENED].tolist())
        self._say(opened.line(f"{loader.name} is opening {self._field(source)}", seconds))

    def _field(self, source: int) -> str:
        return field_of(self._setups[source].name)

    def _replace(self, loader: LoaderProcess, cause: str) -> None:
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
        # One loss of each loader, and five of their successors.
        if self._losses_in_a_row > 5 + len(self.loaders):
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
        self.loaders[loader.name] = successor
        if successor_name.startswith("standby"):
            self._standbys.append(self._start(successor_name))
        milliseconds = (time.perf_counter() - begun_s) * 1e3
        self._say(
            f"data: {loader.name} {cause} {activity}; {successor_name} took over in {milliseconds:.0f} ms"
        )

    def _repeat_requests(
        self,
        loader: LoaderProcess,
        cause: str,
        activity: str,
        *,
        opening: int | None = None,
        reading: bool = True,
    ) -> None:
        """Makes the requests of a lost loader again, the one that it was reading one document at a time.

        Args:
          cause: `died`, or in which way it hung.
          activity: what it was doing, for messages.
          opening: source that it was opening; None if it was not.
          reading: False if it is known to have done nothing.

        Raises:
          DataError: no loader survives a document.
        """
        requests, loader.in_flight = list(loader.in_flight.values()), {}
        self._losses_in_a_row += 1
        if requests and opening is not None:
            self._deaths[opening, _OPENING_SOURCE] += 1
            # A source cannot be left out as a document can, so the second loader lost there ends the stream.
            if self._deaths[opening, _OPENING_SOURCE] >= 2:
                raise DataError(f"a loader {cause} {activity}, again and again. Check that source.")
        elif requests:
            single_requests = requests[0].each()
            if len(single_requests) == 1 and reading:
                self._count_death(requests[0], cause, activity)
            # One document at a time, so that a second death names the document.
            requests[:1] = single_requests
        # Reversed, since `extendleft` reverses: the oldest request stays first.
        self._urgent_requests.extendleft(reversed(requests))

    def _count_death(self, request: Request, cause: str, activity: str) -> None:
        """Counts a loader lost while it read one document; if that is the cause, leaves it out or raises."""
        [part], is_hung = request.parts, cause != "died"
        number = int(part.numbers[0])
        self._deaths[part.source, number] += 1
        if not is_hung and self._deaths[part.source, number] < MAX_DEATHS:
            return
        if self._setups[part.source].on_bad_record == "fail":
            raise DataError(
                f"a loader {cause} {activity}, again and again. Mend or remove that file, "
                + ("raise data.read_timeout_s, " if is_hung else "")
                + "or set data.on_bad_record='skip' to leave the document out and count it."
            )
        self._say(f"data: {activity.removeprefix('at ')} is left out: its loader {cause}, again and again")
        self._skip[part.source].add(number)
